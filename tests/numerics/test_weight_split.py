"""Weight split and join: every 16-bit weight with every 8-bit correction, and the bounds on random fp32 patterns.

The pairs that split can produce are: a finite hi with any lo that does not lead below zero (hi = +-0 has lo >= 0),
where the number they name is an fp32 number; +-infinity with 0; the canonical NaN with 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from flashdist.numerics.weight_split import join, split
from tests.support import reference
from tests.support.cases import SHAPES, name, normal
from tests.support.reference import numpy64
from tests.support.tolerances import tolerance

BF16, FP16, INT8, INT16 = torch.bfloat16, torch.float16, torch.int8, torch.int16
PAIRS = [(BF16, INT8), (BF16, INT16), (FP16, INT8), (FP16, INT16)]
NAMES = {BF16: "bf16", FP16: "fp16", INT8: "int8", INT16: "int16"}
CANONICAL_NAN = {BF16: 0x7FC0, FP16: 0x7E00}
# The first fp32 magnitude whose 16-bit weight is infinite.
FIRST_INFINITE = {
    (BF16, INT16): 0x7F7F8000,
    (BF16, INT8): 0x7F7F7F80,
    (FP16, INT16): 0x477FF000,
    (FP16, INT8): 0x477FEFF0,
}
INT16_SAMPLE = [-32768, -32767, -20000, -257, -256, -255, -9, -8, -7, -1, 0, 1, 7, 8, 9, 127, 128, 4096, 32766, 32767]

pytestmark = pytest.mark.filterwarnings("error")
over_pairs = pytest.mark.parametrize(("weight", "correction"), PAIRS, ids=[f"{NAMES[w]}-{NAMES[c]}" for w, c in PAIRS])
over_weights = pytest.mark.parametrize("weight", [BF16, FP16], ids=["bf16", "fp16"])


def from_bits(bits: Tensor) -> Tensor:
    """fp32 from int64 bit patterns in [0, 2^32)."""
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)


def bits16(hi: Tensor) -> Tensor:
    return hi.view(torch.int16).to(torch.int32) & 0xFFFF


def all_weights(dtype: torch.dtype) -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def exhaustive(weight: torch.dtype, corrections: list[int], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """All 2^16 weights with each of the corrections, four of these at a time."""
    hi = all_weights(weight)
    for start in range(0, len(corrections), 4):
        some = torch.tensor(corrections[start : start + 4], dtype=dtype)
        yield hi.repeat(len(some)), some.repeat_interleave(len(hi))


def corrections_of(dtype: torch.dtype) -> list[int]:
    return list(range(-128, 128)) if dtype == INT8 else INT16_SAMPLE


def producible(hi: Tensor, lo: Tensor, value: Tensor) -> Tensor:
    """Which pairs split can produce, given the fp32 number that join makes of them."""
    not_below_zero = (hi != 0) | (lo >= 0)
    finite = hi.isfinite() & not_below_zero
    if hi.dtype == FP16 and lo.dtype == INT16:
        exact = reference.join(numpy64(hi), lo.numpy().astype(np.int64), FP16, INT16)
        finite &= torch.from_numpy(exact == numpy64(value))
    special = (hi.isinf() | (bits16(hi) == CANONICAL_NAN[hi.dtype])) & (lo == 0)
    return finite | special


@over_pairs
def test_split_undoes_join_for_every_pair_that_split_can_produce(weight, correction):
    seen = 0
    for hi, lo in exhaustive(weight, corrections_of(correction), correction):
        value = join(hi, lo)
        mine = producible(hi, lo, value)
        hi2, lo2 = split(value, weight, correction)
        same = (hi2.view(torch.int16) == hi.view(torch.int16)) & (lo2 == lo)
        assert bool((same | ~mine).all())
        seen += int(mine.sum())
    finite, corrections = 2 * (0x7F80 if weight == BF16 else 0x7C00), corrections_of(correction)
    if (weight, correction) != (FP16, INT16):
        # All finite weights and all corrections but the negative ones of +-0; two infinities and a NaN.
        assert seen == finite * len(corrections) - 2 * sum(c < 0 for c in corrections) + 3
    else:
        # fp32 keeps 13 of the 16 bits in the normal range: multiples of 8 only.
        assert seen >= finite * sum(c % 8 == 0 for c in corrections) - 2 * sum(c < 0 for c in corrections)


@over_pairs
def test_join_of_any_other_pair_is_nan_only_if_the_weight_is(weight, correction):
    for hi, lo in exhaustive(weight, corrections_of(correction), correction):
        value, weights = join(hi, lo), hi.float()
        assert torch.equal(value.isnan(), weights.isnan())
        assert torch.equal(value.isfinite(), weights.isfinite())
        assert bool(((value.signbit() == weights.signbit()) | weights.isnan()).all())
        unchanged = (value == weights) | ~(weights.isinf() | ((weights == 0) & (lo < 0)))
        assert bool(unchanged.all())


@over_pairs
def test_join_against_exact_arithmetic(weight, correction):
    sample = INT16_SAMPLE if correction == INT16 else [-128, -127, -65, -2, -1, 0, 1, 2, 63, 64, 126, 127]
    for hi, lo in exhaustive(weight, sample, correction):
        value = numpy64(join(hi, lo))
        exact = reference.join(numpy64(hi), lo.numpy().astype(np.int64), weight, correction)
        finite = np.isfinite(exact)
        # Pairs between two fp32 numbers, which split never makes, are cut to the one nearer to zero or rounded.
        step = np.spacing(np.abs(value).astype(np.float32)).astype(np.float64)
        error, step = np.abs(value[finite] - exact[finite]), step[finite]
        assert (error < step).all()
        representable = exact[finite].astype(np.float32).astype(np.float64) == exact[finite]
        assert not error[representable].any()


@over_pairs
def test_a_larger_correction_is_a_number_farther_from_zero(weight, correction):
    hi = all_weights(weight)
    hi = hi[hi.isfinite() & (hi != 0)]
    values = [join(hi, torch.full(hi.shape, c, dtype=correction)).abs() for c in (-128, -8, 0, 8, 120)]
    for smaller, larger in pairwise(values):
        assert bool((smaller < larger).all())


def agree_with_reference(x: Tensor, weight: torch.dtype, correction: torch.dtype) -> None:
    hi, lo = split(x, weight, correction)
    assert hi.dtype == weight
    assert lo.dtype == correction
    expected_hi, expected_lo = reference.split(numpy64(x), weight, correction)
    np.testing.assert_array_equal(numpy64(hi), expected_hi)
    np.testing.assert_array_equal(lo.numpy(), expected_lo)
    nan = x.isnan()
    np.testing.assert_array_equal(hi.signbit()[~nan].numpy(), x.signbit()[~nan].numpy())
    assert bool((bits16(hi)[nan] == CANONICAL_NAN[weight]).all())


@over_pairs
def test_every_binade_border_and_tie(weight, correction):
    """Each of the 2^16 upper halves of an fp32 with lower halves at and beside both roundings' ties."""
    for lower in (0, 1, 0x7F, 0x80, 0x81, 0x7F7F, 0x7F80, 0x7F81, 0x8000, 0x807F, 0x8080, 0xFF7F, 0xFF80, 0xFFFF):
        agree_with_reference(from_bits(torch.arange(2**16) * 2**16 + lower), weight, correction)


