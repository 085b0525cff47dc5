"""A fingerprint of the 16-bit weights, one uint32 a tile of 512 elements, that tells when they were changed behind
the optimizer.

A correction belongs to the weight it was split off from. Whoever writes to the weight afterwards (a loaded state dict,
an EMA swap, a mask, a broadcast) leaves a correction that no longer fits. Each step stores a fingerprint of the weights
it wrote; the next one compares before it joins, and takes corrections of a tile that differs as 0.

The fingerprint of a tile is a sum over its pairs of neighbours. The 32 bits of a pair are multiplied by the odd
weight of the pair's place, mod 2^32, and mixed by ``y ^ (y >> 16)``. Both maps are one to one: a change within one
pair always changes the sum; what touches several pairs escapes with a chance of 2^-32. (Mixing before the
multiplication would leave the sum linear in the upper halves, where 2 * w, -w and 0 * w can cancel over a tile:
measured.) The value 0 is kept for "not known yet: trust the correction", so a sum of 0 is stored as 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashdist.numerics.companding import GROUP
from flashdist.numerics.groups import to_groups

TILE_GROUPS = 16
TILE = TILE_GROUPS * GROUP
UNKNOWN = 0
# Even multiplier and odd offset: every weight is odd, and no two agree in their lowest 17 bits.
PLACE_MULTIPLIER = 0x9E3779B2
PLACE_OFFSET = 0x85EBCA6B
_CHUNK_TILES = 1024


def num_tiles(num_groups: int) -> int:
    """Tiles that cover a tensor."""
    return -(-num_groups // TILE_GROUPS)


def place_weights(device: torch.device | None = None) -> Tensor:
    """int32 ``[TILE / 2]``: the odd factor of each pair of a tile (two's complement of the uint32)."""
    place = torch.arange(TILE // 2, dtype=torch.int64, device=device)
    return ((place * PLACE_MULTIPLIER + PLACE_OFFSET) % 2**32).to(torch.int32)


def fingerprint(weight: Tensor, row: int) -> Tensor:
    """Fingerprints of a ``weight``: contiguous, bf16 or fp16, its groups in rows of ``row`` elements.

    Returns:
        int32 ``[num_tiles]`` (the bits of the uint32), never :data:`UNKNOWN`.
    """
    if weight.numel() == 0:
        return torch.empty(0, dtype=torch.int32, device=weight.device)
    bits = weight.view(torch.int16).view(-1)
    if row % GROUP and row != bits.numel():
        bits = to_groups(bits.view(-1, row)).view(-1)
    weights = place_weights(weight.device)
    total = torch.cat([_sum_tiles(chunk, weights) for chunk in bits.split(_CHUNK_TILES * TILE)])
    return torch.where(total == UNKNOWN, 1, total)


def _sum_tiles(chunk: Tensor, weights: Tensor) -> Tensor:
    """int16 ``[n]`` -> int32 ``[ceil(n / TILE)]``; a partial tile is filled up with zeros."""
    padding = -chunk.numel() % TILE
    if padding:
        chunk = torch.nn.functional.pad(chunk, (0, padding))
    elif chunk.storage_offset() % 2:
        chunk = chunk.clone()  # pairs are read as int32, which needs their alignment
    pairs = chunk.view(torch.int32).view(-1, TILE // 2)
    product = pairs * weights
    return (product >> 16).bitwise_and_(0xFFFF).bitwise_xor_(product).sum(dim=-1, dtype=torch.int32)


def stale_tiles(stored: Tensor, weight: Tensor, row: int) -> Tensor:
    """Which tiles hold other weights than the last step wrote.

    Args:
        stored: int32 ``[num_tiles]``, from :func:`fingerprint`, or :data:`UNKNOWN` (never stale).
        weight: the weights now, bf16 or fp16, contiguous.
        row: elements in a row.

    Returns:
        bool ``[num_tiles]``.
    """
    return (stored != UNKNOWN) & (stored != fingerprint(weight, row))


def drop_stale(correction: Tensor, stored: Tensor, weight: Tensor, row: int) -> int:
    """Zero in place the corrections of stale tiles; returns the number of these tiles.

    Args:
        correction: int8 or int16 of the weight's shape; local and contiguous, as the others are.
        stored, weight, row: as in :func:`stale_tiles`.
    """
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
