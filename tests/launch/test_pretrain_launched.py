"""Runs as users start them: torchrun and mpirun, killed, stopped and resumed, against one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from metrics import read_metrics

from tests.support.pretraining import losses, overrides, run_in_pool
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "pretrain.py"
BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
MPIRUN = [str(BIN / "mpirun"), "-n", "2", sys.executable]


DEEPSPEED = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port"]  # it means ranks, on a CPU too


LAUNCHERS = ("torch.distributed.run", "deepspeed.launcher.launch", str(BIN / "deepspeed"))


@contextmanager
def started(launcher: list[str], arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A launcher with its ranks; whatever is left of them at the end of the `with` is killed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    command = [*launcher, str(SCRIPT), *arguments]
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=out, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for left in [*psutil.Process(process.pid).children(recursive=True), process]:
                    left.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The two Python processes that train."""
    descendants = psutil.Process(launcher.pid).children(recursive=True)
    return [p for p in descendants if str(SCRIPT) in p.cmdline() and not any(m in p.cmdline() for m in LAUNCHERS)]


def wait_for_step(launcher: subprocess.Popen[str], metrics: Path, step: int) -> None:
    """Until the file has a training step of that number or a later one."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and launcher.poll() is None:
        if metrics.exists() and any(at >= step for at in losses(read_metrics(metrics))):
            return
        time.sleep(0.02)
    output = "" if launcher.poll() is None else launcher.communicate()[0]
    pytest.fail(f"step {step} was not reached:\n{output}")


@pytest.mark.timeout(400)
def test_killed_under_torchrun_stopped_under_mpirun_and_resumed_gives_the_losses_of_an_unbroken_run(tmp_path):
    steps = ["train.steps=40", "train.micro_batch=6", "run.save_every=7", "run.eval_sequences=0"]
    alone = overrides(tmp_path, f"run.folder={tmp_path / 'alone'}", *steps)
    unbroken = run_ranks(run_in_pool, 2, alone, None, None)[0].losses
    assert set(unbroken) == set(range(1, 41))

    folder = tmp_path / "run"
    arguments = overrides(tmp_path, f"run.folder={folder}", *steps)
    config = tmp_path / "defaults.yaml"
    config.touch()
    metrics = folder / "metrics.jsonl"
    moment = random.Random(time.time_ns())

    with started(TORCHRUN, [str(config), *arguments]) as launcher:
        wait_for_step(launcher, metrics, moment.randint(8, 20))
        time.sleep(0.1 * moment.random())
        moment.choice(ranks_of(launcher)).kill()
        output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 1, output
    killed = losses(read_metrics(metrics))
    assert killed == {step: unbroken[step] for step in killed}

    with started(MPIRUN, [str(config), *arguments, "--resume", "auto"]) as launcher:
        wait_for_step(launcher, metrics, max(killed) + moment.randint(1, 10))
        moment.choice(ranks_of(launcher)).send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 0, output
    assert "asked to stop: saved after step" in output
    stopped = losses(read_metrics(metrics))
    assert (folder / f"step-{max(stopped):08d}").is_dir()
    assert stopped == {step: unbroken[step] for step in stopped}
    assert len(stopped) > len(killed) - 7

    finished = run_ranks(run_in_pool, 2, arguments, "auto", None)[0]
    assert finished.losses == unbroken
    assert [p.name for p in sorted(folder.glob("step-*"))] == ["step-00000035", "step-00000040"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(400)
def test_killed_under_deepspeed_stopped_under_mpirun_and_resumed_under_torchrun_is_the_unbroken_run(tmp_path):
    """The same for parallel.strategy=deepspeed, ZeRO 2, whose checkpoints are DeepSpeed's."""
    zero2 = f"parallel.deepspeed_config={ROOT / 'configs' / 'deepspeed' / 'zero2.json'}"
    steps = ["train.steps=24", "train.micro_batch=6", "run.save_every=5", "run.eval_sequences=0"]
    settings = ["parallel.strategy=deepspeed", zero2, *steps]
    alone = overrides(tmp_path, f"run.folder={tmp_path / 'alone'}", *settings)
    unbroken = run_ranks(run_in_pool, 2, alone, None, None)[0].losses

    folder = tmp_path / "run"
    config = tmp_path / "defaults.yaml"
    config.touch()
    arguments = [str(config), *overrides(tmp_path, f"run.folder={folder}", *settings)]
    metrics = folder / "metrics.jsonl"

    with started([*DEEPSPEED, str(free_port())], arguments) as launcher:
        wait_for_step(launcher, metrics, 6)
        random.choice(ranks_of(launcher)).kill()
        output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode != 0, output
    killed = losses(read_metrics(metrics))
    assert killed == {step: unbroken[step] for step in killed}

    with started(MPIRUN, [*arguments, "--resume", "auto"]) as launcher:
        wait_for_step(launcher, metrics, max(killed) + 2)
        random.choice(ranks_of(launcher)).send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 0, output
    assert "asked to stop: saved after step" in output
    assert (folder / f"step-{max(losses(read_metrics(metrics))):08d}" / "run.json").is_file()

    with started(TORCHRUN, [*arguments, "--resume", "auto"]) as launcher:
        output, _ = launcher.communicate(timeout=90)
    assert launcher.returncode == 0, output
    assert losses(read_metrics(metrics)) == unbroken
