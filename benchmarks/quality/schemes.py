"""8-bit states of several libraries as functions on fp32 tensors: what a step writes and the next one reads.

A scheme takes dense fp32 moments and returns them as they come back from its codes. Ours calls `flashdist.numerics`;
the others are written after their published descriptions, with one group format for all shapes. So they can be laid
beside each other on the same gradients, on any device, and be mixed (a scheme for the momentum alone, say).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flashdist.numerics import companding

Store = Callable[[Tensor, int], Tensor]  # a flat fp32 moment and the step count -> the moment as stored


@dataclass(frozen=True)
class Scheme:
    """How the two moments of Adam are kept between steps."""

    momentum: Store
    variance: Store
    source: str


def keep(x: Tensor, step: int) -> Tensor:
    """fp32: nothing is lost."""
    return x


def _rows(x: Tensor, width: int) -> Tensor:
    if x.numel() % width:
        raise ValueError(f"{x.numel()} elements do not fill groups of {width}: pad them with zeros")
    return x.reshape(-1, width)


# This library. The two moments may be dithered or not, whatever the step itself would choose.


def our_momentum(m: Tensor, step: int) -> Tensor:
    """This library's, without the dither: nearest rounding on the companded axis, a bf16 scale for 32 elements."""
    codes, scale = companding.encode_momentum(_rows(m, companding.GROUP))
    return companding.decode_momentum(codes, scale).view_as(m)


def our_momentum_dithered(m: Tensor, step: int) -> Tensor:
    """The same, dithered."""
    codes, scale = companding.encode_momentum(_rows(m, companding.GROUP), companding.dither_offsets(step, m.device))
    return companding.decode_momentum(codes, scale).view_as(m)


def our_variance_nearest(v: Tensor, step: int) -> Tensor:
    """An fp32 scale for 32 elements on the root's axis, at least one code, nearest rounding."""
    return companding.decode_variance(*companding.encode_variance(_rows(v, companding.GROUP))).view_as(v)


def our_variance_dithered(v: Tensor, step: int) -> Tensor:
    """The same, dithered."""
    offsets = companding.dither_offsets(step, v.device)
    return companding.decode_variance(*companding.encode_variance(_rows(v, companding.GROUP), offsets)).view_as(v)


# FlashOptim as published: arXiv 2602.23349, section 3.2; fp16 scales, codes formed against the scale before rounding.


def published_momentum(m: Tensor, step: int) -> Tensor:
    """Softsign companding, int8, an fp16 scale for 32 elements."""
    groups = _rows(m, 32)
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12)
    x = groups / scale
    y = (2.0 * x / (1.0 + x.abs()) * 127.0 + 0.5).floor().clamp(-127, 127) / 127.0
    return (y / (2.0 - y.abs()) * scale.half().float()).view_as(m)


def published_variance(v: Tensor, step: int) -> Tensor:
    """The root in uint8, an fp16 scale for 32 elements."""
    root = _rows(v, 32).sqrt()
    scale = root.amax(dim=-1, keepdim=True).clamp_min(1e-12)
    code = (root / scale * 255.0 + 0.5).floor()
    return (code / 255.0 * scale.half().float()).square().view_as(v)


# Plain linear 8-bit: the published layout with companding off.


def linear_momentum(m: Tensor, step: int) -> Tensor:
    """int8 between -max and max of 32 elements."""
    groups = _rows(m, 32)
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-38)
    return ((groups / scale * 127.0).round() / 127.0 * scale).view_as(m)


def linear_variance(v: Tensor, step: int) -> Tensor:
    """uint8 between 0 and the max of 32 elements, of v itself."""
    groups = _rows(v, 32)
    scale = groups.amax(dim=-1, keepdim=True).clamp_min(1e-38)
    return ((groups / scale * 255.0).round() / 255.0 * scale).view_as(v)


# Dynamic tree quantization in blocks of 256, as bitsandbytes and torchao have it: Dettmers et al., arXiv 2110.02861.


@cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of the dynamic code, ascending: a decimal exponent, then evenly spaced fractions in [0.1, 1]."""
    values = [0.0, 1.0]
    for exponent in range(7):
        fractions = 2 ** (exponent if signed else exponent + 1)
        borders = torch.linspace(0.1, 1.0, fractions + 1, dtype=torch.float64)
        means = (borders[:-1] + borders[1:]) / 2 * 10.0 ** (exponent - 6)
        values += means.tolist()
        if signed:
            values += (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def _dynamic(x: Tensor, signed: bool) -> Tensor:
    blocks = _rows(x, 256)
    scale = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(1e-38)
    table = dynamic_map(signed).to(x.device)
    nearest = torch.bucketize(blocks / scale, (table[:-1] + table[1:]) / 2)
    return (table[nearest] * scale).view_as(x)


def dynamic_momentum(m: Tensor, step: int) -> Tensor:
    """The signed map."""
    return _dynamic(m, signed=True)


def dynamic_variance(v: Tensor, step: int) -> Tensor:
    """The unsigned map, of v itself."""
    return _dynamic(v, signed=False)


SCHEMES: dict[str, Scheme] = {
    "exact": Scheme(keep, keep, "fp32"),
    "flashdist": Scheme(our_momentum_dithered, our_variance_dithered, "this library, beta2 above 0.8"),
    "flashdist_nearest": Scheme(our_momentum, our_variance_nearest, "this library, beta2 up to 0.8"),
    "flashdist_variance": Scheme(our_momentum, our_variance_dithered, "the dither on the variance alone"),
    "flashoptim": Scheme(published_momentum, published_variance, "arXiv 2602.23349, section 3.2"),
    "dynamic256": Scheme(dynamic_momentum, dynamic_variance, "arXiv 2110.02861, as in bitsandbytes and torchao"),
    "linear8": Scheme(linear_momentum, linear_variance, "companding off"),
}
