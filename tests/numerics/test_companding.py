"""8-bit momentum and variance: codes against float64, all codes there and back, zeros, NaN, floor and dither."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from flashdist.numerics.companding import (
    GROUP,
    decode_momentum,
    decode_variance,
    dither_base,
    dither_offsets,
    encode_momentum,
    encode_variance,
)
from tests.support import reference
from tests.support.cases import MAGNITUDES, normal, uneven
from tests.support.reference import numpy64
from tests.support.tolerances import tolerance

GROUPS = 512
# The smallest normal fp32 number; below it a momentum scale or a variance counts as 0.
TINY = 2.0**-126
over_magnitudes = pytest.mark.parametrize("magnitude", MAGNITUDES)


def check_codes(codes: Tensor, position: np.ndarray, offset: float | np.ndarray, low: int, high: int) -> None:
    """Codes are floor(position + offset), away from ties exactly."""
    shifted = position + offset
    expected = np.clip(np.floor(shifted), low, high)
    near_tie = (np.abs(shifted - np.rint(shifted)) < tolerance("code tie, codes")) & (shifted > low)
    wrong = codes.numpy() != expected
    assert not (wrong & ~near_tie).any()
    assert (np.abs(codes.numpy().astype(int) - expected) <= 1).all()
    # Ties are rare, so hardly a code goes unchecked.
    assert near_tie.mean() < 0.01


@over_magnitudes
@pytest.mark.parametrize("data", [normal, uneven], ids=["normal", "uneven"])
@pytest.mark.parametrize("step", [None, 1, 777])
def test_momentum_codes_against_float64(magnitude, data, step):
    m = data((GROUPS, GROUP), 0) * magnitude
    codes, scale = encode_momentum(m, 0.5 if step is None else dither_offsets(step))
    assert (codes.dtype, codes.shape) == (torch.int8, (GROUPS, GROUP))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (GROUPS,))
    position, s = reference.momentum_position(numpy64(m))
    np.testing.assert_array_equal(numpy64(scale), s)
    offset = 0.5 if step is None else np.array([reference.dither(step, lane) for lane in range(GROUP)])
    check_codes(codes.abs(), np.abs(position), offset, low=0, high=127)
    assert bool(((codes.sign() == m.sign()) | (codes == 0)).all())


@over_magnitudes
@pytest.mark.parametrize("step", [None, 1, 777])
def test_variance_codes_against_float64(magnitude, step):
    v = (uneven((GROUPS, GROUP), 1) * magnitude).square()
    v = v.clamp(min=2 * TINY)
    codes, scale = encode_variance(v, 0.5 if step is None else dither_offsets(step))
    assert (codes.dtype, codes.shape) == (torch.uint8, (GROUPS, GROUP))
    assert (scale.dtype, scale.shape) == (torch.float32, (GROUPS,))
    position, s = reference.variance_position(numpy64(v))
    np.testing.assert_allclose(numpy64(scale), s, rtol=tolerance("variance scale, relative"), atol=0)
    offset = 0.5 if step is None else np.array([reference.dither(step, lane) for lane in range(GROUP)])
    check_codes(codes, position, offset, low=1, high=255)


def groups_with_peak(codes: range, peak: int) -> Tensor:
    """All codes, in groups of 32 that start with the peak's."""
    rest = torch.tensor(list(codes), dtype=torch.int64)
    rest = torch.nn.functional.pad(rest, (0, -len(rest) % (GROUP - 1)), value=codes[0]).view(-1, GROUP - 1)
    return torch.cat([torch.full((len(rest), 1), peak), rest], dim=1)


@pytest.mark.parametrize("scale", [TINY, 1e-30, 3e-7, 1.0, 1e15, 2.0**124])
@pytest.mark.parametrize("peak", [127, -127])
def test_all_momentum_codes_survive_a_round_trip(scale, peak):
    codes = groups_with_peak(range(-127, 128), peak).to(torch.int8)
    scales = torch.full((len(codes),), scale).to(torch.bfloat16)
    value = decode_momentum(codes, scales)
    expected = reference.momentum_value(numpy64(codes), numpy64(scales))
    atol = 2.0**-149  # decoded values may be subnormal
    np.testing.assert_allclose(numpy64(value), expected, rtol=tolerance("decoded momentum, relative"), atol=atol)
    assert torch.equal(value[:, 0].abs(), scales.float())
    if scale > TINY:  # subnormal values have too few bits left for their codes
        again, scales_again = encode_momentum(value)
        assert torch.equal(again, codes)
        assert torch.equal(scales_again, scales)


