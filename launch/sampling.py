"""Which windows of the text a step sees: a function of the seed and the step's place, and of nothing else.

The text is cut into windows of T + 1 tokens that overlap by one, which is a target first and an input next. Each epoch
goes through all of them in its own order. There is no state to save: sample number n of a run (counted over all ranks)
is always the same window, so a run that is resumed, by however many ranks, goes on with the very next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROUNDS = 4


class Permutation:
    """A permutation of range(size) that is computed and not stored: a Feistel network whose round keys are hashes.

    Places outside of the range are sent through the network again until they fall inside. Source: Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002. Quality for shuffling is what is asked of it, not secrecy.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs a size of at least 1, got {size}")
        self.size = size
        self.half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
        self.keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]

    def __getitem__(self, place: int) -> int:
        while True:
            place = self._once(place)
            if place < self.size:
                return place

    def _once(self, place: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = place >> self.half_bits, place & mask
        for key in self.keys:
            # The finaliser of splitmix64, as the round function.
            x = (right ^ key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (x ^ x >> 31) & mask
        return left << self.half_bits | right


def sample_ids(first: int, count: int, *, windows: int, seed: int) -> list[int]:
    """The windows that samples `first` to `first + count - 1` of a run are, of `windows` in the text."""
    ids: list[int] = []
    while count:
        epoch, place = divmod(first, windows)
        here = min(count, windows - place)
        order = Permutation(windows, seed, epoch)
        ids.extend(order[place + i] for i in range(here))
        first, count = first + here, count - here
    return ids


def share_of_rank(ids: Sequence[int], *, rank: int, world_size: int, micro_batch: int) -> list[list[int]]:
    """One rank's micro-batches of a global batch: the ranks take turns, micro_batch samples at a time.

    Raises:
        ValueError: the batch is no multiple of `world_size * micro_batch`.
    """
    turn = world_size * micro_batch
    if len(ids) % turn:
        raise ValueError(f"a batch of {len(ids)} is no multiple of {world_size} ranks x {micro_batch} sequences")
    starts = range(rank * micro_batch, len(ids), turn)
    return [list(ids[start : start + micro_batch]) for start in starts]


def num_windows(tokens: Sequence[Any] | np.ndarray[Any, Any], context: int) -> int:
    """How many windows of `context` inputs and as many targets a text has."""
    return max(0, (len(tokens) - 1) // context)


def read_windows(tokens: np.ndarray[Any, Any], ids: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of some windows, int64 (B, T) each."""
    rows = np.stack([tokens[i * context : i * context + context + 1] for i in ids]).astype(np.int64)
    windows = torch.from_numpy(rows)  # (B, T + 1)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
