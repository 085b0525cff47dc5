"""What is done about older releases of DeepSpeed, looked at with whatever release is installed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashdist
from flashdist.integrations import deepspeed as ours
from flashdist.integrations import deepspeed_releases as releases
from tests.support.deepspeed_runs import RELEASE, config, deepspeed_on_this_group, make, train, weights
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]

WITHOUT_FLASHDIST = """
import json, sys
import torch
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
assert "flashdist" not in sys.modules
model = torch.nn.Linear(8, 8)
settings = json.loads(sys.argv[1])
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
"""
SAYS = "FlashAdamW is not a supported DeepSpeed Optimizer"


@pytest.mark.parametrize("stage", [0, 3])
def test_what_deepspeed_says_where_flashdist_is_not_imported(stage):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_FLASHDIST, json.dumps(config(stage))],
        env=env, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"AssertionError: {SAYS}" in done.stderr, done.stderr[-2000:]


def test_the_documents_name_that_message_and_the_remedy():
    for page in ("deepspeed.md", "troubleshooting.md"):
        (line,) = [line for line in (ROOT / "docs" / page).read_text().splitlines() if SAYS in line]
        assert "import flashdist" in line


class Engine:
    """Saves and loads as the engine of 0.18.3 does at stage 0."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def bfloat16_enabled(self) -> bool:
        return True

    def _save_checkpoint(self, folder: str, client_state: Any = None) -> Any:
        return None if self.bfloat16_enabled() else (folder, client_state, self.optimizer.state_dict())


def stage_0_states(rank: int, world: int) -> Any:
    with deepspeed_on_this_group():
        from flashdist.integrations.deepspeed_stage0 import Stage0Optimizer

        opt = flashdist.FlashAdamW([nn.Parameter(torch.ones(2, 32, dtype=torch.bfloat16))])
        save = releases.with_stage_0_states(Engine._save_checkpoint)
        engine, others = Engine(Stage0Optimizer(opt, 0.0, False)), Engine(opt)
        folder, client_state, saved = save(engine, "f", client_state={"epoch": 3})
        return folder, client_state, sorted(saved), engine.bfloat16_enabled(), save(others, "f")


def test_stage_0_states_are_saved_where_deepspeed_leaves_them_out():
    (found,) = run_ranks(stage_0_states, 1)
    assert found == ("f", {"epoch": 3}, ["param_groups", "state"], True, None)


def test_only_old_releases_have_those_two_methods_changed(monkeypatch):
    both = {"_save_checkpoint", "_load_checkpoint"}
    for version, changed in [((0, 18, 3), both), ((0, 18, 4), both), ((0, 18, 5), set()), ((0, 19, 8), set())]:
        monkeypatch.setattr(releases, "version", lambda version=version: version)
        assert set(ours._replacements()) - set(ours.SIGNATURES) == changed


def test_the_warning_about_gathers_on_cpus(monkeypatch):
    monkeypatch.setattr(releases, "version", lambda: (0, 19, 7))
    warning = releases.gathers_too_early(3, "cpu", 2)
    assert "DeepSpeed 0.19.7 at ZeRO stage 3 on CPUs" in warning
    assert "Use 0.19.8 or newer" in warning
    for spared in [(2, "cpu", 2), (3, "cuda", 2), (3, "cpu", 1)]:
        assert not releases.gathers_too_early(*spared)
    monkeypatch.setattr(releases, "version", lambda: (0, 19, 8))
    assert not releases.gathers_too_early(3, "cpu", 2)


def overflow(rank: int, world: int) -> dict[str, bool]:
    """Stage 3 of a DeepSpeed that looks for no overflow of bf16 gradients."""
    with deepspeed_on_this_group() as deepspeed:
        from deepspeed.runtime.zero import stage3

        newer = getattr(stage3, "is_invalid_grad_norm", None)
        version, releases.version = releases.version, lambda: (0, 18, 3)  # type: ignore[assignment]
        stage3.is_invalid_grad_norm = lambda norm: False
        try:
            unwanted = config(3, bf16={"enabled": True, "check_grad_overflow": False})
            wanted = config(3, bf16={"enabled": True, "check_grad_overflow": True})
            found = {"unwanted": not make(deepspeed, unwanted).optimizer.look_for_overflow}
            engine = make(deepspeed, wanted)
            train(engine, 2)
            before = weights(deepspeed, engine)
            # On one rank only: all must leave the step out.
            value = float("inf") if rank == 0 else 1.0
            engine.backward(engine(torch.full((4, 64), value).bfloat16()).float().sum())
            engine.step()
            after = weights(deepspeed, engine)
            found["left out"] = engine.skipped_steps == 1 and all(torch.equal(before[n], p) for n, p in after.items())
            train(engine, 1)
            after = weights(deepspeed, engine)
            found["goes on"] = engine.skipped_steps == 1 and not any(
                torch.equal(before[n], p) for n, p in after.items()
            )
        finally:
            releases.version = version
            stage3.is_invalid_grad_norm = newer
        return found


def test_an_overflow_at_stage_3_where_deepspeed_does_not_look_for_it():
    for found in run_ranks(overflow, 2):
        assert [what for what, holds in found.items() if not holds] == []


class Newer:
    """An engine of a release to come: a method has one more argument, or another name."""

    def _configure_zero_optimizer(self, optimizer: Any, more: int = 0) -> Any:
        return optimizer, more

    def zero_optimization(self) -> bool:
        return False


def test_arguments_that_are_not_known_reach_deepspeed():
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert ours._without_copy(Newer._configure_zero_optimizer)(Newer(), sgd, more=2) == (sgd, 2)
    assert ours._stage0(lambda self, optimizer, *args: args)(Newer(), sgd, 1, 2) == (1, 2)


def test_an_engine_without_the_method_that_would_be_changed_is_refused(monkeypatch):
    from flashdist.integrations import deepspeed_refusals as refusals

    monkeypatch.setattr(refusals, "version", lambda: (0, 30, 0))
    opt = flashdist.FlashAdamW([nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match=r"does not know DeepSpeed 0\.30\.0, whose engine has no _configure_fp16_opt"):
        refusals.refuse(Newer(), opt, releases.MINIMUM)


def test_the_oldest_release_is_one_number_everywhere():
    text = ".".join(map(str, releases.MINIMUM))
    assert f"deepspeed>={text}" in (ROOT / "pyproject.toml").read_text()
    assert f"older than {text}" in (ROOT / "docs" / "deepspeed.md").read_text()
    assert releases.MINIMUM <= RELEASE
