"""Whether the ids on disk are still those that were written.

A file that was changed trains another text: with an error deep in the model where an id has no row in the embedding,
and without a word where it has one. To read all of it before each run would cost minutes, so `checked.json` says of
which files (their sizes and times, which any change moves) the content is known; only after a change they are read
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from config import UserError
from rich.console import Console
from rich.progress import Progress

NAME = "checked.json"
PARTS = ("train", "validation")
CHUNK_BYTES = 16 << 20


def remember(folder: Path) -> None:
    """Say that the files are, as they are now, what meta.json says."""
    (folder / NAME).write_text(json.dumps(_stamps(folder)) + "\n")


def check(folder: Path, dtype: np.dtype[Any], vocab_size: int, digest: str) -> None:
    """Compares the files with what meta.json says, unless that is known of them.

    Args:
        folder: an entry of the cache, which no other process writes to.
        dtype: of the ids.
        vocab_size: what every id is below.
        digest: of all ids.

    Raises:
        UserError: naming the file, and the first id that the tokenizer has not and where it stands.
        OSError: a file that cannot be read.
    """
    stamps = _stamps(folder)
    try:
        if json.loads((folder / NAME).read_text(encoding="utf-8")) == stamps:
            return
    except (OSError, ValueError, RecursionError):
        pass  # missing in a cache of an earlier release
    total = sum(stamp[0] for stamp in stamps.values())
    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"comparing {folder}", total=total)
        found = _digest(folder, dtype, vocab_size, lambda read: progress.advance(task, read))
    if found != digest:
        raise UserError(
            f"{folder / 'train.bin'} or validation.bin was changed after it was made, the ids have another digest than "
            f"in meta.json: remove the folder {folder}, and it is made again"
        )
    remember(folder)


def _digest(folder: Path, dtype: np.dtype[Any], vocab_size: int, read: Callable[[int], None]) -> str:
    digest = hashlib.sha256(str(dtype).encode())
    for part in PARTS:
        path = folder / f"{part}.bin"
        with open(path, "rb") as file:
            first = 0
            while raw := file.read(CHUNK_BYTES):
                ids = np.frombuffer(raw, dtype)
                if ids.max() >= vocab_size:
                    place = int((ids >= vocab_size).argmax())
                    raise UserError(
                        f"{path} has the id {ids[place]} at position {first + place}, the tokenizer has {vocab_size} "
                        f"ids: the file was changed after it was made. Remove the folder {folder}, and it is made again"
                    )
                digest.update(raw)
                first += len(ids)
                read(len(raw))
        digest.update(part.encode())
    return digest.hexdigest()


def _stamps(folder: Path) -> dict[str, list[int]]:
    found = {}
    for part in PARTS:
        status = (folder / f"{part}.bin").stat()
        # The last moves with every change, also of a file whose time was set back.
        found[part] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return found
