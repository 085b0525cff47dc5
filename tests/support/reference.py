"""Reference implementations, written from the design and the papers, not from the library.

Numbers are numpy float64 throughout: every fp32 number and every step of both grids is exact there, so that the weight
split below is exact rational arithmetic on values, where the library works on bit patterns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

F64 = np.float64
Array = Any


class Format(NamedTuple):
    """A 16-bit float: fraction bits, smallest and largest exponent of normal numbers."""

    fraction: int
    min_exponent: int
    max_exponent: int


FORMATS = {torch.bfloat16: Format(7, -126, 127), torch.float16: Format(10, -14, 15)}
EXTRA_BITS = {torch.int8: 8, torch.int16: 16}


def numpy64(x: Tensor) -> Array:
    """A tensor as float64; exact for every dtype the library uses."""
    return x.detach().to(torch.float64).numpy()


def ulp(x: Array, fmt: Format, extra: int = 0) -> Array:
    """The distance of neighbours of ``fmt`` (with ``extra`` more fraction bits) in the binade of x."""
    _, exponent = np.frexp(np.abs(x))  # |x| = f * 2^exponent with f in [0.5, 1)
    exponent = np.where(x == 0, fmt.min_exponent, np.maximum(exponent - 1, fmt.min_exponent))
    return np.ldexp(1.0, exponent - fmt.fraction - extra)


def round_half_away(x: Array, step: Array) -> Array:
    """|x| rounded to a multiple of step, halves up."""
    return np.floor(np.abs(x) / step + 0.5) * step


def place_on_grid(x: Array, fmt: Format, extra: int) -> Array:
    """How many numbers of the grid (``fmt`` with ``extra`` more fraction bits) lie in [0, |x|): x must be on it."""
    _, exponent = np.frexp(np.abs(x))
    binade = np.where(x == 0, 0, np.maximum(exponent - 1 - fmt.min_exponent, 0))
    return (binade * 2.0 ** (fmt.fraction + extra) + np.abs(x) / ulp(x, fmt, extra)).astype(np.int64)


def split(x: Array, weight_dtype: torch.dtype, correction_dtype: torch.dtype) -> tuple[Array, Array]:
    """Design 1.1: round to the fine grid, then to the 16-bit format; lo is the rest in steps of the fine grid."""
    fmt, extra = FORMATS[weight_dtype], EXTRA_BITS[correction_dtype]
    infinite = ~(np.abs(x) < 2.0 ** (fmt.max_exponent + 1))  # NaN too
    small = np.where(infinite, 0.0, x)
    fine = round_half_away(small, ulp(small, fmt, extra))
    hi = round_half_away(fine, ulp(fine, fmt))
    lo = place_on_grid(fine, fmt, extra) - place_on_grid(hi, fmt, extra)
    infinite |= hi >= 2.0 ** (fmt.max_exponent + 1)
    hi = np.copysign(np.where(infinite, np.inf, hi), x)
    return np.where(np.isnan(x), np.nan, hi), np.where(infinite, 0, lo)


def join(hi: Array, lo: Array, weight_dtype: torch.dtype, correction_dtype: torch.dtype) -> Array:
    """The number lo steps of the fine grid away from hi, away from zero where lo > 0, but not past zero."""
    fmt, extra = FORMATS[weight_dtype], EXTRA_BITS[correction_dtype]
    finite = np.isfinite(hi)
    place = np.maximum(place_on_grid(np.where(finite, hi, 0.0), fmt, extra) + lo, 0)
    per_binade = 2 ** (fmt.fraction + extra)
    binade = np.maximum(place // per_binade - 1, 0)
    steps = place - binade * per_binade
    value = np.ldexp(steps.astype(F64), (binade + fmt.min_exponent - fmt.fraction - extra).astype(int))
    return np.where(finite, np.copysign(value, hi), hi)


def to_bf16(x: Array) -> Array:
    """Non-negative float64 rounded to bf16, halves to even."""
    step = ulp(x, FORMATS[torch.bfloat16])
    return np.rint(x / step) * step


def momentum_position(m: Array) -> tuple[Array, Array]:
    """Signed position ``127 * phi(m / s)`` of each element on the code axis before rounding, and the bf16 scale."""
    s = to_bf16(np.abs(m).max(-1))
    x = np.divide(m, s[..., None], out=np.zeros_like(m), where=s[..., None] > 0)
    return 127 * 2 * x / (1 + np.abs(x)), s


def momentum_value(code: Array, s: Array) -> Array:
    """The inverse: ``s * y / (2 - |y|)`` with ``y = code / 127``."""
    y = code / 127
    return s[..., None] * (y / (2 - np.abs(y)))


def variance_position(v: Array) -> tuple[Array, Array]:
    """``255 * r / s`` of each element, ``r = sqrt(v)``, and the scale s (before its rounding to fp32)."""
    r = np.sqrt(v)
    s = r.max(-1)
    return np.divide(255 * r, s[..., None], out=np.zeros_like(v), where=s[..., None] > 0), s


def variance_value(code: Array, s: Array) -> Array:
    return (s[..., None] * code / 255) ** 2


def dither(step: int, lane: int) -> float:
    """Design 1.2 in Python's integers."""
    return (((step * 2654435769 + lane * 3242174889) % 2**32) >> 8) / 2**24


def row_start(shape: tuple[int, ...]) -> int | None:
    """Design 1.3: the first dimension of the shortest trailing run with product >= 32 that leaves out dim 0."""
    runs = [d for d in range(1, len(shape)) if int(np.prod(shape[d:], dtype=np.int64)) >= 32]
    return max(runs, default=None)


def lion(p: Tensor, m: Tensor, g: Tensor, lr: float, betas: tuple[float, float], decay: float) -> tuple[Tensor, Tensor]:
    """Chen et al., arXiv 2302.06675, algorithm 2, one step in the dtype of p: returns the new p and m."""
    c = betas[0] * m + (1 - betas[0]) * g
    return p - lr * (torch.sign(c) + decay * p), betas[1] * m + (1 - betas[1]) * g


class SgdwState:
    """Loshchilov and Hutter, arXiv 1711.05101, algorithm 1, with torch's momentum, dampening, nesterov."""

    def __init__(self, p: Tensor, momentum: float, dampening: float, nesterov: bool) -> None:
        self.p, self.momentum, self.dampening, self.nesterov = p, momentum, dampening, nesterov
        self.buffer: Tensor | None = None

    def step(self, g: Tensor, lr: float, decay: float) -> None:
        """``decay`` is what p loses of itself, schedule included."""
        if self.buffer is None:
            self.buffer = g.clone()  # as in torch, the first gradient enters undampened
        else:
            self.buffer = self.momentum * self.buffer + (1 - self.dampening) * g
        direction = g + self.momentum * self.buffer if self.nesterov else self.buffer
        if self.momentum == 0:
            direction = g
        self.p = self.p - lr * direction - decay * self.p


class ExactAdam:
    """Kingma and Ba, arXiv 1412.6980, algorithm 1, in the dtype of the gradients; decoupled decay left out."""

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.betas, self.eps, self.t = betas, eps, 0
        self.m: Tensor | float = 0.0
        self.v: Tensor | float = 0.0

    def update(self, g: Tensor) -> Tensor:
        """The step in units of the learning rate, to be subtracted."""
        self.t += 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        return (self.m / (1 - b1**self.t)) / ((self.v / (1 - b2**self.t)).sqrt() + self.eps)
