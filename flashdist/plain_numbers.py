"""Hyperparameters as Python's own numbers: what a sweep or a config gives is often NumPy's."""

from __future__ import annotations

import numbers
from typing import Any

import torch

# Whole lists of tensors and names, in which there is no number.
_NOT_SETTINGS = ("params", "param_names")


def plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """The entries of a param group with plain numbers; tensors (a learning rate may be one) stay as they are."""
    return {k: v if k in _NOT_SETTINGS else plain(v) for k, v in group.items()}


def plain(value: Any) -> Any:
    """A number as bool, int or float, of the same value; so too in tuples and lists. Anything else as it is."""
    if type(value) in (bool, int, float, str) or value is None or isinstance(value, torch.Tensor):
        return value
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()  # of an array without dimensions too
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value
