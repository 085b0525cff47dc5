"""The state of DeepSpeed's flat partitions, and the optimizer that steps them.

All state of a partition lies in the packed buffers of ``deepspeed_packed.py``; each segment sees its own part of them
as an ordinary :class:`ParamState`, so the kernels do not know that there is a partition. The master weight's upper half
is the partition itself, which is the model's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdist.integrations.deepspeed_layout import Segment
from flashdist.integrations.deepspeed_packed import Packed, pack
from flashdist.kernels.backend import Backend, ParamState, StepInputs, make_backend
from flashdist.lazy import outside_graphs
from flashdist.lost_updates import report_lost
from flashdist.memory import MemorySummary, summarize
from flashdist.modes import without_autograd
from flashdist.numerics.fingerprint import UNKNOWN, drop_stale, fingerprint, num_tiles
from flashdist.numerics.rules import Rule
from flashdist.numerics.state_format import ERROR, SCALE_SUFFIX, STEP
from flashdist.optimizer import FlashOptimizer


class FlatPartition:
    """One flat partition of this rank: its segments, and their state once it is allocated.

    Attributes:
        flat: the 1-D parameter that DeepSpeed hands to the optimizer; a view of the model's own weights.
        weights: the model's weights that this rank holds, of which the partition is a part (stages 1, 2) or all.
        group: the param group it belongs to.
    """

    def __init__(self, flat: Tensor, weights: Tensor, segments: Sequence[Segment], group: dict[str, Any]) -> None:
        self.flat = flat
        self.weights = weights
        self.segments = list(segments)
        self.group = group
        self.packed: Packed | None = None
        self._settings: tuple[Any, ...] = ()
        self._states: list[ParamState] = []
        self._weights: list[Tensor] = []
        self._fingerprints: Tensor | None = None
        self._backend: Backend | None = None

    @without_autograd
    def state(self, opt: FlashOptimizer) -> Packed:
        """The state, allocated at its first use.

        Raises:
            RuntimeError: where the rule or the format of the param group changed since, or the partition moved.
        """
        rule = opt._rule(self.group)
        settings = (rule, self.group["master_weight_bits"], self.group["quantize"])
        if self.packed is None:
            self._settings = settings
            self.packed = pack(self.flat.detach(), self.segments, rule, self.group)
            opt.state[self.flat] = {STEP: self.packed.steps, **self.packed.buffers}
            self._look_into(self.packed, rule)
        elif settings != self._settings:
            raise RuntimeError(
                "a param group has other settings than when its state was made: do not change master_weight_bits, "
                "quantize or whether there is a momentum after the first step"
            )
        elif self.flat.data_ptr() != self.packed.weight.data_ptr():
            raise RuntimeError(
                "a flat partition of DeepSpeed was moved in memory behind its optimizer: its weights and its states "
                "no longer belong together (offload_states is not supported)"
            )
        return self.packed

    def _look_into(self, packed: Packed, rule: Rule) -> None:
        """Give each segment its view of the buffers."""
        tiles = [num_tiles(s.layout.num_groups) for s in self.segments]
        fingerprints = torch.zeros(sum(tiles), dtype=torch.int32, device=self.flat.device)
        for i, marks in enumerate(fingerprints.split(tiles)):
            scales = [packed.entry(i, key + SCALE_SUFFIX) for key in packed.moments]
            correction = packed.entry(i, ERROR)
            self._weights.append(packed.weight_of(i))
            self._states.append(
                ParamState(
                    rule=rule,
                    layout=self.segments[i].layout,
                    group=0,
                    step=packed.steps[i],
                    correction=correction,
                    moments=tuple(packed.some(i, key) for key in packed.moments),
                    scales=tuple(s for s in scales if s is not None),
                    fingerprint=None if correction is None else marks,
                    weight_dtype=self.flat.dtype,
                )
            )
        self._fingerprints = fingerprints

    def step(self, opt: FlashOptimizer, inputs: StepInputs) -> None:
        """Step all segments with the gradient of the flat partition."""
        self.state(opt)
        opt._check_group(self.group)
        grad = self.flat.grad
        assert grad is not None
        grads = [grad[s.offset : s.offset + s.length] for s in self.segments]
        if self._backend is None:
            self._backend = make_backend(self.flat.device.type)
        lost = self._backend.step(self._states, self._weights, grads, [opt._scalars(self.group)], inputs)
        if lost is not None:
            self._report_lost(lost)

    def _report_lost(self, lost: Sequence[Tensor]) -> None:
        """As FlashOptimizer does, for what this rank has of each parameter."""
        counts: dict[str, list[int]] = {}
        for segment, count in zip(self.segments, lost, strict=True):
            both = counts.setdefault(segment.name, [0, 0])
            both[0] += int(count)
            both[1] += segment.length
        report_lost(((name, lost_here, held) for name, (lost_here, held) in counts.items()), "elements on this rank")

    def drop_stale(self) -> None:
        """Zero the corrections of weights that were changed behind the optimizer."""
        for state, weight in zip(self._states, self._weights, strict=True):
            if state.correction is not None and state.fingerprint is not None:
                drop_stale(state.correction, state.fingerprint, weight, state.layout.row)

    def trust(self) -> None:
        """The weights and the corrections as they are now belong together."""
        for state, weight in zip(self._states, self._weights, strict=True):
            if state.fingerprint is not None:
                state.fingerprint.copy_(fingerprint(weight, state.layout.row))

    def drop_corrections(self) -> None:
        """The weights were replaced without their states: all corrections are 0."""
        for state in self._states:
            if state.correction is not None and state.fingerprint is not None:
                state.correction.zero_()
                state.fingerprint.fill_(UNKNOWN)

    def derived(self) -> list[Tensor]:
        """What is not saved: fingerprints, and the tables of the backend."""
        workspace: Callable[[], list[Tensor]] = getattr(self._backend, "workspace", list)
        return workspace() + ([] if self._fingerprints is None else [self._fingerprints])


class FlatStepping(FlashOptimizer):
    """A FlashOptimizer whose param groups hold DeepSpeed's flat partitions.

    DeepSpeed hands over a flat partition, with its gradient, at a time: for that moment it is the only parameter in the
    param groups. An optimizer is turned into one by :func:`step_partitions`.
    """

    partitions: dict[Tensor, FlatPartition]

    @outside_graphs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the partitions that are in the param groups and have a gradient."""
        if closure is not None:
            raise RuntimeError("DeepSpeed's engine.step takes no closure")
        flats = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        inputs = StepInputs(clip_factor=self._clip_factor, count_lost=self.check_numerics)
        with torch.no_grad():
            for flat in flats:
                self.partitions[flat].step(self, inputs)
        self._clip_factor = None

    def states(self) -> list[Packed]:
        """The states of all partitions, with corrections that fit the weights."""
        found = [partition.state(self) for partition in self.partitions.values()]
        for partition in self.partitions.values():
            partition.drop_stale()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Param groups and step counts; the states are added by ``deepspeed_checkpoint.py``."""
        flats = list(self.partitions)
        groups = [
            {**group, "params": [i for i, f in enumerate(flats) if self.partitions[f].group is group]}
            for group in self.param_groups
        ]
        steps = {i: {STEP: _largest(packed.steps)} for i, packed in enumerate(self.states())}
        return {"state": steps, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not of use under ZeRO.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("under DeepSpeed ZeRO, states are loaded by engine.load_checkpoint")

    def master_weight(self, p: Tensor) -> Tensor:
        """Not of use under ZeRO.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("under DeepSpeed ZeRO, use deepspeed.utils.safe_get_full_fp32_param(parameter)")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Not of use under ZeRO.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError('under DeepSpeed, gradients are clipped by "gradient_clipping" in the configuration')

    def memory_summary(self) -> MemorySummary:
        """Bytes of this rank by kind; weights are the model's that it holds, states those of its partitions."""
        state: list[tuple[str, Tensor]] = []
        derived: list[Tensor] = []
        for partition in self.partitions.values():
            derived.extend(partition.derived())
            if partition.packed is not None:
                state.append((STEP, partition.packed.steps))
                state.extend((name.split(":")[0], buffer) for name, buffer in partition.packed.buffers.items())
        grads = [flat.grad for flat in self.partitions if flat.grad is not None]
        return summarize([p.weights for p in self.partitions.values()], grads, state, derived)


def step_partitions(opt: FlashOptimizer, partitions: Sequence[FlatPartition]) -> None:
    """From now on ``opt`` steps these partitions, and nothing else."""
    kind = type(opt)
    opt.__class__ = type(kind.__name__, (FlatStepping, kind), {"__doc__": kind.__doc__, "__module__": __name__})
    assert isinstance(opt, FlatStepping)
    opt.partitions = {partition.flat: partition for partition in partitions}
    opt._reset_caches()


def _largest(steps: Tensor) -> Tensor:
    return steps.max() if steps.numel() else torch.zeros((), dtype=steps.dtype)
