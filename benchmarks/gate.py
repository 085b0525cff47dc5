"""The correctness gate: no time is reported for an optimizer whose steps are wrong.

A few steps on small odd shapes are compared on the device under test with the same rule in float64, written here in
plain torch from the papers and sharing no code with the library. Each optimizer is checked in the mode it is measured
in (plain, clipped, replayed from a graph) and twice: with fp32 moments and a 32-bit master weight, where only the
rounding of fp32 arithmetic may differ, and with the defaults, where 24-bit weights and 8-bit moments may.

The figure is, for each tensor, the RMS of (displacement - reference displacement) over the RMS of the reference
displacement: 1 for an optimizer that does nothing, 0 for an exact one. Per tensor, so that a wrong tail of a small
tensor does not hide behind the rest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.optimizers import MAX_NORM, CaptureFailed, Entry, step_function
from benchmarks.sets import smoke

STEPS = 8
SEED = 7
HYPER = {"lr": 1e-2, "weight_decay": 0.1}  # large enough that a forgotten decay or a wrong correction shows
EXACT = {"quantize": False, "master_weight_bits": 32}

# Exact formats: fp32 rounding gives 2.4e-6 on a CPU; a GPU's approximate division and square root may double it.
# Defaults: about three times the figure that the formats' definition gives for these steps, 0.006 for AdamW, 0.038 for
# Lion, 0.005 for SGD. Lion's is large since one element's flipped sign is a whole step of error; with this seed no
# element comes nearer to a tie than 2e-5 of its terms, so that exact formats flip none.
EXACT_TOLERANCE = 2e-5
DEFAULT_TOLERANCE = {"adamw": 0.02, "lion": 0.12, "sgd": 0.015}
# The bf16 weight is the rounded master weight: half a unit in the last place of 8 significant bits, and some air.
WEIGHT_TOLERANCE = 1.01 * 2.0**-8


@dataclass
class GateResult:
    """The outcome for one optimizer: `status` is "green", "red" or "unavailable" (a graph that cannot be captured)."""

    optimizer: str
    status: str
    exact_error: float | None = None
    exact_tolerance: float = EXACT_TOLERANCE
    default_error: float | None = None
    default_tolerance: float | None = None
    reason: str = ""

    def line(self) -> str:
        """The figures in one line."""
        if self.exact_error is None:
            return f"{self.optimizer}: {self.status}, {self.reason}"
        return (
            f"{self.optimizer}: {self.status}, error {self.exact_error:.1e} in exact formats "
            f"(at most {self.exact_tolerance:.1e}), {self.default_error:.1e} with the defaults "
            f"(at most {self.default_tolerance:.1e}) {self.reason}".rstrip()
        )

    def as_dict(self) -> dict[str, Any]:
        """For the result file."""
        return asdict(self)


class Reference:
    """AdamW, Lion or SGD on one tensor in float64."""

    def __init__(self, rule: str, weight: torch.Tensor, hyper: dict[str, Any]) -> None:
        self.rule, self.hyper = rule, hyper
        self.weight = weight.double().clone()
        self.m = torch.zeros_like(self.weight)
        self.v = torch.zeros_like(self.weight)
        self.t = 0

    def step(self, grad: torch.Tensor) -> None:
        """One step with `grad`."""
        self.t += 1
        lr, decay = self.hyper["lr"], self.hyper["weight_decay"]
        if self.rule == "sgd":  # L2 penalty, then heavy ball as torch has it: the first buffer is the gradient
            grad = grad + decay * self.weight
            self.m = grad.clone() if self.t == 1 else self.hyper["momentum"] * self.m + grad
            self.weight -= lr * self.m
            return
        b1, b2 = self.hyper["betas"]
        self.weight *= 1 - lr * decay
        if self.rule == "lion":  # arXiv 2302.06675, algorithm 2
            self.weight -= lr * torch.sign(b1 * self.m + (1 - b1) * grad)
            self.m = b2 * self.m + (1 - b2) * grad
            return
        self.m = b1 * self.m + (1 - b1) * grad  # arXiv 1711.05101, algorithm 2
        self.v = b2 * self.v + (1 - b2) * grad * grad
        corrected = (self.v / (1 - b2**self.t)).sqrt() + self.hyper["eps"]
        self.weight -= lr * self.m / (1 - b1**self.t) / corrected


def master(optimizer: Any, param: torch.Tensor) -> torch.Tensor:
    """The weight as precisely as the optimizer knows it."""
    return optimizer.master_weight(param) if hasattr(optimizer, "master_weight") else param.detach()


def largest_error(entry: Entry, device: str, overrides: dict[str, Any]) -> float:
    """Runs `STEPS` steps next to the reference and returns the worst tensor's relative error."""
    generator = torch.Generator().manual_seed(SEED)  # on the host: the same numbers for every device

    def random(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(entry.dtype).to(device)

    hyper = {**entry.hyper, **HYPER}
    params = [torch.nn.Parameter(random(shape, 0.5)) for shape in smoke()]
    start = [p.detach().double().clone() for p in params]
    references = [Reference(entry.rule, p.detach(), hyper) for p in params]
    optimizer = entry.build(params, **HYPER, **overrides)
    step = step_function(entry, optimizer)
    for p in params:
        p.grad = torch.zeros_like(p)
    for _ in range(STEPS):
        for p in params:  # in place: a replayed graph reads the addresses it was captured with
            p.grad.copy_(random(tuple(p.shape), 0.1))  # type: ignore[union-attr]
        grads = [p.grad.double() for p in params]  # type: ignore[union-attr]
        if entry.mode == "clip":
            norm = torch.cat([g.flatten() for g in grads]).norm()
            grads = [g * torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0) for g in grads]
        for reference, grad in zip(references, grads, strict=True):
            reference.step(grad)
        step()
    worst = 0.0
    for p, reference, before in zip(params, references, start, strict=True):
        got = master(optimizer, p).double()
        if ((p.detach().double() - got).abs() > WEIGHT_TOLERANCE * got.abs()).any():
            return float("inf")  # the model's own weight is not the rounded master weight
        error = ((got - reference.weight).norm() / (reference.weight - before).norm()).item()
        worst = max(worst, error if error == error else float("inf"))  # max() would drop a NaN
    return worst


def run_gate(name: str, entry: Entry, device: str) -> GateResult:
    """Checks one optimizer; whatever goes wrong other than a graph capture is red."""
    result = GateResult(name, "red", default_tolerance=DEFAULT_TOLERANCE[entry.rule])
    try:
        result.exact_error = largest_error(entry, device, EXACT)
        result.default_error = largest_error(entry, device, {})
    except CaptureFailed as error:
        return GateResult(name, "unavailable", reason=f"graph capture failed: {error}")
    except Exception as error:
        result.exact_error = None
        result.reason = f"{type(error).__name__}: {error}"
        return result
    if result.exact_error <= EXACT_TOLERANCE and result.default_error <= DEFAULT_TOLERANCE[entry.rule]:
        result.status = "green"
    return result
