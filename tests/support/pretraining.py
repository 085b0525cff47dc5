"""Small pretraining runs for tests: configs that train in seconds, and a run inside the process pool of ranks.py."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretrain
import torch
import training
from config import UserError, load
from metrics import read_metrics
from pretrain_config import PretrainConfig
from ranks import Ranks

from tests.support.deepspeed_runs import deepspeed_on_this_group

# 2 layers of width 64; batches of 12 can be shared by 1, 2 and 3 ranks, and by 4 with micro-batches of 3.
TINY = [
    "model.layers=2", "model.heads=2", "model.width=64", "model.context=32", "data.tokenizer=bytes",
    "data.validation_share=4", "train.steps=12", "train.batch=12", "train.micro_batch=2", "train.warmup=3",
    "optimizer.lr=1e-3", "parallel.threads=1", "parallel.device=cpu", "run.save_every=4", "run.eval_every=0",
    "run.eval_sequences=7",
]  # fmt: skip


@dataclass
class Outcome:
    """What a rank knows after a run: its samples by step and, from rank 0's file, the losses by step."""

    samples: dict[int, list[int]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    last_step: int = 0


def write_text(folder: Path) -> Path:
    """A folder of words in an order that a model can learn, a few hundred windows of it."""
    folder.mkdir(parents=True)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for i in range(24):
        text = " ".join(words[(i + j * j) % 10] for j in range(150))
        (folder / f"{i}.txt").write_text(text)
    return folder


def overrides(place: Path, *more: str) -> list[str]:
    """The arguments of a tiny run in `place`, whose text is in `place/text`."""
    if not (place / "text").exists():
        write_text(place / "text")
    return [*TINY, f"data.folder={place / 'text'}", f"data.cache={place / 'cache'}", *more]


def run_in_pool(rank: int, size: int, arguments: list[str], resume: str | None, terminate_in: int | None) -> Outcome:
    """A whole run of launch/pretrain.py on ranks that are connected already; a worker for run_ranks.

    Args:
        rank, size: of the pool.
        arguments: overrides.
        resume: as on the command line.
        terminate_in: in the middle of this step, the last rank alone gets SIGTERM.
    """
    outcome = Outcome()
    config = load(PretrainConfig, None, arguments)
    ranks = Ranks(rank, size, rank, size, "torchrun", "env://")
    device = torch.device("cpu")
    prepared = pretrain.prepare_run(config, resume, ranks)
    take_turns = training.Training.micro_batches

    def recording(self: training.Training) -> list[list[int]]:
        turns = take_turns(self)
        outcome.samples[self.step + 1] = [i for turn in turns for i in turn]
        outcome.last_step = self.step + 1
        if self.step + 1 == terminate_in and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return turns

    training.Training.micro_batches = recording  # type: ignore[method-assign]
    under = deepspeed_on_this_group() if config.parallel.strategy == "deepspeed" else nullcontext()
    try:
        with training.StopRequest().listening() as stop, under:
            pretrain.settle(config, ranks, device)
            pretrain.run(prepared, ranks, device, stop)
    finally:
        training.Training.micro_batches = take_turns  # type: ignore[method-assign]
    outcome.records = read_metrics(prepared.folder.metrics)
    outcome.losses = losses(outcome.records)
    return outcome


def refusal_in_pool(rank: int, size: int, arguments: list[str], resume: str | None) -> str:
    """What a rank says about a run that is refused; a worker for run_ranks (an exception would end the pool)."""
    try:
        run_in_pool(rank, size, arguments, resume, None)
    except UserError as error:
        return str(error)
    return "not refused"


def losses(records: list[dict[str, Any]]) -> dict[int, float]:
    """Training losses by step."""
    return {record["step"]: record["loss"] for record in records if "loss" in record}
