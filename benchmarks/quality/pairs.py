"""Paired differences: an arm's loss less its reference's, on the same start, beta2 and batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.arms import ARMS

Run = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """What the pairs of one arm at one beta2 say. `error` is the standard error of the mean, None for one pair."""

    arm: str
    beta2: float
    values: tuple[float, ...]
    lost: int  # runs whose loss is not a number

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else math.nan

    @property
    def error(self) -> float | None:
        n = len(self.values)
        if n < 2:
            return None
        return math.sqrt(sum((x - self.mean) ** 2 for x in self.values) / (n - 1) / n)


def pairs(runs: list[Run], arm: str, beta2: float) -> list[tuple[Run, Run]]:
    """(run of the arm, its reference) wherever both were made."""
    reference = {(r["start"], r["seed"]): r for r in runs if r["arm"] == ARMS[arm].reference and r["beta2"] == beta2}
    mine = [r for r in runs if r["arm"] == arm and r["beta2"] == beta2]
    return [(r, reference[r["start"], r["seed"]]) for r in mine if (r["start"], r["seed"]) in reference]


def difference(runs: list[Run], arm: str, beta2: float, key: str = "final_val_loss") -> Difference:
    """The paired differences of one arm in one of a run's losses."""
    found = [(r[key], reference[key]) for r, reference in pairs(runs, arm, beta2)]
    values = tuple(a - b for a, b in found if a is not None and b is not None)
    return Difference(arm, beta2, values, len(found) - len(values))


def differences(runs: list[Run], key: str = "final_val_loss") -> list[Difference]:
    """Of every arm that has a pair, in the order of the registry, beta2 by beta2."""
    out = [difference(runs, arm, b, key) for b in sorted({r["beta2"] for r in runs}) for arm in ARMS]
    return [d for d in out if (d.values or d.lost) and ARMS[d.arm].reference != d.arm]


def verdict(runs: list[Run], beta2: float, limit: float = 0.002) -> list[str]:
    """The issue's bounds in words: FlashAdamW against AdamW, and no further from it than flashoptim."""
    mine, theirs = difference(runs, "flashadamw", beta2), difference(runs, "flashoptim", beta2)
    if not mine.values:
        return [f"beta2 {beta2}: not measured"]
    within = abs(mine.mean) <= limit or (mine.error is not None and abs(mine.mean) <= 2 * mine.error)
    error = f" (standard error {mine.error:.5f})" if mine.error is not None else ""
    out = [
        f"beta2 {beta2}: FlashAdamW - AdamW = {mine.mean:+.5f}{error}, bound {limit} or two standard errors: "
        + ("**reached**" if within else "**not reached**")
    ]
    if theirs.values:
        nearer = abs(mine.mean) <= abs(theirs.mean)
        out.append(
            f"beta2 {beta2}: flashoptim - AdamW = {theirs.mean:+.5f}; FlashAdamW no further from AdamW: "
            + ("**reached**" if nearer else "**not reached**")
        )
    return out
