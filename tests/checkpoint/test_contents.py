"""What a checkpoint carries besides weights and states, and what it refuses."""

from __future__ import annotations

import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import flashdist
from flashdist import FlashAdamW, FlashLion, FlashSGD, checkpoint
from flashdist.checkpoint.jsonable import from_json, tensor_names, to_json


class Net(nn.Module):
    def __init__(self, width=48, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 20, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        if tied:
            self.head.weight = self.embedding.weight


def make(seed=0, model_class=Net, opt_class=FlashAdamW, dtype=torch.bfloat16, steps=3, **settings):
    torch.manual_seed(seed)
    model = model_class()
    model = flashdist.cast_model(model) if dtype == torch.bfloat16 else model.to(dtype)
    opt = opt_class(model.parameters(), lr=1e-2, **settings)
    train(model, opt, steps)
    return model, opt


def train(model, opt, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()


def assert_same(first, second):
    (model, opt), (other, other_opt) = first, second
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name
        assert opt.state[p].keys() == other_opt.state[q].keys(), name
        for key, value in opt.state[p].items():
            found = other_opt.state[q][key]
            assert (value.dtype, value.shape) == (found.dtype, found.shape), (name, key)
            assert torch.equal(value, found), (name, key)


# Values.

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
        | st.dictionaries(st.text() | st.integers(), inner).map(OrderedDict)
        | st.dictionaries(st.text() | st.tuples(st.integers()), st.integers()).map(Counter)
    ),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_values_come_back_as_they_were(value):
    tensors = {}
    described = to_json(value, "extra", tensors)
    found = from_json(described, tensors)
    assert repr(found) == repr(value)


def test_marked_keys_and_tensors_in_values():
    value = {"$tuple": [1], "a": {"$tensor": "x"}, "t": [torch.ones(2), (torch.zeros(()),)], "nan": math.nan}
    tensors = {}
    described = to_json(value, "extra", tensors)
    found = from_json(described, tensors)
    assert found["$tuple"] == [1]
    assert found["a"] == {"$tensor": "x"}
    assert torch.equal(found["t"][0], torch.ones(2))
    assert math.isnan(found["nan"])
    assert sorted(tensor_names(described)) == sorted(tensors)


@pytest.mark.parametrize("bad", [object(), {1, 2}, numpy.float64(1.5), lambda: 0, Net, defaultdict(int)])
def test_extra_of_another_kind_is_refused_by_its_place(tmp_path, bad):
    with pytest.raises(TypeError, match=r"extra\.progress\.1 is of type"):
        checkpoint.save(tmp_path / "c", *make(), extra={"progress": [1, bad]})
    assert list(tmp_path.iterdir()) == []


def test_extra_and_a_scheduler_and_random_states_go_on(tmp_path):
    model, opt = make()
    scheduler = lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=50)
    plateau = {"best": math.inf, "bits": struct.pack("<f", 1.5).hex(), "ids": torch.arange(5), 7: (None, True)}
    for _ in range(4):
        opt.step()
        scheduler.step()
    checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler, extra=plateau)
    drawn = (torch.rand(3), random.random(), random.gauss(0, 1), numpy.random.rand(2), numpy.random.randn(1))  # noqa: NPY002
    lrs = []
    for _ in range(5):
        scheduler.step()
        lrs.append(opt.param_groups[0]["lr"])

    other, other_opt = make(1)
    other_scheduler = lr_scheduler.OneCycleLR(other_opt, max_lr=0.1, total_steps=50)
    random.gauss(0, 1)
    found = checkpoint.load(tmp_path / "c", other, other_opt, scheduler=other_scheduler)
    assert (found["best"], found["bits"], found[7]) == (math.inf, plateau["bits"], (None, True))
    assert torch.equal(found["ids"], torch.arange(5))
    again = (torch.rand(3), random.random(), random.gauss(0, 1), numpy.random.rand(2), numpy.random.randn(1))  # noqa: NPY002
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:3] == again[1:3]
    assert numpy.array_equal(drawn[3], again[3])
    assert numpy.array_equal(drawn[4], again[4])
    for lr in lrs:
        other_scheduler.step()
        assert other_opt.param_groups[0]["lr"] == lr


