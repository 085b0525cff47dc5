"""Hyperparameters of NumPy's types and learning rates that are tensors, through checkpoints and state dicts."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy
import pytest
import torch

from flashdist import FlashAdamW, FlashSGD, checkpoint
from tests.checkpoint.test_contents import assert_same, make, train

NUMBERS = [numpy.float64, numpy.float32, numpy.float16, lambda x: Fraction(x).limit_denominator(1000)]


def kinds(value):
    """The value, with the type of each number in it."""
    return [kinds(v) for v in value] if isinstance(value, tuple | list) else (type(value), value)


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def foreign(number):
    return {"betas": (number(0.5), number(0.75)), "eps": number(0.125), "weight_decay": number(0.25)}


@pytest.mark.parametrize("later", [False, True], ids=["at construction", "later"])
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_other_types_are_saved_as_pythons(tmp_path, number, later):
    settings = {**foreign(number), "maximize": numpy.bool_(True), "master_weight_bits": numpy.int64(32)}
    model, opt = make(**({} if later else settings))
    opt.param_groups[0].update(settings if later else {})
    opt.param_groups[0]["lr"] = number(0.0625)
    if later:  # whose format is that of 24 bits
        opt.param_groups[0]["master_weight_bits"] = 24
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1, master_weight_bits=24 if later else 32)
    checkpoint.load(tmp_path / "c", other, other_opt)
    again = make(1)[1]
    again.load_state_dict(through_a_file(opt.state_dict()))
    for loaded in (other_opt, again):
        for key, value in {**foreign(float), "maximize": True}.items():
            assert kinds(loaded.param_groups[0][key]) == kinds(value), key
        assert kinds(loaded.param_groups[0]["lr"]) == (float, float(number(0.0625)))
    if not later:
        assert kinds(opt.param_groups[0]["betas"]) == kinds((0.5, 0.75))
        assert opt.param_groups[0]["maximize"] is True
        opt.param_groups[0]["lr"] = 0.0625
        train(model, opt, 2, seed=3)
        train(other, other_opt, 2, seed=3)
    assert_same((model, opt), (other, other_opt))


def test_momentum_and_an_optimizer_of_torch(tmp_path):
    settings = {"momentum": numpy.float32(0.5), "weight_decay": numpy.float64(0.25)}
    for opt_class in (FlashSGD, torch.optim.SGD):
        pair = make(opt_class=opt_class, dtype=torch.float32, **settings)
        checkpoint.save(tmp_path / opt_class.__name__, *pair)
        loaded = make(1, opt_class=opt_class, dtype=torch.float32, momentum=0.9)
        checkpoint.load(tmp_path / opt_class.__name__, *loaded)
        assert kinds(loaded[1].param_groups[0]["momentum"]) == (float, 0.5)
        assert_same(pair, loaded)


@pytest.mark.parametrize("saved", [0.25, torch.tensor(0.25), torch.tensor([0.25])], ids=["number", "0-d", "1-d"])
def test_a_tensor_that_a_graph_has_the_address_of_stays_in_place(tmp_path, saved):
    model, opt = make()
    opt.param_groups[0]["lr"] = saved
    checkpoint.save(tmp_path / "c", model, opt)
    for way in ("checkpoint", "state dict"):
        lr = torch.tensor(1.0)
        other, other_opt = make(1)
        other_opt.param_groups[0]["lr"] = lr
        if way == "checkpoint":
            checkpoint.load(tmp_path / "c", other, other_opt)
        else:
            other_opt.load_state_dict(opt.state_dict())
        assert other_opt.param_groups[0]["lr"] is lr, way
        assert lr == 0.25, way


@pytest.mark.parametrize("way", ["checkpoint", "state dict"])
def test_groups_that_share_a_tensor_do_not_get_each_others_rate(tmp_path, way):
    """A tensor given to the constructor is one object in every group."""

    def build(*rates):
        model, _ = make()
        params = list(model.parameters())
        return model, FlashAdamW([{"params": params[:1], **rates[0]}, {"params": params[1:], **rates[1]}],
                                 lr=torch.tensor(1.0))  # fmt: skip

    model, opt = build({"lr": 0.5}, {"lr": 0.25})
    other, other_opt = build({}, {})
    if way == "checkpoint":
        checkpoint.save(tmp_path / "c", model, opt)
        checkpoint.load(tmp_path / "c", other, other_opt)
    else:
        other_opt.load_state_dict(opt.state_dict())
    assert [float(g["lr"]) for g in other_opt.param_groups] == [0.5, 0.25]
    assert all(isinstance(g["lr"], torch.Tensor) for g in other_opt.param_groups)
