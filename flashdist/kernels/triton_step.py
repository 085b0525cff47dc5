"""The fused step: one launch for all tensors of a bucket, whatever the rule, weight dtype and state format.

Each program takes one tile (16 groups of 32 elements) through the whole step in registers: join the master weight,
decode the moments, apply the rule, split, encode, store in place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdist.kernels import tiles
from flashdist.kernels.triton_numerics import (
    decode_momentum,
    decode_variance,
    dither_offsets,
    encode_momentum,
    encode_variance,
    fitting,
    join,
    narrow,
    split,
    widen,
)
from flashdist.kernels.triton_packed import bf16_bits
from flashdist.numerics import companding, fingerprint

GROUP = tl.constexpr(companding.GROUP)
TILE_GROUPS = tl.constexpr(fingerprint.TILE_GROUPS)
PLACE_MULTIPLIER = tl.constexpr(fingerprint.PLACE_MULTIPLIER - 2**32)
PLACE_OFFSET = tl.constexpr(fingerprint.PLACE_OFFSET - 2**32)
DITHER_STEP = tl.constexpr(companding.DITHER_STEP)

WEIGHT_COL = tl.constexpr(tiles.WEIGHT)
GRAD_COL = tl.constexpr(tiles.GRAD)
CORRECTION_COL = tl.constexpr(tiles.CORRECTION)
MOMENT1_COL = tl.constexpr(tiles.MOMENT1)
SCALE1_COL = tl.constexpr(tiles.SCALE1)
MOMENT2_COL = tl.constexpr(tiles.MOMENT2)
SCALE2_COL = tl.constexpr(tiles.SCALE2)
FINGERPRINT_COL = tl.constexpr(tiles.FINGERPRINT)
STEP_COL = tl.constexpr(tiles.STEP)
NUM_GROUPS_COL = tl.constexpr(tiles.NUM_GROUPS)
ROW_COL = tl.constexpr(tiles.ROW)
FULL_TILES_COL = tl.constexpr(tiles.FULL_TILES)
TILES_PER_PROGRAM_COL = tl.constexpr(tiles.TILES_PER_PROGRAM)
FIRST_FULL_COL = tl.constexpr(tiles.FIRST_FULL)
FIRST_REST_COL = tl.constexpr(tiles.FIRST_REST)
PARAM_GROUP_COL = tl.constexpr(tiles.PARAM_GROUP)
TABLE_COLUMNS = tl.constexpr(tiles.TABLE_COLUMNS)
SCALAR_COLUMNS = tl.constexpr(tiles.SCALAR_COLUMNS)
GROUP_COLUMNS = tl.constexpr(tiles.GROUP_COLUMNS)
GRAD_FACTOR_COL = tl.constexpr(tiles.GRAD_FACTOR)
DITHER_BASE_COL = tl.constexpr(tiles.DITHER_BASE)
SKIP_COL = tl.constexpr(tiles.SKIP)


@triton.jit
def power(base, exponent):
    """``base ** exponent`` in fp64 for int32 exponents below 2^25, by squaring (no library call, any target)."""
    result = base * 0.0 + 1.0
    square = base
    for _ in tl.static_range(25):
        result = tl.where((exponent & 1) != 0, result * square, result)
        square = square * square
        exponent = exponent >> 1
    return result


@triton.jit
def prepare_kernel(
    table,
    groups,
    scalars,
    clip_factor,
    grad_scale,
    found_inf,
    num_tensors,
    HAS_CLIP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advance the step counts and write each tensor's scalars of this step: numerics.rules.GroupScalars.at on
    device."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = t < num_tensors
    row = table + t.to(tl.int64) * TABLE_COLUMNS
    step_ptr = tl.load(row + STEP_COL, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    group = groups + tl.load(row + PARAM_GROUP_COL, mask=mask, other=0) * GROUP_COLUMNS
    skip = 0.0
    if HAS_FOUND_INF:
        skip = tl.load(found_inf).to(tl.float32)
    count = tl.load(step_ptr, mask=mask, other=0.0) + tl.where(skip != 0.0, 0.0, 1.0)
    tl.store(step_ptr, count, mask=mask)
    n = count.to(tl.int32)

    factor = tl.load(group + 13, mask=mask, other=1.0).to(tl.float32)
    if HAS_CLIP:
        factor = factor * tl.load(clip_factor)
    if HAS_SCALE:
        factor = factor / tl.load(grad_scale).to(tl.float32)

    lr = tl.load(group + 0, mask=mask, other=0.0)
    first = n == 1
    gain1 = tl.where(first, tl.load(group + 5, mask=mask, other=0.0), tl.load(group + 4, mask=mask, other=0.0))
    bias1 = 1.0 - power(tl.load(group + 9, mask=mask, other=0.0), n)
    bias2 = 1.0 - power(tl.load(group + 10, mask=mask, other=0.0), n)
    out = scalars + t.to(tl.int64) * SCALAR_COLUMNS
    tl.store(out + 0, lr.to(tl.float32), mask=mask)
    tl.store(out + 1, (1.0 - lr * tl.load(group + 1, mask=mask, other=0.0)).to(tl.float32), mask=mask)
    tl.store(out + 2, tl.load(group + 2, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(out + 3, tl.load(group + 3, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(out + 4, gain1.to(tl.float32), mask=mask)
    tl.store(out + 5, tl.load(group + 6, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(out + 6, tl.load(group + 7, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(out + 7, tl.load(group + 8, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(out + 8, (lr / bias1).to(tl.float32), mask=mask)
    tl.store(out + 9, (1.0 / tl.sqrt(bias2)).to(tl.float32), mask=mask)
    tl.store(out + 10, tl.load(group + 11, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(out + 11, tl.load(group + 12, mask=mask, other=0.0).to(tl.float32), mask=mask)
    tl.store(out + GRAD_FACTOR_COL, factor, mask=mask)
    base = (n.to(tl.int64) * DITHER_STEP).to(tl.int32)
    tl.store(out + DITHER_BASE_COL, base.to(tl.float32, bitcast=True), mask=mask)
    tl.store(out + SKIP_COL, tl.zeros([BLOCK], tl.float32) + skip, mask=mask)


@triton.jit
def load(pointer, offsets, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointer + offsets, mask=mask, other=0)
    else:
        return tl.load(pointer + offsets)


@triton.jit
def store(pointer, offsets, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, value, mask=mask)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def address(cell, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """A pointer from the table. The promise must be made of the pointer: made of the integer, it is lost."""
    return tl.multiple_of(tl.load(cell).to(tl.pointer_type(TYPE)), ALIGN)


@triton.jit
def tile_sum(bits):
    """The fingerprint of a tile: numerics.fingerprint. ``bits`` holds a 16-bit pattern in each upper half, 0 where
    masked."""
    PAIRS: tl.constexpr = GROUP // 2
    even, odd = tl.split(tl.reshape(bits, [TILE_GROUPS, PAIRS, 2]))
    pair = (odd & -0x10000) + (even.to(tl.uint32, bitcast=True) >> 16).to(tl.int32, bitcast=True)
    place = tl.arange(0, TILE_GROUPS)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    product = pair * (place * PLACE_MULTIPLIER + PLACE_OFFSET)
    mixed = product ^ (product.to(tl.uint32, bitcast=True) >> 16).to(tl.int32, bitcast=True)
    total = tl.sum(tl.sum(mixed, axis=1), axis=0)
    return tl.where(total == 0, 1, total)


@triton.jit
def load_scalars(s):
    """The numerics.rules.StepScalars of a tensor."""
    return (
        tl.load(s + 0), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3), tl.load(s + 4), tl.load(s + 5),
        tl.load(s + 6), tl.load(s + 7), tl.load(s + 8), tl.load(s + 9), tl.load(s + 10), tl.load(s + 11),
    )  # fmt: skip


@triton.jit
def load_addresses(
    row,
    MOMENTS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    LO_BITS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Pointers to a tensor's weight, gradient, correction, fingerprints, moments and scales (the weight's where
    absent)."""
    # Full tiles move 16 bytes of a 16-bit tensor and 8 of an 8-bit one in an instruction: eight elements of each, so
    # that all share one layout. Wider promises would make the compiler exchange data between threads before it stores.
    ALIGN: tl.constexpr = 1 if MASKED else 16
    STATE_ALIGN: tl.constexpr = 1 if MASKED else (8 if QUANTIZED else 16)
    LO_ALIGN: tl.constexpr = 1 if MASKED else LO_BITS
    weight = address(row + WEIGHT_COL, tl.float32 if WEIGHT == tl.float32 else tl.int16, ALIGN)
    grad = address(row + GRAD_COL, tl.int16 if GRAD == tl.bfloat16 else GRAD, ALIGN)
    lo, mark, m, m_scale, v, v_scale = weight, weight, weight, weight, weight, weight
    if LO_BITS != 0:
        lo = address(row + CORRECTION_COL, tl.int8 if LO_BITS == 8 else tl.int16, LO_ALIGN)
        mark = address(row + FINGERPRINT_COL, tl.int32, 4)
    if MOMENTS >= 1:
        m = address(row + MOMENT1_COL, tl.int8 if QUANTIZED else tl.float32, STATE_ALIGN)
        if QUANTIZED:
            m_scale = address(row + SCALE1_COL, tl.int16, ALIGN)
    if MOMENTS >= 2:
        v = address(row + MOMENT2_COL, tl.uint8 if QUANTIZED else tl.float32, STATE_ALIGN)
        if QUANTIZED:
            v_scale = address(row + SCALE2_COL, tl.float32, ALIGN)
    return weight, grad, lo, mark, m, m_scale, v, v_scale


