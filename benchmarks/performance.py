"""The tables of docs/performance.md and the speed table of the README, made from the result files.

Usage: python -m benchmarks.performance [--check]

A table stands between `<!-- NAME -->` and `<!-- end NAME -->`. With `--check` nothing is written: the exit status is 1
where a page is not what the result files give.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.quality.report import table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
SETS = {
    "flat1b": "one matrix of 2^30",
    "llama1.4b": "Llama-3.1-8B: embedding and 4 layers",
    "gpt2_124m": "GPT-2 124M, 148 tensors",
    "resnet50": "ResNet-50, 161 tensors",
    "resnet101": "ResNet-101, 314 tensors",
    "tiny2000": "2,000 tensors of 64 x 64",
}
# What the last run had no time for comes from the run before.
STEP, EARLIER_STEP = "step-h200", "step-h200-2026-11-30"
OTHERS = {
    "torch_fused_fp32": "torch fused, fp32",
    "flashoptim": "flashoptim 24-bit",
    "bnb8": "bitsandbytes 8-bit",
    "torchao8": "torchao 8-bit",
}
Rows = dict[tuple[str, str], dict[str, Any]]


def steps() -> Rows:
    """All measured steps, by set and optimizer."""
    rows: Rows = {}
    for name in (EARLIER_STEP, STEP):
        rows |= {(row["set"], row["optimizer"]): row for row in report.read(RESULTS / f"{name}.json")["rows"]}
    return rows


def read(name: str) -> dict[str, Any]:
    """A result file of another kind."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def digits(value: float | None) -> str:
    """Three significant digits, and never an exponent; empty where there is no figure."""
    return "" if value is None else f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def speed() -> str:
    """A step of AdamW, set by set: milliseconds of a loop, ours with its share of the copy bandwidth."""
    rows, lines = steps(), []
    for key, name in SETS.items():
        ours = rows[key, "flashdist_adamw"]
        others = [digits(rows[key, other]["wall_ms"]) if (key, other) in rows else "" for other in OTHERS]
        lines.append((name, f"**{digits(ours['wall_ms'])}** ({ours['fraction_of_copy']:.2f})", *others))
    return table(("parameters", "**FlashAdamW**", *OTHERS.values()), lines)


def kinds_of_steps() -> str:
    """What our optimizers take for the largest and the smallest set, and what surrounds a step."""
    names = {
        "flashdist_adamw": "FlashAdamW",
        "flashdist_adamw_clip": "the same after clipping the global norm",
        "flashdist_adamw_graph": "the same in a CUDA graph",
        "flashdist_lion": "FlashLion",
        "flashdist_sgd": "FlashSGD with momentum",
        "torch_fused_fp32": "torch AdamW fused, fp32",
        "torch_fused_bf16": "torch AdamW fused, pure bf16",
        "torch_foreach_fp32": "torch AdamW foreach, fp32",
    }
    rows, lines = steps(), []
    for key, name in names.items():
        cells = [rows.get((s, key), {}) for s in ("llama1.4b", "gpt2_124m", "tiny2000")]
        times = [f"{digits(cell['device_ms'])} / {digits(cell['wall_ms'])}" if cell else "" for cell in cells]
        lines.append((name, *times, digits(cells[0].get("sustained_ms"))))
    head = ("ms on the device / of a loop", "Llama set", "GPT-2 set", "2,000 tensors", "Llama set, sustained")
    return table(head, lines)


def memory_of_a_step() -> str:
    """What a step itself holds on the Llama set: state, and what is allocated while it runs."""
    names = {"flashdist_adamw": "FlashAdamW", "torch_foreach_fp32": "torch foreach, fp32", **OTHERS}
    rows, lines = steps(), []
    for key, name in names.items():
        row = rows["llama1.4b", key]
        temporary = row["temporary_bytes"] / 2**20
        lines.append((name, f"{row['bytes_per_param']:.3f}", f"{row['peak_bytes'] / 2**30:.2f}", f"{temporary:,.0f}"))
    return table(("AdamW", "state, bytes per parameter", "peak, GiB", "temporary, MiB"), lines)


