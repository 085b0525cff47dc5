"""Tokens per second and memory of pretraining GPT-2 124M, FlashAdamW beside torch's AdamW, in one process on one GPU.

    python -m benchmarks.pretrain_speed --out pretrain-speed.json
    python -m benchmarks.pretrain_speed --device cpu --smoke      a quick look at whether it works

Both train the model of launch/model.py on the same batches of real text from the same first weights:

    flash   FlashAdamW on BF16 weights
    torch   AdamW (fused) on fp32 weights, forward and backward under autocast to BF16

First each trains for all steps, which gives its losses and its peak memory. Then both, alive at the same time, take
turns of some steps each, which gives the speeds: medians over the turns.

It needs torch and numpy alone. The text is the sources of the standard library and of torch. A token is a word, a run
of spaces or a single sign; the most frequent have ids of their own, the others share the rest by a checksum. So the
losses can be compared with each other and with nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import sys
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flashdist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))

from model import GPT, GPT2_124M, GPTConfig, init_weights, weight_decay_groups
from sampling import num_windows, read_windows, sample_ids

SHARED_IDS = 304  # of tokens without an id of their own
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, BETAS = 6e-4, 0.1, 1.0, (0.9, 0.95)
WORD = re.compile(rb"[A-Za-z]+|[0-9]+|[ \t]+|\n|[^A-Za-z0-9 \t\n]")


def read_tokens(megabytes: float, vocabulary: int) -> np.ndarray[Any, Any]:
    """Ids of real text, the same on every machine with the same Python and torch."""
    roots = (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent)
    paths = sorted(p for root in roots for p in root.rglob("*.py") if "site-packages" not in p.relative_to(root).parts)
    words: list[bytes] = []
    size = 0
    # An order without a system, so that neighbours in a folder are no neighbours in the text.
    for path in sorted(paths, key=lambda p: zlib.crc32(p.name.encode())):
        text = path.read_bytes()
        words += WORD.findall(text)
        size += len(text)
        if size > megabytes * 1e6:
            break
    own = vocabulary - SHARED_IDS
    ids = {word: i for i, (word, _) in enumerate(Counter(words).most_common(own))}
    return np.array([ids.get(w, own + zlib.crc32(w) % SHARED_IDS) for w in words], dtype=np.uint16)


class Arm:
    """A model with its optimizer, and its steps."""

    def __init__(self, name: str, shape: GPTConfig, options: argparse.Namespace, tokens: np.ndarray[Any, Any]) -> None:
        self.name, self.options, self.tokens, self.shape = name, options, tokens, shape
        self.device = torch.device(options.device)
        self.step = 0
        self.losses: list[float] = []
        with torch.device("meta"):
            self.model = GPT(shape)
        flash = name == "flash"
        if flash:
            flashdist.cast_model(self.model)
        if options.compile:
            self.model.compile_parts()
        self.model.to_empty(device=self.device)
        init_weights(self.model, options.seed)
        groups = weight_decay_groups(self.model, WEIGHT_DECAY)
        self.optimizer: torch.optim.Optimizer
        self.clip: Callable[[], Tensor]
        if flash:
            ours = flashdist.FlashAdamW(groups, lr=LEARNING_RATE, betas=BETAS)
            self.optimizer, self.clip = ours, lambda: ours.clip_grad_norm_(MAX_NORM)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
            self.clip = lambda: torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.autocast = not flash

    def precision(self) -> AbstractContextManager[Any]:
        """What forward runs under."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next step's sequences, (B, T) each: the same for both arms."""
        context = self.shape.context
        windows, count = num_windows(self.tokens, context), self.options.batch
        ids = sample_ids(self.step * count, count, windows=windows, seed=self.options.seed)
        x, y = read_windows(self.tokens, ids, context)
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True), y.pin_memory().to(self.device, non_blocking=True)
        return x, y

    def train(self, steps: int, log_every: int = 0) -> None:
        """Some more steps; the loss of every `log_every`-th is kept."""
        options = self.options
        for _ in range(steps):
            warm = min(1.0, (self.step + 1) / 20)
            cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, self.step / options.steps)))
            for group in self.optimizer.param_groups:
                group["lr"] = LEARNING_RATE * warm * cosine
            self.optimizer.zero_grad()
            xs, ys = (part.split(options.micro_batch) for part in self.batch())
            total = torch.zeros((), device=self.device)
            for x, y in zip(xs, ys, strict=True):
                with self.precision():
                    loss = self.model(x, y).mean() / len(xs)
                loss.backward()
                total += loss.detach()
            self.clip()
            self.optimizer.step()
            self.step += 1
            if log_every and (self.step % log_every == 0 or self.step == 1):
                self.losses.append(total.item())
        synchronize(self.device)

    def first_run(self) -> dict[str, Any]:
        """All steps, alone on the device: losses, memory, and the time that the first step took (compilation)."""
        self.train(1, self.options.log_every)  # state is allocated, kernels are compiled
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.train(self.options.steps - 1, self.options.log_every)
        figures: dict[str, Any] = {"losses": self.losses}
        if self.device.type == "cuda":
            figures["peak_bytes"] = torch.cuda.max_memory_allocated()
            figures["steady_bytes"] = torch.cuda.memory_allocated()  # weights, gradients, states; and the last batch
        return figures


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def take_turns(arms: list[Arm], turns: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step by arm, one figure a turn; the order is reversed every time."""
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for turn in range(turns):
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            start = time.perf_counter()
            arm.train(steps)
            seconds[arm.name].append((time.perf_counter() - start) / steps)
    return seconds


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser("benchmarks.pretrain_speed", description="Speed and memory of pretraining GPT-2 124M.")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--batch", type=int, default=32, help="sequences of 1024 tokens a step (default: %(default)s)")
    p.add_argument("--micro-batch", type=int, default=16, help="sequences of a forward pass (default: %(default)s)")
    p.add_argument("--turns", type=int, default=6, help="of each optimizer, for the speed (default: %(default)s)")
    p.add_argument("--turn-steps", type=int, default=20, help="steps of a turn (default: %(default)s)")
    p.add_argument("--log-every", type=int, default=10)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--megabytes", type=float, default=24, help="of text (default: %(default)s)")
    p.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    p.add_argument("--smoke", action="store_true", help="a tiny model and few steps")
    p.add_argument("--out", type=Path, default=Path("pretrain-speed.json"))
    options = p.parse_args(argv)
    if options.batch % options.micro_batch:
        p.error("--batch must be a multiple of --micro-batch")
    return options


def main(argv: list[str] | None = None) -> None:
    """Both arms, then the file and a line each."""
    options = parse_arguments(argv)
    shape = replace(GPT2_124M, vocab_size=50304)
    if options.smoke:
        shape = replace(shape, vocab_size=1024, layers=1, heads=2, width=64, context=32)
        options.steps, options.batch, options.micro_batch, options.turns, options.turn_steps = 4, 4, 2, 2, 2
        options.megabytes, options.compile = 0.2, False
    start = time.perf_counter()
    tokens = read_tokens(options.megabytes, shape.vocab_size)
    record: dict[str, Any] = {
        "what": "pretraining of a GPT-2 124M shape, tied head, fp32 residual stream" + " (smoke)" * options.smoke,
        "text": "sources of Python's standard library and of torch; words by frequency, the rest by a checksum, no BPE",
        "tokens_of_text": len(tokens),
        "vocabulary": shape.vocab_size,
        "distinct_tokens": len(np.unique(tokens)),
        "tokens_a_step": options.batch * shape.context,
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "arms": {},
    }
    arms: list[Arm] = []
    for name in ("flash", "torch"):
        before = torch.cuda.memory_allocated() if options.device == "cuda" else 0
        arm = Arm(name, shape, options, tokens)
        figures = arm.first_run()
        for key in ("peak_bytes", "steady_bytes"):
            if key in figures:
                figures[key] -= before  # of the other arm, which stays for the turns
        record["arms"][name] = figures
        arms.append(arm)
        print(
            f"{name}: loss {arm.losses[0]:.3f} -> {arm.losses[-1]:.3f}, {time.perf_counter() - start:.0f} s", flush=True
        )
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    for name, seconds in take_turns(arms, options.turns, options.turn_steps).items():
        figures = record["arms"][name]
        figures["seconds_a_step"] = seconds
        figures["tokens_per_second"] = record["tokens_a_step"] / median(seconds)
    flash, torch_arm = record["arms"]["flash"], record["arms"]["torch"]
    record["speed_ratio"] = flash["tokens_per_second"] / torch_arm["tokens_per_second"]
    record["seconds"] = time.perf_counter() - start
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for name, figures in record["arms"].items():
        memory = "".join(f", {k} {figures[k] / 2**30:.2f} GiB" for k in ("peak_bytes", "steady_bytes") if k in figures)
        print(f"{name}: {figures['tokens_per_second']:,.0f} tokens/s{memory}, loss {figures['losses'][-1]:.4f}")
    print(f"flash / torch: {record['speed_ratio']:.3f} times the tokens per second; {options.out}")


if __name__ == "__main__":
    main()
