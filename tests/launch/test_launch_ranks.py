"""Who a process is, by how it was started."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from config import UserError
from ranks import Ranks, any_rank, choose_device, connected, discover, raise_together

from tests.support.ranks import run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")


@pytest.fixture
def env(monkeypatch):
    for name in (*NAMES, *ranks.MPI_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_that_was_started_alone_is_the_only_one(env):
    assert discover() == Ranks(0, 1, 0, 1, "single", None)


def test_torchrun_is_taken_at_its_word(env):
    for name, value in zip(NAMES, ("3", "8", "1", "2", "host", "29500"), strict=False):
        env.setenv(name, value)
    assert discover() == Ranks(3, 8, 1, 2, "torchrun", "env://")
    env.delenv("MASTER_PORT")
    with pytest.raises(UserError, match="RANK is set, but not MASTER_PORT"):
        discover()


@pytest.mark.parametrize("name", ranks.MPI_VARIABLES)
def test_without_mpi4py_ranks_of_mpirun_do_not_train_alone(env, name):
    env.setenv(name, "2")
    real_import = builtins.__import__

    def no_mpi(module, *args, **kwargs):
        if module == "mpi4py":
            raise ImportError("none here")
        return real_import(module, *args, **kwargs)

    env.setattr(builtins, "__import__", no_mpi)
    env.delitem(sys.modules, "mpi4py", raising=False)
    with pytest.raises(UserError, match=r"mpi4py cannot be imported \(none here\): pip install 'flashdist\[mpi\]'"):
        discover()


def test_tasks_of_srun_do_not_train_alone(env):
    env.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UserError, match="srun started 4 tasks without torchrun"):
        discover()
    env.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert discover().size == 1


def test_devices(monkeypatch):
    assert choose_device(Ranks(), "cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(Ranks(), "auto") == torch.device("cpu")
    with pytest.raises(UserError, match="torch sees no GPU"):
        choose_device(Ranks(), "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device(Ranks(5, 8, 1, 2), "auto") == torch.device("cuda", 1) == chosen[0]
    with pytest.raises(UserError, match="4 ranks on a machine with 2 GPUs"):
        choose_device(Ranks(2, 4, 2, 4), "auto")


def test_a_single_process_gets_a_group_and_gives_it_back():
    with connected(Ranks(), torch.device("cpu"), 1.0):
        assert dist.get_world_size() == 1
        assert any_rank(True)
        assert not any_rank(False)
        raise_together(None)
        with pytest.raises(UserError, match=r"^mistake$"):
            raise_together(UserError("mistake"))
    assert not dist.is_initialized()


def agree(rank: int, size: int) -> tuple[bool, bool, str]:
    try:
        raise_together(UserError("mine") if rank else None)
    except UserError as error:
        return any_rank(rank == 1), any_rank(False), str(error)
    return False, False, ""


def test_ranks_agree_on_flags_and_errors():
    assert run_ranks(agree, 2) == [(True, False, "rank 1: mine")] * 2


LEAVES = """
import atexit, threading, time, ranks
class Held:
    def __del__(self):
        print("cleaned up")
held = Held()
atexit.register(print, "hooks ran")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread ended"))).start()
print("run", end=" ")
ranks.leave(3)
"""


def test_a_process_leaves_with_its_code_and_output_but_without_pythons_clean_up():
    launch = Path(ranks.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", LEAVES], cwd=launch, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "run thread ended\nhooks ran\n"), done.stderr
