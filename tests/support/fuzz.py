"""Random trainings of a few odd parameters: what a step may meet, in any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW
from tests.support.backends import BF16, FP16, FP32, BackendUnderTest

SPECIAL = [
    (),
    (0,),
    (1,),
    (31,),
    (32,),
    (33,),
    (5, 7),
    (3, 33),
    (1, 32),
    (2, 1025),
    (4, 3, 7, 7),
    (33, 64),
    (0, 64),
    (6, 8, 4),
]
LARGEST = 3000  # elements
GRADIENTS = ["normal", "normal", "normal", "none", "zero", "strided", "expanded", "tiny", "huge", "one inf"]
EVENTS = ["nothing", "nothing", "reload", "rates", "freeze", "group", "replace"]
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (FlashAdamW, {}),
    "adamw, low betas": (FlashAdamW, {"betas": (0.5, 0.8), "eps": 1e-6}),
    "adam": (FlashAdam, {"betas": (0.9, 0.95)}),
    "lion": (FlashLion, {}),
    "sgd": (FlashSGD, {"momentum": 0.9, "dampening": 0.1}),
    "plain sgd": (FlashSGD, {}),
    "sgdw": (FlashSGDW, {"momentum": 0.9, "nesterov": True}),
}


@dataclass(frozen=True)
class Group:
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    settings: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What happens before a step, and in it."""

    event: str
    which: int  # the parameter that an event is about
    rate: float
    gradients: tuple[str, ...]  # taken in turn by the parameters
    factor: float | None  # of clipping
    skip: bool | None  # what a GradScaler has found; None: there is none


@dataclass(frozen=True)
class Training:
    rule: str
    groups: tuple[Group, ...]
    late: Group  # what the event "group" adds
    turns: tuple[Turn, ...]
    seed: int


shapes = st.one_of(
    st.sampled_from(SPECIAL),
    st.lists(st.integers(1, 70), min_size=1, max_size=4).map(tuple).filter(lambda s: math.prod(s) <= LARGEST),
)
rates = st.sampled_from([0.0, 1e-4, 1e-3, 1e-2])
groups = st.builds(
    Group,
    st.lists(shapes, min_size=1, max_size=3).map(tuple),
    st.sampled_from([BF16, BF16, FP16, FP32]),
    st.fixed_dictionaries(
        {
            "lr": rates,
            "weight_decay": st.sampled_from([0.0, 0.1]),
            "master_weight_bits": st.sampled_from([24, 24, 32, None]),
            "quantize": st.sampled_from([True, True, False]),
            "maximize": st.booleans(),
        }
    ),
)


def trainings(turns: int, events: Sequence[str] = EVENTS) -> st.SearchStrategy[Training]:
    """Trainings of this many steps."""
    turn = st.builds(
        Turn,
        st.sampled_from(events),
        st.integers(0, 20),
        rates,
        st.lists(st.sampled_from(GRADIENTS), min_size=1, max_size=5).map(tuple),
        st.sampled_from([None, None, 0.37, 0.0]),
        st.sampled_from([None, None, None, False, True]),
    )
    return st.builds(
        Training,
        st.sampled_from(sorted(RULES)),
        st.lists(groups, min_size=1, max_size=3).map(tuple),
        groups,
        st.lists(turn, min_size=turns, max_size=turns).map(tuple),
        st.integers(0, 2**20),
    )


def gradient(kind: str, p: Tensor, seed: int) -> Tensor | None:
    """One of ``GRADIENTS``, on the CPU."""
    g = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    if kind == "none":
        return None
    if kind == "expanded":
        return torch.full((), 0.3, dtype=p.dtype).expand(p.shape)
    if kind == "one inf" and g.numel():
        g.view(-1)[g.numel() // 2] = math.inf
    g = (g * {"zero": 0.0, "tiny": 1e-5, "huge": 300.0}.get(kind, 1.0)).to(p.dtype)
    return torch.stack([g, g], -1)[..., 0] if kind == "strided" else g


class Trainee:
    """One optimizer in a training; two of them see the same."""

    def __init__(self, lab: BackendUnderTest, training: Training) -> None:
        self.lab, self.training = lab, training
        self.cls, self.settings = RULES[training.rule]
        made = [self._group(g, training.seed + i) for i, g in enumerate(training.groups)]
        self.opt: FlashOptimizer = lab.build(self.cls, made, **self.settings)

    def _group(self, group: Group, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(shape, generator=generator) * 0.25 for shape in group.shapes]
        return {"params": [nn.Parameter(t.to(group.dtype).to(self.lab.device)) for t in made], **group.settings}

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.opt.param_groups for p in group["params"]]

    def event(self, t: int) -> None:
        turn = self.training.turns[t]
        p = self.params[turn.which % len(self.params)]
        if turn.event == "reload":
            again = self.lab.build(self.cls, [dict(g) for g in self.opt.param_groups], **self.settings)
            again.load_state_dict(self.opt.state_dict())
            self.opt = again
        elif turn.event == "rates":
            for i, group in enumerate(self.opt.param_groups):
                rate = turn.rate / (i + 1)
                group["lr"] = torch.tensor(rate) if turn.which % 2 else rate
        elif turn.event == "freeze":
            p.requires_grad_(not p.requires_grad)
        elif turn.event == "group":
            self.opt.add_param_group(self._group(self.training.late, self.training.seed + 100 + t))
        elif turn.event == "replace":
            p.data.mul_(1.25)  # behind the optimizer's back

    def step(self, t: int) -> None:
        turn = self.training.turns[t]
        for i, p in enumerate(self.params):
            kind = turn.gradients[i % len(turn.gradients)] if p.requires_grad else "none"
            grad = gradient(kind, p, self.training.seed + 1000 * t + i)
            p.grad = None if grad is None else _as_it_lies(grad, p.device)
        if turn.factor is not None:
            self.opt._clip_factor = torch.tensor(turn.factor, device=self.lab.device)
        if turn.skip is not None:
            self.opt.grad_scale = torch.tensor(4.0, device=self.lab.device)  # type: ignore[attr-defined]
            self.opt.found_inf = torch.tensor(float(turn.skip), device=self.lab.device)  # type: ignore[attr-defined]
        self.opt.step()
        if turn.skip is not None:
            del self.opt.grad_scale, self.opt.found_inf  # type: ignore[attr-defined]


def _as_it_lies(grad: Tensor, device: torch.device) -> Tensor:
    """On the device with the same strides."""
    if device.type == "cpu":
        return grad
    if 0 in grad.stride() and grad.numel() > 1:
        return grad.reshape(-1)[0].to(device).expand(grad.shape)
    there = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=device)
    return there.copy_(grad)


def run(training: Training, labs: Sequence[BackendUnderTest], compare: Callable[..., None]) -> None:
    """Both trainees side by side, compared after every step."""
    pair = [Trainee(lab, training) for lab in labs]
    for t in range(len(training.turns)):
        for one in pair:
            one.event(t)
        for one in pair:
            one.step(t)
        compare(pair[0].opt, pair[1].opt)
