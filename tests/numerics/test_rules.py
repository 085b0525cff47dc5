"""The five optimizers with fp32 weights and fp32 moments: torch.optim's results, and the papers' formulas.

Both sides run in fp32 on the same gradients, and a third run in fp64 tells what the right answer is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW
from flashdist.numerics import rules
from flashdist.numerics.rules import GroupScalars
from tests.support import reference
from tests.support.cases import normal
from tests.support.tolerances import tolerance

STEPS = 100
SHAPES = [(5, 33), (7,), (2, 64)]
BOUND = tolerance("rule, 100 fp32 steps")


@cache
def gradients() -> list[list[Tensor]]:
    """One list of gradients a step, their scales two orders of magnitude apart, and some exact zeros."""
    out = []
    for t in range(STEPS):
        some = [normal(shape, 1000 * t + i, 10.0 ** (-i)) for i, shape in enumerate(SHAPES)]
        some[0][0, :5] = 0.0
        out.append(some)
    return out


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.nn.Parameter(normal(shape, i).to(dtype)) for i, shape in enumerate(SHAPES)]


def run(opt_class: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **kwargs: Any):
    params = parameters(dtype)
    opt = opt_class(params, **kwargs)
    for some in gradients():
        for p, g in zip(params, some, strict=True):
            p.grad = g.to(dtype)
        opt.step()
    return params, opt


def error_of(actual: Tensor, expected: Tensor) -> float:
    """The largest error in units of the largest element."""
    difference = actual.detach().double() - expected.detach().double()
    return float(difference.abs().max() / expected.detach().abs().max())


def close(actual: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    assert error_of(actual, expected) <= bound


def same_as_torch(
    ours: type[FlashOptimizer], theirs: type[torch.optim.Optimizer], moments: dict[str, str], **kwargs: Any
):
    mine, opt = run(ours, quantize=False, **kwargs)
    exact, exact_opt = run(theirs, torch.float64, **kwargs)
    fp32, fp32_opt = run(theirs, **kwargs)
    for p, q, r in zip(mine, exact, fp32, strict=True):
        close(p, r)
        # A shrink or gain that fp32 cannot hold is off alike in every one of the 100 steps, in torch's fp32 run too:
        # against fp64 twice its error counts.
        close(p, q, BOUND + 2 * error_of(r, q))
        for ours_key, theirs_key in moments.items():
            own = error_of(fp32_opt.state[r][theirs_key], exact_opt.state[q][theirs_key])
            close(opt.state[p][ours_key], exact_opt.state[q][theirs_key], BOUND + 2 * own)


ADAM_MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
ADAM_GRID = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3},
    {"betas": (0.0, 0.999)},
    {"betas": (0.9, 0.0)},
    {"betas": (0.5, 0.95)},
    {"betas": (0.99, 0.9999)},
    {"eps": 1e-3},
    {"eps": 1e-16},
    {"lr": 0.1, "maximize": True},
    {"lr": 0.0},
    {"lr": 3e-3, "betas": (0.95, 0.98), "eps": 1e-6, "weight_decay": 0.01, "maximize": True},
]


def described(kwargs: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in kwargs.items()) or "defaults"


@pytest.mark.parametrize("kwargs", ADAM_GRID, ids=described)
def test_adamw_is_torchs(kwargs):
    same_as_torch(FlashAdamW, torch.optim.AdamW, ADAM_MOMENTS, **kwargs)


@pytest.mark.parametrize("kwargs", ADAM_GRID, ids=described)
def test_adam_is_torchs(kwargs):
    same_as_torch(FlashAdam, torch.optim.Adam, ADAM_MOMENTS, **kwargs)


SGD_GRID = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "maximize": maximize, "lr": 1e-2}
    for momentum, dampening, decay, maximize in product((0.0, 0.9), (0.0, 0.3), (0.0, 0.1), (False, True))
] + [
    {"momentum": 0.9, "nesterov": True, "lr": 1e-2},
    {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1, "maximize": True, "lr": 1e-2},
    {},
]


@pytest.mark.parametrize("kwargs", SGD_GRID, ids=described)
def test_sgd_is_torchs(kwargs):
    moments = {"momentum_buffer": "momentum_buffer"} if kwargs.get("momentum") else {}
    same_as_torch(FlashSGD, torch.optim.SGD, moments, **kwargs)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(FlashAdamW, torch.optim.AdamW), (FlashAdam, torch.optim.Adam), (FlashSGD, torch.optim.SGD)],
)
def test_defaults_are_torchs(ours, theirs):
    mine, torchs = ours(parameters()).defaults, theirs(parameters()).defaults
    shared = {"lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize"} & torchs.keys()
    assert {k: mine[k] for k in shared} == {k: torchs[k] for k in shared}


def test_defaults_of_the_others():
    lion, sgdw = FlashLion(parameters()).defaults, FlashSGDW(parameters()).defaults
    assert (lion["lr"], lion["betas"], lion["weight_decay"]) == (1e-4, (0.9, 0.99), 0)
    assert (sgdw["lr"], sgdw["momentum"], sgdw["dampening"], sgdw["weight_decay"]) == (1e-3, 0, 0, 0)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.0, 0.9), (0.9, 0.0)])
def test_lion_is_the_papers(betas, decay, maximize):
    lr = 2.0**-7  # 1 - lr * decay is exact in fp32, so that no error adds up over the steps
    params, opt = run(FlashLion, lr=lr, betas=betas, weight_decay=decay, maximize=maximize, quantize=False)
    expected = [p.detach() for p in parameters()]
    momenta = [torch.zeros_like(p) for p in expected]
    for some in gradients():
        for i, g in enumerate(some):
            g = -g if maximize else g
            expected[i], momenta[i] = reference.lion(expected[i], momenta[i], g, lr, betas, decay)
    for p, q, m in zip(params, expected, momenta, strict=True):
        close(p, q)
        close(opt.state[p]["exp_avg"], m)


def test_lion_does_not_move_without_a_direction():
    p = torch.nn.Parameter(torch.ones(2, 33))
    opt = FlashLion([p], lr=0.1, quantize=False)
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(p.detach(), torch.ones(2, 33))


@pytest.mark.parametrize("decouple_lr", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True), (0.0, 0.5, False)],
)
def test_sgdw_is_the_papers(momentum, dampening, nesterov, maximize, decouple_lr):
    """With a learning rate that changes at each step: decay is decay * lr, or decay * lr / initial lr."""
    lr, decay = 1e-2, 1e-3 if decouple_lr else 0.1
    params = parameters()
    opt = FlashSGDW(
        params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=decay, nesterov=nesterov,
        maximize=maximize, decouple_lr=decouple_lr, quantize=False,
    )  # fmt: skip
    expected = [reference.SgdwState(p.detach().double(), momentum, dampening, nesterov) for p in parameters()]
    for t, some in enumerate(gradients()):
        now = lr * (1 - t / STEPS)
        opt.param_groups[0]["lr"] = now
        for p, g, e in zip(params, some, expected, strict=True):
            p.grad = g
            g = -g.double() if maximize else g.double()
            e.step(g, now, decay * (now / lr if decouple_lr else now))
        opt.step()
    for p, e in zip(params, expected, strict=True):
        close(p, e.p)


@pytest.mark.parametrize("opt_class", [FlashAdamW, FlashLion, FlashSGDW])
def test_decouple_lr_decays_by_the_ratio_to_the_groups_own_lr(opt_class):
    """With zero gradients only the decay moves a weight."""
    first, second = torch.nn.Parameter(torch.ones(2, 33)), torch.nn.Parameter(torch.ones(2, 33))
    groups = [{"params": [first]}, {"params": [second], "lr": 1e-2}]
    opt = opt_class(groups, lr=1e-3, weight_decay=0.01, decouple_lr=True, quantize=False)
    expected = [1.0, 1.0]
    for factor in (1.0, 0.5, 0.1, 2.0):
        for i, (p, base) in enumerate(((first, 1e-3), (second, 1e-2))):
            p.grad = torch.zeros_like(p)
            opt.param_groups[i]["lr"] = base * factor
            expected[i] *= 1 - 0.01 * factor
        opt.step()
    close(first.detach(), torch.full((2, 33), expected[0], dtype=torch.float64))
    close(second.detach(), torch.full((2, 33), expected[1], dtype=torch.float64))


@pytest.mark.parametrize("opt_class", [FlashAdamW, FlashLion, FlashSGDW])
def test_decouple_lr_of_a_group_with_lr_0_is_refused(opt_class):
    p = torch.nn.Parameter(torch.ones(2, 33))
    with pytest.raises(ValueError, match="lr must be above 0"):
        opt_class([{"params": [p], "lr": 0.0}], lr=1e-3, decouple_lr=True)
    opt_class([p], lr=0.0)


def test_bias_corrections_are_computed_in_fp64():
    """1 - 0.9999^t of an fp32 beta is off by 2e-4 at t = 1, which would be 1e-4 of a step."""
    scalars = GroupScalars(lr=1.0, bias1=0.9, bias2=0.9999)
    for t in (1, 2, 1000, 10**6, 2**24):
        s = scalars.at(t)
        assert s.step_size == pytest.approx(1 / (1 - 0.9**t), rel=1e-15)
        assert s.root_bias2 == pytest.approx((1 - 0.9999**t) ** -0.5, rel=1e-15)


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2), torch.tensor([1e-2], dtype=torch.float64)])
def test_lr_may_be_a_tensor(lr):
    params, _ = run(FlashAdamW, lr=lr, quantize=False)
    expected, _ = run(FlashAdamW, lr=1e-2, quantize=False)
    for p, q in zip(params, expected, strict=True):
        close(p.detach(), q.detach())


def test_adam_formula_of_one_step_in_fp64():
    """The rule itself, in fp64, against the paper's: no rounding hides a wrong term."""
    p, g1, g2 = (normal((33,), seed).double() for seed in range(3))
    zero = torch.zeros_like(p)
    scalars = GroupScalars(
        lr=0.1, decay_per_lr=0.3, decay1=0.9, gain1=1 - 0.9, first_gain1=1 - 0.9, decay2=0.99, gain2=1 - 0.99,
        eps=1e-4, bias1=0.9, bias2=0.99,
    )  # fmt: skip
    exact = reference.ExactAdam((0.9, 0.99), 1e-4)
    m, v, mine, expected = zero, zero, p, p
    for t, g in enumerate((g1, g2, g1 - g2), start=1):
        mine, m, v = rules.adamw(mine, g, m, v, scalars.at(t))
        expected = (1 - 0.1 * 0.3) * expected - 0.1 * exact.update(g)
        close(mine, expected, tolerance("rule, one fp64 step"))


@pytest.mark.parametrize("rule", [rules.ADAMW, rules.ADAM, rules.LION, rules.SGD, rules.SGDW], ids=lambda r: r.name)
def test_a_rule_leaves_its_inputs_alone(rule):
    tensors = [normal((33,), seed).abs() for seed in range(4)]
    before = [t.clone() for t in tensors]
    scalars = GroupScalars(lr=0.1, decay_per_lr=0.1, l2=0.1, decay1=0.9, decay2=0.9, bias1=0.9, bias2=0.9, eps=1e-8)
    rule.update(*tensors, scalars.at(1))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("rule", [rules.LION, rules.SGD, rules.SGDW, rules.SGD_PLAIN], ids=lambda r: r.name)
def test_a_moment_that_a_rule_does_not_have_passes_through(rule):
    p, g, m, v = (normal((33,), seed) for seed in range(4))
    assert rule.update(p, g, m, v, GroupScalars(lr=0.1).at(1))[2] is v
