"""The Triton backend: what is launched, over which tables, and when the tables are rebuilt.

One optimizer owns one :class:`TritonBackend`. For each device and each set of tensors that it steps together (one,
but with gradient release) it keeps a :class:`Plan`: buckets, the map from tiles to tensors, and the device tables of
``kernels/tiles.py``. A plan is rebuilt when the tensors change; when only addresses change (gradients do after
zero_grad), the table alone is filled and uploaded again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from operator import is_, or_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from flashdist.kernels import tiles
from flashdist.kernels.backend import ParamState, StepInputs, dithered
from flashdist.kernels.triton_compile import NVIDIA, Call, compile_together, first_launch
from flashdist.kernels.triton_norm import Norms
from flashdist.kernels.triton_rules import RULES
from flashdist.kernels.triton_step import prepare_kernel, step_kernel
from flashdist.kernels.upload import Upload
from flashdist.numerics.companding import GROUP
from flashdist.numerics.fingerprint import TILE, num_tiles
from flashdist.numerics.rules import GroupScalars, Rule
from flashdist.numerics.weight_split import correction_bits

# Measured on an H200, see docs/decisions.md. Never autotuned: the kernel works in place.
STEP_OPTIONS: dict[str, int] = {"num_warps": 1, **({"maxnreg": 128} if NVIDIA else {})}
# A masked launch has few programs, each of which runs through its code once: the shorter the code the better.
MASKED_STEP_OPTIONS: dict[str, int] = {"num_warps": 4}
MAX_GROUPS = 2**31 - 1
# Tiles whose loads are under way while one is computed.
PIPELINE_STAGES = 3
# Fewer full tiles than this in a bucket go with the masked launch.
MIN_FULL_TILES = 4096
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


@dataclass
class Launch:
    """One launch of a bucket: the tensor of each program's tiles, and how to launch it once it is compiled."""

    key: BucketKey
    masked: bool
    program_tensor: Tensor  # int32 [programs]
    compiled: dict[bool, Callable[..., Any]] = field(default_factory=dict)  # by count_lost


