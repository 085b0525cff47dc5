"""Check a state dict against an optimizer, and turn torch.optim's dense state into codes, before anything is
changed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdist.numerics.groups import group_layout
from flashdist.numerics.state_format import ERROR, SCALE_SUFFIX, STEP, encode_moment
from flashdist.param_state import allocate, expected_entries
from flashdist.sharding.local_shard import check_placements, local
from flashdist.sharding.placement import from_bytes

if TYPE_CHECKING:
    from flashdist.optimizer import FlashOptimizer

# Kept in every param group: the one place that DCP, FSDP and torch.save all carry along.
VERSION_KEY = "flashdist_format"
FORMAT_VERSION = 1
# Hyperparameters that torch's optimizers and ours share; what else torch keeps in a group says how it runs its step.
TORCH_HYPERPARAMETERS = (
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "initial_lr",
)  # fmt: skip
_OTHER_GROUPS = "build the optimizer with the parameters and param groups of the one that was saved"

States = dict[Tensor, "dict[str, Tensor] | None"]


def check_and_convert(opt: FlashOptimizer, state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], States]:
    """What load_state_dict is to put in place: per param group its new entries, per parameter its new state.

    The state is of this rank's part, in plain tensors. A parameter that the state dict has no state for gets None: it
    starts afresh.

    Raises:
        ValueError: naming the group or parameter, what was expected, what was found and the remedy.
    """
    saved = state_dict if isinstance(state_dict, dict) else {}
    saved_groups, saved_states = saved.get("param_groups"), saved.get("state")
    if saved_groups is None or saved_states is None:
        raise ValueError("not an optimizer's state dict: it needs the keys 'state' and 'param_groups'")
    if len(saved_groups) != len(opt.param_groups):
        raise ValueError(
            f"the state dict has {len(saved_groups)} param groups, this optimizer {len(opt.param_groups)}: "
            f"{_OTHER_GROUPS}"
        )
    groups: list[dict[str, Any]] = []
    states: States = {}
    for g, (group, saved) in enumerate(zip(opt.param_groups, saved_groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"param group {g} has {len(saved['params'])} parameters in the state dict, {len(group['params'])} "
                f"here: {_OTHER_GROUPS}"
            )
        version = saved.get(VERSION_KEY)
        new = _own_group(saved, version) if version is not None else _torch_group(group, saved)
        merged = {**group, **new}
        opt._check_group(merged)
        if merged["quantize"] and not group["quantize"]:
            for p in group["params"]:
                check_placements(opt._name(p), p, group_layout(p.shape))
        groups.append(new)
        for p, key in zip(group["params"], saved["params"], strict=True):
            state = saved_states.get(key)
            if not state:
                states[p] = None
            elif version is not None:
                states[p] = _check_state(opt, p, merged, state)
            else:
                states[p] = _encode_state(opt, p, merged, state)
    return groups, states


def _own_group(saved: dict[str, Any], version: Any) -> dict[str, Any]:
    if version != FORMAT_VERSION:
        raise ValueError(
            f"the state dict has format version {version}, this release of flashdist reads {FORMAT_VERSION}: "
            "load it with the release that wrote it, or a newer one"
        )
    return {k: copy.deepcopy(v) for k, v in saved.items() if k not in ("params", "param_names")}


def _torch_group(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    if saved.get("amsgrad"):
        raise ValueError(
            "the state dict is of an optimizer with amsgrad=True, which flashdist does not have: go on from the "
            "weights alone, or with torch.optim"
        )
    known = {k: copy.deepcopy(saved[k]) for k in TORCH_HYPERPARAMETERS if k in saved}
    return {k: v for k, v in known.items() if k in group or k == "initial_lr"}


def _check_state(opt: FlashOptimizer, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Tensor]:
    expected = expected_entries(p, group, opt._rule(group), group_layout(p.shape))
    parts = expected_entries(p, group, opt._rule(group), opt._partition.layout(p))
    name = opt._name(p)
    keys = [e.key for e in expected]
    if set(keys) != set(state):
        raise ValueError(
            f"the state of {name} ({p.dtype}) must have the keys {keys}, the state dict has {sorted(state)}: it was "
            "saved by another optimizer, for another weight dtype, or with other master_weight_bits or quantize. "
            "Load it into one like that which saved it"
        )
    own: dict[str, Tensor] = {}
    for entry, part in zip(expected, parts, strict=True):
        value = state[entry.key]
        if entry.dtype == torch.int16 and isinstance(value, Tensor) and value.dtype == torch.int8:
            value = from_bytes(value) if tuple(value.shape) == (*entry.shape, 2) else value
        if not isinstance(value, Tensor) or value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
            found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise ValueError(
                f"state[{entry.key!r}] of {name} must be {entry.dtype} of shape {entry.shape}, the state dict has "
                f"{found}: it belongs to another model, or something cast it on the way"
            )
        taken = local(value) if entry.key == STEP else opt._partition.take(p, value)
        if taken is None or tuple(taken.shape) != part.shape:
            raise ValueError(
                f"state[{entry.key!r}] of {name} is sharded differently from this optimizer's. Load it with "
                "torch.distributed.checkpoint, which reshards"
            )
        own[entry.key] = taken
    return own


def _encode_state(opt: FlashOptimizer, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Tensor]:
    """The dense state of a torch.optim optimizer -> this library's, with corrections of 0."""
    name = opt._name(p)
    rule = opt._rule(group)
    moments = [state.get(key) for key in rule.moments]
    for key, value in zip(rule.moments, moments, strict=True):
        if not isinstance(value, Tensor) or tuple(value.shape) != tuple(p.shape) or not value.is_floating_point():
            found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise ValueError(
                f"state[{key!r}] of {name} must be a floating-point tensor of its shape, the state dict has {found} "
                f"(keys: {sorted(state)}): it is not the state of this optimizer's torch.optim counterpart"
            )
    out: dict[str, Tensor] = {}
    layout, device = opt._partition.layout(p), local(p).device
    for entry in expected_entries(p, group, rule, layout):
        if entry.key == STEP:
            # torch's SGD does not count: its buffer is there from the first step on.
            step = state.get(STEP, float(bool(moments)))
            out[STEP] = torch.as_tensor(step, dtype=torch.float32).detach().reshape(())
        elif entry.key == ERROR:
            out[ERROR] = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
        elif entry.key in rule.moments:
            place = rule.moments.index(entry.key)
            taken = opt._partition.take(p, state[entry.key])
            if taken is None or tuple(taken.shape) != entry.shape:
                raise ValueError(f"state[{entry.key!r}] of {name} is sharded differently from the parameter")
            dense = taken.detach().to(device=device, dtype=torch.float32)
            if entry.dtype == torch.float32:
                out[entry.key] = dense.contiguous()
            else:
                out[entry.key], out[entry.key + SCALE_SUFFIX] = encode_moment(place, dense, layout)
    return out


def copy_state(opt: FlashOptimizer, p: Tensor, loaded: dict[str, Tensor]) -> None:
    """Copy checked state tensors of this rank's part into the optimizer's own, one at a time."""
    kept: dict[str, Tensor] = opt.state.get(p, {})
    alike = (
        local(kept[k]).dtype == v.dtype and local(kept[k]).shape == v.shape for k, v in loaded.items() if k in kept
    )
    if kept.keys() != loaded.keys() or not all(alike):
        group = opt.param_groups[opt._group_of(p)]
        kept = opt.state[p] = allocate(opt._name(p), p, group, opt._rule(group), opt._partition)
    for key, value in loaded.items():
        local(kept[key]).copy_(value)
