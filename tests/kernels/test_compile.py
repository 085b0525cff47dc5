"""The kernels compile for NVIDIA and AMD GPUs on a machine without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TARGETS = ["sm_80", "sm_90", "gfx942"]


@pytest.mark.timeout(400)
def test_all_kernels_compile_for_every_target():
    # One test, so that the compilers run side by side and once, however the tests are distributed.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_kernels"]
    running = {
        name: subprocess.Popen(
            [*command, name], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in TARGETS
    }
    try:
        for name, process in running.items():
            output, _ = process.communicate()
            assert process.returncode == 0, f"{name}: {output[-4000:]}"
            assert f"kernels for {name}" in output
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def test_kernels_are_compiled_side_by_side_before_their_first_launch(tmp_path: Path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_side_by_side"]
    done = subprocess.run(
        command, cwd=ROOT, env={**env, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "nothing was compiled twice" in done.stdout
