"""The training loop: from a config on connected ranks to a run folder with checkpoints and metrics."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import resuming
import torch
import torch.distributed as dist
from metrics import Reporter
from model import GPTConfig
from pretrain_config import PretrainConfig
from ranks import any_rank
from run_folder import RunError, RunFolder, save_step
from sampling import num_windows, read_windows, sample_ids, share_of_rank
from stop import StopRequest as StopRequest
from strategy import Trainee, build
from tokens import TokenFiles
from torch import Tensor

import flashdist
from flashdist.memory import summarize

Batch = tuple[Tensor, Tensor]


class Training:
    """One run on one rank. Made on all ranks at once, it loads the checkpoint to resume from; then `run`."""

    def __init__(
        self, config: PretrainConfig, shape: GPTConfig, files: TokenFiles, device: torch.device, resume: Path | None
    ) -> None:
        self.config, self.shape, self.files, self.device = config, shape, files, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.step = self.samples = 0
        self.trainee: Trainee = build(config, shape, device)
        self.resumed = resume
        # The step after which this run ends of itself.
        self.end = min(config.train.steps, config.run.stop_after or config.train.steps)
        if resume is not None:
            self._load(resume)

    def _load(self, path: Path) -> None:
        expected = self._position()
        extra = resuming.read(path, self.trainee.load, self.trainee.optimizer, set(expected))
        remedies = {
            "text": "data.folder, data.tokenizer and data.validation_share must give the same tokens",
            "seed": "set train.seed to the first value",
            "context": "set model.context to the first value",
        }
        resuming.compare(path, extra, expected, remedies, "change the order of the data")
        shape = {f"model.{key}": value for key, value in self.shape.unseen().items()}
        saved = {f"model.{key}": value for key, value in extra.get("model", {}).items()}
        remedies = {key: f"set {key} to the first value" for key in shape}
        resuming.compare(path, saved, shape, remedies, "make another model of the same weights")
        self.step, self.samples = extra["step"], extra["samples"]

    def _position(self) -> dict[str, Any]:
        """What a checkpoint says about how far the run is in its data."""
        return {
            "step": self.step,
            "samples": self.samples,
            "seed": self.config.train.seed,
            "context": self.config.model.context,
            "text": self.files.meta.digest,
        }

    def run(self, folder: RunFolder, stop: StopRequest, after_step: Callable[[int], None] | None = None) -> None:
        """Trains to the end, or until it is asked to stop; saves; draws the curves.

        Args:
            folder: where to write.
            stop: looked at after each step, on all ranks.
            after_step: called after each step, for tests.

        Raises:
            RunError: a loss that is no number, or a checkpoint that cannot be written.
        """
        config = self.config
        end = self.end
        with Reporter(folder.metrics, active=self.rank == 0, total=config.train.steps) as reporter:
            reporter.record(self.step, {"started": self._description()})
            clock = Clock(self.step)
            while self.step < end:
                loss, norm = self._train_step()
                if self.step % config.run.log_every == 0 or self.step == end:
                    self._log(loss, norm, reporter, clock)
                if after_step is not None:
                    after_step(self.step)
                stopping = any_rank(stop.asked)
                evaluating = _due(self.step, config.run.eval_every) or self.step == config.train.steps
                saving = _due(self.step, config.run.save_every) or stopping or self.step == end
                if evaluating or saving:
                    self._finish_steps()  # they are no part of the pause
                    with clock.paused():
                        if evaluating:
                            self._evaluate(reporter)
                        if saving:
                            self._save(folder, reporter)
                if stopping:
                    reporter.say(f"asked to stop: saved after step {self.step}; go on with --resume auto")
                    break
            else:
                if end < config.train.steps:
                    reporter.say(f"saved after step {end} (run.stop_after); go on with --resume auto")
            reporter.record(self.step, {"bytes": self.memory_by_kind()})

    def _train_step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step; the mean loss over all ranks and the gradient norm, on the device."""
        train, trainee = self.config.train, self.trainee
        for group in trainee.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.step)
        trainee.start_step()
        turns = self.micro_batches()
        total = torch.zeros((), device=self.device)
        for turn, ids in enumerate(turns):
            x, y = self._batch(self.files.train, ids)
            total += trainee.backward(x, y, len(turns), turn == len(turns) - 1)
        norm = trainee.step(train.max_norm)
        self.step += 1
        self.samples += train.batch
        return total, norm

    def _finish_steps(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def micro_batches(self) -> list[list[int]]:
        """The windows that this rank sees in the next step, by micro-batch."""
        train = self.config.train
        windows = num_windows(self.files.train, self.config.model.context)
        ids = sample_ids(self.samples, train.batch, windows=windows, seed=train.seed)
        return share_of_rank(ids, rank=self.rank, world_size=self.size, micro_batch=train.micro_batch)

    def _batch(self, tokens: np.ndarray[Any, Any], ids: list[int]) -> Batch:
        x, y = read_windows(tokens, ids, self.config.model.context)
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True), y.pin_memory().to(self.device, non_blocking=True)
        return x, y

    def _log(self, loss: Tensor, norm: Tensor, reporter: Reporter, clock: Clock) -> None:
        dist.all_reduce(loss)
        value = loss.item() / self.size
        if not math.isfinite(value):
            raise RunError(
                f"the loss of step {self.step} is {value}: go on from the last checkpoint with a lower optimizer.lr or "
                "train.max_norm"
            )
        train, context = self.config.train, self.config.model.context
        tokens = self.samples * context
        speed = clock.rate(self.step) * train.batch * context
        lr = self.trainee.optimizer.param_groups[0]["lr"]
        values = {"loss": value, "lr": lr, "norm": norm.item(), "tokens": tokens, "tokens_per_second": speed}
        reporter.train_step(self.step, {**values, "memory": _peak_bytes(self.device)})

    @torch.no_grad()
    def _evaluate(self, reporter: Reporter) -> None:
        """The mean loss over windows spread over the held-out text, the same ones for any number of ranks."""
        context, micro_batch = self.config.model.context, self.config.train.micro_batch
        windows = num_windows(self.files.validation, context)
        count = min(self.config.run.eval_sequences, windows)
        if not count:
            return
        mine = [i * windows // count for i in range(self.rank, count, self.size)]
        # Every rank makes as many forward passes as the others, which FSDP2 needs; what is too much counts nothing.
        passes = math.ceil(math.ceil(count / self.size) / micro_batch)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, passes * micro_batch, micro_batch):
            ids = mine[start : start + micro_batch]
            # Always the same shape, for which a compiled model is compiled once.
            padded = ids + [0] * (micro_batch - len(ids))
            losses = self.trainee.evaluate(*self._batch(self.files.validation, padded))
            total += losses[: len(ids)].double().sum()
        self.trainee.end_evaluation()
        dist.all_reduce(total)
        value = total.item() / count
        reporter.record(self.step, {"eval_loss": value})
        reporter.say(f"step {self.step}: held-out loss {value:.4f}")

    def _save(self, folder: RunFolder, reporter: Reporter) -> None:
        # The losses of the steps so far may all be finite, or were not looked at: run.log_every.
        extra = {**self._position(), "model": self.shape.unseen()}
        keep, weights = self.config.run.keep_last, self.trainee.weights()
        path = save_step(folder, self.step, weights, lambda path: self.trainee.save(path, extra), self.rank, keep)
        reporter.record(self.step, {"saved": path.name})

    def memory_by_kind(self) -> dict[str, int]:
        """Bytes that live from step to step, gradients included, summed over ranks. Collective."""
        optimizer = self.trainee.optimizer
        if isinstance(optimizer, flashdist.FlashOptimizer):
            summary = optimizer.memory_summary()
        else:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = [p.grad for p in parameters if p.grad is not None]
            state = [pair for kept in optimizer.state.values() for pair in kept.items()]
            summary = summarize(parameters, gradients, state, derived=[])
        kinds = ("weights", "corrections", "moments", "scales", "steps", "gradients", "derived")
        sizes = torch.tensor([getattr(summary, kind) for kind in kinds], dtype=torch.int64)
        dist.all_reduce(sizes)
        counts = {"parameters": self.trainee.parameters(), "ranks": self.size}
        return {**dict(zip(kinds, sizes.tolist(), strict=True)), **counts}

    def _description(self) -> dict[str, Any]:
        return {
            "ranks": self.size,
            "strategy": self.config.parallel.strategy,
            "optimizer": self.config.optimizer.name,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "flashdist": flashdist.__version__,
            "resumed": str(self.resumed) if self.resumed else None,
        }


class Clock:
    """Steps per second since it was last asked, without the pauses."""

    def __init__(self, step: int) -> None:
        self.since, self.step = time.perf_counter(), step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def rate(self, step: int) -> float:
        """Steps per second; `step` is the number of finished ones."""
        now = time.perf_counter()
        rate = (step - self.step) / (now - self.since)
        self.since, self.step = now, step
        return rate


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
