"""Gradient scaling: torch.amp.GradScaler hands its scale and its verdict to the step; Accelerate sees the skip."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdist import FlashAdamW
from tests.support.backends import (
    BF16,
    FP16,
    BackendUnderTest,
    assert_same,
    assert_unchanged,
    parameters,
    set_gradients,
    snapshot,
)

SHAPES = [(33,), (3, 33)]


def backward(params: list[Tensor], scaler: torch.amp.GradScaler, seed: int, broken: bool = False) -> None:
    """Gradients as the backward pass of a scaled loss leaves them."""
    set_gradients(params, seed=seed)
    factor = scaler.scale(torch.ones((), device=params[0].device)).to(params[0].dtype)
    for p in params:
        p.grad *= factor
    if broken:
        params[0].grad[3] = torch.inf


def scaler_for(lab: BackendUnderTest) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(lab.device.type, init_scale=8.0, growth_interval=1000)


def test_a_scaled_run_equals_the_unscaled_one(backend: BackendUnderTest):
    """The scale is a power of two: dividing by it in the step costs no bit."""
    plain = backend.build(FlashAdamW, parameters(SHAPES, FP16, device=backend.device), lr=1e-2)
    scaled = backend.build(FlashAdamW, parameters(SHAPES, FP16, device=backend.device), lr=1e-2)
    scaler = scaler_for(backend)
    for t in range(2):
        set_gradients(plain.param_groups[0]["params"], seed=t)
        plain.step()
        backward(scaled.param_groups[0]["params"], scaler, seed=t)
        scaler.step(scaled)
        scaler.update()
    assert_same(scaled, plain)


def test_case_29_an_inf_at_step_3_is_skipped(backend: BackendUnderTest):
    params = parameters(SHAPES, FP16, device=backend.device)
    opt = backend.build(FlashAdamW, params, lr=1e-2)
    scaler = scaler_for(backend)
    for t in range(1, 5):
        before = snapshot(opt)
        backward(params, scaler, seed=t, broken=t == 3)
        scaler.step(opt)
        if t == 3:
            assert_unchanged(opt, before)
        scaler.update()
        assert scaler.get_scale() == (8.0 if t < 3 else 4.0)
    assert [float(opt.state[p]["step"]) for p in params] == [3.0, 3.0]
    # Nothing is left on the optimizer that would scale a later step of somebody else.
    assert not hasattr(opt, "grad_scale")
    assert not hasattr(opt, "found_inf")


def test_an_inf_at_the_very_first_step(backend: BackendUnderTest):
    params = parameters(SHAPES, FP16, device=backend.device)
    opt = backend.build(FlashAdamW, params, lr=1e-2)
    weights = [p.detach().clone() for p in params]
    scaler = scaler_for(backend)
    backward(params, scaler, seed=0, broken=True)
    scaler.step(opt)
    scaler.update()
    assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
    for state in opt.state_dict()["state"].values():
        assert not any(v.any() for v in state.values())


def test_unscale_then_clip_then_step(backend: BackendUnderTest):
    """The usual loop: after unscale_ the gradients are plain, and the step must not divide by the scale again."""
    # bf16, since torch's unscale_ refuses fp16 gradients.
    params, reference_params = (parameters(SHAPES, BF16, device=backend.device) for _ in range(2))
    opt = backend.build(FlashAdamW, params, lr=1e-2, eps=1.0)
    reference = backend.build(FlashAdamW, reference_params, lr=1e-2, eps=1.0)
    scaler = scaler_for(backend)
    backward(params, scaler, seed=0)
    scaler.unscale_(opt)
    norm = opt.clip_grad_norm_(1.0)
    scaler.step(opt)
    scaler.update()
    set_gradients(reference_params, seed=0)
    assert float(norm) == pytest.approx(float(reference.clip_grad_norm_(1.0)), rel=1e-6)
    reference.step()
    assert_same(opt, reference)


def accelerated(opt: torch.optim.Optimizer, scaler: torch.amp.GradScaler, device: torch.device) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=device.type == "cpu")  # its state must exist
    return accelerate.optimizer.AcceleratedOptimizer(opt, device_placement=False, scaler=scaler)


@pytest.mark.parametrize("broken", [False, True])
def test_an_accelerated_optimizer_skips_too(backend: BackendUnderTest, broken: bool):
    params = parameters(SHAPES, FP16, device=backend.device)
    opt = backend.build(FlashAdamW, params, lr=1e-2)
    scaler = scaler_for(backend)
    wrapped = accelerated(opt, scaler, backend.device)
    backward(params, scaler, seed=0)
    wrapped.step()
    assert not wrapped.step_was_skipped
    before = snapshot(opt)
    backward(params, scaler, seed=1, broken=broken)
    wrapped.step()
    if broken:
        assert_unchanged(opt, before)
    assert scaler.get_scale() == (4.0 if broken else 8.0)
    assert [float(opt.state[p]["step"]) for p in params] == [1.0 if broken else 2.0] * 2


@pytest.mark.parametrize("cls", [FlashAdamW, functools.partial(torch.optim.AdamW, fused=True)], ids=["ours", "torch"])
def test_accelerate_calls_a_skip_a_step(cls: Any):
    """Accelerate takes a call of step() for a step taken, and an optimizer that skips by itself is always called.

    Ours is in this like torch's fused AdamW; the scale, which the scaler lowers, is where a skip shows.
    """
    device = torch.device("cpu")
    params = parameters(SHAPES, FP16)
    opt = cls(params, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    wrapped = accelerated(opt, scaler, device)
    backward(params, scaler, seed=0, broken=True)
    wrapped.step()
    assert not wrapped.step_was_skipped
    assert scaler.get_scale() == 4.0
