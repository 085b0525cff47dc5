"""What the first steps of a program cost: all five optimizers over every weight dtype, with an empty cache.

Usage: python -m benchmarks.compile_time

Each optimizer steps bf16, fp16 and fp32 matrices (large enough for full tiles), rows that are no multiple of 32, and
vectors. The target is 20 s for all of them together; a training run needs one of them, with one or two dtypes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import torch

TARGET_S = 20.0
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(2048, 2048), (33, 50), (100,)]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "FlashAdamW": {},
    "FlashAdam": {},
    "FlashLion": {},
    "FlashSGD": {"momentum": 0.9},
    "FlashSGDW": {"momentum": 0.9},
}


def first_step(name: str, arguments: dict[str, Any]) -> float:
    """Seconds of an optimizer's first step."""
    import flashdist

    params = [torch.nn.Parameter(torch.randn(s, device="cuda").to(d)) for d in DTYPES for s in SHAPES]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = getattr(flashdist, name)(params, **arguments)
    torch.cuda.synchronize()
    start = time.perf_counter()
    opt.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    """Prints the times; returns 1 above the target and 2 without a GPU."""
    if not torch.cuda.is_available():
        print("benchmarks.compile_time needs a GPU: Triton compiles for the one that is there")
        return 2
    kernels = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # empty, whatever was compiled here before
        import triton

        def count(**event: Any) -> None:
            if not event.get("cache_hit"):
                kernels.append(event)

        triton.knobs.compilation.listener = count
        total = 0.0
        for name, arguments in OPTIMIZERS.items():
            before, seconds = len(kernels), first_step(name, arguments)
            total += seconds
            print(f"{name:11s} {seconds:5.2f} s, {len(kernels) - before} kernels")
    print(f"{'together':11s} {total:5.2f} s, {len(kernels)} kernels on {os.cpu_count()} cores (target: {TARGET_S:g} s)")
    return 0 if total <= TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
