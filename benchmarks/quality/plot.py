"""The plot of a pretraining result: paired differences at the end, and of the training loss on the way."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into a file, also where there is no display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.quality import results
from benchmarks.quality.pairs import Run, differences, pairs

COLOURS = {
    "adamw_again": "#969696", "flashadamw": "#08519c", "flashadamw_32": "#6baed6", "flashoptim": "#e6550d",
    "bf16_master": "#41b6a6", "bf16": "#252525", "states_flashdist": "#3182bd", "states_nearest": "#9ecae1",
    "states_flashoptim": "#fdae6b", "linear8": "#c994c7", "flashlion": "#756bb1",
}  # fmt: skip
LIMIT = 0.002
SHOWN = 1.2 * LIMIT
SMOOTH = 15  # steps of a moving mean
ON_THE_WAY = ("adamw_again", "flashadamw", "flashoptim", "bf16_master")


def at_the_end(axes: Axes, runs: list[Run], beta2: float) -> None:
    """One row an arm: each pair as a dot, the mean with its standard error as a bar; the far ones are written."""
    found = [d for d in differences(runs) if d.beta2 == beta2]
    for y, d in enumerate(found):
        colour = COLOURS.get(d.arm, "#000000")
        axes.plot(d.values, [y] * len(d.values), "o", color=colour, alpha=0.5, markersize=5)
        if d.values and abs(d.mean) > SHOWN:
            side, align = (SHOWN, "right") if d.mean > 0 else (-SHOWN, "left")
            axes.text(side, y, f"{d.mean:+.4f}, off the scale", ha=align, va="center", color=colour)
        elif d.values:
            axes.errorbar(d.mean, y, xerr=d.error or 0.0, fmt="|", color=colour, markersize=16, capsize=4, linewidth=2)
    axes.axvspan(-LIMIT, LIMIT, color="#e5f5e0", zorder=0)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(found)), [d.arm for d in found])
    axes.invert_yaxis()
    axes.set_xlim(-1.05 * SHOWN, 1.05 * SHOWN)
    axes.set_xlabel("validation loss - AdamW's (Lion's for flashlion), same batches")
    axes.set_title(f"beta2 {beta2}: each pair, mean ± standard error; green: ±{LIMIT}")


def on_the_way(axes: Axes, runs: list[Run], beta2: float) -> None:
    """The moving mean of the paired training loss, mean over the pairs."""
    for arm in ON_THE_WAY:
        found = pairs(runs, arm, beta2)
        if not found:
            continue
        gaps = [[a - b for a, b in zip(r["curve"], other["curve"], strict=True)] for r, other in found]
        mean = [sum(column) / len(column) for column in zip(*gaps, strict=True)]
        smooth = [sum(mean[i : i + SMOOTH]) / SMOOTH for i in range(len(mean) - SMOOTH + 1)]
        axes.plot(range(SMOOTH, len(mean) + 1), smooth, color=COLOURS[arm], label=f"{arm} ({len(found)})")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("step of the branch")
    axes.set_ylabel("training loss - AdamW's")
    axes.set_title(f"beta2 {beta2}: on the way, mean over pairs and {SMOOTH} steps")
    axes.legend(frameon=False, fontsize=8)


def plot(result: results.Result, path: Path) -> Path:
    """Draw a pretraining result into `path` and return it."""
    betas = sorted({r["beta2"] for r in result["runs"]})
    figure, axes = plt.subplots(len(betas), 2, figsize=(15, 4.4 * len(betas)), squeeze=False, layout="constrained")
    for row, beta2 in zip(axes, betas, strict=True):
        at_the_end(row[0], result["runs"], beta2)
        on_the_way(row[1], result["runs"], beta2)
    figure.suptitle(f"{result['experiment']}, {result['device']}, torch {result['torch']}, {result['date']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
