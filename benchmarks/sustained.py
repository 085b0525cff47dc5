"""A step's time over seconds without a pause, beside the GPU's clock and power.

Usage: python -m benchmarks.sustained [SET OPTIMIZER SECONDS]      (default: llama1.4b flashdist_adamw 4)

After a second at rest the steps are issued back to back with events around each. A line for every fifth of a second
shows their median; nvidia-smi, where it is installed, says what the SM clock and the power were meanwhile, and which
limit was active. A time that rises while the clock falls is the power limit's, not the optimizer's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from statistics import median

import torch

from benchmarks import measure
from benchmarks.optimizers import OPTIMIZERS, step_function
from benchmarks.sets import SETS

WINDOW_MS = 200
QUERY = "clocks.sm,clocks.mem,power.draw,clocks_throttle_reasons.active"


def watch() -> subprocess.Popen[str] | None:
    """nvidia-smi, reporting every window, or None."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader", f"-lms={WINDOW_MS}", "-i=0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(argv: list[str]) -> int:
    """Prints the series; returns 2 without a GPU."""
    set_name, name, seconds = (*argv, *("llama1.4b", "flashdist_adamw", "4")[len(argv) :])
    if not torch.cuda.is_available():
        print("benchmarks.sustained needs a GPU")
        return 2
    entry = OPTIMIZERS[name]
    params = [torch.nn.Parameter((torch.randn(s, device="cuda") * 0.02).to(entry.dtype)) for s in SETS[set_name]()]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    step = step_function(entry, entry.build(params))
    for _ in range(measure.WARM_UP_STEPS["cuda"]):
        step()
    torch.cuda.synchronize()
    time.sleep(1.0)
    rested = median(measure.event_times(step, 5))
    time.sleep(1.0)
    watcher = watch()
    times = measure.event_times(step, int(float(seconds) * 1e3 / rested))
    print(f"{name} on {set_name}: {rested:.3f} ms rested; then, without a pause:")
    elapsed, window = 0.0, [times[0]]
    for ms in times:
        window.append(ms)
        if elapsed // WINDOW_MS != (elapsed + ms) // WINDOW_MS:
            print(f"  {elapsed / 1e3:5.2f} s  {median(window):.3f} ms")
            window = []
        elapsed += ms
    if watcher is not None:
        watcher.terminate()
        print(f"nvidia-smi ({QUERY}), every {WINDOW_MS} ms:", watcher.communicate()[0], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
