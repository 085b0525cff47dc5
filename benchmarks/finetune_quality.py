"""Whether finetuning with FlashAdamW ends where AdamW does: `python -m benchmarks.finetune_quality --model M --data D`.

launch/finetune.py finetunes a real model (configs/finetune/smollm2-135m.yaml) once for each seed and arm:

    torch_adamw      torch's AdamW on fp32 weights, bf16 autocast on a GPU, gradients clipped to a norm of 1
    flash_adamw      FlashAdamW on bf16 weights, the same clipping
    flash_release    the same with gradient release, clipped by the previous step's norm

All arms of a seed see the same rows in the same order. The result holds every held-out loss; what counts is the mean of
the final ones over the seeds, relative to torch_adamw's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.step import git_commit
from benchmarks.worker import device_name

ROOT = Path(__file__).parent.parent
ARMS = {
    "torch_adamw": ["optimizer.name=torch_adamw", "model.dtype=fp32", "train.gradient_release=false"],
    "flash_adamw": ["train.gradient_release=false"],
    "flash_release": ["train.gradient_release=true"],
}
TARGET = 0.005


def held_out_losses(arm: str, seed: int, args: argparse.Namespace, folder: Path) -> dict[int, float]:
    """The held-out loss by step, of one run. Raises RuntimeError where the run fails."""
    sys.path[:0] = [] if str(ROOT / "launch") in sys.path else [str(ROOT / "launch")]
    import finetune
    from metrics import read_metrics

    run = folder / f"{arm}-{seed}"
    argv = [str(args.config), f"model.source={args.model}", f"data.train={args.data}", f"run.folder={run}"]
    argv += [f"train.seed={seed}", "run.save_every=0", "run.export=null", *args.overrides, *ARMS[arm]]
    if finetune.main(argv):
        raise RuntimeError(f"the run {arm} with seed {seed} failed")
    return {r["step"]: r["eval_loss"] for r in read_metrics(run / "metrics.jsonl") if "eval_loss" in r}


def summarize(losses: dict[str, list[dict[int, float]]]) -> dict[str, Any]:
    """Final losses of the arms, their means, and how far these are from torch_adamw's."""
    finals = {arm: [run[max(run)] for run in runs] for arm, runs in losses.items()}
    means = {arm: statistics.mean(values) for arm, values in finals.items()}
    rows = [
        {
            "arm": arm,
            "final": [round(v, 5) for v in finals[arm]],
            "mean": round(means[arm], 5),
            "relative": round(means[arm] / means["torch_adamw"] - 1, 5) if "torch_adamw" in means else None,
            "first": [round(run[min(run)], 5) for run in runs],
            "losses": [{str(step): round(v, 5) for step, v in run.items()} for run in runs],
        }
        for arm, runs in losses.items()
    ]
    away = [abs(row["relative"]) for row in rows if row["relative"] is not None]
    return {"rows": rows, "within_0.5_percent": bool(away) and max(away) <= TARGET}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a Hugging Face folder or a GGUF file")
    p.add_argument("--data", required=True, help="JSONL, such as launch/python_questions.py writes")
    p.add_argument("--config", type=Path, default=ROOT / "configs" / "finetune" / "smollm2-135m.yaml")
    p.add_argument("--arms", default=",".join(ARMS))
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--out", type=Path, default=Path("benchmarks/results/finetune-quality.json"))
    p.add_argument("--commit", help="recorded in the result (default: asked from git, or 'unknown')")
    p.add_argument("overrides", nargs="*", metavar="key=value")
    args = p.parse_intermixed_args(arguments)
    losses: dict[str, list[dict[int, float]]] = {arm: [] for arm in args.arms.split(",")}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for arm, runs in losses.items():
                runs.append(held_out_losses(arm, seed, args, Path(folder)))
                result = written(losses, args)
    for row in result["rows"]:
        print(row["arm"], "mean", row["mean"], "relative", row["relative"], "finals", row["final"], flush=True)
    print("within 0.5 %:", result["within_0.5_percent"])
    return result


def written(losses: dict[str, list[dict[int, float]]], args: argparse.Namespace) -> dict[str, Any]:
    """The result so far, which is also written: a run that is cut short leaves what it has measured."""
    result = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "torch": torch.__version__,
        "commit": args.commit or git_commit(),
        "model": Path(args.model).name,
        "overrides": args.overrides,
        **summarize({arm: runs for arm, runs in losses.items() if runs}),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
