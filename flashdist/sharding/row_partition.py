"""ZeRO-1 for replicated parameters: every rank steps its rows, and all get the weights of all rows back."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from flashdist.numerics.groups import GroupLayout, group_layout
from flashdist.numerics.rules import GroupScalars
from flashdist.sharding.row_cut import Rows
from flashdist.sharding.row_gather import RowGather, gather_rows
from flashdist.sharding.row_shard import RowShard

_TRAINABLE, _GRAD = attrgetter("requires_grad"), attrgetter("grad")


class RowPartition:
    """See :class:`flashdist.sharding.partition.Partition`.

    Args:
        rows: which rows of each parameter belong to which rank.
        group: the ranks.
    """

    whole = False

    def __init__(self, rows: dict[Tensor, Rows], group: dist.ProcessGroup) -> None:
        self.rows = rows
        self.group = group
        self._strides = {p: p.stride() for p in rows}
        self._reset()

    def _reset(self) -> None:
        """What follows from the parameters' addresses."""
        self._viewed: tuple[Sequence[Tensor], list[int], list[Tensor]] | None = None
        self._gathers: tuple[list[object], list[RowGather]] | None = None
        self._agreement = Agreement()

    def parts(self, params: Sequence[Tensor]) -> list[Tensor]:
        addresses = list(map(Tensor.data_ptr, params))
        if self._viewed is None or self._viewed[0] is not params or self._viewed[1] != addresses:
            for p in params:
                self._check_format(p)
            self._viewed = params, addresses, [self.rows[p].of(p.detach()) for p in params]
        return self._viewed[2]

    def _check_format(self, p: Tensor) -> None:
        if p.stride() != self._strides[p]:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} had the strides {self._strides[p]} in shard_states and has "
                f"{p.stride()} now, so its rows lie elsewhere. Change the model's memory format before shard_states."
            )

    def gradient(self, p: Tensor, grad: Tensor) -> Tensor:
        rows = self.rows[p]
        if grad.is_contiguous():
            unit = grad.numel() // rows.count
            size = (rows.stop - rows.start) * unit
            return grad.as_strided((size,), (1,), grad.storage_offset() + rows.start * unit)
        return rows.of(grad).contiguous()

    def layout(self, p: Tensor) -> GroupLayout:
        return self.rows[p].layout(group_layout(p.shape))

    def wrap(self, p: Tensor, part: Tensor, global_shape: Sequence[int]) -> Tensor:
        return RowShard(part, global_shape, self.rows[p], self.group)

    def take(self, p: Tensor, value: Tensor) -> Tensor | None:
        if isinstance(value, RowShard):
            return value.to_local() if value.rows == self.rows[p] else None
        return self.rows[p].of(value.detach()) if type(value) is Tensor else None

    def gather(self, p: Tensor, part: Tensor) -> Tensor:
        return gather_rows(part, p.shape, self.rows[p], self.group)

    def lost(self, params: Sequence[Tensor], counts: Sequence[Tensor]) -> list[tuple[int, int]]:
        totals = torch.stack(list(counts)) if counts else torch.zeros(0)
        dist.all_reduce(totals, group=self.group)
        return [(int(total), p.numel()) for p, total in zip(params, totals.tolist(), strict=True)]

    def exchange(self, params: Sequence[Tensor], scalars: Sequence[GroupScalars]) -> None:
        trainable, grads = list(map(_TRAINABLE, params)), [g is not None for g in map(_GRAD, params)]
        # Not only what has a gradient now: ranks that disagree about it must still meet in the same collective calls.
        key: list[object] = [*(t or g for t, g in zip(trainable, grads, strict=True)), *map(Tensor.data_ptr, params)]
        if self._gathers is None or self._gathers[0] != key:
            self._gathers = key, self._plan([p for p, moves in zip(params, key, strict=False) if moves])
        self._agreement.check_last()
        digest = zlib.crc32(repr((grads, [_host_scalars(s) for s in scalars])).encode())
        for gather in self._gathers[1]:
            self._agreement.expect(digest, gather.run(digest))

    def _plan(self, params: Sequence[Tensor]) -> list[RowGather]:
        by_device: dict[torch.device, list[tuple[Tensor, list[int]]]] = {}
        for p in params:
            self._check_format(p)
            # Rows are runs of the storage (see leading_dims), whatever the order of the dimensions in it.
            flat = p.detach().as_strided((p.numel(),), (1,))
            by_device.setdefault(p.device, []).append((flat, self.rows[p].elements(p.numel())))
        return [RowGather(tensors, self.group, device) for device, tensors in by_device.items()]

    def check_new_group(self) -> None:
        raise RuntimeError(
            "this optimizer's states are sharded by shard_states, which takes no further param groups: add them all "
            "before the call"
        )

    def workspace(self) -> list[Tensor]:
        return [gather.buffer for gather in self._gathers[1]] if self._gathers is not None else []

    def __deepcopy__(self, memo: dict[int, Any]) -> RowPartition:
        """For a copy of the optimizer with parameters of its own; the ranks stay the same."""
        return RowPartition({copy.deepcopy(p, memo): rows for p, rows in self.rows.items()}, self.group)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an optimizer whose states are sharded by shard_states cannot be pickled, for its process group exists in "
            "these processes only. Save its state_dict() instead, with torch.distributed.checkpoint."
        )


class Agreement:
    """Notices when ranks step different parameters or with different hyperparameters, which would mix their rows.

    On a GPU it says so a step or more later, when the comparison has come to the host by itself.
    """

    def __init__(self) -> None:
        self._differ: Tensor | None = None  # bool 0-d on the device
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def expect(self, digest: int, found: Tensor) -> None:
        """``found``: the digests of all ranks, on their device."""
        differ = (found != digest).any()
        if differ.device.type != "cuda":
            self._raise_if(bool(differ))
            return
        if torch.cuda.is_current_stream_capturing():
            return
        self._differ = differ if self._differ is None else self._differ.to(differ.device) | differ
        if self._host is None:
            self._host, self._copied = torch.zeros((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        elif self._copied is not None and not self._copied.query():
            return
        self._host.copy_(self._differ, non_blocking=True)
        assert self._copied is not None
        self._copied.record()

    def check_last(self) -> None:
        """Raise where an earlier step of a GPU went apart, as far as it is known now."""
        capturing = self._copied is not None and torch.cuda.is_current_stream_capturing()
        if self._copied is not None and self._host is not None and not capturing and self._copied.query():
            self._raise_if(bool(self._host))

    def _raise_if(self, differ: bool) -> None:
        if differ:
            raise RuntimeError(
                "ranks have stepped different parameters, or with different hyperparameters: with sharded states every "
                "parameter must have a gradient on all ranks or on none, and lr and the like must be equal on all ranks"
            )


def _host_scalars(scalars: GroupScalars) -> tuple[object, ...]:
    """A group's numbers, without an lr that is on a device."""
    values = (getattr(scalars, field.name) for field in fields(scalars))
    return tuple(
        float(v) if isinstance(v, Tensor) and v.device.type == "cpu" else v for v in values if not _on_device(v)
    )


def _on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"
