"""From the codes of some partitions to those of others: any ZeRO stage, any number of ranks.

Codes and scales are copied as they are wherever a group lies in one segment of the source. A group that a partition's
border cut in two parts, each with its own scale, is decoded and encoded anew as one. (The other way round, a part of a
group keeps the whole group's scale: nothing changes.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashdist.integrations.deepspeed_layout import Segment
from flashdist.integrations.deepspeed_packed import Packed
from flashdist.numerics.companding import GROUP
from flashdist.numerics.groups import GroupLayout
from flashdist.numerics.state_format import ERROR, SCALE_SUFFIX, encode_moment

Piece = tuple[Packed, int]  # a segment of a source


def fill(target: Packed, sources: Sequence[Packed]) -> dict[str, int]:
    """Copy weights, corrections, moments and step counts into all segments of ``target``.

    Returns:
        For each parameter of which groups were encoded anew, how many elements those hold.

    Raises:
        ValueError: where the sources lack elements of a parameter, or keep its state in another format.
    """
    by_name: dict[str, list[Piece]] = {}
    for source in sources:
        for i, segment in enumerate(source.segments):
            by_name.setdefault(segment.name, []).append((source, i))
    anew: dict[str, int] = {}
    for t, segment in enumerate(target.segments):
        count = fill_segment(target, t, by_name.get(segment.name, []))
        if count:
            anew[segment.name] = anew.get(segment.name, 0) + count
    return anew


def covered(target: Packed, source: Packed) -> bool:
    """Whether a source has all segments of the target, cut in the same way."""
    return [(s.name, s.start, s.length) for s in target.segments] == [
        (s.name, s.start, s.length) for s in source.segments
    ]


def _pieces_of(segment: Segment, candidates: Sequence[Piece]) -> list[Piece]:
    """The source segments that a segment is made of, in order; together they must be all of it."""
    overlapping = [
        (source, i)
        for source, i in candidates
        if source.segments[i].start < segment.stop and segment.start < source.segments[i].stop
    ]
    pieces = sorted(overlapping, key=lambda piece: piece[0].segments[piece[1]].start)
    at = segment.start
    for source, i in pieces:
        found = source.segments[i]
        if found.shape != segment.shape:
            raise ValueError(
                f"parameter {segment.name} has shape {found.shape} in the checkpoint, {segment.shape} here"
            )
        if found.start > at:
            break
        at = found.stop
    if at < segment.stop:
        raise ValueError(
            f"the checkpoint has no state for elements {at} to {segment.stop} of parameter {segment.name}: it belongs "
            "to another model, to other param groups, or a file of it is missing"
        )
    return pieces


def fill_segment(target: Packed, t: int, candidates: Sequence[Piece]) -> int:
    """Fill one segment from source segments of its parameter; returns how many elements were encoded anew."""
    segment = target.segments[t]
    pieces = _pieces_of(segment, candidates)
    for source, i in pieces:
        found = source.segments[i]
        low, high = max(segment.start, found.start), min(segment.stop, found.stop)
        to, out = slice(low - segment.start, high - segment.start), slice(low - found.start, high - found.start)
        target.weight_of(t)[to].copy_(source.weight_of(i)[out])
        _check_formats(target, t, source, i)
        for key in (ERROR, *target.moments):
            mine, theirs = target.entry(t, key), source.entry(i, key)
            if mine is not None and theirs is not None:
                mine[to].copy_(theirs[out])
        for key in target.moments:
            mine, theirs = target.entry(t, key + SCALE_SUFFIX), source.entry(i, key + SCALE_SUFFIX)
            if mine is not None and theirs is not None:
                first, last = low // GROUP, -(-high // GROUP)
                a, b = segment.first_group, found.first_group
                mine[first - a : last - a].copy_(theirs[first - b : last - b])
    if pieces:
        source, i = pieces[0]
        target.steps[t].copy_(source.steps[i])
    return _join_groups(target, t, pieces)


def _check_formats(target: Packed, t: int, source: Packed, i: int) -> None:
    def formats(packed: Packed, at: int) -> dict[str, torch.dtype]:
        return {key: packed.buffers[place[0]].dtype for key, place in packed.places[at].items()}

    mine, theirs = formats(target, t), formats(source, i)
    if mine != theirs:
        raise ValueError(
            f"the state of parameter {target.segments[t].name} is kept as {mine} here, as {theirs} in the checkpoint: "
            "it was saved by another optimizer, or with other master_weight_bits or quantize"
        )


def _join_groups(target: Packed, t: int, pieces: Sequence[Piece]) -> int:
    """Encode the groups anew that lie in several source segments; returns the number of their elements."""
    segment = target.segments[t]
    grouped = [key for key in target.moments if target.entry(t, key + SCALE_SUFFIX) is not None]
    borders = {source.segments[i].start for source, i in pieces[1:]}
    groups = sorted({border // GROUP for border in borders if border % GROUP})
    if not grouped or not groups:
        return 0
    count = 0
    for key in grouped:
        values = target.moment(t, key)
        for group in groups:
            low, high = max(group * GROUP, segment.start), min((group + 1) * GROUP, segment.stop)
            for source, i in pieces:
                found = source.segments[i]
                a, b = max(low, found.start), min(high, found.stop)
                if a < b:
                    part = source.moment(i, key)[a - found.start : b - found.start]
                    values[a - segment.start : b - segment.start] = part
            _encode_group(target, t, key, values, low, high)
            count += high - low
    return count // len(grouped)


def _encode_group(target: Packed, t: int, key: str, values: torch.Tensor, low: int, high: int) -> None:
    """Encode one group of a segment, ``values`` being fp32 for the whole segment."""
    segment = target.segments[t]
    part = values[low - segment.start : high - segment.start]
    codes, scales = encode_moment(target.moments.index(key), part, GroupLayout((1, high - low), 1))
    target.some(t, key)[low - segment.start : high - segment.start].copy_(codes.view(-1))
    target.some(t, key + SCALE_SUFFIX)[low // GROUP - segment.first_group].copy_(scales.view(()))
