"""The Triton backend: what is launched, over which tables, and when the tables are rebuilt.

One optimizer owns one :class:`TritonBackend`. For each device it keeps a :class:`Plan` of the tensors it steps together:
buckets, the map from tiles to tensors, and the device tables of ``kernels/tiles.py``. A plan is rebuilt when the tensors
change; when only addresses change (gradients do after zero_grad), the table alone is filled and uploaded again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import is_, or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdist.kernels import tiles
from flashdist.kernels.backend import ParamState, StepInputs, dithered
from flashdist.kernels.triton_rules import RULES
from flashdist.kernels.triton_step import prepare_kernel, step_kernel
from flashdist.numerics.companding import GROUP
from flashdist.numerics.fingerprint import TILE_GROUPS, num_tiles
from flashdist.numerics.rules import GroupScalars, Rule
from flashdist.numerics.weight_split import correction_bits

# Measured on an H200, see docs/decisions.md. Never autotuned: the kernel works in place.
STEP_WARPS = 4
PREPARE_BLOCK = 128
ALIGNMENT = 16

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


# Where the weights and the gradients are.
Addresses = tuple[list[int], list[int]]


@dataclass(frozen=True)
class BucketKey:
    """Tensors with equal keys run through one compiled kernel and one launch."""

    rule: Rule
    weight_dtype: torch.dtype
    grad_dtype: torch.dtype
    quantized: bool
    lo_bits: int
    dither: bool


@dataclass(frozen=True)
class Launch:
    """One launch of a bucket: the tensor of each program's tile."""

    key: BucketKey
    masked: bool
    tile_tensor: Tensor  # int32 [programs]


class TritonBackend:
    """See :class:`flashdist.kernels.backend.Backend`. Never synchronises with the host."""

    def __init__(self) -> None:
        self._plans: dict[torch.device, Plan] = {}
        # What a captured CUDA graph reads must live, unchanged, as long as the graph may be replayed.
        self._captured: list[Plan] = []

    def step(
        self,
        states: Sequence[ParamState],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        groups: Sequence[GroupScalars],
        inputs: StepInputs,
    ) -> list[Tensor] | None:
        devices = {w.device for w in weights}
        if len(devices) == 1:
            return self._step_device(devices.pop(), states, weights, grads, groups, inputs)
        lost: dict[int, Tensor] = {}
        for device in sorted(devices, key=str):
            on = [i for i, w in enumerate(weights) if w.device == device]
            part = self._step_device(
                device, [states[i] for i in on], [weights[i] for i in on], [grads[i] for i in on], groups, inputs
            )
            lost.update(zip(on, part or [], strict=False))
        return [lost[i] for i in range(len(states))] if inputs.count_lost else None

    def _step_device(
        self,
        device: torch.device,
        states: Sequence[ParamState],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        groups: Sequence[GroupScalars],
        inputs: StepInputs,
    ) -> list[Tensor] | None:
        addresses = _addresses(weights), _addresses(grads)
        with _on(device):
            plan = self._plans.get(device)
            if plan is None or not plan.fits(states, groups, grads, addresses):
                plan = self._plans[device] = Plan(device, states, weights, grads, groups, addresses)
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                plan = plan.copy_for_capture()
                self._captured.append(plan)
            return plan.run(addresses, groups, inputs)

    def grad_square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        norms = torch._foreach_norm(list(grads), 2, dtype=torch.float32)
        return torch.stack(norms).square().sum()

    def workspace(self) -> list[Tensor]:
        """The tables and maps that this backend keeps on devices."""
        return [t for plan in [*self._plans.values(), *self._captured] for t in plan.workspace()]


