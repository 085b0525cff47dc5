"""Device twins of numerics/weight_split.py and numerics/companding.py: the same arithmetic on tiles ``[groups, 32]``.

Weights travel as int16 bit patterns. Where a comment is missing here, the reason stands at the torch function of the
same name.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
FP32_INF = tl.constexpr(0x7F800000)
FP16_REBIAS = tl.constexpr((127 - 15) << 23)
TWICE_MOMENTUM_CODES = tl.constexpr(254.0)
# bf16 patterns between which a momentum scale may lie: 2^-126 and 2^125.
SCALE_MIN_BITS = tl.constexpr(0x0080)
SCALE_LOST_BITS = tl.constexpr(0x7E00)
DITHER_LANE_INT32 = tl.constexpr(3242174889 - 2**32)


@triton.jit
def join(hi, lo, WEIGHT: tl.constexpr, LO_BITS: tl.constexpr):
    """int16 patterns and int32 corrections -> fp32 master weights."""
    pattern = hi.to(tl.int32)
    if WEIGHT == tl.bfloat16:
        bits = pattern << 16
        magnitude = bits & MAGNITUDE_MASK
        # A non-finite hi carries no correction; a zero carries none below it (that would be a NaN pattern).
        q = tl.maximum(magnitude + (lo << (16 - LO_BITS)), 0)
        q = tl.where(magnitude >= FP32_INF, magnitude, q)
        return (q | (bits ^ magnitude)).to(tl.float32, bitcast=True)
    else:
        magnitude = pattern & 0x7FFF
        q = tl.maximum((magnitude << LO_BITS) + lo, 0)
        if LO_BITS == 8:
            normal = (q << 5) + FP16_REBIAS
            subnormal = q.to(tl.float32) * 2.0**-32
        else:
            normal = (q >> 3) + FP16_REBIAS
            subnormal = q.to(tl.float32) * 2.0**-40
        bits = tl.where(q < (0x400 << LO_BITS), subnormal.to(tl.int32, bitcast=True), normal)
        # fp16 infinity and NaN, in fp32's bits.
        bits = tl.where(magnitude >= 0x7C00, FP32_INF + ((magnitude - 0x7C00) << 13), bits)
        return (bits | ((pattern << 16) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def divide(x, y, FAST: tl.constexpr):
    """``x / y``; FAST is a reciprocal and a product, good to 2 ULP for 2^-126 <= y <= 2^126 (a third of the work)."""
    if FAST:
        return libdevice.fast_dividef(x, y)
    else:
        return x / y


@triton.jit
def split(x, WEIGHT: tl.constexpr, LO_BITS: tl.constexpr):
    """fp32 master weights, results of arithmetic -> int16 patterns and int32 corrections.

    Arithmetic returns quiet NaNs only, whose magnitude is at least 0x7FC00000: one minimum makes them canonical.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & MAGNITUDE_MASK, 0x7FC00000)
    if WEIGHT == tl.bfloat16:
        if LO_BITS == 8:
            q = (magnitude + 0x80) >> 8
        else:
            q = magnitude
        inf: tl.constexpr = 0x7F80
    else:
        clipped = tl.minimum(magnitude, 0x47800000)
        rebased = clipped - FP16_REBIAS
        if LO_BITS == 8:
            normal = (rebased + 0x10) >> 5
            scaled = clipped.to(tl.float32, bitcast=True) * 2.0**32
        else:
            normal = rebased << 3
            scaled = clipped.to(tl.float32, bitcast=True) * 2.0**40
        scaled = tl.minimum(scaled, 1073741824.0)
        whole = tl.floor(scaled)
        subnormal = whole.to(tl.int32) + (scaled - whole >= 0.5).to(tl.int32)
        q = tl.where(clipped < 0x38800000, subnormal, normal)
        q = tl.where(magnitude == 0x7FC00000, 0x7E00 << LO_BITS, q)
        inf: tl.constexpr = 0x7C00
    half: tl.constexpr = 1 << (LO_BITS - 1)
    hi = (q + half) >> LO_BITS
    # What rounds up to infinity keeps no correction; infinity and NaN themselves have none.
    lo = tl.where(hi >= inf, 0, q - (hi << LO_BITS))
    return (hi | ((bits >> 16) & 0x8000)).to(tl.int16), lo


