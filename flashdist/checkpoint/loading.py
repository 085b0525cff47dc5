"""From a checkpoint to a model and an optimizer: everything is compared first, then read in place."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flashdist.checkpoint.contents import class_of, state_name
from flashdist.checkpoint.conversion import Conversion, plan_conversion
from flashdist.checkpoint.jsonable import from_json, tensor_names
from flashdist.checkpoint.manifest import MODEL, OPTIM, RNG, VALUES, Manifest, StoredTensor
from flashdist.checkpoint.names import ModelTensors
from flashdist.checkpoint.reading import Reader, Source, read_plain
from flashdist.checkpoint.rng import check_rng
from flashdist.numerics.groups import group_layout
from flashdist.optimizer import FlashOptimizer
from flashdist.param_state import expected_entries
from flashdist.state_loading import own_settings, set_groups, torch_settings

logger = logging.getLogger(__name__)
# These stay as the optimizer was built: what is stored otherwise is converted.
_OWN_SETTINGS = ("master_weight_bits", "quantize")


@dataclass
class LoadPlan:
    """What a load is going to do.

    Attributes:
        direct: stored name to the live tensor that is read in place (model).
        states: parameter to stored names of its state, where nothing is converted.
        conversions: parameters whose state or weight is stored in another format.
        fresh: parameters that have no state in the checkpoint.
        groups: new entries of each param group.
    """

    direct: dict[str, Tensor] = field(default_factory=dict)
    states: dict[Tensor, dict[str, str]] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    fresh: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)


def plan_load(manifest: Manifest, model: nn.Module, opt: torch.optim.Optimizer | None) -> LoadPlan:
    """Compare a checkpoint with a model and an optimizer. Nothing is changed.

    Raises:
        ValueError: listing what is missing, unexpected or of another shape or dtype.
    """
    names = ModelTensors(model)
    plan = LoadPlan()
    sources = _match_model(manifest, names)
    if opt is not None and manifest.optimizer is not None:
        _match_groups(manifest.optimizer, opt, names, plan)
        _match_states(manifest, opt, names, sources, plan)
    converted = {c.parameter for c in plan.conversions if c.weight_source is not None}
    wrong = []
    for name, tensor in names.by_name.items():
        stored = manifest.tensors[sources[name]]
        if tensor in converted:
            continue
        if stored.dtype != tensor.dtype:
            wrong.append(f"{name} is {tensor.dtype} here, {stored.dtype} in the checkpoint")
        plan.direct[sources[name]] = tensor.detach()
    if wrong:
        raise ValueError(
            f"the checkpoint's weights have other dtypes than the model's: {_some(wrong)}. Cast the model "
            "(flashdist.cast_model) as it was when it was saved, or load them through export_weights."
        )
    if plan.fresh:
        trainable = [names.name_of(p) for p in plan.fresh if p.requires_grad]
        if trainable:
            logger.warning("the checkpoint has no optimizer state of %s: they start afresh", _some(trainable))
    if opt is not None and manifest.optimizer is None:
        plan.fresh = [p for group in opt.param_groups for p in group["params"]]
        logger.info("the checkpoint holds weights alone: the optimizer starts afresh, corrections are 0")
    return plan


def _match_model(manifest: Manifest, names: ModelTensors) -> dict[str, str]:
    """Stored name of each of the model's tensors."""
    stored = {name.removeprefix(MODEL): t for name, t in manifest.tensors.items() if name.startswith(MODEL)}
    sources: dict[str, str] = {}
    used: dict[str, str] = {}
    missing, misshaped = [], []
    for name, tensor in names.by_name.items():
        source = name if name in stored else manifest.aliases.get(name)
        if source is None or source not in stored:
            missing.append(name)
            continue
        if source in used:
            raise ValueError(
                f"{used[source]} and {name} are tied in the checkpoint, but not in the model: tie them first"
            )
        used[source] = name
        sources[name] = MODEL + source
        if tuple(tensor.shape) != stored[source].shape:
            misshaped.append(f"{name} (checkpoint {stored[source].shape}, model {tuple(tensor.shape)})")
    unexpected = [name for name in stored if name not in used]
    tied = [f"{name} and {names.aliases[name]}" for name in unexpected if name in names.aliases]
    if tied:
        raise ValueError(f"{_some(tied)} are tied in the model, but not in the checkpoint")
    if missing or unexpected or misshaped:
        parts = (("missing in it", missing), ("unexpected in it", unexpected), ("of another shape", misshaped))
        listed = "; ".join(f"{what}: {_some(found)}" for what, found in parts if found)
        raise ValueError(f"the checkpoint is of another model, nothing was loaded. {listed}")
    return sources


