"""The code of docs/fsdp2.md runs, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import run_ranks

DOCUMENT = Path(__file__).parents[2] / "docs" / "fsdp2.md"


def run_blocks(rank: int, world_size: int, blocks: list[str], path: str) -> tuple[bool, bool]:
    names: dict[str, Any] = {"device_type": "cpu", "world_size": world_size, "path": path}
    for block in blocks:
        exec(compile(block, str(DOCUMENT), "exec"), names)
    stepped = names["master"].dtype == torch.float32 and torch.isfinite(names["loss"]).item()
    return stepped, len(names["opt"].state) == 2


def test_every_block_runs(tmp_path: Path):
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    assert run_ranks(run_blocks, 2, blocks, str(tmp_path / "checkpoint")) == [(True, True)] * 2
