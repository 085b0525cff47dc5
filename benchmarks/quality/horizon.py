"""How far a 24-bit master weight drifts from an exact one in 10^5 steps, on paper and measured.

On paper: between two powers of two bf16 has steps of U = 2^-7 of the lower one, and 24 bits of U / 256. That is 256
fp32 ULPs. An update below half a step of the grid is lost. Updates that vary over more than a step are rounded, by an
error evenly spread over it: after n of them the weight is off by sqrt(n / 12) steps (r.m.s.), 91 steps or 23,000 fp32
ULPs for n = 10^5, whatever the learning rate. (fp32 itself: the same number of its own ULPs, 91.)

Measured: 10^5 updates lr * (0.1 + 0.3 z), z normal, as Adam's are: a slow drift in noise. Compared with fp64.

Usage: python -m benchmarks.quality.horizon [--out FILE.json] [--steps 100000]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality import results
from flashdist.numerics.weight_split import join, split

LRS = (1e-5, 1e-6, 1e-7, 1e-8)
WEIGHTS = (0.001, 0.02, 0.1, 1.0)
ELEMENTS = 64
MEAN, NOISE = 0.1, 0.3


def grid_step(weight: float, bits: int) -> float:
    """The distance of neighbouring master weights near `weight`: bf16's ULP over 256 or 65,536; fp32's own for 0."""
    ulp = 2.0 ** (math.floor(math.log2(weight)) - 7)
    return ulp / {24: 256, 32: 65536}[bits]


def published_round_trip(x: Tensor) -> Tensor:
    """flashoptim's 24 bits: the rest of bf16's rounding as a share of half an ULP, in 127 steps (arXiv 2602.23349)."""
    hi = x.bfloat16().float()
    half_ulp = 2.0 ** (hi.abs().clamp_min(2.0**-126).log2().floor() - 8)
    share = ((x - hi) / half_ulp).clamp(-1, 1) * 127
    return hi + torch.copysign((share.abs() + 0.5).floor(), share) / 127 * half_ulp


def our_round_trip(x: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """Weight and correction, and back."""
    return join(*split(x, torch.bfloat16, dtype))


def drift(steps: int) -> list[dict[str, float]]:
    """One row for each weight and learning rate."""
    generator = torch.Generator().manual_seed(0)
    places = [(w, lr) for w in WEIGHTS for lr in LRS]
    lr = torch.tensor([lr for _, lr in places], dtype=torch.float64)[:, None]
    begun = our_round_trip(torch.tensor([w * 1.3 for w, _ in places])[:, None].repeat(1, ELEMENTS))
    exact, kept = begun.double(), {24: begun, 32: begun}
    for _ in range(steps):
        update = lr * (MEAN + NOISE * torch.randn(len(places), ELEMENTS, generator=generator, dtype=torch.float64))
        exact = exact + update
        small = update.float()
        kept[24] = our_round_trip(kept[24] + small)
        kept[32] = our_round_trip(kept[32] + small, torch.int16)
    rows = []
    for i, (w, rate) in enumerate(places):
        error = {bits: (x[i].double() - exact[i]) for bits, x in kept.items()}
        ulp = grid_step(float(exact[i].mean().abs()), 32)
        half = grid_step(1.3 * w, 24) / 2 / rate
        # Lost at once: |0.1 + 0.3 z| below half a step of the grid.
        lost = 0.5 * (math.erf((half - MEAN) / NOISE / math.sqrt(2)) + math.erf((half + MEAN) / NOISE / math.sqrt(2)))
        rows.append(
            {
                "weight": 1.3 * w,
                "lr": rate,
                "updates below half a step": lost,
                "on paper, fp32 ULPs": 256 * math.sqrt(steps / 12) if lost < 0.99 else None,
                "24 bits: error, fp32 ULPs": float(error[24].square().mean().sqrt()) / ulp,
                "of the way gone": float(
                    error[24].square().mean().sqrt() / (exact[i] - begun[i].double()).abs().mean()
                ),
                "32 bits: error, fp32 ULPs": float(error[32].square().mean().sqrt()) / ulp,
            }
        )
    return rows


def split_error() -> list[dict[str, float | str]]:
    """Error of one round trip in bf16 ULPs, over numbers with evenly spread logarithms."""
    generator = torch.Generator().manual_seed(1)
    x = torch.exp2(torch.rand(1 << 20, generator=generator, dtype=torch.float64) * 16 - 12).float()
    ulp = torch.exp2(x.bfloat16().float().log2().floor().double() - 7)
    rows: list[dict[str, float | str]] = []
    for name, back in (("flashdist", our_round_trip(x)), ("flashoptim", published_round_trip(x))):
        error = (back.double() - x.double()).abs() / ulp
        rows.append(
            {"split": name, "largest, ULP": float(error.max()), "rms, ULP": float(error.square().mean().sqrt())}
        )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=results.default_path("horizon"))
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {**results.head("horizon"), "steps": args.steps, "split": split_error(), "rows": drift(args.steps)}
    results.write(result, args.out)
    for row in [*result["split"], *result["rows"]]:
        print(row)


if __name__ == "__main__":
    main()
