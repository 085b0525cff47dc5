"""The norm of all gradients of an optimizer, over all ranks that hold a part of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashdist.sharding.dtensors import is_dtensor
from flashdist.sharding.local_shard import local, sharded_mesh_dims

SquareSum = Callable[[Sequence[Tensor]], Tensor]
# Gradients that are summed together before any communication: plain or not, mesh, its sharded dimensions, device.
NormKind = tuple[bool, object, tuple[int, ...], torch.device]


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
    for kind, members in _alike(grads).items():
        shards = [local(g).detach() for g in members]
        part = _local_power_sum(shards, order, square_sum_on(kind[3].type))
        sum_over_ranks(part, members[0], kind, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM)
        if total is None:
            total = part
        else:
            part = part.to(total.device, non_blocking=True)
            total = torch.maximum(total, part) if math.isinf(order) else total + part
    assert total is not None
    if math.isinf(order):
        return total
    return total.sqrt() if order == 2.0 else total.pow(1.0 / order)


def kind_of(tensor: Tensor) -> NormKind:
    """Tensors of one kind are summed together before any communication."""
    mesh = tensor.device_mesh if is_dtensor(tensor) else None
    return type(tensor) is Tensor, mesh, sharded_mesh_dims(tensor), local(tensor).device


def sum_over_ranks(part: Tensor, example: Tensor, kind: NormKind, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce a 0-d sum, in place, over the ranks that hold different parts of tensors of this kind."""
    for dim in kind[2]:
        dist.all_reduce(part, op, group=example.device_mesh.get_group(dim))  # type: ignore[attr-defined]


def _alike(grads: Sequence[Tensor]) -> dict[NormKind, list[Tensor]]:
    groups: dict[NormKind, list[Tensor]] = {}
    for g in grads:
        if g.layout is not torch.strided:
            raise RuntimeError("clip_grad_norm_ does not take sparse gradients; build embeddings with sparse=False")
        groups.setdefault(kind_of(g), []).append(g)
    return groups


def _local_power_sum(shards: Sequence[Tensor], order: float, square_sum: SquareSum) -> Tensor:
    filled = [s for s in shards if s.numel()]
    if not filled:
        return torch.zeros((), device=shards[0].device)
    if order == 2.0:
        return square_sum(filled)
    norms = torch.stack([torch.linalg.vector_norm(s, order, dtype=torch.float32) for s in filled])
    return norms.amax() if math.isinf(order) else norms.pow(order).sum()