@pytest.mark.parametrize("correction", [INT8, INT16], ids=["int8", "int16"])
def test_every_fp16_number_and_the_ties_beside_it(correction):
    fp16 = all_weights(FP16)
    exact = numpy64(fp16[fp16.isfinite()])
    step = reference.ulp(exact, reference.FORMATS[FP16])
    parts = reference.EXTRA_BITS[correction]
    fine = 2.0**-parts
    for offset in (0.0, 0.5, -0.5, 0.25, *(k * fine / 2 for k in (-3, -1, 1, 3)), 0.5 - fine / 2, -0.5 + fine / 2):
        x = torch.from_numpy((exact + offset * step).astype(np.float32))
        agree_with_reference(x, FP16, correction)


@over_pairs
def test_random_bit_patterns_against_exact_arithmetic(weight, correction):
    agree_with_reference(random_patterns(weight, 2**19, seed=1), weight, correction)


def random_patterns(weight: torch.dtype, count: int, seed: int) -> Tensor:
    """All of fp32 for bf16; for fp16 the exponents from 2^-30 to 2^17, as the others are 0 or infinity."""
    generator = torch.Generator().manual_seed(seed)
    first, last = (0, 2**31) if weight == BF16 else (0x30800000, 0x48000000)
    twice = torch.randint(2 * first, 2 * last, (count,), generator=generator)
    return from_bits((twice >> 1) | ((twice & 1) << 31))


def ulp(hi: Tensor) -> Tensor:
    """fp64: the power of two that hi's exponent bits name, times that of its last fraction bit."""
    fmt = reference.FORMATS[hi.dtype]
    exponent = 0x7F80 if hi.dtype == BF16 else 0x7C00
    power = (hi.view(torch.int16) & exponent).view(hi.dtype).double()
    return power.clamp(min=2.0**fmt.min_exponent) * 2.0**-fmt.fraction


