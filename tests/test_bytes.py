"""Bytes per parameter are those of the README, and the eager step's temporaries do not grow with a parameter."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashdist.numerics.fingerprint import TILE
from tests.support.backends import BF16, FP16, FP32, BackendUnderTest, set_gradients

N = 64 * 1024
# Weight, correction, moments and scales. The gradient adds 2.
README_TABLE: list[tuple[Any, dict[str, Any], float]] = [
    (FlashAdamW, {}, 5.1875),
    (FlashAdam, {}, 5.1875),
    (FlashLion, {}, 4.0625),
    (FlashSGD, {"momentum": 0.9}, 4.0625),
    (FlashSGDW, {"momentum": 0.9}, 4.0625),
    (FlashSGD, {}, 3.0),
    (FlashAdamW, {"master_weight_bits": 32}, 6.1875),
    (FlashAdamW, {"master_weight_bits": None}, 4.1875),
    (FlashAdamW, {"quantize": False}, 11.0),
]


@pytest.mark.parametrize(("cls", "arguments", "expected"), README_TABLE)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_bytes_per_parameter(cls: Any, arguments: dict[str, Any], expected: float, dtype: torch.dtype):
    p = nn.Parameter(torch.zeros(64, 1024, dtype=dtype))
    opt = cls([p], **arguments)
    opt.state_dict()
    tensors = [p, *opt.state[p].values()]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == expected * N + 4  # the step count
    set_gradients([p], seed=0)
    opt.step()
    summary = opt.memory_summary()
    kept = summary.weights + summary.corrections + summary.moments + summary.scales
    assert kept == expected * N
    assert summary.gradients == 2 * N
    assert summary.steps == 4
    assert summary.derived == (0 if arguments.get("master_weight_bits", 24) is None else 4 * N // TILE)


def test_fp32_weights():
    p = nn.Parameter(torch.zeros(64, 1024, dtype=FP32))
    opt = FlashAdamW([p])
    opt.state_dict()
    summary = opt.memory_summary()
    assert summary.weights + summary.corrections + summary.moments + summary.scales == 6.1875 * N
    assert summary.derived == 0


def test_one_dimensional_tensors_keep_fp32_moments_and_int16_corrections():
    p = nn.Parameter(torch.zeros(6144, dtype=BF16))
    opt = FlashAdamW([p])
    opt.state_dict()
    summary = opt.memory_summary()
    assert (summary.corrections, summary.moments, summary.scales) == (2 * 6144, 8 * 6144, 0)


def test_the_constructor_allocates_nothing():
    with LiveBytes() as live:
        p = nn.Parameter(torch.zeros(64, 1024, dtype=BF16))
        held = live.now
        opt = FlashAdamW([p])
        assert live.now == held
        assert not opt.state
        summary = opt.memory_summary()
        assert summary.total == summary.weights
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(32, dtype=BF16))]})
        assert not opt.state


def test_launch_tables_are_counted(triton_backend: BackendUnderTest):
    p = nn.Parameter(torch.zeros(2, 32, dtype=BF16, device=triton_backend.device))
    opt = triton_backend.build(FlashAdamW, [p])
    set_gradients([p], seed=0)
    opt.step()
    assert opt.memory_summary().derived > 4


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that come to be and go inside a ``with``; `peak` is the most at a time.

    What was there before has to be named: views of it would look new.
    """

    def __init__(self, *there: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {t.untyped_storage()._cdata: 0 for t in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(t, Tensor):
                self._see(t.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = self._known[key] = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


def test_live_bytes_are_counted():
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a + 1
        del a
        assert (live.now, live.peak) == (4000, 8000)
        c = b.view(10, 100)
        del b
        assert live.now == 4000
        del c
        assert live.now == 0


@pytest.mark.parametrize("shape", [(4096, 4096), (512, 32768 + 1)], ids=str)
def test_temporaries_of_the_eager_step_do_not_grow_with_the_parameter(shape: tuple[int, int]):
    """2^24 elements hold 87 MB; what a step needs beside them stays below 64 MiB, norm and clipping included."""
    p = nn.Parameter(torch.ones(shape, dtype=BF16))
    p.grad = torch.ones_like(p)
    opt = FlashAdamW([p])
    opt.state_dict()
    with LiveBytes(p, p.grad, *opt.state[p].values()) as live:
        opt.clip_grad_norm_(1.0)
        opt.step()
    assert 0 < live.peak < 64 * 2**20
    assert live.now < 2**20
