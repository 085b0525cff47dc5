"""Save and load a model with its optimizer: compact, resharding, and never half done."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flashdist.checkpoint.folder import find
from flashdist.checkpoint.loading import execute, load_values, plan_load, rng_states, scheduler_values
from flashdist.checkpoint.manifest import Manifest, read_manifest
from flashdist.checkpoint.ranks import CheckpointError, Ranks
from flashdist.checkpoint.reading import Reader, check_files, open_checkpoint
from flashdist.checkpoint.rng import set_rng
from flashdist.checkpoint.saving import AsyncSave, plan_save
from flashdist.modes import without_autograd

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]


@without_autograd
def save(
    path: PathLike,
    model: nn.Module,
    opt: torch.optim.Optimizer | None,
    *,
    scheduler: Any = None,
    extra: Any = None,
    overwrite: bool = False,
) -> None:
    """Save a model, its optimizer and what else a run needs to go on. Collective: every rank calls it.

    Every rank writes its own shards, in the bits it keeps them in: for FlashAdamW 5.19 bytes per parameter. Replicas
    are written once. The checkpoint appears under ``path`` as a whole, after everything is on the disk; until then, and
    whenever the process is killed, what was there before stays loadable.

    Args:
        path: a new folder, on a file system that all ranks see.
        model: plain, under DDP, or sharded by FSDP2, HSDP or tensor parallelism.
        opt: a flashdist optimizer (or one of torch.optim), built from this model's parameters. None: weights alone.
        scheduler: a learning-rate scheduler; its ``state_dict()`` is kept.
        extra: what the training loop needs besides: None, bool, int, float, str, tensors, and lists, tuples, dicts,
            Counters and OrderedDicts of these, the same on every rank.
        overwrite: replace a checkpoint that ``path`` holds.

    Raises:
        FileExistsError: ``path`` exists (without ``overwrite``) or is no checkpoint, or another job is saving to it.
        OSError: the disk is full or read-only; what was at ``path`` is intact.
        CheckpointError: a rank's file is not where rank 0 publishes: they do not see the same folder.
        ValueError: ranks give different paths or hold replicas that differ, a parameter that is not the model's, or
            one on the meta device.
        TypeError: a value in ``extra`` that a checkpoint does not take.

    Source: layout and resharding stand on torch.distributed.checkpoint's planner; the files are safetensors and JSON.
    """
    ranks = Ranks()
    plan_save(ranks.agree_on(_absolute(path)), model, opt, scheduler, extra, overwrite, ranks).write()


@without_autograd
def async_save(
    path: PathLike,
    model: nn.Module,
    opt: torch.optim.Optimizer | None,
    *,
    scheduler: Any = None,
    extra: Any = None,
    overwrite: bool = False,
) -> AsyncSave:
    """As :func:`save`, with the writing in a thread: returns once this rank's part is copied to the host.

    Args:
        path, model, opt, scheduler, extra, overwrite: as in :func:`save`.

    Returns:
        A handle: ``done()``, and ``result()``, which waits and raises what went wrong. Every rank calls ``result()``
        before its process ends and before it saves again.
    """
    ranks = Ranks().for_thread()
    try:
        plan = plan_save(ranks.agree_on(_absolute(path)), model, opt, scheduler, extra, overwrite, ranks)
        try:
            with ranks.together():
                plan.stage()
        except BaseException:
            if plan.folder is not None:
                plan.folder.discard()
            raise
    except BaseException:
        ranks.close()
        raise
    return AsyncSave(plan)


@without_autograd
def load(path: PathLike, model: nn.Module, opt: torch.optim.Optimizer | None, *, scheduler: Any = None) -> Any:
    """Load what :func:`save` has saved, on any number of ranks and under any strategy. Collective.

    Everything is checked before anything is changed: files against their checksums, names, shapes and dtypes against
    the model and the optimizer. Then each rank reads its own part straight into the live tensors. Formats that the
    optimizer keeps otherwise are converted, which the log says: dense moments of torch's optimizers, another
    ``master_weight_bits`` or ``quantize``, fp32 weights into a bf16 model. The generators' states are restored for the
    ranks that the checkpoint has them for.

    Args:
        path: the checkpoint's folder.
        model: with the same parameters, sharded in any way; what it holds is overwritten.
        opt: the optimizer of these parameters; what it holds is overwritten, ``master_weight_bits`` and ``quantize``
            excepted. None: weights alone.
        scheduler: gets its saved state.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: no checkpoint, a damaged, truncated or missing file (named), or a newer format.
        ValueError: the checkpoint is of another model or optimizer (what differs is listed), or ranks give different
            paths.
    """
    ranks = Ranks()
    given = ranks.agree_on(_absolute(path))
    folder = ranks.from_zero(find(given) if ranks.rank == 0 else None)
    if folder != given:
        logger.warning("%s is missing: loading %s, which an interrupted save has left", path, folder)
    with ranks.together():
        manifest = read_manifest(folder)
        check_files(folder, manifest, ranks.rank, ranks.size)
    with ranks.together(), _still_readable(folder, "nothing was loaded"):
        plan = plan_load(manifest, model, opt)
        reader = Reader(folder, manifest)
        scheduler_state = None if scheduler is None else scheduler_values(reader, scheduler)
        extra = load_values(reader, "extra")
        generators = rng_states(reader, ranks.rank)
    partly = "the model and the optimizer are partly overwritten. Load again before going on"
    with ranks.together(), _still_readable(folder, partly):
        execute(plan, reader, opt)
        if scheduler is not None:
            scheduler.load_state_dict(scheduler_state)
        if not generators:
            logger.warning(
                "the checkpoint has no random state for rank %d: its generators stay as they are", ranks.rank
            )
        set_rng(generators)
    return extra


def verify(path: PathLike) -> Manifest:
    """Check a checkpoint's manifest and the checksum of every file. Not collective; nothing is loaded.

    Args:
        path: the checkpoint's folder.

    Returns:
        The manifest: world size, strategy, versions, tensors, bytes by kind, files.

    Raises:
        CheckpointError: naming what is missing, truncated or damaged.
    """
    return open_checkpoint(find(_absolute(path)))


@contextmanager
def _still_readable(folder: Path, consequence: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise CheckpointError(
            f"{folder} could no longer be read after it had been checked ({error}): {consequence}"
        ) from error


def _absolute(path: PathLike) -> Path:
    return Path(os.path.realpath(path))
