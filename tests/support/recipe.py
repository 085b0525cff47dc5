"""Runs a script of docs/recipes/ as a user does, in this folder, and writes down what it left.

python -m tests.support.recipe SCRIPT FOUND.json [--twice]    # --twice: again in the same process, from the middle
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from flashdist import FlashOptimizer

STEPS = 20


def run(script: str) -> dict[str, Any]:
    """Losses by step, how many steps were taken, and the optimizer's bytes per parameter by kind."""
    taken = []
    hook = register_optimizer_step_post_hook(lambda opt, *_: taken.append(isinstance(opt, FlashOptimizer)))
    left = runpy.run_path(script, run_name="__main__")
    hook.remove()
    opt = left["opt"]
    while not isinstance(opt, FlashOptimizer):
        opt = opt.optimizer  # Accelerate's, DeepSpeed's
    summary = opt.memory_summary()
    kinds = ("weights", "corrections", "moments", "scales", "parameters")
    bytes_of = {kind: getattr(summary, kind) for kind in kinds}
    return {"losses": left["losses"], "steps": sum(taken), "class": type(opt).__name__, "bytes": bytes_of}


def forget_the_end(folder: Path) -> None:
    """Leave the checkpoint of the middle alone, as if the run had been stopped there."""
    for path in folder.glob(f"*{STEPS}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if (folder / "latest").exists():  # DeepSpeed's
        (folder / "latest").write_text(f"step-{STEPS // 2:04}")


def main(script: str, out: str, *, twice: bool) -> None:
    torch.set_num_threads(1)
    if "deepspeed" in script:
        import deepspeed

        # It would compile a C++ extension for reductions in shared memory.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = [run(script)]
    if twice:
        forget_the_end(Path("runs", Path(script).stem))
        found.append(run(script))
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:3], twice="--twice" in sys.argv[3:])
    # Without Python's clean-up, in which a thread of gloo that still holds a tensor aborts the process
    # (https://github.com/pytorch/pytorch/issues/190489).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
