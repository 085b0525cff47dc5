"""Checkpoints of DeepSpeed engines: compact, exact, readable by DeepSpeed's own tools, and of any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashdist.integrations.deepspeed_load import rank_files
from tests.support.deepspeed_runs import (
    config,
    deepspeed_on_this_group,
    equal_states,
    make,
    packed_states,
    snapshot,
    train,
    weights,
)
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
ODD = {"sub_group_size": 3000}


def settings(stage: int, optimizer: str = "FlashAdamW", **other: Any) -> dict[str, Any]:
    params = {"FlashSGD": {"momentum": 0.9}}.get(optimizer, {"weight_decay": 0.1})
    return config(
        stage,
        optimizer,
        {"lr": 3e-3, **params},
        zero={**ODD, "stage3_param_persistence_threshold": 100} if stage == 3 else {},
        **other,
    )


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]


def states_of(engine: Any) -> list[dict[str, torch.Tensor]]:
    if engine.zero_optimization_stage():
        return packed_states(engine)
    return [{k: v.clone() for k, v in state.items()} for state in engine.basic_optimizer.state.values()]


def round_trip(rank: int, world: int, stage: int, folder: str, optimizer: str) -> dict[str, Any]:
    """Save after 5 steps, load into another engine, train both on."""
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 3e-3}}}
    with deepspeed_on_this_group() as deepspeed:
        one = make(deepspeed, settings(stage, optimizer, **scheduler), groups=two_groups)
        train(one, 5)
        one.save_checkpoint(folder, tag="t")
        saved, whole = states_of(one), weights(deepspeed, one)
        unbroken = train(one, 5, first=5)

        two = make(deepspeed, settings(stage, optimizer, **scheduler), groups=two_groups, seed=7)
        train(two, 2)
        two.load_checkpoint(folder, tag="t")
        found = weights(deepspeed, two)
        out = {
            "states": equal_states(saved, states_of(two)),
            "weights": all(torch.equal(whole[n], found[n]) for n in whole),
            "lr": two.get_lr() == make_lr(two),
        }
        resumed = train(two, 5, first=5)
        return {
            **out,
            "losses": resumed == unbroken,
            "after": equal_states(states_of(one), states_of(two)),
            "weight_decays": [group["weight_decay"] for group in two.basic_optimizer.param_groups],
        }


def make_lr(engine: Any) -> list[float]:
    return [group["lr"] for group in engine.basic_optimizer.param_groups]


@pytest.mark.parametrize(
    ("stage", "world", "optimizer"),
    [(stage, world, "FlashAdamW") for world in (2, 3) for stage in (0, 1, 2, 3)]
    + [(0, 2, "FlashSGD"), (2, 3, "FlashLion"), (3, 2, "FlashSGD")],
)
def test_round_trip(stage, world, optimizer, tmp_path):
    decays = [0.0, 0.0] if optimizer == "FlashSGD" else [0.1, 0.0]
    for found in run_ranks(round_trip, world, stage, str(tmp_path), optimizer):
        assert found == {
            "states": True, "weights": True, "lr": True, "losses": True, "after": True, "weight_decays": decays
        }  # fmt: skip


def tools(rank: int, world: int, stage: int, optimizer: str, folder: str) -> dict[str, Any]:
    """DeepSpeed's own converters on a checkpoint of ours, and a universal checkpoint loaded again."""
    with deepspeed_on_this_group() as deepspeed:
        from deepspeed.checkpoint import ds_to_universal
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        one = make(deepspeed, settings(stage, optimizer), groups=two_groups)
        train(one, 5)
        before = snapshot(one)
        one.save_checkpoint(folder, tag="t")
        out: dict[str, Any] = {}
        if rank == 0:
            converted = get_fp32_state_dict_from_zero_checkpoint(folder, "t")
            out["zero_to_fp32"] = all(torch.equal(converted[n], s["fp32"]) for n, s in before.items())
            out["low bits"] = not torch.equal(converted["first.weight"], converted["first.weight"].bfloat16().float())
            sys.argv = ["", "--input_folder", f"{folder}/t", "--output_folder", f"{folder}/u", "--inject_missing_state",
                        "--num_extract_workers", "1", "--num_merge_workers", "1"]  # fmt: skip
            ds_to_universal.main(ds_to_universal.parse_arguments())
        dist.barrier()
        two = make(
            deepspeed, settings(stage, optimizer, checkpoint={"load_universal": True}), groups=two_groups, seed=7
        )
        two.load_checkpoint(folder, tag="u")
        after, found, whole = snapshot(two), weights(deepspeed, two), weights(deepspeed, one)
        out["masters"] = all(torch.equal(after[n]["fp32"], s["fp32"]) for n, s in before.items())
        out["weights"] = all(torch.equal(whole[n], found[n]) for n in whole)
        steps = {float(s) for packed in two.basic_optimizer.states() for s in packed.steps}
        out["steps"] = steps <= {5.0}
        out["decay"] = [group["weight_decay"] for group in two.basic_optimizer.param_groups]
        out["moments"] = {
            (n, key): ((after[n][key] - value).abs().max() / value.abs().max()).item()
            for n, s in before.items()
            for key, value in s.items()
            if key != "fp32" and value.abs().max() > 0
        }
        loss = train(two, 3, first=5)
        out["goes on"] = max(abs(a - b) for a, b in zip(loss, train(one, 3, first=5), strict=True))
        return out


