"""Groups follow from the global shape alone: where rows start, what a shard sees, and that no shard cuts a group."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashdist.numerics.companding import GROUP
from flashdist.numerics.groups import GroupLayout, from_groups, group_layout, to_groups
from flashdist.numerics.rules import ADAMW, LION, SGD_PLAIN
from flashdist.numerics.state_format import decode_moment, encode_moment, state_format
from tests.support import reference
from tests.support.cases import EMPTY_GROUPED_SHAPES, GROUPED_SHAPES, SHAPES, UNGROUPED_SHAPES, name, uneven

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple).filter(lambda s: math.prod(s) <= 20_000)
grouped_shapes = shapes.filter(lambda s: reference.row_start(s) is not None)


@pytest.mark.parametrize(
    ("shape", "row_start", "row", "scales"),
    [
        ((64, 3, 7, 7), 2, 49, (64, 3, 2)),
        ((3, 8, 40), 2, 40, (3, 8, 2)),
        ((64, 64, 3, 3), 1, 576, (64, 18)),
        ((8, 32), 1, 32, (8, 1)),
        ((8, 33), 1, 33, (8, 2)),
        ((2, 4, 8), 1, 32, (2, 1)),
        ((5, 2, 3, 8), 1, 48, (5, 2)),
        ((1, 40, 64), 2, 64, (1, 40, 2)),
        ((4, 0, 64), 2, 64, (4, 0, 2)),
        ((0, 40), 1, 40, (0, 2)),
    ],
    ids=lambda value: name(value) if isinstance(value, tuple) else str(value),
)
def test_rows_by_hand(shape, row_start, row, scales):
    layout = group_layout(shape)
    assert (layout.row_start, layout.row, layout.scale_shape) == (row_start, row, scales)
    assert layout.grouped


@pytest.mark.parametrize("shape", UNGROUPED_SHAPES, ids=name)
def test_one_dimension_or_tiny_rows_are_not_grouped(shape):
    layout = group_layout(shape)
    assert not layout.grouped
    with pytest.raises(ValueError, match="no groups"):
        _ = layout.scale_shape


def test_the_first_dimension_is_never_in_a_row():
    assert not group_layout((10**6,)).grouped
    assert not group_layout((10**6, 31)).grouped
    assert group_layout((1, 32)).grouped


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_rows_against_the_definition(shape):
    assert group_layout(shape).row_start == reference.row_start(shape)
    assert group_layout(torch.Size(shape)) == group_layout(shape)


@given(shapes)
def test_rows_against_the_definition_for_any_shape(shape):
    layout = group_layout(shape)
    assert layout.row_start == reference.row_start(shape)
    assert layout.numel == math.prod(shape)
    if layout.grouped:
        assert layout.num_groups == math.prod(layout.scale_shape)
        assert layout.scale_shape == (*shape[: layout.row_start], -(-layout.row // GROUP))
        assert layout.row >= GROUP
    else:
        assert layout.row == layout.numel


@given(st.integers(1, 6), st.integers(1, 200))
def test_to_groups_and_back(r, row):
    rows = torch.arange(1, r * row + 1).view(r, row)
    groups = to_groups(rows)
    assert groups.shape == (r * -(-row // GROUP), GROUP)
    assert torch.equal(from_groups(groups, r, row), rows)
    # Every number is in one place, in order; what fills up the last group of a row is 0.
    assert int((groups != 0).sum()) == r * row
    assert torch.equal(groups[groups != 0], rows.flatten())
    per_row = groups.view(r, -1, GROUP)
    assert not bool(per_row.reshape(r, -1)[:, row:].any())


def group_of_each_element(layout: GroupLayout) -> Tensor:
    """The group's number, in the tensor's own shape."""
    labels = torch.arange(layout.num_groups)[:, None].expand(-1, GROUP)
    return from_groups(labels, layout.numel // layout.row, layout.row).contiguous().view(layout.shape)


@given(grouped_shapes)
def test_groups_are_runs_of_at_most_32_inside_a_row(shape):
    layout = group_layout(shape)
    labels = group_of_each_element(layout).view(-1, layout.row)
    counts = torch.bincount(labels.flatten(), minlength=layout.num_groups)
    assert int(counts.max()) == GROUP
    assert int(counts.min()) >= 1
    for i, row in enumerate(labels):
        first = i * layout.groups_per_row
        assert row.tolist() == [first + j // GROUP for j in range(layout.row)]


def pieces(shape: tuple[int, ...], dim: int, parts: int) -> list[slice]:
    """Cuts of a dimension as torch.chunk makes them: uneven, the last ones maybe empty."""
    size = -(-shape[dim] // parts)
    return [slice(min(i * size, shape[dim]), min((i + 1) * size, shape[dim])) for i in range(parts)]


@given(grouped_shapes, st.data())
def test_a_shard_left_of_the_row_has_the_same_groups_codes_and_scales(shape, data):
    layout = group_layout(shape)
    dim = data.draw(st.integers(0, layout.row_start - 1), label="dim")
    parts = data.draw(st.integers(1, 5), label="parts")
    dense = uneven(shape, seed=7)
    place = data.draw(st.sampled_from([0, 1]), label="momentum or variance")
    if place == 1:
        dense = dense.square()
    codes, scales = encode_moment(place, dense, layout)
    assert codes.shape == shape
    assert tuple(scales.shape) == layout.scale_shape
    labels = group_of_each_element(layout)
    for cut in pieces(shape, dim, parts):
        index = (slice(None),) * dim + (cut,)
        local = layout.of_shard(dense[index].shape)
        assert local.row == layout.row
        local_codes, local_scales = encode_moment(place, dense[index], local)
        assert torch.equal(local_codes, codes[index])
        assert torch.equal(local_scales, scales[index])
        if local.numel:
            # The same partition: renumbered in order of appearance, the labels agree.
            _, expected = labels[index].unique(return_inverse=True)
            assert torch.equal(group_of_each_element(local), expected)


@pytest.mark.parametrize("shape", GROUPED_SHAPES + EMPTY_GROUPED_SHAPES, ids=name)
@pytest.mark.parametrize("place", [0, 1], ids=["momentum", "variance"])
def test_a_moment_there_and_back_and_there_again(shape, place):
    layout = group_layout(shape)
    dense = uneven(shape, seed=8).square()
    codes, scales = encode_moment(place, dense, layout)
    back = decode_moment(place, codes, scales, layout)
    assert back.shape == dense.shape
    again, _ = encode_moment(place, back, layout)
    assert torch.equal(again, codes)
    # A transposed tensor is encoded by its logical order.
    if dense.dim() == 2:
        twisted = dense.t().contiguous().t()
        assert torch.equal(encode_moment(place, twisted, layout)[0], codes)


@given(grouped_shapes, st.integers(0, 10**6))
def test_an_element_changes_no_code_outside_its_group(shape, where):
    layout = group_layout(shape)
    labels = group_of_each_element(layout)
    where %= layout.numel
    dense = uneven(shape, seed=9)
    edited = dense.clone()
    edited.view(-1)[where] = 1e9
    codes, scales = encode_moment(0, dense, layout)
    new_codes, new_scales = encode_moment(0, edited, layout)
    group = int(labels.view(-1)[where])
    outside = labels != group
    assert torch.equal(new_codes[outside], codes[outside])
    changed = (new_scales != scales).reshape(-1).nonzero().flatten().tolist()
    assert changed == [group]


@given(shapes, st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), st.sampled_from([24, 32, None]))
def test_state_format_follows_from_the_global_shape(shape, dtype, bits):
    layout = group_layout(shape)
    entries = {e.key: (e.dtype, e.shape) for e in state_format(ADAMW, layout, dtype, bits, quantize=True)}
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"step": (torch.float32, ())}
    if dtype != torch.float32 and bits is not None:
        small = bits == 24 and layout.grouped
        expected["error"] = (torch.int8 if small else torch.int16, shape)
    if layout.grouped:
        expected |= {"exp_avg": (torch.int8, shape), "exp_avg_scale": (torch.bfloat16, layout.scale_shape)}
        expected |= {"exp_avg_sq": (torch.uint8, shape), "exp_avg_sq_scale": (torch.float32, layout.scale_shape)}
    else:
        expected |= {"exp_avg": (torch.float32, shape), "exp_avg_sq": (torch.float32, shape)}
    assert entries == expected


@given(shapes)
def test_state_formats_of_the_other_rules(shape):
    layout = group_layout(shape)
    keys = [e.key for e in state_format(LION, layout, torch.bfloat16, 24, quantize=True)]
    assert keys == ["step", "error", "exp_avg", *(["exp_avg_scale"] if layout.grouped else [])]
    assert [e.key for e in state_format(SGD_PLAIN, layout, torch.float32, 24, quantize=True)] == ["step"]
    plain = state_format(ADAMW, layout, torch.bfloat16, 24, quantize=False)
    assert all(e.dtype == torch.float32 for e in plain if e.key != "error")


@given(st.integers(1, 40), st.integers(1, 40))
def test_bytes_per_parameter(rows, groups):
    """Design 2: 1 for the correction, 1 + 1 for codes, 6/32 for scales where rows are whole groups."""
    layout = group_layout((rows, groups * GROUP))
    entries = state_format(ADAMW, layout, torch.bfloat16, 24, quantize=True)
    size = sum(e.dtype.itemsize * math.prod(e.shape) for e in entries if e.key != "step")
    assert size == layout.numel * 3.1875
