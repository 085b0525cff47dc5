"""The global gradient norm of a step whose gradients were never alive together, to clip the next step by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashdist.sharding.global_norm import NormKind, SquareSum, kind_of, sum_over_ranks
from flashdist.sharding.local_shard import local


class PreviousNorm:
    """Sums squares batch by batch; :meth:`finish` makes the norm and the next step's factor of them.

    Everything stays on the device. On several ranks :meth:`finish` is a collective call.
    """

    def __init__(self, params: Sequence[Tensor], max_norm: float) -> None:
        self.max_norm = max_norm
        self.value: Tensor | None = None
        self.factor: Tensor | None = None
        # In the same order on all ranks, whatever order gradients come in.
        self._kinds: dict[NormKind, Tensor] = {}
        for p in params:
            self._kinds.setdefault(kind_of(p), p)
        self._squares: dict[NormKind, list[Tensor]] = {}

    def add(self, params: Sequence[Tensor], grads: Sequence[Tensor], square_sum_on: Callable[[str], SquareSum]) -> None:
        """Count the gradients of a batch."""
        alike: dict[NormKind, list[Tensor]] = {}
        for p, grad in zip(params, grads, strict=True):
            shard = local(grad).detach()
            if shard.numel():
                alike.setdefault(kind_of(p), []).append(shard)
        for kind, shards in alike.items():
            self._squares.setdefault(kind, []).append(square_sum_on(shards[0].device.type)(shards))

    def finish(self) -> None:
        """The end of a step."""
        total: Tensor | None = None
        for kind, example in self._kinds.items():
            squares = self._squares.get(kind)
            part = torch.stack(squares).sum() if squares else torch.zeros((), device=local(example).device)
            sum_over_ranks(part, example, kind)
            total = part if total is None else total + part.to(total.device, non_blocking=True)
        self.forget()
        if total is not None:
            self.set(total.sqrt())

    def set(self, value: Tensor) -> None:
        """The norm of the last step; the factor of the next one follows from it."""
        self.value = value
        self.factor = torch.clamp(self.max_norm / (value + 1e-6), max=1.0)

    def forget(self) -> None:
        """Drop what was added since the last :meth:`finish`."""
        self._squares.clear()
