"""Time and memory of one optimizer step, for our optimizers and their peers.

Examples:
    python -m benchmarks.step                                    all sets and optimizers on this GPU
    python -m benchmarks.step --sets gpt2_124m,resnet50 --optimizers flashdist_adamw,torch_fused_fp32
    python -m benchmarks.step --device cpu --sets smoke          a quick look, wall time only
    python -m benchmarks.verdict benchmarks/results/FILE.json    what was to be reached, and what was

Every optimizer is measured in its own process, on all its sets. First our own optimizers pass a correctness gate
(benchmarks/gate.py); if one is wrong, its figures are printed and nothing is timed. Peers whose package is not
installed are left out by name. benchmarks/measure.py says what the columns mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import report, worker
from benchmarks.gate import GateResult
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.sets import SETS

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]
Outcome = tuple[list[Record], str | None]  # a worker's records, and why it ended early if it did


class GateRed(Exception):
    """One of our optimizers takes wrong steps; the message holds the figures."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser("benchmarks.step", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--sets", help=f"comma-separated, of: {', '.join(SETS)}\n(default: all but smoke; smoke on a CPU)")
    names = textwrap.fill(", ".join(OPTIMIZERS), 80)
    p.add_argument("--optimizers", help=f"comma-separated, of:\n{names}\n(default: all)")
    p.add_argument("--threads", type=int, help="of the CPU; fewer than the cores on a busy machine (default: torch's)")
    p.add_argument("--iters", type=int, default=30, help="steps a figure is the median of; slow steps get fewer")
    p.add_argument("--out", type=Path, help="result file (default: benchmarks/results/step-DEVICE-DATE.json)")
    p.add_argument("--plot", type=Path, help="plot file (default: the result's name with .png)")
    p.add_argument("--no-plot", action="store_true", help="write no plot")
    p.add_argument("--commit", help="recorded in the result (default: asked from git, or 'unknown')")
    p.add_argument("--timeout", type=float, default=150, help="seconds for one optimizer (default: %(default)s)")
    p.add_argument("--deadline", type=float, default=3600, help="seconds for everything (default: %(default)s)")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    p.add_argument("--worker-out", type=Path, help=argparse.SUPPRESS)
    return p


def chosen(text: str | None, known: dict[str, Any], default: list[str]) -> list[str]:
    """The names in a comma-separated list; SystemExit names one that does not exist."""
    names = [name.strip() for name in text.split(",") if name.strip()] if text else default
    for name in names:
        if name not in known:
            raise SystemExit(f"unknown name {name!r}; known: {', '.join(known)}")
    return names


def git_commit() -> str:
    """The checked out commit, or "unknown" outside of a repository."""
    try:
        ask = ["git", "rev-parse", "HEAD"]
        return subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_worker(name: str, optimizers: list[str], sets: list[str], args: argparse.Namespace, timeout: float) -> Outcome:
    """Runs one worker process until it ends or `timeout` seconds are over."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "records"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.step", "--worker", name, "--worker-out", str(out)]
        command += ["--device", args.device, "--iters", str(args.iters)]
        command += ["--threads", str(args.threads)] if args.threads else []
        command += ["--sets", ",".join(sets), "--optimizers", ",".join(optimizers)]
        with log.open("w") as output:
            # A process group of its own: a peer's compiler processes end with it.
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
            try:
                code = process.wait(timeout)
                problem = None if code == 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                problem = f"more than {timeout:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if problem:
            print(f"{name}: {problem}; the end of its output:", *log.read_text().splitlines()[-15:], sep="\n  ")
        return records, problem


def pass_gate(ours: list[str], args: argparse.Namespace) -> list[Record]:
    """Checks our optimizers; raises GateRed unless each is green or its graph cannot be captured."""
    records, problem = run_worker(worker.GATE, ours, [], args, args.timeout)
    results = [{k: v for k, v in r.items() if k != "kind"} for r in records]
    lines = [GateResult(**r).line() for r in results]
    unchecked = set(ours) - {r["optimizer"] for r in results}
    if problem or unchecked or any(r["status"] == "red" for r in results):
        lines += [f"{name}: not checked, {problem}" for name in sorted(unchecked)]
        raise GateRed("\n".join(lines))
    print(*lines, sep="\n")
    return results


def assemble(records: list[Record], skipped: list[Record], gate: list[Record], commit: str) -> report.Result:
    """The result file's content from all that the workers have said so far."""
    hosts = [r for r in records if r["kind"] == "host"]
    rates = [r["copy_bytes_per_s"] for r in hosts if r["copy_bytes_per_s"]]
    copy = median(rates) if rates else None
    rows = [report.finish_row(r, copy) for r in records if r["kind"] == "row"]
    order = (list(SETS), list(OPTIMIZERS))
    rows.sort(key=lambda r: (order[0].index(r["set"]), order[1].index(r["optimizer"])))
    skips = [{k: r[k] for k in ("set", "optimizer", "reason")} for r in records if r["kind"] == "skip"]
    host = hosts[0] if hosts else {"device": "unknown", "torch": torch.__version__, "triton": None}
    return {
        "date": date.today().isoformat(),
        **{key: host[key] for key in ("device", "torch", "triton")},
        "commit": commit,
        "copy_bytes_per_s": copy,
        "copy_bytes_per_s_range": [min(rates), max(rates)] if rates else None,
        "rows": rows,
        "skipped": skipped + skips,
        "gate": gate,
    }


