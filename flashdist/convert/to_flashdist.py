"""Writing a flashdist checkpoint from a checkpoint of others: weights are split, moments encoded, as a load would."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from flashdist.algorithms import FlashAdamW
from flashdist.checkpoint.contents import state_name
from flashdist.checkpoint.jsonable import to_json
from flashdist.checkpoint.manifest import FILE_NAME, MODEL, Manifest, StoredPiece, StoredTensor
from flashdist.checkpoint.saving import bytes_by_kind
from flashdist.checkpoint.shard_file import Piece, file_record, shard_header, view_bytes
from flashdist.convert.contents import MOMENTS, Contents, Item, wide
from flashdist.numerics.groups import GroupLayout, group_layout
from flashdist.numerics.rules import ADAMW
from flashdist.numerics.state_format import ERROR, SCALE_SUFFIX, STEP, Entry, encode_moment, state_format
from flashdist.numerics.weight_split import SPLIT_DTYPES, split
from flashdist.version import __version__

SHARD_NAME = "rank-00000.safetensors"
# Elements that are split or encoded at a time: both have temporaries.
_CHUNK = 1 << 18


def write_flashdist(contents: Contents, out: Path, bits: int, done: Callable[[int], None]) -> None:
    """A checkpoint that ``flashdist.checkpoint.load`` takes, as FlashAdamW on one rank would have saved it.

    Weights of the optimizer become bf16 (fp16 ones stay fp16) with corrections, other tensors are kept as they are.
    There are no random states, no scheduler's and no ``extra``.

    Args:
        contents: of AdamW.
        out: an empty folder.
        bits: of master weights, 24 or 32.
        done: told the bytes of each tensor that is written.

    Raises:
        ValueError: there is no state of an optimizer, or of another one.
    """
    if contents.optimizer != "AdamW":
        held = "weights alone" if contents.optimizer is None else f"the state of {contents.optimizer}"
        raise ValueError(f"{contents.what} holds {held}: a flashdist checkpoint is made of AdamW's state")
    described = _describe(contents, bits)
    tensors: dict[str, StoredTensor] = {}
    entries: dict[str, list[Entry]] = {}
    for item in contents.items:
        tensors[MODEL + item.name] = StoredTensor(_weight_dtype(item), item.shape, ())
        if item.master is not None:
            entries[item.name] = state_format(ADAMW, group_layout(item.shape), _weight_dtype(item), bits, quantize=True)
            for entry in entries[item.name]:
                tensors[state_name(item.name, entry.key)] = StoredTensor(entry.dtype, entry.shape, ())
    pieces = [
        Piece(name, (0,) * len(t.shape), torch.empty(t.shape, dtype=t.dtype, device="meta"), True)
        for name, t in tensors.items()
        if math.prod(t.shape)
    ]
    header, ordered, begins = shard_header(pieces)
    starts = {piece.name: begin for piece, begin in zip(ordered, begins, strict=True)}
    with open(out / SHARD_NAME, "xb", buffering=0) as file:
        _put(file, 0, memoryview(header))
        for item in contents.items:
            _write_item(file, item, entries.get(item.name, []), tensors, starts, done)
        os.fsync(file.fileno())
    manifest = Manifest(
        1, "single", datetime.now(timezone.utc).isoformat(timespec="seconds"),
        {"flashdist": __version__, "torch": torch.__version__, "python": platform.python_version()},
        files={SHARD_NAME: file_record(out / SHARD_NAME)},
        tensors={
            name: StoredTensor(t.dtype, t.shape, (_piece(t, starts[name]),) if name in starts else ())
            for name, t in tensors.items()
        },
        aliases=dict(contents.aliases), optimizer=described, values={"scheduler": None, "extra": None},
    )  # fmt: skip
    manifest.bytes_by_kind = bytes_by_kind(manifest)
    (out / FILE_NAME).write_bytes(manifest.to_bytes())


def _piece(stored: StoredTensor, start: int) -> StoredPiece:
    return StoredPiece(SHARD_NAME, start, (0,) * len(stored.shape), stored.shape)


def _weight_dtype(item: Item) -> torch.dtype:
    if item.master is None or item.dtype in SPLIT_DTYPES:
        return item.dtype
    return torch.bfloat16


def _describe(contents: Contents, bits: int) -> dict[str, Any]:
    """The param groups with all that FlashAdamW keeps in one; its own checks see the hyperparameters."""
    groups = []
    for i, group in enumerate(contents.groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        initial, base = settings.pop("initial_lr", None), settings.pop("base_lr", None)
        lr = settings.get("lr")
        try:
            if base is not None:  # what the optimizer was built with; lr may have fallen to 0 since
                settings["lr"] = base
            made = FlashAdamW([nn.Parameter(torch.zeros(1))], master_weight_bits=bits, **settings).param_groups[0]
        except (TypeError, ValueError) as error:
            raise ValueError(f"param group {i} of {contents.what} is not FlashAdamW's: {error}") from error
        whole = {key: value for key, value in made.items() if key not in ("params", "param_names")}
        if base is not None:
            whole["lr"] = lr
        if initial is not None:
            whole["initial_lr"] = initial
        groups.append({**to_json(whole, f"param_groups.{i}", {}), "params": list(group["params"])})
    return {"class": "FlashAdamW", "flashdist": True, "param_groups": groups}


def _write_item(
    file: BinaryIO,
    item: Item,
    entries: list[Entry],
    tensors: dict[str, StoredTensor],
    starts: dict[str, int],
    done: Callable[[int], None],
) -> None:
    def put(name: str, values: Tensor) -> None:
        stored = tensors[name]
        if values.dtype != stored.dtype or tuple(values.shape) != stored.shape:
            raise ValueError(f"{name} is {values.dtype} {tuple(values.shape)}, {stored.dtype} {stored.shape} expected")
        if name in starts:
            values = values.contiguous()
            _put(file, starts[name], view_bytes(values))
        done(values.numel() * values.element_size())

    by_key = {entry.key: entry for entry in entries}
    if not by_key:
        put(MODEL + item.name, item.weight())
        return
    hi, lo = _split(wide(item), _weight_dtype(item), by_key[ERROR].dtype)
    put(MODEL + item.name, hi)
    put(state_name(item.name, ERROR), lo)
    del hi, lo
    put(state_name(item.name, STEP), torch.tensor(item.state.step if item.state else 0.0, dtype=torch.float32))
    layout = group_layout(item.shape)
    for place, key in enumerate(MOMENTS):
        dense = torch.zeros(item.shape) if item.state is None else item.state.moment(place)
        if key + SCALE_SUFFIX in by_key:
            codes, scales = _encode(place, dense, layout)
            put(state_name(item.name, key), codes)
            put(state_name(item.name, key + SCALE_SUFFIX), scales)
        else:
            put(state_name(item.name, key), dense)


def _put(file: BinaryIO, at: int, view: memoryview) -> None:
    file.seek(at)
    written = 0
    while written < len(view):
        written += file.write(view[written:])


def _split(master: Tensor, weight: torch.dtype, correction: torch.dtype) -> tuple[Tensor, Tensor]:
    hi, lo = torch.empty(master.shape, dtype=weight), torch.empty(master.shape, dtype=correction)
    flat = master.reshape(-1)
    for begin in range(0, flat.numel(), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        hi.view(-1)[part], lo.view(-1)[part] = split(flat[part], weight, correction)
    return hi, lo


def _encode(place: int, dense: Tensor, layout: GroupLayout) -> tuple[Tensor, Tensor]:
    """As :func:`encode_moment`, some rows at a time."""
    count = max(_CHUNK // max(layout.row, 1), 1)
    codes, scales = [], []
    for rows in dense.reshape(-1, layout.row).split(count):
        some = encode_moment(place, rows, GroupLayout(tuple(rows.shape), 1))
        codes.append(some[0])
        scales.append(some[1])
    if not codes:
        return encode_moment(place, dense, layout)
    return torch.cat(codes).view(layout.shape), torch.cat(scales).view(layout.scale_shape)
