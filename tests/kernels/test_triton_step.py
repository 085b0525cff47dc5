"""The Triton kernel takes the same step as the eager backend: every rule, dtype, state format and shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from tests.support.backends import BF16, FP16, FP32, BackendUnderTest, parameters, set_gradients
from tests.support.parity import assert_parity, twins

# One launch holds them all: no element, no group, partial groups, rows of several groups with a tail, full tiles,
# tiles that end inside a row, and a full tile followed by a partial one.
SHAPES = [(), (0,), (1,), (31,), (33,), (5, 7), (3, 33), (4, 3, 7, 7), (2, 1025), (1, 1024), (33, 64), (0, 64)]
FEW = [(), (33,), (3, 33), (2, 1025), (33, 32)]

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (FlashAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw-nearest": (FlashAdamW, {"lr": 1e-2, "betas": (0.9, 0.8), "eps": 1e-6}),
    "adam": (FlashAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "lion": (FlashLion, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (FlashSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "sgd-plain": (FlashSGD, {"lr": 0.1, "weight_decay": 0.01}),
    "sgdw-nesterov": (FlashSGDW, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgdw-plain": (FlashSGDW, {"lr": 0.1, "weight_decay": 0.01}),
}


def run_both(lab: BackendUnderTest, cls: Any, params: list[nn.Parameter], steps: int = 2, **arguments: Any) -> None:
    eager, triton = twins(lab, cls, params, **arguments)
    for t in range(steps):
        for opt in (eager, triton):
            set_gradients(opt.param_groups[0]["params"], seed=t)
            opt.step()
        assert_parity(eager, triton)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_on_every_shape(triton_backend: BackendUnderTest, rule: str):
    cls, arguments = RULES[rule]
    run_both(triton_backend, cls, parameters(SHAPES), **arguments)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("rule", ["adamw", "lion", "sgdw-nesterov"])
def test_other_weight_dtypes(triton_backend: BackendUnderTest, rule: str, dtype: torch.dtype):
    cls, arguments = RULES[rule]
    run_both(triton_backend, cls, parameters(FEW, dtype), **arguments)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("master_bits", "quantize"), [(24, False), (32, True), (None, True), (None, False)])
def test_state_formats(triton_backend: BackendUnderTest, dtype: torch.dtype, master_bits: int | None, quantize: bool):
    run_both(
        triton_backend, FlashAdamW, parameters(FEW, dtype), lr=1e-2, master_weight_bits=master_bits, quantize=quantize
    )


def test_a_large_tensor_of_full_tiles(triton_backend: BackendUnderTest):
    run_both(triton_backend, FlashAdamW, parameters([(40, 1024)]), steps=1)


def test_maximize(triton_backend: BackendUnderTest):
    run_both(triton_backend, FlashAdamW, parameters(FEW), maximize=True, weight_decay=0.1)


def test_dtypes_mixed_in_one_optimizer(triton_backend: BackendUnderTest):
    params = [p for dtype in (BF16, FP16, FP32) for p in parameters([(2, 40), (5,)], dtype)]
    run_both(triton_backend, FlashAdamW, params, lr=1e-2)


def test_groups_with_their_own_hyperparameters_in_one_launch(triton_backend: BackendUnderTest):
    params = parameters([(2, 64), (3, 33), (7,), (2, 32)])
    groups = [
        {"params": params[:1], "lr": 1e-2, "weight_decay": 0.5},
        {"params": params[1:2], "lr": 1e-3, "betas": (0.5, 0.999), "eps": 1e-3},
        {"params": params[2:], "lr": 0.1, "betas": (0.8, 0.9), "maximize": True},
    ]
    eager, triton = twins(triton_backend, FlashAdamW, groups)
    for t in range(2):
        for opt in (eager, triton):
            set_gradients([p for g in opt.param_groups for p in g["params"]], seed=t)
            opt.step()
        assert_parity(eager, triton)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd"])
def test_a_non_finite_gradient_spoils_the_same_elements(triton_backend: BackendUnderTest, rule: str, value: float):
    cls, arguments = RULES[rule]
    eager, triton = twins(triton_backend, cls, parameters([(2, 64), (3, 33), (9,)]), **arguments)
    for t in range(3):
        for opt in (eager, triton):
            params = opt.param_groups[0]["params"]
            set_gradients(params, seed=t)
            if t == 1:
                for p in params:
                    p.grad.view(-1)[5] = value
            opt.step()
        assert_parity(eager, triton)
    spoilt = eager.param_groups[0]["params"][0]
    name = next(k for k in eager.state[spoilt] if k.endswith("_scale"))
    assert eager.state[spoilt][name].isnan().flatten().tolist() == [True, False, False, False]


def test_a_clip_factor_of_zero_leaves_a_lost_group_lost(triton_backend: BackendUnderTest):
    """An infinite gradient makes the norm infinite and the factor 0: one NaN, of either sign, among zeros."""
    eager, triton = twins(triton_backend, FlashAdamW, parameters([(2, 64)]))
    for opt in (eager, triton):
        (p,) = opt.param_groups[0]["params"]
        set_gradients([p], seed=0)
        p.grad[0, 5] = float("inf")
        opt.clip_grad_norm_(1.0)
        opt.step()
        assert opt.state[p]["exp_avg_sq_scale"].isnan().flatten().tolist() == [True, False, False, False]
    assert_parity(eager, triton)


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_extreme_magnitudes(triton_backend: BackendUnderTest, rule: str):
    """Group scales at the ends of bf16 and fp32: underflow to zero, squares that underflow or overflow, NaN."""
    scales = [1e-40, 1e-38, 1e-30, 1e-24, 1e-15, 1e-10, 1e10, 1e19, 1e20, 1e38]
    if triton_backend.device.type == "cuda":
        # Squares that are subnormal count as 0. The GPU's root flushes them by itself; the interpreter's does not.
        scales += [1e-20, 1e-19]
    eager, triton = twins(triton_backend, RULES[rule][0], parameters([(len(scales), 32)]))
    for t in range(2):
        for opt in (eager, triton):
            p = opt.param_groups[0]["params"][0]
            set_gradients([p], seed=t)
            factors = torch.tensor(scales, dtype=torch.float64, device=p.device).view(-1, 1)
            p.grad = (p.grad.double() * factors).to(p.dtype)
            opt.step()
        assert_parity(eager, triton)
    scale = "exp_avg_sq_scale" if rule == "adamw" else "exp_avg_scale"
    ends = eager.state[eager.param_groups[0]["params"][0]][scale].flatten()
    assert ends[0] == 0
    if rule == "adamw":
        assert ends[9].isnan()


@pytest.mark.parametrize("what", ["weight", "gradient", "both"])
def test_tensors_that_start_at_an_odd_element(triton_backend: BackendUnderTest, what: str):
    def shifted(t: Tensor) -> Tensor:
        room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        room[1:] = t.reshape(-1)
        return room[1:].view(t.shape)

    eager, triton = twins(triton_backend, FlashLion, parameters([(2, 1024), (40,)]))
    odd = triton.param_groups[0]["params"][0]
    if what != "gradient":
        odd.data = shifted(odd.data)
        assert odd.data_ptr() % 16
    for t in range(2):
        for opt in (eager, triton):
            set_gradients(opt.param_groups[0]["params"], seed=t)
            # Aligned at the first step: the second one must notice.
            if opt is triton and what != "weight" and t == 1:
                odd.grad = shifted(odd.grad)
            opt.step()
        assert_parity(eager, triton)


def test_the_gradients_change_place_between_steps(triton_backend: BackendUnderTest):
    # Lion, since its steps are compared bit for bit, with nothing reloaded in between.
    eager, triton = twins(triton_backend, FlashLion, parameters([(2, 64), (40,)]))
    kept: list[Tensor] = []
    for t in range(3):
        for opt in (eager, triton):
            set_gradients(opt.param_groups[0]["params"], seed=t)
            kept.extend(p.grad for p in opt.param_groups[0]["params"])  # so that no address comes back
            opt.step()
        assert_parity(eager, triton)


def test_other_sets_of_parameters_with_gradients_step_by_step(triton_backend: BackendUnderTest):
    eager, triton = twins(triton_backend, FlashLion, parameters([(2, 64), (40,), (3, 33)]))
    for t, chosen in enumerate([(0, 1), (1, 2), (0, 1, 2), ()]):
        for opt in (eager, triton):
            opt.zero_grad()
            set_gradients([opt.param_groups[0]["params"][i] for i in chosen], seed=t)
            opt.step()
        assert_parity(eager, triton)
    assert [int(triton.state[p]["step"]) for p in triton.param_groups[0]["params"]] == [2, 3, 2]


@pytest.mark.parametrize("quantize", [True, False])
def test_scalars_on_the_device(triton_backend: BackendUnderTest, quantize: bool):
    """A clip factor, GradScaler's two scalars, and an lr tensor enter both backends alike."""
    eager, triton = twins(triton_backend, FlashLion, parameters([(2, 64), (33,)]), quantize=quantize)
    for opt in (eager, triton):
        device = opt.param_groups[0]["params"][0].device
        opt.param_groups[0]["lr"] = torch.tensor(3e-3, device=device)
        for t in range(3):
            set_gradients(opt.param_groups[0]["params"], seed=t, scale=1024.0)
            opt.grad_scale = torch.tensor(1024.0, device=device)
            opt.found_inf = torch.tensor(1.0 if t == 1 else 0.0, device=device)
            # Not by clip_grad_norm_: the backends' norms differ in their last bit.
            opt._clip_factor = torch.tensor(0.3712, device=device)
            opt.step()
            del opt.grad_scale, opt.found_inf
        assert int(opt.state[opt.param_groups[0]["params"][0]]["step"]) == 2
    assert_parity(eager, triton)


def test_lost_updates_are_counted_alike(triton_backend: BackendUnderTest):
    params = [nn.Parameter(torch.ones(2, 40, dtype=BF16)), nn.Parameter(torch.ones(2, 1024, dtype=BF16))]
    eager, triton = twins(triton_backend, FlashSGD, params, lr=1.0)
    counts = []
    for opt in (eager, triton):
        for p in opt.param_groups[0]["params"]:
            # 2^-20 is lost beside 1.0 in 24 bits; 1.0 is not.
            p.grad = torch.full_like(p, 2.0**-20)
            p.grad.view(-1)[:9] = 1.0
        opt.check_numerics = True
        with pytest.raises(RuntimeError, match=r"71 of 80.*2039 of 2048") as error:
            opt.step()
        counts.append(str(error.value))
    assert counts[0] == counts[1]
