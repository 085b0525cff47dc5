"""Counts of elements summed over the ranks that hold the shards, so that all ranks come to the same conclusion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flashdist.sharding.dtensors import is_dtensor
from flashdist.sharding.local_shard import sharded_mesh_dims


def summed_counts(params: Sequence[Tensor], counts: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Per parameter: the count over all ranks that hold a shard of it, and its number of elements.

    One collective call for each mesh and choice of its dimensions; and a synchronisation with the host.
    """
    totals = [int(count) for count in counts]
    alike: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for i, p in enumerate(params):
        if is_dtensor(p):
            alike.setdefault((p.device_mesh, sharded_mesh_dims(p)), []).append(i)
    for (mesh, dims), where in alike.items():
        summed = torch.tensor([totals[i] for i in where], device=mesh.device_type)
        for dim in dims:
            dist.all_reduce(summed, group=mesh.get_group(dim))
        for i, total in zip(where, summed.tolist(), strict=True):
            totals[i] = total
    return [(total, p.numel()) for total, p in zip(totals, params, strict=True)]
