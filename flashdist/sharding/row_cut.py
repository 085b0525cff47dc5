"""How the rows of many tensors are spread over ranks: pure arithmetic, the same on every rank.

The rows of all tensors stand in one line and are cut into as many runs as there are ranks, by bytes. A row is a row of
``numerics/groups.py``, so that no cut goes through a group of 32; a tensor without rows is one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flashdist.numerics.groups import GroupLayout

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Rows:
    """How the rows of one tensor (a parameter, or one of its state tensors) are spread.

    Attributes:
        lead: the leading dimensions that count rows, in C order; 0 for a tensor that is one piece, hence one row.
        bounds: rank r has the rows ``bounds[r]`` up to, without, ``bounds[r + 1]``.
        rank: this rank.
    """

    lead: int
    bounds: tuple[int, ...]
    rank: int

    @property
    def start(self) -> int:
        return self.bounds[self.rank]

    @property
    def stop(self) -> int:
        return self.bounds[self.rank + 1]

    @property
    def count(self) -> int:
        """Rows of the whole tensor."""
        return self.bounds[-1]

    def of(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a whole tensor, ``[rows, ...]``: a view, unless several dimensions lead in strided
        memory."""
        if self.lead == 0:
            return tensor.unsqueeze(0)[self.start : self.stop]
        flat = tensor if self.lead == 1 else tensor.flatten(0, self.lead - 1)
        return flat[self.start : self.stop]

    def layout(self, whole: GroupLayout) -> GroupLayout:
        """The groups of this rank's rows."""
        shape = (self.stop - self.start, *whole.shape[self.lead :])
        return GroupLayout(shape, None if whole.row_start is None else whole.row_start - self.lead + 1)

    def elements(self, numel: int) -> list[int]:
        """The bounds in elements, for a tensor of ``numel`` elements that are counted row after row."""
        unit = numel // self.count
        return [bound * unit for bound in self.bounds]

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """This rank's rows of a tensor of this shape as boxes (offsets, sizes), in the order of the rows."""
        rest = tuple(shape[self.lead :])
        found = _boxes(tuple(shape[: self.lead]), self.start, self.stop)
        return [((*offsets, *(0 for _ in rest)), (*sizes, *rest)) for offsets, sizes in found]


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The places ``start`` up to ``stop`` of an array of this shape, counted in C order."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner, rest = math.prod(shape[1:]), shape[1:]
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one slab
        return [((last, *o), (1, *s)) for o, s in _boxes(rest, start - last * inner, stop - last * inner)]
    head = [((first - 1, *o), (1, *s)) for o, s in _boxes(rest, start - (first - 1) * inner, inner)]
    tail = [((last, *o), (1, *s)) for o, s in _boxes(rest, 0, stop - last * inner)]
    slabs: list[Box] = [((first, *(0 for _ in rest)), (last - first, *rest))] if last > first else []
    return (head if first * inner > start else []) + slabs + tail


def cut_rows(tensors: Sequence[tuple[int, int]], ranks: int) -> list[tuple[int, ...]]:
    """Cut the rows of all tensors, one after the other, into runs of about equal bytes.

    Each cut lies at the edge of a row that is nearest to its ideal place, so that no rank's bytes differ from the mean
    by more than the largest row.

    Args:
        tensors: rows and bytes of a row, of each tensor.
        ranks: how many runs.

    Returns:
        A tensor's bounds: ``ranks + 1`` numbers that rise from 0 to its number of rows.
    """
    total = sum(count * size for count, size in tensors)
    bounds, before = [], 0
    for count, size in tensors:
        if size:
            # floor((ideal - before) / size + 1/2), in integers.
            places = [
                (2 * (rank * total - ranks * before) + ranks * size) // (2 * ranks * size) for rank in range(ranks + 1)
            ]
        else:
            places = [count if rank * total > ranks * before else 0 for rank in range(ranks)] + [count]
        bounds.append(tuple(min(max(place, 0), count) for place in places))
        before += count * size
    return bounds


def leading_dims(parameter: Tensor, layout: GroupLayout) -> int | None:
    """The dimensions that count a parameter's rows, such that a rank's rows are one run of its storage.

    Returns:
        The dimensions left of the row; 1 for a channels_last weight; 0 for one piece: a tensor without groups, without
        elements, or with another dimension outside of dim 0 in memory. None where its elements leave gaps.
    """
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if not parameter.permute(order).is_contiguous():
        return None
    if layout.row_start is None or layout.numel == 0:
        return 0
    if parameter.is_contiguous():
        return layout.row_start
    outer = [dim for dim in order if parameter.shape[dim] > 1]
    return 1 if outer[0] == 0 else 0
