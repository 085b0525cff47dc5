"""Split an fp32 master weight into the 16-bit weight of the model and a small signed correction, and join them again.

A master weight is seen as a magnitude on a fine integer grid: the bit pattern of the 16-bit format, continued by ``B``
more fraction bits. Bit patterns of positive floats grow with their values, so one integer addition rounds, carries into
the next binade and counts the correction away from zero, for normal and subnormal numbers alike::

    q  = magnitude on the fine grid          (rounded to B extra bits)
    hi = (q + half) >> B                     (the 16-bit weight, half = 2^(B-1))
    lo = q - (hi << B)                       (the correction, in [-half, half - 1])

``B`` is 8 for an int8 correction (a 24-bit master weight from bf16) and 16 for an int16 one (32 bits from bf16, exact).
There is no division, logarithm or exponential, so every backend gets the same bits.

The scheme of a 16-bit weight plus an integer correction is the weight splitting of FlashOptim (arXiv 2602.23349,
section 3.1); the integer form, which keeps its bound at binade borders and at ties, is this library's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIGN_BIT = -0x80000000
MAGNITUDE_MASK = 0x7FFFFFFF
FP32_INF = 0x7F800000

BF16_INF = 0x7F80
BF16_NAN = 0x7FC0
FP16_INF = 0x7C00
FP16_NAN = 0x7E00
FP16_FIRST_NORMAL = 0x0400
# An fp16 exponent of e is stored as e + 15, an fp32 one as e + 127: the difference in fp32 bits.
FP16_REBIAS = (127 - 15) << 23

CORRECTION_DTYPES = {24: torch.int8, 32: torch.int16}
SPLIT_DTYPES = (torch.bfloat16, torch.float16)


def correction_bits(dtype: torch.dtype) -> int:
    """Fraction bits that a correction of ``dtype`` (int8 or int16) adds to the 16-bit weight."""
    return {torch.int8: 8, torch.int16: 16}[dtype]


def split(x: Tensor, weight_dtype: torch.dtype, correction_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split fp32 master weights into 16-bit weights and corrections.

    Args:
        x: fp32 tensor of any shape.
        weight_dtype: ``torch.bfloat16`` or ``torch.float16``.
        correction_dtype: ``torch.int8`` (24-bit master weight) or ``torch.int16`` (32-bit).

    Returns:
        ``(hi, lo)`` of x's shape in the two dtypes. For finite ``hi``, ``|join(hi, lo) - x|`` is at most
        ``ULP(hi)/512`` with int8; with int16 it is 0 for bf16 and at most ``ULP(hi)/131072`` for fp16. NaN gives the
        format's canonical NaN and 0; a value that rounds to infinity gives infinity and 0.

    Source: FlashOptim, arXiv 2602.23349, section 3.1 (weight splitting).
    """
    bits = x.view(torch.int32)
    magnitude = bits & MAGNITUDE_MASK
    extra = correction_bits(correction_dtype)
    if weight_dtype == torch.bfloat16:
        q, inf, nan = _bf16_grid(magnitude, extra), BF16_INF, BF16_NAN
    else:
        q, inf, nan = _fp16_grid(magnitude, extra), FP16_INF, FP16_NAN
    hi = (q + (1 << (extra - 1))) >> extra
    lo = q - (hi << extra)
    overflow = hi >= inf
    hi = torch.where(overflow, inf, hi)
    lo = lo.masked_fill_(overflow, 0)
    signed = hi | ((bits >> 16) & 0x8000)
    signed = torch.where(magnitude > FP32_INF, nan, signed)
    return signed.to(torch.int16).view(weight_dtype), lo.to(correction_dtype)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """Restore the fp32 master weights from 16-bit weights and corrections, the inverse of :func:`split`.

    Args:
        hi: bf16 or fp16 tensor.
        lo: int8 or int16 tensor of the same shape.

    Returns:
        fp32 tensor. ``split(join(hi, lo)) == (hi, lo)`` for every pair that split can produce. For any other pair the
        result is NaN only if ``hi`` is: a non-finite ``hi`` is returned as it is, and a negative correction of a zero
        gives that zero.
    """
    pattern = hi.view(torch.int16).to(torch.int32)
    magnitude = pattern & 0x7FFF
    extra = correction_bits(lo.dtype)
    inf = BF16_INF if hi.dtype == torch.bfloat16 else FP16_INF
    q = ((magnitude << extra) + lo.to(torch.int32)).clamp_(min=0)
    # The largest finite hi plus a hand-made correction must not reach the pattern of infinity either.
    bits = _bf16_bits(q, extra) if hi.dtype == torch.bfloat16 else _fp16_bits(q, extra)
    bits = bits | ((pattern << 16) & SIGN_BIT)
    return torch.where(magnitude >= inf, hi.to(torch.float32), bits.view(torch.float32))


def _bf16_grid(magnitude: Tensor, extra: int) -> Tensor:
    """fp32 bit patterns without sign -> bf16 patterns with ``extra`` fraction bits (round half away from zero)."""
    if extra == 16:
        # Infinity and NaN would overflow the rounding addition; they are replaced by the caller.
        return magnitude.clamp(max=FP32_INF)
    return (magnitude.clamp(max=FP32_INF) + 0x80) >> 8


def _fp16_grid(magnitude: Tensor, extra: int) -> Tensor:
    """fp32 bit patterns without sign -> fp16 patterns with ``extra`` fraction bits (round half away from zero)."""
    # 65536 = 2^16 is past every finite fp16 value: what is larger is cut there, and becomes infinity.
    magnitude = magnitude.clamp(max=0x47800000)
    rebased = magnitude - FP16_REBIAS
    normal = (rebased + 0x10) >> 5 if extra == 8 else rebased << 3
    # Below 2^-14 the grid is linear with steps of 2^-24 / 2^extra. Scaling by a power of two is exact; adding 0.5 is
    # not above 2^23, where the scaled value is an integer already.
    scaled = magnitude.view(torch.float32) * float(2 ** (24 + extra))
    whole = scaled.floor()
    subnormal = (whole + ((scaled - whole) >= 0.5)).clamp_(max=float(1 << 30)).to(torch.int32)
    return torch.where(magnitude < 0x38800000, subnormal, normal)


def _bf16_bits(q: Tensor, extra: int) -> Tensor:
    return q << (16 - extra)


def _fp16_bits(q: Tensor, extra: int) -> Tensor:
    normal = ((q << 5) if extra == 8 else (q >> 3)) + FP16_REBIAS
    subnormal = (q.to(torch.float32) * float(2.0 ** -(24 + extra))).view(torch.int32)
    return torch.where(q < (FP16_FIRST_NORMAL << extra), subnormal, normal)