def _some(found: Sequence[str], limit: int = 10) -> str:
    more = f" and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + more


def _match_groups(saved: dict[str, Any], opt: torch.optim.Optimizer, names: ModelTensors, plan: LoadPlan) -> None:
    if len(saved["param_groups"]) != len(opt.param_groups):
        raise ValueError(
            f"the checkpoint has {len(saved['param_groups'])} param groups, the optimizer {len(opt.param_groups)}"
        )
    ours = isinstance(opt, FlashOptimizer)
    if saved["flashdist"] and not ours:
        raise ValueError(
            f"the checkpoint holds the state of {saved['class']}, which {type(opt).__name__} cannot read: load it into "
            f"{saved['class']}, and use flashdist.checkpoint.torch_state_dict and export_weights to change over"
        )
    for i, (group, stored) in enumerate(zip(opt.param_groups, saved["param_groups"], strict=True)):
        here = [names.name_of(p) for p in group["params"]]
        there = [names.aliases.get(name, name) for name in stored["params"]]
        if sorted(here) != sorted(there):
            missing, unexpected = sorted(set(here) - set(there)), sorted(set(there) - set(here))
            raise ValueError(
                f"param group {i} holds other parameters in the checkpoint. Only here: {_some(missing) or 'none'}; "
                f"only there: {_some(unexpected) or 'none'}"
            )
        settings = from_json({k: v for k, v in stored.items() if k != "params"}, {})
        what = f"param group {i} of the checkpoint (of {saved.get('class', 'an unnamed class')})"
        if isinstance(opt, FlashOptimizer):
            if saved["flashdist"]:
                settings = own_settings(opt, settings, what)
                settings = {k: v for k, v in settings.items() if k not in _OWN_SETTINGS}
            else:
                settings = torch_settings(opt, group, settings, what)
            try:
                opt._check_group({**group, **settings})
            except (TypeError, ValueError) as error:
                raise ValueError(f"{what}: {error}") from error
        plan.groups.append(settings)


def _match_states(
    manifest: Manifest, opt: torch.optim.Optimizer, names: ModelTensors, sources: dict[str, str], plan: LoadPlan
) -> None:
    stored: dict[str, dict[str, StoredTensor]] = {}
    for full_name, tensor in manifest.tensors.items():
        if full_name.startswith(OPTIM):
            name, key = full_name.removeprefix(OPTIM).rsplit(".", 1)
            stored.setdefault(names.aliases.get(name, name), {})[key] = tensor
    for own, settings in zip(opt.param_groups, plan.groups, strict=True):
        group = {**own, **settings}  # as it is going to be: whether SGD keeps a momentum is such a setting
        for p in group["params"]:
            name = names.name_of(p)
            source = sources[name].removeprefix(MODEL)
            found = stored.pop(name, None) or stored.pop(source, None)
            if found is None:
                plan.fresh.append(p)
                continue
            keys = {key: state_name(source, key) for key in found}
            if not isinstance(opt, FlashOptimizer):
                plan.states[p] = keys
                continue
            rule = opt._rule(group)
            expected = {e.key: e for e in expected_entries(p, group, rule, group_layout(p.shape))}
            weight = manifest.tensors[sources[name]]
            same = expected.keys() == found.keys() and all(
                (e.dtype, e.shape) == (found[key].dtype, found[key].shape) for key, e in expected.items()
            )
            if same and weight.dtype == p.dtype:
                plan.states[p] = keys
            else:
                plan.conversions.append(
                    plan_conversion(name, p, list(expected.values()), rule, found, keys, weight, sources[name])
                )
    if stored:
        raise ValueError(
            f"the checkpoint has states of parameters that the optimizer does not have: {_some(sorted(stored))}"
        )


