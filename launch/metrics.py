"""What a run says: records in a JSONL file, and a progress bar.

Each line of `metrics.jsonl` is an object with a `step` (finished steps) and either

    loss, lr, norm, tokens, tokens_per_second, memory     a training step: mean loss of its global batch, the gradient
                                                          norm before clipping, tokens so far, peak bytes of rank 0
    eval_loss                                             on the held-out text
    started                                               ranks, strategy, versions, and the checkpoint resumed from
    saved                                                 the checkpoint's folder
    bytes                                                 by kind, over all ranks, with `parameters` and `ranks`
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Where the output is no terminal, at most one line in this many seconds.
QUIET_SECONDS = 10.0


class Reporter:
    """Writes records and shows progress; on ranks other than 0 it does neither."""

    def __init__(self, path: Path, *, active: bool, total: int, console: Console | None = None) -> None:
        self.active = active
        if not active:
            return
        self.file = open(path, "a+b")  # noqa: SIM115 - closed by __exit__
        self._end_broken_line()
        self.console = console or Console()
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("", total=total, text="")
        self.total = total
        self.said_at = -QUIET_SECONDS

    def _end_broken_line(self) -> None:
        """A process that was killed may have left half a line."""
        if self.file.tell():
            self.file.seek(-1, 2)
            if self.file.read(1) != b"\n":
                self.file.write(b"\n")

    def __enter__(self) -> Reporter:
        if self.active:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            self.progress.stop()
            self.file.close()

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a line; it is with the operating system when this returns."""
        if self.active:
            self.file.write(json.dumps({"step": step, **values}).encode() + b"\n")
            self.file.flush()

    def train_step(self, step: int, values: Mapping[str, float]) -> None:
        """A record of a training step, shown too."""
        if not self.active:
            return
        self.record(step, values)
        memory = values["memory"] / 2**30
        text = f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s  {memory:.2f} GiB"
        self.progress.update(self.task, completed=step, text=text)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self.said_at >= QUIET_SECONDS or step == self.total):
            self.console.print(f"step {step} of {self.total}  {text}")
            self.said_at = now

    def say(self, text: str) -> None:
        """A line of text, above the progress bar."""
        if self.active:
            self.console.print(text, markup=False, highlight=False)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run in order, as if it had never been interrupted: what a resume did again stands once."""
    records: list[dict[str, Any]] = []
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:  # half a line, left by a process that was killed
                continue
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                continue
            if "started" in record:
                records = [r for r in records if r["step"] <= record["step"]]
            records.append(record)
    return records
