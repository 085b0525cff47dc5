"""A state tensor of which this rank holds some rows, for replicated parameters (ZeRO-1).

A cut by bytes is no placement that a DTensor could have. What both share is the protocol by which
torch.distributed.checkpoint knows tensors that are spread over ranks: a checkpoint holds boxes of a global tensor under
one key, whoever wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from flashdist.sharding.row_cut import Rows
from flashdist.sharding.row_gather import gather_rows

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_aten = torch.ops.aten
# What may be done to a shard as to any tensor: row by row the same as to the whole.
_ROW_WISE = {
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default, _aten.copy_.default,
    _aten.zero_.default, _aten.fill_.Scalar, _aten.zeros_like.default, _aten.empty_like.default,
}  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """Which rows, and the ranks that hold the others. Copies of a shard, staged ones too, have the same."""

    rows: Rows
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> _Place:
        return self


class RowShard(torch.Tensor):
    """Has the shape of the whole tensor, and this rank's rows of it in memory.

    Args:
        local: ``[rows, ...]``, contiguous; empty on ranks without a row.
        shape: shape of the whole tensor.
        rows: which rows.
        group: the ranks that hold the others.
    """

    _local: Tensor
    _place: _Place

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], rows: Rows, group: dist.ProcessGroup) -> RowShard:
        shard: RowShard = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=local.dtype, device=local.device
        )
        shard._local, shard._place = local, _Place(rows, group)
        return shard

    @property
    def rows(self) -> Rows:
        """Which rows of the whole tensor this rank holds, and which the others."""
        return self._place.rows

    def to_local(self) -> Tensor:
        """This rank's rows, ``[rows, ...]``: the tensor itself, no copy."""
        return self._local

    def like(self, local: Tensor, shape: Sequence[int]) -> RowShard:
        """The same rows of another tensor, whose leading dimensions are these.

        Args:
            local: ``[rows, ...]``, contiguous.
            shape: shape of the whole tensor.
        """
        return RowShard(local, shape, self.rows, self._place.group)

    def full_tensor(self) -> Tensor:
        """The whole tensor, of this one's shape and dtype, on every rank. A collective call."""
        return gather_rows(self._local, self.shape, self.rows, self._place.group)

    def __repr__(self) -> str:  # type: ignore[override]
        rows = self.rows
        return f"RowShard(rows {rows.start}:{rows.stop} of {rows.count}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"this rank holds rows {self.rows.start} to {self.rows.stop} of the {self.rows.count} of a state tensor: "
            "a pickle of it (torch.save) would lose the others. Save the state_dict with flashdist.checkpoint or "
            "torch.distributed.checkpoint, or pickle full_state_dict(optimizer), which all ranks have to call."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RowShard:
        copy = self.like(self._local.clone(), self.shape)
        memo[id(self)] = copy
        return copy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shards = [a for a in args if isinstance(a, RowShard)]
        others = [a for a in args if isinstance(a, Tensor) and not isinstance(a, RowShard)]
        allowed = func in _ROW_WISE and shards and not others
        if func is _aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):  # the staging of async_save
            allowed, args = True, (args[0], args[0]._local.shape)
        if not allowed or any((s.shape, s.rows) != (shards[0].shape, shards[0].rows) for s in shards):
            raise NotImplementedError(
                f"{func} is not defined for a RowShard, of which this rank holds some rows only: use to_local() for "
                "these rows, or full_tensor() (a collective call) for the whole tensor"
            )
        result = func(*(a._local if isinstance(a, RowShard) else a for a in args), **(kwargs or {}))
        # What is written in place stays the shard that it is.
        return shards[0] if result is shards[0]._local else shards[0].like(result, shards[0].shape)

    # The protocol of torch.distributed.checkpoint (planner_helpers.py), which is imported here: it takes half a second.

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for chunk in self.__create_chunk_list__():
            properties = TensorProperties.create_from_tensor(self._local)
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in self.rows.boxes(self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        flat, at = self._local.view(-1), 0
        for offsets, sizes in self.rows.boxes(self.shape):
            numel = math.prod(sizes)
            if index.offset is None or tuple(index.offset) == offsets:
                return flat[at : at + numel].view(sizes)
            at += numel
        raise ValueError(f"{self} has no part at {index}")