class Plan:
    """The launches and tables for one list of tensors on one device."""

    def __init__(
        self,
        device: torch.device,
        states: Sequence[ParamState],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        groups: Sequence[GroupScalars],
        addresses: Addresses,
    ) -> None:
        self.device = device
        self.states = list(states)
        self.keys = [_key(s, w, g, groups) for s, w, g in zip(states, weights, grads, strict=True)]
        self.dither = _dither_pattern(states, groups)
        self.grad_dtypes = [g.dtype for g in grads]
        self.aligned = _alignments(self.states, addresses)
        self._build_rows()
        self._new_tables(len(groups), copies=2)

    def _new_tables(self, num_groups: int, copies: int) -> None:
        n = len(self.states)
        self.table = Upload((n, tiles.TABLE_COLUMNS), torch.int64, self.device, copies)
        self.group_table = Upload((num_groups, tiles.GROUP_COLUMNS), torch.float64, self.device, copies)
        self.scalars = torch.zeros(n, tiles.SCALAR_COLUMNS, dtype=torch.float32, device=self.device)
        self.lost = torch.zeros(n, dtype=torch.int32, device=self.device)
        self.addresses: Addresses | None = None
        self.group_values: list[tuple[float, ...]] = []

    def _build_rows(self) -> None:
        """Order the tiles by bucket and path, and fill the columns that never change."""
        buckets: dict[BucketKey, list[int]] = {}
        for i, key in enumerate(self.keys):
            buckets.setdefault(key, []).append(i)
        rows = [_constant_row(s) for s in self.states]
        self.launches: list[Launch] = []
        for key, members in buckets.items():
            for masked in (False, True):
                tile_tensor = self._map_tiles(members, masked, rows)
                if tile_tensor.numel():
                    self.launches.append(Launch(key, masked, tile_tensor))
        self.rows = torch.tensor(rows, dtype=torch.int64).view(len(rows), tiles.TABLE_COLUMNS)

    def _map_tiles(self, members: Sequence[int], masked: bool, rows: list[list[int]]) -> Tensor:
        """int32 ``[programs]``: which tensor each program of this launch works on."""
        start, counts, owners = 0, [], []
        for i in members:
            layout = self.states[i].layout
            full = layout.num_groups // TILE_GROUPS if self.aligned[i] and layout.row % GROUP == 0 else 0
            full = min(full, layout.numel // (GROUP * TILE_GROUPS))
            count = num_tiles(layout.num_groups) - full if masked else full
            # tile = program - column, so the rest's first program stands for tile number `full`.
            rows[i][tiles.FIRST_REST if masked else tiles.FIRST_FULL] = start - full if masked else start
            counts.append(count)
            owners.append(i)
            start += count
        owner = torch.tensor(owners, dtype=torch.int32)
        return owner.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).to(self.device)

    def fits(
        self,
        states: Sequence[ParamState],
        groups: Sequence[GroupScalars],
        grads: Sequence[Tensor],
        addresses: Addresses,
    ) -> bool:
        """Whether the launches of this plan serve these tensors, wherever they are now."""
        return (
            len(states) == len(self.states)
            and all(map(is_, states, self.states))
            and len(groups) == self.group_table.device.shape[0]
            and self.dither == _dither_pattern(states, groups)
            and self.grad_dtypes == [g.dtype for g in grads]
            and (addresses == self.addresses or self.aligned == _alignments(states, addresses))
        )

    def copy_for_capture(self) -> Plan:
        """The same plan with tables of its own, which nothing but the captured graph will ever write."""
        copy = object.__new__(Plan)
        copy.__dict__.update(self.__dict__)
        copy._new_tables(self.group_table.device.shape[0], copies=1)
        return copy

    def run(self, addresses: Addresses, groups: Sequence[GroupScalars], inputs: StepInputs) -> list[Tensor] | None:
        """Upload what changed, then launch."""
        if addresses != self.addresses:
            self._upload_addresses(addresses)
        self._upload_groups(groups)
        if inputs.count_lost:
            self.lost.zero_()
        self._launch_prepare(inputs)
        for launch in self.launches:
            self._launch_step(launch, inputs.count_lost)
        return list(self.lost.unbind()) if inputs.count_lost else None

    def _upload_addresses(self, addresses: Addresses) -> None:
        host = self.table.host()
        host.copy_(self.rows)
        for column, values in zip((tiles.WEIGHT, tiles.GRAD), addresses, strict=True):
            host[:, column] = torch.frombuffer(array("q", values), dtype=torch.int64)
        self.table.send()
        self.addresses = addresses

    def _upload_groups(self, groups: Sequence[GroupScalars]) -> None:
        values = [_group_row(g) for g in groups]
        if values != self.group_values:
            host = self.group_table.host()
            host.copy_(torch.frombuffer(array("d", [x for row in values for x in row]), dtype=torch.float64).view_as(host))
            self.group_table.send()
            self.group_values = values
        for i, group in enumerate(groups):
            if isinstance(group.lr, Tensor) and group.lr.device == self.device:
                self.group_table.device[i, tiles.G_LR].copy_(group.lr.reshape(()))

    def _launch_prepare(self, inputs: StepInputs) -> None:
        n = len(self.states)
        if n == 0:
            return
        none = self.scalars
        prepare_kernel[(triton.cdiv(n, PREPARE_BLOCK),)](
            self.table.device,
            self.group_table.device,
            self.scalars,
            _here(inputs.clip_factor, none, self.device),
            _here(inputs.grad_scale, none, self.device),
            _here(inputs.found_inf, none, self.device),
            n,
            HAS_CLIP=inputs.clip_factor is not None,
            HAS_SCALE=inputs.grad_scale is not None,
            HAS_FOUND_INF=inputs.found_inf is not None,
            BLOCK=PREPARE_BLOCK,
            **_FUSION,
        )

    def _launch_step(self, launch: Launch, count_lost: bool) -> None:
        key = launch.key
        step_kernel[(launch.tile_tensor.numel(),)](
            self.table.device,
            self.scalars,
            launch.tile_tensor,
            self.lost,
            RULE=RULES[key.rule.name],
            MOMENTS=len(key.rule.moments),
            QUANTIZED=key.quantized,
            WEIGHT=_TRITON_DTYPES[key.weight_dtype],
            GRAD=_TRITON_DTYPES[key.grad_dtype],
            LO_BITS=key.lo_bits,
            DITHER=key.dither,
            CHECK=count_lost,
            MASKED=launch.masked,
            FAST=_FAST_DIVISION and self.device.type == "cuda",
            num_warps=STEP_WARPS,
            **_FUSION,
        )

    def workspace(self) -> list[Tensor]:
        tables = [self.table.device, self.group_table.device, self.scalars, self.lost]
        return [*tables, *(launch.tile_tensor for launch in self.launches)]