class TritonBackend:
    """See :class:`flashdist.kernels.backend.Backend`. Never synchronises with the host."""

    def __init__(self) -> None:
        self._plans: dict[tuple[torch.device, Hashable], Plan] = {}
        self._last: Sequence[ParamState] | None = None
        self._devices: dict[torch.device, list[int]] = {}
        # What a captured CUDA graph reads must live, unchanged, as long as the graph may be replayed.
        self._captured: list[Plan] = []
        self._norms = Norms()

    def step(
        self,
        states: Sequence[ParamState],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        groups: Sequence[GroupScalars],
        inputs: StepInputs,
    ) -> list[Tensor] | None:
        if states is not self._last:
            self._last = states
            self._devices = _by_device(weights)
        weight_addresses = inputs.weight_addresses or _addresses(weights)
        addresses = weight_addresses, _addresses(grads)
        if len(self._devices) == 1:
            (device,) = self._devices
            return self._step_device(device, states, weights, grads, groups, inputs, addresses)
        lost: dict[int, Tensor] = {}
        for device, on in self._devices.items():
            part = self._step_device(
                device, [states[i] for i in on], [weights[i] for i in on], [grads[i] for i in on], groups, inputs,
                ([addresses[0][i] for i in on], [addresses[1][i] for i in on]),
            )  # fmt: skip
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
        addresses: Addresses,
    ) -> list[Tensor] | None:
        with _on(device):
            key = device, inputs.subset
            plan = self._plans.get(key)
            if plan is None or not plan.fits(states, groups, grads, addresses):
                plan = self._plans[key] = Plan(device, states, weights, grads, groups, addresses)
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                plan = plan.copy_for_capture()
                self._captured.append(plan)
            return plan.run(addresses, groups, inputs)

    def grad_square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        with _on(grads[0].device):
            return self._norms.square_sum(grads)

    def workspace(self) -> list[Tensor]:
        """The tables and maps that this backend keeps on devices."""
        plans = [*self._plans.values(), *self._captured, self._norms]
        return [t for plan in plans for t in plan.workspace()]


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
        self.source = states
        self.states = list(states)
        self.keys = [_key(s, w, g, groups) for s, w, g in zip(states, weights, grads, strict=True)]
        self.prepare: dict[tuple[torch.dtype | None, ...], Callable[..., Any]] = {}
        self.rules = {s.group: s.rule for s in states}
        self.dither = self._dithered(groups)
        self.grad_dtypes = [g.dtype for g in grads]
        self.states_aligned = list(map(_state_aligned, self.states))
        self.aligned = self._alignments(addresses)
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
            full = self._full_tiles(members)
            for masked in (False, True):
                program_tensor = self._map_programs(members, full, masked, rows)
                if program_tensor.numel():
                    self.launches.append(Launch(key, masked, program_tensor))
        self.rows = torch.tensor(rows, dtype=torch.int64).view(len(rows), tiles.TABLE_COLUMNS)

    def _full_tiles(self, members: Sequence[int]) -> list[int]:
        """Per tensor the tiles that can go without masks; none where a launch of their own would not pay."""
        full = []
        for i in members:
            layout = self.states[i].layout
            flat = layout.row % GROUP == 0 or not layout.grouped
            full.append(layout.numel // TILE if self.aligned[i] and flat else 0)
        return full if sum(full) >= MIN_FULL_TILES else [0] * len(full)

    def _map_programs(self, members: Sequence[int], full: Sequence[int], masked: bool, rows: list[list[int]]) -> Tensor:
        """int32 ``[programs]``: which tensor each program of this launch works on."""
        together = max(1, min(tiles.MAX_TILES_PER_PROGRAM, sum(full) // tiles.ENOUGH_PROGRAMS))
        start, counts = 0, []
        for i, full_tiles in zip(members, full, strict=True):
            rows[i][tiles.FULL_TILES] = full_tiles
            rows[i][tiles.TILES_PER_PROGRAM] = together
            rows[i][tiles.FIRST_REST if masked else tiles.FIRST_FULL] = start
            rest = num_tiles(self.states[i].layout.num_groups) - full_tiles
            counts.append(rest if masked else -(-full_tiles // together))
            start += counts[-1]
        owners = torch.tensor(list(members), dtype=torch.int32)
        return owners.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).to(self.device)

    def fits(
        self,
        states: Sequence[ParamState],
        groups: Sequence[GroupScalars],
        grads: Sequence[Tensor],
        addresses: Addresses,
    ) -> bool:
        """Whether the launches of this plan serve these tensors, wherever they are now."""
        return (
            (states is self.source or (len(states) == len(self.states) and all(map(is_, states, self.states))))
            and len(groups) == self.group_table.device.shape[0]
            and self.dither == self._dithered(groups)
            and (
                addresses == self.addresses
                or (self.grad_dtypes == [g.dtype for g in grads] and self.aligned == self._alignments(addresses))
            )
        )

    def _alignments(self, addresses: Addresses) -> list[bool]:
        """Which tensors have all their addresses at multiples of 16 bytes."""
        weights, grads = addresses
        if not (reduce(or_, weights, 0) | reduce(or_, grads, 0)) % ALIGNMENT:
            return self.states_aligned
        return [a and (w | g) % ALIGNMENT == 0 for a, w, g in zip(self.states_aligned, weights, grads, strict=True)]

    def _dithered(self, groups: Sequence[GroupScalars]) -> list[bool]:
        return [i in self.rules and dithered(self.rules[i], g) for i, g in enumerate(groups)]

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
        if self.states:
            self._launch(inputs)
        return list(self.lost.unbind()) if inputs.count_lost else None

    def _launch(self, inputs: StepInputs) -> None:
        """Launch everything; what was not launched before is compiled first, all at once."""
        given = (inputs.clip_factor, inputs.grad_scale, inputs.found_inf)
        there, check = tuple(map(_dtype, given)), inputs.count_lost
        new = [launch for launch in self.launches if check not in launch.compiled]
        prepare = self._prepare_args(given)
        if new:
            first = [] if there in self.prepare else [self._prepare_call(there, prepare)]
            compile_together(first + [self._step_call(launch, check) for launch in new])
        if there in self.prepare:
            self.prepare[there](*prepare)
        else:
            self.prepare[there] = first_launch(self._prepare_call(there, prepare))
        for launch in self.launches:
            if check in launch.compiled:
                launch.compiled[check](*self._step_args(launch))
            else:
                launch.compiled[check] = first_launch(self._step_call(launch, check))

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
            host.copy_(
                torch.frombuffer(array("d", [x for row in values for x in row]), dtype=torch.float64).view_as(host)
            )
            self.group_table.send()
            self.group_values = values
        for i, group in enumerate(groups):
            if isinstance(group.lr, Tensor) and group.lr.device == self.device:
                self.group_table.device[i, tiles.G_LR].copy_(group.lr.reshape(()))

    def _prepare_args(self, given: Sequence[Tensor | None]) -> tuple[Any, ...]:
        scalars = (self.scalars if x is None else x.to(self.device, non_blocking=True) for x in given)
        return (self.table.device, self.group_table.device, self.scalars, *scalars, len(self.states))

    def _prepare_call(self, there: tuple[torch.dtype | None, ...], args: tuple[Any, ...]) -> Call:
        used = [dtype is not None for dtype in there]
        constants = {"HAS_CLIP": used[0], "HAS_SCALE": used[1], "HAS_FOUND_INF": used[2], "BLOCK": PREPARE_BLOCK}
        return Call(prepare_kernel, (-(-len(self.states) // PREPARE_BLOCK), 1, 1), args, constants, {})

    def _step_args(self, launch: Launch) -> tuple[Any, ...]:
        return (self.table.device, self.scalars, launch.program_tensor, self.lost)

    def _step_call(self, launch: Launch, check: bool) -> Call:
        key = launch.key
        constants = {
            "RULE": RULES[key.rule.name],
            "MOMENTS": len(key.rule.moments),
            "QUANTIZED": key.quantized,
            "WEIGHT": _TRITON_DTYPES[key.weight_dtype],
            "GRAD": _TRITON_DTYPES[key.grad_dtype],
            "LO_BITS": key.lo_bits,
            "DITHER": key.dither,
            "CHECK": check,
            "MASKED": launch.masked,
            "FAST": NVIDIA and self.device.type == "cuda",
            "STAGES": 1 if launch.masked else PIPELINE_STAGES,
        }
        options = MASKED_STEP_OPTIONS if launch.masked else STEP_OPTIONS
        return Call(step_kernel, (launch.program_tensor.numel(), 1, 1), self._step_args(launch), constants, options)

    def workspace(self) -> list[Tensor]:
        tables = [self.table.device, self.group_table.device, self.scalars, self.lost]
        return [*tables, *(launch.program_tensor for launch in self.launches)]


def _dtype(scalar: Tensor | None) -> torch.dtype | None:
    return None if scalar is None else scalar.dtype


def _by_device(weights: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    devices: dict[torch.device, list[int]] = {}
    for i, weight in enumerate(weights):
        devices.setdefault(weight.device, []).append(i)
    return devices


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _key(state: ParamState, weight: Tensor, grad: Tensor, groups: Sequence[GroupScalars]) -> BucketKey:
    lo_bits = 0 if state.correction is None else correction_bits(state.correction.dtype)
    dither = state.quantized and dithered(state.rule, groups[state.group])
    return BucketKey(state.rule, weight.dtype, grad.dtype, state.quantized, lo_bits, dither)


def _constant_row(state: ParamState) -> list[int]:
    if state.layout.num_groups > MAX_GROUPS:
        raise ValueError(f"a parameter of shape {state.layout.shape} has more than {MAX_GROUPS} groups: shard it")
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
    return list(map(Tensor.data_ptr, tensors))
