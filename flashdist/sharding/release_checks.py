"""What gradient release refuses before it begins, because it could not be right."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flashdist.lazy import loaded_class
from flashdist.optimizer import FlashOptimizer
from flashdist.sharding.dtensors import is_dtensor
from flashdist.sharding.local_shard import local, sharded_mesh_dims
from flashdist.sharding.partition import AsPlaced


def check_arguments(opt: object, clip: str | None, max_norm: float | None, batch_elements: int | None) -> None:
    """Raise TypeError, ValueError or RuntimeError where these arguments make no sense."""
    if not isinstance(opt, FlashOptimizer):
        raise TypeError(f"gradient release needs one of flashdist's optimizers, got {type(opt).__name__}")
    if clip not in (None, "previous_norm"):
        raise ValueError(
            f'clip must be None or "previous_norm", got {clip!r}: the norm of all gradients is known only when all '
            "parameters have been stepped"
        )
    if (clip is None) != (max_norm is None):
        raise ValueError(f'clip="previous_norm" and max_norm belong together, got clip={clip!r}, max_norm={max_norm!r}')
    if max_norm is not None and not (0 < max_norm < math.inf):
        raise ValueError(f"max_norm must be a finite number above 0, got {max_norm!r}")
    if batch_elements is not None and batch_elements < 1:
        raise ValueError(f"batch_elements must be at least 1, got {batch_elements!r}")
    if not isinstance(opt._partition, AsPlaced):
        raise ValueError(
            "gradient release cannot be used with shard_states, where each rank steps a part of the replicated "
            "parameters after their gradients have been reduced. Shard the model with fully_shard (FSDP2) instead."
        )
    if opt._release is not None:
        raise RuntimeError("gradient release is enabled for this optimizer already; remove() the other handle first")


def check_model(model: nn.Module) -> None:
    """Raise where a wrapper reduces or keeps gradients in its own way."""
    fsdp1 = loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                "gradient release cannot be used with DistributedDataParallel: its gradients are complete before they "
                "are reduced, and come back afterwards. Shard the model with fully_shard (FSDP2)."
            )
        if fsdp1 is not None and isinstance(module, fsdp1):
            raise TypeError("gradient release does not take FSDP1: shard the model with fully_shard (FSDP2)")
        if type(module).__module__.partition(".")[0] == "deepspeed":
            raise TypeError(
                "gradient release cannot be used with DeepSpeed, which keeps and reduces gradients itself: use FSDP2"
            )


def released_names(model: nn.Module, opt: FlashOptimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order.

    Raises:
        ValueError: a parameter that is not the model's, that nobody reduces, or whose gradient is still on its way.
        RuntimeError: a parameter that has a gradient.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    params = opt._parameters()
    sharded = any(is_dtensor(p) and sharded_mesh_dims(p) for p in params)
    found = []
    for p in params:
        if p not in names:
            raise ValueError(
                f"{opt._name(p)} is not a parameter of this model: gradient release would never step it. Give it the "
                "model that the optimizer was built for, with all its parameters"
            )
        name = names[p]
        if p.grad is not None:
            raise RuntimeError(f"parameter {name} has a gradient: call opt.step() or opt.zero_grad() first")
        if sharded and not is_dtensor(p):
            raise ValueError(
                f"parameter {name} is not sharded, others are: nobody would reduce its gradient before it is stepped. "
                "Take it out of fully_shard's ignored_params, or freeze it and give it to another optimizer."
            )
        if is_dtensor(p) and local(p).device.type not in (p.device_mesh.device_type, "meta"):
            raise ValueError(
                f"parameter {name} is offloaded to {local(p).device}: its gradient may still be on its way when it "
                "counts as complete. Do not use FSDP2's CPUOffloadPolicy with gradient release."
            )
        found.append(name)
    return found
