"""Trains a small GPT on two ranks, moves it to one in the middle, and compares it with AdamW.

Two runs of launch/pretrain.py on the text that comes with Python, from the same first weights, with the same batches:

1. FlashAdamW on BF16 weights, sharded over two ranks by FSDP2 under torchrun. Half way it saves and stops; one rank
   goes on from that checkpoint.
2. torch's AdamW on fp32 weights, on two ranks from beginning to end.

At the end stands a table of the memory that each keeps from step to step, measured from the live tensors, and of their
checkpoints and held-out losses; the curves go into a PNG.

    bash launch/demo.sh [--steps N] [--seed N] [--out demo.png] [--json demo.json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from curves import series
from demo_report import KINDS, Run, plot, relative_difference, table
from metrics import read_metrics
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, CONFIG = ROOT / "launch" / "pretrain.py", ROOT / "configs" / "pretrain" / "tiny.yaml"
RANKS = 2


def pretrain(folder: Path, ranks: int, settings: Sequence[str]) -> None:
    """One start of launch/pretrain.py; its output is shown.

    Raises:
        SystemExit: with its exit code, where it fails.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    # So that flashdist is found also where it is not installed, and torchrun does not remark on threads.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(SCRIPT), str(CONFIG), f"run.folder={folder}", *settings]
    code = subprocess.run(command, env=env).returncode
    if code:
        raise SystemExit(code)


def train_flash(folder: Path, settings: Sequence[str], steps: int, console: Console) -> None:
    """Half of the steps on two ranks, the other half on one."""
    console.rule(f"FlashAdamW on {RANKS} ranks, to step {steps // 2}")
    if steps // 2:
        pretrain(folder, RANKS, [*settings, f"run.stop_after={steps // 2}"])
    console.rule(f"FlashAdamW on 1 rank, from there to step {steps}")
    pretrain(folder, 1, [*settings, "--resume", "auto"])


def train_reference(folder: Path, settings: Sequence[str], steps: int, console: Console) -> None:
    """All steps on two ranks."""
    console.rule(f"torch's AdamW on {RANKS} ranks, to step {steps}")
    pretrain(folder, RANKS, [*settings, "optimizer.name=torch_adamw"])


def collect(name: str, folder: Path) -> Run:
    """What a run has written down."""
    records = read_metrics(folder / "metrics.jsonl")
    starts = [i for i, record in enumerate(records) if "started" in record]
    resumed = records[starts[1]]["step"] if len(starts) > 1 else None
    first_part = records[: starts[1]] if len(starts) > 1 else records
    counted: dict[str, int] = next(record["bytes"] for record in first_part if "bytes" in record)
    checkpoints = sorted(folder.glob("step-*"))
    on_disk = sum(file.stat().st_size for file in checkpoints[-1].iterdir())
    return Run(
        name,
        losses=series(records, "loss")[1],
        validation_loss=series(records, "eval_loss")[1][-1],
        bytes_per_parameter={kind: counted[kind] / counted["parameters"] for kind in KINDS},
        ranks=counted["ranks"],
        checkpoint_bytes=on_disk / counted["parameters"],
        tokens_per_second=statistics.median(series(first_part, "tokens_per_second")[1]),
        resumed_at=resumed,
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with FlashAdamW and with AdamW and compare them.")
    parser.add_argument("--steps", type=int, default=240, help="steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the picture (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "demo", help="where the runs go; what is there is removed"
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="changes to configs/pretrain/tiny.yaml")
    options = parser.parse_intermixed_args(argv)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Both runs, then the table and the files."""
    options = parse_arguments(argv)
    console = Console()
    shutil.rmtree(options.runs, ignore_errors=True)
    settings = [
        f"train.steps={options.steps}",
        f"train.warmup={max(1, options.steps // 10)}",
        f"train.seed={options.seed}",
        f"data.cache={options.runs.parent / 'tokens'}",
        # A second thread for the part on one rank would gain little: the operations are short, and where something else
        # runs on the machine, threads that wait for each other spin.
        "parallel.threads=1",
        *options.settings,
    ]
    folders: dict[str, Path] = {name: options.runs / name for name in ("flash", "adamw")}
    train_flash(folders["flash"], settings, options.steps, console)
    train_reference(folders["adamw"], settings, options.steps, console)

    reference = collect("torch AdamW, fp32", folders["adamw"])
    flash = collect("FlashAdamW, bf16", folders["flash"])
    console.print(table(reference, flash))
    plot(reference, flash, options.out)
    console.print(f"Curves and memory: {options.out}")
    if options.json:
        figures: dict[str, Any] = {
            "seed": options.seed,
            "steps": options.steps,
            "relative_difference": relative_difference(reference, flash),
            "runs": [asdict(reference), asdict(flash)],
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
