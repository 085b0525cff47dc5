"""The process that measures: one optimizer, all its sets, one JSON record a line as soon as it is known.

Records go to a file and not to the standard output, where some packages print; what was measured before a time-out or a
crash is kept. Kinds: `host` (device and versions), `gate`, `row` and `skip`.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks import gate, measure
from benchmarks.optimizers import OPTIMIZERS, CaptureFailed
from benchmarks.sets import SETS

GATE = "gate"  # the name under which a worker checks instead of measuring


def device_name(device: str) -> str:
    """What the result is filed under."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"


def triton_version() -> str | None:
    """The installed Triton, if any."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def record(out: Path, kind: str, **fields: Any) -> None:
    """Appends one record."""
    with out.open("a") as file:
        file.write(json.dumps({"kind": kind, **fields}) + "\n")


def check(names: list[str], device: str, out: Path) -> None:
    """Runs the gate for all `names`; graphs last, since a failed capture can leave the device unusable."""
    for name in sorted(names, key=lambda n: OPTIMIZERS[n].mode == "graph"):
        record(out, "gate", **gate.run_gate(name, OPTIMIZERS[name], device).as_dict())


def measure_sets(name: str, sets: list[str], device: str, iters: int, out: Path) -> None:
    """Measures one optimizer on each set. A set that fails is left out with the reason; the next one is tried."""
    for set_name in sets:
        try:
            row = measure.measure(OPTIMIZERS[name], SETS[set_name](), device, iters)
        except CaptureFailed as error:
            record(out, "skip", set=set_name, optimizer=name, reason=f"graph capture failed: {error}")
            return
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            record(out, "skip", set=set_name, optimizer=name, reason=reason)
        else:
            record(out, "row", set=set_name, optimizer=name, **row)
        measure.free(device)


def run(name: str, optimizers: list[str], sets: list[str], device: str, iters: int, out: Path) -> None:
    """The whole of a worker: the host's record, then the gate or the measurements."""
    if name == GATE:
        check(optimizers, device, out)
        return
    copy = measure.copy_bandwidth() if device == "cuda" else None
    record(
        *(out, "host"),
        device=device_name(device),
        torch=torch.__version__,
        triton=triton_version(),
        copy_bytes_per_s=copy,
    )
    measure_sets(name, sets, device, iters, out)
