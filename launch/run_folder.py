"""The folder of a run: what is in it, what must be true before anything is written to it, and which steps are kept.

config.yaml       the effective config; one that a resume replaced becomes config.until-step-N.yaml
metrics.jsonl     one line a record (metrics.py)
curves.png        the curves, drawn at the end (curves.py)
step-00001000/    a checkpoint after 1000 steps (flashdist.checkpoint)
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from config import UserError, to_yaml
from ranks import any_rank, raise_together
from torch import Tensor

from flashdist.checkpoint import CheckpointError

STEP_FOLDER = re.compile(r"step-(\d{8,})")
# Bytes on disk a parameter, rounded up: weights, corrections, codes and scales, or fp32 weights and moments.
FLASH_BYTES, DENSE_BYTES = 5.4, 12.1
# DeepSpeed's model file beside its optimizer files, which hold the weights once more.
MODEL_FILE_BYTES = 2.0


class RunError(Exception):
    """A run that cannot go on; its text is one line. Exit code 1."""


class RunFolder:
    """Paths of a run. Reading it changes nothing; `claim` makes it this run's own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.yaml"
        self.curves = path / "curves.png"

    def step_folder(self, step: int) -> Path:
        """The checkpoint after `step` steps."""
        return self.path / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, in order."""
        if not self.path.is_dir():
            return []
        matches = (STEP_FOLDER.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def to_resume(self, resume: str | None) -> Path | None:
        """The checkpoint a run starts from.

        Args:
            resume: None for a new run, `auto` for the latest checkpoint in this folder (or a new run where there is
                none), else a checkpoint's path.

        Raises:
            UserError: a new run where there is one already, or no checkpoint at the path.
        """
        if resume is None:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise UserError(
                    f"run.folder {self.path} exists: go on with it by --resume auto, or give a new run another folder"
                )
            return None
        if resume == "auto":
            steps = self.steps()
            return self.step_folder(steps[-1]) if steps else None
        path = Path(resume).expanduser()
        if not path.is_dir():
            raise UserError(
                f"--resume {resume}: no such folder; give a checkpoint's folder, such as runs/x/step-00001000"
            )
        if path.resolve().parent != self.path.resolve():
            if self.steps():
                raise UserError(
                    f"--resume {resume}: run.folder {self.path} has checkpoints of its own; give another run.folder"
                )
        elif any(self.step_folder(step) > self.path / path.name for step in self.steps()):
            raise UserError(
                f"--resume {resume}: run.folder {self.path} has later checkpoints, which the run would meet; move "
                "them away, or give another run.folder"
            )
        return path

    def check_space(self, parameters: int, flash: bool, keep_last: int, model_file: bool = False) -> None:
        """Refuse to start where the checkpoints that are kept at a time (and the one being written) have no room.

        Args:
            parameters: how many the model has.
            flash: whether a flashdist optimizer trains it.
            keep_last: how many checkpoints stay.
            model_file: whether DeepSpeed saves.

        Raises:
            UserError: with what is needed and what is there.
        """
        one = int(parameters * ((FLASH_BYTES if flash else DENSE_BYTES) + (MODEL_FILE_BYTES if model_file else 0)))
        there = min(len(self.steps()), keep_last)
        needed = one * (keep_last + 1 - there)
        existing = next(parent for parent in (self.path, *self.path.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise UserError(
                f"run.folder {self.path} needs {needed / 1e9:.1f} GB for {keep_last + 1 - there} more checkpoints of "
                f"{one / 1e9:.1f} GB, its disk has {free / 1e9:.1f} GB: free some, lower run.keep_last, or move it"
            )

    @contextmanager
    def claim(self, config: Any, start: int) -> Iterator[None]:
        """For rank 0: makes the folder, writes the config, and keeps other runs out for the time of a `with`.

        Raises:
            UserError: the folder cannot be written to, or another process is writing to it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held until the run ends
        except OSError as error:
            raise UserError(f"run.folder {self.path} cannot be written to: {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"another process is writing to run.folder {self.path}: wait for it to end") from error
            text = to_yaml(config)
            if self.config.exists() and self.config.read_text() != text:
                self.config.rename(self.path / f"config.until-step-{start:08d}.yaml")
            self.config.write_text(text)
            yield

    def remove_old(self, keep_last: int) -> None:
        """For rank 0, after a save: removes all but the latest checkpoints."""
        # By a process that was killed while it removed, or while it saved a step that is not saved again.
        for left in (*self.path.glob("removing-*"), *self.path.glob("step-*.saving")):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
        for step in self.steps()[:-keep_last]:
            # Renamed first, so that what is half removed is not taken for a checkpoint.
            doomed = self.path / f"removing-{step:08d}"
            os.replace(self.step_folder(step), doomed)
            shutil.rmtree(doomed)


@contextmanager
def claimed(folder: RunFolder, config: Any, step: int, rank: int) -> Iterator[None]:
    """Rank 0 claims the folder for the time of a `with`; where it cannot, all ranks raise."""
    with ExitStack() as stack:
        error = None
        if rank == 0:
            try:
                stack.enter_context(folder.claim(config, step))
            except UserError as caught:
                error = caught
        raise_together(error)
        yield


def save_step(
    folder: RunFolder, step: int, weights: Iterable[Tensor], write: Callable[[Path], None], rank: int, keep_last: int
) -> Path:
    """Saves the checkpoint of a step, and removes old ones. Collective.

    Args:
        folder: of the run.
        step: how many are finished.
        weights: what this rank holds of the parameters.
        write: saves to a path. Collective.
        rank: this one.
        keep_last: how many checkpoints stay.

    Returns:
        The checkpoint.

    Raises:
        RunError: weights that are not finite, which would replace a checkpoint that is; or it cannot be written.
    """
    if any_rank(any(not bool(torch.isfinite(p).all()) for p in weights)):
        raise RunError(
            f"the weights after step {step} are no longer finite, earlier checkpoints are kept: go on from the last "
            "one with a lower optimizer.lr, or clip more"
        )
    path = folder.step_folder(step)
    try:
        write(path)
        if rank == 0:
            folder.remove_old(keep_last)
    except (OSError, CheckpointError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"step {step} could not be saved, earlier checkpoints are intact: {reason}") from error
    return path
