"""Result files of the quality experiments: JSON with the same head for all of them."""

from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]
FOLDER = Path(__file__).parent.parent / "results"


def head(experiment: str, device: str = "cpu") -> Result:
    """What every result file begins with."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"experiment": experiment, "date": date, "device": name, "torch": torch.__version__, "commit": commit()}


def commit() -> str:
    """The checked-out commit, with a plus behind it where tracked files differ from it."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(result: Result, path: Path) -> None:
    """Write a result whole or not at all: a run may be stopped at any time. NaN and infinities become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_plain(result), indent=1) + "\n")
    os.replace(part, path)


def read(path: Path) -> Result:
    """Read a result file."""
    result: Result = json.loads(path.read_text())
    if "experiment" not in result:
        raise ValueError(f"{path} is not the result of a quality experiment")
    return result


def default_path(experiment: str, device: str = "cpu") -> Path:
    """Where an experiment's result lies if no other place is named."""
    return FOLDER / f"quality-{experiment}-{device}.json"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
