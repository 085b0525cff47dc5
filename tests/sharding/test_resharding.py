"""One checkpoint, three strategies: what ZeRO-1, FSDP2 or one process has saved loads in all of them, bit for bit."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flashdist import FlashAdamW
from flashdist.sharding.replicated import shard_states
from flashdist.sharding.row_shard import RowShard
from tests.sharding.odd_parameters import named_parameters, set_gradients
from tests.support.backends import assert_same_bits
from tests.support.ranks import run_ranks

# FSDP2 takes no parameter that is strided in memory and gives one without elements a wrong shape.
# Scalars and dtypes other than the module's stay plain tensors.
NOT_FSDP2 = ("last_channels", "transposed", "no_rows")
PLAIN_IN_FSDP2 = ("scalar", "fp16_weight", "fp32_weight")


class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        for name, p in named_parameters(seed).items():
            if name not in NOT_FSDP2:
                self.register_parameter(name, p)
        self.tied = self.embedding


def build(strategy, ranks, seed):
    model = Model(seed)
    if strategy == "fsdp2":
        fully_shard(
            model, mesh=init_device_mesh("cpu", (ranks,)), ignored_params={getattr(model, n) for n in PLAIN_IN_FSDP2}
        )
    opt = FlashAdamW(model.parameters(), lr=1e-2)
    if strategy == "zero1":
        shard_states(opt)
    return model, opt


def train(model, opt, step):
    """A step of whole gradients that depend on names only, cut as the parameters are."""
    whole = Model(seed=0)
    set_gradients(dict(whole.named_parameters()), step)
    for name, p in model.named_parameters():
        grad = whole.get_parameter(name).grad
        if isinstance(p, DTensor) and grad is not None:
            start = sum(chunk.shape[0] for chunk in grad.chunk(p.device_mesh.size())[: p.device_mesh.get_local_rank()])
            local = grad[start : start + p.to_local().shape[0]]
            grad = DTensor.from_local(
                local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        p.grad = grad
    opt.step()
    opt.zero_grad()


def everything(model, opt):
    """Whole weights and states by name."""
    found = {}
    for name, p in model.named_parameters():
        for key, value in {"weight": p.detach(), **opt.state.get(p, {})}.items():
            if isinstance(value, DTensor):
                parts = [None] * value.device_mesh.size()  # full_tensor() takes neither int16 (gloo) nor empty tensors
                dist.all_gather_object(parts, value.to_local())
                value = torch.cat(parts)
            elif isinstance(value, RowShard):
                value = value.full_tensor()
            found[f"{name}.{key}"] = value.clone()
    return found


def saves(rank, ranks, strategy, path):
    model, opt = build(strategy, ranks, seed=0)
    for t in range(3):
        train(model, opt, t)
    names, states = get_state_dict(model, opt)
    before = everything(model, opt)
    if strategy == "zero1":  # what is staged is what was there at the call
        # A group of its own: the thread that saves and step() would otherwise meet in each other's collective calls.
        saving = dist.new_group(backend="gloo")
        pending = dcp.async_save({"model": names, "optim": states}, checkpoint_id=path, process_group=saving)
        train(model, opt, 3)
        pending.result()
    else:
        dcp.save({"model": names, "optim": states}, checkpoint_id=path)
        train(model, opt, 3)
    after = everything(model, opt)  # a collective call, on all ranks
    return (before, after) if rank == 0 else None


def loads(rank, ranks, strategy, path, expected):
    model, opt = build(strategy, ranks, seed=1)
    train(model, opt, 7)
    names, states = get_state_dict(model, opt)
    loaded = {"model": names, "optim": states}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    compare(everything(model, opt), expected[0])
    train(model, opt, 3)
    compare(everything(model, opt), expected[1])
    dist.barrier()


def compare(found, expected):
    assert not found.keys() ^ expected.keys()
    for name, value in expected.items():
        assert_same_bits(found[name], value, name)


WAYS = [("zero1", 3), ("fsdp2", 2), ("plain", 1)]
READERS = [("plain", 1), ("zero1", 2), ("zero1", 3), ("fsdp2", 2)]


@pytest.mark.parametrize(("writer", "ranks"), WAYS, ids=[f"{s}-{n}" for s, n in WAYS])
def test_what_one_strategy_saves_all_load(writer, ranks, tmp_path):
    path = str(tmp_path / "checkpoint")
    expected = run_ranks(saves, ranks, writer, path)[0]
    for reader, number in READERS:
        run_ranks(loads, number, reader, path, expected)
    shutil.rmtree(path)
