"""The compiled CPU step gives the bits of the functions in ``numerics/``, whose root is made exact for it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashdist import FlashAdamW, FlashOptimizer, compile_cpu_step
from flashdist.kernels import cpu_native, eager
from tests.conftest import needs_compiler
from tests.support.backends import BF16, FP16, FP32, assert_same_bits, snapshot
from tests.support.rules import CASES

# Full tiles, rows with gaps, tiles that end inside a row, vectors, nothing.
SHAPES = [(64, 96), (5, 33), (3, 1000), (40, 3, 3, 4), (2, 7, 9), (70,), (1, 32), (1,), (), (0, 64)]


@pytest.fixture(autouse=True)
def exact_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference: blocks by ``numerics/`` alone, and roots that are rounded correctly."""
    root = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: root(x.double()).float() if x.dtype == FP32 else root(x))
    monkeypatch.setattr(eager, "step_in_place", lambda block, buffers: False)


def twins(case: str, weights: list[Tensor], **arguments: Any) -> list[FlashOptimizer]:
    cls, own = CASES[case]
    opts = [cls([nn.Parameter(w.clone()) for w in weights], **{**own, **arguments}) for _ in range(2)]
    compile_cpu_step(opts[1])
    return opts


def params_of(opt: FlashOptimizer) -> list[nn.Parameter]:
    return opt.param_groups[0]["params"]


def one_nan(t: Tensor) -> Tensor:
    """NaN without sign and payload, which processors choose."""
    return torch.where(t.isnan(), torch.nan, t) if t.is_floating_point() else t


def assert_alike(reference: FlashOptimizer, native: FlashOptimizer) -> None:
    for i, (a, b) in enumerate(zip(snapshot(reference), snapshot(native), strict=True)):
        for key in a:
            what = f"{key} of parameter {i} of shape {tuple(a['weight'].shape)}"
            assert_same_bits(one_nan(b[key]), one_nan(a[key]), what)
    for p, q in zip(params_of(reference), params_of(native), strict=True):
        marks = [opt._states[x].fingerprint for opt, x in ((reference, p), (native, q))]
        if marks[0] is not None and not p.isnan().any():
            assert_same_bits(marks[1], marks[0], f"fingerprints of shape {tuple(p.shape)}")


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(opts: list[FlashOptimizer], gradient: Callable[[int, tuple[int, ...]], Tensor], steps: int = 4) -> None:
    for t in range(steps):
        for opt in opts:
            for p in params_of(opt):
                p.grad = gradient(t, tuple(p.shape)).to(p.dtype)
            opt.step()
        assert_alike(*opts)


@needs_compiler
@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e5])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_numerics(case: str, dtype: torch.dtype, scale: float):
    def gradient(t: int, shape: tuple[int, ...]) -> Tensor:
        g = normal(shape, t) * scale
        if t == 2:
            g.view(-1)[:40] = 0.0
        if t == 3:
            g.view(-1)[5::7] *= 1e-18
        return g

    run(twins(case, [(normal(s, 0) * 0.3).to(dtype) for s in SHAPES]), gradient)


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), 3e38, -3e19])
@pytest.mark.parametrize("case", CASES)
def test_gradients_out_of_the_ordinary(case: str, bad: float):
    def gradient(t: int, shape: tuple[int, ...]) -> Tensor:
        g = normal(shape, t)
        if t == 2:
            g.view(-1)[17:18] = bad
        return g

    run(twins(case, [(normal(s, 0) * 0.3).to(BF16) for s in SHAPES]), gradient)


@needs_compiler
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("case", "lo_dtype"), [("plain sgd", torch.int8), ("adamw 32 bits", torch.int16)], ids=str)
def test_every_weight_with_any_correction(case: str, lo_dtype: torch.dtype, dtype: torch.dtype, known: bool):
    """All 2^16 patterns; hand-made corrections of zeros, infinities and NaNs where nothing is known of the weights."""
    los = torch.tensor([-128, -127, -1, 0, 1, 2, 127] if lo_dtype == torch.int8 else [-32768, -1, 0, 1, 127, 32767])
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    opts = twins(case, [patterns.repeat(len(los), 1)], lr=1e-3)
    for opt in opts:
        (p,) = params_of(opt)
        opt.state_dict()
        p.grad = torch.zeros_like(p)
        if known:
            opt.step()  # marks the weights; only pairs that a split makes follow
        else:
            opt.state[p]["error"].copy_(los.to(lo_dtype).view(-1, 1).expand_as(p))
        p.grad = torch.full_like(p, 1e-3)
    for _ in range(2):
        for opt in opts:
            opt.step()
        assert_alike(*opts)


