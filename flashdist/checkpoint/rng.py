"""The states of the random number generators of this process, as tensors."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def rng_tensors() -> dict[str, Tensor]:
    """States of torch's CPU generator, the current CUDA device's, Python's and (where it is loaded) NumPy's."""
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        if name == "MT19937":
            states["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
            states["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    return states


def check_rng(states: dict[str, Tensor]) -> None:
    """ValueError unless :func:`set_rng` will take the states, naming the one that it would not. Nothing is set."""
    if "torch" in states:
        _try("torch", lambda: torch.Generator().set_state(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        _try("cuda", lambda: torch.Generator("cuda").set_state(states["cuda"]))
    if "python" in states:
        _try("python", lambda: random.Random().setstate(_python_state(states)))
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        _try("numpy", lambda: numpy.random.RandomState().set_state(_numpy_state(states)))


def _try(name: str, put: Callable[[], object]) -> None:
    try:
        put()
    except (ValueError, TypeError, RuntimeError, OverflowError, IndexError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the checkpoint's random state {name!r} is none ({reason}): nothing was loaded") from error


def _python_state(states: dict[str, Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    version, *words = states["python"].tolist()
    gauss = states["python_gauss"].tolist()
    return version, tuple(words), float(gauss[0]) if gauss else None


def _numpy_state(states: dict[str, Tensor]) -> tuple[str, Any, int, int, float]:
    *keys, position, has_gauss = states["numpy"].tolist()
    return (
        "MT19937",
        sys.modules["numpy"].array(keys, dtype="uint32"),
        position,
        has_gauss,
        float(states["numpy_gauss"]),
    )


def set_rng(states: dict[str, Tensor]) -> None:
    """Put back what :func:`rng_tensors` gave; generators without a state in it stay as they are."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "python" in states:
        random.setstate(_python_state(states))
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(_numpy_state(states))
