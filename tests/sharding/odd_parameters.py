"""Parameters of awkward shapes, dtypes and memory formats, with gradients that are the same on every rank."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from tests.support.backends import BF16, FP16, FP32

# Rows that are no multiple of 32, one piece each, empty, a scalar, rows behind one and two leading dimensions.
SHAPES = {
    "small": (5, 7),
    "vector": (7,),
    "wide": (51, 37),
    "narrow": (8, 2),
    "conv": (64, 3, 7, 7),
    "one": (1, 40, 64),
    "three": (3,),
    "long": (6144,),
    "none": (0,),
    "no_rows": (4, 0, 64),
    "scalar": (),
    "embedding": (10, 40),
    "experts": (3, 8, 40),
    "frozen": (9, 33),
    "never": (6, 64),
    "last_channels": (20, 3, 5, 5),
    "transposed": (40, 33),
    "fp16_weight": (12, 40),
    "fp32_weight": (12, 40),
}
DTYPES = {"fp16_weight": FP16, "fp32_weight": FP32}


def seeded(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{name} {seed}".encode()).hexdigest()[:8], 16))
    return torch.randn(shape, generator=generator) * 0.25


def named_parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    made = {}
    for name, shape in SHAPES.items():
        value = seeded(name, shape, seed).to(DTYPES.get(name, BF16))
        if name == "last_channels":
            value = value.contiguous(memory_format=torch.channels_last)
        if name == "transposed":
            value = value.t().contiguous().t()
        made[name] = nn.Parameter(value, requires_grad=name != "frozen")
    return made


def param_groups(named: dict[str, nn.Parameter]) -> list[dict[str, object]]:
    """Three groups with formats and hyperparameters of their own; no weight is listed twice."""
    dense, exact = ["embedding", "one"], ["wide"]
    rest = [n for n in named if n not in (*dense, *exact)]
    return [
        {"params": [named[n] for n in rest]},
        {"params": [named[n] for n in dense], "quantize": False, "lr": 3e-3},
        {"params": [named[n] for n in exact], "master_weight_bits": 32},
    ]


def set_gradients(named: dict[str, nn.Parameter], seed: int, without: tuple[str, ...] = ()) -> None:
    for name, p in named.items():
        if p.requires_grad and name not in ("never", *without):
            p.grad = torch.empty_like(p).copy_(seeded(name, tuple(p.shape), 1000 + seed))