@pytest.mark.parametrize(
    ("stage", "optimizer"),
    [(1, "FlashAdamW"), (2, "FlashLion"), (3, "FlashAdamW"), (3, "FlashSGD")],
)
def test_deepspeeds_own_tools(stage, optimizer, tmp_path):
    for rank, found in enumerate(run_ranks(tools, 2, stage, optimizer, str(tmp_path))):
        if rank == 0:
            assert found["zero_to_fp32"]
            assert found["low bits"]
        assert found["masters"]
        assert found["weights"]
        assert found["steps"]
        assert found["decay"] == [0.0 if optimizer == "FlashSGD" else 0.1, 0.0]
        # Moments are encoded anew: within the resolution of a code, and 1-D ones exactly.
        assert max(found["moments"].values()) <= 0.02
        assert all(error == 0 for (name, _), error in found["moments"].items() if "bias" in name or "norm" in name)
        assert found["goes on"] <= 0.02


def save_some(rank: int, world: int, stage: int, folder: str) -> Any:
    with deepspeed_on_this_group() as deepspeed:
        engine = make(deepspeed, settings(stage), groups=two_groups)
        train(engine, 5)
        engine.save_checkpoint(folder, tag="t")
        cut = [(s.name, s.start, s.stop) for p in engine.basic_optimizer.states() for s in p.segments if s.cut]
        return snapshot(engine), cut, weights(deepspeed, engine)


def load_some(rank: int, world: int, stage: int, folder: str) -> Any:
    import logging

    with deepspeed_on_this_group() as deepspeed:
        from deepspeed.utils import logger

        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel("INFO")
        engine = make(deepspeed, settings(stage), groups=two_groups, seed=7)
        engine.load_checkpoint(folder, tag="t")
        logger.removeHandler(handler)
        logger.setLevel("ERROR")
        found = snapshot(engine), weights(deepspeed, engine), [line for line in lines if "flashdist" in line]
        train(engine, 2)
        return found


