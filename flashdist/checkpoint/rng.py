"""The states of the random number generators of this process, as tensors."""

from __future__ import annotations

import logging
import random
import sys

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


def set_rng(states: dict[str, Tensor]) -> None:
    """Put back what :func:`rng_tensors` gave; generators without a state in it stay as they are."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "python" in states:
        version, *words = states["python"].tolist()
        gauss = states["python_gauss"].tolist()
        random.setstate((version, tuple(words), gauss[0] if gauss else None))
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        *keys, position, has_gauss = states["numpy"].tolist()
        cached = float(states["numpy_gauss"])
        numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
