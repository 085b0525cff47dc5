"""A model of awkward shapes under every way of sharding, with gradients that are the same on any number of ranks."""

from __future__ import annotations

import hashlib
import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashdist

# Name of a strategy to the numbers of ranks it is tried with.
STRATEGIES = {"single": (1,), "fsdp2": (1, 2, 3, 4), "hsdp": (4,), "fsdp2_tp": (4,), "ddp_zero1": (3,), "ddp": (2,)}


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Linear(7, 5)
        self.vector = nn.Parameter(torch.empty(7))
        self.wide = nn.Linear(37, 51)
        self.narrow = nn.Linear(2, 8)
        self.conv = nn.Conv2d(3, 64, 7)
        self.one = nn.Parameter(torch.empty(1, 40, 64))
        self.three = nn.Parameter(torch.empty(3))
        self.long = nn.Parameter(torch.empty(6144))
        self.empty = nn.Parameter(torch.empty(0))
        self.scalar = nn.Parameter(torch.empty(()))
        self.embedding = nn.Embedding(10, 40)
        self.experts = nn.Parameter(torch.empty(3, 8, 40))
        self.frozen = nn.Linear(33, 9).requires_grad_(False)
        self.unused = nn.Linear(64, 6)
        self.norm = nn.BatchNorm1d(7)
        self.column = nn.Linear(64, 51)
        self.row = nn.Linear(128, 30)
        self.head = nn.Linear(40, 10, bias=False)
        self.head.weight = self.embedding.weight


def build(strategy, world_size, dtype=torch.bfloat16, model_class=Odd, device="cpu"):
    """The sharded model; wrapped only where the strategy wraps (ddp)."""
    model = model_class().to(dtype).to(device)
    if strategy == "fsdp2":
        shard(model, init_device_mesh(device, (world_size,)))
    elif strategy == "hsdp":
        shard(model, init_device_mesh(device, (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
    elif strategy == "fsdp2_tp":
        mesh = init_device_mesh(device, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {
            "column": ColwiseParallel(output_layouts=Replicate()),
            "row": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        shard(model, mesh["dp"])
    elif strategy == "ddp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


def shard(model, mesh):
    for name in ("wide", "conv"):
        fully_shard(getattr(model, name), mesh=mesh)
    # FSDP2 takes no scalars: they stay plain tensors, beside DTensors in one param group.
    fully_shard(model, mesh=mesh, ignored_params={p for p in model.parameters() if p.dim() == 0})


def make_optimizer(model, strategy, opt_class=flashdist.FlashAdamW, **settings):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    opt = opt_class([{"params": decay}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2, **settings)
    if strategy == "ddp_zero1":
        from flashdist.sharding.replicated import shard_states

        shard_states(opt)
    return opt


def tensors_of(model, opt):
    """Every tensor of both, by name."""
    named = {}
    bare = getattr(model, "module", model)
    for name, p in bare.named_parameters():
        named[name] = p.detach()
        for key, value in (opt.state.get(p, {}) if opt is not None else {}).items():
            named[f"{name}.{key}"] = value
    named.update(dict(bare.named_buffers()))
    return named


def part_of(full, like):
    """The part of a full tensor that this rank holds of ``like``, placed like it."""
    full = full.to(like.device)
    if not isinstance(like, DTensor):
        return full.clone()
    shape, offset = compute_local_shape_and_global_offset(full.shape, like.device_mesh, like.placements)
    local = full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].contiguous().clone()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def seeded(name, shape, seed):
    generator = torch.Generator().manual_seed(int(hashlib.sha256(f"{name} {seed}".encode()).hexdigest()[:8], 16))
    return torch.randn(shape, generator=generator)


@torch.no_grad()
def fill(model, seed):
    """Set weights and buffers by name and seed."""
    bare = getattr(model, "module", model)
    for name, t in [*bare.named_parameters(), *bare.named_buffers()]:
        local = t.to_local() if isinstance(t, DTensor) else t
        full = seeded(name, t.shape, seed).to(t.dtype)
        mine = part_of(full, t)
        local.copy_(mine.to_local() if isinstance(mine, DTensor) else mine)


def step(model, opt, seed):
    """One step with gradients made from names and the seed."""
    bare = getattr(model, "module", model)
    for name, p in bare.named_parameters():
        if p.requires_grad and not name.startswith("unused"):
            p.grad = part_of((seeded(name, p.shape, seed + 1000) * 0.1).to(p.dtype), p)
    opt.step()
    opt.zero_grad()


def whole(t):
    if isinstance(t, DTensor) and t.dtype == torch.int16:  # gloo does not gather int16
        return t.to(torch.int32).full_tensor().to(torch.int16)
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def digests(model, opt):
    """Name -> dtype, shape and SHA-256 of the whole tensor's bytes."""
    found = {}
    for name, t in tensors_of(model, opt).items():
        full = whole(t).detach().cpu().contiguous()
        data = full.view(-1).view(torch.uint8).numpy().tobytes() if full.numel() else b""
        found[name] = (str(full.dtype), tuple(full.shape), hashlib.sha256(data).hexdigest())
    return found
