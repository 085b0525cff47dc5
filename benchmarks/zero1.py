"""ZeRO-1 beside the replicated optimizer: the same bits, what a step costs, what a rank holds.

Usage: torchrun --nproc-per-node N -m benchmarks.zero1 [SET ...]      (default: gpt2_124m llama1.4b)

Gradients are the same on all ranks, as after an all-reduce. Before anything is timed, weights and gathered states of
both optimizers are compared bit for bit; a difference ends the run with an error. Rank 0 prints a line of JSON a set.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.sets import SETS
from flashdist import FlashAdamW, FlashOptimizer
from flashdist.sharding.replicated import shard_states
from flashdist.sharding.row_shard import RowShard

STEPS = 3
REPEATS = 20


def build(set_name: str, device: torch.device, sharded: bool) -> FlashOptimizer:
    """bf16 parameters and gradients that depend on the set alone."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter((torch.randn(s, device=device) * 0.02).bfloat16()) for s in SETS[set_name]()]
    opt = FlashAdamW(params, lr=1e-3, weight_decay=0.1)
    if sharded:
        shard_states(opt)
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return opt


def compare(ours: FlashOptimizer, reference: FlashOptimizer) -> None:
    """Raise where a bit differs after some steps, one tensor at a time."""
    for opt in (ours, reference):
        for _ in range(STEPS):
            opt.clip_grad_norm_(1.0)
            opt.step()
    for p, q in zip(ours.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
        pairs = [(p.detach(), q.detach())]
        for key, value in ours.state[p].items():
            pairs.append((value.full_tensor() if isinstance(value, RowShard) else value, reference.state[q][key]))
        for a, b in pairs:
            if not torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)):
                raise SystemExit(f"wrong: {tuple(p.shape)}, {a.dtype}")


def milliseconds(call: Callable[[], None], device: torch.device) -> float:
    """The median of single calls on the slowest rank, each after a barrier."""
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    slowest = torch.tensor(median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(set_name: str, device: torch.device) -> dict[str, object]:
    """Compares, then times; both optimizers are there at the same time only for the comparison."""
    ours, reference = build(set_name, device, True), build(set_name, device, False)
    compare(ours, reference)
    replicated, whole = milliseconds(reference.step, device), reference.memory_summary()
    del reference
    step, share = milliseconds(ours.step, device), ours.memory_summary()
    params = ours.param_groups[0]["params"]
    gather = milliseconds(lambda: ours._partition.after_step(params, []), device)
    weights = sum(p.numel() * p.element_size() for p in params)
    return {
        "set": set_name,
        "ranks": dist.get_world_size(),
        "parameters": whole.parameters,
        "replicated_step_ms": round(replicated, 3),
        "step_ms": round(step, 3),
        "gather_ms": round(gather, 3),
        "gathered_gb_per_s": round(weights / gather / 1e6, 1),
        "replicated_bytes": whole.as_dict(),
        "rank_0_bytes": share.as_dict(),
    }


def main(names: list[str]) -> None:
    """One line a set."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    for name in names or ["gpt2_124m", "llama1.4b"]:
        result = measure(name, device)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
