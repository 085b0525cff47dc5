"""The finetuning benchmark on a tiny model: all arms take the same steps, targets are compared as they are meant."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import finetune_memory
from benchmarks.finetune_memory import Trainer, main, targets
from benchmarks.llama import TINY


@pytest.mark.parametrize("arm", ["torch_adamw_fp32", "flashdist", "flashdist_release"])
def test_an_arm_trains(arm):
    trainer = Trainer(arm, TINY, "cpu")
    assert len(list(trainer.model.parameters())) == 3 + 9 * TINY.layers
    for _ in range(3):
        loss = trainer.step(1, 16)
    assert torch.isfinite(loss)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert {int(s["step"]) for s in trainer.optimizer.state.values()} == {3}


def test_release_changes_no_bit_of_the_losses():
    trainers = [Trainer(arm, TINY, "cpu") for arm in ("flashdist", "flashdist_release")]
    for _ in range(3):
        losses = [trainer.step(2, 16) for trainer in trainers]
        assert torch.equal(*losses)


def test_the_command_line(tmp_path, monkeypatch):
    """In one process here; the workers are processes otherwise."""

    def in_this_process(arm, args, folder):
        out = folder / f"{arm}.json"
        options = {"shape": "tiny", "device": "cpu", "length": 16, "steps": 1, "rounds": 1, "largest": 2}
        main(["--worker", arm, "--out", str(out), *(f"--{key}={value}" for key, value in options.items())])
        return json.loads(out.read_text())

    monkeypatch.setattr(finetune_memory, "run_worker", in_this_process)
    out = tmp_path / "result.json"
    result = main(["--arms", "flashdist_release,pair,limit", "--device", "cpu", "--out", str(out), "--commit", "x"])
    assert json.loads(out.read_text()) == result
    assert [row["arm"] for row in result["rows"]] == ["flashdist_release"]
    assert result["rows"][0]["tokens_per_s"] > 0
    assert [row["batch"] for row in result["more"]] == [[1, 16], [1, 16]]
    assert len(result["more"][0]["quotients"]) == 2
    assert result["more"][1]["largest_batch"] == [2, 8]
    assert result["targets"]["20 steps inside the limit"] is True


def test_targets():
    rows = {
        "flashdist_release": {"peak_gib": 42.0, "tokens_per_s": 99.0},
        "flashdist": {"peak_gib": 54.6, "tokens_per_s": 99.0},
        "torch_adamw_fp32": {"error": "out of memory"},
        "limit": {"steps": 20},
    }
    assert list(targets(rows).values()) == [True, False, None, None, True, True]
