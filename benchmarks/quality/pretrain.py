"""Pretraining by branching: every arm goes on from one fp32 AdamW start and anneals its lr to 0 on the same batches.

Runs of one beta2 and seed see the same batches, so an arm is compared with AdamW pair by pair; seeds are different
batches. Runs are made in the config's order until the deadline; after each the result is written, and runs that a
result already has (of the same start) are skipped. What an arm that equals AdamW would show is measured too:
`adamw_again` starts a few fp32 ULPs aside.

Usage: python -m benchmarks.quality.pretrain --config benchmarks/quality/configs/pretrain-h200.json
           [--corpus .quality/tokens.npz.xz] [--out FILE.json] [--deadline SECONDS] [--start-file FILE.pt]
           [--no-compile]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality import results
from benchmarks.quality.arms import ARMS, Start
from benchmarks.quality.corpus import DEFAULT_PATH, load
from benchmarks.quality.numerics import Tracker
from benchmarks.quality.start import Config, Data, Models, load_or_make_start, validation_loss

FIRST_RUN_SECONDS = 30.0  # what a run is taken to need before one has been timed
BRANCH_SEED = 1000


def branch(
    arm: str, beta2: float, seed: int, config: Config, start: Start, models: Models, data: Data, tracker: Tracker | None
) -> dict[str, Any]:
    """One run: from the start to an lr of 0."""
    began = time.time()
    model = models.get(ARMS[arm].weights)
    step = ARMS[arm].build(model, start, beta2)
    losses = []
    for t, (x, y) in enumerate(data.batches(config.branch_steps, BRANCH_SEED + seed)):
        loss = model(x, y).mean()
        loss.backward()
        losses.append(loss.detach())
        if tracker is not None:
            tracker.update(model)
        step(config.lr * (1.0 - t / config.branch_steps), config.max_norm)
    curve = torch.stack(losses).double()
    return {
        "arm": arm,
        "beta2": beta2,
        "seed": seed,
        "start": start.id,
        "final_val_loss": validation_loss(model, data, config.eval_sequences),
        # The mean over a quarter of the branch: no held-out text, but four times as many steps as a last loss has.
        "late_train_loss": float(curve[-(len(curve) // 4) :].mean()),
        "curve": curve.tolist(),
        "seconds": time.time() - began,
    }


def run_all(
    config: Config, start: Start, models: Models, data: Data, result: results.Result, out: Path, end: float
) -> None:
    """Make the runs of the plan that are missing, as many as fit before `end`."""
    done = {(r["arm"], r["beta2"], r["seed"], r["start"]) for r in result["runs"]}
    longest = FIRST_RUN_SECONDS
    for arm, beta2, seed in config.runs():
        if (arm, beta2, seed, start.id) in done:
            continue
        if time.time() + 1.15 * longest > end:
            print("the next run would not end before the deadline", flush=True)
            return
        tracker = None
        if arm == "adamw" and seed == config.track:
            tracker = Tracker(models.get(torch.float32), start, beta2)
        try:
            run = branch(arm, beta2, seed, config, start, models, data, tracker)
        except Exception as error:  # one arm that fails (a package that is missing) does not cost the others
            print(f"{arm} beta2 {beta2} seed {seed}: {type(error).__name__}: {error}", flush=True)
            result["failed"].append({"arm": arm, "beta2": beta2, "seed": seed, "error": repr(error)[:500]})
            results.write(result, out)
            continue
        result["runs"].append(run)
        done.add((arm, beta2, seed, start.id))
        if tracker is not None:
            result["numerics"].append({"beta2": beta2, "seed": seed, "start": start.id, **tracker.report()})
        results.write(result, out)
        print(
            f"{arm:18} beta2 {beta2:<6} seed {seed} val {run['final_val_loss']:.5f} "
            f"late train {run['late_train_loss']:.5f} {run['seconds']:.1f} s",
            flush=True,
        )
        # The first run of a dtype compiles; the runs behind it do not.
        longest = min(longest, run["seconds"]) if longest == FIRST_RUN_SECONDS else max(longest, run["seconds"])


def main() -> None:
    """The command line."""
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which no run is begun")
    parser.add_argument("--start-file", type=Path, help="keep the start here, for a later command on this machine")
    parser.add_argument("--commit", help="where the folder is no git repository")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = args.out or results.default_path("pretrain", device)
    config = Config(**json.loads(args.config.read_text()))
    corpus = load(args.corpus)
    result = results.read(out) if out.exists() else {**results.head("pretrain", device), "config": None, "starts": []}
    if args.commit:
        result["commit"] = args.commit
    result.update(config=dataclasses.asdict(config), corpus=corpus.checksum, train_tokens=len(corpus.train))
    for key in ("runs", "failed", "numerics"):
        result.setdefault(key, [])
    data, models = (
        Data(corpus, config, device),
        Models(config, device, compiled=device == "cuda" and not args.no_compile),
    )
    print(f"loaded after {time.time() - began:.1f} s", flush=True)
    start, about = load_or_make_start(config, models, data, corpus, args.start_file)
    print(f"start {start.id}: val {about['val_loss']:.5f}, after {time.time() - began:.1f} s", flush=True)
    if start.id not in [entry["id"] for entry in result["starts"]]:
        result["starts"].append(about)
    run_all(config, start, models, data, result, out, began + args.deadline)
    print(f"{len(result['runs'])} runs in {out}, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