@pytest.mark.parametrize("scale", [1e-15, 3e-7, 1.0, 1e15])
@pytest.mark.parametrize("step", [None, 1, 2, 3, 1000])
def test_all_variance_codes_survive_a_round_trip(scale, step):
    codes = groups_with_peak(range(1, 256), 255).to(torch.uint8)
    scales = torch.full((len(codes),), scale)
    value = decode_variance(codes, scales)
    expected = reference.variance_value(numpy64(codes), numpy64(scales))
    np.testing.assert_allclose(numpy64(value), expected, rtol=tolerance("decoded variance, relative"), atol=0)
    offsets = torch.full((GROUP,), 0.5) if step is None else dither_offsets(step)
    again, scales_again = encode_variance(value, 0.5 if step is None else offsets)
    # An offset at the very border of [0, 1) may turn a code by one: all others must hold.
    inside = (offsets > tolerance("code tie, codes")) & (offsets < 1 - tolerance("code tie, codes"))
    assert int(inside.sum()) >= GROUP - 1
    assert torch.equal(again[:, inside], codes[:, inside])
    torch.testing.assert_close(scales_again, scales, rtol=tolerance("decoded variance, relative"), atol=0)


def test_code_0_and_every_code_beside_it_decode_apart():
    values = decode_variance(torch.arange(256, dtype=torch.uint8).view(8, GROUP), torch.ones(8)).view(-1)
    assert float(values[0]) == 0.0
    assert bool((values.diff() > 0).all())
    codes = torch.arange(-127, 128, dtype=torch.int8)
    values = decode_momentum(torch.nn.functional.pad(codes, (0, 1)).view(8, GROUP), torch.ones(8)).view(-1)[:255]
    assert bool((values.diff() > 0).all())
    assert torch.equal(values, -values.flip(0))


@over_magnitudes
def test_requantized_values_stay_near(magnitude):
    m = normal((GROUPS, GROUP), 2) * magnitude
    back = decode_momentum(*encode_momentum(m))
    bound = tolerance("requantized momentum, of the group's peak") * m.abs().amax(-1, keepdim=True)
    assert bool(((back - m).abs() <= bound).all())
    v = m.square().clamp(min=2 * TINY)
    back = decode_variance(*encode_variance(v))
    bound = tolerance("requantized root variance, of the group's peak") * v.sqrt().amax(-1, keepdim=True)
    # What is less than half a code gets the floor of one code: up to a whole code too large.
    bound = torch.where(v.sqrt() < bound, 2 * bound, bound)
    assert bool(((back.sqrt() - v.sqrt()).abs() <= bound).all())


def test_an_all_zero_group_is_exact_zeros():
    for zero in (0.0, -0.0):
        codes, scale = encode_momentum(torch.full((2, GROUP), zero))
        assert not bool(codes.any())
        assert not bool(scale.any())
        assert not bool(decode_momentum(codes, scale).any())
    codes, scale = encode_variance(torch.zeros(2, GROUP), dither_offsets(3))
    assert not bool(codes.any())
    assert not bool(scale.any())
    assert not bool(decode_variance(codes, scale).any())


def test_a_group_whose_scale_is_stored_as_0_is_exact_zeros():
    m = torch.full((1, GROUP), 2.0**-130)
    codes, scale = encode_momentum(m)
    assert float(scale) == 0.0
    assert not bool(codes.any())
    v = torch.full((1, GROUP), 2.0**-130)
    codes, scale = encode_variance(v)
    assert float(scale) == 0.0
    assert not bool(codes.any())
    # Codes that are not 0 do not bring such a group back either.
    assert not bool(decode_momentum(torch.full((1, GROUP), 127, dtype=torch.int8), torch.zeros(1).bfloat16()).any())
    assert not bool(decode_variance(torch.full((1, GROUP), 255, dtype=torch.uint8), torch.zeros(1)).any())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("lane", [0, 1, 17, 31])