@needs_compiler
def test_weights_near_the_largest_number():
    """Splits that round up to infinity, in tiles that began as ordinary ones."""
    bits = torch.arange(0x7E70, 0x7F80, dtype=torch.int32).to(torch.int16).view(BF16)
    opts = twins("plain sgd", [torch.cat([bits, -bits]).view(17, 32)], lr=1.0)
    run(opts, lambda t, shape: normal(shape, t) * 1e36, steps=5)


@needs_compiler
def test_weights_changed_behind_the_optimizer():
    opts = twins("adamw", [(normal(s, 0) * 0.3).to(BF16) for s in [(64, 96), (5, 33), (70,)]])
    run(opts, lambda t, shape: normal(shape, t))
    for opt in opts:
        for p in params_of(opt):
            p.data.view(-1)[3:9] *= 2.0
    run(opts, lambda t, shape: normal(shape, t))


@needs_compiler
def test_lost_updates_are_counted():
    for dtype, bits in ((BF16, 24), (BF16, 32), (BF16, None), (FP16, 24), (FP32, None)):
        opts = twins("plain sgd", [torch.ones(s, dtype=dtype) for s in SHAPES], lr=1.0, master_weight_bits=bits)
        counts = []
        for opt in opts:
            opt.check_numerics = True
            for p in params_of(opt):
                p.grad = torch.full_like(p, 2.0**-20)
                p.grad.view(-1)[:9] = 1.0
            try:
                opt.step()
            except RuntimeError as error:
                counts.append(str(error))
        assert len(set(counts)) == (0 if dtype == FP32 or bits == 32 else 1), counts
        assert_alike(*opts)


@needs_compiler
def test_any_number_of_threads_and_any_place_in_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_native, "TILES_PER_THREAD", 1)
    room = [torch.empty(3 * 1024 + 1, dtype=BF16) for _ in range(2)]
    opts = twins("adamw", [normal(s, 0).to(BF16) for s in [(3, 1024), (5, 33), (200, 64), (9,)]])
    params_of(opts[1])[0].data = room[0][1:].view(3, 1024).copy_(params_of(opts[1])[0].data)  # at an odd element
    before = torch.get_num_threads()
    try:
        for t, threads in enumerate((1, 2, 3, 7)):
            torch.set_num_threads(threads)
            for opt in opts:
                for p in params_of(opt):
                    p.grad = normal(tuple(p.shape), t).to(BF16)
            odd = params_of(opts[1])[0]
            odd.grad = room[1][1:].view(3, 1024).copy_(odd.grad)
            for opt in opts:
                opt.step()
            assert_alike(*opts)
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with the form for AVX2")
def test_the_form_for_other_processors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_native, "FLAGS", [*cpu_native.FLAGS, "-march=x86-64", "-O1", "-Wno-psabi"])
    portable = cpu_native.compile_step.__wrapped__()
    opts = twins("adamw", [(normal(s, 0) * 0.3).to(BF16) for s in SHAPES])
    opts[1]._backends["cpu"]._step = portable
    run(opts, lambda t, shape: normal(shape, t), steps=2)


@needs_compiler
def test_gradients_of_another_dtype_and_groups():
    groups = [{"lr": 1e-2, "weight_decay": 0.5}, {"lr": 1e-3, "betas": (0.5, 0.95), "maximize": True}]
    opts = []
    for _ in range(2):
        weights = [nn.Parameter(normal((40, 64), 0).to(BF16)), nn.Parameter(normal((5, 33), 1).to(BF16))]
        opts.append(FlashAdamW([{**g, "params": [w]} for g, w in zip(groups, weights, strict=True)]))
    compile_cpu_step(opts[1])
    for t in range(3):
        for opt in opts:
            for i, group in enumerate(opt.param_groups):
                (p,) = group["params"]
                p.grad_dtype = [FP32, FP16][i]
                p.grad = normal(tuple(p.shape), t).to([FP32, FP16][i])
            opt.step()
        for a, b in zip(snapshot(opts[0]), snapshot(opts[1]), strict=True):
            for key in a:
                assert_same_bits(b[key], a[key], key)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_native.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler.*apt install"):
        cpu_native.compile_step.__wrapped__()


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_native, "COMPILERS", ("false",))
    with pytest.raises(RuntimeError, match="could not compile"):
        cpu_native.compile_step.__wrapped__()
