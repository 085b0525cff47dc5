"""Forward and backward passes under FSDP2, in its various settings: the bits of one process that averages alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

from flashdist import FlashAdamW
from tests.support.odd_model import digests, part_of
from tests.support.ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 3


class Net(nn.Module):
    """Odd sizes, so that shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 40)
        self.inner = nn.Linear(40, 67)
        self.norm = nn.LayerNorm(67)
        self.head = nn.Linear(67, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.nn.functional.gelu(self.norm(self.inner(self.table(tokens)))))


def initialise(model: nn.Module) -> None:
    """The same weights from the same seed, sharded or not."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            full = (torch.randn(p.shape, generator=generator) * 0.2).to(p.dtype)
            if hasattr(p, "to_local"):
                p.to_local().copy_(part_of(full, p).to_local())
            else:
                p.copy_(full)


def batch(rank: int, t: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * t + 10 * rank + micro)
    return torch.randint(50, (6,), generator=generator), torch.randint(7, (6,), generator=generator)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), target)


def one_process(ranks: int, micros: int, weights: torch.dtype, accumulate: torch.dtype) -> dict[str, Any]:
    """What FSDP2 computes, without it: gradients in bf16, summed and averaged in ``accumulate``, then rounded."""
    model = Net().to(weights)
    initialise(model)
    opt = FlashAdamW(model.parameters(), lr=1e-2)
    for t in range(STEPS):
        sums: dict[str, Tensor] = {}
        for rank in range(ranks):
            own: dict[str, Tensor] = {}
            for micro in range(micros):
                cast = {n: p.detach().to(BF16).requires_grad_() for n, p in model.named_parameters()}
                tokens, target = batch(rank, t, micro)
                loss_of(functional_call(model, cast, (tokens,)), target).backward()
                own = {n: c.grad.to(accumulate) + own.get(n, 0) for n, c in cast.items()}
            sums = {n: g + sums.get(n, 0) for n, g in own.items()}
        for name, p in model.named_parameters():
            p.grad = (sums[name] / ranks).to(weights)
        opt.step()
        opt.zero_grad()
    return digests(model, opt)


POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
# Name: settings of fully_shard, micro-batches, dtype of the weights.
SETTINGS: dict[str, tuple[dict[str, Any], int, torch.dtype]] = {
    "fp32 reduction": ({"mp_policy": POLICY}, 1, BF16),
    "no resharding after forward": ({"mp_policy": POLICY, "reshard_after_forward": False}, 1, BF16),
    "two micro-batches": ({"mp_policy": POLICY}, 2, BF16),
    "fp32 weights": ({"mp_policy": POLICY}, 1, FP32),
    "offloaded": ({"mp_policy": POLICY, "offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1, BF16),
    "meta": ({"mp_policy": POLICY}, 1, BF16),
}
FOUR_RANKS = {
    "resharding to two": ({"mp_policy": POLICY, "reshard_after_forward": 2}, 1, BF16),
    "fp32 reduction": ({"mp_policy": POLICY}, 1, BF16),
}


def train(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, (arguments, micros, weights) in settings.items():
        mesh = init_device_mesh("cpu", (world_size,))
        with torch.device("meta" if name == "meta" else "cpu"):
            model = Net().to(weights)
        if name != "meta":
            initialise(model)
        for module in (model.inner, model):
            fully_shard(module, mesh=mesh, **arguments)
        opt = FlashAdamW(model.parameters(), lr=1e-2)
        if name == "meta":
            refused = [raises(opt.state_dict), raises(lambda opt=opt: opt.step() or opt.state_dict())]
            assert all("on the meta device" in message for message in refused), refused
            model.to_empty(device="cpu")
            initialise(model)
        for t in range(STEPS):
            for micro in range(micros):
                model.set_requires_gradient_sync(micro == micros - 1)
                tokens, target = batch(rank, t, micro)
                loss_of(model(tokens), target).backward()
            opt.clip_grad_norm_(1e6)  # a factor of 1
            opt.step()
            opt.zero_grad()
        found[name] = digests(model, opt)
    return found


def raises(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("world_size", "settings"), [(2, SETTINGS), (4, FOUR_RANKS)], ids=["2 ranks", "4 ranks"])
def test_training_has_the_bits_of_one_process(world_size: int, settings: dict[str, Any]):
    ranks = run_ranks(train, world_size, settings)
    for name, (_, micros, weights) in settings.items():
        expected = one_process(world_size, micros, weights, FP32)
        for found in ranks:
            assert [n for n in expected if found[name][n] != expected[n]] == [], name
