"""The step in pure torch, for any device: the oracle of the other backends, and the one that serves CPUs.

A parameter is stepped in chunks of about :data:`CHUNK` elements, so that temporary memory does not grow with its size.
On CPUs ordinary chunks are stepped in place (``eager_inplace.py``), with the same bits; the others, and everything on
other devices, by the functions of ``numerics/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flashdist.kernels.backend import ParamState, StepInputs, dithered
from flashdist.kernels.eager_inplace import IN_PLACE_CHUNK, Block, Buffers, step_in_place, steppable
from flashdist.numerics.companding import (
    GROUP,
    decode_momentum,
    decode_variance,
    dither_offsets,
    encode_momentum,
    encode_variance,
)
from flashdist.numerics.fingerprint import drop_stale, fingerprint
from flashdist.numerics.groups import GroupLayout, from_groups, to_groups
from flashdist.numerics.rules import GroupScalars, StepScalars
from flashdist.numerics.weight_split import join, split

CHUNK = 1 << 16


class EagerBackend:
    """See :class:`flashdist.kernels.backend.Backend`. Reads the step counts (and lr tensors) on the host."""

    def step(
        self,
        states: Sequence[ParamState],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        groups: Sequence[GroupScalars],
        inputs: StepInputs,
    ) -> list[Tensor] | None:
        if inputs.found_inf is not None and bool(inputs.found_inf):
            return None
        factor = grad_factor(inputs)
        largest = max((w.numel() for w in weights), default=0)
        buffers = None if inputs.count_lost else Buffers(min(IN_PLACE_CHUNK, largest))
        lost = []
        for state, weight, grad in zip(states, weights, grads, strict=True):
            lost.append(_step_one(state, weight, grad, groups[state.group], factor, buffers))
        return lost if inputs.count_lost else None

    def grad_square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]
        return torch.stack(norms).square().sum()


def grad_factor(inputs: StepInputs) -> float:
    """What the gradients are multiplied by: clip factor over scale, read on the host."""
    factor = 1.0
    if inputs.clip_factor is not None:
        factor *= float(inputs.clip_factor)
    if inputs.grad_scale is not None:
        factor /= float(inputs.grad_scale)
    return factor


def _step_one(
    state: ParamState, weight: Tensor, grad: Tensor, group: GroupScalars, factor: float, buffers: Buffers | None
) -> Tensor:
    """Step one parameter: in place where there are buffers. Without, its lost updates are counted."""
    state.step += 1
    t = int(state.step)
    scalars = group.at(t)
    row = state.layout.row
    dither = dither_offsets(t, weight.device) if dithered(state.rule, group) else 0.5
    if group.maximize:
        factor = -factor
    if state.correction is not None:
        assert state.fingerprint is not None
        drop_stale(state.correction, state.fingerprint, weight, row)
    lost = torch.zeros((), dtype=torch.int64, device=weight.device)
    todo = _blocks(state.layout)
    if buffers is not None and steppable(state, weight, scalars):
        runs = _runs(0, weight.numel(), IN_PLACE_CHUNK)
        hard = [
            run for run in runs if not step_in_place(_views(run, state, weight, grad, scalars, factor, dither), buffers)
        ]
        todo = (piece for run in hard for piece in _runs(run.start, run.stop, CHUNK))
    for block in todo:
        same = _step_block(block, state, weight, grad, scalars, factor, dither, buffers is None)
        if same is not None:
            lost += same
    if state.fingerprint is not None:
        state.fingerprint.copy_(fingerprint(weight, row))
    return lost


class _Block:
    """A contiguous run of elements of one tensor that holds whole groups: ``rows`` rows of ``width`` elements."""

    __slots__ = ("rows", "scale_start", "scale_stop", "start", "stop", "width")

    def __init__(self, start: int, rows: int, width: int, scale_start: int) -> None:
        self.start, self.stop = start, start + rows * width
        self.rows, self.width = rows, width
        self.scale_start = scale_start
        self.scale_stop = scale_start + rows * -(-width // GROUP)

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[self.start : self.stop]

    def groups_of(self, tensor: Tensor) -> Tensor:
        return to_groups(self.of(tensor).view(self.rows, self.width))

    def scales_of(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[self.scale_start : self.scale_stop]

    def flat(self, groups: Tensor) -> Tensor:
        return from_groups(groups, self.rows, self.width).reshape(-1)


def _runs(start: int, stop: int, size: int) -> Iterator[_Block]:
    """Cut a run of whole groups (or of elements without groups) into runs of ``size``."""
    for at in range(start, stop, size):
        yield _Block(at, 1, min(size, stop - at), at // GROUP)


def _blocks(layout: GroupLayout) -> Iterator[_Block]:
    """Cut a tensor into blocks of about CHUNK elements that never cut a group."""
    numel, row = layout.numel, layout.row
    if numel == 0:
        return
    if row % GROUP == 0 or row == numel:
        yield from _runs(0, numel, CHUNK)
        return
    rows, groups_per_row = numel // row, layout.groups_per_row
    if row <= CHUNK:
        together = CHUNK // row
        for first in range(0, rows, together):
            yield _Block(first * row, min(together, rows - first), row, first * groups_per_row)
        return
    for r in range(rows):
        for start in range(0, row, CHUNK):
            yield _Block(r * row + start, 1, min(CHUNK, row - start), r * groups_per_row + start // GROUP)


def _views(
    block: _Block,
    state: ParamState,
    weight: Tensor,
    grad: Tensor,
    scalars: StepScalars,
    factor: float,
    dither: Tensor | float,
) -> Block:
    correction = block.of(state.correction) if state.correction is not None else None
    moments = [block.of(kept) for kept in state.moments]
    scales = [block.scales_of(kept) for kept in state.scales]
    return Block(block.of(weight), block.of(grad), correction, moments, scales, state, scalars, factor, dither)


def _step_block(
    block: _Block,
    state: ParamState,
    weight: Tensor,
    grad: Tensor,
    scalars: StepScalars,
    factor: float,
    dither: Tensor | float,
    count_lost: bool,
) -> Tensor | None:
    """Join, decode, rule, split, encode; the whole step of one block."""
    cut = block.groups_of if state.quantized else block.of
    hi = cut(weight)
    lo = cut(state.correction) if state.correction is not None else None
    p = join(hi, lo) if lo is not None else hi.to(torch.float32)
    g = cut(grad).to(torch.float32)
    if factor != 1.0:
        g = g * factor
    m, v = _load_moments(block, state)

    new_p, m, v = state.rule.update(p, g, m, v, scalars)

    put = block.flat if state.quantized else (lambda x: x)
    if lo is not None:
        new_hi, new_lo = split(new_p, hi.dtype, lo.dtype)
    else:
        new_hi, new_lo = new_p.to(hi.dtype), None
    # Before anything is written: hi and lo may be views of what is about to change.
    same = _count_lost(block, put, p, new_p, hi, new_hi, lo, new_lo) if count_lost else None
    if new_lo is not None:
        assert state.correction is not None
        block.of(state.correction).copy_(put(new_lo))
    block.of(weight).copy_(put(new_hi))
    _store_moments(block, state, (m, v), dither)
    return same


def _load_moments(block: _Block, state: ParamState) -> tuple[Tensor, Tensor]:
    nothing = state.step.new_zeros(())
    moments = [nothing, nothing]
    for i, kept in enumerate(state.moments):
        if state.quantized:
            decode = decode_variance if i == 1 else decode_momentum
            moments[i] = decode(block.groups_of(kept), block.scales_of(state.scales[i]))
        else:
            moments[i] = block.of(kept)
    return moments[0], moments[1]


def _store_moments(block: _Block, state: ParamState, moments: tuple[Tensor, Tensor], dither: Tensor | float) -> None:
    for i, kept in enumerate(state.moments):
        if state.quantized:
            codes, scale = (encode_variance if i == 1 else encode_momentum)(moments[i], dither)
            block.of(kept).copy_(block.flat(codes))
            block.scales_of(state.scales[i]).copy_(scale)
        else:
            block.of(kept).copy_(moments[i])


def _count_lost(block, put, p, new_p, hi, new_hi, lo, new_lo) -> Tensor:  # type: ignore[no-untyped-def]
    lost = (new_p != p) & (hi == new_hi)
    if lo is not None:
        lost &= lo == new_lo
    return put(lost).sum()
