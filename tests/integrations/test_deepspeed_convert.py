"""From a flashdist checkpoint into DeepSpeed engines and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashdist
from flashdist.checkpoint import load, save, verify
from flashdist.integrations.deepspeed_convert import load_flashdist_checkpoint, load_zero_checkpoint
from tests.support.deepspeed_runs import (
    Net,
    config,
    deepspeed_on_this_group,
    loss_of,
    make,
    snapshot,
    train,
    weights,
)
from tests.support.ranks import run_ranks


def plain(seed: int) -> tuple[Net, flashdist.FlashAdamW]:
    torch.manual_seed(seed)
    model = Net().bfloat16()
    return model, flashdist.FlashAdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def dense(model: Net, opt: flashdist.FlashAdamW) -> dict[str, dict[str, torch.Tensor]]:
    states = flashdist.checkpoint.torch_state_dict(opt)["state"]
    return {
        name: {"fp32": opt.master_weight(p), **{k: states[i][k] for k in ("exp_avg", "exp_avg_sq")}}
        for i, (name, p) in enumerate(model.named_parameters())
    }


def into_engine(rank: int, world: int, stage: int, path: str, zero_path: str) -> Any:
    with deepspeed_on_this_group() as deepspeed:
        engine = make(deepspeed, config(stage, params={"lr": 1e-4, "weight_decay": 0.5}), seed=5)
        train(engine, 2)
        extra = load_flashdist_checkpoint(engine, path)
        found, whole = snapshot(engine), weights(deepspeed, engine)
        group = engine.basic_optimizer.param_groups[0]
        steps = {float(s) for packed in engine.basic_optimizer.states() for s in packed.steps}
        engine.save_checkpoint(zero_path, tag="t")
        losses = train(engine, 2)
        return found, whole, extra, (group["lr"], group["weight_decay"]), steps, losses


@pytest.mark.parametrize(("stage", "world"), [(2, 2), (3, 3)])
def test_into_an_engine_and_back(stage, world, tmp_path):
    model, opt = plain(0)
    for step in range(5):
        loss_of(model, step, 0).backward()
        opt.step()
        opt.zero_grad()
    save(tmp_path / "plain", model, opt, extra={"epoch": 3})
    before = dense(model, opt)

    results = run_ranks(into_engine, world, stage, str(tmp_path / "plain"), str(tmp_path / "zero"))
    for found, whole, extra, hyperparameters, steps, losses in results:
        assert extra == {"epoch": 3}
        assert hyperparameters == (3e-3, 0.1)
        assert steps <= {5.0}
        assert len(set(losses)) == 2
        for name, p in model.named_parameters():
            assert torch.equal(whole[name], p)
            assert torch.equal(found[name]["fp32"], before[name]["fp32"])
            for key in ("exp_avg", "exp_avg_sq"):
                if name == "first.weight":  # rows of 37 elements are encoded anew
                    assert_near(found[name][key], before[name][key])
                else:
                    assert torch.equal(found[name][key], before[name][key])

    other, other_opt = plain(9)
    load_zero_checkpoint(tmp_path / "zero" / "t", other, other_opt)
    after = dense(other, other_opt)
    for name, state in before.items():
        assert torch.equal(after[name]["fp32"], state["fp32"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert_near(after[name][key], state[key])
    assert all(float(s["step"]) == 5 for s in other_opt.state.values())
    assert other_opt.param_groups[0]["weight_decay"] == 0.1

    save(tmp_path / "again", other, other_opt)
    assert verify(tmp_path / "again").world_size == 1
    third, third_opt = plain(11)
    load(tmp_path / "again", third, third_opt)
    assert all(torch.equal(p, q) for p, q in zip(third.parameters(), other.parameters(), strict=True))


def assert_near(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).abs().max() <= 0.02 * other.abs().max()


def test_refused(tmp_path):
    model, opt = plain(0)
    with pytest.raises(ValueError, match="holds no ZeRO checkpoint"):
        load_zero_checkpoint(Path(tmp_path), model, opt)
