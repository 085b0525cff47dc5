"""What a checkpoint holds: the live tensors of a model and its optimizer by name, and the rest as JSON.

Names on disk: ``model.<name>`` for weights and buffers, ``optim.<parameter>.<key>`` for ``opt.state[p][key]``,
``rng.<rank>.<generator>``, ``values.<...>`` for tensors in the scheduler's state and in ``extra``.
"""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from flashdist.checkpoint.jsonable import to_json
from flashdist.checkpoint.manifest import MODEL, OPTIM, RNG, VALUES, Manifest
from flashdist.checkpoint.names import ModelTensors
from flashdist.checkpoint.ranks import Ranks
from flashdist.checkpoint.rng import rng_tensors
from flashdist.optimizer import FlashOptimizer
from flashdist.plain_numbers import plain, plain_settings
from flashdist.version import __version__


def state_name(parameter: str, key: str) -> str:
    """Name on disk of a state tensor."""
    return f"{OPTIM}{parameter}.{key}"


def collect(
    model: nn.Module, opt: torch.optim.Optimizer | None, scheduler: Any, extra: Any, ranks: Ranks
) -> tuple[dict[str, Any], Manifest]:
    """Everything to save, not copied: tensors by their names on disk, and a manifest without files and tensors.

    Raises:
        ValueError: a parameter that the model does not have, or one on the meta device.
        TypeError: a value of a type that would not come back as it was.
    """
    names = ModelTensors(model)
    tensors: dict[str, Any] = {MODEL + name: _materialised(name, t) for name, t in names.by_name.items()}
    described = None
    if opt is not None:
        described = _describe_optimizer(opt, names)
        tensors.update(optimizer_tensors(opt, names))
    tensors.update({f"{RNG}{ranks.rank}.{name}": state for name, state in rng_tensors().items()})
    values: dict[str, Any] = {}
    schedule = None if scheduler is None else _plain_schedule(scheduler.state_dict())
    for key, value in (("scheduler", schedule), ("extra", extra)):
        found: dict[str, Tensor] = {}
        values[key] = to_json(value, key, found)
        tensors.update({VALUES + name: tensor for name, tensor in found.items()})
    if scheduler is not None:
        values["scheduler_class"] = class_of(scheduler)
    manifest = Manifest(
        world_size=ranks.size,
        strategy=strategy_of(tensors, ranks.size),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"flashdist": __version__, "torch": torch.__version__, "python": platform.python_version()},
        aliases=dict(names.aliases),
        optimizer=described,
        values=values,
    )
    return tensors, manifest


def optimizer_tensors(opt: torch.optim.Optimizer, names: ModelTensors) -> dict[str, Any]:
    """The live state tensors of an optimizer by their names on disk; state is allocated where there was none."""
    if isinstance(opt, FlashOptimizer):
        opt._allocate_all()
        opt._drop_stale_corrections()
    found: dict[str, Any] = {}
    for p in parameters_of(opt):
        for key, value in opt.state.get(p, {}).items():
            if isinstance(value, Tensor):
                found[state_name(names.name_of(p), key)] = value
            elif value is not None:
                raise TypeError(f"the state {key!r} of {names.name_of(p)} is no tensor but a {type(value).__name__}")
    return found


def parameters_of(opt: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of an optimizer in order."""
    return [p for group in opt.param_groups for p in group["params"]]


def _describe_optimizer(opt: torch.optim.Optimizer, names: ModelTensors) -> dict[str, Any]:
    groups = []
    for i, group in enumerate(opt.param_groups):
        found: dict[str, Tensor] = {}
        settings = {k: _number(v) for k, v in plain_settings(group).items() if k not in ("params", "param_names")}
        described = to_json(settings, f"param_groups.{i}", found)
        if found:
            raise TypeError(f"param group {i} holds tensors with more than one element: {sorted(found)}")
        groups.append({**described, "params": [names.name_of(p) for p in group["params"]]})
    return {"class": type(opt).__name__, "flashdist": isinstance(opt, FlashOptimizer), "param_groups": groups}


def class_of(scheduler: Any) -> str:
    """The class of a scheduler, and of those that it consists of: ``SequentialLR(LinearLR, CosineAnnealingLR)``."""
    parts = getattr(scheduler, "_schedulers", None)
    inner = f"({', '.join(map(class_of, parts))})" if isinstance(parts, list | tuple) else ""
    return type(scheduler).__name__ + inner


def _plain_schedule(value: Any) -> Any:
    """A scheduler's state with NumPy's numbers as Python's, where no step can tell them apart.

    Milestones and bounds are often NumPy's; torch's own schedulers never make one. A number of fewer bits than Python's
    stays, and is refused: it makes results of as few bits.
    """
    if isinstance(value, dict):
        filled = value.copy()  # of the same kind: milestones are a Counter
        filled.clear()
        filled.update({_plain_schedule(k): _plain_schedule(v) for k, v in value.items()})
        return filled
    if type(value) in (list, tuple):
        return type(value)(map(_plain_schedule, value))
    if type(value).__module__ == "numpy" and type(value).__name__ not in ("float16", "float32", "longdouble"):
        return plain(value)
    return value


def _number(value: Any) -> Any:
    """A learning rate may be a 0-d tensor: its value."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _materialised(name: str, tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is on the meta device: materialise the model first (model.to_empty)")
    return tensor.detach()


def strategy_of(tensors: dict[str, Any], world_size: int) -> str:
    """How ranks share the tensors, in a word or two."""
    if world_size == 1:
        return "single"
    kinds = {_kind(t) for name, t in tensors.items() if name.startswith((MODEL, OPTIM))} - {"plain"}
    return "+".join(sorted(kinds)) or "ddp"


def _kind(tensor: Any) -> str:
    if not isinstance(tensor, DTensor):
        return "plain" if type(tensor) in (Tensor, nn.Parameter) or tensor.dim() == 0 else "ddp_zero1"
    sharded = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    if tensor.device_mesh.ndim == 1:
        return "fsdp2" if sharded else "replicated"
    if len(sharded) > 1 or any(type(p).__name__ == "_StridedShard" for p in tensor.placements):
        return "fsdp2_tp"
    return "hsdp" if any(isinstance(p, Replicate) for p in tensor.placements) else "fsdp2"
