"""docs/figures.py still draws what docs/figures holds."""

from __future__ import annotations

import runpy
from pathlib import Path

import matplotlib.image

DOCS = Path(__file__).parent.parent / "docs"


def test_the_figures_are_drawn(tmp_path):
    """The committed pictures have its size; other releases of matplotlib and its fonts give other pixels."""
    runpy.run_path(str(DOCS / "figures.py"))["main"](tmp_path)
    committed = {path.name for path in (DOCS / "figures").glob("*.png")}
    assert {path.name for path in tmp_path.iterdir()} == committed == {"split.png", "states.png"}
    for name in committed:
        drawn, kept = (matplotlib.image.imread(folder / name) for folder in (tmp_path, DOCS / "figures"))
        assert drawn.shape == kept.shape
        assert ((drawn - kept) ** 2).mean() < 0.02