def default_out(device: str) -> Path:
    """A result file named after the device and the day."""
    slug = "cpu" if device.startswith("CPU") else re.sub(r"[^a-z0-9]+", "-", device.lower().replace("nvidia ", ""))
    return ROOT / "benchmarks" / "results" / f"step-{slug}-{date.today().isoformat()}.json"


def run_all(args: argparse.Namespace, sets: list[str], names: list[str]) -> report.Result:
    """Gate, then one worker an optimizer. The result is written after each: an interrupted run leaves what it has."""
    begin = time.monotonic()
    commit = args.commit or git_commit()
    skipped: list[Record] = []

    def skip(name: str, reason: str, set_name: str | None = None) -> None:
        print(f"{name}: skipped{f' on {set_name}' if set_name else ''}, {reason}")
        skipped.append({"set": set_name, "optimizer": name, "reason": reason})

    for name in names:
        if package := OPTIMIZERS[name].missing():
            skip(name, f"the package {package} is not installed")
        elif args.device == "cuda" and OPTIMIZERS[name].mode == "compiled":
            skip(name, "it is a step on a CPU")
    names = [name for name in names if name not in {s["optimizer"] for s in skipped}]
    ours = [name for name in names if OPTIMIZERS[name].ours]
    gate = pass_gate(ours, args) if ours else []
    for result in gate:
        if result["status"] == "unavailable":
            skip(result["optimizer"], result["reason"])
            names.remove(result["optimizer"])

    records: list[Record] = []
    for name in names:
        limit = OPTIMIZERS[name].sets
        wanted = [s for s in sets if limit is None or s in limit]
        left = args.deadline - (time.monotonic() - begin)
        if not wanted:
            continue
        if left <= 0:
            skip(name, f"the deadline of {args.deadline:.0f} s was over")
            continue
        started = time.monotonic()
        new, problem = run_worker(name, [name], wanted, args, min(args.timeout, left))
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        records += new
        for set_name in wanted if problem else []:
            if not any(r.get("set") == set_name for r in new):
                skip(name, problem, set_name)
        result = assemble(records, skipped, gate, commit)
        args.out = args.out or default_out(result["device"])
        report.write(result, args.out)
    return assemble(records, skipped, gate, commit)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; the exit code is 1 if the gate is red or nothing could be measured."""
    args = parser().parse_args(argv)
    everything = [name for name in SETS if name != "smoke"]
    sets = chosen(args.sets, SETS, everything if args.device == "cuda" else ["smoke"])
    names = chosen(args.optimizers, OPTIMIZERS, list(OPTIMIZERS))
    if args.worker:
        if args.threads:
            torch.set_num_threads(args.threads)
        worker.run(args.worker, names, sets, args.device, args.iters, args.worker_out)
        return 0
    try:
        result = run_all(args, sets, names)
    except GateRed as red:
        print("The correctness gate is red; no time is reported.", red, sep="\n")
        return 1
    report.print_table(result)
    if not result["rows"]:
        return 1
    print(f"written: {args.out}")
    if not args.no_plot:
        from benchmarks.plot import plot  # matplotlib is slow to import and not needed without a plot

        print(f"written: {plot(result, args.plot or args.out.with_suffix('.png'))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
