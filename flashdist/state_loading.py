"""Check a state dict against an optimizer, and turn torch.optim's dense state into codes, before anything is
changed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
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

logger = logging.getLogger(__name__)

# Kept in every param group: the one place that DCP, FSDP and torch.save all carry along.
VERSION_KEY = "flashdist_format"
FORMAT_VERSION = 1
# Hyperparameters that torch's optimizers and ours share; what else torch keeps in a group says how it runs its step.
TORCH_HYPERPARAMETERS = (
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "initial_lr",
)  # fmt: skip
# Those that not every optimizer of ours has: they tell a param group's optimizer, whose name a state dict lacks.
_TELLING = ("betas", "eps", "momentum", "dampening", "nesterov", "decouple_lr")
# What an optimizer does with its weight decay, by whether it is decoupled.
_APPLIES = ("adds to the gradient (L2)", "applies to the weight (decoupled)")
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
        what = f"param group {g} of the state dict"
        new = own_settings(opt, saved, what) if version is not None else torch_settings(opt, group, saved, what)
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


def own_settings(opt: FlashOptimizer, saved: dict[str, Any], what: str) -> dict[str, Any]:
    """The hyperparameters that this optimizer takes from a param group of one of ours.

    Args:
        opt: the optimizer that loads.
        saved: the param group.
        what: how error messages call it.

    Raises:
        ValueError: another format version, another kind of optimizer, or a weight decay that means another thing.
    """
    version = saved.get(VERSION_KEY)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{what} has format version {version}, this release of flashdist reads {FORMAT_VERSION}: "
            "load it with the release that wrote it, or a newer one"
        )
    theirs, ours = ({k for k in _TELLING if k in settings} for settings in (saved, opt.defaults))
    if (theirs ^ ours) - {"decouple_lr"}:
        raise ValueError(
            f"{what} must have the keys {sorted(ours)} for {type(opt).__name__}, it has {sorted(theirs)}: it was saved "
            "by another kind of optimizer. Load it into one like that which saved it, or load the weights alone"
        )
    if theirs != ours:
        _other_decay(opt, "decouple_lr" in saved, saved, what)
    return {
        k: copy.deepcopy(v)
        for k, v in saved.items()
        if k not in ("params", "param_names") and (k in ours or k not in _TELLING)
    }


def _other_decay(opt: FlashOptimizer, decoupled: bool, saved: dict[str, Any], what: str) -> None:
    """Weight decay that the two apply differently: fine where there is none, which is said."""
    means = f"its optimizer {_APPLIES[decoupled]} and {type(opt).__name__} {_APPLIES[not decoupled]}"
    if saved.get("weight_decay") != 0:
        raise ValueError(
            f"{what} has weight_decay={saved.get('weight_decay')}, which {means}: the number would mean another thing. "
            "Load it into an optimizer of the class that saved it. To change over, set weight_decay to 0 in the "
            "param groups of that one's state_dict(), load this here, then set the weight_decay that you want"
        )
    logger.warning("%s has weight_decay=0, which was taken; another one %s", what, means)


def torch_settings(opt: FlashOptimizer, group: dict[str, Any], saved: dict[str, Any], what: str) -> dict[str, Any]:
    """The hyperparameters that a param group takes from one of torch.optim, as in :func:`own_settings`."""
    if saved.get("amsgrad"):
        raise ValueError(
            f"{what} is of an optimizer with amsgrad=True, which flashdist does not have: go on from the "
            "weights alone, or with torch.optim"
        )
    # torch before 2.7 does not say it of Adam and AdamW, whose groups are alike otherwise; of SGD there is one kind.
    decoupled = saved.get("decoupled_weight_decay", False if "momentum" in saved else None)
    if decoupled is not None and decoupled != ("decouple_lr" in opt.defaults) and saved.get("weight_decay", 0) != 0:
        logger.warning(
            "%s has weight_decay=%s, which torch's optimizer %s and %s %s: set the weight_decay that you want",
            what, saved["weight_decay"], _APPLIES[decoupled], type(opt).__name__, _APPLIES[not decoupled],
        )  # fmt: skip
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


def set_groups(groups: Sequence[dict[str, Any]], settings: Sequence[dict[str, Any]]) -> None:
    """Give param groups their loaded entries. A learning rate that is a tensor stays that tensor, with a new value: a
    CUDA graph or a compiled step has its address. Groups that share one and get different values get their own."""
    values: dict[Tensor, set[float]] = {}
    for group, loaded in zip(groups, settings, strict=True):
        for key in loaded:
            if isinstance(group.get(key), Tensor):
                values.setdefault(group[key], set()).add(float(loaded[key]))
    shared = {tensor for tensor, found in values.items() if len(found) > 1}
    for group, loaded in zip(groups, settings, strict=True):
        for key, value in loaded.items():
            if not isinstance(group.get(key), Tensor):
                group[key] = value
            elif group[key] in shared:
                group[key] = torch.full_like(group[key], float(value))
            else:
                group[key].fill_(float(value))


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
