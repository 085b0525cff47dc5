"""The sum of squares of many tensors in one pass: a launch for each dtype, and one to add what the programs found.

Always the same sum: which program adds which elements follows from the tensors' sizes, and the programs' sums are added
in their order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdist.kernels.triton_compile import Call, compile_together, first_launch
from flashdist.kernels.upload import Upload

# Elements that a program loads at a time; it takes up to this many such tiles in turn, where enough programs remain.
BLOCK = 2048
MAX_TILES_PER_PROGRAM = 16
ENOUGH_PROGRAMS = 4096
OPTIONS = {"num_warps": 4}
ALIGNMENT = 16
# int64 table, one row a tensor.
ADDRESS, NUMEL, FIRST_PROGRAM, SPAN = range(4)
COLUMNS = 4

_ADDRESS, _NUMEL, _FIRST, _SPAN = (tl.constexpr(c) for c in range(COLUMNS))
_COLUMNS = tl.constexpr(COLUMNS)
_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_DTYPE = attrgetter("dtype")


@triton.jit
def square_sum_kernel(table, program_tensor, sums, TYPE: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr):
    """Program ``b`` adds the squares of one span of its tensor, in fp32, and stores the sum at ``sums[b]``."""
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(program_tensor + program).to(tl.int64) * _COLUMNS
    pointer = tl.multiple_of(tl.load(row + _ADDRESS).to(tl.pointer_type(TYPE)), ALIGN)
    span = tl.load(row + _SPAN)
    start = (program - tl.load(row + _FIRST)) * span
    here = tl.minimum(tl.load(row + _NUMEL) - start, span).to(tl.int32)
    # A span is a whole number of tiles, so its start is as aligned as the tensor.
    pointer += tl.multiple_of(start, TILE)
    lane = tl.arange(0, TILE)
    full = here // TILE
    total = tl.zeros([TILE], tl.float32)
    for tile in range(full):
        x = tl.load(pointer + tile * TILE + lane).to(tl.float32)
        total += x * x
    if full * TILE < here:
        rest = full * TILE + lane
        x = tl.load(pointer + rest, mask=rest < here, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums + program, tl.sum(total, axis=0))


class Launch(NamedTuple):
    """One launch: tensors of one dtype, all aligned or not, and where its programs leave their sums."""

    dtype: torch.dtype
    aligned: bool
    program_tensor: Tensor  # int32 [programs]
    sums: Tensor  # fp32 [programs]


class NormPlan:
    """The launches and the table for one list of contiguous tensors on one device.

    Made without a synchronisation. Made during the capture of a CUDA graph, its uploads are part of the graph, which
    is then the only one that may use it, and reads the host's buffers as long as it lives.
    """

    def __init__(self, grads: Sequence[Tensor], addresses: list[int]) -> None:
        self.device = grads[0].device
        self.dtypes, self.numels = list(map(_DTYPE, grads)), list(map(Tensor.numel, grads))
        self.aligned = _alignments(addresses)
        self.compiled: dict[int, Callable[..., Any]] = {}
        self._build()
        self.table = Upload(tuple(self.rows.shape), torch.int64, self.device, copies=2)
        self.addresses: list[int] | None = None

    def _build(self) -> None:
        tiles = sum(-(-n // BLOCK) for n in self.numels)
        span = BLOCK * max(1, min(MAX_TILES_PER_PROGRAM, tiles // ENOUGH_PROGRAMS))
        buckets: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, key in enumerate(zip(self.dtypes, self.aligned, strict=True)):
            buckets.setdefault(key, []).append(i)
        rows = torch.zeros(len(self.numels), COLUMNS, dtype=torch.int64)
        rows[:, NUMEL], rows[:, SPAN] = torch.tensor(self.numels), span
        programs = -(-rows[:, NUMEL] // span)
        self.rows, self.sums = rows, torch.empty(int(programs.sum()), dtype=torch.float32, device=self.device)
        self.maps: list[Upload] = []
        self.launches: list[Launch] = []
        first = 0
        for (dtype, aligned), members in buckets.items():
            counts = programs[members]
            rows[members, FIRST_PROGRAM] = counts.cumsum(0) - counts
            program_tensor = torch.tensor(members, dtype=torch.int32).repeat_interleave(counts)
            self.maps.append(Upload(tuple(program_tensor.shape), torch.int32, self.device, copies=1))
            self.maps[-1].host().copy_(program_tensor)
            self.maps[-1].send()
            last = first + program_tensor.numel()
            self.launches.append(Launch(dtype, aligned, self.maps[-1].device, self.sums[first:last]))
            first = last

    def fits(self, grads: Sequence[Tensor], addresses: list[int]) -> bool:
        """Whether the launches serve these tensors, wherever they are now."""
        return (
            self.device == grads[0].device
            and self.numels == list(map(Tensor.numel, grads))
            and self.dtypes == list(map(_DTYPE, grads))
            and (addresses == self.addresses or self.aligned == _alignments(addresses))
        )

    def run(self, addresses: list[int]) -> Tensor:
        """The sum of squares, fp32 0-d."""
        if addresses != self.addresses:
            host = self.table.host()
            host.copy_(self.rows)
            host[:, ADDRESS] = torch.frombuffer(array("q", addresses), dtype=torch.int64)
            self.table.send()
            self.addresses = addresses
        if not self.compiled:
            compile_together([self._call(launch) for launch in self.launches])
        for i, launch in enumerate(self.launches):
            if i in self.compiled:
                self.compiled[i](self.table.device, launch.program_tensor, launch.sums)
            else:
                self.compiled[i] = first_launch(self._call(launch))
        return self.sums.sum()

    def _call(self, launch: Launch) -> Call:
        constants = {"TYPE": _TRITON_DTYPES[launch.dtype], "ALIGN": ALIGNMENT if launch.aligned else 1, "TILE": BLOCK}
        args = (self.table.device, launch.program_tensor, launch.sums)
        return Call(square_sum_kernel, (launch.program_tensor.numel(), 1, 1), args, constants, OPTIONS)

    def workspace(self) -> list[Tensor]:
        """What this plan keeps on its device."""
        return [self.table.device, self.sums, *(launch.program_tensor for launch in self.launches)]


class Norms:
    """Plans for the lists of gradients that norms were asked for: often one, else one for each mesh and device."""

    MAX_PLANS = 16

    def __init__(self) -> None:
        self._plans: list[NormPlan] = []
        # What a captured CUDA graph reads must live, unchanged, as long as the graph may be replayed.
        self._captured: list[NormPlan] = []

    def square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        """Sum of squares of tensors on one device, fp32 0-d, without a synchronisation."""
        simple = [g.dtype in _TRITON_DTYPES and g.is_contiguous() for g in grads]
        if all(simple):
            return self._fused(grads)
        others = [g for g, fused in zip(grads, simple, strict=True) if not fused]
        total = torch.stack(torch._foreach_norm(others, 2, dtype=torch.float32)).square().sum()
        fused = [g for g, fused in zip(grads, simple, strict=True) if fused]
        return total + self._fused(fused) if fused else total

    def _fused(self, grads: Sequence[Tensor]) -> Tensor:
        addresses = list(map(Tensor.data_ptr, grads))
        if grads[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured.append(NormPlan(grads, addresses))
            return self._captured[-1].run(addresses)
        plan = next((p for p in self._plans if p.fits(grads, addresses)), None)
        if plan is None:
            plan = NormPlan(grads, addresses)
            self._plans = [plan, *self._plans[: self.MAX_PLANS - 1]]
        return plan.run(addresses)

    def workspace(self) -> list[Tensor]:
        """What all plans keep on devices."""
        return [t for plan in [*self._plans, *self._captured] for t in plan.workspace()]


def _alignments(addresses: list[int]) -> list[bool]:
    if not reduce(or_, addresses, 0) % ALIGNMENT:
        return [True] * len(addresses)
    return [a % ALIGNMENT == 0 for a in addresses]
