"""Zero gradients: what 8-bit momentum does after gradients stop (case 26), and decay alone (case 27)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashdist import FlashAdamW, NumericsError
from flashdist.numerics.companding import (
    decode_momentum,
    decode_variance,
    dither_offsets,
    encode_momentum,
    encode_variance,
)
from tests.support import reference
from tests.support.tolerances import tolerance

LR = 1e-3
Rounding = Callable[[int], Tensor | float]


def adamw(p: Tensor, **kwargs: object) -> FlashAdamW:
    return FlashAdamW([p], **{"lr": LR, "weight_decay": 0.0, **kwargs})  # type: ignore[arg-type]


# Case 26: gradients stop.


def zero_gradient_excess(sigma: float, beta2: float, active: bool, seed: int) -> tuple[float, float]:
    """500 steps after gradients have stopped: by how much a step exceeds exact's, and the excess at the end, in lr.

    With ``active`` the first element of each group goes on at constant amplitude, alternating; it is left out. Then it
    holds the group's scales up.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (64, 32)
    scale = (sigma * torch.randn(shape, generator=generator)).exp()
    p = torch.nn.Parameter(torch.zeros(shape))
    opt, exact = adamw(p, betas=(0.9, beta2)), reference.ExactAdam((0.9, beta2))
    worst = last = 0.0
    for t in range(1000):
        g = torch.randn(shape, generator=generator) * scale
        if t >= 500:
            g = torch.zeros(shape)
            g[:, 0] = scale[:, 0] * (-1) ** t * active
        before = p.detach().clone()
        p.grad = g
        opt.step()
        excess = (p.detach() - before).abs() / LR - exact.update(g).abs()
        if t >= 500:
            last = float(excess[:, int(active) :].max())
            worst = max(worst, last)
    return worst, last


MISSED = pytest.mark.xfail(
    strict=True,
    reason="0.63 lr: an element with a hundredth of its largest neighbour's gradients has a variance code of 1 or 2 of "
    "255, and a root of 0.44 of exact. 6 of 48 draws miss 0.6 (worst 0.85), 7 of 48 with a momentum rounded to nearest",
)
DRAWS = [(0.0, 0.999, 0), (0.0, 0.95, 0), *((1.0, beta2, seed) for beta2 in (0.999, 0.95) for seed in (0, 1, 2))]


@pytest.mark.parametrize("active", [False, True], ids=["all stop", "beside an active one"])
@pytest.mark.parametrize(("sigma", "beta2", "seed"), DRAWS)
def test_case_26_after_gradients_stop_no_step_exceeds_exacts(request, active, sigma, beta2, seed):
    worst, last = zero_gradient_excess(sigma, beta2, active, seed)
    # The momentum dies: it does not stick on a code.
    assert last <= 1e-6
    if (sigma, beta2, seed) == (1.0, 0.999, 0):
        request.node.add_marker(MISSED)
    assert worst <= tolerance("case 26 lognormal scales, lr" if sigma else "case 26 equal scales, lr")


def step_of_a_dead_element(momentum: Rounding) -> float:
    """The mean step in lr, 300 steps after the gradients of 31 elements have stopped beside a constant one of 1."""
    generator = torch.Generator().manual_seed(0)
    m = v = torch.zeros(64, 32)
    for t in range(1, 500):
        g = 0.3 * torch.randn(64, 32, generator=generator) if t < 200 else torch.zeros(64, 32)
        g[:, 0] = 1.0
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        step = (m / (v.sqrt() + 1e-8))[:, 1:].abs().mean()
        m = decode_momentum(*encode_momentum(m, momentum(t)))
        v = decode_variance(*encode_variance(v, dither_offsets(t)))
    return float(step)


def test_a_dead_element_stands_still_beside_a_constant_one():
    """0.9 of a momentum code below 5 rounds to that code again, while the variance decays to its last code."""
    assert step_of_a_dead_element(dither_offsets) == 0.0
    assert step_of_a_dead_element(lambda t: 0.5) > 3.0


