"""Reading a checkpoint of flashdist, whatever ranks and strategy saved it: pieces are joined tensor by tensor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdist.checkpoint.contents import state_name
from flashdist.checkpoint.folder import find
from flashdist.checkpoint.jsonable import from_json
from flashdist.checkpoint.manifest import MODEL, OPTIM
from flashdist.checkpoint.reading import Reader, open_checkpoint, read_plain
from flashdist.convert.contents import MOMENTS, SETTINGS, AdamState, Contents, Item
from flashdist.numerics.groups import GroupLayout, group_layout
from flashdist.numerics.state_format import ERROR, SCALE_SUFFIX, STEP, decode_moment
from flashdist.numerics.weight_split import join


def read_flashdist(path: Path) -> Contents:
    """The contents of a flashdist checkpoint, after its checksums were compared.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
    """
    folder = find(path)
    reader = Reader(folder, open_checkpoint(folder))
    described = reader.manifest.optimizer or {}
    states: dict[str, set[str]] = {}
    for full_name in reader.tensors:
        if full_name.startswith(OPTIM):
            name, key = full_name.removeprefix(OPTIM).rsplit(".", 1)
            states.setdefault(name, set()).add(key)
    groups: list[dict[str, Any]] = []
    stepped: set[str] = set()
    for group in described.get("param_groups", []):
        settings = from_json({k: v for k, v in group.items() if k in SETTINGS}, {})
        names = [reader.manifest.aliases.get(name, name) for name in group["params"]]
        stepped.update(names)
        groups.append({**settings, "params": names})
    items = [
        _item(reader, name.removeprefix(MODEL), states, stepped) for name in reader.tensors if name.startswith(MODEL)
    ]
    kind = described.get("class")
    if any(group.get("amsgrad") for group in described.get("param_groups", [])):
        kind = f"{kind} with amsgrad=True"
    return Contents(
        f"the flashdist checkpoint at {folder}",
        items,
        reader.manifest.aliases,
        None if kind is None else str(kind).removeprefix("Flash"),
        groups,
    )


def _item(reader: Reader, name: str, states: dict[str, set[str]], stepped: set[str]) -> Item:
    stored = reader.tensors[MODEL + name]
    keys = states.get(name, set())
    weight = partial(_read, reader, MODEL + name)
    master = partial(_master, reader, name, ERROR in keys) if name in stepped else None
    state = None
    if set(MOMENTS) <= keys:
        step = float(_read(reader, state_name(name, STEP)))
        state = AdamState(step, partial(_moment, reader, name, keys))
    return Item(name, stored.shape, stored.dtype, weight, master, state)


def _read(reader: Reader, full_name: str) -> Tensor:
    return read_plain(reader, [full_name])[full_name]


def _master(reader: Reader, name: str, corrected: bool) -> Tensor:
    weight = _read(reader, MODEL + name)
    if not corrected:
        return weight.to(torch.float32)
    return in_parts(join, weight, _read(reader, state_name(name, ERROR)))


def in_parts(function: Any, *tensors: Tensor, size: int = 1 << 18) -> Tensor:
    """An elementwise function of tensors of one shape to fp32, some elements at a time: it has temporaries."""
    out = torch.empty(tensors[0].shape, dtype=torch.float32)
    flat = [t.reshape(-1).split(size) for t in tensors]
    for target, *parts in zip(out.view(-1).split(size), *flat, strict=True):
        target.copy_(function(*parts))
    return out


def _moment(reader: Reader, name: str, keys: set[str], place: int) -> Tensor:
    key = MOMENTS[place]
    values = _read(reader, state_name(name, key))
    if key + SCALE_SUFFIX not in keys:
        return values.to(torch.float32)
    return decoded(place, values, _read(reader, state_name(name, key + SCALE_SUFFIX)), group_layout(values.shape))


def decoded(place: int, codes: Tensor, scales: Tensor, layout: GroupLayout, size: int = 1 << 18) -> Tensor:
    """As :func:`decode_moment`, some rows at a time."""
    out = torch.empty(codes.shape, dtype=torch.float32)
    rows = max(size // max(layout.row, 1), 1)
    parts = (
        out.view(-1, layout.row).split(rows),
        codes.reshape(-1, layout.row).split(rows),
        scales.reshape(-1, layout.groups_per_row).split(rows),
    )
    for target, some, their in zip(*parts, strict=True):
        target.copy_(decode_moment(place, some, their, GroupLayout(tuple(some.shape), 1)))
    return out
