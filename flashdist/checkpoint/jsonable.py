"""Python values as JSON, with their tensors lifted out: what a checkpoint holds besides weights and states.

JSON has neither tuples nor keys that are numbers nor infinity; each is written as an object with one marked key, so
that what is read equals what was written, in its types too. Nothing is ever pickled.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

TUPLE, DICT, FLOAT, TENSOR = "$tuple", "$dict", "$float", "$tensor"
COUNTER, ORDERED = "$counter", "$ordered"
_MARKS = (TUPLE, DICT, FLOAT, TENSOR, COUNTER, ORDERED)
# Kinds of dict, with the mark that each has.
_DICTS: dict[type, str] = {dict: DICT, Counter: COUNTER, OrderedDict: ORDERED}


def to_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as what ``json.dumps`` takes; tensors in it go to ``tensors``, under ``name...``.

    Args:
        value: None, bool, int, float, str, tensors, and lists, tuples, dicts, Counters and OrderedDicts of these.
        name: how error messages and tensor names call it.
        tensors: gets the tensors.

    Raises:
        TypeError: anything else, naming the place in the value; tensors that are no plain ones too.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {FLOAT: repr(value)}
    if isinstance(value, Tensor):
        _refuse_odd(value, name)
        while name in tensors:  # as of {"a.b": x, "a": {"b": y}}
            name += "'"
        tensors[name] = value.detach()
        return {TENSOR: name}
    if type(value) is list:
        return [to_json(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
    if type(value) is tuple:
        return {TUPLE: [to_json(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    mark = _DICTS.get(type(value))
    if mark == DICT and all(type(k) is str and k not in _MARKS for k in value):
        return {k: to_json(v, f"{name}.{k}", tensors) for k, v in value.items()}
    if mark is not None:
        return {
            mark: [
                [to_json(k, f"{name}.{i}.key", tensors), to_json(v, f"{name}.{k if type(k) is str else i}", tensors)]
                for i, (k, v) in enumerate(value.items())
            ]
        }
    raise TypeError(
        f"{name} is of type {type(value).__name__}, which a checkpoint does not take (no pickle is ever written): "
        "give None, bool, int, float, str, a tensor, or lists, tuples, dicts, Counters and OrderedDicts of these"
    )


def _refuse_odd(tensor: Tensor, name: str) -> None:
    """TypeError for a tensor that a file of plain numbers would not give back as it was."""
    odd = None
    if tensor.is_nested:
        odd, remedy = "nested", "give a list of its parts (`unbind()`)"
    elif tensor.layout != torch.strided:
        odd, remedy = f"of the layout {tensor.layout}", "give its values and indices, or `to_dense()`"
    elif tensor.is_quantized:
        odd, remedy = "quantized", "give its `int_repr()`, scales and zero points"
    elif tensor.device.type == "meta":
        odd, remedy = "on the meta device and holds no values", "materialise it"
    elif type(tensor) not in (Tensor, nn.Parameter, DTensor):
        odd, remedy = f"a {type(tensor).__name__}", "give plain tensors that it can be made from again"
    if odd is not None:
        raise TypeError(f"{name} is {odd}, which a checkpoint does not take: {remedy}")


def from_json(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of :func:`to_json`, given the tensors by their names."""
    if isinstance(value, list):
        return [from_json(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, inner),) = value.items()
        if mark == TENSOR:
            return tensors[inner]
        if mark == FLOAT:
            return float(inner)
        if mark == TUPLE:
            return tuple(from_json(v, tensors) for v in inner)
        if mark in _DICTS.values() and isinstance(inner, list):
            pairs = {from_json(k, tensors): from_json(v, tensors) for k, v in inner}
            return next(kind for kind, of_kind in _DICTS.items() if of_kind == mark)(pairs)
    return {k: from_json(v, tensors) for k, v in value.items()}


def tensor_names(value: Any) -> list[str]:
    """Names of the tensors that :func:`from_json` will ask for."""
    if isinstance(value, list):
        return [name for v in value for name in tensor_names(v)]
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return [value[TENSOR]]
        return [name for v in value.values() for name in tensor_names(v)]
    return []


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`; ValueError for what is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
