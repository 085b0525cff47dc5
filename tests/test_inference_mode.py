"""Calls under torch.inference_mode, as around an evaluation: what they allocate can be stepped later."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flashdist import FlashAdamW, FlashSGD, checkpoint
from tests.checkpoint.test_contents import assert_same, make, train


def first_step(model, opt, path):
    train(model, opt, 1)


def clipped_step(model, opt, path):
    train(model, opt, 1)
    opt.clip_grad_norm_(1e-3)
    opt.step()


def closure_step(model, opt, path):
    def closure():
        opt.zero_grad()
        loss = model.head(model.body(model.embedding.weight)).float().square().mean()
        loss.backward()
        return loss.detach()

    opt.step(closure)


def state_dict(model, opt, path):
    opt.state_dict()


def load_state_dict(model, opt, path):
    with torch.inference_mode(False):
        saved = make(1)[1].state_dict()
    opt.load_state_dict(copy.deepcopy(saved))


def tensor_lr(model, opt, path):
    with torch.inference_mode(False):
        saved = make(1, steps=1)[1].state_dict()
    saved["param_groups"][0]["lr"] = torch.tensor(0.25)
    opt.load_state_dict(saved)


def master_weight(model, opt, path):
    for p in model.parameters():
        opt.master_weight(p)


def save(model, opt, path):
    checkpoint.save(path, model, opt)


def async_save(model, opt, path):
    checkpoint.async_save(path, model, opt).result()


def export(model, opt, path):
    checkpoint.export_weights(path, model, opt)
    checkpoint.torch_state_dict(opt)


def load(model, opt, path):
    with torch.inference_mode(False):
        checkpoint.save(path, *make(1))
    checkpoint.load(path, model, opt)


def load_converted(model, opt, path):
    with torch.inference_mode(False):
        checkpoint.save(path, *make(1, opt_class=torch.optim.AdamW))
    checkpoint.load(path, model, opt)


def import_optimizer(model, opt, path):
    with torch.inference_mode(False):
        reference = make(1, opt_class=torch.optim.AdamW)[1].state_dict()
    checkpoint.import_optimizer(reference, model, opt)


CALLS = [
    first_step, clipped_step, closure_step, state_dict, load_state_dict, tensor_lr, master_weight, save, async_save,
    export, load, load_converted, import_optimizer,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_under_inference_mode_is_like_one_outside(tmp_path, call):
    runs = []
    for mode in (False, True):
        model, opt = make(steps=0)
        with torch.inference_mode(mode):
            call(model, opt, tmp_path / f"inference {mode}")
            assert torch.is_inference_mode_enabled() == mode
        if isinstance(opt.param_groups[0]["lr"], torch.Tensor):
            opt.param_groups[0]["lr"].mul_(0.5)
        opt.zero_grad()
        train(model, opt, 2, seed=5)
        assert not any(t.is_inference() for kept in opt.state.values() for t in kept.values())
        assert torch.is_grad_enabled()
        runs.append((model, opt))
    assert_same(*runs)


def test_what_load_returns_can_be_written_to(tmp_path):
    model, opt = make()
    checkpoint.save(tmp_path / "c", model, opt, extra=torch.ones(3))
    with torch.inference_mode():
        extra = checkpoint.load(tmp_path / "c", model, opt)
    extra.add_(1)


@pytest.mark.parametrize("inside", [False, True])
def test_weights_made_under_it_can_be_loaded(tmp_path, inside):
    """Of a model that is only evaluated; transposed ones are not read into their storage but copied."""
    source = nn.Linear(6, 8)
    checkpoint.save(tmp_path / "c", source, None)
    with torch.inference_mode():
        model = nn.Linear(6, 8)
        model.weight.data = model.weight.data.t().contiguous().t()
    with torch.inference_mode(inside):
        checkpoint.load(tmp_path / "c", model, None)
    assert torch.equal(model.weight, source.weight)


@pytest.mark.parametrize("opt_class", [FlashAdamW, FlashSGD])
def test_an_optimizer_of_weights_made_under_it_is_refused(opt_class):
    with torch.inference_mode():
        model = nn.Linear(6, 8)
    with pytest.raises(RuntimeError, match=r"params'\]\[0\].* was made under torch\.inference_mode"):
        opt_class(model.parameters())
