"""Real processes for tests of ranks: a pool that stays up, so that only the first test pays for importing torch.

    def worker(rank, world_size, scale):          # at the top level of a test module, so that it can be pickled
        t = torch.ones(1) * rank * scale
        dist.all_reduce(t)
        return t.item()

    def test_sum():
        assert run_ranks(worker, 3, 2.0) == [6.0, 6.0, 6.0]

Each call has its own gloo process group over a file; the default group is gone afterwards. An exception in any rank is
raised in the test with that rank's traceback. A rank that dies or hangs takes the pool down, and the next call starts a
new one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

START_SECONDS = 120


class RankError(AssertionError):
    """One or more ranks raised; the text holds their tracebacks."""


def _serve(connection: Connection) -> None:
    """A rank: takes jobs until its connection closes."""
    import torch

    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(_one_job(*job))


def _one_job(
    function: Callable[..., Any], rank: int, world_size: int, store: str, timeout: float, args: tuple[Any, ...]
) -> tuple[bool, Any]:
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        try:
            return True, function(rank, world_size, *args)
        finally:
            dist.destroy_process_group()
            _forget_meshes()
    except BaseException as error:  # CheckpointException is no Exception
        return False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"


def _forget_meshes() -> None:
    """torch keeps plans and placements by equal meshes; those of an earlier job name groups that are gone."""
    from torch.distributed.tensor import _redistribute, debug

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    for kept in vars(_redistribute).values():
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()


class RankPool:
    """Processes that stay up between jobs."""

    def __init__(self) -> None:
        self.ranks: list[tuple[Any, Connection]] = []

    def grow(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        started = []
        while len(self.ranks) < world_size:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.ranks.append((process, here))
            started.append(here)
        for connection in started:
            if not connection.poll(START_SECONDS) or connection.recv() != "ready":
                self.stop()
                raise RankError("a rank did not start")

    def stop(self) -> None:
        for process, connection in self.ranks:
            connection.close()
            process.kill()
            process.join()
        self.ranks = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 90) -> list[Any]:
        self.grow(world_size)
        folder = tempfile.mkdtemp(prefix="ranks-")
        store = os.path.join(folder, "store")
        try:
            for rank, (_, connection) in enumerate(self.ranks[:world_size]):
                connection.send((function, rank, world_size, store, timeout, args))
            answers = self._collect(world_size, time.monotonic() + timeout)
        except BaseException:
            self.stop()
            raise
        finally:
            if os.path.exists(store):
                os.unlink(store)
            os.rmdir(folder)
        failures = [str(value) for fine, value in answers if not fine]
        if failures:
            self.stop()
            raise RankError("\n".join(failures))
        return [value for _, value in answers]

    def _collect(self, world_size: int, deadline: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        failed_at = None
        while len(answers) < world_size:
            for rank, (process, connection) in enumerate(self.ranks[:world_size]):
                if rank in answers:
                    continue
                if connection.poll(0.002):
                    try:
                        answers[rank] = connection.recv()
                    except EOFError:
                        answers[rank] = (False, f"rank {rank} died")
                elif not process.is_alive():
                    answers[rank] = (False, f"rank {rank} died with exit code {process.exitcode}")
                if rank in answers and not answers[rank][0] and failed_at is None:
                    failed_at = time.monotonic()
            # The others may wait in a collective for the one that failed: give them a moment to say more, no longer.
            if time.monotonic() > deadline or (failed_at is not None and time.monotonic() > failed_at + 3):
                for rank in range(world_size):
                    answers.setdefault(rank, (False, f"rank {rank}: no answer (hanging, or waiting for a failed rank)"))
        return [answers[rank] for rank in range(world_size)]


_POOL = RankPool()
atexit.register(_POOL.stop)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 90) -> list[Any]:
    """``function(rank, world_size, *args)`` on that many processes; what each returned, by rank.

    ``function`` must be importable, its arguments and result picklable (return tensors as clones, not as views).
    """
    return _POOL.run(function, world_size, *args, timeout=timeout)
