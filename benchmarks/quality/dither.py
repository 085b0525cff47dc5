"""Which rounding follows AdamW: nearest or dithered variance codes, with and without a dithered momentum, by beta2.

Synthetic gradients in groups of 32 whose scales differ, in six situations. Reported for the update ``m / sqrt(v)``
against exact Adam's on the same gradients: the mean of its ratio of root variances, its normalised error and its gain
(projection on the exact one), all over the last quarter of the steps.

Usage: python -m benchmarks.quality.dither [--out FILE.json] [--beta2 0.95 ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality import results
from benchmarks.quality.schemes import SCHEMES

BETA1, EPS = 0.9, 1e-12
GROUPS, WIDTH = 64, 32
BETA2 = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
ROUNDINGS = ("flashdist_nearest", "flashdist_variance", "flashdist")
Gradient = Callable[[int, Tensor], Tensor]  # step, standard normal numbers -> the gradient


def beside_a_steady_one(scale: Callable[[int], float], spike: int | None = None) -> Gradient:
    """Element 0 of each group is steady at 1 (with one spike of 1e4); the other 31 are normal, of the given scale."""

    def gradient(t: int, normal: Tensor) -> Tensor:
        g = normal * scale(t)
        g[:, 0] = 1e4 if t == spike else 1.0
        return g

    return gradient


def situations(time: int) -> dict[str, Gradient]:
    """By name; ``time`` is the number of steps in which the variance has settled."""
    spread = torch.randn(GROUPS, WIDTH, generator=torch.Generator().manual_seed(1))
    ramp = 4 * time
    return {
        "lognormal 0.5": lambda t, normal: (normal + 0.1) * (0.5 * spread).exp(),
        "lognormal 1": lambda t, normal: (normal + 0.1) * spread.exp(),
        "lognormal 1, rare": lambda t, normal: normal * spread.exp() * (normal.roll(1, 0) > 1.28),
        "lognormal 1, falling tenfold": lambda t, normal: (normal + 0.1) * spread.exp() * 10 ** (-t / ramp),
        "beside a steady one, falling 0.3 to 0.03": beside_a_steady_one(lambda t: 0.3 if t < time else 0.03),
        "beside a steady one, rising 0.02 to 0.06": beside_a_steady_one(lambda t: 0.02 if t < time else 0.06),
        "beside a spike of 1e4": beside_a_steady_one(lambda t: 0.3, spike=time),
    }


def compare(gradient: Gradient, beta2: float, steps: int) -> dict[str, dict[str, float]]:
    """Each rounding's measures in one situation."""
    generator = torch.Generator().manual_seed(0)
    zero = torch.zeros(GROUPS, WIDTH)
    exact, kept = (zero, zero), dict.fromkeys(ROUNDINGS, (zero, zero))
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in ROUNDINGS}
    for t in range(1, steps + 1):
        g = gradient(t, torch.randn(GROUPS, WIDTH, generator=generator))
        exact = ema(exact, g, beta2)
        measure = t > 3 * steps // 4
        for name in ROUNDINGS:
            m, v = ema(kept[name], g, beta2)
            if measure:
                sums[name] += measures((m, v), exact)
            scheme = SCHEMES[name]
            kept[name] = (scheme.momentum(m, t), scheme.variance(v, t))
    out = {}
    for name, (error, product, square, ratio) in ((name, s.tolist()) for name, s in sums.items()):
        count = steps - 3 * steps // 4
        out[name] = {"root_ratio": ratio / count, "update_nmse": error / square, "gain": product / square}
    return out


def stopped(beta2: float, steps: int) -> dict[str, float]:
    """The mean step in lr, long after the gradients of 31 elements have stopped beside a constant one; exact: 0."""
    generator = torch.Generator().manual_seed(0)
    zero = torch.zeros(GROUPS, WIDTH)
    kept, out = {name: (zero, zero) for name in ROUNDINGS}, {}  # noqa: C420
    for t in range(1, steps + 1):
        g = 0.3 * torch.randn(GROUPS, WIDTH, generator=generator) if t < steps // 5 else torch.zeros(GROUPS, WIDTH)
        g[:, 0] = 1.0
        for name in ROUNDINGS:
            m, v = ema(kept[name], g, beta2)
            out[name] = float((m / (v.sqrt() + EPS))[:, 1:].abs().mean())
            kept[name] = (SCHEMES[name].momentum(m, t), SCHEMES[name].variance(v, t))
    return out


def ema(moments: tuple[Tensor, Tensor], g: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """Adam's moments one step later."""
    m, v = moments
    return m * BETA1 + (1 - BETA1) * g, v * beta2 + (1 - beta2) * g * g


def measures(moments: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> Tensor:
    """Squared error, product and square of the update, and the ratio of root variances; without the steady element."""
    (m, v), (me, ve) = ([x[:, 1:] for x in pair] for pair in (moments, exact))
    u, ue = m / (v.sqrt() + EPS), me / (ve.sqrt() + EPS)
    ratio = v.sqrt().mean() / ve.sqrt().mean()
    return torch.stack([(u - ue).square().sum(), (u * ue).sum(), ue.square().sum(), ratio]).double()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=results.default_path("dither"))
    parser.add_argument("--beta2", type=float, nargs="+", default=BETA2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {**results.head("dither"), "rows": [], "stopped": []}
    for beta2 in args.beta2:
        time = int(3 / (1 - beta2)) + 100
        for situation, gradient in situations(time).items():
            for rounding, values in compare(gradient, beta2, 4 * time).items():
                result["rows"].append({"beta2": beta2, "situation": situation, "rounding": rounding, **values})
                row = result["rows"][-1]
                print(
                    f"{beta2:<6} {situation:42} {rounding:18} root {row['root_ratio']:6.3f}  "
                    f"NMSE {row['update_nmse']:8.4f}  gain {row['gain']:.4f}",
                    flush=True,
                )
        for rounding, update in stopped(beta2, 5 * time).items():
            result["stopped"].append({"beta2": beta2, "rounding": rounding, "update": update})
        results.write(result, args.out)


if __name__ == "__main__":
    main()
