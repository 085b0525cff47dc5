"""The scripts of docs/recipes/ train with our optimizer, save, and go on with the losses of a run that was not stopped.

Each is run with the real library, as a process of its own (two, where it is for several ranks).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.recipe import STEPS, forget_the_end

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.py"))
ON_RANKS = {"torchrun_fsdp2", "deepspeed_json"}


def run(script: Path, folder: Path, *, twice: bool = False) -> list[dict[str, Any]]:
    launcher = ["-m"]
    if script.stem in ON_RANKS:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    arguments = [str(script), str(folder / "found.json"), *(["--twice"] if twice else [])]
    done = subprocess.run(
        [sys.executable, *launcher, "tests.support.recipe", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("script", RECIPES, ids=lambda script: script.stem)
def test_a_recipe_trains_and_goes_on(script, tmp_path):
    if script.stem in ON_RANKS:
        (whole,) = run(script, tmp_path)
        forget_the_end(tmp_path / "runs" / script.stem)
        (resumed,) = run(script, tmp_path)
    else:
        whole, resumed = run(script, tmp_path, twice=True)

    losses = [whole["losses"][str(step)] for step in range(1, STEPS + 1)]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    second_half = {str(step): whole["losses"][str(step)] for step in range(STEPS // 2 + 1, STEPS + 1)}
    assert {step: loss for step, loss in resumed["losses"].items() if step in second_half} == second_half
    if script.stem == "deepspeed_json":  # which calls a step for each of its partitions
        assert resumed["losses"].keys() == second_half.keys()
    else:
        assert (whole["steps"], resumed["steps"]) == (STEPS, STEPS // 2)

    for found in (whole, resumed):
        assert found["class"] == "FlashAdamW"
        held = found["bytes"]
        assert held["weights"] == 2 * held["parameters"]
        assert held["corrections"] + held["moments"] + held["scales"] < 4 * held["parameters"]  # AdamW has 8 or more


def test_every_recipe_is_listed_with_its_command():
    page = (ROOT / "docs" / "recipes" / "README.md").read_text(encoding="utf-8")
    assert {script.name for script in RECIPES} == set(re.findall(r"\]\((\w+\.py)\)", page))
    for script in RECIPES:
        command = re.search(r"^    (.*?docs/recipes/\w+\.py)", script.read_text(encoding="utf-8"), re.MULTILINE)
        assert command, f"{script.name} does not say how it is run"
        assert f"`{command.group(1)}`" in page