class Upload:
    """A device tensor that is written through pinned host buffers, none of which is reused before its copy is done."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, copies: int) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        pin = device.type == "cuda"
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=pin) for _ in range(copies)]
        self._done: list[Any] = [None] * copies
        self._next = 0

    def host(self) -> Tensor:
        """The next host buffer, free to be filled."""
        if self._done[self._next] is not None:
            self._done[self._next].synchronize()
        return self._hosts[self._next]

    def send(self) -> None:
        """Copy the buffer that :meth:`host` returned to the device, on the current stream."""
        self.device.copy_(self._hosts[self._next], non_blocking=True)
        if self.device.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._done[self._next] = torch.cuda.Event()
            self._done[self._next].record()
        self._next = (self._next + 1) % len(self._hosts)


# ROCm's compiler has no division to speed up this way; Triton's interpreter knows IEEE division only.
_FAST_DIVISION = torch.version.hip is None and not triton.knobs.runtime.interpret
# Multiplications and additions may be fused; the default of newer Triton releases differs.
_FUSION: dict[str, Any] = {} if triton.knobs.runtime.interpret else {"enable_fp_fusion": True}


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _here(scalar: Tensor | None, default: Tensor, device: torch.device) -> Tensor:
    return default if scalar is None else scalar.to(device, non_blocking=True)


def _key(state: ParamState, weight: Tensor, grad: Tensor, groups: Sequence[GroupScalars]) -> BucketKey:
    lo_bits = 0 if state.correction is None else correction_bits(state.correction.dtype)
    dither = state.quantized and dithered(state.rule, groups[state.group])
    return BucketKey(state.rule, weight.dtype, grad.dtype, state.quantized, lo_bits, dither)


def _dither_pattern(states: Sequence[ParamState], groups: Sequence[GroupScalars]) -> list[bool]:
    rules = {s.group: s.rule for s in states}
    return [i in rules and dithered(rules[i], g) for i, g in enumerate(groups)]


def _constant_row(state: ParamState) -> list[int]:
    row = [0] * tiles.TABLE_COLUMNS
    row[tiles.CORRECTION] = 0 if state.correction is None else state.correction.data_ptr()
    row[tiles.FINGERPRINT] = 0 if state.fingerprint is None else state.fingerprint.data_ptr()
    row[tiles.STEP] = state.step.data_ptr()
    for moment, column in zip(state.moments, (tiles.MOMENT1, tiles.MOMENT2), strict=False):
        row[column] = moment.data_ptr()
    for scale, column in zip(state.scales, (tiles.SCALE1, tiles.SCALE2), strict=False):
        row[column] = scale.data_ptr()
    row[tiles.NUM_GROUPS] = state.layout.num_groups
    row[tiles.ROW] = max(state.layout.row, 1)
    row[tiles.PARAM_GROUP] = state.group
    return row


def _alignments(states: Sequence[ParamState], addresses: Addresses) -> list[bool]:
    """Which tensors have all their addresses at multiples of 16 bytes."""
    weights, grads = addresses
    if not reduce(or_, weights, 0) % ALIGNMENT and not reduce(or_, grads, 0) % ALIGNMENT:
        return [_state_aligned(s) for s in states]
    return [_state_aligned(s) and (w | g) % ALIGNMENT == 0 for s, w, g in zip(states, weights, grads, strict=True)]


def _state_aligned(state: ParamState) -> bool:
    tensors = [*state.moments, *state.scales] + ([state.correction] if state.correction is not None else [])
    return all(t.data_ptr() % ALIGNMENT == 0 for t in tensors)


def _group_row(group: GroupScalars) -> tuple[float, ...]:
    lr = 0.0 if isinstance(group.lr, Tensor) and group.lr.device.type != "cpu" else float(group.lr)
    return (
        lr, group.decay_per_lr, group.l2, group.decay1, group.gain1, group.first_gain1, group.decay2, group.gain2,
        group.eps, group.bias1, group.bias2, group.grad_weight, group.buffer_weight, -1.0 if group.maximize else 1.0,
    )  # fmt: skip


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]
