"""Trains a language model from a config, on any number of ranks.

    python launch/pretrain.py configs/pretrain/tiny.yaml parallel.strategy=single train.steps=100
    torchrun --nproc-per-node 8 launch/pretrain.py configs/pretrain/gpt2-124m.yaml data.folder=/path/to/text
    mpirun -n 8 python launch/pretrain.py configs/pretrain/gpt2-124m.yaml --resume auto
    deepspeed launch/pretrain.py configs/pretrain/gpt2-124m-zero2.yaml data.folder=/path/to/text

After a mistake in what it is given it says one line and ends with exit code 2. docs/pretraining.md has more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from config import EXIT_CODE, UserError, load
from data import bundled, in_folder
from deepspeed_strategy import settled
from metrics import read_metrics
from model import GPT, GPTConfig
from pretrain_config import PretrainConfig
from ranks import Ranks, choose_device, connected, discover, leave, raise_together
from run_folder import RunError, RunFolder, claimed
from sampling import num_windows
from stop import StopRequest, interruptible
from strategy import FLASH, check_ranks
from tokens import TokenFiles, prepare
from training import Training

# The vocabulary is rounded up to a multiple of this, which GPUs multiply faster; the ids beyond are never used.
VOCABULARY_MULTIPLE = 64


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a language model from a config; see docs/pretraining.md.")
    parser.add_argument("config", type=Path, help="a YAML file, such as configs/pretrain/gpt2-124m.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as train.steps=100, after the file")
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="go on from run.folder's latest checkpoint, or from the one at PATH"
    )
    # DeepSpeed's launcher says it once more than by LOCAL_RANK.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(argv)  # overrides may stand on both sides of --resume


def prepare_tokens(config: PretrainConfig) -> TokenFiles:
    """The text of a run as token ids.

    Raises:
        UserError: no text, or too little of it for a single batch or evaluation.
    """
    data, context = config.data, config.model.context
    documents = bundled() if data.folder is None else in_folder(data.folder, data.pattern)
    files = prepare(
        documents,
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size,
        validation_share=data.validation_share,
        cache=data.cache,
    )
    if not num_windows(files.train, context):
        raise UserError(
            f"the text has {len(files.train)} tokens, too few for one sequence of model.context={context}: "
            "give data.folder more text, or lower model.context"
        )
    if config.run.eval_sequences and not num_windows(files.validation, context):
        raise UserError(
            f"the held-out text has {len(files.validation)} tokens, too few for a sequence of model.context={context}: "
            "lower data.validation_share, or set run.eval_sequences=0"
        )
    return files


def choose_shape(config: PretrainConfig, files: TokenFiles) -> GPTConfig:
    """The model's shape, with a vocabulary that fits the tokenizer.

    Raises:
        UserError: a model.vocab_size below the tokenizer's.
    """
    asked, has = config.model.vocab_size, files.meta.vocab_size
    if asked and asked < has:
        raise UserError(
            f"model.vocab_size={asked} is below the tokenizer's {has}: leave it 0, or train a smaller tokenizer"
        )
    return config.model.shape(asked or -(-has // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE)


def check_batch(config: PretrainConfig, size: int) -> None:
    """Refuse a global batch that the ranks cannot share evenly.

    Raises:
        UserError: with the nearest batches that they can.
    """
    batch, turn = config.train.batch, size * config.train.micro_batch
    if batch % turn:
        near = sorted({max(turn, batch // turn * turn), (batch // turn + 1) * turn})
        raise UserError(
            f"train.batch={batch} is no multiple of {size} ranks x train.micro_batch={config.train.micro_batch}: take "
            f"train.batch={' or '.join(map(str, near))}, or another micro_batch"
        )


def check_same_text(files: TokenFiles) -> None:
    """Refuse ranks that read different tokens (each machine has its own cache, or its own folder).

    Raises:
        UserError: on all ranks.
    """
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, files.meta.digest)
    if len(set(digests)) > 1:
        raise UserError("the machines have different tokens: give all of them the same text and one shared data.cache")


@dataclass(frozen=True)
class Prepared:
    """A run that has passed all checks which need no other rank."""

    config: PretrainConfig
    folder: RunFolder
    resume: Path | None
    files: TokenFiles
    shape: GPTConfig
    parameters: int


def prepare_run(config: PretrainConfig, resume: str | None, ranks: Ranks) -> Prepared:
    """Checks what can be checked before the ranks are connected. Nothing is written, save the cache of tokens.

    Raises:
        UserError: a mistake, with its remedy.
    """
    check_ranks(config.parallel, ranks.size)
    check_batch(config, ranks.size)
    if config.parallel.strategy == "deepspeed":
        settled(config, ranks.size)
    folder = RunFolder(config.run.folder)
    checkpoint = folder.to_resume(resume)
    files = prepare_tokens(config)
    shape = choose_shape(config, files)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(shape).parameters())
    beside = config.parallel.strategy == "deepspeed"
    folder.check_space(parameters, config.optimizer.name in FLASH, config.run.keep_last, beside)
    return Prepared(config, folder, checkpoint, files, shape, parameters)


def run(prepared: Prepared, ranks: Ranks, device: torch.device, stop: StopRequest) -> None:
    """Trains, on connected ranks."""
    config, files, folder = prepared.config, prepared.files, prepared.folder
    check_same_text(files)
    training = Training(config, prepared.shape, files, device, prepared.resume)
    if ranks.rank == 0:
        print(
            f"{prepared.parameters / 1e6:.1f} M parameters, {files.meta.train_tokens / 1e6:.1f} M tokens to train on, "
            f"{config.parallel.strategy} on {ranks.size} x {device.type}, from step {training.step} to "
            f"{config.train.steps}, in {folder.path}",
            flush=True,
        )
    if training.step >= training.end:
        if ranks.rank == 0:
            print(f"nothing to do: the run is at step {training.step} of {training.end}", flush=True)
        return
    with claimed(folder, config, training.step, ranks.rank):
        try:
            training.run(folder, stop)
        finally:
            if ranks.rank == 0:
                draw_curves(folder)


def settle(config: PretrainConfig, ranks: Ranks, device: torch.device) -> None:
    """Threads and determinism, the same whichever launcher set its own defaults."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type == "cpu":
        torch.set_num_threads(config.parallel.threads or max(1, cores // ranks.local_size))
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for; read when it starts
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.train.seed)


def draw_curves(folder: RunFolder) -> None:
    """The picture of a run, as far as it went; none where there is no matplotlib."""
    try:
        from curves import draw
    except ImportError as error:
        print(f"no curves are drawn: {error}", flush=True)
        return
    if folder.metrics.exists():
        records = read_metrics(folder.metrics)
        if any("loss" in record for record in records):
            draw({folder.path.name: records}, folder.curves)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, and turns mistakes into a line and an exit code."""
    options = parse_arguments(argv)
    prepared = mistake = None
    try:
        ranks = discover()
        config = load(PretrainConfig, options.config, options.overrides)
        device = choose_device(ranks, config.parallel.device)
    except UserError as error:  # on all ranks alike, and too early to agree on it
        say_error(error)
        return EXIT_CODE
    with StopRequest().listening() as stop:
        settle(config, ranks, device)
        try:
            prepared = prepare_run(config, options.resume, ranks)
        except UserError as error:
            mistake = error
        with connected(ranks, device, config.parallel.timeout_minutes):
            try:
                raise_together(mistake)
                assert prepared is not None
                run(prepared, ranks, device, stop)
            except (UserError, RunError) as error:  # on all ranks alike from here on
                if ranks.rank == 0:
                    say_error(error)
                else:
                    time.sleep(2)  # where one rank ends, torchrun ends the others: rank 0 has something to say first
                return EXIT_CODE if isinstance(error, UserError) else 1
    return 0


def say_error(error: Exception) -> None:
    """One line on stderr."""
    print(f"error: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave(interruptible(main))
