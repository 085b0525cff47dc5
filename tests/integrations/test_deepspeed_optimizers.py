"""Under ZeRO: the optimizers and options that the other tests have not, against the same training without DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashdist
from tests.support.deepspeed_runs import (
    config,
    deepspeed_on_this_group,
    even_net,
    make,
    train,
    train_without_deepspeed,
    weights,
)
from tests.support.ranks import run_ranks

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("FlashAdam", {"lr": 3e-3, "weight_decay": 0.1}),
    ("FlashLion", {"lr": 1e-3, "weight_decay": 0.1}),
    ("FlashSGD", {"lr": 3e-2, "momentum": 0.9, "nesterov": True}),
    ("FlashSGDW", {"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.1}),
    ("FlashAdamW", {"lr": 3e-3, "master_weight_bits": 32}),
    ("FlashAdamW", {"lr": 3e-3, "quantize": False}),
]


def same(rank: int, world: int, stage: int) -> dict[str, bool]:
    """Losses and weights of 12 steps, bit for bit, on sizes of which no border cuts a group."""
    found = {}
    with deepspeed_on_this_group() as deepspeed:
        for name, params in WAYS:
            torch.manual_seed(0)
            model = even_net().bfloat16()
            optimizer = getattr(flashdist, name)(model.parameters(), **params)
            reference = train_without_deepspeed(model, optimizer, 12)
            engine = make(deepspeed, config(stage, name, params), even_net)
            way = f"{name} {params}"
            found[f"{way}: losses"] = train(engine, 12) == reference
            whole = weights(deepspeed, engine)
            found[f"{way}: weights"] = all(torch.equal(p, whole[n]) for n, p in model.named_parameters())
            if stage:
                kinds = {b.dtype for packed in engine.basic_optimizer.states() for n, b in packed.buffers.items()
                         if n.startswith("error")}  # fmt: skip
                wide = params.get("master_weight_bits") == 32
                found[f"{way}: corrections"] = kinds == ({torch.int16} if wide else {torch.int8, torch.int16})
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_optimizers_wide_corrections_and_fp32_moments_are_as_without_deepspeed(stage):
    for found in run_ranks(same, 2, stage):
        assert [what for what, holds in found.items() if not holds] == []


def lost(rank: int, world: int, stage: int) -> str:
    """check_numerics, with a learning rate whose updates are below what 24 bits can hold."""
    with deepspeed_on_this_group() as deepspeed:
        params = {"lr": 1e-7, "weight_decay": 0.0, "check_numerics": True}
        engine = make(deepspeed, config(stage, params=params), even_net)
        try:
            train(engine, 1)
        except flashdist.NumericsError as error:
            return str(error)
        return "not noticed"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_check_numerics_notices_lost_updates(stage):
    for message in run_ranks(lost, 2, stage):
        assert "were lost" in message
        assert stage == 0 or "weight" in message  # under ZeRO by the model's name
