"""Which elements of a parameter share a scale. Decided by the parameter's global shape and by nothing else.

The *row* of a tensor is its shortest trailing run of dimensions that leaves out dim 0 and holds at least 32 elements.
Groups of 32 neighbours lie inside a row and the last one of a row may be partial. A shard along any dimension left of
the row therefore never cuts a group, whatever the number of ranks. Tensors without such a run (1-D, tiny rows) are not
grouped: their moments stay fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdist.numerics.companding import GROUP


@dataclass(frozen=True)
class GroupLayout:
    """The groups of one tensor, global or local.

    Attributes:
        shape: the tensor's shape.
        row_start: first dimension of the row, or None where the tensor is not grouped.
    """

    shape: tuple[int, ...]
    row_start: int | None

    @property
    def grouped(self) -> bool:
        """Whether the moments may be kept as 8-bit codes with one scale a group."""
        return self.row_start is not None

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements in a row. A tensor that is not grouped counts as one row."""
        return self.numel if self.row_start is None else math.prod(self.shape[self.row_start :])

    @property
    def groups_per_row(self) -> int:
        """Groups in a row, the last of which may be partial."""
        return math.ceil(self.row / GROUP)

    @property
    def num_groups(self) -> int:
        """Groups in the tensor, and so scales."""
        return self.numel // self.row * self.groups_per_row if self.numel else 0

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales: the dimensions before the row, then the groups of a row."""
        if self.row_start is None:
            raise ValueError(f"a tensor of shape {self.shape} has no groups, hence no scales")
        return (*self.shape[: self.row_start], self.groups_per_row)

    def of_shard(self, local_shape: Sequence[int]) -> GroupLayout:
        """The layout of a local shard of this tensor: the same row start, the shard's own shape."""
        return GroupLayout(tuple(local_shape), self.row_start)


def group_layout(global_shape: Sequence[int]) -> GroupLayout:
    """The layout of a parameter, from its ``global_shape`` alone.

    >>> group_layout((64, 3, 7, 7)).row, group_layout((64, 3, 7, 7)).scale_shape
    (49, (64, 3, 2))
    >>> group_layout((1000,)).grouped
    False
    """
    shape = tuple(global_shape)
    row = 1
    for dim in range(len(shape) - 1, 0, -1):
        row *= shape[dim]
        if row >= GROUP:
            return GroupLayout(shape, dim)
    return GroupLayout(shape, None)


def to_groups(rows: Tensor) -> Tensor:
    """``[r, row]`` -> ``[r * ceil(row/32), 32]``; the last group of a row is filled up with zeros."""
    row = rows.shape[1]
    padding = -row % GROUP
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    return rows.reshape(-1, GROUP)


def from_groups(groups: Tensor, r: int, row: int) -> Tensor:
    """The inverse of :func:`to_groups`: ``groups`` of shape ``[r * ceil(row/32), 32]`` -> ``[r, row]``."""
    return groups.reshape(r, -1)[:, :row]
