"""What every source of a conversion is read into, and every target is written from.

Nothing here holds a tensor: an item knows its shape and how to get its values, so that a conversion has one tensor in
memory at a time, whatever the size of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashdist.state_loading import TORCH_HYPERPARAMETERS

MOMENTS = ("exp_avg", "exp_avg_sq")
# What a param group says about training: torch's settings, and those of flashdist's decoupled weight decay.
SETTINGS = (*TORCH_HYPERPARAMETERS, "decouple_lr", "base_lr")


@dataclass(frozen=True)
class AdamState:
    """AdamW's state of one parameter.

    Attributes:
        step: how many steps it has taken.
        moment: given 0 (momentum) or 1 (variance), the values in fp32 of the parameter's shape, new.
    """

    step: float
    moment: Callable[[int], Tensor]


@dataclass(frozen=True)
class Item:
    """A parameter or buffer.

    Attributes:
        name: in the model.
        shape: of the whole tensor.
        dtype: the one it is stored in.
        weight: its values in that dtype.
        master: its values in fp32, with what a correction adds; None for what is no weight of the optimizer.
        state: of the optimizer; None for buffers and parameters that were not trained.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weight: Callable[[], Tensor]
    master: Callable[[], Tensor] | None = None
    state: AdamState | None = None


@dataclass
class Contents:
    """A checkpoint as a conversion sees it.

    Attributes:
        what: how messages call it.
        items: parameters and buffers, tied ones once, in the model's order.
        aliases: further names of tied tensors, to their first.
        optimizer: its kind, as ``AdamW``; None where there are weights alone.
        groups: param groups: those of :data:`SETTINGS` that there are, and names under ``params`` in the optimizer's
            order.
        notes: what is said at the end.
    """

    what: str
    items: list[Item]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def wide(item: Item) -> Tensor:
    """The true values of a parameter in fp32; of a buffer, those it has."""
    return item.weight() if item.master is None else item.master()
