"""From a plain state tensor to one that is placed as its parameter is: the only place that wraps a DTensor.

And the bytes of 16-bit integers: neither gloo nor NCCL moves those, so they leave the optimizer as int8 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashdist.sharding.dtensors import is_dtensor
from flashdist.sharding.local_shard import local as local_part
from flashdist.sharding.row_shard import RowShard


def place_like(parameter: Tensor, local: Tensor, global_shape: Sequence[int]) -> Tensor:
    """Give a local state tensor the placements of its parameter.

    Args:
        parameter: a DTensor, or a plain tensor (then ``local`` is returned as it is).
        local: this rank's part, contiguous.
        global_shape: the shape of the whole state tensor.

    Returns:
        A DTensor over the parameter's mesh whose local tensor is ``local`` itself. Uneven and empty shards are fine;
        no communication takes place.
    """
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    shape = torch.Size(global_shape)
    steps, running = [], 1
    for size in reversed(shape):
        steps.append(running)
        running *= max(size, 1)
    stride = tuple(reversed(steps))
    mesh, placements = parameter.device_mesh, parameter.placements
    if local.device.type not in (mesh.device_type, "meta"):
        # CPUOffloadPolicy keeps shards on the host in a mesh of GPUs, where from_local would copy them to the GPU.
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
        return DTensor(local, spec, requires_grad=False)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def as_bytes(tensor: Tensor) -> Tensor:
    """An int16 tensor seen as int8 ``[..., 2]``, in the same placements and the same memory; others unchanged."""
    if tensor.dtype != torch.int16:
        return tensor
    return _placed_as(tensor, local_part(tensor).unsqueeze(-1).view(torch.int8), (*tensor.shape, 2))


def from_bytes(tensor: Tensor) -> Tensor:
    """The inverse of :func:`as_bytes` for int8 ``[..., 2]``. A copy only where the bytes are not aligned."""
    part = local_part(tensor).contiguous()
    if part.storage_offset() % 2:
        part = part.clone()
    return _placed_as(tensor, part.view(torch.int16).squeeze(-1), tensor.shape[:-1])


def _placed_as(tensor: Tensor, part: Tensor, global_shape: Sequence[int]) -> Tensor:
    if isinstance(tensor, RowShard):
        return tensor.like(part, global_shape)
    return place_like(tensor, part, global_shape)
