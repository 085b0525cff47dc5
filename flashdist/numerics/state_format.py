"""Which tensors a parameter's state consists of: names, dtypes and shapes, from the parameter and two settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashdist.numerics import companding
from flashdist.numerics.groups import GroupLayout, from_groups, to_groups
from flashdist.numerics.rules import Rule
from flashdist.numerics.weight_split import CORRECTION_DTYPES, SPLIT_DTYPES

STEP, ERROR, SCALE_SUFFIX = "step", "error", "_scale"
# Of the momentum and the variance.
MOMENT_CODE_DTYPES = (companding.MOMENTUM_CODE_DTYPE, companding.VARIANCE_CODE_DTYPE)
MOMENT_SCALE_DTYPES = (companding.MOMENTUM_SCALE_DTYPE, companding.VARIANCE_SCALE_DTYPE)


@dataclass(frozen=True)
class Entry:
    """One state tensor: its key, dtype and (global or local) shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def correction_dtype(
    weight_dtype: torch.dtype, master_weight_bits: int | None, layout: GroupLayout
) -> torch.dtype | None:
    """int8, int16 or None. Tensors without groups get int16 also at 24 bits (a norm's 1.0 would freeze)."""
    if master_weight_bits is None or weight_dtype not in SPLIT_DTYPES:
        return None
    return CORRECTION_DTYPES[master_weight_bits] if layout.grouped else torch.int16


def state_format(
    rule: Rule, layout: GroupLayout, weight_dtype: torch.dtype, master_weight_bits: int | None, quantize: bool
) -> list[Entry]:
    """The state tensors of a parameter with this layout, in their order in ``opt.state[p]``."""
    entries = [Entry(STEP, torch.float32, ())]
    correction = correction_dtype(weight_dtype, master_weight_bits, layout)
    if correction is not None:
        entries.append(Entry(ERROR, correction, layout.shape))
    for i, name in enumerate(rule.moments):
        if quantize and layout.grouped:
            entries.append(Entry(name, MOMENT_CODE_DTYPES[i], layout.shape))
            entries.append(Entry(name + SCALE_SUFFIX, MOMENT_SCALE_DTYPES[i], layout.scale_shape))
        else:
            entries.append(Entry(name, torch.float32, layout.shape))
    return entries


def encode_moment(place: int, dense: Tensor, layout: GroupLayout) -> tuple[Tensor, Tensor]:
    """Dense fp32 momentum (place 0) or variance (place 1) of ``layout.shape`` -> codes and scales in that layout."""
    if layout.numel == 0:
        return dense.to(MOMENT_CODE_DTYPES[place]), dense.new_zeros(
            layout.scale_shape, dtype=MOMENT_SCALE_DTYPES[place]
        )
    groups = to_groups(dense.to(torch.float32).reshape(-1, layout.row))
    codes, scales = companding.encode_variance(groups) if place == 1 else companding.encode_momentum(groups)
    codes = from_groups(codes, layout.numel // layout.row, layout.row)
    return codes.reshape(layout.shape), scales.view(layout.scale_shape)


def decode_moment(place: int, codes: Tensor, scales: Tensor, layout: GroupLayout) -> Tensor:
    """Codes and scales -> dense fp32, the inverse of :func:`encode_moment` up to rounding."""
    if layout.numel == 0:
        return codes.to(torch.float32)
    decode = companding.decode_variance if place == 1 else companding.decode_momentum
    groups = decode(to_groups(codes.reshape(-1, layout.row)), scales.reshape(-1))
    return from_groups(groups, layout.numel // layout.row, layout.row).reshape(layout.shape)
