"""Memory and speed of a full finetuning step: `python -m benchmarks.finetune_memory`.

A Llama-3.1-8B-shaped model with random weights, batch 1 x 4096, checkpointed layers, each optimizer in a process of its
own. All arms have the same model and the same loss, whose logits never exist as a whole (launch/chunked_loss.py).

    peak_gib        largest sum of allocated tensors during the measured steps
    steady_gib      what is allocated between two steps: weights and optimizer state
    tokens_per_s    median over rounds of steps, the device synchronised at the ends of a round only

The speeds of flashdist and flashdist_release differ by less than a card's clock does from minute to minute. So `pair`
keeps both in one process and lets them take turns, round by round. Then flashdist_release runs inside a limit of 46 GiB
on everything the allocator holds, and the largest batch of 2048-token sequences that fits in it is searched.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
from torch import Tensor

from benchmarks.llama import LLAMA_3_1_8B, TINY, Llama, Shape
from benchmarks.step import git_commit
from benchmarks.worker import device_name, triton_version

Row = dict[str, Any]

ARMS = ("torch_adamw_fp32", "flashoptim", "flashoptim_release", "flashdist", "flashdist_release")
SHAPES = {"llama3.1-8b": LLAMA_3_1_8B, "tiny": TINY}
GIB = 2**30
LEARNING_RATE = 1e-5
# The targets of docs/gradient_release.md.
PEAK_WITH_RELEASE, PEAK_WITHOUT = 42.0, 54.5


class Trainer:
    """One arm: a model, its optimizer, and how a step is made."""

    def __init__(self, arm: str, shape: Shape, device: str) -> None:
        self.device = torch.device(device)
        self.dtype = torch.float32 if arm == "torch_adamw_fp32" else torch.bfloat16
        with torch.device("meta"):
            model = Llama(shape).to(self.dtype)
        self.model = model.to_empty(device=self.device)
        torch.manual_seed(0)
        self.model.draw_weights()
        self.released = arm.endswith("_release")
        parameters = self.model.parameters()
        if arm == "torch_adamw_fp32":
            self.optimizer: Any = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
        else:
            library = __import__(arm.partition("_")[0])
            self.optimizer = library.FlashAdamW(parameters, lr=LEARNING_RATE)
            if self.released:
                self.handle = library.enable_gradient_release(self.model, self.optimizer)
        # flashoptim's step() and zero_grad() only warn while its release is on.
        self.call_step = arm != "flashoptim_release"
        self.generator = torch.Generator(self.device).manual_seed(1)

    def step(self, batch: int, length: int) -> Tensor:
        """Forward, backward, optimizer; returns the loss."""
        tokens = torch.randint(
            self.model.shape.vocab, (batch, length + 1), generator=self.generator, device=self.device
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.float32):
            loss: Tensor = self.model(tokens)
        loss.backward()
        if self.call_step:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def gib(read: Any, device: torch.device) -> float | None:
    """A number of the CUDA allocator in GiB."""
    return round(read() / GIB, 3) if device.type == "cuda" else None


def measure(trainer: Trainer, batch: int, length: int, warmup: int, rounds: int, steps: int) -> Row:
    """Peak, steady state and speed of one arm. Raises RuntimeError where the loss is not finite."""
    device = trainer.device
    for _ in range(warmup):
        loss = trainer.step(batch, length)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    speeds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            loss = trainer.step(batch, length)
        synchronize(device)
        speeds.append(steps * batch * length / (time.perf_counter() - start))
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {float(loss)}")
    return {
        "peak_gib": gib(torch.cuda.max_memory_allocated, device),
        "steady_gib": gib(torch.cuda.memory_allocated, device),
        "tokens_per_s": round(statistics.median(speeds), 1),
        "tokens_per_s_rounds": [round(s, 1) for s in speeds],
        "peak_reserved_gib": gib(torch.cuda.max_memory_reserved, device),
        "batch": [batch, length],
        "steps": rounds * steps,
        "loss": round(float(loss), 4),
    }


def measure_limited(arm: str, shape: Shape, device: str, limit_gib: float, length: int, largest: int) -> Row:
    """20 steps of 1 x 4096 inside a limit, then ever larger batches of `length` until one does not fit."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total))
    trainer = Trainer(arm, shape, device)
    row = measure(trainer, 1, 2 * length, warmup=0, rounds=1, steps=20)
    row |= {"limit_gib": limit_gib, "largest_batch": None, "batch_peaks_gib": {}}
    for batch in range(1, largest + 1):
        try:
            found = measure(trainer, batch, length, warmup=1, rounds=1, steps=2)
        except torch.OutOfMemoryError:
            break
        row["largest_batch"] = [batch, length]
        row["batch_peaks_gib"][str(batch)] = found["peak_gib"]
    return row


def measure_pair(shape: Shape, device: str, batch: int, length: int, rounds: int, steps: int) -> Row:
    """Speeds of flashdist without and with release in turns, and the median of their quotients."""
    arms = ("flashdist", "flashdist_release")
    trainers = {arm: Trainer(arm, shape, device) for arm in arms}
    for trainer in trainers.values():
        measure(trainer, batch, length, warmup=2, rounds=1, steps=1)
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(rounds):
        for arm in arms if turn % 2 else reversed(arms):
            speeds[arm].append(measure(trainers[arm], batch, length, 0, 1, steps)["tokens_per_s"])
    quotients = [b / a for a, b in zip(*speeds.values(), strict=True)]
    return {
        "peak_gib": None,
        "steady_gib": None,
        "peak_reserved_gib": None,
        "batch": [batch, length],
        "tokens_per_s": round(statistics.median(speeds["flashdist_release"]), 1),
        "without_release": round(statistics.median(speeds["flashdist"]), 1),
        "release_over_without": round(statistics.median(quotients), 4),
        "quotients": [round(q, 4) for q in quotients],
    }


