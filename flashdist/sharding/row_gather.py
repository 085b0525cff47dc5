"""Brings the rows that each rank has written to all other ranks: all-gathers of bytes, in padded chunks.

Every rank writes its rows of all tensors, one after the other, into its slot of a buffer; an all-gather fills the
slots of the others; their rows are copied out. The buffer holds at most 64 MiB over all ranks and is used again for
every chunk and step. Bytes, not elements, so that tensors of any dtype travel together (and through gloo).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flashdist.sharding.row_cut import Rows

CHUNK_BYTES = 64 << 20
# Every tensor starts at a multiple of this in a slot, so that a slot can be viewed in its dtype.
ALIGNMENT = 16
# The first bytes of a rank's first slot say what it has done: see RowGather.run.
HEADER_BYTES = 16

# The buffer has 1 / this of the tensors' bytes, within these limits: a small model should not pay 64 MiB.
CHUNK_PART = 32
SMALLEST_CHUNK_BYTES = 1 << 20
# torch 2.13 has renamed it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# By dtype, for torch's fused copies: (to, from).
Copies = dict[torch.dtype, tuple[list[Tensor], list[Tensor]]]


class RowGather:
    """All-gathers of one list of tensors on one device, prepared once.

    Args:
        tensors: 1-D views of whole tensors, the same on every rank, and per tensor the bounds in elements: rank r
            has ``bounds[r]`` up to ``bounds[r + 1]``.
        group: the ranks.
        device: where the tensors are.
        chunk_bytes: the largest size of the buffer (at least ALIGNMENT bytes a rank); chosen by default.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[Tensor, Sequence[int]]],
        group: dist.ProcessGroup,
        device: torch.device,
        chunk_bytes: int | None = None,
    ) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        lines = [_line(tensors, rank) for rank in range(self.ranks)]
        longest = max(stop for stop, _ in lines)
        if chunk_bytes is None:
            total = sum(flat.numel() * flat.element_size() for flat, _ in tensors)
            chunk_bytes = min(max(total // CHUNK_PART, SMALLEST_CHUNK_BYTES), CHUNK_BYTES)
        slot = min(longest, max(chunk_bytes // self.ranks // ALIGNMENT, 1) * ALIGNMENT)
        self.buffer = torch.zeros(slot * self.ranks, dtype=torch.uint8, device=device)
        self.chunks: list[tuple[int, Copies, Copies]] = []
        for start in range(0, longest, slot):
            size = min(slot, longest - start)
            self.chunks.append((size, *self._copies(lines, start, size)))

    def _copies(
        self, lines: Sequence[tuple[int, list[tuple[int, Tensor]]]], start: int, size: int
    ) -> tuple[Copies, Copies]:
        """What to copy into this rank's slot and out of the others' for the bytes ``start`` up to ``start + size``."""
        pack: Copies = {}
        unpack: Copies = {}
        for rank, (_, pieces) in enumerate(lines):
            for at, piece in pieces:
                width = piece.element_size()
                first, last = max(at, start), min(at + piece.numel() * width, start + size)
                if first >= last:
                    continue
                part = piece[(first - at) // width : (last - at) // width]
                place = rank * size + first - start
                slot = self.buffer[place : place + last - first].view(piece.dtype)
                copies = pack if rank == self.rank else unpack
                to, source = copies.setdefault(piece.dtype, ([], []))
                to.append(slot if rank == self.rank else part)
                source.append(part if rank == self.rank else slot)
        return pack, unpack

    def run(self, header: int = 0) -> Tensor:
        """Gather. No synchronisation with the host.

        Args:
            header: a number that travels along.

        Returns:
            int64 ``[ranks]``, the numbers of all ranks.
        """
        headers = torch.empty(0)
        for i, (size, pack, unpack) in enumerate(self.chunks):
            filled = self.buffer[: size * self.ranks]
            own = filled[self.rank * size : (self.rank + 1) * size]
            if i == 0:
                own[:8].view(torch.int64).fill_(header)
            for to, source in pack.values():
                torch._foreach_copy_(to, source)
            all_gather(filled, own, group=self.group)
            for to, source in unpack.values():
                torch._foreach_copy_(to, source)
            if i == 0:
                headers = filled.view(self.ranks, size)[:, :8].view(torch.int64).flatten().clone()
        return headers


def _line(tensors: Sequence[tuple[Tensor, Sequence[int]]], rank: int) -> tuple[int, list[tuple[int, Tensor]]]:
    """A rank's pieces with their places in its line of bytes, and where the line ends."""
    at, pieces = HEADER_BYTES, []
    for flat, bounds in tensors:
        piece = flat[bounds[rank] : bounds[rank + 1]]
        if piece.numel():
            pieces.append((at, piece))
            at += -(-piece.numel() * piece.element_size() // ALIGNMENT) * ALIGNMENT
    return at, pieces


def gather_rows(local: Tensor, shape: Sequence[int], rows: Rows, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor of ``shape`` from every rank's rows of it, on all ranks of the group (a collective call)."""
    whole = local.new_empty(tuple(shape))
    rows.of(whole).copy_(local)
    RowGather([(whole.view(-1), rows.elements(whole.numel()))], group, local.device).run()
    return whole
