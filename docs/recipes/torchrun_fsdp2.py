"""FSDP2: each rank keeps and steps its shard of weights, corrections and moments.

    torchrun --nproc-per-node 2 docs/recipes/torchrun_fsdp2.py

Started again it goes on from its last checkpoint, on another number of ranks as well.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flashdist import FlashAdamW
from flashdist.checkpoint import load, save

FOLDER = "runs/torchrun_fsdp2"
STEPS, SAVE_EVERY, BATCH = 20, 10, 256
device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
if device != "cpu":
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()  # gloo on CPUs, NCCL on GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 8)).to(device, torch.bfloat16)
mesh = init_device_mesh(device, (ranks,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # gradients are summed in fp32
for layer in (model[0], model[3], model):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
opt = FlashAdamW(model.parameters(), lr=1e-2)  # after fully_shard, which replaces the parameters

start = 0
if checkpoints := sorted(Path(FOLDER).glob("step-????")):
    start = load(checkpoints[-1], model, opt)["step"]

losses = {}
for step in range(start + 1, STEPS + 1):
    batch = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 64, generator=batch).chunk(ranks)[rank].to(device)  # this rank's part of the batch
    y = x[:, :8].argmax(1)

    loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
    loss.backward()
    opt.clip_grad_norm_(1.0)  # the norm over all ranks
    opt.step()
    opt.zero_grad()

    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses[step] = mean.item() / ranks
    if rank == 0:
        print(f"step {step} loss {losses[step]:.4f}")
    if step % SAVE_EVERY == 0:  # every rank calls it, and writes its shards
        save(f"{FOLDER}/step-{step:04}", model, opt, extra={"step": step})

if rank == 0:
    print(opt.memory_summary())  # of this rank
dist.destroy_process_group()
