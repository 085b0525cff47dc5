"""S1 to S4: four faults of 8-bit states, measured alike on every scheme and, on a GPU, on the libraries themselves.

S1: beside a neighbour of +-1 an element has gradients of 1e-3 for 50 steps, then 0: its largest step in lr (torch: 1).
S2, S3: the r.m.s. drift over exact AdamW's, 200 steps with gradients of 1e-4 to 1e-9, 50 steps with 1e2 to 1e6.
S4: sqrt(v) over exact's after 12,000 steps in which lognormal gradients fall tenfold (schemes only).

Usage: python -m benchmarks.quality.anchors [--out FILE.json] [--beta2 0.999] [--s4-steps 12000]
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality import results
from benchmarks.quality.schemes import SCHEMES, Scheme
from flashdist import FlashAdamW

LR, EPS = 1e-3, 1e-16
SMALL, LARGE = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9), (1e2, 1e4, 1e5, 1e6)
ROWS, WIDTH = 16, 256  # whole blocks of every scheme; bitsandbytes quantizes from 4,096 elements on
Make = Callable[[Tensor, float, float], Any]  # parameter, beta2, eps -> something with step()


class SchemeAdamW:
    """AdamW on an fp32 weight whose moments go through a scheme."""

    def __init__(self, p: Tensor, beta2: float, eps: float, scheme: Scheme) -> None:
        self.p, self.beta2, self.eps, self.scheme, self.t = p, beta2, eps, scheme, 0
        self.m = self.v = torch.zeros_like(p.detach()).view(-1)

    @torch.no_grad()
    def step(self) -> None:
        """One step on p.grad."""
        assert self.p.grad is not None
        g = self.p.grad.view(-1)
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        denominator = (self.v / (1 - self.beta2**self.t)).sqrt() + self.eps
        self.p.sub_((LR * (self.m / (1 - 0.9**self.t)) / denominator).view_as(self.p))
        self.m, self.v = self.scheme.momentum(self.m, self.t), self.scheme.variance(self.v, self.t)


def makers(device: str) -> dict[tuple[str, str], tuple[Make, torch.dtype]]:
    """Optimizers by (name, kind), with the dtype of the weight that they are given."""
    common = {"lr": LR, "weight_decay": 0.0}
    out: dict[tuple[str, str], tuple[Make, torch.dtype]] = {
        ("torch AdamW", "library"): (
            lambda p, b, e: torch.optim.AdamW([p], betas=(0.9, b), eps=e, **common), torch.float32
        ),
        ("flashdist", "library"): (lambda p, b, e: FlashAdamW([p], betas=(0.9, b), eps=e, **common), torch.float32),
    }  # fmt: skip
    for name, scheme in SCHEMES.items():
        if name != "exact":
            out[(name, "scheme")] = (lambda p, b, e, s=scheme: SchemeAdamW(p, b, e, s), torch.float32)
    others = {"flashoptim": "FlashAdamW", "bitsandbytes.optim": "AdamW8bit", "torchao.optim": "AdamW8bit"}
    for module, cls in others.items():
        if device == "cuda" and importlib.util.find_spec(module.split(".")[0]):
            optimizer = getattr(importlib.import_module(module), cls)
            # It refuses its default of 24 bits on fp32 weights.
            more: dict[str, Any] = {"master_weight_bits": None} if module == "flashoptim" else {}
            make = lambda p, b, e, o=optimizer, m=more: o([p], betas=(0.9, b), eps=e, **common, **m)  # noqa: E731
            out[(module.split(".")[0], "library")] = (make, torch.float32)
    return out


def s1(make: Make, dtype: torch.dtype, beta2: float, device: str) -> float:
    """The largest step of the small element, in lr."""
    p = torch.nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=dtype, device=device))
    optimizer, largest = make(p, beta2, 1e-8), 0.0
    for i in range(60):
        g = torch.zeros(ROWS, WIDTH, device=device)
        g[:, 0] = 1.0 if i % 2 else -1.0
        g[:, 1] = 1e-3 if i < 50 else 0.0
        before, p.grad = p.detach()[0, 1].item(), g.to(dtype)
        optimizer.step()
        largest = max(largest, abs(p.detach()[0, 1].item() - before) / LR)
    return largest


def drift(make: Make, dtype: torch.dtype, beta2: float, std: float, steps: int, device: str) -> float:
    """R.m.s. of the weights after random gradients of one size."""
    p = torch.nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=dtype, device=device))
    optimizer = make(p, beta2, EPS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        p.grad = (torch.randn(ROWS, WIDTH, generator=generator) * std).to(device=device, dtype=dtype)
        optimizer.step()
    return float(p.detach().double().square().mean().sqrt())


def s4(scheme: Scheme, beta2: float, steps: int) -> float:
    """Mean of sqrt(v) over exact's, after gradients have fallen tenfold."""
    generator = torch.Generator().manual_seed(0)
    sigma = torch.randn(ROWS * WIDTH, generator=generator).exp()
    exact = kept = torch.zeros(ROWS * WIDTH)
    for t in range(1, steps + 1):
        square = (torch.randn(ROWS * WIDTH, generator=generator) * sigma * 10 ** (-t / steps)).square()
        exact = beta2 * exact + (1 - beta2) * square
        kept = scheme.variance(beta2 * kept + (1 - beta2) * square, t)
    return float((kept / exact).sqrt().mean())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--s4-steps", type=int, default=12_000)
    parser.add_argument("--only", help="names, with commas; torch's own AdamW is always there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = {**results.head("anchors", device), "beta2": args.beta2, "rows": []}
    exact: dict[float, float] = {}
    for (name, kind), (make, dtype) in makers(device).items():
        if args.only and name not in ["torch AdamW", *args.only.split(",")]:
            continue
        row: dict[str, Any] = {"optimizer": name, "kind": kind}
        try:
            row["S1, lr"] = s1(make, dtype, args.beta2, device)
            for std in (*SMALL, *LARGE):
                found = drift(make, dtype, args.beta2, std, 200 if std < 1 else 50, device)
                exact.setdefault(std, found)  # torch comes first
                row[f"{'S2' if std < 1 else 'S3'} {std:.0e}"] = found / exact[std]
        except Exception as error:  # a library that does not run here does not cost the others
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        if kind == "scheme" and args.s4_steps:
            row["S4"] = s4(SCHEMES[name], args.beta2, args.s4_steps)
        print(row, flush=True)
        result["rows"].append(row)
        results.write(result, args.out or results.default_path("anchors", device))


if __name__ == "__main__":
    main()
