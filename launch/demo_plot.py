"""The demo's picture: both loss curves, their difference, and the memory of each run as stacked bars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

if TYPE_CHECKING:
    from demo import Run

matplotlib.use("Agg")  # writes files without a screen
from matplotlib import pyplot as plt  # noqa: E402  (after the choice of backend)
from matplotlib.axes import Axes  # noqa: E402

RUN_COLOURS = ("#9aa5b1", "#c2410c")
KIND_COLOURS = {
    "weights": "#1e3a5f",
    "corrections": "#c2410c",
    "moments": "#3b82a0",
    "scales": "#e0a458",
    "gradients": "#b8c4ce",
}


def smooth(values: list[float], weight: float = 0.95) -> list[float]:
    """An exponential moving average that starts without bias."""
    result, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(total / norm)
    return result


def plot_losses(axes: Axes, runs: list[Run]) -> None:
    """Smoothed training losses, the reference wide and light so that both can be seen where they coincide."""
    for run, colour, width in zip(runs, RUN_COLOURS, (6, 1.8), strict=True):
        axes.plot(smooth(run.losses), color=colour, linewidth=width, label=f"{run.name}: validation {run.validation_loss:.4f}")
    axes.set_ylabel("training loss, smoothed (nats per byte)")
    axes.legend(frameon=False, title="", loc="upper right")
    axes.tick_params(labelbottom=False)
    axes.grid(alpha=0.25)


def plot_difference(axes: Axes, runs: list[Run]) -> None:
    """How far the second curve is above the first, in percent."""
    reference, flash = (smooth(run.losses) for run in runs)
    difference = [100 * (b / a - 1) for a, b in zip(reference, flash, strict=True)]
    limit = max(1.0, 1.2 * max(map(abs, difference)))
    axes.axhline(0, color=RUN_COLOURS[0], linewidth=2)
    axes.plot(difference, color=RUN_COLOURS[1], linewidth=1.8)
    axes.set_ylim(-limit, limit)
    axes.set_ylabel("difference (%)")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)


def plot_memory(axes: Axes, runs: list[Run]) -> None:
    """Bytes per parameter, one stacked bar a run; kinds too thin for a label stand in the legend alone."""
    bottoms = [0.0] * len(runs)
    for kind, colour in KIND_COLOURS.items():
        heights = [run.bytes_per_parameter[kind] for run in runs]
        axes.bar([run.name for run in runs], heights, bottom=bottoms, color=colour, label=kind, width=0.6)
        for place, (bottom, height) in enumerate(zip(bottoms, heights, strict=True)):
            if height > 0.5:
                text = "black" if kind == "gradients" else "white"
                axes.text(place, bottom + height / 2, f"{height:.3g}", ha="center", va="center", color=text)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, total in enumerate(bottoms):
        axes.text(place, total + 0.2, f"{total:.2f}", ha="center", va="bottom", fontweight="bold", fontsize=13)
    axes.set_ylabel("bytes per parameter")
    axes.set_ylim(0, 1.12 * max(bottoms))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="upper right")


def plot(runs: list[Run], path: Path) -> None:
    """Draws the runs (reference first) and writes a PNG to `path`."""
    figure = plt.figure(figsize=(12, 6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1), height_ratios=(3, 1))
    losses = figure.add_subplot(grid[0, 0])
    plot_losses(losses, runs)
    plot_difference(figure.add_subplot(grid[1, 0], sharex=losses), runs)
    memory = figure.add_subplot(grid[:, 1])
    plot_memory(memory, runs)
    losses.set_title("Same weights, same batches", loc="left", fontweight="bold")
    memory.set_title("Kept from step to step", loc="left", fontweight="bold")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
