"""The result file, and the table of it for a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.optimizers import OPTIMIZERS

Result = dict[str, Any]

TOP_LEVEL = ("date", "device", "torch", "triton", "commit", "copy_bytes_per_s", "rows", "skipped", "gate")
ROW = (
    *("set", "optimizer", "device_ms", "wall_ms", "event_ms", "bytes_per_param", "fraction_of_copy", "peak_bytes"),
    *(
        "sustained_ms",
        "temporary_bytes",
        "wall_new_grads_ms",
        "bytes_moved_per_param",
        "device_queue_full",
        "numel",
        "iters",
    ),
)


def finish_row(row: Result, copy_bytes_per_s: float | None) -> Result:
    """Adds what follows from the measurement: the share of the copy bandwidth. Returns the keys of `ROW` in order."""
    moved = OPTIMIZERS[row["optimizer"]].bytes_moved
    row = {**row, "bytes_moved_per_param": moved, "fraction_of_copy": None}
    if row["device_ms"] and copy_bytes_per_s:
        row["fraction_of_copy"] = moved * row["numel"] / (row["device_ms"] * 1e-3) / copy_bytes_per_s
    return {key: row[key] for key in ROW}


def write(result: Result, path: Path) -> None:
    """Writes the result as JSON, one row a line's worth of indentation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(path: Path) -> Result:
    """Reads a result file; raises ValueError for a file that is not one."""
    result = json.loads(path.read_text())
    for row in result.get("rows", []):
        row.setdefault("sustained_ms", None)  # results from before it was measured
    missing = [key for key in TOP_LEVEL if key not in result]
    missing += sorted({key for row in result.get("rows", []) for key in ROW if key not in row})
    if missing:
        raise ValueError(f"{path} is not a step benchmark's result: it lacks {', '.join(missing)}")
    return result


def ms(value: float | None, mark: str = "") -> str:
    """A time for the table."""
    return "-" if value is None else f"{value:.3f}{mark}"


def print_table(result: Result, console: Console | None = None) -> None:
    """Prints all rows, set by set."""
    console = console or Console(width=140)
    copy = result["copy_bytes_per_s"]
    speed = f", copy {copy / 1e12:.3f} TB/s" if copy else ""
    table = Table(title=f"{result['device']}{speed}, torch {result['torch']}, commit {result['commit']}")
    for name in ("set", "optimizer"):
        table.add_column(name)
    for name in (
        "device ms",
        "wall ms",
        "new grads",
        "event ms",
        "sustained",
        "of copy",
        "state B/param",
        "peak GiB",
        "temp MiB",
    ):
        table.add_column(name, justify="right")
    last = None
    for row in result["rows"]:
        if last not in (None, row["set"]):
            table.add_section()
        fraction, last = row["fraction_of_copy"], row["set"]
        table.add_row(
            *(row["set"], row["optimizer"]),
            ms(row["device_ms"], "" if row["device_queue_full"] else "*"),
            *(ms(row["wall_ms"]), ms(row["wall_new_grads_ms"]), ms(row["event_ms"]), ms(row["sustained_ms"])),
            "-" if fraction is None else f"{fraction:.3f}",
            f"{row['bytes_per_param']:.3f}",
            f"{row['peak_bytes'] / 2**30:.2f}",
            f"{row['temporary_bytes'] / 2**20:.2f}",
        )
    console.print(table)
    if any(row["device_queue_full"] is False for row in result["rows"]):
        console.print("* more launches than the queue holds: launch gaps are in the device time")
    for skip in result["skipped"]:
        console.print(f"skipped {skip['optimizer']} on {skip['set'] or 'all sets'}: {skip['reason']}", markup=False)
