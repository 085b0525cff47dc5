"""ZeRO-1 for replicated parameters: every rank steps its rows, and all get the weights of all rows back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import attrgetter, or_
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flashdist.numerics.groups import GroupLayout, group_layout
from flashdist.numerics.rules import GroupScalars
from flashdist.sharding.agreement import Agreement, check_same_weights, step_digest
from flashdist.sharding.row_cut import Rows
from flashdist.sharding.row_gather import RowGather, gather_rows
from flashdist.sharding.row_shard import RowShard

_TRAINABLE, _GRAD = attrgetter("requires_grad"), attrgetter("grad")


class RowPartition:
    """See :class:`flashdist.sharding.partition.Partition`.

    Args:
        rows: which rows of each parameter belong to which rank.
        group: the ranks.
        model: a DistributedDataParallel around them, if there is one.
    """

    def __init__(self, rows: dict[Tensor, Rows], group: dist.ProcessGroup, model: nn.Module | None = None) -> None:
        self.rows = rows
        self.group = group
        self._model = model
        self._strides = {p: p.stride() for p in rows}
        self._elements = {p: r.elements(p.numel())[r.rank : r.rank + 2] for p, r in rows.items()}
        self._nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._compared = False
        self._viewed: tuple[Sequence[Tensor], list[int], list[Tensor]] | None = None
        self._gathers: tuple[list[int], list[RowGather]] | None = None
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
        if not grad.is_contiguous():
            return self.rows[p].of(grad).contiguous()
        # Most gradients belong to one rank: its own is taken as it is, the others are worth no view each.
        start, stop = self._elements[p]
        if start == stop:
            nothing = self._nothing.get((grad.dtype, grad.device))
            if nothing is None:
                nothing = self._nothing[grad.dtype, grad.device] = grad.new_empty(0)
            return nothing
        if stop - start == grad.numel():
            return grad
        return grad.as_strided((stop - start,), (1,), grad.storage_offset() + start)

    def gradients(self, params: Sequence[Tensor], grads: list[Tensor]) -> list[Tensor]:
        return list(map(self.gradient, params, grads))

    def layout(self, p: Tensor) -> GroupLayout:
        return self.rows[p].layout(group_layout(p.shape))

    def wrap(self, p: Tensor, part: Tensor, global_shape: Sequence[int]) -> Tensor:
        return RowShard(part, global_shape, self.rows[p], self.group)

    def take(self, p: Tensor, value: Tensor) -> Tensor | None:
        if isinstance(value, RowShard):
            return value.to_local() if value.rows == self.rows[p] else None
        return None if isinstance(value, DTensor) else self.rows[p].of(value.detach())

    def gather(self, p: Tensor, part: Tensor) -> Tensor:
        return gather_rows(part, p.shape, self.rows[p], self.group)

    def lost(self, params: Sequence[Tensor], counts: Sequence[Tensor]) -> list[tuple[int, int]]:
        totals = torch.stack([count.to(counts[0].device) for count in counts])
        dist.all_reduce(totals, group=self.group)
        return [(int(total), p.numel()) for p, total in zip(params, totals.tolist(), strict=True)]

    def before_step(self, params: Sequence[Tensor], name: Callable[[Tensor], str]) -> None:
        join = getattr(self._model, "_join_config", None)
        if join is not None and join.enable and not join.throw_on_early_termination:
            raise RuntimeError(
                "DistributedDataParallel's join() lets a rank that has run out of batches leave the others, but with "
                "sharded states it has rows that no other rank can step. Give all ranks equally many batches, or "
                "pass throw_on_early_termination=True to join()."
            )
        self._agreement.check_last()
        if not self._compared:
            check_same_weights([p for p in params if p.requires_grad], self.group, name)
            self._compared = True

    def after_step(self, params: Sequence[Tensor], scalars: Callable[[], Sequence[GroupScalars]]) -> None:
        grads = [g is not None for g in map(_GRAD, params)]
        # Not only what has a gradient now: ranks that disagree about it must still meet in the same collective calls.
        moving = list(map(or_, map(_TRAINABLE, params), grads))
        key = [*moving, *map(Tensor.data_ptr, params)]
        if self._gathers is None or self._gathers[0] != key:
            self._gathers = key, self._plan([p for p, moves in zip(params, moving, strict=True) if moves])
        digest = step_digest(grads, scalars())
        # All gathers first: the ranks must not part before the last one.
        found = [gather.run(digest) for gather in self._gathers[1]]
        for digests in found:
            self._agreement.compare(digest, digests)

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
        return RowPartition({copy.deepcopy(p, memo): r for p, r in self.rows.items()}, self.group, self._model)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an optimizer whose states are sharded by shard_states cannot be pickled, for its process group exists in "
            "these processes only. Save its state_dict() instead, with torch.distributed.checkpoint."
        )
