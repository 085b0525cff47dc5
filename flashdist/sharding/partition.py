"""Which part of each parameter this rank steps, and how its state is wrapped: all that the optimizer asks of sharding.

:class:`AsPlaced` is the rule: a rank steps what it holds of a parameter. ZeRO-1 for replicated parameters
(``row_partition.py``) is the other answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from flashdist.numerics.groups import GroupLayout, group_layout
from flashdist.numerics.rules import GroupScalars
from flashdist.sharding.dtensors import any_dtensor
from flashdist.sharding.local_shard import local
from flashdist.sharding.overall import summed_counts
from flashdist.sharding.placement import place_like


class Partition(Protocol):
    """Maps parameters to the parts that this rank steps. All ranks ask it the same in the same order."""

    def parts(self, params: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of parameters: plain views of them."""
        ...

    def gradient(self, p: Tensor, grad: Tensor) -> Tensor:
        """The part of a gradient that belongs to the part of ``p``: plain and contiguous, of any shape."""
        ...

    def gradients(self, params: Sequence[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """The same for gradients that are all plain and contiguous."""
        ...

    def layout(self, p: Tensor) -> GroupLayout:
        """The groups of this rank's part."""
        ...

    def wrap(self, p: Tensor, part: Tensor, global_shape: Sequence[int]) -> Tensor:
        """A state tensor of this rank's part as it stands in ``opt.state``; ``local()`` gives the part back."""
        ...

    def take(self, p: Tensor, value: Tensor) -> Tensor | None:
        """This rank's part of a state tensor that is to be loaded, or None where it is cut differently."""
        ...

    def gather(self, p: Tensor, part: Tensor) -> Tensor:
        """What a caller gets of a tensor of p's shape: as p is placed."""
        ...

    def lost(self, params: Sequence[Tensor], counts: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Per parameter the elements counted by the kernels, and of how many."""
        ...

    def before_step(self, params: Sequence[Tensor], name: Callable[[Tensor], str]) -> None:
        """Raise where a step cannot be taken. ``params`` are all of the optimizer, ``name`` is for messages."""
        ...

    def after_step(self, params: Sequence[Tensor], scalars: Callable[[], Sequence[GroupScalars]]) -> None:
        """Bring what other ranks have stepped here. ``params`` are all of the optimizer's, ``scalars`` its groups'."""
        ...

    def check_new_group(self) -> None:
        """Raise where no param group can be added any more."""
        ...

    def workspace(self) -> list[Tensor]:
        """Tensors that the partition itself holds."""
        ...


class AsPlaced:
    """A plain parameter is stepped whole, a DTensor's local shard where it is."""

    def parts(self, params: Sequence[Tensor]) -> list[Tensor]:
        if isinstance(params, list) and not any_dtensor(params):
            return params
        return [local(p) for p in params]

    def gradient(self, p: Tensor, grad: Tensor) -> Tensor:
        return local(grad).contiguous()

    def gradients(self, params: Sequence[Tensor], grads: list[Tensor]) -> list[Tensor]:
        return grads

    def layout(self, p: Tensor) -> GroupLayout:
        return group_layout(p.shape).of_shard(local(p).shape)

    def wrap(self, p: Tensor, part: Tensor, global_shape: Sequence[int]) -> Tensor:
        return place_like(p, part, global_shape)

    def take(self, p: Tensor, value: Tensor) -> Tensor | None:
        return local(value)

    def gather(self, p: Tensor, part: Tensor) -> Tensor:
        return place_like(p, part, p.shape)

    def lost(self, params: Sequence[Tensor], counts: Sequence[Tensor]) -> list[tuple[int, int]]:
        return summed_counts(params, counts)

    def before_step(self, params: Sequence[Tensor], name: Callable[[Tensor], str]) -> None:
        pass

    def after_step(self, params: Sequence[Tensor], scalars: Callable[[], Sequence[GroupScalars]]) -> None:
        pass

    def check_new_group(self) -> None:
        pass

    def workspace(self) -> list[Tensor]:
        return []
