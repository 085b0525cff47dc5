"""The ranks that save or load together: what one of them finds wrong is raised on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, incomplete or none at all, or one that could not be written."""


class Ranks:
    """A process group, or one process alone where torch.distributed is not initialised.

    Attributes:
        rank: place in the group; 0 publishes what is saved.
        size: number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)

    def for_thread(self) -> Ranks:
        """The same ranks over a gloo group of their own, whose collectives a thread may call beside training.

        Collective. :meth:`close` it when the thread is done.
        """
        if self.size == 1:
            return self
        members = dist.get_process_group_ranks(self.group) if self.group is not None else None
        return Ranks(dist.new_group(members, backend="gloo"))

    def close(self) -> None:
        """Give up a group made by :meth:`for_thread`."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value on rank 0, None elsewhere."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=self._global(0), group=self.group)
        return found

    def scatter(self, values: Sequence[T] | None) -> T:
        """Rank r's value of rank 0's list."""
        if self.size == 1:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        sent = list(values) if values is not None else None
        dist.scatter_object_list(received, sent, src=self._global(0), group=self.group)
        return received[0]

    def from_zero(self, value: T | None) -> T:
        """Rank 0's value."""
        return self.scatter([value] * self.size if self.rank == 0 else None)  # type: ignore[return-value]

    def everywhere(self, value: T) -> list[T]:
        """Every rank's value on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree_on(self, path: Path) -> Path:
        """The path, if every rank has the same; ValueError on all of them else. Collective."""
        paths = self.everywhere(str(path))
        for rank, other in enumerate(paths):
            if other != paths[0]:
                raise ValueError(
                    f"ranks 0 and {rank} give different paths, {paths[0]} and {other}: a checkpoint is one folder for "
                    "all ranks. Give the same path on every rank, on a file system that all of them see"
                )
        return path

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks; if it raises on any of them, the first such exception is raised on all."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        if self.size > 1:
            for rank, other in enumerate(self.everywhere(None if error is None else _portable(error))):
                if other is not None:
                    if error is None:
                        error = type(other)(f"on rank {rank}: {other}")
                    raise error
        elif error is not None:
            raise error

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _portable(error: Exception) -> Exception:
    """An exception that can be sent to other ranks: of the same kind where its kind takes a text."""
    kinds = (CheckpointError, FileExistsError, FileNotFoundError, OSError, ValueError, TypeError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
    return kind(str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}")
