"""From a plain state tensor to one that is placed as its parameter is: the only place that wraps a DTensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size(global_shape)
    stride, running = [], 1
    for size in reversed(shape):
        stride.append(running)
        running *= max(size, 1)
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=tuple(reversed(stride))
    )
