"""States of one kind of optimizer in another, and of one with other settings: by a checkpoint and by a state dict
alike."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW, checkpoint
from flashdist.checkpoint.manifest import _canonical
from tests.checkpoint.test_contents import assert_same, make, train

PAIRS = [(FlashAdam, FlashAdamW, {}), (FlashSGD, FlashSGDW, {"momentum": 0.9}), (FlashSGD, FlashSGDW, {})]
both_ways = pytest.mark.parametrize(
    ("theirs", "ours", "settings"), [*PAIRS, *((b, a, s) for a, b, s in PAIRS)], ids=lambda v: getattr(v, "__name__", v)
)
ways = pytest.mark.parametrize("way", ["checkpoint", "state dict"])


def go_over(way, tmp_path, source, target):
    """Load what one model and optimizer hold into the others."""
    if way == "checkpoint":
        checkpoint.save(tmp_path / "c", *source, overwrite=True)
        checkpoint.load(tmp_path / "c", *target)
    else:
        target[1].load_state_dict(copy.deepcopy(source[1].state_dict()))
        target[0].load_state_dict(source[0].state_dict())


@ways
@both_ways
def test_a_weight_decay_of_another_kind_is_refused_and_nothing_is_changed(tmp_path, way, theirs, ours, settings):
    source = make(opt_class=theirs, weight_decay=0.1, **settings)
    target = make(1, opt_class=ours, **settings)
    before = copy.deepcopy(target[1].state_dict())
    weights = {k: v.clone() for k, v in target[0].state_dict().items()}
    with pytest.raises(ValueError, match=r"weight_decay=0.1, which its optimizer .* set weight_decay to 0"):
        go_over(way, tmp_path, source, target)
    assert str(target[1].state_dict()) == str(before)
    assert all(torch.equal(v, weights[k]) for k, v in target[0].state_dict().items())


@ways
@both_ways
def test_without_weight_decay_they_are_the_same(tmp_path, caplog, way, theirs, ours, settings):
    source = make(opt_class=theirs, weight_decay=0.0, **settings)
    target = make(1, opt_class=ours, weight_decay=0.3, **settings)
    keys = set(target[1].param_groups[0])
    go_over(way, tmp_path, source, target)
    assert "weight_decay=0, which was taken" in caplog.text
    assert target[1].param_groups[0]["weight_decay"] == 0
    assert set(target[1].param_groups[0]) == keys
    train(*source, 2, seed=3)
    train(*target, 2, seed=3)
    assert_same(source, target)


@both_ways
def test_the_remedy_of_the_error_is_one(theirs, ours, settings):
    source, target = make(opt_class=theirs, weight_decay=0.1, **settings), make(1, opt_class=ours, **settings)
    saved = source[1].state_dict()
    for group in saved["param_groups"]:
        group["weight_decay"] = 0
    target[1].load_state_dict(saved)


def test_other_kinds_are_refused_even_without_states():
    for theirs, ours in [(FlashLion, FlashAdamW), (FlashSGD, FlashAdam), (FlashAdamW, FlashSGDW)]:
        _, opt = make(opt_class=theirs, steps=0)
        saved = {**opt.state_dict(), "state": {}}
        with pytest.raises(ValueError, match="another kind of optimizer"):
            make(opt_class=ours, steps=0)[1].load_state_dict(saved)


@ways
@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (torch.optim.Adam, FlashAdamW, True),
        (torch.optim.AdamW, FlashAdam, True),
        (torch.optim.SGD, FlashSGDW, True),
        (torch.optim.Adam, FlashAdam, False),
        (torch.optim.AdamW, FlashAdamW, False),
        (torch.optim.SGD, FlashSGD, False),
    ],
)
def test_states_of_torch_load_and_another_kind_of_decay_is_said(tmp_path, caplog, way, theirs, ours, said):
    source = make(opt_class=theirs, weight_decay=0.1)
    target = make(1, opt_class=ours)
    go_over(way, tmp_path, source, target)
    assert ("weight_decay=0.1, which torch's optimizer" in caplog.text) == said
    assert target[1].param_groups[0]["weight_decay"] == 0.1


def test_a_checkpoint_without_a_class_name_still_loads(tmp_path):
    """Kinds are told by what is in every param group since the first release."""
    source = make(weight_decay=0.1)
    checkpoint.save(tmp_path / "c", *source)
    file = tmp_path / "c" / "manifest.json"
    body = json.loads(file.read_bytes())["body"]
    del body["optimizer"]["class"]
    file.write_bytes(_canonical(body))
    target = make(1)
    checkpoint.load(tmp_path / "c", *target)
    assert_same(source, target)
    with pytest.raises(ValueError, match=r"weight_decay=0\.1"):
        checkpoint.load(tmp_path / "c", *make(1, opt_class=FlashAdam))


@ways
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("opt_class", [FlashSGD, FlashSGDW])
@pytest.mark.parametrize(("before", "after"), [(0.9, 0), (0, 0.9)])
def test_the_momentum_of_sgd_comes_from_what_is_loaded(tmp_path, way, opt_class, before, after, steps):
    source = make(opt_class=opt_class, momentum=before)
    target = make(1, opt_class=opt_class, momentum=after, steps=steps)
    go_over(way, tmp_path, source, target)
    assert target[1].param_groups[0]["momentum"] == before
    assert_same(source, target)
    train(*source, 2, seed=3)
    train(*target, 2, seed=3)
    assert_same(source, target)
