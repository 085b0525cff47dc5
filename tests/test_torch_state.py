"""Case 13: state of torch.optim's optimizers loads, and state exported for them is theirs to load."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashdist import FlashAdam, FlashAdamW, FlashSGD
from tests.support.backends import BF16, FP32, assert_same_bits, parameters, set_gradients, train

SHAPES = [(), (33,), (3, 33), (2, 64)]
PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    (torch.optim.AdamW, FlashAdamW, {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
    (torch.optim.Adam, FlashAdam, {"lr": 1e-3, "weight_decay": 0.1}),
    (torch.optim.SGD, FlashSGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1}),
]
pairs = pytest.mark.parametrize(("theirs", "ours", "arguments"), PAIRS, ids=[p[0].__name__ for p in PAIRS])


def trained(theirs: Any, arguments: dict[str, Any], dtype: torch.dtype = FP32) -> tuple[Any, list[nn.Parameter]]:
    params = parameters(SHAPES, dtype)
    opt = theirs(params, **arguments)
    for t in range(3):
        set_gradients(params, seed=t)
        opt.step()
    return opt, params


@pairs
def test_dense_state_loads_exactly(theirs: Any, ours: Any, arguments: dict[str, Any]):
    """Without quantization nothing is lost: the loaded run goes on as the torch run does."""
    source, params = trained(theirs, arguments)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    opt = ours(copies, quantize=False)
    opt.load_state_dict(source.state_dict())
    for name in arguments:
        assert opt.param_groups[0][name] == arguments[name], name
    for moment in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        for p, q in zip(params, copies, strict=True):
            if moment in source.state[p]:
                assert_same_bits(opt.state[q][moment], source.state[p][moment], moment)
    for each in (params, copies):
        set_gradients(each, seed=9)
    source.step()
    opt.step()
    for p, q in zip(params, copies, strict=True):
        # One step in another order of operations: an ULP of the weight, and one of the update.
        torch.testing.assert_close(q, p, rtol=2.4e-7, atol=1e-9)


@pairs
def test_dense_state_is_encoded(theirs: Any, ours: Any, arguments: dict[str, Any]):
    source, params = trained(theirs, arguments, BF16)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    opt = ours(copies)
    before = copy.deepcopy(source.state_dict())
    opt.load_state_dict(source.state_dict())
    fresh = ours([nn.Parameter(p.detach().clone()) for p in params], **arguments).state_dict()["state"]
    loaded = opt.state_dict()["state"]
    for i, q in enumerate(copies):
        assert {k: v.dtype for k, v in loaded[i].items()} == {k: v.dtype for k, v in fresh[i].items()}
        assert not opt.state[q]["error"].any()
        assert float(opt.state[q]["step"]) == (1.0 if ours is FlashSGD else 3.0)
    # The source's tensors are only read.
    for i, state in source.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                assert_same_bits(value, before["state"][i][key], key)
    train(opt, 1)


def test_loaded_moments_are_encoded_to_the_nearest_code():
    source, params = trained(torch.optim.AdamW, {"lr": 1e-3})
    copies = [nn.Parameter(p.detach().to(BF16)) for p in params]
    opt = FlashAdamW(copies)
    opt.load_state_dict(source.state_dict())
    dense, state = source.state[params[3]], opt.state[copies[3]]
    c = state["exp_avg"].double() / 127
    momentum = (c / (2 - c.abs())).view(2, 2, 32) * state["exp_avg_scale"].double().unsqueeze(-1)
    root = state["exp_avg_sq"].double().view(2, 2, 32) / 255 * state["exp_avg_sq_scale"].double().unsqueeze(-1)
    peak = dense["exp_avg"].view(2, 2, 32).abs().amax(-1, keepdim=True)
    assert ((momentum - dense["exp_avg"].view(2, 2, 32)).abs() <= peak / 127 * 1.01).all()
    exact = dense["exp_avg_sq"].view(2, 2, 32).sqrt()
    assert ((root - exact).abs() <= exact.amax(-1, keepdim=True) * (0.5 / 255 + 1e-6)).all()


def test_sgd_without_momentum_has_nothing_to_load():
    params = parameters(SHAPES)
    source = torch.optim.SGD(params, lr=0.25)
    set_gradients(params, seed=0)
    source.step()
    opt = FlashSGD([nn.Parameter(p.detach().clone()) for p in params])
    opt.load_state_dict(source.state_dict())
    assert opt.param_groups[0]["lr"] == 0.25
    train(opt, 1)


def test_a_refused_amsgrad_state_changes_nothing():
    source, params = trained(torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True})
    opt = FlashAdamW([nn.Parameter(p.detach().clone()) for p in params])
    train(opt, 1)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match="amsgrad"):
        opt.load_state_dict(source.state_dict())
    assert str(opt.state_dict()) == str(before)


@pairs
def test_exported_state_continues_in_torch(theirs: Any, ours: Any, arguments: dict[str, Any]):
    export = pytest.importorskip("flashdist.checkpoint.export")
    params = parameters(SHAPES, FP32)
    opt = ours(params, quantize=False, **arguments)
    train(opt, 3)
    target = theirs([nn.Parameter(p.detach().clone()) for p in params], lr=0.5)
    target.load_state_dict(export.torch_state_dict(opt))
    copies = target.param_groups[0]["params"]
    for name in arguments:
        assert target.param_groups[0][name] == arguments[name], name
    for p, q in zip(params, copies, strict=True):
        for moment in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if moment in opt.state[p]:
                assert_same_bits(target.state[q][moment], opt.state[p][moment], moment)
    for each in (params, copies):
        set_gradients(each, seed=9)
    opt.step()
    target.step()
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(q, p, rtol=2.4e-7, atol=1e-9)


@pairs
def test_exported_8_bit_state_comes_back_code_for_code(theirs: Any, ours: Any, arguments: dict[str, Any]):
    """Export decodes, loading encodes: the codes are those of before (nearest rounding of what they decode to)."""
    export = pytest.importorskip("flashdist.checkpoint.export")
    opt = ours(parameters(SHAPES), **arguments)
    train(opt, 3)
    exported = export.torch_state_dict(opt)
    theirs([nn.Parameter(torch.zeros(s)) for s in SHAPES], lr=0.5).load_state_dict(exported)
    back = ours(parameters(SHAPES))
    back.load_state_dict(exported)
    for p, q in zip(opt.param_groups[0]["params"], back.param_groups[0]["params"], strict=True):
        for key in opt.state[p]:
            if key in ("error", "step"):
                continue
            if key.startswith("exp_avg_sq") and opt.state[p][key].dtype == torch.float32:
                # A root and a square are in between.
                torch.testing.assert_close(back.state[q][key], opt.state[p][key], rtol=2.4e-7, atol=0)
            else:
                assert_same_bits(back.state[q][key], opt.state[p][key], key)
