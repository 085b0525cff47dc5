"""The eager step of an ordinary block in place: what ``numerics/`` does, rounding by rounding, in half the passes.

Torch runs one kernel an operation, so that a step on a CPU costs its number of passes over memory. Three things make
them fewer than in the functions of ``numerics/``, which stay the definition:

- Everything happens in five buffers that stay in the cache; no block allocates its own.
- The cases out of the ordinary (a NaN, an infinity, a correction that does not fit its weight) are found by looking at
  a sum of squares and at the scales before anything is written. Such a block is left to ``numerics/``.
- What is ordinary allows shortcuts that give the same bits; each has its reason beside it.

Only operations that round once are used (torch's ``add(alpha=)``, ``addcmul`` and ``addcdiv`` may fuse a product).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdist.kernels.backend import ParamState
from flashdist.numerics.companding import (
    GROUP,
    MOMENTUM_CODES,
    MOMENTUM_SCALE_DTYPE,
    MOMENTUM_SCALE_LIMIT,
    SMALLEST_NORMAL,
    VARIANCE_CODES,
)
from flashdist.numerics.rules import StepScalars, adam, adamw
from flashdist.numerics.weight_split import SIGN_BIT, correction_bits

# Torch's overhead of 4 us an operation wants blocks large, their 10 MB in the caches want them small.
IN_PLACE_CHUNK = 1 << 19
# The largest fp32 number below SMALLEST_NORMAL: torch's threshold keeps what is above its bound.
_BELOW_NORMAL = SMALLEST_NORMAL * (1.0 - 2.0**-23)


class Buffers:
    """Scratch for blocks of up to ``size`` elements: weight, gradient, momentum, variance and one more."""

    def __init__(self, size: int) -> None:
        self._all = torch.empty(5, size, dtype=torch.float32)

    def of(self, n: int) -> list[Tensor]:
        return [row[:n] for row in self._all]


@dataclass(frozen=True)
class Block:
    """Views of a contiguous run of whole groups, and what its step takes. Moments and scales as in ParamState."""

    weight: Tensor
    grad: Tensor
    correction: Tensor | None
    moments: list[Tensor]
    scales: list[Tensor]
    state: ParamState
    scalars: StepScalars
    factor: float
    dither: Tensor | float


def steppable(state: ParamState, weight: Tensor, scalars: StepScalars) -> bool:
    """Whether ordinary blocks of this parameter may be stepped by :func:`step_in_place`.

    An fp16 split and groups at the ends of uneven rows are left out, and so are weight decays and eps so unusual that a
    shortcut would show in the bits.
    """
    if weight.device.type != "cpu" or (state.correction is not None and weight.dtype != torch.bfloat16):
        return False
    if not state.quantized:
        return scalars.shrink >= 0.5
    whole_groups = state.layout.row % GROUP == 0
    if len(state.moments) == 2 and state.rule.update not in (adam, adamw):
        return False  # no other rule leaves the root of its variance
    # A root below 2^-63 is taken as 0 also by the rule: it must vanish beside eps.
    return whole_groups and scalars.shrink >= 0.5 and scalars.eps >= 2.0**-36 * scalars.root_bias2


def step_in_place(block: Block, buffers: Buffers) -> bool:
    """Step a block, or return False and leave it as it is, where it is not an ordinary one."""
    p, g, m, v, t = buffers.of(block.weight.numel())
    _join(block, p, t)
    g.copy_(block.grad)
    if block.factor != 1.0:
        g.mul_(block.factor)
    quantized = block.state.quantized
    _load_moments(block, m, v, t)
    root = g
    if block.state.rule.update in (adam, adamw):
        _adamw(block, p, g, m, v, t)
    else:
        # Lion and SGD, a few passes more than in place. A buffer that nothing was loaded to may hold anything.
        nothing = p.new_zeros(())
        loaded = [moment if i < len(block.moments) else nothing for i, moment in enumerate((m, v))]
        p, m, v = block.state.rule.update(p, g, loaded[0], loaded[1], block.scalars)
    # Infinite or NaN where a weight is not finite or too large, before or after; a false alarm does no harm.
    if not math.isfinite(float(torch.dot(p, p))):
        return False
    if quantized and not _encode(block, m, v, root, t):
        return False
    if not quantized:
        for kept, moment in zip(block.moments, (m, v), strict=False):
            kept.copy_(moment)
    _split(block, p)
    return True


def _join(block: Block, p: Tensor, t: Tensor) -> None:
    """``join``: the correction is added to the bits as they are. Where hi is 0 and lo is not, a borrow from the sign
    gives a NaN; where hi is not finite, a NaN or a number near fp32's largest: both are seen in the sum of squares."""
    p.copy_(block.weight)
    if block.correction is not None:
        lo = t.view(torch.int32)
        lo.copy_(block.correction)
        p.view(torch.int32).add_(lo, alpha=1 << (16 - correction_bits(block.correction.dtype)))


