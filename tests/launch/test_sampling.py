from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling import Permutation, num_windows, read_windows, sample_ids, share_of_rank


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_a_permutation_holds_every_number_once(size):
    for epoch in range(3):
        order = Permutation(size, seed=5, epoch=epoch)
        assert sorted(order[i] for i in range(size)) == list(range(size))


def test_a_permutation_is_well_mixed():
    order = np.array([Permutation(10_000, 1, 0)[i] for i in range(10_000)])
    places = np.arange(10_000)
    assert abs(np.corrcoef(places, order)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).mean() < 0.002
    other = np.array([Permutation(10_000, 1, 1)[i] for i in range(10_000)])
    assert (order == other).mean() < 0.002


def test_the_order_is_pinned():
    """A change here would give every saved run another data order after its resume."""
    assert sample_ids(0, 12, windows=10, seed=0) == [8, 1, 9, 6, 7, 3, 4, 5, 0, 2, 6, 4]


def test_samples_do_not_depend_on_how_they_are_asked_for():
    whole = sample_ids(0, 100, windows=30, seed=3)
    assert [i for first in range(0, 100, 4) for i in sample_ids(first, 4, windows=30, seed=3)] == whole
    assert sorted(whole[:30]) == sorted(whole[30:60]) == list(range(30))
    assert whole[:30] != whole[30:60]
    assert sample_ids(0, 100, windows=30, seed=4) != whole


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 12), (1, 3), (2, 6), (3, 2), (3, 4), (12, 1)])
def test_ranks_divide_a_batch_without_rest(world_size, micro_batch):
    ids = list(range(100, 112))
    shares = [
        share_of_rank(ids, rank=rank, world_size=world_size, micro_batch=micro_batch) for rank in range(world_size)
    ]
    turns = len(ids) // (world_size * micro_batch)
    assert all(len(share) == turns for share in shares)
    in_order = [i for turn in range(turns) for share in shares for i in share[turn]]
    assert in_order == ids


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match="a batch of 12 is no multiple of 5 ranks x 2 sequences"):
        share_of_rank(list(range(12)), rank=0, world_size=5, micro_batch=2)


def test_windows_cover_the_text_and_targets_are_inputs_moved_by_one():
    text = np.arange(101, dtype=np.uint16)
    assert num_windows(text, 10) == 10
    assert num_windows(text[:100], 10) == 9
    assert num_windows(text[:10], 10) == num_windows(text[:0], 10) == 0
    x, y = read_windows(text, [0, 9, 4], 10)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)
    assert x[:, 0].tolist() == [0, 90, 40]
    assert int(y.max()) == 100
