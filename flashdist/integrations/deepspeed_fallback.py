"""The route without aliasing, for releases of DeepSpeed whose internals this one of flashdist does not know."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashdist.optimizer import FlashOptimizer

_COST = (
    "flashdist does not know the internals of this release of DeepSpeed ({error}). Training goes on with DeepSpeed's "
    "own bf16 clone of the weights and with states whose groups are not known: at ZeRO stage {stage} on N ranks this "
    "costs (2 + 6.8)/N bytes a parameter more for AdamW (the clone; fp32 moments and a 16-bit correction), and "
    "converted checkpoints hold bf16 values. Use a release of DeepSpeed that is named in docs/deepspeed.md, or a newer "
    "flashdist."
)


class WholeFlats(FlashOptimizer):
    """Steps whatever flat tensors DeepSpeed puts in the param groups, as 1-D parameters without groups."""

    def _parameters(self) -> list[Tensor]:
        self._known = [p for group in self.param_groups for p in group["params"]]
        self._known_groups = [i for i, group in enumerate(self.param_groups) for _ in group["params"]]
        return self._known


def use_clones(opt: FlashOptimizer, stage: int, error: Exception) -> str:
    """Let ``opt`` step DeepSpeed's clones; returns the warning that says what it costs."""
    kind: Any = type(opt)
    opt.__class__ = type(kind.__name__, (WholeFlats, kind), {"__doc__": kind.__doc__, "__module__": __name__})
    opt._reset_caches()
    return _COST.format(error=error, stage=int(stage))
