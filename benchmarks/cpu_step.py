"""CPU steps side by side: ours, compiled and default, against torch's fused AdamW on fp32, taking turns in one process.

Usage: python -m benchmarks.cpu_step [--set gpt2_124m] [--threads N] [--rounds 9] [--without-default]

On a machine that does other work, runs one after the other can't be compared. Here the optimizers take one step each in
turn; the table shows the median and the least time of each, and the median ratio of neighbours. CPU time leaves
out what other processes took.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import torch

from benchmarks.measure import temporary_bytes_cpu
from benchmarks.optimizers import OPTIMIZERS, step_function
from benchmarks.sets import SETS

TORCH, COMPILED, DEFAULT = "torch_fused_fp32", "flashdist_adamw_compiled", "flashdist_adamw"


def main(argv: list[str]) -> int:
    """Prints the table."""
    p = argparse.ArgumentParser("benchmarks.cpu_step", description=__doc__)
    p.formatter_class = argparse.RawTextHelpFormatter
    p.add_argument("--set", default="gpt2_124m", choices=list(SETS))
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--without-default", action="store_true")
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    names = [TORCH, COMPILED] + ([] if args.without_default else [DEFAULT])
    steps = {}
    for name in names:
        entry = OPTIMIZERS[name]
        params = [torch.nn.Parameter((torch.randn(s) * 0.02).to(entry.dtype)) for s in SETS[args.set]()]
        for param in params:
            param.grad = torch.randn_like(param) * 1e-3
        steps[name] = step_function(entry, entry.build(params))
        steps[name]()
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name, step in steps.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            step()
            wall[name].append((time.perf_counter() - start) * 1e3)
            cpu[name].append((time.process_time() - cpu_start) * 1e3)
    print(f"{args.set}, {args.threads} threads, {args.rounds} rounds")
    for name in names:
        ratios = [median(a / b for a, b in zip(times[name], times[TORCH], strict=True)) for times in (wall, cpu)]
        temporary = temporary_bytes_cpu(steps[name]) / 2**20
        print(
            f"{name:26s} median {median(wall[name]):8.1f} ms, least {min(wall[name]):8.1f} ms, "
            f"{ratios[0]:6.2f} x torch's (CPU time {ratios[1]:.2f} x), temporary {temporary:.1f} MiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
