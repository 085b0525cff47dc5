"""Optimizers on a chosen backend, small parameter sets, and comparisons that see every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashdist import FlashOptimizer, compile_cpu_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class BackendUnderTest:
    """One backend and the device on which its tensors lie."""

    name: str
    device: torch.device

    def build(self, cls: Callable[..., FlashOptimizer], params: Any, **arguments: Any) -> FlashOptimizer:
        return self.adopt(cls(params, **arguments))

    def adopt(self, opt: FlashOptimizer) -> FlashOptimizer:
        """Let an optimizer (a copy, say) step with this backend. The only place that knows how."""
        if self.name == "triton" and self.device.type == "cpu":
            from flashdist.kernels.triton_launch import TritonBackend

            opt._backends["cpu"] = TritonBackend()
        if self.name == "native":
            compile_cpu_step(opt)
        return opt


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = BF16, seed: int = 0, device: torch.device | str = "cpu"
) -> list[nn.Parameter]:
    """Normal parameters of rms 1 / 4; the values depend on the seed and shapes only."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) * 0.25 for shape in shapes]
    return [nn.Parameter(t.to(dtype).to(device)) for t in made]


def set_gradients(params: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        grad = torch.randn(p.shape, generator=generator) * scale
        p.grad = grad.to(p.dtype).to(p.device)


def train(opt: FlashOptimizer, steps: int, first: int = 0, scale: float = 1.0) -> None:
    """Steps with gradients that depend on the number of the step only, for all trainable parameters."""
    params = [p for group in opt.param_groups for p in group["params"] if p.requires_grad]
    for t in range(first, first + steps):
        set_gradients(params, seed=1000 + t, scale=scale)
        opt.step()
        opt.zero_grad()


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns on the CPU, so that NaN equals NaN and -0 differs from 0."""
    return tensor.detach().cpu().contiguous().view(_BITS[tensor.element_size()])


def assert_same_bits(a: Tensor, b: Tensor, what: str = "tensor") -> None:
    assert a.dtype == b.dtype, f"{what}: {a.dtype} and {b.dtype}"
    assert a.shape == b.shape, f"{what}: {tuple(a.shape)} and {tuple(b.shape)}"
    different = int((bits(a) != bits(b)).sum())
    assert not different, f"{what}: {different} of {a.numel()} elements differ"


def snapshot(opt: FlashOptimizer) -> list[dict[str, Tensor]]:
    """Copies of weights and state, one dict a parameter."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return [
        {"weight": p.detach().clone(), **{k: v.detach().clone() for k, v in opt.state.get(p, {}).items()}}
        for p in params
    ]


def assert_unchanged(opt: FlashOptimizer, before: list[dict[str, Tensor]]) -> None:
    for i, (old, new) in enumerate(zip(before, snapshot(opt), strict=True)):
        assert old.keys() == new.keys(), f"parameter {i}"
        for key in old:
            assert_same_bits(old[key], new[key], f"{key} of parameter {i} of shape {tuple(new['weight'].shape)}")


def assert_same(a: FlashOptimizer, b: FlashOptimizer) -> None:
    """Weights and state of two optimizers, bit for bit."""
    assert_unchanged(a, snapshot(b))


def master_weights(opt: FlashOptimizer) -> list[Tensor]:
    return [opt.master_weight(p) for group in opt.param_groups for p in group["params"]]
