"""A script without what it needs ends with one line that says how to install it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A program that cannot import the module, as if it were not installed.
WITHOUT = """
import runpy, sys
from importlib import machinery
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = lambda name, *rest: None if name == {module!r} else find(name, *rest)
sys.argv = [{script!r}, "--help"]
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "module", "line"),
    [
        ("launch/pretrain.py", "yaml", "error: yaml cannot be imported: pip install -e '.[demo]'\n"),
        (
            "launch/finetune.py",
            "transformers",
            "error: transformers cannot be imported: pip install -e '.[finetune]'\n",
        ),
        ("flashdist/__main__.py", "typer", "flashdist: the command needs typer: pip install 'flashdist[cli]'\n"),
    ],
    ids=["pretrain", "finetune", "command"],
)
def test_what_is_missing_is_one_line(script, module, line):
    path = ROOT / script
    folder = path.parent if path.parent.name == "launch" else ROOT
    program = WITHOUT.format(module=module, script=str(path), folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
