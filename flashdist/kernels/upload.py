"""Host tables on their way to a GPU, without a synchronisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Upload:
    """A device tensor that is written through pinned host buffers, none of which is reused before its copy is done."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, copies: int) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        pin = device.type == "cuda"
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=pin) for _ in range(copies)]
        self._done: list[Any] = [None] * copies
        self._next = 0

    def host(self) -> Tensor:
        """The next host buffer, free to be filled."""
        if self._done[self._next] is not None:
            self._done[self._next].synchronize()
        return self._hosts[self._next]

    def send(self) -> None:
        """Copy the buffer that :meth:`host` returned to the device, on the current stream."""
        self.device.copy_(self._hosts[self._next], non_blocking=True)
        if self.device.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._done[self._next] = torch.cuda.Event()
            self._done[self._next].record()
        self._next = (self._next + 1) % len(self._hosts)