def test_case_7_the_schedule_of_every_group_goes_on(tmp_path):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 4)).to(torch.bfloat16)
        opt = FlashAdamW([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1e-4}], lr=1e-3)
        return model, opt, lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))

    model, opt, scheduler = build()
    for _ in range(3):
        train(model, opt, 1)
        scheduler.step()
    checkpoint.save(tmp_path / "c", model, opt, scheduler=scheduler)
    other, other_opt, other_scheduler = build()
    checkpoint.load(tmp_path / "c", other, other_opt, scheduler=other_scheduler)
    for _ in range(3):
        train(model, opt, 1)
        train(other, other_opt, 1)
        scheduler.step()
        other_scheduler.step()
        assert [g["lr"] for g in other_opt.param_groups] == [g["lr"] for g in opt.param_groups]
        assert opt.param_groups[1]["lr"] == pytest.approx(opt.param_groups[0]["lr"] / 10)
    assert_same((model, opt), (other, other_opt))


def test_a_scheduler_that_was_not_saved_is_asked_for_in_vain(tmp_path):
    checkpoint.save(tmp_path / "c", *make())
    model, opt = make(1)
    before = model.body.weight.clone()
    with pytest.raises(ValueError, match="saved without one"):
        checkpoint.load(tmp_path / "c", model, opt, scheduler=lr_scheduler.LambdaLR(opt, lambda step: 1.0))
    assert torch.equal(before, model.body.weight)


def test_an_lr_that_is_a_tensor_stays_one(tmp_path):
    model, opt = make()
    opt.param_groups[0]["lr"] = torch.tensor(0.25)
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1)
    lr = other_opt.param_groups[0]["lr"] = torch.tensor(1.0)
    checkpoint.load(tmp_path / "c", other, other_opt)
    assert other_opt.param_groups[0]["lr"] is lr
    assert lr == 0.25
    plain, plain_opt = make(1)
    checkpoint.load(tmp_path / "c", plain, plain_opt)
    assert plain_opt.param_groups[0]["lr"] == 0.25


# Weights and states.


@pytest.mark.parametrize("opt_class", [FlashAdamW, FlashLion, FlashSGD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_round_trip_goes_on_as_the_unbroken_run(tmp_path, opt_class, dtype):
    settings = {"momentum": 0.9} if opt_class is FlashSGD else {}
    model, opt = make(opt_class=opt_class, dtype=dtype, **settings)
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1, opt_class=opt_class, dtype=dtype, **settings)
    checkpoint.load(tmp_path / "c", other, other_opt)
    assert_same((model, opt), (other, other_opt))
    train(model, opt, 3, seed=5)
    train(other, other_opt, 3, seed=5)
    assert_same((model, opt), (other, other_opt))


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    model, opt = make()
    checkpoint.save(tmp_path / "c", model, opt)
    manifest = checkpoint.verify(tmp_path / "c")
    assert manifest.aliases == {"head.weight": "embedding.weight"}
    assert "model.head.weight" not in manifest.tensors
    assert "model.scratch" not in manifest.tensors
    other, other_opt = make(1)
    other.seen.fill_(3)
    checkpoint.load(tmp_path / "c", other, other_opt)
    assert other.head.weight is other.embedding.weight
    assert other.seen == 0


def test_untied_and_tied_models_do_not_load_each_other(tmp_path):
    checkpoint.save(tmp_path / "tied", *make())
    checkpoint.save(tmp_path / "untied", *make(model_class=lambda: Net(tied=False)))
    with pytest.raises(ValueError, match="tied in the checkpoint, but not in the model"):
        checkpoint.load(tmp_path / "tied", *make(model_class=lambda: Net(tied=False)))
    with pytest.raises(ValueError, match="tied in the model, but not in the checkpoint"):
        checkpoint.load(tmp_path / "untied", *make())


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 48)
        self.body = nn.Linear(48, 50)
        self.extra = nn.Linear(3, 3)


def test_another_architecture_is_listed_and_nothing_changed(tmp_path):
    checkpoint.save(tmp_path / "c", *make(model_class=lambda: Net(tied=False)))
    model, opt = make(1, model_class=Other)
    before = [t.clone() for p in model.parameters() for t in (p, *opt.state[p].values())]
    with pytest.raises(ValueError, match="another model") as raised:
        checkpoint.load(tmp_path / "c", model, opt)
    text = str(raised.value)
    assert "missing in it: extra.weight, extra.bias" in text
    assert "unexpected in it: seen, head.weight" in text
    assert "body.weight (checkpoint (48, 48), model (50, 48))" in text
    after = [t for p in model.parameters() for t in (p, *opt.state[p].values())]
    assert all(map(torch.equal, before, after))


