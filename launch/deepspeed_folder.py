"""A checkpoint of a run under ZeRO 1 to 3, as a folder that is either complete or not there.

    step-00001000/
      run.json           stage, position in the data, and size and CRC-32 of each other file
      zero/              what engine.save_checkpoint writes: optimizer files of codes, model files
      latest             names `zero`, for DeepSpeed's own tools
      zero_to_fp32.py    DeepSpeed's

It is written under another name and renamed once it is on the disk. Needs no DeepSpeed.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from config import UserError
from ranks import raise_together

NOTE, TAG, UNFINISHED = "run.json", "zero", "unfinished-"
CHUNK = 1 << 24


@dataclass(frozen=True)
class Note:
    """What `run.json` says: ZeRO's stage, and the `extra` of the launcher."""

    stage: int
    extra: dict[str, Any]


def holds(path: Path) -> bool:
    """Whether a folder is such a checkpoint."""
    return (path / NOTE).is_file()


def write(path: Path, note: Note, save: Callable[[Path], None]) -> None:
    """Makes the folder. Collective.

    Args:
        path: where it appears, by one rename.
        note: what is said about it.
        save: writes DeepSpeed's files, under the tag `TAG`, into the folder it is given. Collective.

    Raises:
        OSError: on the rank that could not write.
    """
    rank = dist.get_rank()
    made = path.parent / f"{UNFINISHED}{path.name}"
    if rank == 0:
        for left in path.parent.glob(f"{UNFINISHED}*"):  # of a run that was killed while it saved
            shutil.rmtree(left)
        made.mkdir(parents=True)
    dist.barrier()
    save(made)
    dist.barrier()
    sums = _sums(made)
    if rank == 0:
        (made / NOTE).write_text(json.dumps({"stage": note.stage, "extra": note.extra, "files": sums}, indent=1) + "\n")
        for folder in (made / NOTE, made / TAG, made):
            _flush(folder)
        os.rename(made, path)
        _flush(path.parent)
    dist.barrier()


def check(path: Path) -> Note:
    """Reads `run.json` and compares all files with it. Collective.

    Raises:
        UserError: on all ranks: a file is missing or damaged.
    """
    note, error = None, None
    try:
        saved = json.loads((path / NOTE).read_text())
        note, expected = Note(int(saved["stage"]), dict(saved["extra"])), dict(saved["files"])
        names = sorted(expected)[dist.get_rank() :: dist.get_world_size()]
        damaged = [name for name in names if _sum(path / name) != expected[name]]
        if damaged:
            error = UserError(f"cannot resume from {path}: {damaged[0]} is damaged, take an earlier checkpoint")
    except (OSError, ValueError, KeyError, TypeError) as caught:
        reason = (caught.strerror if isinstance(caught, OSError) else None) or caught
        error = UserError(f"cannot resume from {path}: {NOTE} cannot be read: {reason}")
        if isinstance(caught, FileNotFoundError):
            error = UserError(f"cannot resume from {path}: {Path(caught.filename).name} is missing")
    raise_together(error)
    assert note is not None
    return note


def _sums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of all files, which are on the disk then; each rank reads its share."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
    share = files[dist.get_rank() :: dist.get_world_size()]
    for file in share:
        _flush(file)
    dist.all_gather_object(found, {str(file.relative_to(folder)): _sum(file) for file in share})
    return {name: value for part in found for name, value in part.items()}


def _sum(file: Path) -> list[int]:
    size = crc = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
