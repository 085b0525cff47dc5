"""Between DeepSpeed's ZeRO checkpoints and flashdist's own: exact but for what the log names.

Weights, corrections, step counts and 1-D moments are copied as they are, and so are codes and scales wherever both
sides have the same groups. Two kinds of groups are encoded anew: those that a partition's border had cut, and those of
parameters whose row is no multiple of 32, because a partition knows no rows.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashdist.checkpoint.contents import state_name
from flashdist.checkpoint.folder import find
from flashdist.checkpoint.jsonable import from_json
from flashdist.checkpoint.loading import load_values
from flashdist.checkpoint.manifest import MODEL
from flashdist.checkpoint.names import ModelTensors
from flashdist.checkpoint.reading import Reader, open_checkpoint, read_plain
from flashdist.integrations.deepspeed_checkpoint import PAYLOAD, unpack
from flashdist.integrations.deepspeed_layout import cut
from flashdist.integrations.deepspeed_load import OPTIMIZER, check_groups, rank_files, read_codes
from flashdist.integrations.deepspeed_packed import Packed, pack
from flashdist.integrations.deepspeed_reshard import fill, fill_segment
from flashdist.integrations.deepspeed_state import FlatStepping
from flashdist.numerics.companding import GROUP
from flashdist.numerics.groups import GroupLayout, group_layout
from flashdist.numerics.rules import Rule
from flashdist.numerics.state_format import ERROR, SCALE_SUFFIX, STEP, decode_moment, encode_moment
from flashdist.optimizer import FlashOptimizer
from flashdist.state_loading import set_groups

logger = logging.getLogger(__name__)
PathLike = str | os.PathLike[str]


def _whole(name: str, shape: tuple[int, ...], rule: Rule, group: dict[str, Any]) -> Packed:
    """A parameter as if it were a partition of its own, with fresh state."""
    numel = math.prod(shape)
    return pack(torch.zeros(numel, dtype=torch.bfloat16), list(cut(name, shape, 0, numel, 0)), rule, group)


def _own_rows(layout: GroupLayout) -> bool:
    """Whether the groups of the parameter's rows are others than those of a partition."""
    return layout.grouped and bool(layout.row % GROUP)


@torch.no_grad()
def load_zero_checkpoint(folder: PathLike, model: nn.Module, opt: FlashOptimizer) -> None:
    """Load a ZeRO checkpoint of ours (stages 1 to 3, any number of ranks) into a plain model, without DeepSpeed.

    ``flashdist.checkpoint.save(path, model, opt)`` then makes a flashdist checkpoint of it.

    Args:
        folder: one with ``*_optim_states.pt`` files, as ``run/global_step100``.
        model: bf16, not sharded, with the names that DeepSpeed saw. Parameters of ``opt`` are overwritten; buffers and
            frozen parameters are in DeepSpeed's model file.
        opt: an optimizer of the same kind, with the same param groups.

    Raises:
        ValueError: no such files, or those of another model, optimizer or state format.
    """
    saved = [read_codes(file) for file in rank_files(folder)]
    if not saved or any(PAYLOAD not in part for part in saved):
        raise ValueError(f"{folder} holds no ZeRO checkpoint that was saved under a flashdist optimizer")
    sources = [unpack(partition) for part in saved for partition in part[PAYLOAD]]
    groups = check_groups(opt, (saved[0].get("base_optimizer_state") or saved[0][OPTIMIZER])["param_groups"])
    names = ModelTensors(model)
    anew: list[str] = []
    for index, group in enumerate(opt.param_groups):
        rule = opt._rule(group)
        for p in group["params"]:
            name = names.name_of(p)
            packed = _whole(name, tuple(p.shape), rule, group)
            if fill(packed, sources) or _own_rows(group_layout(p.shape)):
                anew.append(name)
            p.copy_(packed.weight.view(p.shape))
            opt._state_of(p, index)
            _put_state(opt.state[p], packed, group_layout(p.shape))
    set_groups(opt.param_groups, groups)
    _report(anew)


def _put_state(kept: dict[str, Tensor], packed: Packed, layout: GroupLayout) -> None:
    kept[STEP].copy_(packed.steps[0])
    parts = range(len(packed.segments))
    if ERROR in kept:
        kept[ERROR].copy_(torch.cat([packed.some(i, ERROR) for i in parts]).view(layout.shape))
    for place, key in enumerate(packed.moments):
        scales = kept.get(key + SCALE_SUFFIX)
        if scales is not None and _own_rows(layout):
            dense = packed.read(0, packed.weight.numel(), key).view(layout.shape)
            codes, new_scales = encode_moment(place, dense, layout)
        else:
            codes = torch.cat([packed.some(i, key) for i in parts]).view(layout.shape)
            if scales is None:
                new_scales = codes
            else:
                new_scales = torch.cat([packed.some(i, key + SCALE_SUFFIX) for i in parts]).view(layout.scale_shape)
        kept[key].copy_(codes)
        if scales is not None:
            scales.copy_(new_scales)


