"""The ``flashdist`` command, as a shell sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from flashdist import checkpoint
from tests.checkpoint.test_contents import make


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path / "c", *make(), extra={"step": 3})
    return tmp_path / "c"


def test_inspect_as_json(command, saved):
    status, out, _ = command("inspect", saved, "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["world_size"], found["strategy"], found["step"]) == (1, "single", [3.0, 3.0])
    assert found["parameters"] == 20 * 48 + 48 * 48 + 48
    assert found["tensors"]["optim.body.weight.exp_avg"] == {"dtype": "int8", "shape": [48, 48], "pieces": 1}
    assert found["bytes"] == sum(file.stat().st_size for file in saved.glob("rank-*"))
    assert found["optimizer"]["class"] == "FlashAdamW"


def test_inspect_as_tables(command, saved):
    status, out, _ = command("inspect", saved, "--tensors")
    assert status == 0
    for text in ("FlashAdamW", "corrections", "model.body.weight", "bytes per parameter"):
        assert text in out


def test_verify(command, saved):
    status, out, _ = command("verify", saved)
    assert status == 0
    assert "all checksums fit" in out
    assert command("verify", "-q", saved)[:2] == (0, "")
    file = saved / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    status, out, err = command("verify", saved)
    assert (status, out) == (1, "")
    assert err.startswith("flashdist: the checkpoint at")
    assert "rank-00000.safetensors has" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_what_is_no_checkpoint_is_one_line(command, tmp_path, name):
    status, out, err = command(name, tmp_path / "nothing")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "no such folder" in err


@pytest.mark.parametrize("name", ["inspect", "verify", "plan"])
def test_help_has_examples(command, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "100")
    status, out, _ = command(name, "--help")
    assert status == 0
    assert f"Example: flashdist {name}" in out


def test_the_package_runs_as_a_program(saved):
    run = subprocess.run(
        [sys.executable, "-m", "flashdist", "verify", "-q", str(saved)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
