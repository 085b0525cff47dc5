"""launch/finetune.py with parallel.strategy=deepspeed on ranks of the process pool: the run of one process, shared."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path

import finetune
import pytest
import torch
from metrics import read_metrics
from safetensors.torch import load_file

from tests.support import finetuning
from tests.support.deepspeed_runs import deepspeed_on_this_group
from tests.support.ranks import run_ranks
from tests.support.tolerances import tolerance

BOUND = tolerance("averaged gradients, training loss, relative")
CONFIGS = Path(__file__).parents[2] / "configs" / "deepspeed"


def run_in_pool(rank: int, size: int, arguments: list[str], terminate_in: int | None) -> tuple[int, str]:
    """The script; its exit code and what it says on stderr. In step `terminate_in` the last rank gets SIGTERM."""
    from finetuning_deepspeed import DeepSpeedFinetuning

    backward = DeepSpeedFinetuning.backward

    def stopped(self, which):
        if self.step + 1 == terminate_in and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(self, which)

    DeepSpeedFinetuning.backward = stopped  # type: ignore[method-assign]
    finetune.OTHERS_WAIT = 0.0
    said = io.StringIO()
    try:
        with deepspeed_on_this_group(), contextlib.redirect_stderr(said):
            return finetune.main(arguments), said.getvalue()
    finally:
        DeepSpeedFinetuning.backward = backward  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("finetune")
    model = finetuning.folder(path / "model")
    data = finetuning.jsonl(path / "chat.jsonl", finetuning.questions(60))
    (path / "config.yaml").write_text(
        f"""
model: {{source: {model}}}
data: {{train: {data}, sequence: 64, validation_share: 10}}
optimizer: {{lr: 0.01, weight_decay: 0.1}}
train: {{steps: 6, batch: 4, accumulate: 2, warmup: 2, device: cpu, gradient_release: false}}
run: {{save_every: 3, keep_last: 2, eval_every: 3, export: fp32}}
"""
    )
    return path


def run(place: Path, size: int, name: str, *more: str, terminate_in: int | None = None) -> list[tuple[int, str]]:
    arguments = [str(place / "config.yaml"), f"run.folder={place / name}", *more]
    return run_ranks(run_in_pool, size, arguments, terminate_in)


def zero(stage: int) -> list[str]:
    return ["parallel.strategy=deepspeed", f"parallel.deepspeed_config={CONFIGS / f'zero{stage}.json'}"]


def losses(folder: Path, kind: str = "loss") -> list[float]:
    return [record[kind] for record in read_metrics(folder / "metrics.jsonl") if kind in record]


@pytest.fixture(scope="module")
def single(place) -> Path:
    ((code, said),) = run(place, 1, "single")
    assert code == 0, said
    return place / "single"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_as_one_process_does_and_resume_with_the_same_bits(place, single, stage):
    folder = place / f"zero{stage}"
    for code, said in run(place, 2, folder.name, *zero(stage)):
        assert code == 0, said
    assert losses(folder) == pytest.approx(losses(single), rel=BOUND)
    assert losses(folder, "eval_loss") == pytest.approx(losses(single, "eval_loss"), rel=BOUND)
    assert losses(folder)[-1] < losses(folder)[0] - 0.5
    ours, expected = (load_file(path / "export" / "model.safetensors") for path in (folder, single))
    assert ours.keys() == expected.keys()
    for name, weight in ours.items():
        assert weight.dtype == torch.float32
        assert (weight - expected[name]).abs().mean() <= 0.002, name

    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder / "export").dtype == torch.float32

    stopped = place / f"stopped{stage}"
    assert [code for code, _ in run(place, 2, stopped.name, *zero(stage), terminate_in=4)] == [0, 0]
    assert (stopped / "step-00000004" / "run.json").is_file()
    assert not (stopped / "export").exists()
    assert [code for code, _ in run(place, 2, stopped.name, *zero(stage), "--resume", "auto")] == [0, 0]
    assert losses(stopped) == losses(folder)
    again = load_file(stopped / "export" / "model.safetensors")
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_a_run_of_one_process_goes_on_under_zero(place, single):
    code, said = run(place, 2, "going-on", *zero(2), "run.export=bf16", "--resume", str(single / "step-00000003"))[0]
    assert code == 0, said
    assert losses(place / "going-on") == pytest.approx(losses(single)[3:], rel=BOUND)
    exported = load_file(place / "going-on" / "export" / "model.safetensors")
    assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}


MISTAKES = [
    ([*zero(2), "train.gradient_release=true", "train.accumulate=1"], "has no gradient release"),
    ([*zero(2), "model.dtype=fp32"], "set model.dtype=bf16"),
    ([*zero(2), "train.batch=6"], "train.batch=6 is no multiple of 2 ranks x train.accumulate=2"),
    ([*zero(2), "optimizer.name=torch_adamw"], "not optimizer.name=torch_adamw"),
    (["parallel.strategy=deepspeed"], "needs parallel.deepspeed_config"),
    (["parallel.strategy=deepspeed", "parallel.deepspeed_config=nowhere.json"], "nowhere.json cannot be read"),
    (["parallel.deepspeed_config=x.json"], "take strategy deepspeed"),
    ([], "parallel.strategy=single is for one process, 2 were started"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2_on_all_ranks(place, arguments, message):
    (code, said), (other, nothing) = run(place, 2, "refused", *arguments)
    assert (code, other, nothing) == (2, 2, "")
    assert message in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert not (place / "refused").exists()