def execute(plan: LoadPlan, source: Source, opt: torch.optim.Optimizer | None) -> None:
    """Carry a plan out: read in place, convert what is stored otherwise, and set the param groups."""
    targets = dict(plan.direct)
    if opt is not None:
        if plan.groups:
            set_groups(opt.param_groups, plan.groups)
        for p, keys in plan.states.items():
            _make_room(opt, p, keys, source)
            targets.update({full_name: opt.state[p][key] for key, full_name in keys.items()})
        for p in plan.fresh:
            opt.state.pop(p, None)
    # Weights made under it, of a model that is only evaluated, can be written to under it alone.
    with torch.inference_mode(any(t.is_inference() for t in targets.values())), torch.no_grad():
        source.read(targets)
    if isinstance(opt, FlashOptimizer):
        for conversion in plan.conversions:
            _make_room(opt, conversion.parameter, {}, source)
            conversion.run(source, opt.state[conversion.parameter])
        for note in sorted({note for c in plan.conversions for note in c.notes}):
            examples = [c.name for c in plan.conversions if note in c.notes]
            logger.warning("%s: %d tensors (%s)", note, len(examples), _some(examples, 3))
        opt._forget_views()


def _make_room(opt: torch.optim.Optimizer, p: Tensor, keys: dict[str, str], source: Source) -> None:
    """State tensors for a parameter, where it has none of the right kind."""
    if isinstance(opt, FlashOptimizer):
        index = opt._group_of(p)
        group = opt.param_groups[index]
        entries = expected_entries(p, group, opt._rule(group), group_layout(p.shape))
        if opt.state.get(p, {}).keys() != {entry.key for entry in entries}:  # of other settings, of before the load
            opt.state.pop(p, None)
        opt._state_of(p, index)
        return
    for key, full_name in keys.items():
        stored = source.tensors[full_name]
        if stored.shape == tuple(p.shape) and p.dim() > 0:
            opt.state[p][key] = torch.zeros_like(p, dtype=stored.dtype)
        else:
            # torch keeps its step count on the CPU unless the step reads it on the device.
            group = next(g for g in opt.param_groups if any(q is p for q in g["params"]))
            on_device = group.get("capturable") or group.get("fused")
            opt.state[p][key] = torch.zeros(stored.shape, dtype=stored.dtype, device=p.device if on_device else "cpu")


def load_values(reader: Reader, key: str) -> Any:
    """``scheduler`` or ``extra`` as it was saved."""
    value = reader.manifest.values.get(key)
    names = tensor_names(value)
    tensors = read_plain(reader, [VALUES + name for name in names])
    return from_json(value, {name: tensors[VALUES + name] for name in names})


def scheduler_values(reader: Reader, scheduler: Any) -> Any:
    """``scheduler`` as it was saved, for a live one. Early releases saved a Counter as a dict, which MultiStepLR cannot
    step with: what the live one keeps now says what it must be.

    Raises:
        ValueError: no scheduler was saved, or one of another class.
    """
    manifest, live = reader.manifest, class_of(scheduler)
    if manifest.values.get("scheduler") is None:
        raise ValueError(
            "the checkpoint holds no scheduler's state: it was saved without one. Load without `scheduler`"
        )
    saved = manifest.values.get("scheduler_class", live)
    if saved != live:
        raise ValueError(
            f"the checkpoint holds the state of a scheduler of class {saved}, {live} was given: give one like that "
            "which was saved, or load without `scheduler`"
        )

    def mended(loaded: Any, kept: Any) -> Any:
        if type(loaded) is dict and isinstance(kept, Counter):
            return Counter(loaded)
        if type(loaded) is dict and isinstance(kept, dict):
            return {k: mended(v, kept.get(k)) for k, v in loaded.items()}
        if type(loaded) is list and isinstance(kept, list) and len(loaded) == len(kept):
            return [mended(v, k) for v, k in zip(loaded, kept, strict=True)]
        return loaded

    return mended(load_values(reader, "scheduler"), scheduler.state_dict())


def rng_states(reader: Reader, rank: int) -> dict[str, Tensor]:
    """States of the generators of a rank, empty where the checkpoint has none for it.

    Raises:
        ValueError: one of them is no state of its generator.
    """
    prefix = f"{RNG}{rank}."
    found = read_plain(reader, [name for name in reader.tensors if name.startswith(prefix)])
    states = {name.removeprefix(prefix): state for name, state in found.items()}
    check_rng(states)
    return states
