"""What the step was to reach, and whether a result reaches it.

Usage: python -m benchmarks.verdict RESULT.json

Shares of the copy bandwidth and limits in ms are of device time unless they say wall. "x faster" compares `event_ms`,
the larger of device and host time: what a loop that does not wait for the step would see. The exit code is 0 if
everything is reached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.sets import numel

Figure = Callable[["Rows"], float]


class Rows:
    """Look-up of a figure by set and optimizer; KeyError where it was not measured."""

    def __init__(self, result: report.Result) -> None:
        self.copy = result["copy_bytes_per_s"]
        self.rows = {(r["set"], r["optimizer"]): r for r in result["rows"]}

    def get(self, set_name: str, optimizer: str, column: str) -> float:
        """One cell of the result."""
        value = self.rows[set_name, optimizer][column]
        if value is None:
            raise KeyError(column)
        return value


@dataclass(frozen=True)
class Target:
    """One line: a figure and the bound it has to keep."""

    text: str
    figure: Figure
    bound: float
    at_least: bool

    def reached(self, figure: float) -> bool:
        """Whether the figure keeps the bound."""
        return figure >= self.bound if self.at_least else figure <= self.bound


def share(set_name: str, optimizer: str, bound: float) -> Target:
    """At least this share of the copy bandwidth."""
    text = f"{set_name}: {optimizer}, share of copy bandwidth"
    return Target(text, lambda rows: rows.get(set_name, optimizer, "fraction_of_copy"), bound, True)


def faster(set_name: str, other: str, bound: float) -> Target:
    """flashdist_adamw at least this many times faster than another optimizer."""

    def figure(rows: Rows) -> float:
        return rows.get(set_name, other, "event_ms") / rows.get(set_name, "flashdist_adamw", "event_ms")

    return Target(f"{set_name}: flashdist_adamw, times faster than {other}", figure, bound, True)


def at_most(set_name: str, column: str, bound: float) -> Target:
    """flashdist_adamw takes at most this many milliseconds."""
    text = f"{set_name}: flashdist_adamw, {column}"
    return Target(text, lambda rows: rows.get(set_name, "flashdist_adamw", column), bound, False)


def clip_over_floor(rows: Rows) -> float:
    """Clip and step against moving 14.4 bytes per parameter at 0.90 of the copy bandwidth."""
    measured = rows.get("llama1.4b", "flashdist_adamw_clip", "device_ms")
    floor_ms = 14.4 * numel("llama1.4b") / (0.90 * rows.copy) * 1e3
    return measured / floor_ms


LARGE = ("flat1b", "llama1.4b")
TARGETS = [
    *(share(s, f"flashdist_{rule}", 0.90) for s in LARGE for rule in ("adamw", "lion", "sgd")),
    *(faster(s, other, 2.3) for s in LARGE for other in ("torch_fused_fp32", "flashoptim")),
    share("gpt2_124m", "flashdist_adamw", 0.75),
    faster("gpt2_124m", "torch_fused_fp32", 1.9),
    faster("gpt2_124m", "flashoptim", 10),
    at_most("resnet50", "device_ms", 0.13),
    at_most("resnet50", "wall_ms", 0.25),
    at_most("tiny2000", "device_ms", 0.35),
    at_most("tiny2000", "wall_ms", 1.5),
    Target("llama1.4b: clip + step, device time over 14.4 B/param at 0.90 of copy", clip_over_floor, 1.15, False),
]


def judge(result: report.Result) -> list[tuple[Target, float | None]]:
    """Each target with its figure, None where the result does not hold what it needs."""
    rows = Rows(result)
    figures: list[tuple[Target, float | None]] = []
    for target in TARGETS:
        try:
            figures.append((target, target.figure(rows)))
        except KeyError:
            figures.append((target, None))
    return figures


def main(argv: list[str]) -> int:
    """Prints the verdict; returns 0 if everything was measured and reached."""
    if len(argv) != 1:
        print(__doc__)
        return 2
    result = report.read(Path(argv[0]))
    table = Table(title=f"{result['device']}, {result['date']}, commit {result['commit']}")
    for name in ("target", "bound", "figure", ""):
        table.add_column(name, justify="left" if name == "target" else "right")
    judged = judge(result)
    for target, figure in judged:
        bound = f"{'>=' if target.at_least else '<='} {target.bound:g}"
        if figure is None:
            table.add_row(target.text, bound, "-", "not measured")
        else:
            table.add_row(target.text, bound, f"{figure:.3f}", "reached" if target.reached(figure) else "NOT reached")
    Console(width=120).print(table)
    return 0 if all(figure is not None and target.reached(figure) for target, figure in judged) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