def finetuning() -> str:
    """A full finetuning step of an 8B model."""
    names = {
        "torch_adamw_fp32": "torch AdamW fused, fp32 weights and bf16 autocast",
        "flashoptim": "flashoptim 0.1.4, 24-bit",
        "flashoptim_release": "flashoptim, its gradient release",
        "flashdist": "FlashAdamW",
        "flashdist_release": "FlashAdamW, gradient release",
    }
    rows = {row["arm"]: row for row in read("finetune-memory-h200")["rows"]}
    lines = [
        (name, f"{rows[arm]['peak_gib']:.1f}", f"{rows[arm]['steady_gib']:.1f}", f"{rows[arm]['tokens_per_s']:,.0f}")
        for arm, name in names.items()
    ]
    return table(("", "peak GiB", "between steps", "tokens/s"), lines)


def pretraining() -> str:
    """GPT-2 124M, both arms compiled."""
    arms = read("pretrain-speed-h200")["arms"]
    names = {"flash": "FlashAdamW, bf16 weights", "torch": "torch AdamW fused, fp32 weights and bf16 autocast"}
    lines = [
        (
            name,
            f"{arms[arm]['tokens_per_second']:,.0f}",
            f"{arms[arm]['peak_bytes'] / 2**30:.2f}",
            f"{arms[arm]['steady_bytes'] / 2**30:.2f}",
        )
        for arm, name in names.items()
    ]
    return table(("", "tokens/s", "peak GiB", "between steps"), lines)


def trainer() -> str:
    """GPT-2 124M in Hugging Face's Trainer."""
    names = {
        "flash": "FlashAdamW, bf16 weights",
        "torch": "adamw_torch_fused, fp32 weights and bf16 autocast",
        "torch_bf16": "adamw_torch_fused, bf16 weights without a master copy",
    }
    rows = {row["arm"]: row for row in read("trainer-speed-h200")["rows"]}
    lines = [(name, f"{rows[arm]['step_ms']:.1f}", f"{rows[arm]['peak_gib']:.2f}") for arm, name in names.items()]
    return table(("", "ms a step", "peak GiB"), lines)


def checkpoints() -> str:
    """Saving and loading on a CPU beside torch.save of AdamW in fp32."""
    names = {"flashdist": "flashdist.checkpoint", "torch_adamw_fp32": "torch.save, AdamW in fp32"}
    rows = {row["arm"]: row for row in read("checkpoint-cpu")["rows"]}
    lines = [
        (name, f"{rows[arm]['save_s']:.2f}", f"{rows[arm]['load_s']:.2f}", f"{rows[arm]['bytes_per_param']:.2f}")
        for arm, name in names.items()
    ]
    return table(("", "save, s", "load, s", "bytes per parameter"), lines)


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "kinds of steps": kinds_of_steps,
    "memory of a step": memory_of_a_step,
    "finetuning": finetuning,
    "pretraining": pretraining,
    "trainer": trainer,
    "checkpoints": checkpoints,
}


def filled(page: str) -> str:
    """The page with all its tables made anew. Raises KeyError for a table that is not known."""

    def section(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end {found[1]} -->"

    return re.sub(r"<!-- (?!end )([^>]*) -->\n.*?<!-- end \1 -->", section, page, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Writes the pages, or looks whether they are right."""
    stale = 0
    for path in PAGES:
        old = path.read_text(encoding="utf-8")
        new = filled(old)
        if new != old:
            stale = 1
            if "--check" in arguments:
                print(f"{path.name} is not what the result files give: run python -m benchmarks.performance")
            else:
                path.write_text(new, encoding="utf-8")
                print(f"{path.name} written")
    return stale if "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
