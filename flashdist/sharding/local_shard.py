"""From a tensor to the plain tensor that this rank holds of it: the only place that unwraps a DTensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from flashdist.numerics.companding import GROUP
from flashdist.numerics.groups import GroupLayout
from flashdist.sharding.dtensors import is_dtensor
from flashdist.sharding.row_shard import RowShard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def local(tensor: Tensor) -> Tensor:
    """The plain tensor behind a tensor: a DTensor's local shard, a RowShard's rows, anything else unchanged. No
    communication, no copy."""
    if type(tensor) is Tensor:
        return tensor
    if isinstance(tensor, RowShard):
        return tensor.to_local()
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def check_placements(name: str, parameter: Tensor, layout: GroupLayout, quantize: bool = True) -> None:
    """Refuse placements under which a shard would be no shard, or would cut a group of 32.

    Args:
        name: the parameter's name, for the message.
        parameter: a DTensor, or a plain tensor (which always fits).
        layout: the groups of the global shape.
        quantize: whether the moments are kept as codes; fp32 moments may be cut anywhere.

    Raises:
        ValueError: naming the parameter, its placements and the remedy.
    """
    if not is_dtensor(parameter):
        return
    for placement in parameter.placements:
        if placement.is_partial():
            raise ValueError(
                f"{name} has the placement {placement}: a partial sum is no parameter. "
                "Redistribute it to Shard or Replicate before the optimizer is built."
            )
        if shard_dim(placement) is None and not placement.is_replicate():
            raise ValueError(
                f"{name} has the placement {placement}, which is not known here: use Shard or Replicate, as "
                "fully_shard and parallelize_module do."
            )
    if not quantize or layout.row_start is None:
        return
    inner = math.prod(layout.shape[layout.row_start + 1 :])
    for dim in sorted({d for d in map(shard_dim, parameter.placements) if d is not None and d >= layout.row_start}):
        sizes = [parameter.device_mesh.size(i) for i, p in enumerate(parameter.placements) if shard_dim(p) == dim]
        if max(sizes) == 1:
            continue
        cuts = _cuts(layout.shape[dim], parameter, dim)
        if dim > layout.row_start or any((cut * inner) % GROUP for cut in cuts):
            raise ValueError(
                f"{name} is sharded along dimension {dim} over {math.prod(sizes)} ranks, which "
                f"cuts a group of {GROUP} elements: groups lie in dimensions {layout.row_start} and up. Shard it along "
                f"a dimension left of {layout.row_start}, or so that each shard holds a multiple of {GROUP} elements "
                "of a row, or set quantize=False for it."
            )


def _cuts(size: int, tensor: DTensor, dim: int) -> set[int]:
    """Where a dimension of ``size`` is cut, as torch does: each mesh dimension cuts every piece in chunks."""
    over = [(tensor.device_mesh.size(i), p) for i, p in enumerate(tensor.placements) if shard_dim(p) == dim]
    # Those that fully_shard adds to a tensor-parallel shard stand left of it, and cut what it has cut.
    plain = [n for n, p in over if p.is_shard()]
    strided = [n for n, p in reversed(over) if not p.is_shard()]
    pieces = [(0, size)]
    for n in plain + strided:
        chunked = []
        for start, stop in pieces:
            chunk = max(math.ceil((stop - start) / n), 1)
            chunked += [(at, min(at + chunk, stop)) for at in range(start, stop, chunk)]
        pieces = chunked
    return {start for start, _ in pieces}


def sharded_mesh_dims(tensor: Tensor) -> tuple[int, ...]:
    """The mesh dimensions over which a DTensor is sharded; none for a plain or replicated tensor.

    Raises:
        ValueError: for a Partial placement, whose local tensors are summands and no shards.
    """
    if not is_dtensor(tensor):
        return ()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a gradient has the placements {tensor.placements}: redistribute it, Partial is no shard")
    return tuple(dim for dim, placement in enumerate(tensor.placements) if shard_dim(placement) is not None)


def shard_dim(placement: Placement) -> int | None:
    """The tensor dimension that a placement cuts, or None."""
    # Not by is_shard(): that is False for _StridedShard (FSDP over tensor parallel), which is no subclass of Shard.
    dim = getattr(placement, "dim", None)
    return dim if isinstance(dim, int) else None


def is_meta(tensor: Tensor) -> bool:
    """Whether a parameter has no storage yet."""
    return tensor.device.type == "meta" or local(tensor).device.type == "meta"
