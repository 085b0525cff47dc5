"""Checkpoints of DeepSpeed engines: compact, exact, readable by DeepSpeed's own tools, and of any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.deepspeed_runs import (
    config,
    deepspeed_on_this_group,
    equal_states,
    make,
    packed_states,
    train,
    weights,
)
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
ODD = {"sub_group_size": 3000}


def settings(stage: int, optimizer: str = "FlashAdamW", **other: Any) -> dict[str, Any]:
    params = {"FlashSGD": {"momentum": 0.9}}.get(optimizer, {"weight_decay": 0.1})
    return config(stage, optimizer, {"lr": 3e-3, **params}, zero=ODD if stage == 3 else {}, **other)


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]


def states_of(engine: Any) -> list[dict[str, torch.Tensor]]:
    if engine.zero_optimization_stage():
        return packed_states(engine)
    return [{k: v.clone() for k, v in state.items()} for state in engine.basic_optimizer.state.values()]


def round_trip(rank: int, world: int, stage: int, folder: str) -> dict[str, Any]:
    """Save after 5 steps, load into another engine, train both on."""
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 3e-3}}}
    with deepspeed_on_this_group() as deepspeed:
        one = make(deepspeed, settings(stage, **scheduler), groups=two_groups)
        train(one, 5)
        one.save_checkpoint(folder, tag="t")
        saved, whole = states_of(one), weights(deepspeed, one)
        unbroken = train(one, 5, first=5)

        two = make(deepspeed, settings(stage, **scheduler), groups=two_groups, seed=7)
        train(two, 2)
        two.load_checkpoint(folder, tag="t")
        found = weights(deepspeed, two)
        out = {
            "states": equal_states(saved, states_of(two)),
            "weights": all(torch.equal(whole[n], found[n]) for n in whole),
            "lr": two.get_lr() == make_lr(two),
        }
        resumed = train(two, 5, first=5)
        return {
            **out,
            "losses": resumed == unbroken,
            "after": equal_states(states_of(one), states_of(two)),
            "weight_decays": [group["weight_decay"] for group in two.basic_optimizer.param_groups],
        }


def make_lr(engine: Any) -> list[float]:
    return [group["lr"] for group in engine.basic_optimizer.param_groups]


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (3, 3)])
def test_round_trip(stage, world, tmp_path):
    for found in run_ranks(round_trip, world, stage, str(tmp_path)):
        assert found == {
            "states": True, "weights": True, "lr": True, "losses": True, "after": True, "weight_decays": [0.1, 0.0]
        }  # fmt: skip