@triton.jit
def load_tile(
    at,
    offsets,
    mask,
    group_mask,
    MOMENTS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    LO_BITS: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """Stored weight and correction, master weight, gradient and moments of a tile; fp32 but for the first two."""
    weight_ptr, grad_ptr, lo_ptr, mark_ptr, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr = at
    group = tl.arange(0, TILE_GROUPS)
    hi = load(weight_ptr, offsets, mask, MASKED)
    lo = hi
    grad = load(grad_ptr, offsets, mask, MASKED)
    m = tl.zeros([TILE_GROUPS, GROUP], tl.float32)
    v = m
    if LO_BITS != 0:
        mark = tl.load(mark_ptr)
        lo = load(lo_ptr, offsets, mask, MASKED)
    if MOMENTS >= 1:
        m = load(m_ptr, offsets, mask, MASKED)
        if QUANTIZED:
            m = decode_momentum(m, load(m_scale_ptr, group, group_mask, MASKED), FAST)
    if MOMENTS >= 2:
        v = load(v_ptr, offsets, mask, MASKED)
        if QUANTIZED:
            v = decode_variance(v, load(v_scale_ptr, group, group_mask, MASKED), FAST)
    if LO_BITS != 0:
        # Corrections count only while the weights are the ones that the last step wrote.
        fresh = (mark == tile_sum(bf16_bits(hi, FAST))).to(tl.int32)
        p = join(hi, lo, fresh, WEIGHT, LO_BITS, FAST)
        if mark == 0:
            p = join(hi, fitting(hi, lo, WEIGHT), 1, WEIGHT, LO_BITS, FAST)
    else:
        p = widen(hi, WEIGHT)
    if GRAD == tl.bfloat16:
        g = bf16_bits(grad, FAST).to(tl.float32, bitcast=True)
    else:
        g = grad.to(tl.float32)
    return hi, lo, p, g, m, v


@triton.jit
def store_weight(
    at, p, offsets, mask, WEIGHT: tl.constexpr, LO_BITS: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr
):
    """Split and store a tile's master weights with their fingerprint; returns what was stored."""
    weight_ptr, grad_ptr, lo_ptr, mark_ptr, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr = at
    if LO_BITS != 0:
        hi, lo, bits = split(p, WEIGHT, LO_BITS, FAST)
        store(lo_ptr, offsets, lo, mask, MASKED)
        tl.store(mark_ptr, tile_sum(tl.where(mask, bits, 0) if MASKED else bits))
    else:
        hi = narrow(p, WEIGHT)
        lo = hi
    store(weight_ptr, offsets, hi, mask, MASKED)
    return hi, lo


@triton.jit
def store_moments(
    at,
    m,
    v,
    dither,
    offsets,
    mask,
    group_mask,
    MOMENTS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
):
    """Encode and store a tile's moments."""
    weight_ptr, grad_ptr, lo_ptr, mark_ptr, m_ptr, m_scale_ptr, v_ptr, v_scale_ptr = at
    group = tl.arange(0, TILE_GROUPS)
    if MOMENTS >= 1:
        if QUANTIZED:
            m, m_scale = encode_momentum(m, dither, FAST)
            store(m_scale_ptr, group, m_scale, group_mask, MASKED)
        store(m_ptr, offsets, m, mask, MASKED)
    if MOMENTS >= 2:
        if QUANTIZED:
            v, v_scale = encode_variance(v, dither, FAST)
            store(v_scale_ptr, group, v_scale, group_mask, MASKED)
        store(v_ptr, offsets, v, mask, MASKED)


@triton.jit
def program_tiles(row, program, MASKED: tl.constexpr):
    """The first tile of a program, and the one after its last."""
    full_tiles = tl.load(row + FULL_TILES_COL)
    if MASKED:
        first = full_tiles + (program - tl.load(row + FIRST_REST_COL))
        return first, first + 1
    else:
        together = tl.load(row + TILES_PER_PROGRAM_COL)
        first = (program - tl.load(row + FIRST_FULL_COL)) * together
        return first, tl.minimum(first + together, full_tiles)


@triton.jit
def tile_places(tile, elements, num_groups, MASKED: tl.constexpr):
    """Where a tile lies: its first element, the offsets of its elements from there, and which of them exist."""
    group = tl.arange(0, TILE_GROUPS)
    lane = tl.arange(0, GROUP)
    first_group = tile * TILE_GROUPS
    if MASKED:
        # Rows that are no multiple of 32 end in a partial group: find each group's row and its width there. Groups are
        # counted in 32 bits (the launcher sees to it), since divisions in 64 are slow; elements are not.
        groups_per_row = ((elements + GROUP - 1) // GROUP).to(tl.int32)
        first32 = first_group.to(tl.int32)
        first_row = first32 // groups_per_row
        first_in_row = first32 - first_row * groups_per_row
        in_row = first_in_row + group
        rows_on = in_row // groups_per_row
        in_row = in_row - rows_on * groups_per_row
        start = rows_on.to(tl.int64) * elements + (in_row - first_in_row).to(tl.int64) * GROUP
        group_mask = first32 + group < num_groups
        mask = (lane[None, :] < (elements - in_row.to(tl.int64) * GROUP)[:, None]) & group_mask[:, None]
        element = first_row.to(tl.int64) * elements + first_in_row.to(tl.int64) * GROUP
        return element, start[:, None] + lane[None, :], mask, group_mask
    else:
        offsets = group[:, None] * GROUP + lane[None, :]
        return first_group * GROUP, offsets, offsets >= 0, group >= 0


@triton.jit
def step_kernel(
    table,
    scalars,
    program_tensor,
    lost,
    RULE: tl.constexpr,
    MOMENTS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    LO_BITS: tl.constexpr,
    DITHER: tl.constexpr,
    CHECK: tl.constexpr,
    MASKED: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Step full tiles without masks (MASKED False), or one partial, gapped or unaligned tile with them."""
    program = tl.program_id(0).to(tl.int64)
    t = tl.load(program_tensor + program).to(tl.int64)
    row = table + t * TABLE_COLUMNS
    s = scalars + t * SCALAR_COLUMNS
    if tl.load(s + SKIP_COL) != 0.0:
        return
    weight, grad, lo, mark, m, m_scale, v, v_scale = load_addresses(
        row, MOMENTS, QUANTIZED, WEIGHT, GRAD, LO_BITS, MASKED
    )
    step_scalars = load_scalars(s)
    grad_factor = tl.load(s + GRAD_FACTOR_COL)
    dither = tl.full((1, GROUP), 0.5, tl.float32)
    if DITHER:
        dither = dither_offsets(tl.load(s + DITHER_BASE_COL).to(tl.int32, bitcast=True), tl.arange(0, GROUP))[None, :]
    elements = tl.load(row + ROW_COL)
    num_groups = tl.load(row + NUM_GROUPS_COL)
    first, last = program_tiles(row, program, MASKED)
    for tile in tl.range(first, last, num_stages=STAGES):
        e, offsets, mask, group_mask = tile_places(tile, elements, num_groups, MASKED)
        k = tile * TILE_GROUPS
        at = (weight + e, grad + e, lo + e, mark + tile, m + e, m_scale + k, v + e, v_scale + k)
        hi_old, lo_old, p_old, g, m_new, v_new = load_tile(
            at, offsets, mask, group_mask, MOMENTS, QUANTIZED, WEIGHT, GRAD, LO_BITS, MASKED, FAST
        )
        p, m_new, v_new = RULE(p_old, g * grad_factor, m_new, v_new, step_scalars, FAST)
        hi_new, lo_new = store_weight(at, p, offsets, mask, WEIGHT, LO_BITS, MASKED, FAST)
        if CHECK:
            same = (hi_new == hi_old) & (lo_new == lo_old) & (p != p_old) & mask
            tl.atomic_add(lost + t, tl.sum(tl.sum(same.to(tl.int32), axis=1), axis=0))
        store_moments(at, m_new, v_new, dither, offsets, mask, group_mask, MOMENTS, QUANTIZED, MASKED, FAST)
