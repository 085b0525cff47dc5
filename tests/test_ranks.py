"""The pool of rank processes that the tests of sharding stand on."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks


def total(rank, world_size, scale):
    t = torch.ones(1) * (rank + 1) * scale
    dist.all_reduce(t)
    return t.item()


def fails(rank, world_size):
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def dies(rank, world_size):
    if rank == 0:
        os._exit(3)
    dist.barrier()


def test_ranks_reduce_and_sizes_may_differ_from_call_to_call():
    assert run_ranks(total, 2, 2.0) == [6.0, 6.0]
    assert run_ranks(total, 3, 1.0) == [6.0] * 3
    assert run_ranks(total, 1, 1.0) == [1.0]


def test_an_exception_of_a_rank_reaches_the_test():
    with pytest.raises(RankError, match="rank one is unwell"):
        run_ranks(fails, 2)
    assert run_ranks(total, 2, 1.0) == [3.0, 3.0]


def test_a_rank_that_dies_is_reported():
    with pytest.raises(RankError, match="rank 0 died"):
        run_ranks(dies, 2)
    assert run_ranks(total, 2, 1.0) == [3.0, 3.0]