def work(args: argparse.Namespace) -> None:
    """What the process of one arm does."""
    shape = SHAPES[args.shape]
    if args.worker == "pair":
        row = measure_pair(shape, args.device, args.batch, args.length, 2 * args.rounds, args.steps)
    elif args.worker == "limit":
        row = measure_limited("flashdist_release", shape, args.device, args.limit_gib, args.length // 2, args.largest)
    else:
        arm, batch, length = args.worker, args.batch, args.length
        if arm == "large":
            arm, batch, length = "flashdist_release", 8, args.length // 2
        row = measure(Trainer(arm, shape, args.device), batch, length, args.warmup, args.rounds, args.steps)
    args.out.write_text(json.dumps({"arm": args.worker, **row}))


def run_worker(arm: str, args: argparse.Namespace, folder: Path) -> Row:
    """Measures an arm in a new process; a row with the reason where it fails."""
    out = folder / f"{arm}.json"
    command = [sys.executable, "-m", "benchmarks.finetune_memory", "--worker", arm, "--out", str(out)]
    for name in ("shape", "device", "batch", "length", "warmup", "rounds", "steps", "limit-gib", "largest"):
        command += [f"--{name}", str(getattr(args, name.replace("-", "_")))]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    try:
        done = subprocess.run(command, env=environment, timeout=args.timeout, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return {"arm": arm, "error": f"no result after {args.timeout} s"}
    if done.returncode or not out.exists():
        return {"arm": arm, "error": (done.stderr.strip().splitlines() or ["?"])[-1][:300]}
    return dict(json.loads(out.read_text()))


def targets(rows: dict[str, Row]) -> dict[str, bool | None]:
    """Which targets are reached; None where something was not measured."""

    def compare(arm: str, key: str, other: float | str, at_least: bool) -> bool | None:
        mine = rows.get(arm, {}).get(key)
        bound = rows.get(other, {}).get(key) if isinstance(other, str) else other
        if mine is None or bound is None:
            return None
        return bool(mine >= bound) if at_least else bool(mine <= bound)

    limited, released = rows.get("limit", {}), "flashdist_release"
    one_by_one = compare(released, "tokens_per_s", "flashdist", True)
    return {
        f"peak with release <= {PEAK_WITH_RELEASE} GiB": compare(released, "peak_gib", PEAK_WITH_RELEASE, False),
        f"peak without <= {PEAK_WITHOUT} GiB": compare("flashdist", "peak_gib", PEAK_WITHOUT, False),
        "tokens/s with release >= torch AdamW": compare(released, "tokens_per_s", "torch_adamw_fp32", True),
        "tokens/s with release >= without, in turns": compare("pair", "release_over_without", 1.0, True),
        "tokens/s with release >= without, one after the other": one_by_one,
        "20 steps inside the limit": None if not limited else limited.get("steps") == 20,
    }


def show(result: Row, console: Console) -> None:
    """The table for a terminal."""
    table = Table(title=f"{result['device']}, torch {result['torch']}, commit {result['commit']}")
    for name in ("arm", "batch", "peak GiB", "steady GiB", "tokens/s", "reserved GiB"):
        table.add_column(name)
    for row in [*result["rows"], *result["more"]]:
        if "error" in row:
            table.add_row(row["arm"], row["error"])
            continue
        batch = "{} x {}".format(*row["batch"])
        values = [row[key] for key in ("peak_gib", "steady_gib", "tokens_per_s", "peak_reserved_gib")]
        table.add_row(row["arm"], batch, *("-" if v is None else f"{v:,.1f}" for v in values))
    console.print(table)
    for row in result["more"]:
        if "quotients" in row:
            console.print(f"release over without, in turns: {row['release_over_without']} of {row['quotients']}")
        if row.get("largest_batch"):
            console.print("largest batch inside {} GiB: {} x {}".format(row["limit_gib"], *row["largest_batch"]))
    for name, reached in result["targets"].items():
        console.print(f"{'not measured' if reached is None else 'reached' if reached else 'MISSED'}: {name}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("benchmarks/results/finetune-memory-h200.json"))
    p.add_argument(
        "--arms",
        default=",".join((*ARMS, "pair", "limit", "large")),
        help="arms, and the runs `pair`, `limit`, `large`",
    )
    p.add_argument("--shape", default="llama3.1-8b", choices=SHAPES)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--length", type=int, default=4096)
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=4, help="steps of a round")
    p.add_argument("--limit-gib", type=float, default=46.0)
    p.add_argument("--largest", type=int, default=16, help="the largest batch that `limit` tries")
    p.add_argument("--timeout", type=float, default=120, help="seconds for one arm")
    p.add_argument("--deadline", type=float, default=290, help="no arm is begun after this many seconds")
    p.add_argument("--commit", help="recorded in the result (default: asked from git, or 'unknown')")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    return p


def main(arguments: list[str] | None = None) -> Row:
    """Runs the command line."""
    args = parser().parse_args(arguments)
    if args.worker:
        work(args)
        return {}
    console, started = Console(width=140), time.monotonic()
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm in args.arms.split(","):
            if time.monotonic() - started > args.deadline:
                rows[arm] = {"arm": arm, "error": "left out, the time was over"}
                continue
            rows[arm] = run_worker(arm, args, Path(folder))
            console.print(f"{time.monotonic() - started:4.0f} s", rows[arm])
    result = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": device_name(args.device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "commit": args.commit or git_commit(),
        "shape": args.shape,
        "rows": [row for arm, row in rows.items() if arm in ARMS],
        "more": [row for arm, row in rows.items() if arm not in ARMS],
        "targets": targets(rows),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result, console)
    return result


if __name__ == "__main__":
    main()
