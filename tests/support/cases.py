"""Shapes and values that tests run over. Uneven on purpose: rows with a partial last group, empty tensors, scalars."""

from __future__ import annotations

import torch
from torch import Tensor

# No row of 32: moments stay fp32 and corrections are int16.
UNGROUPED_SHAPES = [(), (0,), (1,), (31,), (33,), (6144,), (5, 7), (8, 2), (64, 3, 3, 3), (0, 7)]
# Rows of a multiple of 32.
EVEN_SHAPES = [(1, 32), (130, 96), (1, 40, 64), (40, 3, 8, 4), (33, 1024)]
# Rows whose last group is partial.
PARTIAL_SHAPES = [(3, 33), (64, 3, 7, 7), (51, 37), (3, 8, 40), (2, 1025), (1, 5000)]
EMPTY_GROUPED_SHAPES = [(0, 40), (4, 0, 64)]

GROUPED_SHAPES = EVEN_SHAPES + PARTIAL_SHAPES
SHAPES = UNGROUPED_SHAPES + GROUPED_SHAPES + EMPTY_GROUPED_SHAPES

# Magnitudes of gradients and momenta: fp16 scales under- and overflow inside this range.
MAGNITUDES = [1e-30, 1e-12, 1e-7, 1e-3, 1.0, 1e5, 1e15]


def name(shape: tuple[int, ...]) -> str:
    """A shape as a test's name: ``3x33``; ``scalar`` for ()."""
    return "x".join(map(str, shape)) or "scalar"


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def uneven(shape: tuple[int, ...], seed: int, sigma: float = 2.0) -> Tensor:
    """Normal numbers with lognormal scales: neighbours of a group differ by orders of magnitude."""
    return normal(shape, seed) * (normal(shape, seed + 1) * sigma).exp()


def random_bits(count: int, seed: int) -> Tensor:
    """fp32 numbers of ``count`` evenly drawn bit patterns: all exponents alike, NaN and inf included."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )
