"""What is refused, and that the message says which parameter, which value, and what to do instead."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from tests.support.backends import BF16, BackendUnderTest, assert_unchanged, parameters, set_gradients, snapshot, train

NAN, INF = float("nan"), float("inf")


def one() -> list[nn.Parameter]:
    return parameters([(2, 32)])


@pytest.mark.parametrize(("cls", "arguments", "match"), [
    (FlashAdamW, {"lr": -1e-3}, r"lr .*>= 0, got -0\.001"),
    (FlashAdamW, {"lr": NAN}, "lr .*finite.*nan"),
    (FlashAdamW, {"lr": INF}, "lr .*finite.*inf"),
    (FlashAdamW, {"lr": torch.ones(2)}, r"lr .*one element.*\(2,\)"),
    (FlashAdamW, {"betas": (1.0, 0.9)}, r"betas\[0\] .*\[0, 1\), got 1\.0"),
    (FlashAdamW, {"betas": (0.9, -0.1)}, r"betas\[1\] .*\[0, 1\), got -0\.1"),
    (FlashAdamW, {"betas": (0.9, NAN)}, r"betas\[1\] .*nan"),
    (FlashAdamW, {"betas": (0.9,)}, "betas .*two"),
    (FlashAdamW, {"eps": -1e-8}, "eps .*>= 0"),
    (FlashAdamW, {"eps": NAN}, "eps .*nan"),
    (FlashAdamW, {"weight_decay": -0.1}, r"weight_decay .*-0\.1"),
    (FlashAdamW, {"weight_decay": NAN}, "weight_decay .*nan"),
    (FlashAdamW, {"master_weight_bits": 16}, "master_weight_bits .*24, 32 or None, got 16"),
    (FlashAdamW, {"lr": 0.0, "decouple_lr": True}, "lr .*above 0.*decouple_lr"),
    (FlashAdamW, {"amsgrad": True}, "amsgrad=True"),
    (FlashAdamW, {"differentiable": True}, "differentiable=True"),
    (FlashAdam, {"betas": (0.9, 1.0)}, r"betas\[1\] .*1\.0"),
    (FlashAdam, {"amsgrad": True}, "amsgrad=True"),
    (FlashLion, {"betas": (0.9, 1.0)}, r"betas\[1\] .*1\.0"),
    (FlashLion, {"differentiable": True}, "differentiable=True"),
    (FlashSGD, {"momentum": 1.0}, r"momentum .*\[0, 1\), got 1\.0"),
    (FlashSGD, {"momentum": -0.1}, r"momentum .*-0\.1"),
    (FlashSGD, {"dampening": NAN}, "dampening .*nan"),
    (FlashSGD, {"nesterov": True}, "nesterov .*momentum above 0"),
    (FlashSGDW, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov .*no dampening"),
    (FlashSGDW, {"lr": 0.0, "decouple_lr": True}, "lr .*above 0"),
])  # fmt: skip
def test_arguments(cls: Any, arguments: dict[str, Any], match: str):
    with pytest.raises(ValueError, match=match):
        cls(one(), **arguments)


@pytest.mark.parametrize("name", ["fused", "foreach", "capturable"])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("cls", [FlashAdamW, FlashAdam, FlashLion, FlashSGD, FlashSGDW])
def test_torch_s_switches_are_accepted_with_any_value(cls: Any, name: str, value: bool):
    assert name not in cls(one(), **{name: value}).param_groups[0]


@pytest.mark.parametrize(("cls", "arguments", "name"), [
    (FlashAdamW, {"betas": (0.999, 0.999)}, r"betas\[0\]"), (FlashLion, {"betas": (0.9, 0.999)}, r"betas\[1\]"),
    (FlashSGD, {"momentum": 0.999}, "momentum"),
])  # fmt: skip
def test_a_momentum_too_slow_for_its_codes_warns(cls: Any, arguments: dict[str, Any], name: str):
    with pytest.warns(UserWarning, match=rf"{name} = 0\.999.*quantize=False") as caught:
        cls(one(), **arguments)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(one(), quantize=False, **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_of_parameters(dtype: torch.dtype):
    p = nn.Parameter(torch.zeros(2, 3, dtype=dtype), requires_grad=False)
    pattern = rf"params'\]\[1\] of shape \(2, 3\) is {dtype}.*bfloat16, float16 and float32.*cast_model"
    with pytest.raises(TypeError, match=pattern):
        FlashAdamW([*one(), p])
    with pytest.raises(TypeError, match=r"parameter head\.weight of shape"):
        FlashAdamW([("head.weight", p)])


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    params = one()
    opt = FlashAdamW(params)
    for bad in ({"params": parameters([(5,)]), "lr": -1.0}, {"params": [nn.Parameter(torch.zeros(3).double())]}):
        with pytest.raises((ValueError, TypeError)):
            opt.add_param_group(bad)
        assert len(opt.param_groups) == 1
    train(opt, 1)


def test_flat_parameters_of_fsdp1():
    p = nn.Parameter(torch.zeros(64))
    p._is_flat_param = True
    with pytest.raises(TypeError, match=r"flat parameter of FSDP1.*fully_shard"):
        FlashAdamW([p])


def test_sparse_gradients(backend: BackendUnderTest):
    embedding = nn.Embedding(4, 32, sparse=True, device=backend.device)
    opt = backend.build(FlashAdamW, [("table", embedding.weight)])
    embedding(torch.tensor([1], device=backend.device)).sum().backward()
    before = snapshot(opt)
    for refused in (opt.step, lambda: opt.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"parameter table of shape \(4, 32\) has a sparse.*sparse=False"):
            refused()
    assert_unchanged(opt, before)


def test_a_sparse_gradient_stops_the_step_before_any_parameter_moves(backend: BackendUnderTest):
    embedding = nn.Embedding(4, 32, sparse=True, device=backend.device)
    first = parameters([(2, 32)], device=backend.device)
    opt = backend.build(FlashSGD, [*first, embedding.weight], lr=1.0)
    set_gradients(first, seed=0)
    embedding(torch.tensor([1], device=backend.device)).sum().backward()
    weight = first[0].detach().clone()
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step()
    assert torch.equal(first[0], weight)


def test_parameters_replaced_after_construction():
    """Case 20: what fully_shard does to a model whose optimizer exists already."""
    model = nn.Linear(32, 2)
    opt = FlashAdamW(model.parameters())
    opt.param_groups[0]["params"][0] = nn.Parameter(model.weight.detach().clone())
    for refused in (opt.step, opt.state_dict, lambda: opt.clip_grad_norm_(1.0), lambda: opt.load_state_dict({})):
        with pytest.raises(RuntimeError, match=r"not built with.*Build the optimizer after fully_shard"):
            refused()
    opt = FlashAdamW(model.parameters())
    opt.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3)))
    with pytest.raises(RuntimeError, match="not built with"):
        opt.step()


def test_parameters_on_meta():
    p = nn.Parameter(torch.zeros(2, 32, dtype=BF16, device="meta"))
    opt = FlashAdamW([("layer.weight", p)])
    with pytest.raises(RuntimeError, match=r"layer\.weight of shape \(2, 32\) is on the meta device.*to_empty"):
        opt.state_dict()
    p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="meta device"):
        opt.step()
    assert not opt.state.get(p)


def test_master_weight_of_a_stranger():
    with pytest.raises(ValueError, match=r"shape \(3,\) is not in any param group"):
        FlashAdamW(one()).master_weight(nn.Parameter(torch.zeros(3)))


@pytest.mark.parametrize(("name", "value"), [("lr", -1.0), ("betas", (0.9, 2.0)), ("weight_decay", NAN), ("eps", -1.0)])
def test_a_hyperparameter_spoilt_later(backend: BackendUnderTest, name: str, value: Any):
    params = parameters([(2, 32)], device=backend.device)
    opt = backend.build(FlashAdamW, params)
    train(opt, 1)
    before = snapshot(opt)
    opt.param_groups[0][name] = value
    set_gradients(params, seed=0)
    with pytest.raises(ValueError, match=name):
        opt.step()
    assert_unchanged(opt, before)


@pytest.mark.parametrize(
    ("name", "value"), [("quantize", False), ("master_weight_bits", 32), ("master_weight_bits", None)]
)
def test_a_state_format_changed_after_the_first_step(backend: BackendUnderTest, name: str, value: Any):
    params = parameters([(2, 32)], device=backend.device)
    opt = backend.build(FlashAdamW, params)
    train(opt, 1)
    before = snapshot(opt)
    opt.param_groups[0][name] = value
    set_gradients(params, seed=0)
    with pytest.raises(
        ValueError, match=rf"params'\]\[0\] of shape \(2, 32\).*{re.escape('master_weight_bits, quantize')}"
    ):
        opt.step()
    assert_unchanged(opt, before)


def damaged(state_dict: dict[str, Any], how: str) -> dict[str, Any]:
    d = copy.deepcopy(state_dict)
    state, group = d["state"][0], d["param_groups"][0]
    if how == "no groups":
        del d["param_groups"]
    elif how == "another group":
        d["param_groups"].append(copy.deepcopy(group))
    elif how == "a parameter less":
        group["params"] = group["params"][:1]
    elif how == "version":
        group["flashdist_format"] = 999
    elif how == "dtype":
        state["exp_avg"] = state["exp_avg"].to(BF16)  # what torch's own load_state_dict would do
    elif how == "shape":
        state["exp_avg"] = state["exp_avg"][:1]
    elif how == "scale shape":
        state["exp_avg_scale"] = state["exp_avg_scale"].view(-1)
    elif how == "missing key":
        del state["exp_avg_sq_scale"]
    elif how == "extra key":
        state["max_exp_avg_sq"] = state["exp_avg_sq"]
    elif how == "no tensor":
        state["step"] = 3
    elif how == "hyperparameter":
        group["lr"] = -1.0
    elif how == "last of two":
        d["state"][1]["exp_avg"] = d["state"][1]["exp_avg"].double()
    return d


@pytest.mark.parametrize(("how", "match"), [
    ("no groups", "'state' and 'param_groups'"), ("another group", "2 param groups, this optimizer 1"),
    ("a parameter less", "1 parameters in the state dict, 2 here"), ("version", "format version 999"),
    ("dtype", r"'exp_avg'.*\[0\] of shape \(2, 32\).*int8.*bfloat16"), ("shape", r"'exp_avg'.*\(2, 32\).*\(1, 32\)"),
    ("scale shape", r"'exp_avg_scale'.*\(2, 1\).*\(2,\)"), ("missing key", "must have the keys.*exp_avg_sq_scale"),
    ("extra key", "max_exp_avg_sq"), ("no tensor", "'step'.*int"), ("hyperparameter", "lr .*-1"),
    ("last of two", r"'exp_avg'.*\[1\] of shape \(5,\).*float32.*float64"),
])  # fmt: skip
def test_a_state_dict_that_does_not_fit_changes_nothing(how: str, match: str):
    opt = FlashAdamW(parameters([(2, 32), (5,)]), lr=1e-2)
    train(opt, 1)
    other = FlashAdamW(parameters([(2, 32), (5,)], seed=1), lr=1e-3)
    train(other, 2)
    before, groups = snapshot(opt), copy.deepcopy(opt.state_dict()["param_groups"])
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict(damaged(other.state_dict(), how))
    assert_unchanged(opt, before)
    assert opt.state_dict()["param_groups"] == groups
    train(opt, 1)


@pytest.mark.parametrize(("cls", "arguments"), [
    (FlashLion, {}), (FlashSGD, {"momentum": 0.9}), (FlashAdamW, {"quantize": False}),
    (FlashAdamW, {"master_weight_bits": 32}), (FlashAdamW, {"master_weight_bits": None}),
])  # fmt: skip
def test_state_of_another_kind_of_optimizer(cls: Any, arguments: dict[str, Any]):
    """Another rule's is refused. Another format of the same rule's brings its settings along, and is taken."""
    source = cls(one(), **arguments)
    train(source, 1)
    opt = FlashAdamW(one())
    train(opt, 1)
    before = snapshot(opt)
    if cls is FlashAdamW:
        opt.load_state_dict(copy.deepcopy(source.state_dict()))
        assert opt.state_dict()["state"][0].keys() == source.state_dict()["state"][0].keys()
        train(opt, 1)
    else:
        with pytest.raises(ValueError, match="must have the keys"):
            opt.load_state_dict(copy.deepcopy(source.state_dict()))
        assert_unchanged(opt, before)
