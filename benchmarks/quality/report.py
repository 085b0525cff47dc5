"""The report of a result file: a section of docs/quality.md and, for pretraining, a plot.

Usage: python -m benchmarks.quality.report RESULT.json [...] [--docs docs/quality.md]
The section of a file is replaced where it is there already, and put behind the others where it is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality import results
from benchmarks.quality.pairs import differences, verdict

DOCS = Path(__file__).parent.parent.parent / "docs" / "quality.md"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; floats with four significant digits."""

    def text(x: Any) -> str:
        return "" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)

    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(text, row)) + " |" for row in rows])


def measured_on(result: results.Result) -> str:
    """Where a result comes from."""
    return f"{result['device']}, torch {result['torch']}, commit {result['commit']}, {result['date']}"


def pretrain(result: results.Result) -> str:
    """Losses, paired differences and the issue's bounds."""
    runs, c = result["runs"], result["config"]
    betas = sorted({r["beta2"] for r in runs})
    parts = [
        f"Start: {c['start_steps']} steps of {c['batch'] * c['context']:,} tokens, validation loss "
        + ", ".join(f"{s['val_loss']:.4f}" for s in result["starts"])
        + f"; branches of {c['branch_steps']} steps, lr {c['lr']} to 0; {c['eval_sequences']} held-out sequences of "
        f"{c['context']} tokens; corpus {result['corpus']} with {result['train_tokens']:,} training tokens.",
    ]
    late = {(d.arm, d.beta2): d for d in differences(runs, "late_train_loss")}
    for beta2 in betas:
        reference = [r["final_val_loss"] for r in runs if r["arm"] == "adamw" and r["beta2"] == beta2]
        parts.append(f"beta2 {beta2}; AdamW: " + ", ".join(f"{x:.4f}" for x in reference if x is not None))
        rows = []
        for d in differences(runs):
            if d.beta2 == beta2:
                train = late.get((d.arm, d.beta2))
                rows.append(
                    (
                        d.arm + (f" ({d.lost} lost)" if d.lost else ""),
                        len(d.values),
                        f"{d.mean:+.5f}" if d.values else "NaN",
                        f"{d.error:.5f}" if d.error is not None else "",
                        ", ".join(f"{x:+.5f}" for x in d.values),
                        f"{train.mean:+.5f}" if train and train.values else "",
                        f"{train.error:.5f}" if train and train.error is not None else "",
                    )
                )
        head = ("arm", "pairs", "validation, mean", "s.e.", "each pair", "training, last quarter", "s.e.")
        parts.append(table(head, rows))
    parts += ["\n".join("- " + line for beta2 in betas for line in verdict(runs, beta2))]
    for entry in result["failed"]:
        parts.append(f"Not run: {entry['arm']} at beta2 {entry['beta2']}, seed {entry['seed']}: {entry['error']}")
    parts += [numerics(entry) for entry in result["numerics"]]
    return "\n\n".join(parts)


def numerics(entry: dict[str, Any]) -> str:
    """The schemes on the gradients of one run."""
    keys = ("momentum_nmse", "root_variance_nmse", "update_nmse", "gain", "largest_update")
    rows = [(name, *(values[key] for key in keys)) for name, values in entry["schemes"].items() if name != "exact"]
    head = ("scheme", "momentum NMSE", "sqrt(v) NMSE", "update NMSE", "gain", "largest update, lr")
    text = f"Moments on the gradients of AdamW's run, beta2 {entry['beta2']}, {entry['elements']:,} elements:"
    return text + "\n\n" + table(head, rows)


def dither(result: results.Result) -> str:
    """Every situation and rounding."""
    rows = {(r["beta2"], r["situation"], r["rounding"]): r for r in result["rows"]}
    names = list(dict.fromkeys(r["rounding"] for r in result["rows"]))
    places = list(dict.fromkeys((r["beta2"], r["situation"]) for r in result["rows"]))
    cells = [
        (
            *place,
            *(
                f"{rows[(*place, name)]['root_ratio']:.3f} / {rows[(*place, name)]['update_nmse']:.4f}"
                for name in names
            ),
        )
        for place in places
    ]
    stopped = {(r["beta2"], r["rounding"]): r["update"] for r in result.get("stopped", [])}
    stand = [
        (b, *(stopped[b, name] for name in names)) for b in dict.fromkeys(r["beta2"] for r in result.get("stopped", []))
    ]
    dead = "Step in lr of elements whose gradients have stopped beside a constant one (exact: 0):\n\n"
    dead += table(("beta2", *names), stand) + "\n\n"
    return (
        (dead if stand else "")
        + "sqrt(v) against exact / NMSE of the update:\n\n"
        + table(("beta2", "gradients", *names), cells)
    )


def images(result: results.Result) -> str:
    """Accuracy by optimizer."""
    rows = [
        (
            r["optimizer"],
            r["arm"],
            f"{r['mean']:.2f} ± {r['spread']:.2f}",
            ", ".join(f"{x:.2f}" for x in r["accuracies"]),
        )
        for r in result["rows"]
    ]
    return table(("optimizer", "arm", "accuracy %, mean ± s.d. of 5 seeds", "each seed"), rows)


def anchors(result: results.Result) -> str:
    """S1 to S4 by optimizer."""
    keys = list(dict.fromkeys(key for r in result["rows"] for key in r if key not in ("optimizer", "kind")))
    rows = [(r["optimizer"], r["kind"], *(r.get(key, "") for key in keys)) for r in result["rows"]]
    return table(("optimizer", "kind", *keys), [["NaN" if x is None else x for x in row] for row in rows])


def horizon(result: results.Result) -> str:
    """Drift of a 24-bit master weight."""
    keys = list(result["rows"][0])
    split = table(list(result["split"][0]), [list(r.values()) for r in result["split"]])
    drift = table(keys, [[r[key] for key in keys] for r in result["rows"]])
    return f"One round trip of the 24-bit split:\n\n{split}\n\nAfter {result['steps']:,} steps:\n\n{drift}"


SECTIONS: dict[str, tuple[str, Callable[[results.Result], str]]] = {
    "pretrain": ("Pretraining, GPT-2 by branching", pretrain),
    "dither": ("Rounding of the codes", dither),
    "images": ("Images", images),
    "anchors": ("Anchors S1 to S4", anchors),
    "horizon": ("Long horizon", horizon),
}


def section(path: Path) -> str:
    """The Markdown of one result file, between the comments by which it is found again."""
    result = results.read(path)
    title, body = SECTIONS[result["experiment"]]
    text = f"### {title}\n\n{measured_on(result)}; [{path.name}](../benchmarks/results/{path.name})\n\n{body(result)}"
    if result["experiment"] == "pretrain":
        from benchmarks.quality.plot import plot

        picture = plot(result, path.with_suffix(".png"))
        text += f"\n\n![Paired differences](../benchmarks/results/{picture.name})"
    return f"<!-- {path.stem} -->\n{text}\n<!-- end {path.stem} -->"


def put(document: str, stem: str, new: str) -> str:
    """The document with a section replaced, or put at its end."""
    begin, end = f"<!-- {stem} -->", f"<!-- end {stem} -->"
    if begin in document:
        before, rest = document.split(begin, 1)
        return before + new + rest.split(end, 1)[1]
    return document.rstrip() + "\n\n" + new + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    document = args.docs.read_text() if args.docs.exists() else "# Training quality\n"
    for path in args.results:
        text = section(path)
        print(text)
        document = put(document, path.stem, text)
    args.docs.write_text(document)


if __name__ == "__main__":
    main()
