"""Hugging Face's Trainer with FlashAdamW beside its own adamw_torch_fused: time of a step and peak memory.

    python -m benchmarks.trainer_speed --out trainer-speed.json
    python -m benchmarks.trainer_speed --smoke            a quick look at whether it works, on a CPU too

A GPT-2 of 124 M parameters on random tokens, gradients clipped by Trainer to a norm of 1. The arms:

    torch          adamw_torch_fused on fp32 weights, bf16 autocast (``bf16=True``)
    torch_bf16     adamw_torch_fused on bf16 weights, without a master copy
    flash          FlashAdamW on bf16 weights, through use_flash_optimizer

They take turns of some steps each, with a new Trainer each time. The first steps of a turn are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.step import git_commit
from benchmarks.worker import device_name
from flashdist import cast_model
from flashdist.integrations.transformers import use_flash_optimizer

ARMS = ("torch", "torch_bf16", "flash")
WARM_UP = 5


def build_model(smoke: bool) -> Any:
    """GPT-2 with drawn weights, fp32."""
    import transformers

    size = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 64} if smoke else {}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def turn(arm: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """A short training: seconds of each step after the warm-up, the peak of the device's memory, the last loss."""
    import transformers

    cuda = torch.cuda.is_available()
    model = build_model(args.smoke)
    if arm == "flash":
        cast_model(model)
    elif arm == "torch_bf16":
        model.to(torch.bfloat16)
    rows = args.batch * (args.steps + WARM_UP)
    tokens = torch.randint(model.config.vocab_size, (rows, args.sequence), generator=torch.Generator().manual_seed(1))
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=args.steps + WARM_UP, per_device_train_batch_size=args.batch, learning_rate=6e-4,
        weight_decay=0.1, adam_beta2=0.95, warmup_steps=2, max_grad_norm=1.0, optim="adamw_torch_fused",
        bf16=arm == "torch", report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
        use_cpu=not cuda, dataloader_pin_memory=cuda,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens], callbacks=[Clock()]
    )
    if arm == "flash":
        use_flash_optimizer(trainer)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    loss = trainer.train().training_loss
    steps = [b - a for a, b in zip(ends[WARM_UP - 1 : -1], ends[WARM_UP:], strict=True)]
    return {"steps": steps, "peak": torch.cuda.max_memory_allocated() if cuda else 0, "loss": loss}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the command line."""
    p = argparse.ArgumentParser("benchmarks.trainer_speed", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--sequence", type=int, default=1024)
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--turns", type=int, default=4)
    p.add_argument("--smoke", action="store_true")
    p.add_argument("--commit", help="recorded in the result (default: asked from git, or 'unknown')")
    p.add_argument("--out", type=Path)
    args = p.parse_args(argv)
    if args.smoke:
        args.batch, args.sequence, args.steps, args.turns = 2, 32, 4, 2
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(args.turns):
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                found[arm].append(turn(arm, args, folder))
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    record = summarize(found, args)
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return record


def summarize(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    """Medians of the turns' medians; the ratio is of turns that stood beside each other."""
    import transformers

    rows = []
    for arm, turns in found.items():
        times = [median(one["steps"]) for one in turns]
        against = [median(one["steps"]) for one in found["torch"]]
        rows.append(
            {
                "arm": arm,
                "step_ms": round(median(times) * 1e3, 3),
                "over_torch": round(median(a / b for a, b in zip(times, against, strict=True)), 4),
                "peak_gib": round(max(one["peak"] for one in turns) / 2**30, 3),
                "turn_ms": [round(t * 1e3, 3) for t in times],
                "mean_loss": round(turns[0]["loss"], 4),
            }
        )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": args.commit or git_commit(),
        "batch": args.batch,
        "sequence": args.sequence,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
