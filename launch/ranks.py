"""Which rank this process is, however it was started, and the process group it belongs to.

torchrun (and whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as `deepspeed` does) is taken at its
word. Under mpirun the ranks find each other through mpi4py, which is used for nothing else. A process that was started
alone is rank 0 of 1.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from config import UserError
from torch.distributed import HashStore  # type: ignore[attr-defined]

# Set by mpiexec of MPICH and Intel MPI, by Open MPI's mpirun, and by launchers that speak PMIx.
MPI_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class Ranks:
    """This process among all.

    Attributes:
        rank, size: among all processes.
        local_rank, local_size: among those of this machine.
        launcher: `torchrun`, `mpi` or `single`.
        address: where rank 0 listens, `tcp://host:port` or `env://`; None for a single process.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "single"
    address: str | None = None


def discover() -> Ranks:
    """Who this process is.

    Raises:
        UserError: started in a way that leaves its rank unknown. (Each process would train alone and write over the
            others.)
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise UserError(f"RANK is set, but not {' and '.join(missing)}: start the ranks with torchrun or mpirun")
        local_rank = int(env.get("LOCAL_RANK", env["RANK"]))
        # LOCAL_SIZE is how DeepSpeed's launcher calls it.
        local_size = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", env["WORLD_SIZE"])))
        return Ranks(int(env["RANK"]), int(env["WORLD_SIZE"]), local_rank, local_size, "torchrun", "env://")
    if any(name in env for name in MPI_VARIABLES):
        return _discover_mpi()
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise UserError(
            f"srun started {env['SLURM_STEP_NUM_TASKS']} tasks without torchrun: let each node's one task be torchrun "
            "(docs/pretraining.md has the lines), or use srun --mpi=pmi2 with mpi4py"
        )
    return Ranks()


def _discover_mpi() -> Ranks:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(
            f"started by mpirun, but mpi4py cannot be imported ({error}): pip install 'flashdist[mpi]', or use torchrun"
        ) from error
    world = MPI.COMM_WORLD
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    rank, size, local_rank, local_size = world.Get_rank(), world.Get_size(), local.Get_rank(), local.Get_size()
    counts = [int(os.environ[name]) for name in MPI_VARIABLES if name.endswith("SIZE") and name in os.environ]
    started = counts[0] if counts else size
    if size != started:
        raise UserError(
            f"mpirun started {started} ranks, but mpi4py sees {size}: it is built for another MPI. Use the mpirun that "
            "belongs to it (pip install mpich brings both), or torchrun"
        )
    host = "127.0.0.1" if local_size == size else socket.gethostname()
    address = world.bcast(f"tcp://{host}:{_free_port()}" if rank == 0 else None)
    local.Free()
    # From here on the ranks talk through torch.distributed. Without this a rank that fails would wait in MPI's exit for
    # the others, which wait for it.
    MPI.Finalize()
    return Ranks(rank, size, local_rank, local_size, "mpi", address if size > 1 else None)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def choose_device(ranks: Ranks, asked: str) -> torch.device:
    """The device of this rank: `cpu`, `cuda` (the one of its local rank) or `auto`.

    Raises:
        UserError: more ranks on this machine than GPUs, or no GPU where one is asked for.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "parallel.device=cuda, but torch sees no GPU: take parallel.device=cpu, or install its CUDA build"
        )
    count = torch.cuda.device_count()
    if ranks.local_rank >= count:
        raise UserError(
            f"{ranks.local_size} ranks on a machine with {count} GPUs: start {count}, or set parallel.device=cpu"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def connected(ranks: Ranks, device: torch.device, timeout_minutes: float) -> Iterator[None]:
    """The default process group for the time of a `with`: NCCL for tensors on GPUs, gloo for those on CPUs.

    One that is there already is used and left alone. A single process gets a group too, which FSDP2 needs.
    """
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(minutes=timeout_minutes),
        **({"store": HashStore()} if ranks.address is None else {"init_method": ranks.address}),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """Ends the process as `sys.exit(code)` does, but leaves Python's own clean-up out.

    gloo's threads may hold tensors of the last collectives a moment longer than destroy_process_group() takes. One that
    gives its tensor back while Python cleans up ends the process with SIGABRT, after a run that was complete
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def raise_together(error: UserError | None) -> None:
    """Raises on all ranks where any of them has an error: that of the lowest such rank.

    Raises:
        UserError: as said.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(error) if error is not None else None)
    for rank, text in enumerate(texts):
        if text is not None:
            raise UserError(text if rank == 0 else f"rank {rank}: {text}")


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; the same answer on all of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    answer = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer.item())
