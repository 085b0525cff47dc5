"""How a run is asked to stop from outside."""

from __future__ import annotations

import signal
from collections.abc import Iterator
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
