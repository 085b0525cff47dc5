"""The cut of all rows by bytes, as arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdist.numerics.companding import GROUP
from flashdist.numerics.groups import group_layout
from flashdist.sharding.row_cut import Rows, cut_rows, leading_dims
from tests.support.cases import SHAPES

tensors = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**6)), min_size=1, max_size=40)
shapes = st.lists(st.integers(0, 9) | st.integers(30, 70), max_size=4).map(tuple)


@settings(deadline=None)
@given(tensors, st.integers(1, 17))
def test_no_rank_is_further_from_the_mean_than_the_largest_row(tensors, ranks):
    bounds = cut_rows(tensors, ranks)
    for (count, _), cut in zip(tensors, bounds, strict=True):
        assert cut[0] == 0
        assert cut[-1] == count
        assert list(cut) == sorted(cut)
    total, largest = sum(c * s for c, s in tensors), max(size for _, size in tensors)
    for rank in range(ranks):
        mine = sum((cut[rank + 1] - cut[rank]) * size for (_, size), cut in zip(tensors, bounds, strict=True))
        assert abs(mine * ranks - total) <= largest * ranks


@settings(deadline=None)
@given(tensors, st.integers(1, 9))
def test_a_rank_s_rows_are_one_run(tensors, ranks):
    """What stands before a cut belongs to lower ranks, what stands behind it to higher ones."""
    owners = []
    for cut, (_, size) in zip(cut_rows(tensors, ranks), tensors, strict=True):
        if size:
            owners += [rank for rank in range(ranks) if cut[rank] < cut[rank + 1]]
    assert owners == sorted(owners)


@settings(deadline=None)
@given(shapes, st.integers(1, 6), st.data())
def test_boxes_are_the_rows_in_order(shape, ranks, data):
    numel = math.prod(shape)
    lead = data.draw(st.integers(0, len(shape))) if numel else 0
    count = math.prod(shape[:lead])
    (bounds,) = cut_rows([(count, numel // count)], ranks)
    whole = torch.arange(numel).view(shape)
    taken = []
    for rank in range(ranks):
        rows = Rows(lead, bounds, rank)
        boxes = rows.boxes(shape)
        assert len(boxes) <= max(1, 2 * lead - 1)
        parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes]
        assert [tuple(part.shape) for part in parts] == [sizes for _, sizes in boxes]
        flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0, dtype=torch.int64)
        assert torch.equal(flat, rows.of(whole).reshape(-1))
        assert rows.elements(numel)[rank + 1] - rows.elements(numel)[rank] == flat.numel()
        taken += boxes
    # The owner of a tensor without elements has a box as well: a checkpoint has an entry for it.
    assert taken or not count


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_s_layout_has_the_groups_of_the_whole(shape, ranks):
    p, layout = torch.empty(shape), group_layout(shape)
    lead = leading_dims(p, layout)
    count = math.prod(shape[:lead])
    if layout.grouped and layout.numel:
        assert count == layout.numel // layout.row
    else:
        assert count == 1
    (bounds,) = cut_rows([(count, max(layout.numel, 1))], ranks)
    groups = 0
    for rank in range(ranks):
        rows = Rows(lead, bounds, rank)
        part = rows.layout(layout)
        assert part.shape == tuple(rows.of(p).shape)
        assert part.grouped == layout.grouped
        if part.grouped and part.numel:
            assert (part.row, part.groups_per_row) == (layout.row, layout.groups_per_row)
            assert part.scale_shape == tuple(rows.of(torch.empty(layout.scale_shape)).shape)
        groups += part.num_groups
    assert groups == layout.num_groups


def test_memory_formats():
    conv, layout = torch.empty(20, 3, 5, 5), group_layout((20, 3, 5, 5))
    assert leading_dims(conv, layout) == layout.row_start
    assert leading_dims(conv.contiguous(memory_format=torch.channels_last), layout) == 1
    assert leading_dims(torch.empty(40, 33).t(), group_layout((33, 40))) == 0
    assert leading_dims(torch.empty(40, 64)[:, :33], group_layout((40, 33))) is None
    assert leading_dims(torch.empty(1).expand(40, 33), group_layout((40, 33))) is None
    assert leading_dims(torch.empty(10)[::2], group_layout((5,))) is None
    assert leading_dims(torch.empty(5, 1).t(), group_layout((1, 5))) == 0


def test_the_experts_of_a_layer_are_cut_inside():
    """The rows of (8, 4096, 1024) are 1024 long: ranks need not hold whole experts."""
    layout = group_layout((8, 4096, 1024))
    assert layout.row % GROUP == 0
    assert cut_rows([(8 * 4096, 1024)], 3) == [(0, 10923, 21845, 32768)]
