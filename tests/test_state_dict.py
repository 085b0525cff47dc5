"""What state_dict gives and load_state_dict takes: bits and dtypes, resumed runs, copies."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from tests.support.backends import (
    BF16,
    FP16,
    FP32,
    BackendUnderTest,
    assert_same,
    assert_same_bits,
    master_weights,
    parameters,
    set_gradients,
    snapshot,
    train,
)

SHAPES = [(), (0,), (33,), (3, 33), (2, 64)]
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (FlashAdamW, {"lr": 1e-2}),
    (FlashAdam, {"lr": 1e-2}),
    (FlashLion, {"lr": 1e-2}),
    (FlashSGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    (FlashSGDW, {"lr": 1e-2}),
]
every_optimizer = pytest.mark.parametrize(("cls", "arguments"), OPTIMIZERS, ids=[c.__name__ for c, _ in OPTIMIZERS])


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_case_3_a_fresh_state_dict_has_torch_s_shape():
    params = parameters(SHAPES)
    ours = FlashAdamW(params).state_dict()
    torchs = torch.optim.AdamW(params).state_dict()
    assert ours.keys() == torchs.keys()
    assert ours["param_groups"][0]["params"] == torchs["param_groups"][0]["params"] == [0, 1, 2, 3, 4]
    assert list(ours["state"]) == [0, 1, 2, 3, 4]
    assert all(isinstance(v, Tensor) for state in ours["state"].values() for v in state.values())
    assert all(float(state["step"]) == 0 for state in ours["state"].values())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@every_optimizer
def test_case_4_a_file_keeps_bits_dtypes_and_bytes(cls: Any, arguments: dict[str, Any], dtype: torch.dtype):
    opt = cls(parameters(SHAPES, dtype), **arguments)
    train(opt, 2)
    saved = opt.state_dict()
    fresh = cls(parameters(SHAPES, dtype, seed=1), **arguments)
    fresh.load_state_dict(through_a_file(saved))
    with torch.no_grad():
        for p, q in zip(fresh.param_groups[0]["params"], opt.param_groups[0]["params"], strict=True):
            p.copy_(q)
    assert_same(fresh, opt)
    assert fresh.state_dict()["param_groups"] == saved["param_groups"]
    a, b = fresh.memory_summary(), opt.memory_summary()
    assert (a.corrections, a.moments, a.scales) == (b.corrections, b.moments, b.scales)


@every_optimizer
def test_a_resumed_run_equals_the_unbroken_one(backend: BackendUnderTest, cls: Any, arguments: dict[str, Any]):
    unbroken = backend.build(cls, parameters(SHAPES, device=backend.device), **arguments)
    train(unbroken, 2)
    weights = [p.detach().clone() for p in unbroken.param_groups[0]["params"]]
    saved = through_a_file(unbroken.state_dict())
    train(unbroken, 2, first=2)
    resumed = backend.build(cls, [nn.Parameter(w) for w in weights], **arguments)
    resumed.load_state_dict(saved)
    train(resumed, 2, first=2)
    assert_same(resumed, unbroken)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_case_12_the_order_of_loading_does_not_matter(backend: BackendUnderTest, order: str):
    model = nn.Linear(40, 3).to(BF16).to(backend.device)
    opt = backend.build(FlashAdamW, model.parameters(), lr=1e-2)
    train(opt, 2)
    saved_model, saved_opt = copy.deepcopy(model.state_dict()), through_a_file(opt.state_dict())
    masters = master_weights(opt)
    # The other model has taken steps of its own, so that its optimizer knows fingerprints that no longer hold.
    other = nn.Linear(40, 3).to(BF16).to(backend.device)
    other_opt = backend.build(FlashAdamW, other.parameters(), lr=1e-2)
    train(other_opt, 1)
    if order == "model first":
        other.load_state_dict(saved_model)
        other_opt.load_state_dict(saved_opt)
    else:
        other_opt.load_state_dict(saved_opt)
        other.load_state_dict(saved_model)
    for expected, found in zip(masters, master_weights(other_opt), strict=True):
        assert_same_bits(expected, found, "master weight")
    train(opt, 1, first=2)
    train(other_opt, 1, first=2)
    assert_same(other_opt, opt)


def test_case_9_the_moments_of_a_frozen_half_survive(backend: BackendUnderTest):
    params = parameters([(2, 64), (3, 33)], device=backend.device)
    opt = backend.build(FlashAdamW, params, lr=1e-2)
    train(opt, 2)
    before = snapshot(opt)[1]
    params[1].requires_grad_(False)
    train(opt, 1, first=2)
    loaded = parameters([(2, 64), (3, 33)], device=backend.device)
    with torch.no_grad():
        for p, q in zip(loaded, params, strict=True):
            p.copy_(q)
    loaded[1].requires_grad_(False)
    other = backend.build(FlashAdamW, loaded, lr=1e-2)
    other.load_state_dict(through_a_file(opt.state_dict()))
    for key, value in snapshot(other)[1].items():
        assert_same_bits(value, before[key], key)
    loaded[1].requires_grad_(True)
    train(other, 1, first=3)
    assert [float(other.state[p]["step"]) for p in loaded] == [4.0, 3.0]


def test_parameters_that_never_had_a_gradient_have_state_in_it():
    params = parameters([(2, 32), (5,)])
    opt = FlashAdamW(params)
    set_gradients(params[:1], seed=0)
    opt.step()
    assert list(opt.state_dict()["state"]) == [0, 1]
    # Frozen ones have none, as in torch.
    frozen = parameters([(2, 32), (5,)])
    frozen[0].requires_grad_(False)
    assert list(FlashAdamW(frozen).state_dict()["state"]) == [1]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_case_14_copies_step_alike_and_share_nothing(backend: BackendUnderTest, way: str):
    model = nn.Linear(40, 3).to(BF16).to(backend.device)
    opt = backend.build(FlashAdamW, model.parameters(), lr=1e-2)
    train(opt, 3)
    copied = copy.deepcopy(opt) if way == "deepcopy" else pickle.loads(pickle.dumps(opt))
    backend.adopt(copied)
    assert_same(copied, opt)

    def storages(o: Any) -> set[int]:
        tensors = [t for state in snapshot_free(o) for t in state]
        return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}

    def snapshot_free(o: Any) -> list[list[Tensor]]:
        return [[p, *o.state[p].values()] for g in o.param_groups for p in g["params"]]

    assert not storages(copied) & storages(opt)
    for o in (opt, copied):
        train(o, 1, first=3)
    assert_same(copied, opt)
    extra = parameters([(2, 32)], device=backend.device)
    copied.add_param_group({"params": extra})
    train(copied, 1, first=4)
    assert float(copied.state[extra[0]]["step"]) == 1


def test_a_copy_of_changed_weights_does_not_trust_stale_corrections(backend: BackendUnderTest):
    # The fingerprints are not copied, so the corrections have to be dropped before.
    model = nn.Linear(40, 3).to(BF16).to(backend.device)
    opt = backend.build(FlashAdamW, model.parameters(), lr=1e-2)
    train(opt, 2)
    with torch.no_grad():
        model.weight.mul_(2)
    copied = backend.adopt(copy.deepcopy(opt))
    (weight, _) = copied.param_groups[0]["params"]
    assert torch.equal(copied.master_weight(weight), weight.float())


def test_groups_added_later_go_through_a_file(backend: BackendUnderTest):
    def build() -> Any:
        params = parameters([(2, 64), (33,), (2, 32)], device=backend.device)
        opt = backend.build(FlashAdamW, params[:1], lr=1e-2)
        opt.add_param_group({"params": params[1:], "lr": 1e-3, "weight_decay": 0.5})
        return opt

    opt, other = build(), build()
    train(opt, 2)
    weights = [p for g in opt.param_groups for p in g["params"]]
    other.load_state_dict(through_a_file(opt.state_dict()))
    with torch.no_grad():
        for p, q in zip([p for g in other.param_groups for p in g["params"]], weights, strict=True):
            p.copy_(q)
    assert other.param_groups[1]["lr"] == 1e-3
    train(opt, 1, first=2)
    train(other, 1, first=2)
    assert_same(other, opt)


def test_a_parameter_without_state_in_the_file_starts_afresh(backend: BackendUnderTest):
    params = parameters([(2, 32), (5,)], device=backend.device)
    opt = backend.build(FlashAdamW, params)
    train(opt, 2)
    saved = copy.deepcopy(opt.state_dict())
    del saved["state"][1]
    opt.load_state_dict(saved)
    train(opt, 1, first=2)
    assert [float(opt.state[p]["step"]) for p in params] == [3.0, 1.0]


def test_the_state_dict_of_a_scheduled_tensor_lr_is_kept(backend: BackendUnderTest):
    params = parameters([(2, 32)], device=backend.device)
    opt = backend.build(FlashAdamW, params, lr=torch.tensor(1e-2))
    train(opt, 1)
    saved = through_a_file(opt.state_dict())
    opt.param_groups[0]["lr"].fill_(1.0)
    opt.load_state_dict(saved)
    assert float(opt.param_groups[0]["lr"]) == float(torch.tensor(1e-2))
