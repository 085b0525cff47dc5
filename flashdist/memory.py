"""Bytes that an optimizer and its parameters hold, by kind.

Storages are counted, not shapes: what is reported is what the process holds on this rank. A view costs nothing beyond
its storage, and a storage is counted once however many tensors look into it. The caching allocator's rounding and
the temporaries of a step are not included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from flashdist.sharding.local_shard import local as local_shard


@dataclass(frozen=True)
class MemorySummary:
    """Bytes by kind on this rank; `parameters` is a number of elements.

    Attributes:
        weights: the model's parameters (`hi` where the weight is split).
        corrections: the low-order bytes that restore the master weight (`error`).
        moments: momentum and variance, codes or plain fp32.
        scales: one scale for each group of codes.
        steps: step counts.
        gradients: gradients that are alive now.
        derived: what can be rebuilt from the rest and is not saved: fingerprints and launch tables.
        parameters: elements of the weights on this rank.
    """

    weights: int = 0
    corrections: int = 0
    moments: int = 0
    scales: int = 0
    steps: int = 0
    gradients: int = 0
    derived: int = 0
    parameters: int = 0

    @property
    def total(self) -> int:
        """The bytes of all kinds together."""
        return sum(getattr(self, kind) for kind in _KINDS)

    @property
    def bytes_per_parameter(self) -> float:
        """`total` over `parameters`; 0.0 where this rank holds no element."""
        return self._per_parameter(self.total)

    def as_dict(self) -> dict[str, int | float]:
        """The fields by name, then `total` and `bytes_per_parameter`."""
        return {**asdict(self), "total": self.total, "bytes_per_parameter": self.bytes_per_parameter}

    def _per_parameter(self, size: int) -> float:
        return size / self.parameters if self.parameters else 0.0

    def __str__(self) -> str:
        rows = [(kind, getattr(self, kind)) for kind in _KINDS] + [("total", self.total)]
        cells = [("kind", "bytes", "bytes/parameter")]
        cells += [(name, f"{size:,}", f"{self._per_parameter(size):.4f}") for name, size in rows]
        cells += [("parameters", f"{self.parameters:,}", "")]
        first, second, third = (max(len(row[column]) for row in cells) for column in range(3))
        return "\n".join(f"{a:<{first}}  {b:>{second}}  {c:>{third}}".rstrip() for a, b, c in cells)


_KINDS = tuple(field.name for field in fields(MemorySummary) if field.name != "parameters")


def state_kind(key: str) -> str:
    """The field of `MemorySummary` under which the state tensor `key` is counted."""
    if key == "step":
        return "steps"
    if key == "error":
        return "corrections"
    return "scales" if key.endswith("_scale") else "moments"


def storage_key(tensor: Tensor) -> int:
    """A number that two tensors alive at the same time share exactly if they look into one storage.

    The address of the storage object, not of its data: on the meta device all data lies at address 0, and so does
    all that is empty.

    Args:
        tensor: of any shape, dtype and device.
    """
    return int(tensor.untyped_storage()._cdata)


def summarize(
    weights: Iterable[Tensor],
    gradients: Iterable[Tensor],
    state: Iterable[tuple[str, Tensor]],
    derived: Iterable[Tensor],
    *,
    local: Callable[[Tensor], Tensor] = local_shard,
) -> MemorySummary:
    """Counts the storages behind an optimizer's tensors.

    A storage that two kinds share is counted for the kind that comes first, in the order of the arguments (a state
    step that views packed counts is a step, though the packed counts are listed as derived too). A tensor on meta
    counts what it would hold once materialised.

    Args:
        weights: the parameters, of any shape and dtype, each as often as it is listed anywhere (ties are counted once).
        gradients: the gradients that exist.
        state: pairs of a state key and its tensor: `step`, `error`, `*_scale`, and moments under any other key.
        derived: fingerprints, launch tables and the like.
        local: gives the part of a tensor that this rank holds. Defaults to the local shard of a DTensor.

    Returns:
        The bytes by kind, and the number of weight elements on this rank.
    """
    sizes = dict.fromkeys(_KINDS, 0)
    # The storages are kept until the end: one that was freed on the way could hand its address to the next.
    seen: dict[int, torch.UntypedStorage] = {}

    def count(kind: str, part: Tensor) -> None:
        key, storage = storage_key(part), part.untyped_storage()
        if key not in seen:
            seen[key] = storage
            sizes[kind] += storage.nbytes()

    # Two weights are slices of one flat buffer, or one weight listed twice: only the latter must not count twice.
    elements: dict[tuple[object, ...], int] = {}
    for weight in weights:
        part = local(weight)
        count("weights", part)
        elements[storage_key(part), part.storage_offset(), part.shape, part.stride()] = part.numel()
    for gradient in gradients:
        count("gradients", local(gradient))
    for key, tensor in state:
        count(state_kind(key), local(tensor))
    for tensor in derived:
        count("derived", local(tensor))
    return MemorySummary(parameters=sum(elements.values()), **sizes)
