"""torch's clip_grad_norm_ finds no gradients under gradient release, and would report a norm of 0 and clip nothing.

So while a release is active, the function that torch's ``clip_grad_norm_`` ends in is replaced by one that raises for
released parameters and calls the original for all others (and for a norm of inf, which clips nothing). The last handle
that is removed puts the original back.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch.nn.utils.clip_grad as clip_grad
from torch import Tensor

# However clip_grad_norm_ was imported, it looks this name up in its module (torch 2.6 and later).
REPLACED = "_clip_grads_with_norm_"


class Releasing(Protocol):
    """A gradient release."""

    def owns(self, p: Tensor) -> bool:
        """Whether this parameter is stepped during backward."""

    def refuse_clipping(self) -> None:
        """Raise."""


class ClipGuard:
    """Stands where torch's function stood."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.releases: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, parameters: Iterable[Tensor], max_norm: float, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # Hugging Face's Trainer clips to inf where it only wants to log the norm.
        for release in self.releases if float(max_norm) < math.inf else ():
            if any(release.owns(p) for p in parameters):
                release.refuse_clipping()
        return self.original(parameters, max_norm, *args, **kwargs)


def guard_clipping(release: Releasing) -> None:
    """Refuse torch's clip_grad_norm_ for the parameters of this release."""
    current = getattr(clip_grad, REPLACED)
    if not isinstance(current, ClipGuard):
        current = ClipGuard(current)
        setattr(clip_grad, REPLACED, current)
    current.releases.add(release)


def unguard_clipping(release: Releasing) -> None:
    """The opposite; harmless when called again."""
    current = getattr(clip_grad, REPLACED)
    if isinstance(current, ClipGuard):
        current.releases.discard(release)
        if not current.releases:
            setattr(clip_grad, REPLACED, current.original)
