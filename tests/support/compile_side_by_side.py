"""Compile a small model's kernels ahead of their launch, on a machine without a GPU, and print what was seen.

A process of its own, since Triton decides at import whether it interprets. A stand-in for Triton's driver says that
there is an sm_90 device; nothing is launched.
"""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

with warnings.catch_warnings():
    # Triton 3.9 announces another default for fused multiply-add; the launcher says what it wants.
    warnings.simplefilter("ignore")
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

from flashdist import FlashAdamW
from flashdist.kernels import triton_compile
from flashdist.kernels.triton_launch import Plan


class StandInDriver:
    """As much of a driver as compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def calls() -> list[triton_compile.Call]:
    """The launches of a model with matrices and vectors in two dtypes."""
    params = [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32)
        for shape in ((64, 64), (40,))
    ]
    opt = FlashAdamW(params)
    opt.state_dict()
    states = [opt._states[p] for p in params]
    grads = [torch.zeros_like(p) for p in params]
    addresses = [p.data_ptr() for p in params], [g.data_ptr() for g in grads]
    groups = [opt._scalars(group) for group in opt.param_groups]
    plan = Plan(torch.device("cpu"), states, params, grads, groups, addresses)
    return [plan._step_call(launch, False) for launch in plan.launches]


def main() -> None:
    triton.runtime.driver.set_active(StandInDriver())
    compiled: list[int] = []

    def listener(**event: Any) -> None:
        if not event.get("cache_hit"):
            compiled.append(threading.get_ident())

    triton.knobs.compilation.listener = listener
    todo = calls()
    bad = todo[0]._replace(constants={**todo[0].constants, "RULE": None})  # nothing to call: the compiler refuses it
    started = time.perf_counter()
    triton_compile.compile_together([*todo, bad])
    print(f"{len(compiled)} kernels in {time.perf_counter() - started:.1f} s")
    assert len(compiled) == len(todo), "the faulty one fails, quietly, and all others are compiled"
    assert threading.get_ident() not in compiled
    for call in todo:
        kernel = call.kernel.warmup(*call.args, grid=call.grid, **call.constants, **call.options, enable_fp_fusion=True)
        assert ".target sm_90" in kernel.asm["ptx"]
    assert len(compiled) == len(todo), "a launch finds its kernel"
    print("nothing was compiled twice")


if __name__ == "__main__":
    main()
