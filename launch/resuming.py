"""What both launchers ask of a checkpoint that a run goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from config import UserError

from flashdist import checkpoint

# What a resume takes from its config, like the learning rate, and not from the checkpoint.
_FROM_CONFIG = ("betas", "eps", "momentum", "weight_decay")


def read(path: Path, load: Callable[[Path], Any], optimizer: torch.optim.Optimizer, keys: set[str]) -> dict[str, Any]:
    """Loads a checkpoint; the optimizer keeps the hyperparameters that it was built with.

    Args:
        path: where it is.
        load: loads it into model and optimizer, and returns its `extra`. Collective.
        optimizer: that optimizer.
        keys: what `extra` must have.

    Returns:
        The `extra`.

    Raises:
        UserError: one that cannot be read, does not fit, or was saved by something else.
    """
    groups = optimizer.param_groups
    asked = [{key: group[key] for key in _FROM_CONFIG if key in group} for group in groups]
    try:
        extra = load(path)
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        raise UserError(f"cannot resume from {path}: {' '.join(str(error).split())}") from error
    if not isinstance(extra, dict) or not keys <= extra.keys():
        raise UserError(
            f"cannot resume from {path}: it was not saved by this launcher (its `extra` does not say how far the "
            "data was read); load it with flashdist.checkpoint.load, or give the checkpoint of a run"
        )
    for group, settings in zip(groups, asked, strict=True):
        group.update(settings)
    return extra


def compare(
    path: Path, extra: Mapping[str, Any], expected: Mapping[str, Any], remedies: Mapping[str, str], change: str
) -> None:
    """Refuses a checkpoint that says another value; one that says none was saved by an earlier release.

    Args:
        path: the checkpoint, for the message.
        extra: what it says.
        expected: what it must say.
        remedies: what to do, for each key.
        change: what another value would change.

    Raises:
        UserError: for the first key of which it says another value.
    """
    for key, remedy in remedies.items():
        first = extra.get(key, expected[key])
        if first != expected[key]:
            raise UserError(
                f"cannot resume from {path}: {key} was {first} and is {expected[key]}, which would {change}: {remedy}"
            )
