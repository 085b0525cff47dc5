"""How a run is asked to stop from outside."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Set by SIGTERM and SIGUSR1: the run ends after the step it is in, with a checkpoint."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handles the signals for the time of a `with`."""

        def ask(number: int, frame: FrameType | None) -> None:
            self.asked = True

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def interruptible(main: Callable[[], int]) -> int:
    """What `main` returns; 130 and a line, where Ctrl-C (SIGINT) ends it at once and without a checkpoint."""
    try:
        return main()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            line = "interrupted: checkpoints are intact, go on from the last one with --resume auto"
            print(line, file=sys.stderr, flush=True)
        return 130
