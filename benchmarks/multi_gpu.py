"""Everything that only several GPUs can show, in one go: `python -m benchmarks.multi_gpu --out multi-gpu.json`.

Each row is a launch of its own under torchrun, on 1, 2, 4, ... of the GPUs that are there:

- bits: training under every strategy against one process, checkpoints saved on all ranks and loaded on fewer and more,
  gradient release under FSDP2, one optimizer over two devices (benchmarks.sharded_bits);
- speed: FSDP2, HSDP, DDP + ZeRO-1 and DeepSpeed, FlashAdamW beside torch's AdamW (benchmarks.sharded_speed).

What is not installed, or needs more ranks, is left out and said. ``--device cpu --gpus 1,2 --shapes tiny`` tries the
script itself, without a GPU. Exit status 1: something differs, or failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.sharded_model import ARMS, SHAPES, STRATEGIES
from benchmarks.step import git_commit
from benchmarks.worker import device_name, triton_version

Row = dict[str, Any]


def launch(ranks: int, module: str, arguments: list[str], out: Path, seconds: float) -> Row:
    """The JSON that the module writes on ``ranks`` ranks; ``{"error": ...}`` where it fails or takes too long."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", module, *arguments, "--out", str(out)]
    try:
        done = subprocess.run(command, timeout=seconds, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {seconds:.0f} s"}
    if out.exists():  # also where the exit status says that something differs
        return dict(json.loads(out.read_text()))
    lines = [line for line in done.stderr.splitlines() if "Error" in line and "ChildFailedError" not in line]
    return {"error": (lines or ["?"])[0][:300]}


def possible(strategy: str, ranks: int) -> str | None:
    """Why a strategy cannot run here, if it cannot."""
    if strategy == "hsdp" and (ranks < 4 or ranks % 2):
        return "needs 4 ranks or more"
    if strategy.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return None


class Session:
    """The rows so far, and the time that is left."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.started = args, folder, time.monotonic()
        self.bits: dict[str, str] = {}
        self.rows: list[Row] = []

    def left(self) -> float:
        """Seconds until the deadline."""
        return float(self.args.deadline) - (time.monotonic() - self.started)

    def compare_bits(self) -> None:
        """Saves on every number of ranks, loads each on every number."""
        checkpoints = self.folder / "checkpoints"
        for how in ("--save", "--load"):
            for ranks in self.args.gpus:
                out = self.folder / f"bits{how}-{ranks}.json"
                arguments = [how, str(checkpoints), "--device", self.args.device]
                found = launch(ranks, "benchmarks.sharded_bits", arguments, out, min(240, self.left()))
                self.bits |= {f"{ranks} ranks: {what}": outcome for what, outcome in found.items()}

    def measure(self) -> None:
        """All rows of speed, arms side by side."""
        args = self.args
        for shape in args.shapes:
            for strategy in args.strategies:
                for ranks in args.gpus:
                    for arm in ARMS:
                        row = {"shape": shape, "strategy": strategy, "ranks": ranks, "arm": arm}
                        reason = possible(strategy, ranks)
                        if reason or self.left() < 30:
                            self.rows.append({**row, "skipped": reason or "no time was left"})
                            continue
                        arguments = ["--shape", shape, "--strategy", strategy, "--arm", arm, "--device", args.device]
                        arguments += ["--micro-batch", str(args.micro_batch), "--length", str(args.length)]
                        out = self.folder / f"{shape}-{strategy}-{ranks}-{arm}.json"
                        limit = min(180, self.left())
                        self.rows.append(row | launch(ranks, "benchmarks.sharded_speed", arguments, out, limit))
                        print(json.dumps(self.rows[-1]), flush=True)

    def judge(self) -> None:
        """Adds to FlashAdamW's rows the ratio to torch's, and to all the efficiency from one rank on."""
        by_key = {(r["shape"], r["strategy"], r["ranks"], r["arm"]): r for r in self.rows if "step_ms" in r}
        for (shape, strategy, ranks, arm), row in by_key.items():
            torchs = by_key.get((shape, strategy, ranks, "torch"))
            if arm == "flash" and torchs:
                row["over_torch"] = round(row["step_ms"] / torchs["step_ms"], 4)
            one = by_key.get((shape, strategy, 1, arm))
            if one:
                row["efficiency"] = round(row["tokens_per_s"] / (ranks * one["tokens_per_s"]), 4)
            row["optimizer_share"] = round(row["optimizer_ms"] / row["step_ms"], 4)


def print_table(rows: list[Row]) -> None:
    """The rows that have figures."""
    table = Table(title="sharded training, whole steps")
    columns = ("shape", "strategy", "ranks", "arm", "step_ms", "optimizer_ms", "tokens_per_s", "over_torch")
    columns += ("efficiency", "share_of_copy", "peak_gib")
    for column in columns:
        table.add_column(column, justify="left" if column in ("shape", "strategy", "arm") else "right")
    for row in rows:
        if "step_ms" in row:
            table.add_row(*("" if row.get(c) is None else str(row[c]) for c in columns))
    Console(width=150).print(table)
    for row in rows:
        if "step_ms" not in row:
            what = " ".join(str(row[k]) for k in ("shape", "strategy", "ranks", "arm"))
            print(f"{what}: {row.get('skipped') or row.get('error')}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser("benchmarks.multi_gpu", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    count = torch.cuda.device_count()
    numbers = [n for n in (1, 2, 4, 8) if n <= max(count, 1)]
    listed = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    p.add_argument("--gpus", type=lambda t: list(map(int, listed(t))), default=numbers, help="numbers of ranks: 1,2,4")
    p.add_argument("--shapes", type=listed, default=["llama1b"], help=f"of {', '.join(SHAPES)}")
    p.add_argument("--strategies", type=listed, default=list(STRATEGIES))
    p.add_argument("--micro-batch", type=int, default=4)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--deadline", type=float, default=540, help="seconds for everything (default: %(default)s)")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if count else "cpu")
    p.add_argument("--commit", help="recorded in the result (default: asked from git, or 'unknown')")
    p.add_argument("--out", type=Path)
    args = p.parse_args(argv)
    if unknown := [s for s in args.shapes if s not in SHAPES] + [s for s in args.strategies if s not in STRATEGIES]:
        p.error(f"unknown: {', '.join(unknown)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(args, Path(folder))
        session.compare_bits()
        session.measure()
    session.judge()
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(args.device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "commit": args.commit or git_commit(),
        "bits": session.bits,
        "rows": session.rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print_table(session.rows)
    wrong = {what: outcome for what, outcome in session.bits.items() if outcome != "equal"}
    print(f"bits: {len(session.bits) - len(wrong)} comparisons equal", *map(str, wrong.items()), sep="\n")
    return 1 if wrong or any("error" in row for row in session.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
