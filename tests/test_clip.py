"""clip_grad_norm_: the norm of torch's, applied inside the next step and by nobody else."""

from __future__ import annotations

import math

import pytest
import torch

from flashdist import FlashAdamW, FlashSGD
from tests.support.backends import (
    BF16,
    FP32,
    BackendUnderTest,
    assert_same,
    assert_same_bits,
    parameters,
    set_gradients,
)

SHAPES = [(), (0,), (33,), (3, 33)]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf, 2])
def test_the_norm_is_torch_s(backend: BackendUnderTest, norm_type: float):
    params = parameters(SHAPES, FP32, device=backend.device)
    set_gradients(params, seed=0)
    opt = backend.build(FlashAdamW, params)
    grads = [p.grad.clone() for p in params]
    norm = opt.clip_grad_norm_(0.5, norm_type)
    # torch itself cannot take the inf norm of an empty tensor.
    expected = torch.nn.utils.get_total_norm([g for g in grads if g.numel()], norm_type)
    assert norm.shape == ()
    assert norm.dtype == FP32
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for p, g in zip(params, grads, strict=True):
        assert_same_bits(p.grad, g, "the gradients are not written")


@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0])
def test_the_step_is_that_of_clipped_gradients(backend: BackendUnderTest, max_norm: float):
    ours = parameters(SHAPES, FP32, device=backend.device)
    opt = backend.build(FlashSGD, ours, lr=1.0)
    theirs = parameters(SHAPES, FP32, device=backend.device)
    reference = torch.optim.SGD(theirs, lr=1.0)
    for params in (ours, theirs):
        set_gradients(params, seed=0)
    opt.clip_grad_norm_(max_norm)
    opt.step()
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("dropped_by", ["step", "zero_grad", "load_state_dict"])
def test_the_factor_does_not_outlive_its_step(backend: BackendUnderTest, dropped_by: str):
    def build():
        params = parameters([(33,)], device=backend.device)
        return params, backend.build(FlashSGD, params, lr=1.0)

    (ours, opt), (theirs, reference) = build(), build()
    set_gradients(ours, seed=0)
    set_gradients(theirs, seed=0)
    if dropped_by == "step":
        opt.clip_grad_norm_(1e-3)
        reference.clip_grad_norm_(1e-3)
        opt.step()
        reference.step()
    else:
        saved = opt.state_dict()
        opt.clip_grad_norm_(1e-3)
        opt.zero_grad() if dropped_by == "zero_grad" else opt.load_state_dict(saved)
        assert opt._clip_factor is None
    before = [p.detach().clone() for p in ours]
    set_gradients(ours, seed=1)
    set_gradients(theirs, seed=1)
    opt.step()
    reference.step()
    assert_same(opt, reference)
    # Unclipped, the step is as long as the gradient: 33 normal numbers, not 1e-3.
    assert float((ours[0].detach() - before[0]).float().norm()) > 1.0


def test_clipping_twice_clips_what_is_left(backend: BackendUnderTest):
    params = parameters([(33,)], FP32, device=backend.device)
    opt = backend.build(FlashSGD, params, lr=1.0)
    set_gradients(params, seed=0)
    start = params[0].detach().clone()
    first = opt.clip_grad_norm_(1.0)
    assert float(first) > 2
    assert float(opt.clip_grad_norm_(0.25)) == pytest.approx(1.0, rel=1e-5)
    assert float(opt.clip_grad_norm_(0.5)) == pytest.approx(0.25, rel=1e-5)
    opt.step()
    assert float((params[0].detach() - start).norm()) == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_non_finite_norm_reaches_every_weight_as_in_torch(backend: BackendUnderTest, value: float):
    ours, theirs = (parameters([(33,), (3, 33)], FP32, device=backend.device) for _ in range(2))
    for params in (ours, theirs):
        set_gradients(params, seed=0)
        params[0].grad[4] = value
    opt = backend.build(FlashSGD, ours, lr=1.0)
    norm = opt.clip_grad_norm_(1.0)
    opt.step()
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.optim.SGD(theirs, lr=1.0).step()
    assert not math.isfinite(norm)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p.isnan(), q.isnan())
    assert ours[0].isnan().any()


def test_large_16_bit_gradients_do_not_overflow_the_norm(backend: BackendUnderTest):
    params = parameters([(3, 33)], BF16, device=backend.device)
    opt = backend.build(FlashAdamW, params)
    params[0].grad = torch.full_like(params[0], 1e15)
    assert float(opt.clip_grad_norm_(1.0)) == pytest.approx(1e15 * math.sqrt(99), rel=1e-2)


def test_no_gradients_have_the_norm_zero(backend: BackendUnderTest):
    opt = backend.build(FlashAdamW, parameters([(33,)], device=backend.device))
    assert float(opt.clip_grad_norm_(1.0)) == 0.0


@pytest.mark.parametrize(("max_norm", "norm_type", "match"), [
    (-1.0, 2.0, "max_norm.*-1.0"), (math.nan, 2.0, "max_norm.*nan"), (1.0, 0.0, "norm_type.*0.0"),
    (1.0, -math.inf, "norm_type.*-inf"),
])  # fmt: skip
def test_refused_arguments(max_norm: float, norm_type: float, match: str):
    params = parameters([(33,)])
    set_gradients(params, seed=0)
    with pytest.raises(ValueError, match=match):
        FlashAdamW(params).clip_grad_norm_(max_norm, norm_type)
