"""Files of torch.save with the state of torch.optim.AdamW, flashoptim's or bitsandbytes' AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdist.convert import order
from flashdist.convert.codes import BnbState, DenseState, FlashoptimState, FlashState, StateOf
from flashdist.convert.contents import SETTINGS, AdamState, Contents, Item
from flashdist.convert.torch_files import Weights, find_weights, in_model_order, load_file, read_weights, weights_of

_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states", "opt")
# Buffers of normalisation layers stand beside parameters of the same shape.
_BUFFERS = ("running_mean", "running_var")
_KINDS: dict[str, type[StateOf]] = {
    "torch-adamw": DenseState, "flashoptim": FlashoptimState, "bitsandbytes": BnbState, "flashdist": FlashState,
}  # fmt: skip


def read_torch(path: Path, kind: str, weights: Path | None, names: Path | None) -> Contents:
    """The contents of such a file.

    Args:
        path: the file: a dict with the optimizer's state dict under ``optimizer`` (or ``optim``, ``opt``,
            ``optimizer_state_dict``) and the model's under ``model`` (or ``state_dict``, ``model_state_dict``).
        kind: ``torch-adamw``, ``flashoptim`` or ``bitsandbytes``.
        weights: the model's weights, where the file holds none.
        names: a file with the parameters' names in the optimizer's order, where the state dict keeps none.

    Raises:
        ValueError: it cannot be read, would run code, is of another optimizer, or its parts do not fit each other.
    """
    return contents_of(load_file(path), path, kind, f"the {kind} checkpoint at {path}", weights, names)


def contents_of(loaded: Any, path: Path, kind: str, what: str, weights: Path | None, names: Path | None) -> Contents:
    """As :func:`read_torch`, of what a file holds; ``kind`` may also be ``flashdist``: its optimizer's state dict."""
    state_dict = find_optimizer(loaded, path)
    if weights is not None:
        tensors, aliases = read_weights(weights)
    else:
        tensors, aliases = weights_of(find_weights({k: v for k, v in loaded.items() if k not in _OPTIMIZER_KEYS}, path))
    decoders = {key: _KINDS[kind](state, what) for key, state in state_dict["state"].items() if state}
    if not decoders:
        raise ValueError(f"{what} has the state of no parameter: save it after the first step")
    groups = _groups(state_dict["param_groups"], what)
    by_order = weights is None or in_model_order(weights)
    named = _names(groups, decoders, tensors, aliases, names, by_order, what)
    states = {name: decoders.get(key) for key, name in named.items()}
    bytewidths = {named[key]: group.get("master_bytewidth") for group in groups for key in group["params"]}
    items = []
    for name, (shape, dtype, get) in tensors.items():
        items.append(_item(name, shape, dtype, get, name in states, states.get(name), bytewidths.get(name)))
    settings = [
        {
            **{k: v for k, v in group.items() if k in SETTINGS},
            "params": [named[key] for key in group["params"]],
        }
        for group in groups
    ]
    return Contents(what, items, aliases, "AdamW", settings)


def detect(path: Path) -> str:
    """Which of the three kinds a file is of.

    Raises:
        ValueError: it cannot be told.
    """
    states = find_optimizer(load_file(path), path)["state"]
    found = {kind for kind, decoder in _KINDS.items() for state in states.values() if decoder.recognises(state)}
    if len(found) != 1:
        raise ValueError(f"{path} is of no known optimizer, or of several: say which by --from")
    return found.pop()


def find_optimizer(loaded: Any, path: Path) -> dict[str, Any]:
    """The optimizer's state dict in what a file holds.

    Raises:
        ValueError: there is none.
    """
    candidates = [loaded, *(loaded.get(key) for key in _OPTIMIZER_KEYS)] if isinstance(loaded, dict) else []
    for candidate in candidates:
        if (
            isinstance(candidate, dict)
            and isinstance(candidate.get("state"), dict)
            and isinstance(candidate.get("param_groups"), list)
        ):
            return candidate
    raise ValueError(
        f"{path} holds no optimizer's state dict (looked under {', '.join(_OPTIMIZER_KEYS)}): save "
        '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}'
    )


def _groups(groups: list[Any], what: str) -> list[dict[str, Any]]:
    found = []
    for group in groups:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise ValueError(f"{what} is damaged: a param group is no dict with a list under 'params'")
        if group.get("decoupled_weight_decay") is False:
            raise ValueError(f"{what} is of torch.optim.Adam (decoupled_weight_decay=False), only AdamW's is converted")
        if group.get("amsgrad"):
            raise ValueError(
                f"{what} is of an optimizer with amsgrad=True, which flashdist does not have: use hf weights"
            )
        found.append({k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items()})
    return found


def _names(
    groups: list[dict[str, Any]],
    decoders: dict[Any, StateOf],
    tensors: Weights,
    aliases: dict[str, str],
    file: Path | None,
    by_order: bool,
    what: str,
) -> dict[Any, str]:
    """The name of each key under ``params``."""
    keys = [key for group in groups for key in group["params"]]
    if len(set(keys)) != len(keys) or not set(decoders) <= set(keys):
        raise ValueError(f"{what} is damaged: its states and param groups list different parameters")
    if file is not None:
        names = order.read_names(file, len(keys))
    elif all(isinstance(key, str) for key in keys):
        names = list(keys)
    elif all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    elif not by_order:
        raise ValueError(
            f"the optimizer in {what} keeps no names, and safetensors do not keep the model's order: give the "
            "parameters' names, one a line, in the optimizer's order by --names FILE, or the model's file of torch.save"
        )
    else:
        candidates = [
            (name, shape)
            for name, (shape, dtype, _) in tensors.items()
            if dtype.is_floating_point and not name.endswith(_BUFFERS)
        ]
        shapes = [[decoders[k].shape if k in decoders else None for k in group["params"]] for group in groups]
        names = [name for group in order.match(candidates, shapes, what) for name in group]
    names = [aliases.get(name, name) for name in (_bare(name) for name in names)]
    for key, name in zip(keys, names, strict=True):
        if name not in tensors:
            raise ValueError(
                f"{what} has a parameter {name} that the model's weights lack: give its model by --weights"
            )
        if key in decoders and decoders[key].shape not in (None, tensors[name][0]):
            raise ValueError(
                f"{what} has a state of shape {decoders[key].shape} for {name}, whose weight has {tensors[name][0]}: "
                "give the model it was trained with by --weights, or the right order by --names"
            )
    return dict(zip(keys, names, strict=True))


def _bare(name: str) -> str:
    return name.removeprefix("module.").replace("_orig_mod.", "")


def _item(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    get: Callable[[], Tensor],
    stepped: bool,
    state: StateOf | None,
    bytewidth: Any,
) -> Item:
    if not stepped:
        return Item(name, shape, dtype, get)
    if state is None:
        return Item(name, shape, dtype, get, lambda: get().to(torch.float32))
    state.check(name, shape, dtype, bytewidth)
    moment = partial(_moment, state, shape)
    return Item(name, shape, dtype, get, lambda: state.master(get()), AdamState(state.step, moment))


def _moment(state: StateOf, shape: tuple[int, ...], place: int) -> Tensor:
    return state.moment(place).reshape(shape)
