"""How kernels are compiled and launched: side by side before their first launch, and without a look-up after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton

# PTX and fast division are NVIDIA's; Triton's interpreter knows neither.
NVIDIA = torch.version.hip is None and not triton.knobs.runtime.interpret
# Multiplications and additions may be fused; the default of newer Triton releases differs.
_FUSION: dict[str, Any] = {} if triton.knobs.runtime.interpret else {"enable_fp_fusion": True}
MAX_COMPILERS = 16


class Call(NamedTuple):
    """A kernel with all it is launched with: arguments, compile-time constants and compiler options."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]


def compile_together(calls: Sequence[Call]) -> None:
    """Compile the kernels of these calls in threads, which the compiler leaves to run side by side.

    What goes wrong here goes wrong again, and is raised, where the kernel is launched.
    """
    if len(calls) < 2 or triton.knobs.runtime.interpret:
        return
    with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1, MAX_COMPILERS)) as threads:
        try:
            side_by_side = triton.AsyncCompileMode(threads, ignore_errors=True)
        except TypeError:  # Triton 3.5 cannot pass over errors
            return
        with side_by_side:
            for call in calls:
                call.kernel.warmup(*call.args, grid=call.grid, **call.constants, **call.options, **_FUSION)


def first_launch(call: Call) -> Callable[..., Any]:
    """Launch a kernel, and return what launches it again with other arguments of the same dtypes and alignments.

    That skips Triton's look-up of the compiled kernel, which costs the host several times what the launch does.
    """
    kernel, grid, args, constants, options = call
    compiled = kernel[grid](*args, **constants, **options, **_FUSION)
    if compiled is None:  # the interpreter compiles nothing
        return lambda *others: kernel[grid](*others, **constants, **options)
    launch, values = compiled[grid], tuple(constants.values())
    return lambda *others: launch(*others, *values)
