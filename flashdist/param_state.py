"""The state of one parameter: allocated like the parameter is placed, checked, and viewed the way the kernels take
it."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor

from flashdist.kernels.backend import ParamState
from flashdist.numerics.fingerprint import drop_stale, num_tiles
from flashdist.numerics.groups import GroupLayout, group_layout
from flashdist.numerics.rules import Rule
from flashdist.numerics.state_format import ERROR, SCALE_SUFFIX, STEP, Entry, state_format
from flashdist.numerics.weight_split import join
from flashdist.sharding.local_shard import check_placements, is_meta, local
from flashdist.sharding.partition import Partition

_REMEDY = (
    "Restore the state with load_state_dict, and do not change master_weight_bits, quantize or the parameter's dtype "
    "after its first step."
)
# Elements that join_weight() joins at a time.
JOIN_CHUNK = 1 << 22
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_parameter(name: str, p: Tensor, quantize: bool) -> None:
    """Refuse what cannot be stepped. ``quantize``: whether its moments are to be kept as codes.

    Raises:
        TypeError: an FSDP1 flat parameter, or a dtype other than bf16, fp16 and fp32.
        ValueError: placements that are no shards or would cut a group.
        RuntimeError: a parameter made under torch.inference_mode.
    """
    if p.is_inference():
        raise RuntimeError(
            f"{name} was made under torch.inference_mode, so it can never be trained. Build, cast and load the model "
            "outside of it (torch.inference_mode(False) inside)"
        )
    # The second: one of the model's own parameters, which FSDP1 makes a view of such (use_orig_params=True).
    if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        raise TypeError(
            f"{name} is a flat parameter of FSDP1 or a piece of one, which hides the shapes that 8-bit groups need. "
            "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead."
        )
    if p.dtype not in WEIGHT_DTYPES:
        raise TypeError(
            f"{name} is {p.dtype}: these optimizers take bfloat16, float16 and float32 parameters. "
            "Cast the model (model.float(), then flashdist.cast_model) or leave this parameter out."
        )
    check_placements(name, p, group_layout(p.shape), quantize)


def expected_entries(p: Tensor, group: dict[str, Any], rule: Rule, layout: GroupLayout) -> list[Entry]:
    """The state tensors of a parameter under the settings of its param group, with the shapes of ``layout``."""
    return state_format(rule, layout, p.dtype, group["master_weight_bits"], group["quantize"])


def allocate(name: str, p: Tensor, group: dict[str, Any], rule: Rule, partition: Partition) -> dict[str, Tensor]:
    """Fresh state, all zeros, of this rank's part of the parameter and on its device.

    Raises:
        RuntimeError: where the parameter is on the meta device.
    """
    if is_meta(p):
        raise RuntimeError(
            f"{name} is on the meta device, so its state cannot be allocated. Materialise it first "
            "(model.to_empty(device=...) and initialise or load the weights)."
        )
    state = {}
    for whole, part in zip(
        expected_entries(p, group, rule, group_layout(p.shape)),
        expected_entries(p, group, rule, partition.layout(p)),
        strict=True,
    ):
        tensor = torch.zeros(part.shape, dtype=part.dtype, device=local(p).device)
        state[whole.key] = tensor if whole.key == STEP else partition.wrap(p, tensor, whole.shape)
    return state


def view(
    name: str,
    p: Tensor,
    kept: dict[str, Tensor],
    group: dict[str, Any],
    index: int,
    rule: Rule,
    partition: Partition,
) -> ParamState:
    """The kernels' view of ``opt.state[p]``, after a check that it has the format of its param group.

    Raises:
        ValueError: naming the parameter, the entry, what was expected and found, and the remedy.
    """
    layout, device = partition.layout(p), local(p).device
    tensors = {key: local(value) for key, value in kept.items()}
    expected = expected_entries(p, group, rule, layout)
    if len(expected) != len(tensors):
        raise ValueError(
            f"the state of {name} has the keys {sorted(tensors)}, its settings ask for {[e.key for e in expected]}. "
            f"{_REMEDY}"
        )
    for entry in expected:
        value = tensors.get(entry.key)
        if value is None or value.dtype != entry.dtype or tuple(value.shape) != entry.shape:
            found = "nothing" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
            raise ValueError(
                f"state[{entry.key!r}] of {name} must be {entry.dtype} of shape {entry.shape}, found {found}. {_REMEDY}"
            )
        if value.device != device or not value.is_contiguous():
            raise ValueError(
                f"state[{entry.key!r}] of {name} must be contiguous and on {device}, where the parameter is. "
                "Move the model first, then build the optimizer or load its state."
            )
    correction = tensors.get(ERROR)
    fingerprint = None
    if correction is not None:
        fingerprint = torch.zeros(num_tiles(layout.num_groups), dtype=torch.int32, device=device)
    return ParamState(
        rule=rule,
        layout=layout,
        group=index,
        step=tensors[STEP],
        correction=correction,
        moments=tuple(tensors[name] for name in rule.moments),
        scales=tuple(tensors[name + SCALE_SUFFIX] for name in rule.moments if name + SCALE_SUFFIX in tensors),
        fingerprint=fingerprint,
        weight_dtype=p.dtype,
    )


def same_state(old: ParamState, new: ParamState) -> bool:
    """Whether two views show the same tensors in the same role; the older one has the fingerprints."""
    same = old.rule is new.rule and old.layout == new.layout and old.group == new.group
    mine, theirs = ((s.step, s.correction, *s.moments, *s.scales) for s in (old, new))
    return same and len(mine) == len(theirs) and all(map(is_, mine, theirs))


def join_weight(state: ParamState | None, weight: Tensor) -> Tensor:
    """The fp32 master weight of a part: weight and correction joined, where a correction is there and fits.

    Args:
        weight: plain, contiguous.

    Returns:
        A new fp32 tensor of the weight's shape.
    """
    out = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    if state is None or state.correction is None or state.fingerprint is None:
        return out.copy_(weight)
    drop_stale(state.correction, state.fingerprint, weight, state.layout.row)
    pieces = (t.view(-1).split(JOIN_CHUNK) for t in (out, weight, state.correction))
    for target, hi, lo in zip(*pieces, strict=True):
        target.copy_(join(hi, lo))
    return out
