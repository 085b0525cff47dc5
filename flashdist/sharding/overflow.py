"""Whether the ranks agree on an overflow that a GradScaler has found, before anybody steps or skips.

torch looks for inf and NaN in the gradients of one dtype in a single call, and takes the maximum over those mesh
dimensions over which the *first* of them is sharded. Where others are sharded over more, as with tensor parallelism,
one rank would skip and lower its scale while another steps: silently, and for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from flashdist.sharding.dtensors import is_dtensor
from flashdist.sharding.local_shard import shard_dim

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def check_found_inf(found_inf: Tensor | None, grads: Sequence[Tensor], unscaled: bool) -> None:
    """Raise where the ranks need not agree on ``found_inf``, or do not.

    Args:
        found_inf: what the scaler has found on this rank; None where there is no scaler.
        grads: the gradients, in the order in which the scaler saw them.
        unscaled: ``scaler.unscale_`` was called; that of ShardedGradScaler takes the maximum over all ranks.

    Raises:
        RuntimeError: on all ranks alike.
    """
    if found_inf is None:
        return
    lists: dict[tuple[torch.device, torch.dtype], list[dict[str, dist.ProcessGroup]]] = {}
    for g in grads:
        if is_dtensor(g):
            lists.setdefault((g.device, g.dtype), []).append(_groups(g))
    if all(groups.keys() <= same[0].keys() for same in lists.values() for groups in same):
        return
    if not unscaled:
        raise RuntimeError(
            "GradScaler agrees on an overflow over the mesh dimensions of the first gradient only, and others are "
            "sharded over more: ranks could step and skip at the same time. Use the ShardedGradScaler of "
            "torch.distributed.fsdp.sharded_grad_scaler, and call scaler.unscale_(optimizer) before the step."
        )
    largest_and_least = torch.stack([found_inf, -found_inf]).float().flatten()
    for group in {name: group for same in lists.values() for groups in same for name, group in groups.items()}.values():
        dist.all_reduce(largest_and_least, dist.ReduceOp.MAX, group=group)
    if bool(largest_and_least.sum() != 0):
        raise RuntimeError(
            "some ranks have found an overflow and others have not, so that some would step and others skip. Use "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, whose unscale_ asks all ranks."
        )


def _groups(tensor: DTensor) -> dict[str, dist.ProcessGroup]:
    """The ranks that hold other elements of it, by the name of their group."""
    mesh = tensor.device_mesh
    found = [mesh.get_group(dim) for dim, p in enumerate(tensor.placements) if shard_dim(p) is not None]
    return {group.group_name: group for group in found}
