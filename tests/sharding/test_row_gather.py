"""Rows written on one rank arrive on all: many dtypes at once, in chunks that cut tensors anywhere."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from flashdist.sharding.row_cut import cut_rows
from flashdist.sharding.row_gather import CHUNK_BYTES, RowGather
from tests.support.ranks import run_ranks

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int16]


def gathers(rank, ranks, chunk_bytes):
    generator = random.Random(ranks)
    largest = 5000 if chunk_bytes is None or chunk_bytes > 1000 else 200
    for _ in range(3):
        sizes = [min(generator.choice([0, 1, 3, 33, 1000, 5000]), largest) for _ in range(12)]
        bounds = cut_rows([(max(n, 1), 1) for n in sizes], ranks)
        tensors, expected = [], []
        for i, (n, cut) in enumerate(zip(sizes, bounds, strict=True)):
            whole = (torch.arange(n) % 100 + i).to(DTYPES[i % len(DTYPES)])
            cut = [min(c, n) for c in cut]
            mine = torch.zeros_like(whole)
            mine[cut[rank] : cut[rank + 1]] = whole[cut[rank] : cut[rank + 1]]
            tensors.append((mine, cut))
            expected.append(whole)
        gather = RowGather(tensors, dist.group.WORLD, torch.device("cpu"), chunk_bytes)
        assert gather.buffer.numel() <= max(CHUNK_BYTES if chunk_bytes is None else chunk_bytes, 16 * ranks)
        for _ in range(2):  # the buffer is used again
            assert gather.run(header=7 + rank).tolist() == [7 + r for r in range(ranks)]
            for (found, _), whole in zip(tensors, expected, strict=True):
                assert torch.equal(found, whole)
            for found, cut in tensors:
                for other in range(ranks):
                    if other != rank:
                        found[cut[other] : cut[other + 1]] = 0


def test_chunks_of_any_size():
    for ranks, chunk_bytes in ((3, None), (3, 4096), (2, 48), (1, 1000)):
        run_ranks(gathers, ranks, chunk_bytes)


def nothing(rank, ranks):
    gather = RowGather([(torch.empty(0), [0] * (ranks + 1))], dist.group.WORLD, torch.device("cpu"))
    return gather.run(header=rank).tolist()


def test_the_headers_travel_also_with_nothing():
    assert run_ranks(nothing, 2) == [[0, 1]] * 2
