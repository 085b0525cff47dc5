"""The plot of a result: what each optimizer takes against torch's fused AdamW, and how near it comes to a copy.

Usage: python -m benchmarks.plot RESULT.json [PLOT.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into a file, also where there is no display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks import report
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.sets import SETS

BASELINE = "torch_fused_fp32"
COLOURS = {
    "flashdist_adamw": "#08519c",
    "flashdist_lion": "#3182bd",
    "flashdist_sgd": "#6baed6",
    "flashdist_adamw_clip": "#9ecae1",
    "flashdist_adamw_graph": "#41b6a6",
    "torch_fused_fp32": "#252525",
    "torch_fused_bf16": "#636363",
    "torch_foreach_fp32": "#969696",
    "flashoptim": "#e6550d",
    "bnb8": "#fdae6b",
    "torchao8": "#c994c7",
}
Table = dict[tuple[str, str], float]


def relative_times(result: report.Result) -> tuple[Table, str]:
    """Each row's time over the baseline's on the same set; plain milliseconds where the baseline was not measured."""
    times = {(r["set"], r["optimizer"]): r["event_ms"] or r["wall_ms"] for r in result["rows"]}
    sets = {name for name, _ in times}
    if all((name, BASELINE) in times for name in sets):
        return {key: ms / times[key[0], BASELINE] for key, ms in times.items()}, "time / torch fused AdamW fp32"
    return times, "ms a step"


def figure_text(value: float) -> str:
    """Two significant digits without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def bars(axes: Axes, values: Table, label: str, log: bool) -> None:
    """One group of bars for each set, one bar for each optimizer, its figure written above it."""
    sets = [name for name in SETS if any(key[0] == name for key in values)]
    names = [name for name in OPTIMIZERS if any(key[1] == name for key in values)]
    width = 0.86 / len(names)
    for i, name in enumerate(names):
        places = [(j, values[s, name]) for j, s in enumerate(sets) if (s, name) in values]
        if not places:
            continue
        x = [j + (i - (len(names) - 1) / 2) * width for j, _ in places]
        drawn = axes.bar(x, [v for _, v in places], width * 0.92, color=COLOURS[name], label=name, zorder=2)
        axes.bar_label(drawn, fmt=figure_text, fontsize=6, rotation=90, padding=2)
    axes.set_xticks(range(len(sets)), sets)
    axes.set_xlim(-0.5, len(sets) - 0.5)
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3, zorder=0)
    axes.margins(y=0.15)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def plot(result: report.Result, path: Path) -> Path:
    """Draws the result into `path` and returns it."""
    times, label = relative_times(result)
    fractions = {
        (r["set"], r["optimizer"]): r["fraction_of_copy"] for r in result["rows"] if r["fraction_of_copy"] is not None
    }
    panels = 2 if fractions else 1
    figure, axes = plt.subplots(panels, 1, figsize=(13, 4.6 * panels), squeeze=False, layout="constrained")
    top = axes[0][0]
    bars(top, times, label, log=True)
    if label.startswith("time"):
        top.axhline(1, color="black", linewidth=0.8, zorder=1)
    top.set_title(f"Optimizer step, {result['device']}, torch {result['torch']}, {result['date']} (lower is better)")
    top.legend(ncols=6, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    if fractions:
        bars(axes[1][0], fractions, "share of the copy bandwidth, device time", log=False)
        axes[1][0].axhline(1, color="black", linewidth=0.8, zorder=1)
        axes[1][0].set_title(
            f"Bytes a step must move, per second, against a copy ({result['copy_bytes_per_s'] / 1e12:.2f} TB/s; "
            "higher is better)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


if __name__ == "__main__":
    source = Path(sys.argv[1])
    print(plot(report.read(source), Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".png")))
