"""Fingerprints see every way in which weights change behind the optimizer, tile by tile.

Their formula is not repeated here: they are never saved, and tests/kernels compares the backends' with each other.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flashdist.numerics.companding import GROUP
from flashdist.numerics.fingerprint import (
    TILE,
    TILE_GROUPS,
    UNKNOWN,
    drop_stale,
    fingerprint,
    num_tiles,
    stale_tiles,
)
from flashdist.numerics.groups import from_groups, group_layout
from tests.support.cases import GROUPED_SHAPES, SHAPES, name, normal

DTYPES = [torch.bfloat16, torch.float16]
# With a partial last group, with one row, with whole groups, with many tiles, with none.
LAYOUTS = [(5, 7), (33,), (6144,), (3, 33), (51, 37), (40, 49), (130, 96), (2, 1025), (1, 5000), (33, 1024), (90, 40)]


def weights_of(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return normal(shape, seed, 0.02, dtype)


def row_of(weight: Tensor) -> int:
    return group_layout(weight.shape).row


def tile_of_each_element(shape: tuple[int, ...]) -> Tensor:
    """The tile's number of every element, from the definition: 32 groups in order, groups inside rows."""
    layout = group_layout(shape)
    tiles = (torch.arange(layout.num_groups) // TILE_GROUPS)[:, None].expand(-1, GROUP)
    return from_groups(tiles, layout.numel // layout.row, layout.row).reshape(-1)


def changed_tiles(before: Tensor, after: Tensor) -> list[int]:
    row = row_of(before)
    return (fingerprint(before, row) != fingerprint(after, row)).nonzero().flatten().tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_one_number_a_tile_and_never_the_unknown(shape):
    weight = weights_of(shape)
    layout = group_layout(shape)
    marks = fingerprint(weight, layout.row) if layout.numel else fingerprint(weight, max(layout.row, 1))
    assert marks.dtype == torch.int32
    assert marks.shape == (num_tiles(layout.num_groups),)
    assert bool((marks != UNKNOWN).all())
    # All bits 0 sum to 0, which must not read as "not known yet".
    assert bool((fingerprint(torch.zeros_like(weight), max(layout.row, 1)) != UNKNOWN).all())


@given(st.sampled_from(LAYOUTS), st.sampled_from(DTYPES), st.integers(0, 10**6), st.integers(1, 2**16 - 1))
def test_any_edit_of_one_element_is_seen_in_its_tile_alone(shape, dtype, where, flip):
    weight = weights_of(shape, dtype)
    where %= weight.numel()
    edited = weight.clone()
    bits = edited.view(torch.int16).view(-1)
    bits[where] = int(bits[where]) ^ (flip if flip < 2**15 else flip - 2**16)
    assert changed_tiles(weight, edited) == [int(tile_of_each_element(shape)[where])]


def test_every_single_bit_of_a_tile():
    """16 bits in 1,024 places: none may cancel."""
    weight = weights_of((1, TILE))
    before = fingerprint(weight, TILE)
    bits = weight.view(torch.int16).view(-1)
    flips = torch.tensor([1 << b if b < 15 else -(2**15) for b in range(16)], dtype=torch.int16)
    edited = bits.repeat(16 * TILE, 1)
    edited[torch.arange(16 * TILE), torch.arange(TILE).repeat_interleave(16)] ^= flips.repeat(TILE)
    after = fingerprint(edited.view(torch.bfloat16), TILE)
    assert after.shape == (16 * TILE,)
    assert bool((after != before).all())


@given(st.sampled_from(LAYOUTS), st.integers(0, 10**6), st.integers(0, 10**6))
def test_any_swap_is_seen(shape, i, j):
    weight = weights_of(shape)
    i, j = i % weight.numel(), j % weight.numel()
    edited = weight.clone()
    flat = edited.view(-1)
    flat[i], flat[j] = weight.view(-1)[j], weight.view(-1)[i]
    tiles = tile_of_each_element(shape)
    same = bool(weight.view(-1)[i] == weight.view(-1)[j])
    expected = set() if same else {int(tiles[i]), int(tiles[j])}
    assert set(changed_tiles(weight, edited)) == expected


@pytest.mark.parametrize("shape", LAYOUTS, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w * (torch.arange(w.numel()).view(w.shape) % 2).to(w.dtype),
        lambda w: w * 2,
        lambda w: w * 0.99,
        lambda w: -w,
        lambda w: torch.zeros_like(w),
        lambda w: w.flatten().roll(1).view(w.shape),
        lambda w: w.flatten().flip(0).view(w.shape),
        lambda w: normal(tuple(w.shape), 99, 0.02, w.dtype),
    ],
    ids=["mask", "double", "scale", "negate", "zero", "shift", "flip", "replace"],
)
def test_what_people_do_to_weights_is_seen_in_every_tile(shape, dtype, change):
    weight = weights_of(shape, dtype)
    assert changed_tiles(weight, change(weight)) == list(range(num_tiles(group_layout(shape).num_groups)))


@pytest.mark.parametrize("after", [0.0, 0.5, 0.99609375, 1.0078125, 1.5, 2.0, -1.0])
@pytest.mark.parametrize("shape", [(33,), (1024,), (6144,), (33, 1024), (90, 40)], ids=name)
def test_another_constant_in_a_constant_tensor_is_seen(shape, after):
    """Norm weights and biases begin as constants; what all elements share must not cancel in a sum over a tile."""
    before = torch.ones(shape, dtype=torch.bfloat16)
    tiles = num_tiles(group_layout(shape).num_groups)
    assert changed_tiles(before, torch.full_like(before, after)) == list(range(tiles))


def test_random_edits_are_never_missed():
    weight = weights_of((1, TILE))
    before = fingerprint(weight, TILE)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 5, 100):
        rows = 2000
        edited = weight.view(torch.int16).repeat(rows, 1)
        places = torch.rand(rows, TILE, generator=generator).argsort(1)[:, :count]
        noise = torch.randint(1, 200, places.shape, generator=generator, dtype=torch.int16)
        edited.scatter_(1, places, edited.gather(1, places) + noise)
        assert bool((fingerprint(edited.view(torch.bfloat16), TILE) != before).all())


