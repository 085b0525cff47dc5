"""How a checkpoint's folder comes to be: written beside, published by one rename, nothing lost in between.

While ``PATH`` is being saved its files go to ``PATH.saving``. Rank 0 holds a lock in there for that time, which the
system releases if the process dies: a folder left by a killed save is recognised and cleared by the next one, a second
job that saves to the same path is told so. With ``overwrite`` the old checkpoint becomes ``PATH.old`` before the new
one takes its name, and is removed after; :func:`find` takes the ``PATH.old`` that a killed save has left.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from flashdist.checkpoint.manifest import FILE_NAME
from flashdist.checkpoint.ranks import CheckpointError

try:
    import fcntl
except ImportError:  # Windows: no locks there, the rest holds
    fcntl = None  # type: ignore[assignment]

LOCK_NAME = ".lock"
# File systems without locks; a save there is not protected against a second job, but works.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP)

# How long a network file system is given to show one machine what another has written.
_PATIENCE = 5.0  # seconds


def saving_folder(path: Path) -> Path:
    """Where the files of a save go until it is published."""
    return path.with_name(path.name + ".saving")


def old_folder(path: Path) -> Path:
    """Where an overwritten checkpoint waits until the new one is in place."""
    return path.with_name(path.name + ".old")


def find(path: Path) -> Path:
    """The folder to load: ``path``, or ``path.old`` where a save was killed between its two renames."""
    if not path.exists() and (old_folder(path) / FILE_NAME).is_file():
        return old_folder(path)
    return path


class SavingFolder:
    """The folder of a save in progress, on rank 0."""

    def __init__(self, path: Path, overwrite: bool) -> None:
        """Open it.

        Raises:
            FileExistsError: ``path`` exists and may not be overwritten, or another job is saving to it.
            OSError: the folder cannot be made.
        """
        self.path = path
        self.folder = saving_folder(path)
        self.overwrite = overwrite
        self._refuse_existing()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        self.lock: BinaryIO | None = self._lock()
        try:
            self._clear()
            self._recover_old()
            self._refuse_existing()
        except BaseException:
            self.discard()
            raise

    def _refuse_existing(self) -> None:
        taken = self.path if self.path.exists() or self.path.is_symlink() else find(self.path)
        if (taken.exists() or taken.is_symlink()) and not self.overwrite:
            raise FileExistsError(f"{taken} exists: save to another path, or with overwrite=True")
        if self.path.exists() and not (self.path / FILE_NAME).is_file():
            raise FileExistsError(f"{self.path} exists and is no flashdist checkpoint: it will not be overwritten")

    def _lock(self) -> BinaryIO:
        ended = f"another save to {self.path} has just ended: try again, with overwrite=True to replace it"
        try:
            file = open(self.folder / LOCK_NAME, "ab")  # noqa: SIM115 - held until the save ends
        except FileNotFoundError as error:
            raise FileExistsError(ended) from error
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return file
                file.close()
                raise FileExistsError(
                    f"another save to {self.path} is in progress (in {self.folder}): wait for it, or save elsewhere"
                ) from error
        # Between opening and locking the folder may have been published under its name, by whom held the lock before.
        here = self.folder / LOCK_NAME
        if not here.exists() or not os.path.samestat(os.fstat(file.fileno()), os.stat(here)):
            file.close()
            raise FileExistsError(ended)
        return file

    def _clear(self) -> None:
        """Remove what a killed save has left."""
        for left in self.folder.iterdir():
            if left.name != LOCK_NAME:
                left.unlink()

    def _recover_old(self) -> None:
        """Bring the folders to where a save that was killed while it published would have brought them."""
        old = old_folder(self.path)
        if not old.exists():
            return
        if self.path.exists():
            shutil.rmtree(old)
        else:
            old.rename(self.path)

    def check_space(self, needed: int) -> None:
        """OSError where the disk has less room than the checkpoint takes."""
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"{self.path} needs {needed / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB left: make room",
            )

    def mark(self) -> str:
        """Write a word into the folder that no other save has, by which ranks know that they see this one."""
        word = secrets.token_hex(16)
        if self.lock is not None:
            self.lock.truncate(0)
            self.lock.write(word.encode())
            self.lock.flush()
            os.fsync(self.lock.fileno())
        return word

    def check_files(self, sizes: Iterable[tuple[str, int]]) -> None:
        """CheckpointError unless every file that ranks say they have written is in the folder, with its size."""
        for name, size in sizes:
            file = self.folder / name
            if not _in_time(partial(_has_size, file, size)):
                found = f"has {file.stat().st_size} bytes there" if file.is_file() else "is not there"
                raise CheckpointError(
                    f"a rank has written {size} bytes to {file}, which {found} for rank 0: nothing was published. Save "
                    "to a file system that all ranks see, and where nobody else writes"
                )

    def publish(self) -> None:
        """Give the finished folder its name. The files must be on the disk.

        Raises:
            CheckpointError: something else has taken the name in the meantime.
        """
        old = old_folder(self.path)
        fsync_folder(self.folder)
        if self.overwrite and self.path.exists():
            self.path.rename(old)
        try:
            self.folder.rename(self.path)
        except OSError as error:
            if not self.path.exists() and old.exists():
                old.rename(self.path)
            raise CheckpointError(
                f"{self.path} could not be published ({error.strerror}): something else has taken its name"
            ) from error
        fsync_folder(self.path.parent)
        (self.path / LOCK_NAME).unlink(missing_ok=True)
        if self.lock is not None:
            self.lock.close()
        if old.exists():
            shutil.rmtree(old)

    def discard(self) -> None:
        """Give up the save: its files are removed, as far as that is possible."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.lock is not None:
            self.lock.close()


def check_mark(path: Path, word: str) -> None:
    """CheckpointError unless this rank sees the folder that rank 0 has marked with this word."""
    lock = saving_folder(path) / LOCK_NAME

    def marked() -> bool:
        try:
            return lock.read_bytes() == word.encode()
        except OSError:
            return False

    if not _in_time(marked):
        raise CheckpointError(
            f"this rank does not see the folder {lock.parent} that rank 0 has just made: save to a file system that "
            "all ranks see"
        )


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _in_time(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold while one is patient."""
    end = time.monotonic() + _PATIENCE
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def fsync_folder(folder: Path) -> None:
    """Have a folder's entries on the disk, where the system can do that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
