"""A fingerprint of the 16-bit weights, one uint32 a tile, that tells when they were changed behind the optimizer.

A correction belongs to the weight it was split off from. Whoever writes to the weight afterwards (a loaded state dict,
an EMA swap, a mask, a broadcast) leaves a correction that no longer fits. Each step stores a fingerprint of the weights
it wrote; the next one compares before it joins, and takes corrections of a tile that differs as 0.

The fingerprint of a tile is the sum over its elements of ``bits * weight(position) mod 2^32``, where the position
weights are odd: changing one element, or swapping two, always changes the sum; anything else escapes with 2^-32.
The value 0 is kept for "not known yet: trust the correction", so a sum of 0 is stored as 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdist.numerics.companding import GROUP
from flashdist.numerics.groups import to_groups

TILE_GROUPS = 32
TILE = TILE_GROUPS * GROUP
UNKNOWN = 0
# Even multiplier and odd offset: every position weight is odd, and the difference of two is divisible by 2 only.
POSITION_MULTIPLIER = 0x9E3779B2
POSITION_OFFSET = 0x85EBCA6B
_CHUNK_TILES = 256


def num_tiles(num_groups: int) -> int:
    """Tiles of 32 groups that cover a tensor."""
    return -(-num_groups // TILE_GROUPS)


def position_weights(device: torch.device | None = None) -> Tensor:
    """int32 ``[1024]``: the odd factor of each position in a tile (two's complement of the uint32)."""
    position = torch.arange(TILE, dtype=torch.int64, device=device)
    return ((position * POSITION_MULTIPLIER + POSITION_OFFSET) % 2**32).to(torch.int32)


def fingerprint(weight: Tensor, row: int) -> Tensor:
    """Fingerprints of a contiguous bf16 or fp16 tensor whose groups lie in rows of ``row`` elements.

    Returns:
        int32 ``[num_tiles]`` (the bits of the uint32), never :data:`UNKNOWN`.
    """
    if weight.numel() == 0:
        return torch.empty(0, dtype=torch.int32, device=weight.device)
    bits = weight.view(torch.int16).view(-1, row)
    if row % GROUP == 0 or bits.shape[0] == 1:
        bits = bits.view(1, -1)
    weights = position_weights(weight.device)
    sums = [_sum_tiles(chunk, weights) for chunk in _tile_chunks(bits)]
    total = torch.cat(sums)
    return torch.where(total == UNKNOWN, 1, total)


def _tile_chunks(bits: Tensor) -> list[Tensor]:
    """The tensor as int16 pieces of whole tiles ``[n * 1024]``, the last one filled up with zeros."""
    if bits.shape[0] == 1:
        return list(bits.view(-1).split(_CHUNK_TILES * TILE))
    return list(to_groups(bits).view(-1).split(_CHUNK_TILES * TILE))


def _sum_tiles(chunk: Tensor, weights: Tensor) -> Tensor:
    padding = -chunk.numel() % TILE
    if padding:
        chunk = torch.nn.functional.pad(chunk, (0, padding))
    return (chunk.view(-1, TILE).to(torch.int32) * weights).sum(dim=-1, dtype=torch.int32)


def stale_tiles(stored: Tensor, weight: Tensor, row: int) -> Tensor:
    """bool ``[num_tiles]``: tiles whose weights are not the ones the last step wrote."""
    return (stored != UNKNOWN) & (stored != fingerprint(weight, row))


def drop_stale(correction: Tensor, stored: Tensor, weight: Tensor, row: int) -> int:
    """Zero in place the corrections of stale tiles; returns their number. All tensors are local and contiguous."""
    stale = stale_tiles(stored, weight, row)
    count = int(stale.sum())
    if count:
        correction.view(-1)[_elements_of(stale, correction.numel(), row)] = 0
    return count


def _elements_of(tiles: Tensor, numel: int, row: int) -> Tensor:
    """bool ``[numel]``: the elements that lie in the marked tiles."""
    if row % GROUP == 0 or numel == row:
        return tiles.repeat_interleave(TILE)[:numel]
    groups = tiles.repeat_interleave(TILE_GROUPS)
    groups_per_row = -(-row // GROUP)
    padded = groups[: numel // row * groups_per_row].repeat_interleave(GROUP)
    return padded.view(numel // row, -1)[:, :row].reshape(-1)
