"""Folders that a DeepSpeed engine has saved under FlashAdamW."""

from __future__ import annotations

from pathlib import Path

from flashdist.convert.contents import Contents


def read_deepspeed(path: Path) -> Contents:
    raise ValueError(f"{path}: not yet")
