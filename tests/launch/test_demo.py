"""The demo's report, and its parts on a run small enough for a test; the whole of it is measured by running it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import demo
import pretrain
import pytest
import torch
from demo_report import KINDS, Run, plot, relative_difference, table
from rich.console import Console

from tests.support.pretraining import overrides


@pytest.fixture
def in_process(tmp_path, monkeypatch):
    """The demo with both launchers replaced by calls in this process, on one rank, and a tiny model."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    starts: list[int] = []

    def start(folder: Path, ranks: int, settings: list[str]) -> None:
        starts.append(ranks)
        assert pretrain.main([str(demo.CONFIG), f"run.folder={folder}", *settings]) == 0

    monkeypatch.setattr(demo, "pretrain", start)
    tiny = [setting for setting in overrides(tmp_path) if not setting.startswith(("train.steps", "train.warmup"))]
    arguments = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "new" / "picture"), *tiny]
    yield arguments, starts
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


def test_both_runs_are_trained_moved_and_compared(in_process, tmp_path, capsys):
    arguments, starts = in_process
    figures = tmp_path / "figures.json"
    demo.main([*arguments, "--steps", "6", "--json", str(figures)])
    assert starts == [2, 1, 2]
    assert (tmp_path / "new" / "picture").read_bytes().startswith(b"\x89PNG")
    written = json.loads(figures.read_text())
    reference, flash = written["runs"]
    assert [len(run["losses"]) for run in written["runs"]] == [6, 6]
    assert reference["losses"][0] == pytest.approx(flash["losses"][0], rel=1e-3)
    assert (reference["resumed_at"], flash["resumed_at"]) == (None, 3)
    assert written["relative_difference"] == pytest.approx(flash["validation_loss"] / reference["validation_loss"] - 1)
    fp32, small = reference["bytes_per_parameter"], flash["bytes_per_parameter"]
    assert [fp32[kind] for kind in ("weights", "moments", "gradients")] == [4, 8, 4]
    assert fp32["corrections"] == fp32["scales"] == 0
    assert small["weights"] == small["gradients"] == 2
    # 1-D parameters, a larger share here than in a real model, keep fp32 moments and a two-byte correction.
    assert small["corrections"] == pytest.approx(1, abs=0.01)
    assert small["moments"] == pytest.approx(2, abs=0.05)
    assert small["scales"] == pytest.approx(0.1875, abs=0.002)
    assert flash["checkpoint_bytes"] < reference["checkpoint_bytes"] / 2
    assert "total" in capsys.readouterr().out


def test_a_second_demo_replaces_the_first(in_process, tmp_path):
    arguments, _ = in_process
    (tmp_path / "runs" / "flash").mkdir(parents=True)
    (tmp_path / "runs" / "flash" / "step-00000009").mkdir()
    demo.main([*arguments, "--steps", "1"])
    assert not (tmp_path / "runs" / "flash" / "step-00000009").exists()


def test_a_run_that_fails_ends_the_demo(tmp_path):
    with pytest.raises(SystemExit, match="2"):
        demo.pretrain(tmp_path / "x", 1, ["train.stesp=3"])


def test_the_table_names_every_kind_and_the_differences(tmp_path):
    fp32 = dict.fromkeys(KINDS, 0.0) | {"weights": 4.0, "moments": 8.0, "gradients": 4.0}
    small = dict.fromkeys(KINDS, 1.0)
    runs = Run("a", [1.0, 0.9], 2.0, fp32, 2, 12.0, 5.0), Run("b", [1.0, 0.8], 2.01, small, 2, 6.0, 5.0, 1)
    assert relative_difference(*runs) == pytest.approx(0.005)
    output = io.StringIO()
    Console(file=output, width=100).print(table(*runs))
    for text in (*KINDS, "16.000", "7.000 (44%)", "8.000", "3.500", "6.00 (50%)", "+0.50%"):
        assert text in output.getvalue()
    plot(*runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
