"""The fused step: one launch for all tensors of a bucket, whatever the rule, weight dtype and state format.

Each program takes one tile (32 groups of 32 elements) through the whole step in registers: join the master weight,
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
    join,
    narrow,
    split,
    widen,
)
from flashdist.numerics import companding, fingerprint

GROUP = tl.constexpr(companding.GROUP)
TILE_GROUPS = tl.constexpr(fingerprint.TILE_GROUPS)
POSITION_MULTIPLIER = tl.constexpr(fingerprint.POSITION_MULTIPLIER - 2**32)
POSITION_OFFSET = tl.constexpr(fingerprint.POSITION_OFFSET - 2**32)
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
    """Advance the step counts and write each tensor's scalars of this step: numerics.rules.GroupScalars.at on device."""
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
def tile_sum(hi, position_weight):
    """The fingerprint of a tile of int16 patterns (masked elements are 0)."""
    total = tl.sum(tl.sum(hi.to(tl.int32) * position_weight, axis=1), axis=0)
    return tl.where(total == 0, 1, total)


@triton.jit
def step_tile(
    row,
    s,
    tile,
    element,  # int64, first element of the tile
    first_group,  # int64, first group of the tile
    offsets,  # [32, 32] relative to element
    mask,  # [32, 32]
    group_mask,  # [32]
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
):
    ALIGN: tl.constexpr = 1 if MASKED else 16
    group = tl.arange(0, TILE_GROUPS)
    lane = tl.arange(0, GROUP)
    WEIGHT_BITS: tl.constexpr = tl.float32 if WEIGHT == tl.float32 else tl.int16
    GRAD_BITS: tl.constexpr = tl.int16 if GRAD == tl.bfloat16 else GRAD

    weight_ptr = address(row + WEIGHT_COL, WEIGHT_BITS, ALIGN) + element
    grad_ptr = address(row + GRAD_COL, GRAD_BITS, ALIGN) + element
    hi = load(weight_ptr, offsets, mask, MASKED)
    grad = load(grad_ptr, offsets, mask, MASKED)

    if LO_BITS != 0:
        LO: tl.constexpr = tl.int8 if LO_BITS == 8 else tl.int16
        lo_ptr = address(row + CORRECTION_COL, LO, ALIGN) + element
        lo = load(lo_ptr, offsets, mask, MASKED).to(tl.int32)

    STATE1: tl.constexpr = tl.int8 if QUANTIZED else tl.float32
    STATE2: tl.constexpr = tl.uint8 if QUANTIZED else tl.float32
    if MOMENTS >= 1:
        m_ptr = address(row + MOMENT1_COL, STATE1, ALIGN) + element
        m_state = load(m_ptr, offsets, mask, MASKED)
        if QUANTIZED:
            ms_ptr = address(row + SCALE1_COL, tl.int16, ALIGN) + first_group
            m_scale = load(ms_ptr, group, group_mask, MASKED)
    if MOMENTS >= 2:
        v_ptr = address(row + MOMENT2_COL, STATE2, ALIGN) + element
        v_state = load(v_ptr, offsets, mask, MASKED)
        if QUANTIZED:
            vs_ptr = address(row + SCALE2_COL, tl.float32, ALIGN) + first_group
            v_scale = load(vs_ptr, group, group_mask, MASKED)

    if LO_BITS != 0:
        # Corrections count only while the weights are the ones that the last step wrote.
        position_weight = (group[:, None] * GROUP + lane[None, :]) * POSITION_MULTIPLIER + POSITION_OFFSET
        mark_ptr = tl.load(row + FINGERPRINT_COL).to(tl.pointer_type(tl.int32)) + tile
        mark = tl.load(mark_ptr)
        known = (mark == 0) | (mark == tile_sum(hi, position_weight))
        lo = tl.where(known, lo, 0)
        p = join(hi, lo, WEIGHT, LO_BITS)
    else:
        p = widen(hi, WEIGHT)

    if GRAD == tl.bfloat16:
        g = (grad.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        g = grad.to(tl.float32)
    g = g * tl.load(s + GRAD_FACTOR_COL)

    m = g
    v = g
    if MOMENTS >= 1:
        if QUANTIZED:
            m = decode_momentum(m_state, m_scale, FAST)
        else:
            m = m_state
    else:
        m = tl.zeros([TILE_GROUPS, GROUP], tl.float32)
    if MOMENTS >= 2:
        if QUANTIZED:
            v = decode_variance(v_state, v_scale)
        else:
            v = v_state

    p_new, m, v = RULE(
        p,
        g,
        m,
        v,
        tl.load(s + 0),
        tl.load(s + 1),
        tl.load(s + 2),
        tl.load(s + 3),
        tl.load(s + 4),
        tl.load(s + 5),
        tl.load(s + 6),
        tl.load(s + 7),
        tl.load(s + 8),
        tl.load(s + 9),
        tl.load(s + 10),
        tl.load(s + 11),
        FAST,
    )

    if LO_BITS != 0:
        hi_new, lo_new = split(p_new, WEIGHT, LO_BITS)
        store(lo_ptr, offsets, lo_new.to(LO), mask, MASKED)
        tl.store(mark_ptr, tile_sum(tl.where(mask, hi_new, 0) if MASKED else hi_new, position_weight))
    else:
        hi_new = narrow(p_new, WEIGHT)
    store(weight_ptr, offsets, hi_new, mask, MASKED)

    if CHECK:
        same = (hi_new == hi) & (p_new != p)
        if LO_BITS != 0:
            same = same & (lo_new == lo)
        tl.atomic_add(lost, tl.sum(tl.sum((same & mask).to(tl.int32), axis=1), axis=0))

    if MOMENTS >= 1:
        if QUANTIZED:
            m_codes, m_scale = encode_momentum(m, FAST)
            store(m_ptr, offsets, m_codes, mask, MASKED)
            store(ms_ptr, group, m_scale, group_mask, MASKED)
        else:
            store(m_ptr, offsets, m, mask, MASKED)
    if MOMENTS >= 2:
        if QUANTIZED:
            if DITHER:
                base = tl.load(s + DITHER_BASE_COL).to(tl.int32, bitcast=True)
                v_codes, v_scale = encode_variance(v, dither_offsets(base, lane)[None, :])
            else:
                v_codes, v_scale = encode_variance(v, 0.5)
            store(v_ptr, offsets, v_codes, mask, MASKED)
            store(vs_ptr, group, v_scale, group_mask, MASKED)
        else:
            store(v_ptr, offsets, v, mask, MASKED)


@triton.jit
def step_kernel(
    table,
    scalars,
    tile_tensor,
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
):
    """Step one tile: full ones without masks (MASKED False), partial, gapped or unaligned ones with them."""
    program = tl.program_id(0).to(tl.int64)
    t = tl.load(tile_tensor + program).to(tl.int64)
    row = table + t * TABLE_COLUMNS
    s = scalars + t * SCALAR_COLUMNS
    if tl.load(s + SKIP_COL) != 0.0:
        return
    group = tl.arange(0, TILE_GROUPS)
    lane = tl.arange(0, GROUP)
    if MASKED:
        tile = program - tl.load(row + FIRST_REST_COL)
        first_group = tile * TILE_GROUPS
        elements = tl.load(row + ROW_COL)
        groups_per_row = (elements + GROUP - 1) // GROUP
        first_row = first_group // groups_per_row
        first_in_row = first_group - first_row * groups_per_row
        # Rows that are no multiple of 32 end in a partial group: find each group's row and its width there.
        in_row = first_in_row + group.to(tl.int64)
        rows_on = in_row // groups_per_row
        in_row = in_row - rows_on * groups_per_row
        start = rows_on * elements + (in_row - first_in_row) * GROUP
        width = elements - in_row * GROUP
        group_mask = first_group + group < tl.load(row + NUM_GROUPS_COL)
        mask = (lane[None, :] < width[:, None]) & group_mask[:, None]
        element = first_row * elements + first_in_row * GROUP
        offsets = start[:, None] + lane[None, :]
    else:
        tile = program - tl.load(row + FIRST_FULL_COL)
        first_group = tile * TILE_GROUPS
        element = first_group * GROUP
        offsets = group[:, None] * GROUP + lane[None, :]
        mask = offsets >= 0
        group_mask = group >= 0
    step_tile(
        row, s, tile, element, first_group, offsets, mask, group_mask, lost + t,
        RULE, MOMENTS, QUANTIZED, WEIGHT, GRAD, LO_BITS, DITHER, CHECK, MASKED, FAST,
    )  # fmt: skip
