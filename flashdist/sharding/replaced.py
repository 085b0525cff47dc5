"""Optimizers that were built too early: their parameters are no longer those of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from flashdist.sharding.gradients import PLAIN

# fully_shard leaves this on the parameters that it puts shards in place of (torch 2.13; older releases leave no trace).
_REPLACED_BY_FULLY_SHARD = "_fsdp_orig_uid"


def check_not_replaced(params: Sequence[Tensor], name: Callable[[Tensor], str], first: bool = False) -> None:
    """Raise where fully_shard has put shards in place of parameters after the optimizer was built.

    Args:
        params: all parameters of the optimizer.
        name: how a message calls a parameter.
        first: a first step in which none of them has a gradient. Among several ranks that is taken for the sign of the
            same mistake, where all parameters are plain tensors.

    Raises:
        RuntimeError: naming the first such parameter.
    """
    for p in params:
        if type(p) in PLAIN and hasattr(p, _REPLACED_BY_FULLY_SHARD):
            raise RuntimeError(
                f"{name(p)} is not a parameter of the model any more: fully_shard has replaced it, so it never gets a "
                "gradient again. Build the optimizer after fully_shard."
            )
    if not first or not (dist.is_available() and dist.is_initialized()) or not any(p.requires_grad for p in params):
        return
    if {type(p) for p in params} <= PLAIN:
        raise RuntimeError(
            "step() found no gradient at all, and there was none before: the optimizer was probably built before the "
            "model was sharded or wrapped, and its parameters are no longer the model's. Build it after fully_shard; "
            "otherwise call backward() first."
        )
