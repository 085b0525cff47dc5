"""The arms of the pretraining experiment: how each goes on from the common start, and how it takes a step.

A start is a trained fp32 AdamW: weights, momentum, and the variance for each beta2. Every arm gets all of it in its own
precision: master weights are split into weight and correction, moments are encoded. What an arm cannot hold is lost
there, as it would be in its own training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.quality.schemes import SCHEMES, Scheme
from flashdist import FlashAdamW, FlashLion, FlashOptimizer
from flashdist.numerics.weight_split import split

BETA1, EPS, WEIGHT_DECAY = 0.9, 1e-8, 0.1
# Lion's step is the sign: its lr is lower and its decay higher by the same factor (arXiv 2302.06675, section 5).
LION_BETAS, LION_FACTOR = (0.9, 0.99), 10.0
NUDGE = 2.0**-20  # a few fp32 ULPs: what `adamw_again` starts aside of `adamw`


@dataclass
class Start:
    """The common start; tensors by parameter name, fp32. `exp_avg_sq` has one dict for each beta2."""

    id: str
    step: int
    weights: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[float, dict[str, Tensor]]


class Stepper(Protocol):
    """An optimizer on a model's gradients."""

    def __call__(self, lr: float, max_norm: float) -> None:
        """Clip the global norm, then step."""
        ...


