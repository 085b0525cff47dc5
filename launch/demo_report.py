"""What the demo shows at its end: a table, and a picture of both loss curves and both memory bars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from curves import smooth
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

# The kinds of memory that `flashdist.memory` tells apart, each with its colour in the picture, as the bars are stacked.
KINDS = {
    "weights": "#1e3a5f",
    "corrections": "#c2410c",
    "moments": "#3b82a0",
    "scales": "#e0a458",
    "steps": "#000000",
    "derived": "#000000",
    "gradients": "#b8c4ce",
}
REFERENCE_COLOUR, FLASH_COLOUR = "#9aa5b1", "#c2410c"


@dataclass
class Run:
    """What one training run left behind.

    Attributes:
        name: in the table and the picture.
        losses: of each step.
        validation_loss: at the end.
        bytes_per_parameter: by kind, summed over ranks.
        ranks: how many there were when the bytes were counted.
        checkpoint_bytes: of a checkpoint, per parameter.
        tokens_per_second: the median over the steps on those ranks.
        resumed_at: the step after which the run was moved to one rank, if it was.
    """

    name: str
    losses: list[float]
    validation_loss: float
    bytes_per_parameter: dict[str, float]
    ranks: int
    checkpoint_bytes: float
    tokens_per_second: float
    resumed_at: int | None = None

    @property
    def total_bytes(self) -> float:
        """Bytes per parameter of all kinds together."""
        return sum(self.bytes_per_parameter.values())


def relative_difference(reference: Run, flash: Run) -> float:
    """How far the second run's validation loss is above the first's, as a share of it."""
    return flash.validation_loss / reference.validation_loss - 1


def table(reference: Run, flash: Run) -> Table:
    """Bytes per parameter by kind, validation losses and speed, one column a run."""
    rows = Table(title="Memory kept from step to step, bytes per parameter, all ranks together", title_justify="left")
    rows.add_column("")
    rows.add_column(reference.name, justify="right")
    rows.add_column(flash.name, justify="right")
    for kind in KINDS:
        rows.add_row(kind, f"{reference.bytes_per_parameter[kind]:.3f}", f"{flash.bytes_per_parameter[kind]:.3f}")
    share = flash.total_bytes / reference.total_bytes
    rows.add_row(
        "total",
        f"{reference.total_bytes:.3f}",
        f"{flash.total_bytes:.3f} ({share:.0%})",
        style="bold",
    )
    rows.add_row(
        f"on each of {flash.ranks} ranks",
        f"{reference.total_bytes / reference.ranks:.3f}",
        f"{flash.total_bytes / flash.ranks:.3f}",
        end_section=True,
    )
    share = flash.checkpoint_bytes / reference.checkpoint_bytes
    rows.add_row(
        "checkpoint, bytes per parameter",
        f"{reference.checkpoint_bytes:.2f}",
        f"{flash.checkpoint_bytes:.2f} ({share:.0%})",
    )
    rows.add_row(
        "held-out loss",
        f"{reference.validation_loss:.4f}",
        f"{flash.validation_loss:.4f} ({relative_difference(reference, flash):+.2%})",
    )
    rows.add_row(
        f"tokens per second, {flash.ranks} ranks",
        f"{reference.tokens_per_second:,.0f}",
        f"{flash.tokens_per_second:,.0f}",
    )
    return rows


def plot(reference: Run, flash: Run, path: Path) -> None:
    """Writes the picture as a PNG to `path`, making its folder if need be."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1), height_ratios=(3, 1))
    losses = figure.add_subplot(grid[0, 0])
    _plot_losses(losses, reference, flash)
    _plot_difference(figure.add_subplot(grid[1, 0], sharex=losses), reference, flash)
    memory = figure.add_subplot(grid[:, 1])
    _plot_memory(memory, [reference, flash])
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png")


def _plot_losses(axes: Axes, reference: Run, flash: Run) -> None:
    # The reference is wide and light, so that both curves can be seen where they coincide.
    for run, colour, width in ((reference, REFERENCE_COLOUR, 7.0), (flash, FLASH_COLOUR, 1.8)):
        label = f"{run.name}: held-out loss {run.validation_loss:.3f}"
        steps = range(1, len(run.losses) + 1)
        axes.plot(steps, smooth(run.losses), color=colour, linewidth=width, label=label)
        if run.resumed_at is not None:
            axes.axvline(run.resumed_at, color=colour, linewidth=1, linestyle=":")
            note = f"saved on {run.ranks} ranks,\nresumed on 1"
            place = (run.resumed_at, 0.7)
            axes.annotate(note, place, (6, 0), xycoords=axes.get_xaxis_transform(), textcoords="offset points")
    axes.set_title("Same first weights, same batches", loc="left", fontweight="bold")
    axes.set_ylabel("training loss, smoothed (nats per byte)")
    axes.legend(frameon=False, loc="upper right")
    axes.tick_params(labelbottom=False)
    axes.grid(alpha=0.25)


def _plot_difference(axes: Axes, reference: Run, flash: Run) -> None:
    pairs = zip(smooth(reference.losses), smooth(flash.losses), strict=True)
    difference = [100 * (b / a - 1) for a, b in pairs]
    limit = max(1.0, 1.2 * max(map(abs, difference)))
    axes.axhline(0, color=REFERENCE_COLOUR, linewidth=2)
    axes.plot(range(1, len(difference) + 1), difference, color=FLASH_COLOUR, linewidth=1.8)
    axes.set_ylim(-limit, limit)
    axes.set_ylabel("difference (%)")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)


def _plot_memory(axes: Axes, runs: list[Run]) -> None:
    names = [run.name for run in runs]
    bottoms = [0.0] * len(runs)
    for kind, colour in KINDS.items():
        heights = [run.bytes_per_parameter[kind] for run in runs]
        if max(heights) < 0.05:  # step counts and fingerprints: too thin to be seen
            continue
        axes.bar(names, heights, bottom=bottoms, color=colour, label=kind, width=0.6)
        for place, (bottom, height) in enumerate(zip(bottoms, heights, strict=True)):
            if height > 0.5:  # thinner parts have no room for a figure
                text_colour = "black" if kind == "gradients" else "white"
                axes.text(place, bottom + height / 2, f"{height:.3g}", ha="center", va="center", color=text_colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, run in enumerate(runs):
        axes.text(place, run.total_bytes + 0.2, f"{run.total_bytes:.2f}", ha="center", fontweight="bold", fontsize=13)
    axes.set_title("Memory kept from step to step, all ranks", loc="left", fontweight="bold")
    axes.set_ylabel("bytes per parameter")
    axes.set_ylim(0, 1.12 * max(bottoms))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="upper right")
