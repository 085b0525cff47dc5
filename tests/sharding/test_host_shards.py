"""Shards on the host in a mesh of GPUs, as FSDP2's CPUOffloadPolicy makes them. No GPU is needed to build the mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from flashdist import FlashAdamW, checkpoint
from flashdist.sharding.local_shard import local
from tests.support.backends import BF16, assert_same_bits
from tests.support.cases import normal

SHAPES = [(33, 64), (5, 7), (7,)]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def offloaded(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensor(tensor, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)


class Net(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, fill: float = 1.0) -> None:
        super().__init__()
        for i, shape in enumerate(SHAPES):
            weight = normal(shape, seed=i, dtype=BF16) * fill
            self.register_parameter(f"p{i}", nn.Parameter(weight if mesh is None else offloaded(weight, mesh)))


def test_states_stay_beside_their_host_shards(tmp_path):
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    host, plain = Net(mesh), Net(None)
    opts = [FlashAdamW(net.parameters(), lr=0.1) for net in (host, plain)]
    for t in range(3):
        for i, (p, q) in enumerate(zip(host.parameters(), plain.parameters(), strict=True)):
            q.grad = normal(q.shape, seed=10 * t + i, dtype=BF16)
            p.grad = offloaded(q.grad.clone(), mesh)
        for opt in opts:
            opt.step()

    def assert_like_plain(net: Net, opt: FlashAdamW) -> None:
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert_same_bits(local(p.detach()), q.detach(), "weight")
            for key, value in opts[1].state[q].items():
                assert local(opt.state[p][key]).device.type == "cpu"
                assert_same_bits(local(opt.state[p][key]), value, key)
            assert_same_bits(local(opt.master_weight(p)), opts[1].master_weight(q), "master weight")

    assert_like_plain(host, opts[0])
    checkpoint.save(tmp_path / "from", host, opts[0])
    other = Net(mesh, fill=0.5)
    opt = FlashAdamW(other.parameters(), lr=0.2)
    checkpoint.load(tmp_path / "from", other, opt)
    assert_like_plain(other, opt)
