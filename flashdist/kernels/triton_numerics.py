"""Device twins of numerics/weight_split.py and numerics/companding.py: the same arithmetic on tiles ``[groups, 32]``.

Weights travel as int16 bit patterns. Where a comment is missing here, the reason stands at the torch function of the
same name.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from flashdist.kernels.triton_packed import (
    bf16_bits,
    high_halves,
    low_bytes,
    scaled_bytes,
    second_bytes,
    signed_bytes_shifted,
    signed_bytes_to_float,
    truncated,
)

MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
FP32_INF = tl.constexpr(0x7F800000)
FP16_REBIAS = tl.constexpr((127 - 15) << 23)
TWICE_MOMENTUM_CODES = tl.constexpr(254.0)
# Where magnitudes on the fine grid round up to bf16's infinity.
ROUNDS_TO_INF = tl.constexpr(0x7F7F8000)
# bf16 patterns between which a momentum scale may lie: 2^-126 and 2^125.
SCALE_MIN_BITS = tl.constexpr(0x0080)
SCALE_LOST_BITS = tl.constexpr(0x7E00)
DITHER_LANE_INT32 = tl.constexpr(3242174889 - 2**32)


@triton.jit
def join(hi, lo, keep, WEIGHT: tl.constexpr, LO_BITS: tl.constexpr, FAST: tl.constexpr):
    """int16 patterns and int8/int16 corrections that fit them (see :func:`fitting`) -> fp32 master weights.

    ``keep`` is 1, or 0 to leave the corrections out.
    """
    if WEIGHT == tl.bfloat16:
        if LO_BITS == 8:
            return (bf16_bits(hi, FAST) + signed_bytes_shifted(lo, FAST) * keep).to(tl.float32, bitcast=True)
        else:
            return (bf16_bits(hi, FAST) + lo.to(tl.int32) * keep).to(tl.float32, bitcast=True)
    else:
        pattern = hi.to(tl.int32)
        magnitude = pattern & 0x7FFF
        q = (magnitude << LO_BITS) + lo.to(tl.int32) * keep
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
def fitting(hi, lo, WEIGHT: tl.constexpr):
    """Corrections of unknown origin: 0 where no split can have made the pair, so that join never makes up a NaN."""
    magnitude = hi.to(tl.int32) & 0x7FFF
    inf: tl.constexpr = 0x7F80 if WEIGHT == tl.bfloat16 else 0x7C00
    misfit = (magnitude >= inf) | ((magnitude == 0) & (lo < 0))
    return tl.where(misfit, 0, lo)


@triton.jit
def divide(x, y, FAST: tl.constexpr):
    """``x / y``; FAST is a reciprocal and a product, good to 2 ULP for 2^-126 <= y <= 2^126 (a third of the work)."""
    if FAST:
        return libdevice.fast_dividef(x, y)
    else:
        return x / y


@triton.jit
def split(x, WEIGHT: tl.constexpr, LO_BITS: tl.constexpr, FAST: tl.constexpr):
    """fp32 master weights, results of arithmetic -> int16 patterns, int8/int16 corrections, patterns in int32's upper
    half.

    Arithmetic returns quiet NaNs only, whose magnitude is at least 0x7FC00000: one minimum makes them canonical. It is
    unsigned, because the largest of them (0x7FFFFFFF, NVIDIA's) overflows when it is rounded.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE_MASK
    if WEIGHT == tl.bfloat16:
        # On the grid of 24 bits (32: as it is); its low bits, as a signed number, are the correction.
        rounded = (magnitude + (0x80 if LO_BITS == 8 else 0)).to(tl.uint32, bitcast=True)
        fine = tl.minimum(rounded, 0x7FC00000).to(tl.int32, bitcast=True)
        hi_bits = (fine + 0x8000) | (bits & -0x80000000)
        # What rounds up to infinity keeps no correction; infinity and NaN themselves have none.
        fine = tl.where(fine >= ROUNDS_TO_INF, 0, fine)
        if LO_BITS == 8:
            return high_halves(hi_bits, FAST), second_bytes(fine, FAST), hi_bits
        else:
            return high_halves(hi_bits, FAST), fine.to(tl.int16), hi_bits
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
        q = tl.where(magnitude > FP32_INF, 0x7E00 << LO_BITS, q)
        hi = (q + (1 << (LO_BITS - 1))) >> LO_BITS
        lo = tl.where(hi >= 0x7C00, 0, q - (hi << LO_BITS)).to(tl.int8 if LO_BITS == 8 else tl.int16)
        hi_bits = (hi << 16) | (bits & -0x80000000)
        return high_halves(hi_bits, FAST), lo, hi_bits


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
def group_peak(magnitude):
    """Largest of each group of fp32 magnitudes, given and returned as int32 bits: inf and NaN order above every
    number."""
    return tl.max(magnitude, axis=1)


@triton.jit
def decode_momentum(codes, scale_bits, FAST: tl.constexpr):
    """int8 codes ``[n, 32]``, bf16 scales as int16 bits ``[n]`` -> fp32."""
    c = signed_bytes_to_float(codes, FAST)
    scale = (scale_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return divide(c, TWICE_MOMENTUM_CODES - tl.abs(c), FAST) * scale[:, None]


@triton.jit
def encode_momentum(m, dither, FAST: tl.constexpr):
    """fp32 ``[n, 32]`` and offsets ``[1, 32]`` -> int8 codes, bf16 scales as int16 bits."""
    bits = m.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE_MASK
    peak = group_peak(magnitude)
    # Nearest bf16, ties to even (inf and NaN stay above SCALE_LOST_BITS).
    rounded = (tl.minimum(peak, FP32_INF) + 0x7FFF + ((peak >> 16) & 1)) >> 16
    empty = rounded < SCALE_MIN_BITS
    lost = rounded >= SCALE_LOST_BITS
    scale_bits = tl.where(empty, 0, tl.where(lost, 0x7FC0, rounded))
    # Over infinity every element has the code 0.
    s = (tl.where(empty | lost, 0x7F80, rounded) << 16).to(tl.float32, bitcast=True)[:, None]
    # Away from zero by the offset, then cut towards it. |m| may exceed s by 2^-8 of it.
    away = ((bits & -0x80000000) | dither.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    code = divide(m, s + magnitude.to(tl.float32, bitcast=True), FAST) * TWICE_MOMENTUM_CODES + away
    code = tl.maximum(code, -127.0, propagate_nan=tl.PropagateNan.ALL)  # the NaN of a lost group becomes 0
    code = tl.minimum(code, 127.0, propagate_nan=tl.PropagateNan.ALL).to(tl.int32)
    return low_bytes(code, FAST), scale_bits.to(tl.int16)


@triton.jit
def decode_variance(codes, scale, FAST: tl.constexpr):
    """uint8 codes ``[n, 32]``, fp32 scales ``[n]`` -> fp32."""
    r = scaled_bytes(codes, (scale * (1.0 / 255.0))[:, None], FAST)
    return r * r


@triton.jit
def encode_variance(v, dither, FAST: tl.constexpr):
    """fp32 ``[n, 32]`` and offsets ``[1, 32]`` -> uint8 codes, fp32 scales. tl.sqrt flushes subnormals."""
    r = tl.sqrt(v)  # never negative, never -0
    bits = r.to(tl.int32, bitcast=True)
    if not FAST:
        bits = bits & MAGNITUDE_MASK  # NVIDIA's NaNs are positive, others' may be negative: inf * 0 is on x86
    peak = group_peak(bits)
    lost = peak >= FP32_INF
    scale = tl.where(lost, 0x7FC00000, peak).to(tl.float32, bitcast=True)
    per_root = tl.where(lost | (peak == 0), 0.0, 255.0 / scale)[:, None]
    code = tl.where(r > 0, tl.minimum(tl.maximum(r * per_root + dither, 1.0), 255.0), 0.0)
    return low_bytes(truncated(code, FAST), FAST).to(tl.uint8, bitcast=True), scale


@triton.jit
def dither_offsets(base, lane):
    """The step's base (int32 bits of the uint32) and the places in a group -> fp32 offsets in [0, 1)."""
    phase = (base + lane * DITHER_LANE_INT32).to(tl.uint32, bitcast=True)
    return (phase >> 8).to(tl.float32) * 2.0**-24
