"""Ranks that step shares of the same parameters must agree about them. Where they do not, say so instead of mixing
their rows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from flashdist.numerics.rules import GroupScalars
from flashdist.sharding.row_gather import all_gather

_BITS = {2: torch.int16, 4: torch.int32}


class Agreement:
    """Notices when ranks step different parameters or with different hyperparameters.

    Every rank's digest of a step travels with its weights. On a GPU the comparison is reported by a later step, when it
    has come to the host by itself.
    """

    def __init__(self) -> None:
        self._differ: Tensor | None = None  # bool 0-d on the device
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def compare(self, digest: int, found: Tensor) -> None:
        """``found``: the digests of all ranks, on their device."""
        differ = (found != digest).any()
        if differ.device.type != "cuda":
            _raise_if(bool(differ))
            return
        if torch.cuda.is_current_stream_capturing():
            return
        self._differ = differ if self._differ is None else self._differ.to(differ.device) | differ
        if self._host is None or self._copied is None:
            self._host, self._copied = torch.zeros((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        elif not self._copied.query():
            return
        self._host.copy_(self._differ, non_blocking=True)
        self._copied.record()

    def check_last(self) -> None:
        """Raise where an earlier step on a GPU went apart, as far as the host knows by now."""
        if self._host is None or self._copied is None or torch.cuda.is_current_stream_capturing():
            return
        if self._copied.query():
            _raise_if(bool(self._host))


def _raise_if(differ: bool) -> None:
    if differ:
        raise RuntimeError(
            "the ranks stepped different parameters, or with different hyperparameters: with sharded states every "
            "parameter must have a gradient on all ranks or on none, and lr and the like must be equal on all ranks"
        )


def step_digest(has_grad: Sequence[bool], scalars: Sequence[GroupScalars]) -> int:
    """A number for what a step does; an lr that is on a device is left out."""
    return zlib.crc32(bytes(has_grad) + repr([_host_scalars(s) for s in scalars]).encode())


def _host_scalars(scalars: GroupScalars) -> list[object]:
    values = (getattr(scalars, field.name) for field in fields(scalars))
    return [None if isinstance(v, Tensor) and v.device.type != "cpu" else float(v) for v in values]


def check_same_weights(params: Sequence[Tensor], group: dist.ProcessGroup, name: Callable[[Tensor], str]) -> None:
    """Compare a sum over the bits of each weight with the other ranks' (a collective call that reads the result).

    Raises:
        ValueError: naming the first parameter that differs.
    """
    if not params:
        return
    device = params[0].device
    sums = torch.stack([_bit_sum(p).to(device) for p in params])
    everybody = sums.new_empty(dist.get_world_size(group) * len(params))
    all_gather(everybody, sums, group=group)
    differ = (everybody.view(-1, len(params)) != sums).any(dim=0)
    if bool(differ.any()):
        first = params[int(differ.nonzero()[0])]
        raise ValueError(
            f"{name(first)} (and {int(differ.sum()) - 1} more) has other weights on another rank, and ZeRO-1 is for "
            "replicas: broadcast one rank's weights before the first step (DistributedDataParallel does), or load the "
            "same checkpoint on all ranks."
        )


def _bit_sum(p: Tensor) -> Tensor:
    # In the order of the storage, which is the same on all ranks.
    flat = p.detach().as_strided((p.numel(),), (1,))
    return flat.view(_BITS[p.element_size()]).sum(dtype=torch.int64)
