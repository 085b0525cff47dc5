"""The in-place step of ordinary blocks gives the bits of the functions in ``numerics/`` and leaves them the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashdist import FlashOptimizer
from flashdist.kernels import eager
from tests.support.backends import BF16, FP16, FP32, BackendUnderTest
from tests.support.rules import CASES

SHAPES = [(64, 96), (5, 33), (70,), (1, 32)]
CPU = BackendUnderTest("eager", torch.device("cpu"))


class Steps:
    """Stands in for ``step_in_place`` and counts what it took and left; with ``off`` it leaves everything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.off, self.taken, self.left = False, 0, 0
        self._real = eager.step_in_place
        monkeypatch.setattr(eager, "step_in_place", self)

    def __call__(self, block: Any, buffers: Any) -> bool:
        if self.off:
            return False
        done = self._real(block, buffers)
        self.taken, self.left = self.taken + done, self.left + (not done)
        return done


def bits(opt: FlashOptimizer) -> list[Tensor]:
    params = [p for group in opt.param_groups for p in group["params"]]
    tensors = [t for p in params for t in (p.detach(), *opt.state[p].values())]
    return [t.reshape(-1).clone().view(torch.uint8) for t in tensors]


def run(
    case: str, dtype: torch.dtype, gradient: Callable[[int, tuple[int, ...]], Tensor], shapes: list[tuple[int, ...]]
) -> list[Tensor]:
    cls, arguments = CASES[case]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter((torch.randn(s, generator=generator) * 0.3).to(dtype)) for s in shapes]
    opt = CPU.build(cls, params, **arguments)
    for t in range(5):
        for p in params:
            p.grad = gradient(t, tuple(p.shape)).to(dtype)
        opt.step()
    return bits(opt)


def same_with_and_without(steps: Steps, *what: Any) -> None:
    fast = run(*what)
    steps.off = True
    slow = run(*what)
    for a, b in zip(fast, slow, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-17, 1e-19, 1e5, 0.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_numerics(monkeypatch, case: str, dtype: torch.dtype, scale: float):
    def gradient(t: int, shape: tuple[int, ...]) -> Tensor:
        g = torch.randn(shape, generator=torch.Generator().manual_seed(t)) * scale
        if t == 2:
            g[0] = 0.0
        if t == 3:
            g.view(-1)[5::7] *= 1e-18
        return g

    steps = Steps(monkeypatch)
    same_with_and_without(steps, case, dtype, gradient, SHAPES)
    if dtype != FP16 and case != "adamw eps 0":  # fp16 makes infinities of 1e5, and without eps 0 / 0 is NaN
        assert steps.taken > 0
        assert steps.left == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38, -3e19])
@pytest.mark.parametrize("case", CASES)
def test_blocks_out_of_the_ordinary(monkeypatch, case: str, bad: float):
    def gradient(t: int, shape: tuple[int, ...]) -> Tensor:
        g = torch.randn(shape, generator=torch.Generator().manual_seed(t))
        if t == 3:
            g.view(-1)[17] = bad
        return g

    same_with_and_without(Steps(monkeypatch), case, BF16, gradient, SHAPES)


def every_pair(lo_dtype: torch.dtype, los: Tensor) -> tuple[Tensor, Tensor]:
    """All 2^16 bf16 patterns with each of these corrections, a correction a row."""
    hi = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    return hi.repeat(len(los), 1), los.to(lo_dtype).view(-1, 1).repeat(1, 2**16)


@pytest.mark.parametrize(("case", "dtype"), [("plain sgd", torch.int8), ("adamw 32 bits", torch.int16)], ids=str)
def test_every_weight_with_any_correction(monkeypatch, case: str, dtype: torch.dtype):
    """Blocks of 512 elements, hand-made corrections of zeros, infinities and NaNs among them."""
    los = torch.tensor([-128, -127, -1, 0, 1, 2, 127] if dtype == torch.int8 else [-32768, -1, 0, 1, 127, 32767])
    monkeypatch.setattr(eager, "IN_PLACE_CHUNK", 512)
    steps, found = Steps(monkeypatch), []
    for off in (False, True):
        steps.off = off
        weight, lo = every_pair(dtype, los)
        p = nn.Parameter(weight)
        opt = CPU.build(CASES[case][0], [p], lr=1e-3, **CASES[case][1])
        opt.state_dict()
        opt.state[p]["error"].copy_(lo)
        p.grad = torch.full_like(p, 1e-3)
        opt.step()
        found.append(bits(opt))
    assert steps.taken > 0
    assert steps.left > 0
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", [1 << 19, 1 << 11])
def test_a_hard_block_is_cut_again(monkeypatch, size: int):
    """One NaN among 2^17 elements: the block that has it goes to ``numerics/`` in smaller pieces."""

    def gradient(t: int, shape: tuple[int, ...]) -> Tensor:
        g = torch.randn(shape, generator=torch.Generator().manual_seed(t))
        if t == 4:
            g[100, 100] = float("nan")
        return g

    monkeypatch.setattr(eager, "IN_PLACE_CHUNK", size)
    steps = Steps(monkeypatch)
    same_with_and_without(steps, "adamw", BF16, gradient, [(512, 256)])
    assert steps.left == 1
