"""The global norm over real ranks is the one of a single process, whatever the meshes and placements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flashdist import FlashAdamW, FlashSGD
from tests.support.backends import BF16, FP32, BackendUnderTest
from tests.support.cases import normal
from tests.support.ranks import run_ranks

Placed = tuple[tuple[int, ...], torch.dtype, Any]  # shape, dtype, placements (None: a plain tensor)
ROWS, REPLICAS = [Shard(0)], [Replicate(), Shard(0)]
# Uneven shards, ranks without a row, plain tensors (ignored by FSDP, alike on every rank) between sharded ones.
ONE_DIM: list[Placed] = [((5, 40), BF16, ROWS), ((7,), FP32, None), ((1, 33), BF16, ROWS), ((9,), BF16, ROWS)]
TWO_DIMS: list[Placed] = [
    ((5, 40), BF16, REPLICAS),
    ((8, 64), FP32, [Shard(0), Shard(1)]),
    ((3, 33), BF16, None),
    ((4, 32), BF16, [Replicate(), Replicate()]),
    ((6, 32), BF16, [Shard(0), Replicate()]),
]
CASES = {
    "a row of 1": ((1,), ONE_DIM),
    "a row of 2": ((2,), ONE_DIM),
    "a row of 3": ((3,), ONE_DIM),
    "replicas, shards": ((2, 2), TWO_DIMS),
}
ORDERS = [2.0, 1.0, math.inf]


def gradient(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return normal(shape, seed=seed, scale=10.0**-seed, dtype=dtype)


def placed_norms(
    rank: int, world_size: int, backend: str, mesh_shape: tuple[int, ...], placed: list[Placed]
) -> list[float]:
    mesh = init_device_mesh("cpu", mesh_shape)
    params = []
    for i, (shape, dtype, placements) in enumerate(placed):
        weight, grad = torch.zeros(shape, dtype=dtype), gradient(shape, dtype, i)
        if placements is not None:
            weight, grad = (distribute_tensor(t, mesh, placements) for t in (weight, grad))
        params.append(nn.Parameter(weight))
        params[-1].grad = grad
    opt = BackendUnderTest(backend, torch.device("cpu")).build(FlashAdamW, params)
    norms = []
    for order in ORDERS:
        norms.append(float(opt.clip_grad_norm_(1.0, order)))
        opt._clip_factor = None  # the next one is to be of the same gradients
    return norms


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_any_placement(case: str, backend: str):
    mesh_shape, placed = CASES[case]
    ranks = run_ranks(placed_norms, math.prod(mesh_shape), backend, mesh_shape, placed)
    assert all(found == ranks[0] for found in ranks), "every rank must clip by the same factor"
    flat = torch.cat([gradient(s, d, i).double().flatten() for i, (s, d, _) in enumerate(placed)])
    expected = [float(torch.linalg.vector_norm(flat, order)) for order in ORDERS]
    assert ranks[0] == pytest.approx(expected, rel=1e-6)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 5))


def loss_of(net: nn.Module) -> Tensor:
    return net(normal((4, 33), seed=9)).square().mean()


def fsdp_norm(rank: int, world_size: int, mesh_shape: tuple[int, ...], ignore: bool) -> tuple[float, Tensor]:
    net = model()
    ignored = {net[0].bias} if ignore else None
    for module in (net[0], net[2], net):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicas", "shards")[-len(mesh_shape) :])
        fully_shard(module, mesh=mesh, ignored_params=ignored)
    opt = FlashSGD(net.parameters(), lr=1.0)
    loss_of(net).backward()  # the same batch on every rank, so that their mean is that of one process
    norm = float(opt.clip_grad_norm_(1e-3))
    opt.step()
    return norm, opt.master_weight(net[2].weight).full_tensor().clone()


@pytest.mark.parametrize(("mesh_shape", "ignore"), [((2,), False), ((3,), True), ((2, 2), False)], ids=str)
def test_fully_shard(mesh_shape: tuple[int, ...], ignore: bool):
    net = model()
    opt = FlashSGD(net.parameters(), lr=1.0)
    loss_of(net).backward()
    expected = float(opt.clip_grad_norm_(1e-3))
    opt.step()
    for norm, weight in run_ranks(fsdp_norm, math.prod(mesh_shape), mesh_shape, ignore):
        assert norm == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(weight, opt.master_weight(net[2].weight), rtol=0, atol=1e-7)  # steps of 1e-4
