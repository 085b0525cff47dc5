"""Which parts of which parameters lie where in a flat partition of DeepSpeed ZeRO.

A partition is a 1-D bf16 tensor that holds a contiguous run of elements of several parameters. It is stepped as
*segments*: runs of one parameter's elements, each with an ordinary state of its own. The grid of groups of 32 starts at
the parameter's element 0, whatever the partition, so that codes and scales do not depend on the number of ranks. Only a
group that the partition's border cuts is kept in two parts, each with its own scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from flashdist.numerics.companding import GROUP
from flashdist.numerics.groups import GroupLayout, group_layout


class LayoutError(RuntimeError):
    """DeepSpeed's buffers do not lie as this version of flashdist expects."""


@dataclass(frozen=True)
class Segment:
    """A run of one parameter's elements in a partition.

    Attributes:
        name: the parameter's name in the model.
        shape: its global shape.
        start: the run's first element in the parameter, row-major.
        length: its number of elements.
        offset: its place in the partition.
        grouped: whether the parameter has groups of 32. If so the run is either whole groups, or lies in one group.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int
    grouped: bool

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def layout(self) -> GroupLayout:
        """The groups of the run itself: one row, of which the last group may be partial."""
        return GroupLayout((1, self.length), 1) if self.grouped else GroupLayout((self.length,), None)

    @property
    def first_group(self) -> int:
        """Place of the run's first group in the parameter's grid."""
        return self.start // GROUP

    @property
    def cut(self) -> bool:
        """Whether the run is only a part of its group, because the partition ends or starts there."""
        return self.grouped and bool(self.start % GROUP or (self.stop % GROUP and self.stop != self.numel))


def cut(name: str, shape: Sequence[int], start: int, length: int, offset: int) -> Iterator[Segment]:
    """Cut a run of a parameter's elements into segments: a rest of a group, whole groups, the beginning of a group."""
    shape = tuple(shape)
    grouped = group_layout(shape).grouped
    sizes = [length]
    if grouped:
        lead = min(-start % GROUP, length)
        whole = (length - lead) // GROUP * GROUP
        sizes = [lead, whole, length - lead - whole]
    for size in sizes:
        if size:
            yield Segment(name, shape, start, size, offset, grouped)
        start, offset = start + size, offset + size


def _offset_in(part: Tensor, flat: Tensor, what: str) -> int:
    """Where a view begins in the flat buffer that it must lie in."""
    offset, rest = divmod(part.data_ptr() - flat.data_ptr(), flat.element_size())
    same = part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() and part.dtype == flat.dtype
    if not same or rest or offset < 0 or offset + part.numel() > flat.numel():
        raise LayoutError(f"{what} does not lie in the flat buffer of its group")
    return offset


def segments_of_slice(flat: Tensor, params: Sequence[tuple[str, Tensor]], first: int, size: int) -> list[Segment]:
    """Stages 1 and 2: the segments of the slice ``[first, first + size)`` of a group's flat buffer.

    Args:
        flat: the buffer, in which all parameters of the group lie whole.
        params: their names and themselves.

    Raises:
        LayoutError: where a parameter is not a view of the buffer.
    """
    found: list[Segment] = []
    for name, p in params:
        at = _offset_in(p, flat, f"parameter {name}")
        start, stop = max(first, at), min(first + size, at + p.numel())
        if start < stop:
            found.extend(cut(name, p.shape, start - at, stop - start, start - first))
    return sorted(found, key=lambda s: s.offset)


def segments_of_shards(flat: Tensor, params: Sequence[tuple[str, Tensor]], rank: int) -> list[Segment]:
    """Stage 3: the segments of a sub-group's flat buffer, in which a padded equal share of each parameter lies.

    Args:
        flat: the buffer of this rank.
        params: names and parameters, with DeepSpeed's ``ds_shape``, ``ds_numel`` and ``ds_tensor``.
        rank: place of this rank in the group of processes that share the parameters.

    Raises:
        LayoutError: where a share is not a view of the buffer.
    """
    found: list[Segment] = []
    for name, p in params:
        share: Tensor = p.ds_tensor  # type: ignore[attr-defined]
        start = rank * share.numel()
        length = min(share.numel(), p.ds_numel - start)  # type: ignore[attr-defined]
        at = _offset_in(share, flat, f"the share of parameter {name}")
        if length > 0:
            found.extend(cut(name, p.ds_shape, start, length, at))  # type: ignore[attr-defined]
    return sorted(found, key=lambda s: s.offset)
