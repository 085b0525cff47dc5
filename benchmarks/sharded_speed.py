"""One rank's part of a measured training: a strategy and an arm, on the ranks that are there.

    torchrun --nproc-per-node N -m benchmarks.sharded_speed --shape llama1b --strategy fsdp2 --arm flash

benchmarks.multi_gpu starts it; rank 0 writes a line of JSON into --out.

    step_ms             forward, backward, clipping and optimizer: the median step of the slowest rank
    optimizer_ms        of that, clipping and optimizer (with ZeRO-1's gathers, with DeepSpeed's whole step())
    step_alone_ms       the optimizer's step() alone, repeated on the last gradients
    share_of_copy       the least traffic of that step over its time, as a share of the device's copy bandwidth
    held                bytes per parameter of the model on a rank, counted from storages
    peak_gib            the largest rank's peak
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import copy_bandwidth
from benchmarks.sharded_model import ARMS, SHAPES, STRATEGIES, Sharded

# What a step must move, bytes per element: weight, correction and two codes read and written, a gradient read, scales.
FLASH_TRAFFIC = 2 * (2 + 1 + 1 + 1 + 4 / 32) + 2
TORCH_TRAFFIC = 28.0
WARM_UP = 3


class Stopwatch:
    """Time on the device, or on the host where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        """A point in time, in the order of the device's work."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Milliseconds between the marks; waits for the device."""
        if not self.cuda:
            return [(b - a) * 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:], strict=False)]


def slowest(milliseconds: float, device: torch.device) -> float:
    """The largest of all ranks' figures."""
    t = torch.tensor([milliseconds], device=device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return round(t.item(), 4)


def measure_training(job: Sharded, args: argparse.Namespace) -> dict[str, Any]:
    """Steps of training. Raises RuntimeError where the loss is not finite."""
    device, steps, optimizer_steps = job.device, [], []
    for t in range(WARM_UP + args.steps):
        tokens = job.tokens(args.micro_batch, args.length, t)
        if t == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        watch = Stopwatch(device)
        watch.mark()
        loss = job.backward(tokens)
        watch.mark()
        job.step()
        watch.mark()
        if t >= WARM_UP:
            first, second = watch.laps()
            steps.append(first + second)
            optimizer_steps.append(second)
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {loss.item()}")
    step_ms = slowest(median(steps), device)
    found = {
        "step_ms": step_ms,
        "optimizer_ms": slowest(median(optimizer_steps), device),
        "tokens_per_s": round(args.micro_batch * args.length * job.ranks / step_ms * 1e3, 1),
        "loss": round(loss.item(), 4),
        "held": job.held_bytes(),
        "peak_gib": None,
        "steady_gib": None,
    }
    if device.type == "cuda":
        found["peak_gib"] = slowest(torch.cuda.max_memory_allocated() / 2**30, device)
        found["steady_gib"] = slowest(torch.cuda.memory_allocated() / 2**30, device)
    return found


def measure_step(job: Sharded, args: argparse.Namespace) -> dict[str, Any]:
    """The optimizer's step() alone, on gradients of one more backward."""
    if job.engine:
        return {}
    job.backward(job.tokens(args.micro_batch, args.length, 0))
    job.optimizer.step()
    watch = Stopwatch(job.device)
    watch.mark()
    for _ in range(args.steps):
        job.optimizer.step()
        watch.mark()
    alone = slowest(median(watch.laps()), job.device)
    traffic = (FLASH_TRAFFIC if job.arm == "flash" else TORCH_TRAFFIC) * job.local_numel()
    job.optimizer.zero_grad()
    share = None
    if job.device.type == "cuda":
        share = round(traffic / (alone / 1e3) / copy_bandwidth(), 4)
    return {"step_alone_ms": alone, "share_of_copy": share, "local_numel": job.local_numel()}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser("benchmarks.sharded_speed", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--shape", choices=list(SHAPES), default="llama1b")
    p.add_argument("--strategy", choices=STRATEGIES, default="fsdp2")
    p.add_argument("--arm", choices=ARMS, default="flash")
    p.add_argument("--micro-batch", type=int, default=4, help="sequences a rank")
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", type=Path)
    return p.parse_args(argv)


def on_ranks(device: str, work: Callable[[torch.device], None]) -> None:
    """Connects the ranks that a launcher has started, and calls ``work`` with this rank's device."""
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=240))
    try:
        work(place)
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    args = parse_arguments(argv)

    def work(device: torch.device) -> None:
        job = Sharded(args.shape, args.strategy, args.arm, device, args.micro_batch)
        row = {"shape": args.shape, "strategy": args.strategy, "arm": args.arm, "ranks": job.ranks}
        row |= {"micro_batch": args.micro_batch, "length": args.length, "numel": job.numel}
        row |= measure_training(job, args)
        row |= measure_step(job, args)
        if job.rank == 0:
            text = json.dumps(row)
            print(text)
            if args.out:
                args.out.write_text(text)

    on_ranks(args.device, work)


if __name__ == "__main__":
    main()
