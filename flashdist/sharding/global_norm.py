"""The norm of all gradients of an optimizer, over all ranks that hold a part of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashdist.sharding.local_shard import local, sharded_mesh_dims

SquareSum = Callable[[Sequence[Tensor]], Tensor]


def global_norm(grads: Sequence[Tensor], norm_type: float, square_sum_on: Callable[[str], SquareSum]) -> Tensor:
    """``(sum |g|^norm_type)^(1/norm_type)`` over all elements of all gradients, DTensors counted once over their mesh.

    Args:
        grads: plain tensors and DTensors, in the same order on every rank.
        norm_type: a positive order, or ``inf``.
        square_sum_on: the fused sum of squares for a device type; used for the order 2.

    Returns:
        fp32 0-d on the device of the first gradient; 0 where there is none. No host synchronisation.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    if not grads:
        return torch.zeros(())
    total: Tensor | None = None
    for (_, _, dims, device), members in _alike(grads).items():
        shards = [local(g).detach() for g in members]
        part = _local_power_sum(shards, order, square_sum_on(device.type))
        for dim in dims:
            op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
            dist.all_reduce(part, op, group=members[0].device_mesh.get_group(dim))  # type: ignore[attr-defined]
        if total is None:
            total = part
        else:
            part = part.to(total.device, non_blocking=True)
            total = torch.maximum(total, part) if math.isinf(order) else total + part
    assert total is not None
    if math.isinf(order):
        return total
    return total.sqrt() if order == 2.0 else total.pow(1.0 / order)


def _alike(grads: Sequence[Tensor]) -> dict[tuple[object, object, tuple[int, ...], torch.device], list[Tensor]]:
    """Gradients that are summed together before any communication: same device, same mesh, same sharded dimensions."""
    groups: dict[tuple[object, object, tuple[int, ...], torch.device], list[Tensor]] = {}
    for g in grads:
        if g.layout is not torch.strided:
            raise RuntimeError("clip_grad_norm_ does not take sparse gradients; build embeddings with sparse=False")
        mesh = g.device_mesh if isinstance(g, DTensor) else None
        key = (type(g) is Tensor, mesh, sharded_mesh_dims(g), local(g).device)
        groups.setdefault(key, []).append(g)
    return groups


def _local_power_sum(shards: Sequence[Tensor], order: float, square_sum: SquareSum) -> Tensor:
    filled = [s for s in shards if s.numel()]
    if not filled:
        return torch.zeros((), device=shards[0].device)
    if order == 2.0:
        return square_sum(filled)
    norms = torch.stack([torch.linalg.vector_norm(s, order, dtype=torch.float32) for s in filled])
    return norms.amax() if math.isinf(order) else norms.pow(order).sum()