def test_the_sign_of_zero_counts():
    weight = torch.zeros(1, 64, dtype=torch.bfloat16)
    edited = weight.clone()
    edited[0, 5] = -0.0
    assert changed_tiles(weight, edited) == [0]


@pytest.mark.parametrize("shape", [s for s in GROUPED_SHAPES if s[0] > 1], ids=name)
def test_a_shard_of_whole_tiles_has_their_fingerprints(shape):
    layout = group_layout(shape)
    per_slice = layout.num_groups // shape[0]
    # As many slices of dim 0 as make whole tiles.
    rows = next(n for n in range(1, TILE_GROUPS + 1) if n * per_slice % TILE_GROUPS == 0)
    weight = weights_of(shape)
    whole = fingerprint(weight, layout.row)
    shard = weight[: min(rows, shape[0])].contiguous()
    part = fingerprint(shard, layout.row)
    complete = shard.numel() // layout.row * layout.groups_per_row // TILE_GROUPS
    assert torch.equal(part[:complete], whole[:complete])


def test_unknown_is_never_stale():
    weight = weights_of((90, 40))
    stored = torch.full((num_tiles(180),), UNKNOWN, dtype=torch.int32)
    assert not bool(stale_tiles(stored, weight, 40).any())
    stored[2] = 12345
    assert stale_tiles(stored, weight, 40).nonzero().flatten().tolist() == [2]


@given(st.sampled_from(LAYOUTS), st.sampled_from([torch.int8, torch.int16]), st.integers(0, 10**6))
def test_drop_stale_zeroes_the_corrections_of_changed_tiles_alone(shape, dtype, where):
    weight = weights_of(shape)
    row = row_of(weight)
    stored = fingerprint(weight, row)
    correction = torch.randint(1, 100, shape, dtype=dtype)
    kept = correction.clone()
    assert drop_stale(correction, stored, weight, row) == 0
    assert torch.equal(correction, kept)
    where %= weight.numel()
    weight.view(-1)[where] += 1
    assert drop_stale(correction, stored, weight, row) == 1
    tiles = tile_of_each_element(shape)
    hit = tiles == tiles[where]
    assert not bool(correction.view(-1)[hit].any())
    assert torch.equal(correction.view(-1)[~hit], kept.view(-1)[~hit])
