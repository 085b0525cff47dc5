"""What releases of DeepSpeed before the newest tested one do otherwise, and what is done about it.

Read in their sources (0.18.3 to 0.19.8) and run with 0.18.3, 0.18.5, 0.19.4 and 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MINIMUM = (0, 18, 3)
# Before it: bf16 optimizer states are left out of checkpoints at stage 0, when saving and when loading.
SAVES_STAGE_0 = (0, 18, 5)
# Before it: an overflow of bf16 gradients is not looked for at stage 3, whatever bf16.check_grad_overflow says.
SEES_OVERFLOW_AT_STAGE_3 = (0, 19, 8)
# Before it: of several parameters that are gathered at once only the last one is waited for. The order of a GPU's
# streams makes up for it, gloo has none.
WAITS_FOR_GATHERS = (0, 19, 8)


def version() -> tuple[int, ...]:
    """The running DeepSpeed's version."""
    from deepspeed.git_version_info import version as text

    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def with_stage_0_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's ``_save_checkpoint`` or ``_load_checkpoint``, with optimizer states also at stage 0.

    These methods ask ``bfloat16_enabled()`` for one thing: whether states are in ZeRO's files instead. At stage 0 there
    are none, so the answer for the time of the call is no. The files are those of newer releases.
    """

    def with_states(self: Any, *args: Any, **kwargs: Any) -> Any:
        from flashdist.integrations.deepspeed_stage0 import Stage0Optimizer

        if not isinstance(self.optimizer, Stage0Optimizer):
            return original(self, *args, **kwargs)
        with _states_are_not_in_zeros_files(self):
            return original(self, *args, **kwargs)

    return with_states


@contextmanager
def _states_are_not_in_zeros_files(engine: Any) -> Iterator[None]:
    engine.bfloat16_enabled = lambda: False
    try:
        yield
    finally:
        del engine.bfloat16_enabled


def must_look_for_overflow(stage: int, wanted: bool) -> bool:
    """Whether the optimizer must look for an overflow itself, as ``bf16.check_grad_overflow`` wants it."""
    return stage == 3 and wanted and version() < SEES_OVERFLOW_AT_STAGE_3


def gathers_too_early(stage: int, device: str, ranks: int) -> str:
    """A warning where gathered weights may be read before they are there, otherwise an empty text."""
    if stage != 3 or device != "cpu" or ranks == 1 or version() >= WAITS_FOR_GATHERS:
        return ""
    return (
        f"DeepSpeed {_text(version())} at ZeRO stage 3 on CPUs, with any optimizer: it may read weights before all of "
        "them are gathered (those below stage3_param_persistence_threshold after each step, and GatheredParameters of "
        f"several parameters). Use {_text(WAITS_FOR_GATHERS)} or newer; GPUs are not affected"
    )


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
