"""Case 33 and 7: the lr as a float or a tensor, moved by any scheduler, is the lr of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from flashdist import FlashSGD
from tests.support.backends import FP32, BackendUnderTest, assert_same

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=4),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=6, cycle_momentum=False),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 1.0 / (1 + epoch)),
}


def one_step(opt: Any) -> list[float]:
    """The lr that each group's step really took: with gradients of one, SGD moves by it."""
    params = [p for group in opt.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    return [float((b - p.detach()).mean()) for b, p in zip(before, params, strict=True)]


def groups(device: torch.device, tensor_lr: str | None = None) -> list[dict[str, Any]]:
    made = []
    for lr in (1e-1, 1e-2):
        value = lr if tensor_lr is None else torch.tensor(lr, device="cpu" if tensor_lr == "cpu" else device)
        made.append({"params": [nn.Parameter(torch.zeros(33, dtype=FP32, device=device))], "lr": value})
    return made


@pytest.mark.parametrize("tensor_lr", [None, "cpu", "device"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_two_groups_follow_their_own_schedule(backend: BackendUnderTest, scheduler: str, tensor_lr: str | None):
    opt = backend.build(FlashSGD, groups(backend.device, tensor_lr))
    reference = torch.optim.SGD(groups(torch.device("cpu")))
    schedules = SCHEDULERS[scheduler](opt), SCHEDULERS[scheduler](reference)
    seen = []
    for _ in range(3):
        taken = one_step(opt)
        expected = [float(group["lr"]) for group in reference.param_groups]
        assert taken == pytest.approx(expected, rel=1e-5)
        seen.append(tuple(expected))
        reference.step()
        for schedule in schedules:
            schedule.step(*([1.0] if scheduler == "plateau" else []))
    assert len(set(seen)) == 3 if scheduler != "plateau" else len(set(seen)) >= 2, "the schedule has to move"


def test_an_lr_tensor_changed_in_place_counts(backend: BackendUnderTest):
    lr = torch.tensor(0.5, device=backend.device)
    opt = backend.build(FlashSGD, [nn.Parameter(torch.zeros(33, device=backend.device))], lr=lr)
    assert one_step(opt) == pytest.approx([0.5])
    lr.fill_(0.25)
    assert one_step(opt) == pytest.approx([0.25])
    opt.param_groups[0]["lr"] = 0.125
    assert one_step(opt) == pytest.approx([0.125])


def test_case_7_a_rebuilt_scheduler_goes_on():
    def build() -> tuple[Any, Any]:
        opt = FlashSGD(groups(torch.device("cpu")))
        return opt, lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch)

    (opt, schedule), lrs = build(), []
    for t in range(6):
        if t == 3:
            saved, saved_schedule = opt.state_dict(), schedule.state_dict()
            fresh = FlashSGD(groups(torch.device("cpu")))
            fresh.load_state_dict(saved)
            schedule = lr_scheduler.LambdaLR(fresh, lambda epoch: 0.5**epoch, last_epoch=saved_schedule["last_epoch"])
            opt = fresh
            # Constructing a scheduler with last_epoch steps it once.
            lrs.append([g["lr"] for g in opt.param_groups])
            one_step(opt)
            continue
        lrs.append([g["lr"] for g in opt.param_groups])
        one_step(opt)
        schedule.step()
    steps = [0, 1, 2, 4, 4, 5]
    assert lrs == [[pytest.approx(0.1 * 0.5**k), pytest.approx(0.01 * 0.5**k)] for k in steps]


def test_lrs_as_tensor_and_float_take_the_same_step(backend: BackendUnderTest):
    opts = []
    for lr in (0.25, torch.tensor(0.25), torch.tensor([0.25], device=backend.device)):
        opt = backend.build(FlashSGD, [nn.Parameter(torch.ones(3, 33, device=backend.device))], lr=lr, momentum=0.5)
        one_step(opt)
        opts.append(opt)
    assert_same(opts[1], opts[0])
    assert_same(opts[2], opts[0])