# Case 27: weight decay alone.


def decayed(opt: torch.optim.Optimizer, p: Tensor, steps: int) -> Tensor:
    """A weight of 1.0 after so many steps of zero gradients."""
    p.grad = torch.zeros_like(p)
    for _ in range(steps):
        opt.step()
    return opt.master_weight(p) if isinstance(opt, FlashAdamW) else p.detach()


@pytest.mark.parametrize(
    ("shape", "dtype", "bits", "steps"),
    [
        ((1, 32), torch.bfloat16, 32, 1_000),
        ((3,), torch.bfloat16, 24, 1_000),
        ((1, 32), torch.float16, 32, 1_000),
        ((3,), torch.float16, 24, 1_000),
        pytest.param((1, 32), torch.bfloat16, 32, 10_000, marks=pytest.mark.slow),
        pytest.param((3,), torch.bfloat16, 24, 10_000, marks=pytest.mark.slow),
    ],
    ids=["bf16-32bits", "bf16-1D", "fp16-32bits", "fp16-1D", "bf16-32bits-10000", "bf16-1D-10000"],
)
def test_case_27_decay_of_1e_6_a_step_is_kept(shape, dtype, bits, steps):
    """Exact is torch.optim.AdamW in fp32, whose factor 1 - 1e-6 is itself 1.3 % off in what it takes away."""
    exact = torch.nn.Parameter(torch.ones(1))
    decayed(torch.optim.AdamW([exact], lr=1e-5, weight_decay=0.1, foreach=False), exact, steps)
    assert 1 - float(exact.detach()) == pytest.approx(1 - (1 - 1e-6) ** steps, rel=0.03)
    p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    w = decayed(adamw(p, lr=1e-5, weight_decay=0.1, master_weight_bits=bits), p, steps)
    assert float((w / exact.detach() - 1).abs().max()) <= tolerance("case 27 decay, relative") * steps / 10_000


def test_case_27_with_24_bits_it_is_lost_and_check_numerics_says_so():
    p = torch.nn.Parameter(torch.ones(3, 33, dtype=torch.bfloat16))
    opt = adamw(p, lr=1e-5, weight_decay=0.1)
    p.grad = torch.zeros_like(p)
    for _ in range(100):
        opt.step()
    assert torch.equal(opt.master_weight(p), torch.ones(3, 33))

    opt = adamw(p, lr=1e-5, weight_decay=0.1, check_numerics=True)
    with pytest.raises(NumericsError, match=r"\(3, 33\).*99 of 99.*master_weight_bits=32"):
        opt.step()


@pytest.mark.parametrize(("lr", "raises"), [(2.0**-17, True), (2.0**-15, False)])
def test_case_27_the_limit_is_about_2_to_minus_17(lr, raises):
    """24 bits have steps of 2^-16 below 1.0 (bf16's ULP of 2^-8, 256 steps): half of one is rounded away."""
    p = torch.nn.Parameter(torch.ones(2, 32, dtype=torch.bfloat16))
    opt = adamw(p, lr=lr * 0.99, weight_decay=1.0, check_numerics=True)
    p.grad = torch.zeros_like(p)
    if raises:
        with pytest.raises(NumericsError):
            opt.step()
    else:
        opt.step()
        assert float(opt.master_weight(p).max()) < 1.0


@pytest.mark.parametrize("bits", [32, None])
def test_check_numerics_is_quiet_where_nothing_is_lost(bits):
    p = torch.nn.Parameter(torch.ones(3, 33, dtype=torch.bfloat16 if bits else torch.float32))
    opt = adamw(p, lr=1e-5, weight_decay=0.1, master_weight_bits=bits, check_numerics=True)
    p.grad = torch.zeros_like(p)
    opt.step()
    # No update at all, and updates that are exactly zero, are not lost ones.
    opt.param_groups[0]["weight_decay"] = 0.0
    opt.step()
