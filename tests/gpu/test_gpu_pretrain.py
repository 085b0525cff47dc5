"""launch/pretrain.py on a GPU: killed and resumed, it has the losses of a run that was left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from metrics import read_metrics

from tests.support.pretraining import losses, overrides

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_killed_and_resumed_on_a_gpu_gives_the_losses_of_an_unbroken_run(strategy: str, tmp_path: Path):
    defaults = tmp_path / "defaults.yaml"
    defaults.touch()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if strategy != "single":  # as torchrun sets them for its only worker
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}

    def start(folder: str, *more: str) -> subprocess.Popen[str]:
        arguments = overrides(
            tmp_path, "train.steps=60", "train.micro_batch=6", "run.save_every=7", "train.deterministic=true",
            f"parallel.device={DEVICE}", f"parallel.strategy={strategy}", f"run.folder={tmp_path / folder}",
        )  # fmt: skip
        command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), str(defaults), *arguments, *more]
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=out, text=True)

    alone = start("alone")
    output, _ = alone.communicate(timeout=170)
    assert alone.returncode == 0, output
    unbroken = losses(read_metrics(tmp_path / "alone" / "metrics.jsonl"))
    assert sorted(unbroken) == list(range(1, 61))
    assert unbroken[60] < 0.9 * unbroken[1]

    metrics = tmp_path / "run" / "metrics.jsonl"
    killed = start("run")
    while killed.poll() is None and not (metrics.exists() and max(losses(read_metrics(metrics)), default=0) >= 12):
        time.sleep(0.005)
    killed.kill()
    killed.communicate()
    part = losses(read_metrics(metrics))
    assert part
    assert max(part) < 60
    resumed = start("run", "--resume", "auto")
    output, _ = resumed.communicate(timeout=170)
    assert resumed.returncode == 0, output
    assert losses(read_metrics(metrics)) == unbroken
