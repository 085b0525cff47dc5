"""Gradients placed as their parameters are, so that local shards of both are the same elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

from flashdist.sharding.dtensors import is_dtensor

PLAIN = {Tensor, Parameter}
_LAYOUT = attrgetter("layout")


def all_plain(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether none of them is a DTensor (or another subclass)."""
    return set(map(type, grads)) | set(map(type, params)) <= PLAIN


def placed_gradients(params: Sequence[Tensor], grads: Sequence[Tensor], name: Callable[[Tensor], str]) -> list[Tensor]:
    """Each gradient as :func:`placed_gradient` gives it."""
    if all_plain(params, grads) and set(map(_LAYOUT, grads)) <= {torch.strided}:
        return list(grads)
    return [placed_gradient(p, g, name) for p, g in zip(params, grads, strict=True)]


def placed_gradient(p: Tensor, grad: Tensor, name: Callable[[Tensor], str]) -> Tensor:
    """The gradient in the placements of its parameter: itself where it has them, as from FSDP2.

    Tensor parallelism leaves some as partial sums (a replicated norm weight between sequence-parallel layers); these
    are redistributed, which is a collective call, as in torch's own optimizers.

    Args:
        p: the parameter.
        grad: its gradient, of the same global shape.
        name: how a message calls a parameter.

    Raises:
        RuntimeError: the gradient is sparse; one is a DTensor and the other is not, or they lie on different meshes.
    """
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"{name(p)} has a sparse gradient, which these optimizers do not take. Build the embedding with "
            "sparse=False, or give this parameter to torch.optim.SparseAdam."
        )
    if not is_dtensor(p) and not is_dtensor(grad):
        return grad
    if not is_dtensor(p) or not is_dtensor(grad) or p.device_mesh != grad.device_mesh:
        raise RuntimeError(
            f"the gradient of {name(p)} is {_described(grad)}, the parameter {_described(p)}: this rank's elements of "
            "the two are not the same. Give the gradient the parameter's mesh and placements (distribute_tensor)."
        )
    if grad.placements == p.placements:
        return grad
    return grad.redistribute(p.device_mesh, p.placements)


def _described(tensor: Tensor) -> str:
    if is_dtensor(tensor):
        return f"a DTensor on {tensor.device_mesh}"
    return "a plain tensor"