def test_other_param_groups_and_optimizers_are_refused(tmp_path):
    checkpoint.save(tmp_path / "c", *make())
    model, _ = make(1)
    params = list(model.parameters())
    two = FlashAdamW([{"params": params[:1]}, {"params": params[1:]}])
    with pytest.raises(ValueError, match="1 param groups, the optimizer 2"):
        checkpoint.load(tmp_path / "c", model, two)
    with pytest.raises(ValueError, match=r"Only here: none; only there: embedding\.weight"):
        checkpoint.load(tmp_path / "c", model, FlashAdamW(params[1:]))
    with pytest.raises(ValueError, match="another kind of optimizer"):
        checkpoint.load(tmp_path / "c", model, FlashLion(params))
    with pytest.raises(ValueError, match="AdamW cannot read"):
        checkpoint.load(tmp_path / "c", model, torch.optim.AdamW(params))


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    model, _ = make()
    _, opt = make(1)
    with pytest.raises(ValueError, match="the model does not have"):
        checkpoint.save(tmp_path / "c", model, opt)
    assert list(tmp_path.iterdir()) == []


def test_a_model_on_meta_is_refused(tmp_path):
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match="on the meta device"):
        checkpoint.save(tmp_path / "c", model, None)


def test_extra_state_of_modules_is_refused(tmp_path):
    class Keeps(nn.Linear):
        def get_extra_state(self):
            return 1

    model = nn.Sequential(Keeps(3, 3))
    with pytest.raises(ValueError, match=r"the module 0 \(Keeps\)"):
        checkpoint.save(tmp_path / "c", model, None)


def test_case_9_moments_of_frozen_parameters_survive(tmp_path):
    model, opt = make()
    model.body.requires_grad_(False)
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1)
    other.body.requires_grad_(False)
    checkpoint.load(tmp_path / "c", other, other_opt)
    model.body.requires_grad_(True)
    other.body.requires_grad_(True)
    train(model, opt, 1)
    train(other, other_opt, 1)
    assert_same((model, opt), (other, other_opt))


def test_state_without_an_entry_starts_afresh(tmp_path, caplog):
    model, _ = make()
    model.body.requires_grad_(False)
    opt = FlashAdamW(model.parameters())
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1)
    checkpoint.load(tmp_path / "c", other, other_opt)
    assert other.body.weight not in other_opt.state
    assert "no optimizer state of body.weight, body.bias: they start afresh" in caplog.text


def test_wrappers_do_not_change_names(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, opt = make()
    model.body = checkpoint_wrapper(model.body)
    compiled = torch.compile(model, backend="eager")
    checkpoint.save(tmp_path / "c", compiled, opt)
    assert "model.body.weight" in checkpoint.verify(tmp_path / "c").tensors
    other = make(1)
    checkpoint.load(tmp_path / "c", *other)
    assert torch.equal(other[0].body.weight, model.body._checkpoint_wrapped_module.weight)


def test_weights_alone(tmp_path, caplog):
    model, opt = make()
    checkpoint.save(tmp_path / "c", model, None)
    other, other_opt = make(1)
    with caplog.at_level("INFO"):
        checkpoint.load(tmp_path / "c", other, other_opt)
    assert "weights alone" in caplog.text
    assert torch.equal(model.body.weight, other.body.weight)
    assert torch.equal(other_opt.master_weight(other.body.weight), model.body.weight.float())
    checkpoint.save(tmp_path / "full", model, opt)
    checkpoint.load(tmp_path / "full", make(2)[0], None)


def test_corrections_of_weights_changed_behind_the_optimizer_are_not_saved(tmp_path):
    model, opt = make()
    with torch.no_grad():
        model.body.weight.mul_(2)
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1)
    checkpoint.load(tmp_path / "c", other, other_opt)
    assert torch.equal(other_opt.master_weight(other.body.weight), model.body.weight.float())


# Conversions.


