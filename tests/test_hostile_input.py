"""What people hand over by mistake: each is refused by name, and never becomes a wrong result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flashdist import FlashAdamW, FlashSGD
from tests.support.backends import BackendUnderTest, parameters, train


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", ["a", None, True], ids=str)
def test_a_hyperparameter_that_is_no_number(name: str, value: Any):
    with pytest.raises(TypeError, match=f"{name} must be a number"):
        FlashAdamW(parameters([(4, 32)]), **{name: value})


@pytest.mark.parametrize("betas", [0.9, (0.9,), "ab"], ids=str)
def test_betas_that_are_no_pair_of_numbers(betas: Any):
    with pytest.raises((TypeError, ValueError), match="betas"):
        FlashAdamW(parameters([(4, 32)]), betas=betas)


def test_momentum_that_is_no_number():
    with pytest.raises(TypeError, match="momentum must be a number"):
        FlashSGD(parameters([(4, 32)]), momentum="x")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_the_value_of_a_cpu_tensor_lr_is_checked(value: float):
    with pytest.raises(ValueError, match="lr must be a finite number"):
        FlashAdamW(parameters([(4, 32)]), lr=torch.tensor(value))


def test_quantize_must_be_a_bool():
    with pytest.raises(ValueError, match="quantize must be True or False"):
        FlashAdamW(parameters([(4, 32)]), quantize="yes")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_model_cast_after_the_first_step(backend: BackendUnderTest, dtype: torch.dtype):
    model = nn.Linear(64, 4).to(torch.bfloat16).to(backend.device)
    opt = backend.build(FlashAdamW, list(model.parameters()))
    train(opt, 1)
    opt.zero_grad()
    model.to(dtype)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((RuntimeError, ValueError), match=r"params'\]\[0\] of shape \(4, 64\) .*first step"):
        opt.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_hooks_around_loading_are_called():
    opt = FlashAdamW(parameters([(4, 32)]))
    calls = []
    opt.register_load_state_dict_pre_hook(lambda o, s: calls.append("before"))
    opt.register_load_state_dict_post_hook(lambda o: calls.append("after"))
    opt.load_state_dict(opt.state_dict())
    assert calls == ["before", "after"]


@pytest.mark.parametrize("what", [None, {}, [1]], ids=str)
def test_loading_what_is_no_state_dict(what: Any):
    with pytest.raises(ValueError, match="not an optimizer's state dict"):
        FlashAdamW(parameters([(4, 32)])).load_state_dict(what)


@pytest.mark.parametrize("what", ["x", float("nan"), -1.0], ids=str)
def test_a_max_norm_that_is_no_norm(what: Any):
    with pytest.raises(ValueError, match="max_norm must be a number"):
        FlashAdamW(parameters([(4, 32)])).clip_grad_norm_(what)
