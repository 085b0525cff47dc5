"""Compile the kernels for a GPU that need not be there: ``python -m tests.support.compile_kernels sm_90``.

A process of its own, since Triton decides at import whether it interprets.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

with warnings.catch_warnings():
    # Triton 3.9 announces another default for fused multiply-add; the options below say what is wanted.
    warnings.simplefilter("ignore")
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

from flashdist.kernels import triton_launch, triton_norm, triton_step
from flashdist.kernels.triton_rules import RULES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
BINARIES = {"cuda": "cubin", "hip": "hsaco"}
# Rule and number of moments, as algorithms.py has them.
VARIANTS = [("adamw", 2), ("adam", 2), ("lion", 1), ("sgd", 1), ("sgdw", 1), ("sgd", 0), ("sgdw", 0)]
WEIGHTS = ["bf16", "fp16", "fp32"]
DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
FLAGS = ("variant", "weight", "lo_bits", "quantized", "dither", "check", "masked")

Config = tuple[Any, ...]


def launchable() -> list[Config]:
    """Every combination that the launcher can ask for."""
    flags = [False, True]
    every = itertools.product(VARIANTS, WEIGHTS, (0, 8, 16), flags, flags, flags, flags)
    return [c for c in every if _can_be(*c[:5])]


def _can_be(variant: tuple[str, int], weight: str, lo_bits: int, quantized: bool, dither: bool) -> bool:
    moments = variant[1]
    if weight == "fp32" and lo_bits:
        return False  # fp32 weights have no corrections
    if quantized and not moments:
        return False
    return not dither or (quantized and moments == 2)  # only the 8-bit variance is dithered


def covering(configs: list[Config]) -> Iterator[Config]:
    """A small subset in which every pair of settings that occurs anywhere occurs once."""
    missing = {pair for c in configs for pair in _pairs(c)}
    while missing:
        best = max(configs, key=lambda c: len(missing & _pairs(c)))
        missing -= _pairs(best)
        yield best


def _pairs(config: Config) -> set[Any]:
    return set(itertools.combinations(enumerate(config), 2))


def compile_kernel(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], target: GPUTarget, **options: Any):
    names = kernel.arg_names
    signature = {n: pointers.get(n, "constexpr") for n in names}
    assert set(names) == set(pointers) | set(constants), "the kernel's arguments have changed"
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in pointers.items() if t.startswith("*")}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs=aligned,
    )
    return compile_source(source, target=target, options={"enable_fp_fusion": True, **options})


def compile_step(config: Config, target: GPUTarget, grad: str | None = None):
    (rule, moments), weight, lo_bits, quantized, dither, check, masked = config
    nvidia = target.backend == "cuda"
    options = triton_launch.MASKED_STEP_OPTIONS if masked else triton_launch.STEP_OPTIONS
    return compile_kernel(
        triton_step.step_kernel,
        {"table": "*i64", "scalars": "*fp32", "program_tensor": "*i32", "lost": "*i32"},
        {
            "RULE": RULES[rule], "MOMENTS": moments, "QUANTIZED": quantized, "WEIGHT": DTYPES[weight],
            "GRAD": DTYPES[grad or weight], "LO_BITS": lo_bits, "DITHER": dither, "CHECK": check, "MASKED": masked,
            "FAST": nvidia, "STAGES": 1 if masked else triton_launch.PIPELINE_STAGES,
        },
        target,
        **{k: v for k, v in options.items() if nvidia or k != "maxnreg"},
    )  # fmt: skip


def compile_prepare(target: GPUTarget, used: bool):
    return compile_kernel(
        triton_step.prepare_kernel,
        {
            "table": "*i64", "groups": "*fp64", "scalars": "*fp32", "clip_factor": "*fp32", "grad_scale": "*fp32",
            "found_inf": "*fp32", "num_tensors": "i32",
        },
        {"HAS_CLIP": used, "HAS_SCALE": used, "HAS_FOUND_INF": used, "BLOCK": triton_launch.PREPARE_BLOCK},
        target,
    )  # fmt: skip


def compile_norm(target: GPUTarget, dtype: str, aligned: bool):
    return compile_kernel(
        triton_norm.square_sum_kernel,
        {"table": "*i64", "program_tensor": "*i32", "sums": "*fp32"},
        {"TYPE": DTYPES[dtype], "ALIGN": triton_norm.ALIGNMENT if aligned else 1, "TILE": triton_norm.BLOCK},
        target,
        **triton_norm.OPTIONS,
    )


def main(name: str) -> None:
    target = TARGETS[name]
    kernels = {f"prepare {used}": compile_prepare(target, used) for used in (False, True)}
    configs = list(covering(launchable()))
    for config in configs:
        kernels[f"step {config}"] = compile_step(config, target)
    # A gradient of another dtype than its weight's: torch allows it through Tensor.grad_dtype.
    mixed = (("adamw", 2), "bf16", 8, True, True, False, False)
    kernels["step with fp32 gradients"] = compile_step(mixed, target, grad="fp32")
    for dtype, aligned in itertools.product(WEIGHTS, (True, False)):
        kernels[f"norm {dtype} {aligned}"] = compile_norm(target, dtype, aligned)
    for label, kernel in kernels.items():
        binary = kernel.asm[BINARIES[target.backend]]
        assert len(binary) > 1000, label
        if target.backend == "cuda" and label.startswith("step"):
            assert ".f64" not in kernel.asm["ptx"], f"{label}: fp64 arithmetic in the step"
    print(f"compiled {len(kernels)} kernels for {name}")


if __name__ == "__main__":
    main(sys.argv[1])
