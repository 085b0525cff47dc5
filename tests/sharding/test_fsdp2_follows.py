"""Sharded steps have the bits of one process: every strategy, number of ranks and optimizer, over awkward shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from tests.support.odd_model import build, digests, fill, make_optimizer, part_of, seeded, step, tensors_of, whole
from tests.support.ranks import run_ranks

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (FlashAdamW, {}),
    "adamw 32 bits": (FlashAdamW, {"master_weight_bits": 32}),
    "adamw fp32 moments": (FlashAdamW, {"quantize": False}),
    "adam": (FlashAdam, {"betas": (0.9, 0.95)}),
    "lion": (FlashLion, {}),
    "sgd": (FlashSGD, {"momentum": 0.9, "nesterov": True}),
    "sgdw": (FlashSGDW, {"momentum": 0.9}),
}
DTYPES = {"adamw": torch.bfloat16, "lion": torch.float16, "adam": torch.float32}
STEPS = 4


def trained(strategy: str, world_size: int, name: str) -> tuple[Any, Any]:
    model = build(strategy, world_size, DTYPES.get(name, torch.bfloat16))
    cls, settings = OPTIMIZERS[name]
    opt = make_optimizer(model, strategy, cls, **settings)
    fill(model, 0)
    for seed in range(STEPS):
        step(model, opt, seed)
    return model, opt


def sharded(rank: int, world_size: int, strategies: list[str], names: list[str]) -> dict[tuple[str, str], Any]:
    return {(s, n): digests(*trained(s, world_size, n)) for s in strategies for n in names}


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    return {name: digests(*trained("single", 1, name)) for name in OPTIMIZERS}


@pytest.mark.parametrize(("world_size", "strategies", "names"), [
    (1, ["fsdp2"], ["adamw"]),
    (2, ["fsdp2"], list(OPTIMIZERS)),
    (3, ["fsdp2"], ["adamw", "lion"]),
    (4, ["fsdp2", "hsdp", "fsdp2_tp"], ["adamw", "adam", "lion", "sgd"]),
])  # fmt: skip
def test_every_tensor_has_the_bits_of_one_process(
    one_process: dict[str, Any], world_size: int, strategies: list[str], names: list[str]
):
    for answers in run_ranks(sharded, world_size, strategies, names):
        for (strategy, name), found in answers.items():
            differing = [n for n in one_process[name] if found.get(n) != one_process[name][n]]
            assert found.keys() == one_process[name].keys(), (strategy, name)
            assert differing == [], (strategy, name)


def looked_at(rank: int, world_size: int, strategy: str) -> dict[str, Any]:
    """What callers see of a sharded optimizer, and corrections of weights that were changed behind it."""
    model, opt = trained(strategy, world_size, "adamw")
    named = {n: p for n, p in model.named_parameters() if p in opt.state}
    found: dict[str, Any] = {"master": {n: whole(opt.master_weight(p)).clone() for n, p in named.items()}}
    found["placed alike"] = all(
        isinstance(opt.master_weight(p), DTensor) == isinstance(p, DTensor)
        and getattr(opt.master_weight(p), "placements", None) == getattr(p, "placements", None)
        for p in named.values()
    )
    found["memory"] = opt.memory_summary().as_dict()
    with torch.no_grad():
        for name in ("wide.weight", "long", "column.weight"):  # an EMA swap, a mask, a broadcast
            named[name].mul_(0.5)
    found["changed"] = {n: whole(opt.master_weight(p)).clone() for n, p in named.items()}
    found["weights"] = {n: whole(p.detach()).float().clone() for n, p in named.items()}
    step(model, opt, 77)
    found["next"] = digests(model, opt)
    return found


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp2", 2), ("hsdp", 4)])
def test_master_weights_memory_and_changed_weights(strategy: str, world_size: int):
    expected = looked_at(0, 1, "single")
    ranks = run_ranks(looked_at, world_size, strategy)
    for found in ranks:
        for key in ("master", "changed"):
            assert all(torch.equal(found[key][n], expected[key][n]) for n in expected[key]), key
        assert torch.equal(found["changed"]["long"], found["weights"]["long"]), "a stale correction was joined"
        assert found["placed alike"]
        assert found["next"] == expected["next"]
    # Each rank counts its own; plain tensors are on all ranks, with HSDP all others on two. (The
    # weights' storages are padded by fully_shard to the size of the largest shard.)
    replicas = 2 if strategy == "hsdp" else 1
    for kind in ("parameters", "corrections", "moments", "scales"):
        total = sum(found["memory"][kind] for found in ranks)
        assert expected["memory"][kind] <= total <= replicas * 1.02 * expected["memory"][kind] + 64, kind


def partial_gradients(rank: int, world_size: int, strategy: str) -> Any:
    """Gradients that come and go, the same on all ranks: step counts per parameter."""
    model, opt = trained(strategy, world_size, "adamw")
    for seed in range(3):
        for i, (name, p) in enumerate(model.named_parameters()):
            if p.requires_grad and (i + seed) % 3:
                full = seeded(name, p.shape, seed).to(p.dtype)
                p.grad = part_of(full, p)
        opt.step()
        opt.zero_grad()
    return digests(model, opt)


def test_parameters_without_gradients_are_left_alone():
    expected = partial_gradients(0, 1, "single")
    assert all(found == expected for found in run_ranks(partial_gradients, 2, "fsdp2"))


def test_the_tensors_differ_from_what_they_were(one_process: dict[str, Any]):
    """The digests above can tell: every trainable tensor has moved."""
    model = build("single", 1)
    fill(model, 0)
    before = digests(model, None)
    moved = {n for n in before if one_process["adamw"][n] != before[n]}
    opt = make_optimizer(model, "single")
    opt.state_dict()
    stepped = {n.removesuffix(".step") for n in tensors_of(model, opt) if n.endswith(".step")} - {"empty"}
    assert moved == {n for n in stepped if not n.startswith("unused")}