@torch.no_grad()
def load_flashdist_checkpoint(engine: Any, path: PathLike) -> Any:
    """Load a checkpoint of ``flashdist.checkpoint.save`` into a DeepSpeed engine (stages 1 to 3, any number of ranks).

    Every rank calls it, and reads a parameter at a time. The generators' random states are not restored.

    Args:
        engine: what ``deepspeed.initialize`` has returned.
        path: the checkpoint's folder.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
        ValueError: the checkpoint is of another model, optimizer or state format.
    """
    opt, zero = engine.basic_optimizer, engine.optimizer
    if not isinstance(opt, FlatStepping):
        raise ValueError(
            "load_flashdist_checkpoint is for ZeRO stages 1 to 3; at stage 0 use flashdist.checkpoint.load"
        )
    folder = find(Path(os.path.realpath(path)))
    reader = Reader(folder, open_checkpoint(folder))
    described = reader.manifest.optimizer or {}
    wanted = type(opt).__name__
    if described.get("class") != wanted:
        raise ValueError(f"the checkpoint is of the optimizer {described.get('class')}, this is {wanted}")
    groups = check_groups(opt, [from_json(group, {}) for group in described["param_groups"]])
    if hasattr(zero, "checkpoint_event_prologue"):
        zero.checkpoint_event_prologue()
    stepped = _fill_partitions(opt, reader)
    set_groups(opt.param_groups, groups)
    _load_rest(engine, reader, stepped)
    for partition in opt.partitions.values():
        partition.trust()
    zero._weights_loaded()
    if hasattr(zero, "checkpoint_event_epilogue"):
        zero.checkpoint_event_epilogue()
    if engine.zero_optimization_stage() < 3:
        zero.update_lp_params()
    return load_values(reader, "extra")


def _fill_partitions(opt: FlatStepping, reader: Reader) -> set[str]:
    names: set[str] = set()
    anew: set[str] = set()
    for partition in opt.partitions.values():
        target = partition.state(opt)
        name, source = "", target
        for t, segment in enumerate(target.segments):
            if segment.name != name:
                name = segment.name
                source = _read_whole(reader, name, segment.shape, opt._rule(partition.group), partition.group)
            fill_segment(target, t, [(source, i) for i in range(len(source.segments))])
            names.add(name)
            if _own_rows(group_layout(segment.shape)):
                anew.add(name)
    _report(sorted(anew))
    return names


def _read_whole(reader: Reader, name: str, shape: tuple[int, ...], rule: Rule, group: dict[str, Any]) -> Packed:
    """One parameter of a flashdist checkpoint on the grid of partitions."""
    prefix = state_name(name, "")
    keys = {full.removeprefix(prefix): full for full in reader.tensors if full.startswith(prefix)}
    keys = {key: full for key, full in keys.items() if "." not in key}
    if MODEL + name not in reader.tensors or STEP not in keys:
        raise ValueError(f"the checkpoint has no parameter {name} with a state: it is of another model")
    found = read_plain(reader, [MODEL + name, *keys.values()])
    state = {key: found[full] for key, full in keys.items()}
    weight, layout = found[MODEL + name], group_layout(shape)
    packed = _whole(name, shape, rule, group)
    expected = {STEP, *(key for place in packed.places for key in place)}
    if tuple(weight.shape) != shape or weight.dtype != torch.bfloat16 or set(state) != expected:
        raise ValueError(
            f"parameter {name} is {weight.dtype} of shape {tuple(weight.shape)} with the state {sorted(state)} in the "
            f"checkpoint, here bfloat16 of shape {shape} with {sorted(expected)}: it is of another model, or saved "
            "with other master_weight_bits or quantize"
        )
    packed.weight.copy_(weight.view(-1))
    packed.steps.fill_(float(state[STEP]))
    for i, segment in enumerate(packed.segments):
        part = slice(segment.start, segment.stop)
        for key in (ERROR, *packed.moments):
            if key in state:
                _put_part(packed, i, key, state, layout, part)
    return packed


def _put_part(packed: Packed, i: int, key: str, state: Mapping[str, Tensor], layout: GroupLayout, part: slice) -> None:
    scales = state.get(key + SCALE_SUFFIX)
    if scales is not None and _own_rows(layout):
        dense = decode_moment(packed.moments.index(key), state[key], scales, layout)
        packed.set_moment(i, key, dense.reshape(-1)[part])
        return
    target = packed.some(i, key)
    if target.dtype != state[key].dtype:
        raise ValueError(f"state {key!r} is {state[key].dtype} in the checkpoint, {target.dtype} here")
    target.copy_(state[key].view(-1)[part])
    if scales is not None:
        first = packed.segments[i].first_group
        kept = packed.some(i, key + SCALE_SUFFIX)
        kept.copy_(scales.view(-1)[first : first + kept.numel()])


def _load_rest(engine: Any, reader: Reader, stepped: set[str]) -> None:
    """Buffers, and parameters that are not trained."""
    rest: dict[str, Tensor] = dict(engine.module.named_buffers())
    owned = {name for name, p in engine.module.named_parameters() if p.requires_grad} | stepped
    frozen = {name: p for name, p in engine.module.named_parameters() if name not in owned}
    if frozen and engine.zero_optimization_stage() == 3:
        raise ValueError(f"frozen parameters are not loaded under ZeRO stage 3: {sorted(frozen)[:3]}")
    for name, tensor in {**rest, **frozen}.items():
        if MODEL + name in reader.tensors:
            tensor.copy_(read_plain(reader, [MODEL + name])[MODEL + name])


def _report(anew: list[str]) -> None:
    if anew:
        logger.warning("groups that differ between a partition and a parameter were encoded anew: %s", ", ".join(anew))
