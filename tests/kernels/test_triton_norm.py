"""The one-pass sum of squares: every size, dtype and place in memory, always the same bits, never an old address."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flashdist.kernels import triton_norm
from flashdist.kernels.triton_launch import TritonBackend
from tests.support.backends import BF16, FP16, FP32, BackendUnderTest, assert_same_bits
from tests.support.cases import normal
from tests.support.tolerances import tolerance

BLOCK = triton_norm.BLOCK
SIZES = [1, 31, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 3 * BLOCK + 77]


def on(lab: BackendUnderTest, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.to(lab.device) for t in tensors]


def exact(tensors: Sequence[Tensor]) -> float:
    return math.fsum(float(t.double().square().sum()) for t in tensors)


def check(found: Tensor, tensors: Sequence[Tensor]) -> None:
    assert found.shape == ()
    assert found.dtype == FP32
    assert float(found) == pytest.approx(exact(tensors), rel=tolerance("sum of squares, relative"))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("most", [1, 2, 16])
def test_every_size(triton_backend: BackendUnderTest, monkeypatch, dtype: torch.dtype, most: int):
    """Spans of one, two and many tiles; each tensor ends within, at and after one."""
    monkeypatch.setattr(triton_norm, "ENOUGH_PROGRAMS", 1)
    monkeypatch.setattr(triton_norm, "MAX_TILES_PER_PROGRAM", most)
    grads = on(triton_backend, [normal((n,), seed=n, dtype=dtype) for n in SIZES])
    check(TritonBackend().grad_square_sum(grads), grads)
    for g in grads:
        check(TritonBackend().grad_square_sum([g]), [g])


def test_dtypes_and_places_in_one_list(triton_backend: BackendUnderTest):
    """Mixed dtypes, starts at odd elements, a transposed and an expanded tensor."""
    odd = normal((2 * BLOCK + 2,), seed=1, dtype=BF16)
    grads = on(triton_backend, [normal((70, 70), 2), normal((BLOCK,), 3, dtype=FP16), normal((33, 50), 4, dtype=BF16)])
    room = odd.to(triton_backend.device)
    grads += [room[1:], room[1:-1], grads[0].T, normal((1, 5), 5).to(triton_backend.device).expand(4, 5)]
    check(TritonBackend().grad_square_sum(grads), grads)
    check(TritonBackend().grad_square_sum(grads[-2:]), grads[-2:])


def test_one_backend_serves_lists_in_turn_and_new_addresses(triton_backend: BackendUnderTest):
    backend, kept = TritonBackend(), []
    for t in range(4):
        for sizes in ([(3, 40), (7,)], [(5,)], [(3, 40), (8,)]):
            grads = on(triton_backend, [normal(s, seed=t, dtype=BF16) for s in sizes])
            kept.append(grads)  # so that no address comes back
            check(backend.grad_square_sum(grads), grads)
    grads[0].mul_(2.0)
    check(backend.grad_square_sum(grads), grads)
    assert len(backend._norms._plans) == 3
    assert len(backend.workspace()) == 9


def test_plans_do_not_pile_up(triton_backend: BackendUnderTest, monkeypatch):
    monkeypatch.setattr(triton_norm.Norms, "MAX_PLANS", 2)
    backend = TritonBackend()
    for n in range(1, 6):
        grads = on(triton_backend, [torch.ones(n)])
        assert float(backend.grad_square_sum(grads)) == n
    assert len(backend._norms._plans) == 2


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_non_finite_element_is_seen(triton_backend: BackendUnderTest, value: float):
    for place in (0, BLOCK, -1):
        grads = on(triton_backend, [normal((BLOCK + 9,), seed=0, dtype=BF16), torch.ones(3)])
        grads[0][place] = value
        assert not torch.isfinite(TritonBackend().grad_square_sum(grads))


def test_the_sum_is_the_same_every_time(triton_backend: BackendUnderTest):
    grads = on(triton_backend, [normal((n,), seed=n, dtype=BF16) for n in (3 * BLOCK, 1000, 77)])
    first = TritonBackend().grad_square_sum(grads)
    for _ in range(3):
        assert_same_bits(TritonBackend().grad_square_sum([g.clone() for g in grads]), first)
