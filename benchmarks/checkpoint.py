"""Time and size of a checkpoint: flashdist.checkpoint beside torch.save and torch.load of the model with AdamW in fp32.

Both sides write checksums, have everything on the disk before they are done, and check the checksums before they load.
The runs alternate, after one warm-up each; the medians are compared. One process, CPU tensors.

Examples:
    python -m benchmarks.checkpoint                         a model of 124 M parameters, 7 runs
    python -m benchmarks.checkpoint --layers 2 --runs 3     a quick look
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from flashdist import FlashAdamW, checkpoint

# What is to be reached: ours over torch's.
BOUNDS = {"save_s": 1.0, "load_s": 0.5, "bytes": 0.45}


class Gpt2Shapes(nn.Module):
    """The weights of GPT-2, without its forward."""

    def __init__(self, layers: int, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width),
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )  # fmt: skip


def stepped(model: nn.Module, opt: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The pair after a step, so that its state is there."""
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 0.01
    opt.step()
    opt.zero_grad()
    return model, opt


def sha256(path: Path) -> str:
    """Checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else _slow_sha256(path)


def _slow_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(4 << 20):
            digest.update(block)
    return digest.hexdigest()


def torch_save(path: Path, model: nn.Module, opt: torch.optim.Optimizer) -> None:
    """What a careful script does with torch.save."""
    path.mkdir()
    with open(path / "state.pt", "wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    (path / "sha256").write_text(sha256(path / "state.pt"))


def torch_load(path: Path, model: nn.Module, opt: torch.optim.Optimizer) -> None:
    """And with torch.load."""
    if sha256(path / "state.pt") != (path / "sha256").read_text():
        raise RuntimeError("damaged")
    state = torch.load(path / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])


def timed(function: Callable[..., Any], *args: Any) -> float:
    """Seconds."""
    started = time.perf_counter()
    function(*args)
    return time.perf_counter() - started


def folder_bytes(path: Path) -> int:
    """Size of a folder's files."""
    return sum(file.stat().st_size for file in path.iterdir())


def measure(layers: int, runs: int, folder: Path) -> list[dict[str, Any]]:
    """One row a side: medians of save and load, bytes, bytes per parameter."""
    torch.manual_seed(0)
    ours = stepped(m := Gpt2Shapes(layers).to(torch.bfloat16), FlashAdamW(m.parameters(), lr=1e-3))
    theirs = stepped(n := Gpt2Shapes(layers), torch.optim.AdamW(n.parameters(), lr=1e-3, fused=True))
    numel = sum(p.numel() for p in n.parameters())
    sides: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[nn.Module, torch.optim.Optimizer]]] = {
        "flashdist": (checkpoint.save, checkpoint.load, ours),
        "torch_adamw_fp32": (torch_save, torch_load, theirs),
    }
    times: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in sides}
    sizes = {}
    for run in range(runs + 1):
        for name, (save, load, pair) in sides.items():
            path = folder / f"{name}-{run}"
            seconds = timed(save, path, *pair), timed(load, path, *pair)
            if run:
                for kind, value in zip(("save", "load"), seconds, strict=True):
                    times[name][kind].append(value)
            sizes[name] = folder_bytes(path)
            shutil.rmtree(path)
    return [
        {
            "arm": name,
            "save_s": median(times[name]["save"]),
            "load_s": median(times[name]["load"]),
            "save_all_s": times[name]["save"],
            "load_all_s": times[name]["load"],
            "bytes": sizes[name],
            "bytes_per_param": sizes[name] / numel,
            "parameters": numel,
        }
        for name in sides
    ]


def main() -> None:
    """Measure, print a table, write JSON; exit status 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="transformer layers of width 768")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write checkpoints; a temporary folder otherwise")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        rows = measure(args.layers, args.runs, Path(temporary))
    ours, theirs = rows
    ratios = {key: ours[key] / theirs[key] for key in BOUNDS}
    table = Table(
        title=f"Checkpoint of {ours['parameters'] / 1e6:.0f} M parameters, {args.runs} alternating runs, medians"
    )
    for column in ("", "save s", "load s", "bytes", "B/param"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(
            row["arm"],
            f"{row['save_s']:.2f}",
            f"{row['load_s']:.2f}",
            f"{row['bytes']:,}",
            f"{row['bytes_per_param']:.3f}",
        )
    table.add_row("ours / torch's", *(f"{ratios[key]:.3f}" for key in BOUNDS), "")
    Console().print(table)
    if args.out is not None:
        facts = {"date": date.today().isoformat(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        args.out.write_text(
            json.dumps({**facts, "commit": args.commit, "ratios": ratios, "rows": rows}, indent=1) + "\n"
        )
    missed = [key for key, bound in BOUNDS.items() if ratios[key] > bound]
    print("reached: all" if not missed else f"missed: {missed}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
