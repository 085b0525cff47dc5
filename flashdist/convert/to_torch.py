"""Writing ``{"model": ..., "optimizer": ...}`` as a training script with torch.optim.AdamW saves it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashdist.convert.contents import MOMENTS, Contents, Item, wide
from flashdist.convert.torch_zip import Later, write_torch


def write_torch_adamw(contents: Contents, out: Path, done: Callable[[int], None]) -> None:
    """A file for ``torch.load``: fp32 master weights, fp32 moments and step counts, param groups with names.

    Parameters are numbered group by group, in the order in which the optimizer's groups list them.

    Args:
        contents: of AdamW.
        out: a file that does not exist.
        done: told the bytes of each tensor that is written.

    Raises:
        ValueError: the state is of another optimizer.
    """
    if contents.optimizer not in ("AdamW", None):
        raise ValueError(
            f"{contents.what} is of {contents.optimizer}, whose state torch.optim.AdamW cannot take: "
            "convert --to hf or safetensors-fp32, which are weights alone"
        )
    tensors = {
        i.name: Later(i.shape, i.dtype if i.master is None else torch.float32, partial(wide, i)) for i in contents.items
    }
    model = dict(tensors)
    model.update({alias: tensors[first] for alias, first in contents.aliases.items()})
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    by_name = {item.name: item for item in contents.items}
    number = 0
    for group in contents.groups:
        names = group["params"]
        for i, name in enumerate(names, number):
            if by_name[name].state is not None:
                states[i] = _state(by_name[name])
        numbers = list(range(number, number + len(names)))
        groups.append({**_torch_group(group), "params": numbers, "param_names": list(names)})
        number += len(names)
    write_torch(out, {"model": model, "optimizer": {"state": states, "param_groups": groups}}, done)


def _torch_group(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group with all that this torch's AdamW keeps in one."""
    settings = {key: value for key, value in group.items() if key != "params"}
    base_lr = settings.pop("base_lr", None)
    if settings.pop("decouple_lr", False):  # torch multiplies the decay by lr, flashdist then by lr / base_lr
        if not base_lr:
            raise ValueError("a param group has decouple_lr=True without its base_lr: the checkpoint is damaged")
        settings["weight_decay"] /= base_lr
    defaults = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).state_dict()["param_groups"][0]
    return {**defaults, **settings}


def _state(item: Item) -> dict[str, Any]:
    assert item.state is not None
    step = item.state.step
    moments = {key: Later(item.shape, torch.float32, partial(item.state.moment, i)) for i, key in enumerate(MOMENTS)}
    return {"step": Later((), torch.float32, partial(_scalar, step)), **moments}


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)
