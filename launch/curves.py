"""Draws the curves of one or more runs: loss, held-out loss, learning rate and speed.

python launch/curves.py runs/a runs/b --out curves.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from config import EXIT_CODE, UserError
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from metrics import read_metrics

COLOURS = ("#c2410c", "#1e3a5f", "#3b82a0", "#e0a458", "#6b7280", "#7c3aed")

Records = Sequence[Mapping[str, Any]]


def series(records: Records, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have a key."""
    chosen = [record for record in records if key in record]
    return [record["step"] for record in chosen], [record[key] for record in chosen]


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """An exponential moving average, divided by the sum of its weights so that it starts at the first value."""
    averages, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        averages.append(total / norm)
    return averages


def draw(runs: Mapping[str, Records], path: Path) -> None:
    """Writes a PNG.

    Args:
        runs: the records of each run, by the name that the legend shows.
        path: the picture; its folder is made if need be.
    """
    figure = Figure(figsize=(10, 7), layout="constrained")
    losses, rates, speeds = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1, 1))
    for place, (name, records) in enumerate(runs.items()):
        colour = COLOURS[place % len(COLOURS)]
        plot_losses(losses, records, name, colour)
        rates.plot(*series(records, "lr"), color=colour)
        steps, speed = series(records, "tokens_per_second")
        speeds.plot(steps, smooth(speed, 0.8), color=colour)
    losses.set_ylabel("loss (nats per token)")
    losses.legend(frameon=False, loc="upper right")
    rates.set_ylabel("learning rate")
    speeds.set_ylabel("tokens/s")
    speeds.set_ylim(bottom=0)
    speeds.set_xlabel("step")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png")


def plot_losses(axes: Axes, records: Records, name: str, colour: str) -> None:
    """Every loss faintly, their average over it, the held-out loss as points, and a mark where a run was resumed."""
    steps, values = series(records, "loss")
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(values), color=colour, linewidth=1.8, label=f"{name}: training")
    steps, values = series(records, "eval_loss")
    if steps:
        axes.plot(
            steps, values, "o", color=colour, markeredgecolor="white", label=f"{name}: held out, {values[-1]:.3f}"
        )
    for record in records:
        if "started" in record and record["step"]:
            axes.axvline(record["step"], color=colour, linewidth=1, linestyle=":")


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the runs and writes the picture."""
    parser = argparse.ArgumentParser(description="Draw the curves of runs of launch/pretrain.py.")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="the picture (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        for run in options.runs:
            if not (run / "metrics.jsonl").is_file():
                raise UserError(f"{run} has no metrics.jsonl: give folders that launch/pretrain.py has written")
        draw({run.name: read_metrics(run / "metrics.jsonl") for run in options.runs}, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