def test_one_non_finite_element_makes_its_whole_group_nan_and_no_other(bad, lane):
    m = normal((3, GROUP), 5)
    m[1, lane] = bad
    codes, scale = encode_momentum(m)
    assert scale.isnan().tolist() == [False, True, False]
    assert decode_momentum(codes, scale).isnan().all(-1).tolist() == [False, True, False]
    v = normal((3, GROUP), 5).square()
    v[1, lane] = abs(bad)
    codes, scale = encode_variance(v, dither_offsets(1))
    assert scale.isnan().tolist() == [False, True, False]
    value = decode_variance(codes, scale)
    assert value.isnan().all(-1).tolist() == [False, True, False]
    # Healthy groups are those that they would be without the bad one.
    healthy = decode_variance(*encode_variance(v[[0, 2]], dither_offsets(1)))
    assert torch.equal(value[[0, 2]], healthy)


def test_a_nan_group_stays_nan_through_further_steps():
    codes, scale = encode_momentum(torch.full((1, GROUP), torch.nan))
    for _ in range(3):
        codes, scale = encode_momentum(0.9 * decode_momentum(codes, scale) + 0.1)
        assert bool(decode_momentum(codes, scale).isnan().all())


@pytest.mark.parametrize("dither", [1e-4, 0.5, None], ids=["low", "half", "dither"])
@pytest.mark.parametrize("small", [2 * TINY, 1e-20, 1e-8, 1.0])
def test_a_variance_above_0_has_at_least_code_1(dither, small):
    v = torch.full((1, GROUP), small)
    v[0, 3], v[0, 4] = 1e10, 0.0
    for step in (1, 2, 3, 50):
        codes, _ = encode_variance(v, dither_offsets(step) if dither is None else dither)
        expected = torch.ones(GROUP, dtype=torch.uint8)
        expected[3], expected[4] = 255, 0
        assert torch.equal(codes[0], expected)


def test_codes_are_formed_against_the_scale_as_stored():
    """1.00390625 lies between two bf16 numbers and is stored as 1: the codes must be those of m / 1."""
    m = torch.linspace(0, 1, GROUP)[None].clone()
    m[0, -1] = 1 + 2**-8
    codes, scale = encode_momentum(m)
    assert float(scale) == 1.0
    expected = np.minimum(np.floor(127 * 2 * numpy64(m) / (1 + numpy64(m)) + 0.5), 127)
    np.testing.assert_array_equal(codes.numpy(), expected)


def test_momentum_codes_of_minus_m_are_minus_its_codes():
    m = normal((GROUPS, GROUP), 6)
    codes, scale = encode_momentum(m)
    mirrored, scale_mirrored = encode_momentum(-m)
    assert torch.equal(mirrored, -codes)
    assert torch.equal(scale, scale_mirrored)


# The dither.


@given(st.integers(1, 2**53), st.integers(0, GROUP - 1))
def test_dither_equals_the_formula_in_exact_integers(step: int, lane: int):
    assert float(dither_offsets(step)[lane]) == reference.dither(step, lane)
    assert dither_base(step) == step * 2654435769 % 2**32


@pytest.mark.parametrize("step", [1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**53])
def test_dither_at_integer_borders(step):
    offsets = dither_offsets(step)
    assert offsets.dtype == torch.float32
    assert offsets.tolist() == [reference.dither(step, lane) for lane in range(GROUP)]
    assert bool((offsets >= 0).all())
    assert bool((offsets < 1).all())


@pytest.mark.parametrize("first", [1, 10_000, 2**24 - 4096])
def test_dither_is_even_over_steps_and_over_lanes(first):
    offsets = torch.stack([dither_offsets(t) for t in range(first, first + 4096)])
    mean = offsets.double().mean(0)
    assert float((mean - 0.5).abs().max()) < tolerance("dither mean, over 4,096 steps")
    # 16 bins of 256 each, in every lane: random numbers would be off by 16.
    counts = torch.stack([torch.histc(offsets[:, lane], 16, 0, 1) for lane in range(GROUP)])
    assert float((counts - 256).abs().max()) <= 4
    # Within a step the 32 lanes leave no large gap, and neighbours do not move together.
    gaps = offsets.sort(dim=1).values.diff(dim=1)
    assert float(gaps.max()) < 5 / GROUP
    correlation = torch.corrcoef(offsets.T)
    assert float((correlation - torch.eye(GROUP)).abs().max()) < 0.9