@over_pairs
def test_error_bound_on_ten_million_patterns(weight, correction):
    bound = tolerance(f"split {NAMES[weight]} {NAMES[correction]}, ULP")
    largest = 0.0
    for seed in range(40):
        x = random_patterns(weight, 2**18, seed)
        hi, lo = split(x, weight, correction)
        finite = hi.isfinite()
        assert not bool(((lo != 0) & ~finite).any())
        assert not bool(((lo < 0) & (hi == 0)).any())
        assert torch.equal(hi.isnan(), x.isnan())
        back = join(hi, lo)
        if (weight, correction) == (BF16, INT16):
            assert bool(((back.view(torch.int32) == x.view(torch.int32)) | ~finite).all())
            continue
        error = torch.where(finite, (back.double() - x.double()).abs() / ulp(hi), 0.0)
        largest = max(largest, float(error.max()))
    assert largest <= bound
    # The bound is met, not only kept: a finer grid would mean that bits of lo lie idle.
    assert largest > 0.99 * bound or bound == 0


def test_fp16_with_16_bits_is_exact_down_to_its_subnormals():
    """From 2^-17 on, an fp32 number has no bits below the fine grid of fp16's subnormals."""
    generator = torch.Generator().manual_seed(0)
    first, stop = 0x37000000, 0x477FE000  # 2^-17, 65504
    for _ in range(4):
        bits = torch.randint(first, stop, (2**18,), generator=generator)
        bits[:2] = torch.tensor([first, stop - 1])
        x = from_bits(bits)
        assert torch.equal(join(*split(x, FP16, INT16)), x)
    below = from_bits(torch.tensor([first - 1]))
    assert not torch.equal(join(*split(below, FP16, INT16)), below)


@over_pairs
def test_infinite_exactly_from_the_border_on(weight, correction):
    border = FIRST_INFINITE[weight, correction]
    bits = border + torch.arange(-4096, 4096)
    for sign in (0, 2**31):
        x = from_bits(bits + sign)
        hi, lo = split(x, weight, correction)
        assert torch.equal(hi.isinf(), bits >= border)
        assert torch.equal(hi.signbit(), x.signbit())
        assert not bool(lo[hi.isinf()].any())
        # The last finite weight takes the largest correction.
        last = 4095
        assert int(bits16(hi[last])) & 0x7FFF == (0x7F7F if weight == BF16 else 0x7BFF)
        assert int(lo[last]) == {INT8: 127, INT16: 32767 if weight == BF16 else 32760}[correction]


@over_pairs
def test_nan_infinity_and_zero(weight, correction):
    patterns = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000]
    hi, lo = split(from_bits(torch.tensor(patterns)), weight, correction)
    inf = 0x7F80 if weight == BF16 else 0x7C00
    assert bits16(hi).tolist() == [CANONICAL_NAN[weight]] * 5 + [inf, inf | 0x8000, 0, 0x8000]
    assert not bool(lo.any())


@over_pairs
def test_the_smallest_numbers(weight, correction):
    """fp32 subnormals: the first 2^17 and those around fp16's own last steps."""
    agree_with_reference(from_bits(torch.arange(2**17)), weight, correction)
    agree_with_reference(from_bits(torch.arange(2**23 - 2**12, 2**23 + 2**12) + 2**31), weight, correction)
    tiny = from_bits(torch.arange(0x2B800000, 0x39000000, 0xFFF))  # 2^-40 to 2^-13
    agree_with_reference(tiny, weight, correction)


@over_pairs
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_shapes_are_kept(weight, correction, shape):
    x = normal(shape, seed=3)
    hi, lo = split(x, weight, correction)
    assert hi.shape == lo.shape == join(hi, lo).shape == x.shape


@over_weights
def test_a_weight_of_the_format_itself_has_no_correction(weight):
    hi = all_weights(weight)
    hi = hi[~hi.isnan()]
    for correction in (INT8, INT16):
        again, lo = split(hi.float(), weight, correction)
        assert torch.equal(bits16(again), bits16(hi))
        assert not bool(lo.any())


@over_pairs
def test_the_input_is_left_alone(weight, correction):
    x = normal((64, 33), seed=4)
    before = x.clone()
    hi, lo = split(x, weight, correction)
    hi_before, lo_before = hi.clone(), lo.clone()
    join(hi, lo)
    assert torch.equal(x, before)
    assert torch.equal(hi, hi_before)
    assert torch.equal(lo, lo_before)
