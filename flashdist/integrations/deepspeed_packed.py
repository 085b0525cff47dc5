"""Weights and states of segments in a few packed buffers: one layout for what is stepped, saved and loaded.

Each segment of ``deepspeed_layout.py`` has the state tensors that a parameter of its kind has anywhere else. They lie
one after another in one buffer for each key and dtype, so that a partition of hundreds of parameters is a handful of
tensors, in memory and on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdist.integrations.deepspeed_layout import Segment
from flashdist.numerics.rules import Rule
from flashdist.numerics.state_format import ERROR, SCALE_SUFFIX, STEP, decode_moment, encode_moment, state_format
from flashdist.numerics.weight_split import join, split

# Segments begin at multiples of so many elements in a buffer, as the kernels' fast path asks of addresses.
ALIGN = 16
Place = tuple[str, int, int]  # buffer, first element, elements


@dataclass
class Packed:
    """The weights and states of some segments, as they are kept and as they are saved.

    Attributes:
        weight: bf16 ``[numel]``, the partition.
        moments: keys of the moments, momentum first.
        segments: what lies where in ``weight``.
        places: for each segment, under which key of its state which part of which buffer lies.
        steps: fp32 ``[segments]``.
        buffers: 1-D tensors by name, ``key:dtype``.
    """

    weight: Tensor
    moments: tuple[str, ...]
    segments: list[Segment]
    places: list[dict[str, Place]]
    steps: Tensor
    buffers: dict[str, Tensor]

    def weight_of(self, i: int) -> Tensor:
        s = self.segments[i]
        return self.weight[s.offset : s.offset + s.length]

    def entry(self, i: int, key: str) -> Tensor | None:
        """A segment's state tensor, 1-D; None where it has none of that name."""
        if key not in self.places[i]:
            return None
        name, start, length = self.places[i][key]
        return self.buffers[name][start : start + length]

    def some(self, i: int, key: str) -> Tensor:
        """As :meth:`entry`; a ValueError where there is none."""
        found = self.entry(i, key)
        if found is None:
            raise ValueError(f"there is no state {key!r} for {self.segments[i].name}")
        return found

    def master(self, i: int) -> Tensor:
        """The fp32 master weights of a segment, new."""
        correction = self.entry(i, ERROR)
        weight = self.weight_of(i)
        return weight.to(torch.float32) if correction is None else join(weight, correction)

    def set_master(self, i: int, values: Tensor) -> None:
        """Split fp32 master weights into the weights and corrections of a segment."""
        correction = self.entry(i, ERROR)
        if correction is None:
            self.weight_of(i).copy_(values)
            return
        hi, lo = split(values.to(self.weight.device, torch.float32), self.weight.dtype, correction.dtype)
        self.weight_of(i).copy_(hi)
        correction.copy_(lo)

    def moment(self, i: int, key: str) -> Tensor:
        """A moment of a segment in fp32, new."""
        codes, scales = self.some(i, key), self.entry(i, key + SCALE_SUFFIX)
        if scales is None:
            return codes.clone()
        return decode_moment(self.moments.index(key), codes, scales, self.segments[i].layout).view(-1)

    def set_moment(self, i: int, key: str, values: Tensor) -> None:
        """Encode the fp32 values of a moment of a segment."""
        codes, scales = self.some(i, key), self.entry(i, key + SCALE_SUFFIX)
        values = values.to(codes.device, torch.float32)
        if scales is None:
            codes.copy_(values)
            return
        new_codes, new_scales = encode_moment(self.moments.index(key), values, self.segments[i].layout)
        codes.copy_(new_codes.view(-1))
        scales.copy_(new_scales.view(-1))

    def read(self, start: int, length: int, key: str | None = None) -> Tensor:
        """Master weights (or a moment) of ``[start, start + length)`` of the partition, fp32; 0 between segments."""
        out = torch.zeros(length, dtype=torch.float32, device=self.weight.device)
        for i, low, high in self._overlaps(start, length):
            values = self.master(i) if key is None else self.moment(i, key)
            at = self.segments[i].offset
            out[low - start : high - start] = values[low - at : high - at]
        return out

    def write(self, start: int, values: Tensor, key: str | None = None) -> None:
        """The counterpart of :meth:`read`."""
        for i, low, high in self._overlaps(start, values.numel()):
            at, length = self.segments[i].offset, self.segments[i].length
            whole = values[low - start : high - start]
            if high - low < length:
                mixed = self.master(i) if key is None else self.moment(i, key)
                mixed[low - at : high - at] = whole
                whole = mixed
            if key is None:
                self.set_master(i, whole)
            else:
                self.set_moment(i, key, whole)

    def _overlaps(self, start: int, length: int) -> list[tuple[int, int, int]]:
        found = ((i, max(s.offset, start), min(s.offset + s.length, start + length)) for i, s in self._numbered())
        return [(i, low, high) for i, low, high in found if low < high]

    def _numbered(self) -> list[tuple[int, Segment]]:
        return list(enumerate(self.segments))


def pack(weight: Tensor, segments: Sequence[Segment], rule: Rule, group: dict[str, Any]) -> Packed:
    """Fresh state, all zeros, for the segments of a partition under the settings of its param group."""
    places: list[dict[str, Place]] = []
    sizes: dict[str, int] = {}
    dtypes: dict[str, torch.dtype] = {}
    for segment in segments:
        entries = state_format(rule, segment.layout, weight.dtype, group["master_weight_bits"], group["quantize"])
        mine: dict[str, Place] = {}
        for entry in entries:
            if entry.key == STEP:
                continue
            name = f"{entry.key}:{str(entry.dtype).removeprefix('torch.')}"
            numel = torch.Size(entry.shape).numel()
            start = sizes.get(name, 0)
            mine[entry.key] = (name, start, numel)
            sizes[name] = -(-(start + numel) // ALIGN) * ALIGN
            dtypes[name] = entry.dtype
        places.append(mine)
    buffers = {name: torch.zeros(size, dtype=dtypes[name], device=weight.device) for name, size in sizes.items()}
    steps = torch.zeros(len(segments), dtype=torch.float32, device=weight.device)
    return Packed(weight, tuple(rule.moments), list(segments), places, steps, buffers)
