"""From a tensor to the plain tensor that this rank holds of it: the only place that unwraps a DTensor."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement

from flashdist.numerics.companding import GROUP
from flashdist.numerics.groups import GroupLayout
from flashdist.sharding.row_shard import RowShard


def local(tensor: Tensor) -> Tensor:
    """The plain tensor behind a tensor: a DTensor's local shard, a RowShard's rows, anything else unchanged. No
    communication, no copy."""
    if type(tensor) is Tensor:
        return tensor
    if isinstance(tensor, RowShard):
        return tensor.to_local()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def check_placements(name: str, parameter: Tensor, layout: GroupLayout) -> None:
    """Refuse placements under which a shard would be no shard, or would cut a group of 32.

    Args:
        name: the parameter's name, for the message.
        parameter: a DTensor, or a plain tensor (which always fits).
        layout: the groups of the global shape.

    Raises:
        ValueError: naming the parameter, its placements and the remedy.
    """
    if not isinstance(parameter, DTensor):
        return
    for mesh_dim, placement in enumerate(parameter.placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"{name} has the placement {placement}: a partial sum is no parameter. "
                "Redistribute it to Shard or Replicate before the optimizer is built."
            )
        dim = _shard_dim(placement)
        if dim is None or layout.row_start is None or dim < layout.row_start:
            continue
        inner = math.prod(layout.shape[layout.row_start + 1 :])
        size = parameter.device_mesh.size(mesh_dim)
        chunk = math.ceil(layout.shape[layout.row_start] / size)
        if dim > layout.row_start or (chunk * inner) % GROUP:
            raise ValueError(
                f"{name} of shape {layout.shape} is sharded along dimension {dim} over {size} ranks, which "
                f"cuts a group of {GROUP} elements: groups lie in dimensions {layout.row_start} and up. Shard it along "
                f"a dimension left of {layout.row_start}, or so that each shard holds a multiple of {GROUP} elements "
                "of a row, or set quantize=False for it."
            )


def sharded_mesh_dims(tensor: Tensor) -> tuple[int, ...]:
    """The mesh dimensions over which a DTensor is sharded; none for a plain or replicated tensor.

    Raises:
        ValueError: for a Partial placement, whose local tensors are summands and no shards.
    """
    if not isinstance(tensor, DTensor):
        return ()
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"a gradient has the placements {tensor.placements}: redistribute it, Partial is no shard")
    return tuple(dim for dim, placement in enumerate(tensor.placements) if _shard_dim(placement) is not None)


def _shard_dim(placement: Placement) -> int | None:
    """The tensor dimension that a placement cuts, or None."""
    # _StridedShard (FSDP over tensor parallel) is no subclass of Shard in every release; both have a dim.
    return getattr(placement, "dim", None) if placement.is_shard() else None


def is_meta(tensor: Tensor) -> bool:
    """Whether a parameter has no storage yet."""
    return tensor.device.type == "meta" or local(tensor).device.type == "meta"
