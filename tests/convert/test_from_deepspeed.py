"""DeepSpeed's folders under FlashAdamW, converted without an engine."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flashdist import FlashAdamW, checkpoint
from flashdist.convert.run import Options, convert
from tests.support.deepspeed_runs import Net, config, deepspeed_on_this_group, make, snapshot, train, weights
from tests.support.ranks import run_ranks


def save_run(rank: int, world: int, stage: int, path: str) -> Any:
    with deepspeed_on_this_group() as deepspeed:
        engine = make(deepspeed, config(stage, params={"lr": 6e-3, "weight_decay": 0.1, "decouple_lr": True}), seed=5)
        for group in engine.basic_optimizer.param_groups:
            group["lr"] = 3e-3  # as a scheduler does
        train(engine, 3)
        engine.save_checkpoint(path, tag="t")
        if stage:
            return snapshot(engine), weights(deepspeed, engine)
        opt = engine.basic_optimizer
        states = checkpoint.torch_state_dict(opt)["state"]
        named = list(engine.module.named_parameters())
        found = {
            n: {"fp32": opt.master_weight(p), **{k: states[i][k] for k in ("exp_avg", "exp_avg_sq")}}
            for i, (n, p) in enumerate(named)
        }
        return found, {n: p.detach().clone() for n, p in named}


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (2, 2), (3, 3)])
def test_every_stage(tmp_path, stage, world):
    path = tmp_path / "zero"
    expected, whole = run_ranks(save_run, world, stage, str(path))[0]
    if not (path / "latest").exists():
        (path / "latest").write_text("t")
    convert(path, tmp_path / "a.pt", "torch-adamw")
    convert(path, tmp_path / "hf", "hf")
    convert(path / "t", tmp_path / "c", "flashdist", "deepspeed")
    found, exported = torch.load(tmp_path / "a.pt", weights_only=True), load_file(tmp_path / "hf" / "model.safetensors")
    names = found["optimizer"]["param_groups"][0]["param_names"]
    assert sorted(names) == sorted(expected)
    group = found["optimizer"]["param_groups"][0]
    assert (group["lr"], group["weight_decay"]) == (3e-3, 0.1 / 6e-3)  # torch's decay is relative to 1, not to base_lr
    for i, name in enumerate(names):
        state = found["optimizer"]["state"][i]
        assert torch.equal(exported[name], whole[name])
        assert torch.equal(found["model"][name], expected[name]["fp32"])
        assert state["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            # Groups that a partition's border has cut are encoded anew.
            assert (state[key] - expected[name][key]).abs().max() <= 0.01 * expected[name][key].abs().max()
    model = Net().bfloat16()
    opt = FlashAdamW(model.parameters())
    checkpoint.load(tmp_path / "c", model, opt)
    group = opt.param_groups[0]
    assert (group["lr"], group["base_lr"], group["weight_decay"], group["decouple_lr"]) == (3e-3, 6e-3, 0.1, True)
    for name, p in model.named_parameters():
        assert torch.equal(p, whole[name])
        assert torch.equal(opt.master_weight(p), expected[name]["fp32"])
    if stage:
        check_refusals(path, tmp_path)


def check_refusals(path, tmp_path):
    with pytest.raises(ValueError, match="--names is not needed"):
        convert(path, tmp_path / "x", "flashdist", options=Options(names=path / "latest"))
    files = sorted((path / "t").glob("*optim_states.pt"))
    hidden = tmp_path / "hidden.pt"
    for file, text in (
        (files[-1], "missing: copy all"),
        (files[0], "there is no file"),
        (None, "lacks its model_states"),
    ):
        if file is None:
            for model in (path / "t").glob("*model_states.pt"):
                model.unlink()
        else:
            shutil.move(file, hidden)
        with pytest.raises(ValueError, match=text):
            convert(path, tmp_path / "x", "flashdist")
        if file is not None:
            shutil.move(hidden, file)
    assert not (tmp_path / "x").exists()


def save_stock(rank: int, world: int, stage: int, path: str, kind: str) -> Any:
    with deepspeed_on_this_group() as deepspeed:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        def build(groups: Any) -> Any:
            if kind == "sgd":
                return torch.optim.SGD(groups, lr=3e-3, momentum=0.9)
            return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1, amsgrad=kind == "amsgrad")

        def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
            params = list(model.parameters())
            return [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]

        small = {"sub_group_size": 2000, "stage3_param_persistence_threshold": 100}
        settings = config(stage, zero=small if stage == 3 else {}, zero_allow_untested_optimizer=True)
        engine = make(deepspeed, settings, seed=5, optimizer=build, groups=two_groups)
        train(engine, 3)
        engine.save_checkpoint(path, tag="t")
        if kind != "adamw":
            return None
        if stage < 3:  # which links the states of all groups when the first one has been stepped
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        keys = ("exp_avg", "exp_avg_sq")
        return {
            name: {
                "fp32": safe_get_full_fp32_param(p).clone(),
                **{key: safe_get_full_optimizer_state(p, key).clone() for key in keys},
            }
            for name, p in engine.module.named_parameters()
        }


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 3)])
def test_stock_adamw(tmp_path, stage, world):
    expected = run_ranks(save_stock, world, stage, str(tmp_path / "zero"), "adamw")[0]
    contents = convert(tmp_path / "zero", tmp_path / "a.pt", "torch-adamw")
    convert(tmp_path / "zero", tmp_path / "c", "flashdist")
    assert any("weight decay" in note for note in contents.notes)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    groups = found["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    names = [name for group in groups for name in group["param_names"]]
    assert {*groups[0]["param_names"]} == {*list(expected)[::2]}
    assert {*names} == {*expected}
    for i, name in zip((i for group in groups for i in group["params"]), names, strict=True):
        state = found["optimizer"]["state"][i]
        assert torch.equal(found["model"][name], expected[name]["fp32"])
        assert state["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], expected[name][key])
    model = Net().bfloat16()
    named = list(model.named_parameters())
    opt = FlashAdamW([{"params": [p for _, p in named[::2]]}, {"params": [p for _, p in named[1::2]]}])
    checkpoint.load(tmp_path / "c", model, opt)
    for name, p in named:
        difference = (opt.master_weight(p) - expected[name]["fp32"]).abs()
        assert (difference <= 2.0**-16 * expected[name]["fp32"].abs()).all()


@pytest.mark.parametrize(("kind", "text"), [("sgd", "only AdamW's is converted"), ("amsgrad", "only AdamW's")])
def test_other_stock_optimizers_are_refused(tmp_path, kind, text):
    run_ranks(save_stock, 2, 2, str(tmp_path / "zero"), kind)
    with pytest.raises(ValueError, match=text):
        convert(tmp_path / "zero", tmp_path / "c", "flashdist")
    assert not (tmp_path / "c").exists()
