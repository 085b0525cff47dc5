"""launch/pretrain.py with parallel.strategy=deepspeed, ranks of the process pool: it does what other strategies do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.pretraining import Outcome, overrides, refusal_in_pool, run_in_pool
from tests.support.ranks import run_ranks
from tests.support.tolerances import tolerance

CONFIGS = Path(__file__).parents[2] / "configs" / "deepspeed"
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def json_of(place: Path, stage: int) -> str:
    """The JSON that comes with the repository; it has none for stage 0."""
    if stage:
        return str(CONFIGS / f"zero{stage}.json")
    path = place / "zero0.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}))
    return str(path)


def settings(place: Path, stage: int) -> list[str]:
    return ["parallel.strategy=deepspeed", f"parallel.deepspeed_config={json_of(place, stage)}"]


def train(size: int, place: Path, name: str, *more: str, resume: str | None = None, terminate_in: int | None = None):
    arguments = overrides(place, f"run.folder={place / name}", *more)
    return run_ranks(run_in_pool, size, arguments, resume, terminate_in)


@pytest.fixture(scope="module")
def single(place) -> Outcome:
    return train(1, place, "single", "parallel.strategy=single")[0]


@pytest.fixture(scope="module")
def unbroken(place) -> dict[int, list[Outcome]]:
    return {stage: train(2, place, f"unbroken-{stage}", *settings(place, stage)) for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_gives_the_losses_of_a_single_process(single, unbroken, stage):
    bound = tolerance("averaged gradients, training loss, relative")
    found = unbroken[stage][0]
    assert found.losses == pytest.approx(single.losses, rel=bound)
    assert set(found.losses) == set(range(1, 13))
    assert single.losses[12] < 0.9 * single.losses[1]
    held_out = [next(r["eval_loss"] for r in o.records if "eval_loss" in r) for o in (found, single)]
    assert held_out[0] == pytest.approx(held_out[1], rel=bound)
    norms = [[r["norm"] for r in o.records if "norm" in r] for o in (found, single)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_are_shared_as_the_stage_says(unbroken, stage):
    found = unbroken[stage][0].records[-1]["bytes"]
    assert found["weights"] == pytest.approx(2 * found["parameters"] * (1 if stage == 3 else 2), rel=0.001)
    copies = 1 if stage else 2
    assert found["moments"] == pytest.approx(2 * copies * found["parameters"], rel=0.05)


@pytest.mark.parametrize("stage", STAGES)
def test_stopped_by_sigterm_and_resumed_is_the_unbroken_run(place, unbroken, stage):
    name = f"stopped-{stage}"
    stopped = train(2, place, name, *settings(place, stage), terminate_in=5)
    assert [outcome.last_step for outcome in stopped] == [5, 5]
    assert (place / name / "step-00000005").is_dir()
    resumed = train(2, place, name, *settings(place, stage), resume="auto")
    assert resumed[0].losses == unbroken[stage][0].losses
    assert set(resumed[0].samples) == set(range(6, 13))
    assert [p.name for p in sorted((place / name).glob("[su]*-*"))] == ["step-00000008", "step-00000012"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_moves_between_numbers_of_ranks_and_strategies(place, single, stage):
    """2 ranks of ZeRO, 3 of them, one process (which converts), ZeRO again: each sees the very next samples."""
    name, zero = f"moving-{stage}", settings(place, stage)
    parts = [
        train(2, place, name, *zero, "run.stop_after=3"),
        train(3, place, name, *zero, "run.stop_after=6", resume="auto"),
        train(1, place, name, "parallel.strategy=single", "run.stop_after=9", resume="auto"),
        train(2, place, name, *zero, resume="auto"),
    ]
    for outcomes, steps in zip(parts, (range(1, 4), range(4, 7), range(7, 10), range(10, 13)), strict=True):
        for step in steps:
            seen = sorted(i for outcome in outcomes for i in outcome.samples[step])
            assert seen == sorted(single.samples[step]), step
    bound = tolerance("averaged gradients, training loss, relative")
    assert parts[-1][0].losses == pytest.approx(single.losses, rel=bound)


def test_a_model_with_all_options_is_the_same_in_parts(place):
    """A Llama shape whose head is its own, blocks computed twice, FlashLion, 32-bit master weights, no clipping."""
    options = [
        "model.kind=llama", "model.tied_head=false", "model.activation_checkpointing=true", "optimizer.name=flash_lion",
        "optimizer.lr=1e-4", "optimizer.master_weight_bits=32", "train.max_norm=.inf", "train.steps=6",
    ]  # fmt: skip
    whole = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    path = place / "lion.json"
    path.write_text(json.dumps({**whole, "optimizer": {"type": "FlashLion", "params": {"lr": 1e-4}}}))
    found = train(2, place, "lion", *options, "parallel.strategy=deepspeed", f"parallel.deepspeed_config={path}")[0]
    expected = train(1, place, "lion-single", *options, "parallel.strategy=single")[0]
    bound = tolerance("averaged gradients, training loss, relative")
    assert found.losses == pytest.approx(expected.losses, rel=bound)


def refusal(size: int, place: Path, resume: str | None, *more: str) -> str:
    arguments = overrides(place, f"run.folder={place / 'other'}", *more)
    said = run_ranks(refusal_in_pool, size, arguments, resume)
    # They may name another parameter on each rank, of which each has its part.
    assert len({text.split("the state of parameter")[0] for text in said}) == 1
    assert not any("\n" in text or len(text) > 700 for text in said)
    assert not (place / "other").exists()
    return said[0]


def test_what_flashdist_or_deepspeed_refuse_is_one_line_too(place):
    for setting, message in (
        ({"elastic_checkpoint": True}, "zero_optimization.elastic_checkpoint is not supported"),
        ({"stage": 3, "zero_quantized_gradients": True}, "zero_optimization.zero_quantized_gradients is not supported"),
        ({"overlap_com": True}, "overlap_com"),
    ):
        path = place / "refused.json"
        path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, **setting}}))
        said = refusal(2, place, None, "parallel.strategy=deepspeed", f"parallel.deepspeed_config={path}")
        assert said.startswith(f"parallel.deepspeed_config {path}: ")
        assert message in said
    params = {"type": "FlashAdamW", "params": {"learning_rate": 1e-3}}
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "optimizer": params}))
    said = refusal(2, place, None, "parallel.strategy=deepspeed", f"parallel.deepspeed_config={path}")
    assert "unexpected keyword argument 'learning_rate'" in said


def test_checkpoints_that_do_not_fit_are_refused_on_all_ranks(place, unbroken):
    saved = place / "unbroken-2" / "step-00000012"
    zero = settings(place, 2)
    assert "saved at ZeRO stage 2, the JSON says 3" in refusal(2, place, str(saved), *settings(place, 3))
    assert "saved under ZeRO: go on with" in refusal(2, place, str(saved), "parallel.strategy=fsdp2")
    assert "saved under ZeRO: go on with" in refusal(2, place, str(saved), "parallel.strategy=ddp_zero1")
    adamw = ["parallel.strategy=ddp", "optimizer.name=torch_adamw"]
    assert "one of flashdist's optimizers" in refusal(2, place, str(saved), *adamw)
    assert "size mismatch" in refusal(2, place, str(saved), *zero, "model.width=128")
    lion = ["optimizer.name=flash_lion", "parallel.deepspeed_config=" + str(place / "bare.json"), zero[0]]
    bare = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    (place / "bare.json").write_text(json.dumps(bare))
    assert "saved by another kind of optimizer" in refusal(2, place, str(saved), *lion)
    assert "seed was 0 and is 1" in refusal(2, place, str(saved), *zero, "train.seed=1")


def test_a_damaged_or_missing_file_is_refused_on_all_ranks(place, unbroken, tmp_path):
    for number, harm in enumerate(("flip", "remove", "note")):
        copy = tmp_path / f"{number}" / "step-00000012"
        shutil.copytree(place / "unbroken-2" / "step-00000012", copy)
        file = sorted((copy / "zero").glob("*optim_states.pt"))[-1]
        if harm == "flip":
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        elif harm == "remove":
            file.unlink()
        else:
            (copy / "run.json").write_text('{"stage": 2')
        said = refusal(2, place, str(copy), *settings(place, 2))
        assert {"flip": f"{file.name} is damaged", "remove": f"{file.name} is missing", "note": "run.json"}[
            harm
        ] in said


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_away(place, unbroken):
    left = place / "killed" / "unfinished-step-00000004"
    shutil.copytree(place / "unbroken-1" / "step-00000012", left)
    train(2, place, "killed", *settings(place, 1), "run.stop_after=2", resume="auto")
    assert [p.name for p in sorted((place / "killed").glob("*step-*"))] == ["step-00000002"]


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_own_script_gives_the_fp32_weights(place, unbroken, stage, tmp_path):
    folder = place / f"unbroken-{stage}" / "step-00000012"
    env = {**os.environ, "PYTHONPATH": str(CONFIGS.parents[1]), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(folder / "zero_to_fp32.py"), str(folder), str(tmp_path / "out")]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
    (file,) = (tmp_path / "out").glob("*.bin")
    weights = torch.load(file, weights_only=True)
    assert {p.dtype for p in weights.values()} == {torch.float32}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in weights.values())
