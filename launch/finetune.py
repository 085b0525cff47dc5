r"""Finetunes a causal language model, all its weights, on one device, or on many under DeepSpeed.

    python launch/finetune.py configs/finetune/smollm2-135m.yaml model.source=model.gguf data.train=chat.jsonl
    python launch/finetune.py configs/finetune/llama3.1-8b.yaml          # drawn weights: what it needs, how fast it is
    deepspeed launch/finetune.py CONFIG parallel.strategy=deepspeed train.gradient_release=false \
        parallel.deepspeed_config=configs/deepspeed/zero2.json

After a mistake in what it is given it says one line and ends with exit code 2. docs/finetuning.md has more.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from config import EXIT_CODE, UserError, load
from finetune_config import FinetuneConfig
from finetune_memory_table import measured, show
from finetuning import Finetuning
from metrics import Reporter
from ranks import Ranks, any_rank, choose_device, connected, discover, leave
from run_folder import RunError, RunFolder, claimed
from stop import StopRequest, interruptible

# Seconds. Where one rank ends, torchrun ends the others, and rank 0 has something to say first.
OTHERS_WAIT = 2.0


def run(training: Finetuning, folder: RunFolder, stop: StopRequest) -> None:
    """Trains to the end, or until it is asked to stop, evaluating and saving on the way."""
    config = training.config
    with (
        claimed(folder, config, training.step, training.rank),
        Reporter(folder.metrics, active=training.rank == 0, total=training.steps) as reporter,
    ):
        reporter.say(describe(training))
        reporter.say(training.plan())
        reporter.record(training.step, {"started": {"torch": torch.__version__}})
        if training.step < training.steps:
            evaluate(training, reporter)
        while training.step < training.steps:
            started = time.perf_counter()
            loss = float(training.train_step())
            if not math.isfinite(loss):
                raise RunError(f"the loss of step {training.step} is {loss}: lower optimizer.lr, or look at the data")
            tokens = config.train.batch * config.data.sequence
            memory = torch.cuda.max_memory_allocated() if training.device.type == "cuda" else 0
            values = {"loss": loss, "tokens_per_second": tokens / (time.perf_counter() - started), "memory": memory}
            reporter.train_step(training.step, {"lr": training.opt.param_groups[0]["lr"], **values})
            last = training.step == training.steps
            if last or (config.run.eval_every and training.step % config.run.eval_every == 0):
                evaluate(training, reporter)
            stopping = any_rank(stop.asked)
            if last or stopping or (config.run.save_every and training.step % config.run.save_every == 0):
                training.save(folder)
            if stopping and not last:
                reporter.say(f"asked to stop: saved after step {training.step}; go on with --resume auto")
                return
        reporter.say(show("measured", measured(training.opt, training.device)))
        if config.run.export is not None:
            # Under another name until it is whole. A run that was killed before that makes it when it is resumed.
            target, unfinished = folder.path / "export", folder.path / "export.unfinished"
            training.export(unfinished)
            if training.rank == 0:
                shutil.rmtree(target, ignore_errors=True)
                os.replace(unfinished, target)
            reporter.say(f"exported in {config.run.export} to {target}")


def evaluate(training: Finetuning, reporter: Reporter) -> None:
    """The held-out loss, said and recorded."""
    loss = training.evaluate()
    if loss is not None:
        reporter.record(training.step, {"eval_loss": loss})
        reporter.say(f"step {training.step}  held-out loss {loss:.4f}")


def describe(training: Finetuning) -> str:
    """One line about a run."""
    packing = training.training
    parameters = sum(p.numel() for p in training.model.parameters())
    held_out = "nothing" if training.validation is None else f"{training.validation.records} records"
    return (
        f"{parameters / 1e6:.1f} M parameters; {packing.records} records in {len(packing.rows)} rows, "
        f"{packing.filled:.0%} filled, {packing.targets} tokens to learn, "
        f"{packing.cut} records cut, {packing.dropped} pieces dropped; "
        f"{held_out} held out; steps {training.step} to {training.steps}"
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Finetune a causal language model; see docs/finetuning.md.")
    parser.add_argument("config", type=Path, help="a YAML file, such as configs/finetune/smollm2-135m.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as train.steps=100, after the file")
    parser.add_argument("--resume", metavar="auto|PATH", help="go on from run.folder's checkpoint, or the one at PATH")
    # DeepSpeed's launcher says it once more than by LOCAL_RANK.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(argv)


def start(options: argparse.Namespace, config: FinetuneConfig, ranks: Ranks, stop: StopRequest) -> None:
    """Makes the run of a config on these ranks, and trains.

    Raises:
        UserError: a mistake, on all ranks alike.
    """
    device = choose_device(ranks, config.train.device)
    folder = RunFolder(config.run.folder)
    resume = folder.to_resume(options.resume)
    group: AbstractContextManager[None] = nullcontext()
    kind = Finetuning
    if config.parallel.strategy == "deepspeed":
        from finetuning_deepspeed import DeepSpeedFinetuning, settled

        settled(config, ranks.size)
        kind, group = DeepSpeedFinetuning, connected(ranks, device, config.parallel.timeout_minutes)
    elif ranks.size > 1:
        raise UserError(
            f"parallel.strategy=single is for one process, {ranks.size} were started: start one, or take "
            "parallel.strategy=deepspeed"
        )
    with group:
        torch.manual_seed(config.train.seed)
        training = kind(config, device, resume)
        done = training.step == training.steps and config.run.export is None
        if training.step > training.steps or done:
            if training.rank == 0:
                print(f"nothing to do: the run is at step {training.step} of {training.steps}", flush=True)
            return
        run(training, folder, stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, and turns mistakes into a line and an exit code."""
    options = parse_arguments(argv)
    ranks = Ranks()
    try:
        ranks = discover()
        config = load(FinetuneConfig, options.config, options.overrides)
        with StopRequest().listening() as stop:
            start(options, config, ranks, stop)
    except (UserError, RunError) as error:
        if ranks.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(OTHERS_WAIT)
        return EXIT_CODE if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    leave(interruptible(main))
