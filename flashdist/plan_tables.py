"""A plan as people read it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from flashdist.planner import GIB

_ROWS = (
    ("weights", "weights, 16 bits"),
    ("corrections", "corrections"),
    ("moments", "moments"),
    ("scales", "scales"),
    ("gradients", "gradients, at most"),
    ("gathered", "layers gathered from other ranks"),
    ("activations", "activations (estimated)"),
    ("logits", "logits (estimated)"),
    ("steady", "between two steps"),
    ("peak", "peak (estimated)"),
    ("limit", "a card's memory less reserve"),
)


def show(found: dict[str, Any], console: Console) -> None:
    """Print a report of :func:`flashdist.planner.report`."""
    model, setting, plan = found["model"], found["setting"], found["plan"]
    title = (
        f"{model['name']}, {model['parameters']:,} parameters: {setting['strategy']} on {setting['gpus']} GPU(s), "
        f"{setting['micro_batch']} x {setting['seq']} tokens each"
    )
    table = Table(title=title)
    table.add_column("on each rank")
    table.add_column("GiB", justify="right")
    table.add_column("bytes/parameter", justify="right")
    for key, text in _ROWS:
        if key in ("steady", "peak"):
            table.add_section()
        table.add_row(text, f"{plan[key] / GIB:.2f}", f"{plan[key] / model['parameters']:.4f}")
    console.print(table)
    console.print(_verdict(found))
    if found["compare"]:
        others = Table(title="the same with other optimizers")
        for column in ("optimizer", "between steps, GiB", "peak, GiB", "fits"):
            others.add_column(column, justify="left" if column == "optimizer" else "right")
        ours = {"flashdist": plan, **found["compare"]}
        for name, p in ours.items():
            others.add_row(name, f"{p['steady'] / GIB:.1f}", f"{p['peak'] / GIB:.1f}", "yes" if p["fits"] else "no")
        console.print(others)


def _verdict(found: dict[str, Any]) -> str:
    plan, change = found["plan"], found["smallest_change"]
    if plan["fits"]:
        return f"It fits, with {(plan['limit'] - plan['peak']) / GIB:.1f} GiB to spare."
    missing = f"It does not fit: {(plan['peak'] - plan['limit']) / GIB:.1f} GiB are missing."
    if change is None:
        return f"{missing} No change known here makes it fit."
    return f"{missing} The smallest change that makes it fit: {', '.join(change['changes'])}."
