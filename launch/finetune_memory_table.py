"""What a run needs for weights, optimizer state and gradients: planned from shapes, and measured at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flashdist import FlashOptimizer
from flashdist.memory import state_kind
from flashdist.numerics.groups import group_layout
from flashdist.param_state import expected_entries

MIB, GIB = 2**20, 2**30


def planned(opt: torch.optim.Optimizer, released: bool) -> dict[str, int]:
    """Bytes by kind once training goes; with gradient release the largest gradient is what counts."""
    sizes = dict.fromkeys(("weights", "corrections", "moments", "scales", "steps", "gradients"), 0)
    gradients = []
    for group in opt.param_groups:
        for p in group["params"]:
            sizes["weights"] += p.numel() * p.element_size()
            gradients.append(p.numel() * p.element_size())
            if isinstance(opt, FlashOptimizer):
                for entry in expected_entries(p, group, opt._rule(group), group_layout(p.shape)):
                    sizes[state_kind(entry.key)] += math.prod(entry.shape) * entry.dtype.itemsize
            else:
                sizes["moments"] += 8 * p.numel()
    sizes["gradients"] = max(gradients) if released else sum(gradients)
    return sizes


def measured(opt: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Bytes by kind between two steps, counted from the live tensors; on a GPU the peak of the run too."""
    if isinstance(opt, FlashOptimizer):
        summary = opt.memory_summary()
        kinds = ("weights", "corrections", "moments", "scales", "steps", "gradients", "derived")
        sizes = {kind: int(getattr(summary, kind)) for kind in kinds}
    else:
        params = [p for group in opt.param_groups for p in group["params"]]
        state = [t for kept in opt.state.values() for t in kept.values() if isinstance(t, torch.Tensor)]
        sizes = {
            "weights": sum(p.numel() * p.element_size() for p in params),
            "moments": sum(t.numel() * t.element_size() for t in state),
        }
    if device.type == "cuda":
        sizes["peak of the run, activations included"] = torch.cuda.max_memory_allocated()
    return sizes


def show(title: str, sizes: Mapping[str, int]) -> str:
    """A small table as text."""
    rows = [(kind, size) for kind, size in sizes.items() if size]
    total = sum(size for kind, size in rows if not kind.startswith("peak"))
    rows.insert(len(rows) - any(kind.startswith("peak") for kind, _ in rows), ("together", total))
    width = max(len(kind) for kind, _ in rows)
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    return "\n".join([f"memory, {title}", *(f"  {kind:<{width}}  {size / unit:9.3f} {name}" for kind, size in rows)])
