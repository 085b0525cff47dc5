"""Who takes part in a step: parameters, their state as the kernels see it, weights and gradients, in one order.

What stays the same from step to step is kept, and checked by identity in a few passes over plain lists: with thousands
of small tensors the host's share of a step is these passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, Protocol

from torch import Tensor

from flashdist.kernels.backend import ParamState
from flashdist.sharding.gradients import all_plain
from flashdist.sharding.partition import Partition

_GRAD = attrgetter("grad")
_VERSION = attrgetter("version")

StateOf = Callable[[Tensor, int], ParamState]
LocalGradient = Callable[[Tensor, Tensor], Tensor]


class WatchedState(dict[str, Tensor]):
    """``opt.state[p]``: a dict that counts how often an entry is set or removed, so that no step need compare them
    all."""

    version = 0

    def _noting(name: str) -> Any:  # type: ignore[misc]
        method = getattr(dict, name)

        def noting(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
            self.version += 1
            return method(self, *args, **kwargs)

        return noting

    __setitem__, __delitem__, __ior__ = _noting("__setitem__"), _noting("__delitem__"), _noting("__ior__")
    clear, pop, popitem = _noting("clear"), _noting("pop"), _noting("popitem")
    setdefault, update = _noting("setdefault"), _noting("update")
    del _noting


class Roster:
    """The parameters of one step and their states, while neither changes."""

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[int],
        formats: object,
        state: dict[Tensor, Any],
        state_of: StateOf,
        partition: Partition,
        name: Callable[[Tensor], str],
    ) -> None:
        # A list that nobody changes: the optimizer makes a new one where its parameters do.
        self.params = params if isinstance(params, list) else list(params)
        self.formats = formats
        self.partition = partition
        self.name = name
        self.states = [state_of(p, g) for p, g in zip(params, groups, strict=True)]
        self.addresses: list[int] = []
        self.device_types: list[str] = []
        self._looked_at: list[int] | None = None
        self._kept: list[WatchedState] = []
        for p in params:
            if not isinstance(state[p], WatchedState):
                state[p] = WatchedState(state[p])
            self._kept.append(state[p])
        self._versions = list(map(_VERSION, self._kept))

    def fits(self, params: Sequence[Tensor], formats: object, state: dict[Tensor, Any]) -> bool:
        """Whether these are the parameters, kept in these formats, and every state tensor is still the one viewed."""
        if formats != self.formats:
            return False
        if params is not self.params and (len(params) != len(self.params) or not all(map(is_, params, self.params))):
            return False
        kept = list(state.values()) if len(state) == len(params) else [state.get(p) for p in params]
        return all(map(is_, kept, self._kept)) and list(map(_VERSION, self._kept)) == self._versions

    def weights(self) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Local weights in logical order; those copied for it (transposed, channels_last) come with their copies
        too."""
        weights = self.partition.parts(self.params)
        self.addresses = list(map(Tensor.data_ptr, weights))
        if self.addresses == self._looked_at:
            return weights, []
        self._look_at(weights)
        contiguous = [w.contiguous() for w in weights]
        copies = [(w, c) for w, c in zip(weights, contiguous, strict=True) if c is not w]
        if copies:
            self.addresses = [c.data_ptr() for c in contiguous]
        else:
            self._looked_at = self.addresses
        return contiguous, copies

    def _look_at(self, weights: Sequence[Tensor]) -> None:
        """What can have changed only together with an address: a weight put in place of another, or moved."""
        for p, weight, state in zip(self.params, weights, self.states, strict=True):
            expected = (state.layout.shape, state.weight_dtype, state.step.device)
            found = (tuple(weight.shape), weight.dtype, weight.device)
            if found != expected:
                raise RuntimeError(
                    f"the data (shape, dtype, device) of {self.name(p)} was {expected} when its state was made and is "
                    f"{found} now. Reshape, cast or move the model before the optimizer's first step."
                )
        self.device_types = [w.device.type for w in weights]


class Release(Protocol):
    """Who steps the parameters during backward (sharding/gradient_release.py), and what calls mean to it."""

    def end_of_step(self) -> None:
        """step() was called."""

    def drop(self) -> None:
        """zero_grad() was called."""

    def refuse_clipping(self) -> None:
        """clip_grad_norm_() was called."""


def with_gradients(params: list[Tensor], groups: list[int]) -> tuple[list[Tensor], list[int], list[Tensor]]:
    """The parameters that have a gradient, their param groups, and the gradients."""
    grads = list(map(_GRAD, params))
    if type(None) not in set(map(type, grads)):
        return params, groups, grads
    there = [i for i, g in enumerate(grads) if g is not None]
    return [params[i] for i in there], [groups[i] for i in there], [grads[i] for i in there]


def local_gradients(
    params: Sequence[Tensor], grads: list[Tensor], local_gradient: LocalGradient, partition: Partition
) -> list[Tensor]:
    """Local plain gradients in logical order; one by one where they are expanded, strided or sharded."""
    if all_plain(params, grads):
        try:
            if all(map(Tensor.is_contiguous, grads)):
                return partition.gradients(params, grads)
        except RuntimeError:  # a sparse gradient cannot even be asked; local_gradient refuses it by name
            pass
    return [local_gradient(p, g) for p, g in zip(params, grads, strict=True)]