@pytest.mark.parametrize(("stage", "first", "then"), [(2, 2, 3), (3, 3, 2), (3, 2, 3), (1, 3, 1)])
def test_another_number_of_ranks(stage, first, then, tmp_path):
    saved = run_ranks(save_some, first, stage, str(tmp_path))
    loaded = run_ranks(load_some, then, stage, str(tmp_path))
    before, _, whole = saved[0]
    # The groups of 32 that a border of the saved partitions cut.
    cut = {(name, start // 32) for _, parts, _ in saved for name, start, _ in parts}
    assert cut
    for after, found, _ in loaded:
        for name, state in before.items():
            assert torch.equal(found[name], whole[name])
            assert torch.equal(after[name]["fp32"], state["fp32"])
            for key in ("exp_avg", "exp_avg_sq"):
                a, b = after[name][key].view(-1), state[key].view(-1)
                differing = {int(i) // 32 for i in (a != b).nonzero()}
                assert {(name, group) for group in differing} <= cut
                assert (a - b).abs().max() <= 0.02 * b.abs().max()
    anew = " ".join(loaded[0][2])
    differing_names = {name for name, _ in cut}
    assert all(name in anew for name in differing_names) or then > first
    assert not any(name in anew for name in set(before) - differing_names)


def from_stock(rank: int, world: int, stage: int, folder: str) -> dict[str, Any]:
    """A checkpoint that DeepSpeed has made of torch's AdamW."""
    with deepspeed_on_this_group() as deepspeed:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        one = make(deepspeed, settings(stage), optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3))
        train(one, 5)
        one.save_checkpoint(folder, tag="t")
        two = make(deepspeed, settings(stage), seed=7)
        two.load_checkpoint(folder, tag="t")
        out = {"masters": 0.0, "moments": 0.0}
        for p, state in zip(one.module.parameters(), snapshot(two).values(), strict=True):
            master = safe_get_full_fp32_param(p)
            out["masters"] = max(
                out["masters"], ((state["fp32"] - master).abs() / master.abs()).nan_to_num().max().item()
            )
            for key in ("exp_avg", "exp_avg_sq"):
                moment = safe_get_full_optimizer_state(p, key)
                out["moments"] = max(out["moments"], ((state[key] - moment).abs().max() / moment.abs().max()).item())
        losses = [(a - b) for a, b in zip(train(one, 3, first=5), train(two, 3, first=5), strict=True)]
        return {**out, "goes on": max(map(abs, losses)), "decay": two.basic_optimizer.param_groups[0]["weight_decay"]}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_of_torchs_adamw(stage, tmp_path):
    for found in run_ranks(from_stock, 2, stage, str(tmp_path)):
        assert found["masters"] <= 2.0**-16
        assert found["moments"] <= 0.02
        assert found["goes on"] <= 0.02
        assert found["decay"] == 0.01


def into_another_kind(rank: int, world: int, folder: str) -> Any:
    """FlashAdam's files, whose weight decay is L2, into FlashAdamW: refused before any state is changed."""
    with deepspeed_on_this_group() as deepspeed:
        one = make(deepspeed, settings(2, "FlashAdam"))
        train(one, 2)
        one.save_checkpoint(folder, tag="t")
        two = make(deepspeed, settings(2), seed=7)
        before = snapshot(two)
        with pytest.raises(ValueError, match="which its optimizer adds to the gradient"):
            two.load_checkpoint(folder, tag="t")
        # DeepSpeed itself has put the checkpoint's bf16 weights into the model before it asks the optimizer.
        return all(torch.equal(before[name]["exp_avg"], found["exp_avg"]) for name, found in snapshot(two).items())


def test_weight_decay_of_another_kind_is_refused(tmp_path):
    assert run_ranks(into_another_kind, 2, str(tmp_path)) == [True, True]


def from_stock_at_stage_0(rank: int, world: int, folder: str) -> dict[str, Any]:
    with deepspeed_on_this_group() as deepspeed:
        one = make(deepspeed, settings(0), optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3))
        train(one, 2)
        one.save_checkpoint(folder, tag="t")
        two = make(deepspeed, settings(0), seed=7)
        train(two, 2)
        try:
            two.load_checkpoint(folder, tag="t")
            message = "not refused"
        except ValueError as error:
            message = str(error)
        train(two, 1)
        two.load_checkpoint(folder, tag="t", load_optimizer_states=False)
        found = {n: p.clone() for n, p in one.module.named_parameters()}
        after = {n: two.basic_optimizer.master_weight(p) for n, p in two.module.named_parameters()}
        # The corrections of the weights before are not added to these.
        return {"message": message, "masters": all(torch.equal(after[n], p.float()) for n, p in found.items())}


def test_stage_0_without_states_of_ours(tmp_path):
    for found in run_ranks(from_stock_at_stage_0, 2, str(tmp_path)):
        assert found["message"].startswith("the checkpoint of ZeRO stage 0 has ")
        assert "load_optimizer_states=False" in found["message"]
        assert found["masters"]


def test_files_of_an_earlier_save_on_more_ranks_are_left_alone(tmp_path):
    run_ranks(save_some, 3, 2, str(tmp_path))
    before, _, _ = run_ranks(save_some, 2, 2, str(tmp_path))[0]
    after, _, _ = run_ranks(load_some, 3, 2, str(tmp_path))[0]
    assert all(torch.equal(after[name]["fp32"], state["fp32"]) for name, state in before.items())
    (tmp_path / "t" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"saved on 2 ranks, the files of ranks \[1\] are missing"):
        rank_files(tmp_path / "t")


def size_on_disk(rank: int, world: int, stage: int, folder: str) -> Any:
    with deepspeed_on_this_group() as deepspeed:
        engine = make(deepspeed, config(stage), net=lambda: torch.nn.Linear(1024, 1024))
        engine.backward(engine(torch.randn(2, 1024).bfloat16()).float().square().mean())
        engine.step()
        engine.save_checkpoint(folder, tag="t")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_on_disk(stage, tmp_path):
    run_ranks(size_on_disk, 2, stage, str(tmp_path))
    sizes = {p.name: p.stat().st_size / (1024 * 1025) for p in (tmp_path / "t").iterdir()}
    optimizer = sum(size for name, size in sizes.items() if "optim_states" in name)
    model = sum(size for name, size in sizes.items() if "model_states" in name)
    if stage == 0:
        assert model <= 5.4
    else:
        assert 5.18 <= optimizer <= 5.4
        assert model <= (2.1 if stage < 3 else 0.1)


@pytest.mark.slow
def test_the_script_beside_a_checkpoint(tmp_path):
    """``zero_to_fp32.py`` as DeepSpeed puts it there, in a process of its own."""
    before, *_ = run_ranks(save_some, 2, 2, str(tmp_path))[0]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "zero_to_fp32.py", ".", "out", "-t", "t"], cwd=tmp_path, env=env, check=True, timeout=150
    )
    converted = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert all(torch.equal(converted[name], state["fp32"]) for name, state in before.items())