def test_a_dithered_code_is_right_in_the_mean():
    """A value a tenth of a code above a code is rounded up in a tenth of the steps."""
    v = ((torch.linspace(20.1, 51.1, GROUP)[None] / 255) ** 2).clone()
    v[0, 0] = 1.0
    codes = torch.stack([encode_variance(v, dither_offsets(t))[0][0] for t in range(1, 2001)])
    mean = codes.double().mean(0)[1:]
    position, _ = reference.variance_position(numpy64(v))
    assert float((mean - torch.from_numpy(position[0, 1:])).abs().max()) < 2e-3
    nearest = encode_variance(v)[0][0, 1:].double()
    assert float((nearest - torch.from_numpy(position[0, 1:])).abs().max()) > 0.09


def test_a_dithered_momentum_code_is_right_in_the_mean():
    m = torch.linspace(0.0, 0.1, GROUP)[None] * (-1.0) ** torch.arange(GROUP)
    m[0, 0] = 1.0
    codes = torch.stack([encode_momentum(m, dither_offsets(t))[0][0] for t in range(1, 2001)])
    position, _ = reference.momentum_position(numpy64(m))
    assert float((codes.double().mean(0) - torch.from_numpy(position[0])).abs().max()) < 2e-3


@pytest.mark.parametrize("peak", [1.0, 1 + 2**-8, -(1 + 2**-8)])
def test_the_largest_offset_leaves_momentum_codes_in_range(peak):
    """A peak that was rounded down to its scale lies at 127.25: nearly a whole code more would be 128."""
    m = torch.zeros(1, GROUP)
    m[0, 5] = peak
    codes, scale = encode_momentum(m, torch.full((GROUP,), 1 - 2**-24))
    assert float(scale) == 1.0
    assert codes[0].tolist() == [0] * 5 + [math.copysign(127, peak)] + [0] * 26


def assert_same_scale(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit; a group whose variance overflowed has a NaN scale either way."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@example(seed=1, exponent=15.0, sigma=4.0)  # the variance overflows
@given(st.integers(0, 2**32 - 1), st.floats(-30, 15), st.floats(0, 4))
def test_codes_depend_on_the_group_alone(seed: int, exponent: float, sigma: float):
    """Any group alone, and any order of groups, gives the same codes."""
    m = uneven((4, GROUP), seed, sigma) * 10.0**exponent
    v = m.square()
    codes, scale = encode_momentum(m)
    vcodes, vscale = encode_variance(v, dither_offsets(seed))
    for i in range(4):
        one, s = encode_momentum(m[i])
        assert torch.equal(one, codes[i])
        assert_same_scale(s, scale[i])
        one, s = encode_variance(v[i], dither_offsets(seed))
        assert torch.equal(one, vcodes[i])
        assert_same_scale(s, vscale[i])


@given(st.integers(0, 2**32 - 1), st.integers(-60, 60))
def test_momentum_codes_do_not_depend_on_the_unit(seed: int, power: int):
    m = uneven((8, GROUP), seed, 1.0)
    codes, scale = encode_momentum(m)
    scaled, scale2 = encode_momentum(m * 2.0**power)
    assert torch.equal(scaled, codes)
    assert torch.equal(scale2.float(), scale.float() * 2.0**power)


def test_a_momentum_past_the_limit_of_its_scale_is_lost_visibly():
    """From 2^125 on GPUs' fast division fails: better NaN than wrong."""
    for largest, lost in ((2.0**125 * (1 - 2**-8), False), (2.0**125, True), (-3e38, True)):
        m = torch.ones(1, GROUP)
        m[0, 7] = largest
        codes, scale = encode_momentum(m)
        assert bool(scale.isnan()) == lost
        assert bool(decode_momentum(codes, scale).isnan().all()) == lost
