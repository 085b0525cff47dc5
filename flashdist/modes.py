"""Running outside of autograd, and outside of torch.inference_mode too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_autograd(function: Callable[P, T]) -> Callable[P, T]:
    """torch.no_grad for what keeps tensors that it allocates.

    Under torch.inference_mode, as around an evaluation, they would be tensors that no later step could write to.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            with torch.no_grad():
                return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():  # leaving it enables autograd again
            return function(*args, **kwargs)

    return call