@triton.jit
def widen(hi, WEIGHT: tl.constexpr):
    """16-bit patterns without correction, or fp32 values -> fp32."""
    if WEIGHT == tl.bfloat16:
        return (hi.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif WEIGHT == tl.float16:
        return hi.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return hi


@triton.jit
def narrow(x, WEIGHT: tl.constexpr):
    """fp32 -> the nearest 16-bit pattern, ties to even, or fp32 unchanged."""
    if WEIGHT == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where((bits & MAGNITUDE_MASK) > FP32_INF, 0x7FC0, rounded).to(tl.int16)
    elif WEIGHT == tl.float16:
        return x.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return x


@triton.jit
def group_peak(size):
    """Largest element of each group of non-negative floats, as int32 bits: inf and NaN order above every number."""
    return tl.max(size.to(tl.int32, bitcast=True), axis=1)


@triton.jit
def decode_momentum(codes, scale_bits, FAST: tl.constexpr):
    """int8 codes ``[n, 32]``, bf16 scales as int16 bits ``[n]`` -> fp32."""
    c = codes.to(tl.int32).to(tl.float32)
    scale = (scale_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return divide(c, TWICE_MOMENTUM_CODES - tl.abs(c), FAST) * scale[:, None]


@triton.jit
def encode_momentum(m, FAST: tl.constexpr):
    """fp32 ``[n, 32]`` -> int8 codes, bf16 scales as int16 bits."""
    size = tl.abs(m)
    peak = group_peak(size)
    # Nearest bf16, ties to even (inf and NaN stay above SCALE_LOST_BITS).
    rounded = tl.minimum(peak, FP32_INF) + 0x7FFF + ((peak >> 16) & 1)
    rounded = rounded >> 16
    scale_bits = tl.where(rounded < SCALE_MIN_BITS, 0, tl.where(rounded >= SCALE_LOST_BITS, 0x7FC0, rounded))
    s = (scale_bits << 16).to(tl.float32, bitcast=True)[:, None]
    y = divide(m, s + size, FAST) * TWICE_MOMENTUM_CODES
    # Halves away from zero. |m| exceeds s by at most 2^-8 of it, so the code never exceeds 127.
    half = ((y.to(tl.int32, bitcast=True) & -0x80000000) | 0x3F000000).to(tl.float32, bitcast=True)
    code = tl.where(s > 0, (y + half).to(tl.int32), 0)
    return code.to(tl.int8), scale_bits.to(tl.int16)


@triton.jit
def decode_variance(codes, scale):
    """uint8 codes ``[n, 32]``, fp32 scales ``[n]`` -> fp32."""
    r = codes.to(tl.int32).to(tl.float32) * (scale * (1.0 / 255.0))[:, None]
    return r * r


@triton.jit
def encode_variance(v, dither):
    """fp32 ``[n, 32]`` and offsets ``[1, 32]`` or a number -> uint8 codes, fp32 scales. tl.sqrt flushes subnormals."""
    r = tl.sqrt(v)
    peak = group_peak(r)
    scale = tl.where(peak >= FP32_INF, 0x7FC00000, peak).to(tl.float32, bitcast=True)
    code = tl.minimum(tl.maximum(r * (255.0 / scale)[:, None] + dither, 1.0), 255.0).to(tl.int32)
    code = tl.where((r > 0) & (scale > 0)[:, None], code, 0)
    return code.to(tl.uint8), scale


@triton.jit
def dither_offsets(base, lane):
    """The step's base (int32 bits of the uint32) and the places in a group -> fp32 offsets in [0, 1)."""
    phase = (base + lane * DITHER_LANE_INT32).to(tl.uint32, bitcast=True)
    return (phase >> 8).to(tl.float32) * 2.0**-24
