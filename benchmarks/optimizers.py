"""The optimizers a step is measured for: how to build one, how to step it, and what it has to move.

`bytes_moved` is what the algorithm cannot avoid to read and write per parameter in one step, gradient included: an
implementation in several passes moves more and shows a lower fraction of the copy bandwidth for it. Vectors, which
flashdist keeps in fp32, are counted like the rest; they are at most 0.2 % of any set here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LION = {"lr": 1e-4, "betas": (0.9, 0.99)}
SGD = {"lr": 1e-3, "momentum": 0.9}
MAX_NORM = 1.0


@dataclass(frozen=True)
class Entry:
    """One optimizer of the benchmark.

    Attributes:
        path: `module:Class`, imported only by the process that measures it.
        rule: which reference the correctness gate compares with ("adamw", "lion" or "sgd").
        dtype: the type of weights and gradients.
        bytes_moved: bytes per parameter that one step has to read and write.
        hyper: the constructor's arguments.
        mode: "step", "clip" (clip the global norm, then step), "graph" (a captured step, replayed) or "compiled" (the
            compiled CPU step; left out on a GPU).
        sets: the parameter sets it is measured on; None means all.
    """

    path: str
    rule: str
    dtype: torch.dtype
    bytes_moved: float
    hyper: dict[str, Any] = field(default_factory=dict)
    mode: str = "step"
    sets: tuple[str, ...] | None = None

    @property
    def ours(self) -> bool:
        """Whether the correctness gate has to be green before a time is reported."""
        return self.path.startswith("flashdist:")

    def missing(self) -> str | None:
        """The name of the package that is needed and not installed, if any."""
        package = self.path.split(":")[0].split(".")[0]
        return None if importlib.util.find_spec(package) else package

    def build(self, params: Sequence[torch.nn.Parameter], **overrides: Any) -> torch.optim.Optimizer:
        """Constructs the optimizer; `overrides` replace or add constructor arguments."""
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name)(params, **{**self.hyper, **overrides})


FP32, BF16 = torch.float32, torch.bfloat16
# AdamW reads weight, gradient and two moments and writes all but the gradient: 7 elements of 4 or 2 bytes.
# bitsandbytes and torchao: bf16 weight, two 8-bit moments, one fp32 scale each for 256 elements.
# flashoptim: bf16 weight, a correction byte, two 8-bit moments, one fp16 scale each for 32 elements.
# flashdist: the same with a bf16 and an fp32 scale; Lion and SGD have one moment and its bf16 scale.
TORCH_FP32, TORCH_BF16, BLOCK256, FLASHOPTIM = 28.0, 14.0, 10.0625, 12.25
TWO_MOMENTS, ONE_MOMENT = 12.375, 10.125
NORM_PASS = 2.0  # the global norm reads the gradient once more
SMALL_SETS = ("gpt2_124m", "resnet50", "resnet101", "tiny2000", "smoke")

OPTIMIZERS: dict[str, Entry] = {
    "flashdist_adamw": Entry("flashdist:FlashAdamW", "adamw", BF16, TWO_MOMENTS, ADAMW),
    "flashdist_lion": Entry("flashdist:FlashLion", "lion", BF16, ONE_MOMENT, LION),
    "flashdist_sgd": Entry("flashdist:FlashSGD", "sgd", BF16, ONE_MOMENT, SGD),
    "flashdist_adamw_clip": Entry(
        *("flashdist:FlashAdamW", "adamw", BF16, TWO_MOMENTS + NORM_PASS, ADAMW),
        mode="clip",
        sets=("llama1.4b", "gpt2_124m", "smoke"),
    ),
    "flashdist_adamw_graph": Entry(
        "flashdist:FlashAdamW", "adamw", BF16, TWO_MOMENTS, ADAMW, mode="graph", sets=SMALL_SETS
    ),
    "flashdist_adamw_compiled": Entry("flashdist:FlashAdamW", "adamw", BF16, TWO_MOMENTS, ADAMW, mode="compiled"),
    "torch_fused_fp32": Entry("torch.optim:AdamW", "adamw", FP32, TORCH_FP32, {**ADAMW, "fused": True}),
    "torch_fused_bf16": Entry("torch.optim:AdamW", "adamw", BF16, TORCH_BF16, {**ADAMW, "fused": True}),
    "torch_foreach_fp32": Entry("torch.optim:AdamW", "adamw", FP32, TORCH_FP32, {**ADAMW, "foreach": True}),
    "flashoptim": Entry("flashoptim:FlashAdamW", "adamw", BF16, FLASHOPTIM, ADAMW),
    "bnb8": Entry("bitsandbytes.optim:AdamW8bit", "adamw", BF16, BLOCK256, ADAMW),
    "torchao8": Entry("torchao.optim:AdamW8bit", "adamw", BF16, BLOCK256, {**ADAMW, "bf16_stochastic_round": True}),
}


class CaptureFailed(RuntimeError):
    """A step could not be captured in a CUDA graph: a reason to leave the row out, not to stop."""


class GraphStep:
    """Counts like a plain step: every call is exactly one optimizer step, the first ones run eagerly."""

    EAGER_STEPS = 3  # allocate the state and compile the kernels before capture

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not torch.cuda.is_available():
            raise CaptureFailed("CUDA graphs need a CUDA device")
        self.optimizer = optimizer
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self.EAGER_STEPS:
            side = torch.cuda.Stream()  # capture forbids the default stream, so the warm-up avoids it too
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.optimizer.step()
            torch.cuda.current_stream().wait_stream(side)
            return
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):  # records the kernels, runs none
                self.optimizer.step()
        except Exception as error:
            raise CaptureFailed(f"{type(error).__name__}: {error}") from error
        return graph


def step_function(entry: Entry, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """What is timed: a callable that makes one step in the entry's mode."""
    if entry.mode == "graph":
        return GraphStep(optimizer)
    if entry.mode == "compiled":
        importlib.import_module("flashdist").compile_cpu_step(optimizer)
    if entry.mode == "clip":

        def clip_and_step() -> None:
            optimizer.clip_grad_norm_(MAX_NORM)  # type: ignore[attr-defined]
            optimizer.step()

        return clip_and_step
    return optimizer.step
