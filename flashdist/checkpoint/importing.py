"""Optimizer state of torch.optim's optimizers, from wherever it was saved to, into one of flashdist's."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashdist.checkpoint.conversion import Conversion, plan_conversion
from flashdist.checkpoint.manifest import StoredTensor
from flashdist.checkpoint.names import ModelTensors
from flashdist.checkpoint.ranks import CheckpointError, Ranks
from flashdist.checkpoint.reading import Source
from flashdist.checkpoint.torch_source import TorchSource
from flashdist.modes import without_autograd
from flashdist.numerics.groups import group_layout
from flashdist.optimizer import FlashOptimizer
from flashdist.param_state import expected_entries

logger = logging.getLogger(__name__)

# Where training scripts keep the optimizer's state dict in what they give to torch.save.
_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states", "opt")


@without_autograd
def import_optimizer(source: str | os.PathLike[str] | dict[str, Any], model: nn.Module, opt: FlashOptimizer) -> None:
    """Take over the state of the torch.optim counterpart (AdamW for FlashAdamW, ...). Collective.

    Moments are encoded; corrections are 0, for the weights are the model's as they are. Nothing that a file contains is
    executed.

    Args:
        source: one of

            * a folder that torch.distributed.checkpoint has written (any number of ranks; tensors are read by name,
              each rank its own part; the hyperparameters stay this optimizer's),
            * a file of ``torch.save``, holding the optimizer's state dict itself or under ``optimizer``, ``optim``,
              ``opt`` or ``optimizer_state_dict`` (then hyperparameters are taken over too),
            * a state dict, with parameters by number (``torch.optim``'s own) or by name (``get_optimizer_state_dict``).
        model: whose parameters ``opt`` steps.
        opt: its state is replaced.

    Raises:
        CheckpointError: what cannot be read, or would run code.
        ValueError: state that is missing, or of other shapes; nothing was changed then.
    """
    names = ModelTensors(model)
    ranks = Ranks()
    with ranks.together():
        if isinstance(source, dict):
            state_dict = source
        elif Path(source).is_dir():
            _import_folder(TorchSource(Path(source)), names, opt)
            return
        else:
            state_dict = _find_state_dict(_load_file(Path(source)), source)
        opt.load_state_dict(_by_number(state_dict, names, opt))


def _load_file(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except Exception as error:  # unpickling and old formats fail in many ways
        raise CheckpointError(f"{path} cannot be read with torch.load(weights_only=True): {error}") from error


def _find_state_dict(loaded: Any, source: object) -> dict[str, Any]:
    candidates = [loaded, *(loaded.get(key) for key in _KEYS)] if isinstance(loaded, dict) else []
    for candidate in candidates:
        if isinstance(candidate, dict) and {"state", "param_groups"} <= candidate.keys():
            return candidate
    found = sorted(map(str, loaded)) if isinstance(loaded, dict) else type(loaded).__name__
    raise CheckpointError(
        f"{source} holds no optimizer's state dict: looked for it itself and under {_KEYS}, found {found}"
    )


def _by_number(state_dict: dict[str, Any], names: ModelTensors, opt: FlashOptimizer) -> dict[str, Any]:
    """A state dict by parameter names as one by numbers, in this optimizer's order."""
    groups = state_dict.get("param_groups", [])
    if not any(isinstance(name, str) for group in groups for name in group["params"]):
        return state_dict
    if len(groups) != len(opt.param_groups):
        raise ValueError(f"the state dict has {len(groups)} param groups, this optimizer {len(opt.param_groups)}")
    numbered: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for group, theirs in zip(opt.param_groups, groups, strict=True):
        ours = [names.name_of(p) for p in group["params"]]
        if sorted(ours) != sorted(theirs["params"]):
            raise ValueError(
                f"a param group holds {sorted(theirs['params'])} in the state dict and {sorted(ours)} here"
            )
        for i, name in enumerate(ours, number):
            if name in state_dict["state"]:
                numbered["state"][i] = state_dict["state"][name]
        numbered["param_groups"].append({**theirs, "params": list(range(number, number + len(ours)))})
        number += len(ours)
    return numbered


def _import_folder(source: Source, names: ModelTensors, opt: FlashOptimizer) -> None:
    stored = _states_by_parameter(source.tensors, set(names.parameters.values()))
    conversions: list[Conversion] = []
    missing = []
    for group in opt.param_groups:
        rule = opt._rule(group)
        for p in group["params"]:
            name = names.name_of(p)
            if name not in stored:
                if p.requires_grad:
                    missing.append(name)
                continue
            keys = stored[name]
            found = {key: source.tensors[full_name] for key, full_name in keys.items()}
            expected = expected_entries(p, group, rule, group_layout(p.shape))
            as_it_is = StoredTensor(p.dtype, tuple(p.shape), ())
            conversion = plan_conversion(name, p, expected, rule, found, keys, as_it_is, "")
            conversion.weight_source = None
            conversions.append(conversion)
    if not conversions:
        raise ValueError(
            f"the checkpoint has no optimizer state of the model's parameters, for instance of {missing[:3]}"
        )
    if missing:
        logger.warning("the checkpoint has no optimizer state of %s: they start afresh", missing)
    for group in opt.param_groups:
        for p in group["params"]:
            opt.state.pop(p, None)
    opt._forget_views()
    for conversion in conversions:
        p = conversion.parameter
        opt._state_of(p, opt._group_of(p))
        conversion.run(source, opt.state[p])
    opt._forget_views()


def _states_by_parameter(stored: Mapping[str, StoredTensor], parameters: set[str]) -> dict[str, dict[str, str]]:
    """Parameter to state key to stored name: names end in ``state.<parameter>.<key>``."""
    found: dict[str, dict[str, str]] = {}
    for full_name in stored:
        for place in re.finditer(r"(?<![^.])state\.", full_name):
            parameter, _, key = full_name[place.end() :].rpartition(".")
            if parameter in parameters:
                found.setdefault(parameter, {})[key] = full_name
                break
    return found
