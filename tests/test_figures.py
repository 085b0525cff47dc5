"""docs/figures.py still draws what docs/figures holds."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import matplotlib.image

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = 22


def coarse(path: Path) -> Any:
    """The means of blocks: other releases of matplotlib draw other pixels, and shift text by some."""
    pixels = matplotlib.image.imread(path)[:, :, :3]
    rows, columns = (size // BLOCK for size in pixels.shape[:2])
    blocks = pixels[: rows * BLOCK, : columns * BLOCK].reshape(rows, BLOCK, columns, BLOCK, 3)
    return blocks.mean(axis=(1, 3))


def test_the_figures_are_drawn(tmp_path):
    runpy.run_path(str(DOCS / "figures.py"))["main"](tmp_path)
    committed = {path.name for path in (DOCS / "figures").glob("*.png")}
    assert {path.name for path in tmp_path.iterdir()} == committed == {"split.png", "states.png"}
    for name in committed:
        drawn, kept = (coarse(folder / name) for folder in (tmp_path, DOCS / "figures"))
        assert drawn.shape == kept.shape
        # A shift by some pixels makes 0.0004 of it, a blank page 0.016 and more.
        assert ((drawn - kept) ** 2).mean() < 0.002, f"{name} shows something else: run python docs/figures.py"