def _split(block: Block, p: Tensor) -> None:
    """``split`` of finite bf16 values: the sign is bit 31, which no rounding reaches, and lo is what q has below hi."""
    if block.correction is None:
        block.weight.copy_(p)
        return
    bits, extra = p.view(torch.int32), correction_bits(block.correction.dtype)
    if extra == 8:
        bits.add_(0x80)
        bits >>= 8
    block.correction.copy_(bits)
    bits.add_(1 << (extra - 1))
    bits >>= extra
    block.weight.view(torch.int16).copy_(bits)


def _load_moments(block: Block, m: Tensor, v: Tensor, t: Tensor) -> None:
    """``decode_momentum`` and ``decode_variance``."""
    for i, (kept, moment) in enumerate(zip(block.moments, (m, v), strict=False)):
        moment.copy_(kept)
        if not block.state.quantized:
            continue
        scale = block.scales[i].to(torch.float32, copy=True)
        if i == 1:
            _grouped(moment).mul_((scale * (1.0 / VARIANCE_CODES)).unsqueeze(-1))
            moment.mul_(moment)
        else:
            # Denominator and scale with their signs turned, which saves a pass.
            moment.div_(torch.abs(moment, out=t).sub_(2.0 * MOMENTUM_CODES))
            _grouped(moment).mul_(scale.neg_().unsqueeze(-1))


def _adamw(block: Block, p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: Tensor) -> None:
    """``rules.adamw`` and ``rules.adam``; leaves the root of the variance in ``g``."""
    s = block.scalars
    if block.state.rule.update is adam:
        g.add_(torch.mul(p, s.l2, out=t))
    m.mul_(s.decay1).add_(torch.mul(g, s.gain1, out=t))
    v.mul_(s.decay2).add_(g.mul_(g).mul_(s.gain2))
    if block.state.quantized:
        torch.ops.aten.threshold_(v, _BELOW_NORMAL, 0.0)
    torch.sqrt(v, out=g)
    torch.mul(g, s.root_bias2, out=t).add_(s.eps)
    torch.div(m, t, out=t).mul_(s.step_size)
    p.mul_(s.shrink).sub_(t)


def _encode(block: Block, m: Tensor, v: Tensor, root: Tensor, t: Tensor) -> bool:
    """``encode_momentum`` and ``encode_variance`` (of its root), unless a moment is not finite."""
    scales = []
    if block.moments:
        size = _grouped(torch.abs(m, out=t))
        peak = size.amax(dim=-1).to(MOMENTUM_SCALE_DTYPE).to(torch.float32)
        scales.append(torch.ops.aten.threshold_(peak, _BELOW_NORMAL, 0.0))
    if len(block.moments) == 2:
        scales.append(_grouped(root).amax(dim=-1))
    # Sums of numbers that are not negative: below the limit only if each of them is; NaN is not below it.
    if not all(float(scale.sum()) < MOMENTUM_SCALE_LIMIT for scale in scales):
        return False
    for kept, scale in zip(block.scales, scales, strict=True):
        kept.copy_(scale)
    if len(scales) > 1:
        _encode_variance(block.moments[1], scales[1], root, v, block.dither)
    if scales:
        _encode_momentum(block.moments[0], scales[0], m, t, root, block.dither)
    return True


def _encode_momentum(codes: Tensor, scale: Tensor, m: Tensor, size: Tensor, t: Tensor, dither: Tensor | float) -> None:
    # Beside a scale of 0 the sizes are below 2^-126, so that a scale of 1 gives the code 0 that is due.
    scale.masked_fill_(scale == 0, 1.0)
    torch.add(_grouped(size), scale.unsqueeze(-1), out=_grouped(t))
    _grouped(size.div_(t).mul_(2.0 * MOMENTUM_CODES)).add_(dither)
    if isinstance(dither, Tensor):  # 127.5 and 0.5 stay below 128
        size.clamp_(max=float(MOMENTUM_CODES))
    # The sign goes back into its bit, and the conversion cuts towards zero, which is the floor of the size.
    size.view(torch.int32).bitwise_or_(m.view(torch.int32).bitwise_and_(SIGN_BIT))
    codes.copy_(size)


def _encode_variance(codes: Tensor, scale: Tensor, root: Tensor, t: Tensor, dither: Tensor | float) -> None:
    # Every root beside a scale of 0 is 0 as well; other scales are 2^-63 or more.
    per_root = VARIANCE_CODES / scale.clamp_(min=2.0**-64)
    torch.sign(root, out=t)  # the least code: 1 where there is a root
    _grouped(root).mul_(per_root.unsqueeze(-1)).add_(dither)
    torch.maximum(root, t, out=root).clamp_(max=float(VARIANCE_CODES))
    # Floor, by way of int32: torch has no fast conversion from fp32 to uint8.
    whole = t.view(torch.int32)
    whole.copy_(root)
    codes.view(torch.int8).copy_(whole)


def _grouped(flat: Tensor) -> Tensor:
    return flat.view(-1, GROUP)
