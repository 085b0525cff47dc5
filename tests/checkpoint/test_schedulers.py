"""Every scheduler of torch goes on from a checkpoint as if there had been no break, with a state of the same types."""

from __future__ import annotations

import inspect
import json
from collections import Counter, defaultdict

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from flashdist import FlashSGD, checkpoint
from flashdist.checkpoint.manifest import _canonical

BUILD = {
    "LambdaLR": lambda opt: schedulers.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda opt: schedulers.MultiplicativeLR(opt, lambda step: 0.9),
    "StepLR": lambda opt: schedulers.StepLR(opt, 2, gamma=0.5),
    "MultiStepLR": lambda opt: schedulers.MultiStepLR(opt, [2, 5, 5, 8], gamma=0.5),
    "ConstantLR": lambda opt: schedulers.ConstantLR(opt, total_iters=6),
    "LinearLR": lambda opt: schedulers.LinearLR(opt, total_iters=9),
    "ExponentialLR": lambda opt: schedulers.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: schedulers.PolynomialLR(opt, 9, power=2),
    "CosineAnnealingLR": lambda opt: schedulers.CosineAnnealingLR(opt, 5),
    "CosineAnnealingWarmRestarts": lambda opt: schedulers.CosineAnnealingWarmRestarts(opt, 4, 2),
    "CyclicLR": lambda opt: schedulers.CyclicLR(opt, 0.01, 0.1, step_size_up=4, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, 0.1, total_steps=30, three_phase=True),
    "ReduceLROnPlateau": lambda opt: schedulers.ReduceLROnPlateau(opt, patience=1, cooldown=1, min_lr=[1e-3]),
    "SequentialLR": lambda opt: schedulers.SequentialLR(
        opt, [BUILD["LinearLR"](opt), BUILD["MultiStepLR"](opt), BUILD["CosineAnnealingLR"](opt)], [3, 6]
    ),
    "ChainedScheduler": lambda opt: schedulers.ChainedScheduler([BUILD["MultiStepLR"](opt), BUILD["StepLR"](opt)]),
    "SWALR": lambda opt: SWALR(opt, 0.001, anneal_epochs=7),
}
every = pytest.mark.parametrize("name", BUILD)
BY_EPOCH = [n for n in BUILD if hasattr(getattr(schedulers, n, None), "_get_closed_form_lr")]


class Decaying:
    """A callable with a state, which LambdaLR saves."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        self.rate *= 0.9
        return self.rate


def run(name, lr=0.1):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = FlashSGD(model.parameters(), lr=lr, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    scheduler = BUILD[name](opt) if isinstance(name, str) else name(opt)
    opt.step()  # as torch asks for
    return model, opt, scheduler


def ahead(scheduler, opt, steps, epochs=False):
    seen = []
    for i in steps:
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(abs(i - 2.0))
        elif epochs:
            scheduler.step(i)
        else:
            scheduler.step()
        seen.append((float(opt.param_groups[0]["lr"]), opt.param_groups[0]["momentum"]))
    return seen


def typed(value):
    """A value with its types, as what compares equal only where both are."""
    if isinstance(value, dict):
        return type(value), [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(v) for v in value]
    return type(value), value


def test_no_scheduler_of_torch_is_left_out():
    found = {
        name
        for name, c in inspect.getmembers(schedulers, inspect.isclass)
        if issubclass(c, schedulers.LRScheduler) and c.__module__ == schedulers.__name__
    }
    assert found - {"LRScheduler", "_LRScheduler"} <= set(BUILD)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(("name", "epochs"), [*((n, False) for n in BUILD), *((n, True) for n in BY_EPOCH)])
def test_it_goes_on_as_the_unbroken_one(tmp_path, name, epochs):
    model, opt, scheduler = run(name)
    ahead(scheduler, opt, range(1, 5), epochs)
    checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler)
    other, other_opt, other_scheduler = run(name)
    checkpoint.load(tmp_path / "c", other, other_opt, scheduler=other_scheduler)
    assert typed(other_scheduler.state_dict()) == typed(scheduler.state_dict())
    assert ahead(other_scheduler, other_opt, range(5, 13), epochs) == ahead(scheduler, opt, range(5, 13), epochs)


@every
def test_a_rate_that_is_a_tensor_goes_on_too(tmp_path, name):
    model, opt, scheduler = run(name, torch.tensor(0.1))
    ahead(scheduler, opt, range(1, 5))
    checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler)
    other, other_opt, other_scheduler = run(name, torch.tensor(0.1))
    checkpoint.load(tmp_path / "c", other, other_opt, scheduler=other_scheduler)
    assert ahead(other_scheduler, other_opt, range(5, 13)) == ahead(scheduler, opt, range(5, 13))


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", ["MultiStepLR", "SequentialLR", "ChainedScheduler"])
def test_milestones_of_a_checkpoint_that_lost_their_type_are_mended(tmp_path, name):
    model, opt, scheduler = run(name)
    ahead(scheduler, opt, range(1, 5))
    checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler)
    file = tmp_path / "c" / "manifest.json"
    text = json.dumps(json.loads(file.read_bytes())["body"])
    assert "$counter" in text
    file.write_bytes(_canonical(json.loads(text.replace("$counter", "$dict"))))
    other, other_opt, other_scheduler = run(name)
    checkpoint.load(tmp_path / "c", other, other_opt, scheduler=other_scheduler)
    assert typed(other_scheduler.state_dict()) == typed(scheduler.state_dict())


def test_the_state_of_a_callable_is_kept(tmp_path):
    model, opt, scheduler = run(lambda opt: schedulers.LambdaLR(opt, Decaying(2.0)))
    ahead(scheduler, opt, range(3))
    checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler)
    other, other_opt, other_scheduler = run(lambda opt: schedulers.LambdaLR(opt, Decaying(1.0)))
    checkpoint.load(tmp_path / "c", other, other_opt, scheduler=other_scheduler)
    assert ahead(other_scheduler, other_opt, range(3)) == ahead(scheduler, opt, range(3))


def test_numbers_of_numpy_go_on(tmp_path):
    def build(opt):
        return schedulers.ChainedScheduler([
            schedulers.MultiStepLR(opt, numpy.array([2, 5, 5, 8]), gamma=numpy.float64(0.5)),
            schedulers.StepLR(opt, numpy.int64(3), gamma=0.9),
        ])  # fmt: skip

    model, opt, scheduler = run(build)
    ahead(scheduler, opt, range(4))
    checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler)
    other, other_opt, other_scheduler = run(build)
    checkpoint.load(tmp_path / "c", other, other_opt, scheduler=other_scheduler)
    assert other_scheduler._schedulers[0].milestones == Counter([2, 5, 5, 8])
    assert ahead(other_scheduler, other_opt, range(8)) == ahead(scheduler, opt, range(8))


@pytest.mark.parametrize("bad", [numpy.float32(0.5), {1, 2}, object(), defaultdict(int), numpy.ones(2)])
def test_what_would_not_come_back_as_it_was_is_refused_by_its_place(tmp_path, bad):
    model, opt, scheduler = run("StepLR")
    scheduler.mine = [1, {"a": bad}]
    with pytest.raises(TypeError, match=r"scheduler\.mine\.1\.a is of type"):
        checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler)
    assert list(tmp_path.iterdir()) == []