@pytest.mark.parametrize("before", [24, 32, None])
@pytest.mark.parametrize("after", [24, 32, None])
def test_other_master_weight_bits_are_converted(tmp_path, caplog, before, after):
    model, opt = make(master_weight_bits=before)
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1, master_weight_bits=after)
    checkpoint.load(tmp_path / "c", other, other_opt)
    assert other_opt.param_groups[0]["master_weight_bits"] == after
    if before != after:
        assert "converted from bfloat16" in caplog.text
    bits = {24: 2.0**-16, 32: 0.0, None: 2.0**-8}
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        old, new = opt.master_weight(p), other_opt.master_weight(q)
        # Half a unit in the last place that both can hold.
        bound = bits[after] if (before or 16) > (after or 16) else 0.0
        assert ((old - new).abs() <= old.abs() * bound).all()
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[p][key], other_opt.state[q][key])
    train(other, other_opt, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_13_state_of_torch_adamw_is_encoded(tmp_path, caplog, dtype):
    model, opt = make(opt_class=torch.optim.AdamW, dtype=torch.float32)
    if dtype == torch.bfloat16:
        model, opt = make(opt_class=torch.optim.AdamW, dtype=dtype)
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1, master_weight_bits=32)
    checkpoint.load(tmp_path / "c", other, other_opt)
    assert "encoded to 8 bits" in caplog.text
    dense = checkpoint.torch_state_dict(other_opt)["state"]
    for i, (p, q) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
        assert torch.equal(other_opt.master_weight(q), p.float()), "fp32 weights are kept to the last bit"
        assert other_opt.state[q]["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            exact, found = opt.state[p][key].float(), dense[i][key]
            assert (exact - found).abs().max() <= 0.02 * exact.abs().max()


def test_the_same_optimizer_of_torch_goes_through_unchanged(tmp_path):
    model, opt = make(opt_class=torch.optim.AdamW, dtype=torch.float32)
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1, opt_class=torch.optim.AdamW, dtype=torch.float32, steps=0)
    checkpoint.load(tmp_path / "c", other, other_opt)
    assert_same((model, opt), (other, other_opt))
    train(model, opt, 2)
    train(other, other_opt, 2)
    assert_same((model, opt), (other, other_opt))


@pytest.mark.parametrize("before", [True, False])
def test_quantize_is_the_optimizers_own(tmp_path, before):
    model, opt = make(quantize=before)
    checkpoint.save(tmp_path / "c", model, opt)
    other, other_opt = make(1, quantize=not before)
    checkpoint.load(tmp_path / "c", other, other_opt)
    old, new = checkpoint.torch_state_dict(opt)["state"], checkpoint.torch_state_dict(other_opt)["state"]
    for i in old:
        for key in ("exp_avg", "exp_avg_sq"):
            assert (old[i][key] - new[i][key]).abs().max() <= 0.02 * old[i][key].abs().max()
    train(other, other_opt, 1)


def test_a_model_of_another_dtype_is_refused_by_name(tmp_path):
    checkpoint.save(tmp_path / "c", *make())
    with pytest.raises(ValueError, match=r"embedding\.weight is torch.float32 here, torch.bfloat16 in the checkpoint"):
        checkpoint.load(tmp_path / "c", make(1, dtype=torch.float32)[0], None)
    with pytest.raises(ValueError, match="cast the model"):
        checkpoint.load(tmp_path / "c", *make(1, dtype=torch.float16))


# async_save.


def test_async_save_keeps_what_there_was_at_the_call(tmp_path):
    model, opt = make()
    handle = checkpoint.async_save(tmp_path / "c", model, opt, extra="then")
    expected, expected_opt = make()
    train(model, opt, 2, seed=9)
    handle.result()
    assert handle.done()
    other, other_opt = make(1)
    assert checkpoint.load(tmp_path / "c", other, other_opt) == "then"
    assert_same((expected, expected_opt), (other, other_opt))


def test_async_save_raises_at_the_call_or_at_the_result(tmp_path, monkeypatch):
    model, opt = make()
    checkpoint.save(tmp_path / "c", model, opt)
    with pytest.raises(FileExistsError):
        checkpoint.async_save(tmp_path / "c", model, opt)
    from flashdist.checkpoint import saving

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_shard", full)
    handle = checkpoint.async_save(tmp_path / "d", model, opt)
    with pytest.raises(OSError, match="No space"):
        handle.result()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
