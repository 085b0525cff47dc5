"""State that is stored in another format than the optimizer keeps it in.

That is: dense moments of torch's optimizers, other ``master_weight_bits``, ``quantize`` or weight dtypes. It is done
one parameter at a time, so that memory stays at one tensor more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from flashdist.checkpoint.manifest import StoredTensor
from flashdist.checkpoint.reading import Source, read_plain
from flashdist.numerics.groups import GroupLayout, group_layout
from flashdist.numerics.rules import Rule
from flashdist.numerics.state_format import (
    ERROR,
    MOMENT_CODE_DTYPES,
    MOMENT_SCALE_DTYPES,
    SCALE_SUFFIX,
    STEP,
    Entry,
    decode_moment,
    encode_moment,
)
from flashdist.numerics.weight_split import CORRECTION_DTYPES, SPLIT_DTYPES, join, split
from flashdist.sharding.local_shard import local
from flashdist.sharding.placement import place_like

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Elements that are converted at a time.
_CHUNK = 1 << 19


@dataclass
class Conversion:
    """How one parameter's stored state becomes the optimizer's.

    Attributes:
        name: the parameter's.
        parameter: itself.
        rule: its update rule, for the names of moments.
        keys: stored state key to stored name.
        weight_source: stored name of the weight where weight and correction change together, else None.
        notes: what to say in the log.
    """

    name: str
    parameter: Tensor
    rule: Rule
    keys: dict[str, str]
    weight_source: str | None
    notes: list[str] = field(default_factory=list)

    @torch.no_grad()
    def run(self, source: Source, state: Mapping[str, Tensor]) -> None:
        """Read, convert and write into the parameter and its live state tensors."""
        if STEP in self.keys:
            step = read_plain(source, [self.keys[STEP]])[self.keys[STEP]]
            state[STEP].copy_(step.reshape(()))
        else:
            state[STEP].fill_(float(bool(self.rule.moments)))
        if self.weight_source is not None:
            self._convert_weight(source, state.get(ERROR))
        elif ERROR in state and ERROR in self.keys:
            source.read({self.keys[ERROR]: state[ERROR]})
        elif ERROR in state:
            state[ERROR].zero_()
        for place, moment in enumerate(self.rule.moments):
            self._convert_moment(source, place, moment, state)

    def _convert_weight(self, source: Source, error: Tensor | None) -> None:
        assert self.weight_source is not None
        p, stored_error = self.parameter, self.keys.get(ERROR)
        weight = _like(p, source.tensors[self.weight_source].dtype)
        sources = {self.weight_source: weight}
        lo = None
        if stored_error is not None:
            lo = _like(p, source.tensors[stored_error].dtype)
            sources[stored_error] = lo
        source.read(sources)
        new_lo = None if error is None else _like(p, error.dtype)
        parts = [t if t is None else local(t).view(-1) for t in (weight, lo, new_lo)]
        target = local(p).detach()
        hi = torch.empty(target.numel(), dtype=target.dtype, device=target.device)
        for begin in range(0, target.numel(), _CHUNK):
            old, old_lo, out_lo = (None if t is None else t[begin : begin + _CHUNK] for t in parts)
            assert old is not None
            master = old.to(torch.float32) if old_lo is None else join(old, old_lo)
            if out_lo is None:
                hi[begin : begin + _CHUNK] = master.to(target.dtype)
            else:
                hi[begin : begin + _CHUNK], out_lo[:] = split(master.contiguous(), target.dtype, out_lo.dtype)
        target.copy_(hi.view(target.shape))
        if error is not None and new_lo is not None:
            _assign(error, new_lo)

    def _convert_moment(self, source: Source, place: int, moment: str, state: Mapping[str, Tensor]) -> None:
        target, scale_key = state[moment], moment + SCALE_SUFFIX
        stored = source.tensors[self.keys[moment]]
        if stored.dtype == target.dtype:
            names = {self.keys[moment]: target}
            if scale_key in state:
                names[self.keys[scale_key]] = state[scale_key]
            source.read(names)
            return
        kept = torch.empty_like(target, dtype=stored.dtype)
        layout = _rows_of(self.parameter, local(kept))
        if scale_key in state:
            source.read({self.keys[moment]: kept})
            codes, scales = encode_moment(place, local(kept).to(torch.float32).view(layout.shape), layout)
            local(target).copy_(codes.view(local(target).shape))
            local(state[scale_key]).copy_(scales.view(local(state[scale_key]).shape))
        elif scale_key in self.keys:
            p = self.parameter
            whole = group_layout(p.shape)
            scales = torch.empty(
                layout.scale_shape, dtype=source.tensors[self.keys[scale_key]].dtype, device=kept.device
            )
            shaped = scales.view(whole.of_shard(local(kept).shape).scale_shape)
            placed = place_like(p, shaped, whole.scale_shape)
            source.read({self.keys[moment]: kept, self.keys[scale_key]: placed})
            dense = decode_moment(place, local(kept).view(layout.shape), scales, layout)
            local(target).copy_(dense.view(local(target).shape))
        else:
            source.read({self.keys[moment]: kept})
            local(target).copy_(local(kept))


def plan_conversion(
    name: str,
    p: Tensor,
    expected: list[Entry],
    rule: Rule,
    found: dict[str, StoredTensor],
    keys: dict[str, str],
    weight: StoredTensor,
    weight_name: str,
) -> Conversion:
    """Check that a parameter's stored state can become what is expected of it.

    Raises:
        ValueError: it is of another optimizer, or of other shapes.
    """
    layout = group_layout(p.shape)
    by_key = {entry.key: entry for entry in expected}
    notes = []
    allowed = {STEP, ERROR, *rule.moments, *(m + SCALE_SUFFIX for m in rule.moments)}
    if not set(rule.moments) <= set(found) or not set(found) <= allowed:
        raise ValueError(
            f"the checkpoint's state of {name} has the entries {sorted(found)}, this optimizer keeps "
            f"{[e.key for e in expected]}: it was saved by another kind of optimizer"
        )
    for place, moment in enumerate(rule.moments):
        stored, scale = found[moment], found.get(moment + SCALE_SUFFIX)
        if scale is None:
            fits = stored.dtype in _FLOATS
        else:
            kinds = (MOMENT_CODE_DTYPES[place], MOMENT_SCALE_DTYPES[place])
            fits = layout.grouped and scale.shape == layout.scale_shape and (stored.dtype, scale.dtype) == kinds
        if not fits or stored.shape != tuple(p.shape):
            scales = "" if scale is None else f", its scales {_shown(scale)}"
            raise ValueError(
                f"the checkpoint's {moment} of {name} is {_shown(stored)}{scales}: no state of a parameter of shape "
                f"{tuple(p.shape)}"
            )
        if moment + SCALE_SUFFIX in by_key and scale is None:
            notes.append("dense moments were encoded to 8 bits")
        elif moment + SCALE_SUFFIX not in by_key and scale is not None:
            notes.append("8-bit moments were decoded to fp32 (quantize=False)")
    _check_step_and_correction(name, p, found, weight)
    error, wanted = found.get(ERROR), by_key.get(ERROR)
    before = (weight.dtype, None if error is None else error.dtype)
    after = (p.dtype, None if wanted is None else wanted.dtype)
    if before == after:
        return Conversion(name, p, rule, keys, None, notes)
    if weight.dtype != p.dtype and weight.dtype in SPLIT_DTYPES and p.dtype in SPLIT_DTYPES:
        raise ValueError(
            f"{name} is {weight.dtype} in the checkpoint and {p.dtype} here: cast the model as it was saved"
        )
    notes.append(f"master weights were converted from {_described(*before)} to {_described(*after)}")
    return Conversion(name, p, rule, keys, weight_name, notes)


def _check_step_and_correction(name: str, p: Tensor, found: dict[str, StoredTensor], weight: StoredTensor) -> None:
    step, error = found.get(STEP), found.get(ERROR)
    if step is not None and (math.prod(step.shape) != 1 or step.dtype.is_complex or step.dtype == torch.bool):
        raise ValueError(f"the checkpoint's step of {name} is {_shown(step)}: it must be one number")
    if error is not None and not (
        error.shape == tuple(p.shape) and error.dtype in CORRECTION_DTYPES.values() and weight.dtype in SPLIT_DTYPES
    ):
        raise ValueError(
            f"the checkpoint's correction of {name} is {_shown(error)}, beside a weight that is {_shown(weight)}: the "
            "two make no master weight"
        )


def _shown(stored: StoredTensor) -> str:
    return f"{str(stored.dtype).removeprefix('torch.')} of shape {stored.shape}"


def _described(weight: torch.dtype, error: torch.dtype | None) -> str:
    name = str(weight).removeprefix("torch.")
    return name if error is None else f"{name} with {str(error).removeprefix('torch.')} corrections"


def _like(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, of a parameter's shape and placements."""
    shard = local(p)
    return place_like(p, torch.empty(shard.shape, dtype=dtype, device=shard.device), p.shape)


def _rows_of(p: Tensor, part: Tensor) -> GroupLayout:
    """The layout of a part of a parameter's rows, seen as a matrix; of a tensor without groups, as one row."""
    layout = group_layout(p.shape)
    if not layout.grouped:
        return GroupLayout(tuple(part.shape), None)
    return GroupLayout((part.numel() // max(layout.row, 1), layout.row), 1)


def _assign(error: Tensor, value: Tensor) -> None:
    """Copy a correction of a parameter's extent into the live one, of which a rank may hold some rows only."""
    if isinstance(value, DTensor) or type(error) is Tensor:
        local(error).copy_(local(value))
        return
    for chunk in error.__create_chunk_list__():  # type: ignore[attr-defined]
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        error.__get_tensor_shard__(MetadataIndex("", chunk.offsets)).copy_(value[box])  # type: ignore[attr-defined]
