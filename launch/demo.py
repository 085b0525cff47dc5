"""Trains the same small GPT twice, with torch's AdamW in fp32 and with FlashAdamW on BF16 weights, and compares them.

Both start from the same weights, see the same batches and run side by side, each on one CPU core. At the end stands a
table of the memory that each keeps from step to step, measured from the live tensors, with both validation losses; the
curves go into a PNG.

    bash launch/demo.sh [--steps N] [--seed N] [--out demo.png] [--json demo.json]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from data import VOCAB_SIZE, Corpus, batches, load_corpus
from demo_report import KINDS, Run, plot, relative_difference, table
from model import GPT, GPTConfig, weight_decay_groups
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import flashdist
from flashdist.memory import summarize

# BF16 weights are widened for the products: most CPUs multiply BF16 matrices very slowly. On a GPU this would be None.
CONFIG = GPTConfig(vocab_size=VOCAB_SIZE, context=64, layers=4, heads=4, width=256, matmul_dtype=torch.float32)
BATCH = 8
VALIDATION_BATCHES = 96
LEARNING_RATE = 5e-4
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0


@dataclass(frozen=True)
class Setup:
    """A model, its optimizer and the function that clips its gradients."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    clip: Callable[[], Tensor]


def build(flash: bool, seed: int) -> Setup:
    """What a run begins with; the only place where the two runs differ."""
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    if flash:
        flashdist.cast_model(model)
        flash_adamw = flashdist.FlashAdamW(weight_decay_groups(model, WEIGHT_DECAY), lr=LEARNING_RATE)
        return Setup("FlashAdamW, bf16", model, flash_adamw, lambda: flash_adamw.clip_grad_norm_(MAX_NORM))
    adamw = torch.optim.AdamW(weight_decay_groups(model, WEIGHT_DECAY), lr=LEARNING_RATE)
    return Setup(
        "torch AdamW, fp32", model, adamw, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    )


def learning_rate(step: int, steps: int) -> float:
    """A linear warm-up over the first tenth, then half a cosine down to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return LEARNING_RATE * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def measure_bytes(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Bytes per parameter of each kind, from the storages of the live tensors."""
    if isinstance(optimizer, flashdist.FlashOptimizer):
        summary = optimizer.memory_summary()
    else:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [pair for kept in optimizer.state.values() for pair in kept.items()]
        summary = summarize(parameters, gradients, state, derived=[])
    return {kind: getattr(summary, kind) / summary.parameters for kind in KINDS}


@torch.no_grad()
def validate(model: GPT, tokens: Tensor) -> float:
    """Mean loss over windows of the validation text that are the same in every run."""
    windows = batches(tokens, batch=BATCH, context=CONFIG.context, steps=VALIDATION_BATCHES, seed=0)
    return sum(model.loss(x, y).item() for x, y in windows) / VALIDATION_BATCHES


def train(setup: Setup, corpus: Corpus, steps: int, seed: int, progress: Progress) -> Run:
    """One run, from the first weights to the validation loss."""
    model, optimizer = setup.model, setup.optimizer
    task = progress.add_task(setup.name, total=steps, loss=math.nan, speed=0.0)
    losses: list[float] = []
    speed = 0.0
    start = time.perf_counter()
    for step, (x, y) in enumerate(batches(corpus.train, batch=BATCH, context=CONFIG.context, steps=steps, seed=seed)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        setup.clip()
        optimizer.step()
        losses.append(loss.item())
        speed = len(losses) * x.numel() / (time.perf_counter() - start)
        progress.update(task, advance=1, loss=losses[-1], speed=speed)
        if not progress.console.is_terminal and len(losses) % 50 == 0:
            progress.console.print(f"{setup.name}: step {len(losses)} of {steps}, loss {losses[-1]:.3f}")
    seconds = time.perf_counter() - start
    # The last gradients are still there, so this is what the run holds between a backward and its step.
    kept = measure_bytes(optimizer)
    return Run(setup.name, losses, validate(model, corpus.validation), kept, seconds, speed)


def train_both(corpus: Corpus, steps: int, seed: int, progress: Progress) -> tuple[Run, Run]:
    """The reference and the FlashAdamW run, in two threads of one core each."""
    # A second core for each would gain little: the operations are short, and threads that wait for each other spin.
    torch.set_num_threads(1)
    # Built one after the other, because the threads would share the generator of the first weights.
    setups = [build(flash, seed) for flash in (False, True)]
    with ThreadPoolExecutor() as pool:
        reference, flash = pool.map(lambda setup: train(setup, corpus, steps, seed, progress), setups)
    return reference, flash


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT with AdamW and with FlashAdamW and compare them.")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the picture (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    return options


def main() -> None:
    """Both runs, then the table and the files."""
    options = parse_arguments()
    console = Console()
    corpus = load_corpus()
    size = sum(p.numel() for p in GPT(CONFIG).parameters())
    console.print(
        f"A GPT of {size / 1e6:.1f} M parameters learns Python's own documentation and sources "
        f"({len(corpus.train) / 1e6:.1f} MB) for {options.steps} steps of {BATCH * CONFIG.context} tokens, "
        "with both optimizers side by side."
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        reference, flash = train_both(corpus, options.steps, options.seed, progress)
    console.print(table(reference, flash))
    plot(reference, flash, options.out)
    console.print(f"Curves and memory: {options.out}")
    if options.json:
        figures = {
            "seed": options.seed,
            "steps": options.steps,
            "parameters": size,
            "torch": torch.__version__,
            "relative_difference": relative_difference(reference, flash),
            "runs": [asdict(reference), asdict(flash)],
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