def groups_of(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; in both the order of the names is kept."""
    matrices = [p for _, p in named if p.dim() >= 2]
    vectors = [p for _, p in named if p.dim() < 2]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


def names_in_order(named: list[tuple[str, nn.Parameter]]) -> list[str]:
    """Names in the order in which :func:`groups_of` puts the parameters, which is that of a state dict's numbers."""
    return [n for n, p in named if p.dim() >= 2] + [n for n, p in named if p.dim() < 2]


def torch_state(optimizer: torch.optim.Optimizer, names: list[str], start: Start, beta2: float) -> dict[str, Any]:
    """The start as the state dict of a torch.optim.AdamW with the groups of `optimizer`."""
    state = {
        i: {
            "step": torch.tensor(float(start.step)),
            "exp_avg": start.exp_avg[name].clone(),
            "exp_avg_sq": start.exp_avg_sq[beta2][name].clone(),
        }
        for i, name in enumerate(names)
    }
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _clip(params: list[nn.Parameter], max_norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=True)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _stepper(optimizer: torch.optim.Optimizer, clip: Callable[[float], object]) -> Stepper:
    """Clip, set the lr, step, forget the gradients."""

    def step(lr: float, max_norm: float) -> None:
        clip(max_norm)
        _set_lr(optimizer, lr)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torch_adamw(params: Any, beta2: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1.0, betas=(BETA1, beta2), eps=EPS, fused=True)


@torch.no_grad()
def load_weights(model: nn.Module, start: Start, nudge: float = 0.0) -> None:
    """Copy the start's weights into a model of any dtype, times 1 +- `nudge` at random."""
    for i, (name, p) in enumerate(model.named_parameters()):
        w = start.weights[name]
        if nudge:
            generator = torch.Generator(device=w.device).manual_seed(i)
            w = w * (1.0 + nudge * torch.empty_like(w).uniform_(-1, 1, generator=generator))
        p.copy_(w)
        p.grad = None


def torch_adamw(model: nn.Module, start: Start, beta2: float, nudge: float = 0.0) -> Stepper:
    """torch's fused AdamW on the model's own parameters, whatever their dtype (its moments have the same)."""
    load_weights(model, start, nudge)
    named = list(model.named_parameters())
    optimizer = _torch_adamw(groups_of(named), beta2)
    optimizer.load_state_dict(torch_state(optimizer, names_in_order(named), start, beta2))
    return _stepper(optimizer, partial(_clip, [p for _, p in named]))


def adamw_again(model: nn.Module, start: Start, beta2: float) -> Stepper:
    """The same arm, started a few ULPs aside: how far apart two runs of one optimizer end."""
    return torch_adamw(model, start, beta2, NUDGE)


def bf16_master(model: nn.Module, start: Start, beta2: float) -> Stepper:
    """bf16 weights and gradients in the model, fp32 master weights and moments beside it."""
    load_weights(model, start)
    named = list(model.named_parameters())
    master = [(name, nn.Parameter(start.weights[name].clone())) for name, _ in named]
    optimizer = _torch_adamw(groups_of(master), beta2)
    optimizer.load_state_dict(torch_state(optimizer, names_in_order(named), start, beta2))
    weights, masters = [p for _, p in named], [p for _, p in master]

    def step(lr: float, max_norm: float) -> None:
        for w, p in zip(weights, masters, strict=True):
            p.grad = w.grad.float() if w.grad is not None else None
            w.grad = None
        _clip(masters, max_norm)
        _set_lr(optimizer, lr)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return step


def requantized(scheme: Scheme) -> Callable[[nn.Module, Start, float], Stepper]:
    """fp32 weights and torch's AdamW, whose moments go through a scheme after every step: what the states alone do."""

    def build(model: nn.Module, start: Start, beta2: float) -> Stepper:
        load_weights(model, start)
        named = list(model.named_parameters())
        optimizer = _torch_adamw(groups_of(named), beta2)
        optimizer.load_state_dict(torch_state(optimizer, names_in_order(named), start, beta2))
        params = [p for _, p in named]

        @torch.no_grad()
        def store(t: int) -> None:
            for p in params:
                if p.dim() >= 2:  # vectors keep fp32 moments in every library here
                    state = optimizer.state[p]
                    state["exp_avg"].copy_(scheme.momentum(state["exp_avg"].view(-1), t).view_as(p))
                    state["exp_avg_sq"].copy_(scheme.variance(state["exp_avg_sq"].view(-1), t).view_as(p))

        t = start.step
        store(t)

        step_exactly = _stepper(optimizer, partial(_clip, params))

        def step(lr: float, max_norm: float) -> None:
            nonlocal t
            t += 1
            step_exactly(lr, max_norm)
            store(t)

        return step

    return build


def _take_masters(optimizer: FlashOptimizer, named: list[tuple[str, nn.Parameter]], start: Start) -> None:
    """Weights and corrections from the start's fp32 weights."""
    for name, p in named:
        if "error" in optimizer.state[p]:
            error = optimizer.state[p]["error"]
            hi, lo = split(start.weights[name], p.dtype, error.dtype)
            p.data.copy_(hi)
            error.copy_(lo)


def flashdist_adamw(model: nn.Module, start: Start, beta2: float, bits: int = 24) -> Stepper:
    """FlashAdamW: torch's state loaded through load_state_dict, corrections from the start's fp32 weights."""
    load_weights(model, start)
    named = list(model.named_parameters())
    optimizer = FlashAdamW(groups_of(named), lr=1.0, betas=(BETA1, beta2), eps=EPS, master_weight_bits=bits)
    optimizer.load_state_dict(torch_state(torch.optim.AdamW(groups_of(named)), names_in_order(named), start, beta2))
    _take_masters(optimizer, named, start)
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = (BETA1, beta2), EPS

    return _stepper(optimizer, optimizer.clip_grad_norm_)


def flashoptim_adamw(model: nn.Module, start: Start, beta2: float) -> Stepper:
    """flashoptim 0.1.4's FlashAdamW at 24 bits, started through its own load_state_dict and its own correction bits."""
    from flashoptim import FlashAdamW as Published
    from flashoptim import compute_ecc_bits

    load_weights(model, start)
    named = list(model.named_parameters())
    optimizer = Published(groups_of(named), lr=1.0, betas=(BETA1, beta2), eps=EPS)
    saved = torch_state(optimizer, names_in_order(named), start, beta2)
    for state in saved["state"].values():
        state["step"] = torch.tensor(start.step, dtype=torch.int64)
    optimizer.load_state_dict(saved)
    for name, p in named:
        # torch's load_state_dict moves tensors; this library keeps its counter on the host.
        optimizer.state[p]["step"] = torch.tensor(start.step, dtype=torch.int64)
        if p.is_cuda:
            optimizer.state[p]["error_bits"] = compute_ecc_bits(start.weights[name], p.detach(), master_bytewidth=3)
    return _stepper(optimizer, partial(_clip, [p for _, p in named]))


def lion(model: nn.Module, start: Start, beta2: float) -> Stepper:
    """Lion in fp32 (arXiv 2302.06675, algorithm 2), from the start's weights and momentum."""
    load_weights(model, start)
    named = list(model.named_parameters())
    params, moments = [p for _, p in named], [start.exp_avg[name].clone() for name, _ in named]
    b1, b2 = LION_BETAS

    @torch.no_grad()
    def step(lr: float, max_norm: float) -> None:
        _clip(params, max_norm)
        lr /= LION_FACTOR
        for p, m in zip(params, moments, strict=True):
            if p.dim() >= 2:
                p.mul_(1.0 - lr * WEIGHT_DECAY * LION_FACTOR)
            p.sub_(lr * (b1 * m + (1.0 - b1) * p.grad).sign_())
            m.mul_(b2).add_(p.grad, alpha=1.0 - b2)
            p.grad = None

    return step


def flashdist_lion(model: nn.Module, start: Start, beta2: float) -> Stepper:
    """FlashLion at 24 bits from the same start."""
    load_weights(model, start)
    named = list(model.named_parameters())
    groups = groups_of(named)
    groups[0]["weight_decay"] *= LION_FACTOR
    optimizer = FlashLion(groups, lr=1.0, betas=LION_BETAS)
    saved = torch_state(torch.optim.AdamW(groups_of(named)), names_in_order(named), start, beta2)
    saved["param_groups"] = [
        {"params": group["params"], "lr": 1.0, "betas": LION_BETAS, "weight_decay": groups[i]["weight_decay"]}
        for i, group in enumerate(saved["param_groups"])
    ]
    optimizer.load_state_dict(saved)
    _take_masters(optimizer, named, start)

    def step(lr: float, max_norm: float) -> None:
        optimizer.clip_grad_norm_(max_norm)
        _set_lr(optimizer, lr / LION_FACTOR)
        optimizer.step()
        optimizer.zero_grad()

    return step


def flashdist_adamw_32(model: nn.Module, start: Start, beta2: float) -> Stepper:
    """FlashAdamW with 32 bits of master weight."""
    return flashdist_adamw(model, start, beta2, bits=32)


@dataclass(frozen=True)
class Arm:
    """An arm: the dtype of the model's weights and gradients, how it starts, and what it is compared with."""

    weights: torch.dtype
    build: Callable[[nn.Module, Start, float], Stepper]
    reference: str = "adamw"


FP32, BF16 = torch.float32, torch.bfloat16
ARMS: dict[str, Arm] = {
    "adamw": Arm(FP32, torch_adamw),
    "adamw_again": Arm(FP32, adamw_again),
    "flashadamw": Arm(BF16, flashdist_adamw),
    "flashadamw_32": Arm(BF16, flashdist_adamw_32),
    "flashoptim": Arm(BF16, flashoptim_adamw),
    "bf16_master": Arm(BF16, bf16_master),
    "bf16": Arm(BF16, torch_adamw),
    "states_flashdist": Arm(FP32, requantized(SCHEMES["flashdist"])),
    "states_nearest": Arm(FP32, requantized(SCHEMES["flashdist_nearest"])),
    "states_flashoptim": Arm(FP32, requantized(SCHEMES["flashoptim"])),
    "linear8": Arm(FP32, requantized(SCHEMES["linear8"])),
    "lion": Arm(FP32, lion, reference="lion"),
    "flashlion": Arm(BF16, flashdist_lion, reference="lion"),
}
