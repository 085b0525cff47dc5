"""Momentum and variance in 8 bits: groups of 32 neighbours share a scale, and the code axis is bent (companded).

All functions take and return tensors whose last dimension is one group of :data:`GROUP` neighbours; the scale has the
leading dimensions. A group's code is always formed against its scale *as stored*. A group that holds a non-finite
element gets a NaN scale, so that the whole group reads NaN from then on; a group whose stored scale is 0 has only codes
0 and reads exact zeros.

Companding the moments is FlashOptim's (arXiv 2602.23349, section 3.2). The bf16 and fp32 scales, the floor of one code
for the variance and the dither are this library's own (docs/how_it_works.md; docs/decisions.md has the measurements).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
MOMENTUM_CODES = 127
VARIANCE_CODES = 255
# A step without a gradient moves a variance code c by (1 - sqrt(beta2)) * c: nearest rounding holds codes up to half
# the inverse, 5 of 255 at this beta2, 10 at 0.9, 20 at 0.95 (docs/decisions.md has what follows from that). Adam's
# momentum takes the dither with its variance: held at a small code beside a variance that decays, it drifts for ever.
DITHER_ABOVE_BETA2 = 0.8

# A momentum scale lies in [2^-126, 2^125), where every GPU's fast division is right: below it the group is 0, above it
# lost. A variance below the smallest normal number counts as 0, as GPUs' square roots have it.
MOMENTUM_SCALE_LIMIT = 2.0**125
SMALLEST_NORMAL = 2.0**-126

MOMENTUM_CODE_DTYPE, MOMENTUM_SCALE_DTYPE = torch.int8, torch.bfloat16
VARIANCE_CODE_DTYPE, VARIANCE_SCALE_DTYPE = torch.uint8, torch.float32

DITHER_STEP = 2654435769
DITHER_LANE = 3242174889


def encode_momentum(m: Tensor, dither: Tensor | float = 0.5) -> tuple[Tensor, Tensor]:
    """Encode momentum, ``|code| = floor(127 * phi(|m| / s) + dither)``, ``phi(x) = 2 x / (1 + x)`` and ``s = max |m|``.

    Args:
        m: fp32 ``[..., 32]``.
        dither: 0.5 (nearest rounding, halves away from zero) or an fp32 tensor ``[32]`` from :func:`dither_offsets`.

    Returns:
        int8 codes ``[..., 32]`` in [-127, 127], with the sign of m, and bf16 scales ``[...]``.

    Source: FlashOptim, arXiv 2602.23349, section 3.2 (softsign companding of the momentum).
    """
    size = m.abs()
    scale = size.amax(dim=-1).to(MOMENTUM_SCALE_DTYPE)
    scale = torch.where(scale < SMALLEST_NORMAL, 0.0, scale)
    scale = torch.where(_all_finite(size) & (scale < MOMENTUM_SCALE_LIMIT), scale, torch.nan)
    s = scale.to(torch.float32).unsqueeze(-1)
    # 127 * phi(m / s), with the two divisions folded into one. |m| may exceed s by 2^-8 of it.
    code = (size / (s + size) * (2.0 * MOMENTUM_CODES) + dither).clamp_(max=float(MOMENTUM_CODES)).floor_()
    code = torch.where(s > 0, code, 0.0)
    return torch.where(m < 0, -code, code).to(MOMENTUM_CODE_DTYPE), scale


def decode_momentum(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode momentum: with ``y = code / 127``, ``m = s * y / (2 - |y|)``.

    Args:
        codes: int8 ``[..., 32]``.
        scale: bf16 ``[...]``.

    Returns:
        fp32 ``[..., 32]``.
    """
    c = codes.to(torch.float32)
    return c / (2.0 * MOMENTUM_CODES - c.abs()) * scale.to(torch.float32).unsqueeze(-1)


def encode_variance(v: Tensor, dither: Tensor | float = 0.5) -> tuple[Tensor, Tensor]:
    """Encode the variance on the axis of its root, ``code = floor(255 * r / s + dither)``, ``r = sqrt(v)``, ``s = max
    r``.

    Args:
        v: fp32 ``[..., 32]``, not negative.
        dither: 0.5 (nearest rounding) or an fp32 tensor ``[32]`` from :func:`dither_offsets`.

    Returns:
        uint8 codes ``[..., 32]`` and fp32 scales ``[...]``. A code is at least 1 wherever v > 0, and 0 only for v == 0.

    Source: the root axis is FlashOptim's, arXiv 2602.23349, section 3.2.
    """
    r = torch.where(v < SMALLEST_NORMAL, 0.0, v.sqrt())
    scale = torch.where(_all_finite(r), r.amax(dim=-1), torch.nan)
    # In an empty group every root is 0. In a lost one the codes do not matter; they are 1 where there is a root.
    per_root = torch.where(scale > 0, VARIANCE_CODES / scale, 0.0).unsqueeze(-1)
    code = (r * per_root + dither).floor_()
    code = torch.fmax(code, code.new_ones(())).clamp_(max=float(VARIANCE_CODES))
    return torch.where(r > 0, code, 0.0).to(VARIANCE_CODE_DTYPE), scale


def decode_variance(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode the variance, ``v = (s * code / 255)^2``.

    Args:
        codes: uint8 ``[..., 32]``.
        scale: fp32 ``[...]``.

    Returns:
        fp32 ``[..., 32]``.
    """
    r = codes.to(torch.float32) * (scale * (1.0 / VARIANCE_CODES)).unsqueeze(-1)
    return r * r


def dither_base(step: int) -> int:
    """The step's share of the dither's phase: ``step * 2654435769 mod 2^32``."""
    return (step * DITHER_STEP) % 2**32


def dither_offsets(step: int, device: torch.device | None = None) -> Tensor:
    """The rounding offsets of one step: ``(((t * 2654435769 + lane * 3242174889) mod 2^32) >> 8) / 2^24``.

    Two Weyl sequences, over the steps and over the places of a group, spread the offsets evenly in [0, 1). They need
    no generator, and are the same on every rank and for every sharding.

    Args:
        step: the parameter's step count t, 1 for its first step.
        device: where the result is to be; the CPU by default.

    Returns:
        fp32 ``[32]``.
    """
    lanes = torch.arange(GROUP, dtype=torch.int64, device=device)
    return (((dither_base(step) + lanes * DITHER_LANE) % 2**32) >> 8).to(torch.float32) * 2.0**-24


def _all_finite(size: Tensor) -> Tensor:
    # One sum finds any inf or NaN whatever a max-reduction makes of NaN: x - x is 0 for finite x, NaN otherwise.
    return (size - size).sum(dim=-1) == 0
