"""What a ZeRO checkpoint of ours holds: codes on disk, fp32 tensors for whoever unpickles it.

DeepSpeed's tools (``zero_to_fp32.py``, ``ds_to_universal.py``) expect fp32 master weights and moments in the optimizer
files. The objects here are saved as what they are made of, and unpickled as the fp32 tensors that the tools ask for.
Our own loading reads the same files within :func:`reading_codes`, where nothing is expanded.

This module needs no DeepSpeed: it is what a checkpoint's pickle refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flashdist.integrations.deepspeed_layout import Segment
from flashdist.integrations.deepspeed_packed import Packed
from flashdist.optimizer import FlashOptimizer

# Under this key of the optimizer's part of a file.
PAYLOAD = "flashdist"
FORMAT = 1
Payload = dict[str, Any]

_CODES: ContextVar[bool] = ContextVar("reading codes of a ZeRO checkpoint", default=False)


@contextmanager
def reading_codes() -> Iterator[None]:
    """Within it, a file's fp32 tensors are left out when it is unpickled, and its codes are there."""
    token = _CODES.set(True)
    try:
        yield
    finally:
        _CODES.reset(token)


def payload(opt: FlashOptimizer, packed: Packed, numel: int) -> Payload:
    """A partition as it is saved.

    Args:
        opt: the optimizer.
        packed: its state of the partition.
        numel: how many elements of it are no padding: those of the master weights that DeepSpeed's tools expect. (Of
            moments they expect all, and take the padding off themselves.)
    """
    return {
        "format": FORMAT,
        "optimizer": type(opt).__name__,
        "moments": packed.moments,
        "numel": packed.weight.numel(),
        # A copy: as a view it would be saved with the whole flat buffer around it.
        "weight": packed.weight[:numel].clone(),
        "segments": [(s.name, s.shape, s.start, s.length, s.offset, s.grouped) for s in packed.segments],
        "places": packed.places,
        "steps": packed.steps,
        "buffers": packed.buffers,
    }


def unpack(saved: Payload) -> Packed:
    """The partition that :func:`payload` saved.

    Raises:
        ValueError: for a file of another format.
    """
    if saved["format"] != FORMAT:
        raise ValueError(
            f"the ZeRO checkpoint has format {saved['format']}, this release of flashdist reads {FORMAT}: load it with "
            "the release that wrote it, or a newer one"
        )
    segments = [Segment(*fields) for fields in saved["segments"]]
    return Packed(saved["weight"], tuple(saved["moments"]), segments, saved["places"], saved["steps"], saved["buffers"])


class _Saved:
    """Unpickled as what ``rebuild`` makes of its arguments."""

    rebuild: Callable[..., Any]

    def __init__(self, *made_of: Any) -> None:
        self.made_of = made_of

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self).rebuild, self.made_of


def rebuild_master(saved: Payload) -> Tensor | None:
    """fp32 master weights of a partition, joined."""
    return None if _CODES.get() else unpack(saved).read(0, saved["weight"].numel())


def rebuild_moment(saved: Payload, key: str) -> Tensor | None:
    """fp32 values of a moment, decoded."""
    return None if _CODES.get() else unpack(saved).read(0, saved["numel"], key)


def rebuild_zeros(saved: Payload) -> Tensor | None:
    """Stands for a moment that DeepSpeed's tools read and the optimizer does not have."""
    return None if _CODES.get() else torch.zeros(1).expand(saved["numel"])


def rebuild_raw(saved: list[Payload]) -> list[Payload] | None:
    """The codes, for our own loading only: tools that copy what they do not know should not copy them."""
    return saved if _CODES.get() else None


class Master(_Saved):
    """fp32 master weights."""

    rebuild = staticmethod(rebuild_master)


class Moment(_Saved):
    """A moment in fp32."""

    rebuild = staticmethod(rebuild_moment)


class Zeros(_Saved):
    """A moment that there is none of."""

    rebuild = staticmethod(rebuild_zeros)


class Raw(_Saved):
    """The partitions as they are."""

    rebuild = staticmethod(rebuild_raw)
