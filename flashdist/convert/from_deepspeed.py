"""Folders that a DeepSpeed engine has saved under FlashAdamW or a stock AdamW, read without DeepSpeed.

The optimizer files are pickles that refer to a few classes of DeepSpeed's. They are read by ``weights_only=True`` with
empty classes in their place, and to the functions of ``deepspeed_checkpoint.py``, which expand nothing here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdist.convert.contents import MOMENTS, SETTINGS, AdamState, Contents, Item
from flashdist.convert.from_deepspeed_stock import StockPartitions, is_stock
from flashdist.convert.from_torch import contents_of
from flashdist.convert.torch_files import copy_of, load_file
from flashdist.integrations import deepspeed_checkpoint as saved_objects
from flashdist.integrations.deepspeed_checkpoint import PAYLOAD, reading_codes, unpack
from flashdist.integrations.deepspeed_layout import cut
from flashdist.integrations.deepspeed_packed import Packed, pack
from flashdist.integrations.deepspeed_reshard import Piece, fill_segment
from flashdist.numerics.rules import ADAMW

_OPTIMIZER = "optimizer_state_dict"
_FILES = "*zero_pp_rank_*_mp_rank_00_optim_states.pt"
_STAGE_0 = "mp_rank_00_model_states.pt"


class _Nothing:
    """Stands for an object of DeepSpeed's, of which at most the attributes are looked at."""

    def __init__(self, *_: Any) -> None:
        pass


_ADMITTED: list[Any] = [
    saved_objects.rebuild_master, saved_objects.rebuild_moment, saved_objects.rebuild_zeros, saved_objects.rebuild_raw,
    *((_Nothing, f"deepspeed.runtime.fp16.loss_scaler.{name}") for name in ("LossScaler", "DynamicLossScaler")),
    (_Nothing, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Nothing, "deepspeed.utils.tensor_fragment.fragment_address"),
]  # fmt: skip


@dataclass
class _Parts:
    """All partitions of a checkpoint.

    Attributes:
        what: how messages call the checkpoint.
        groups: param groups as they were saved.
        group_of: place of each parameter's group.
        pieces: for each parameter the segments that make it up.
    """

    what: str
    groups: list[dict[str, Any]]
    group_of: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)


def read_deepspeed(path: Path, names: Path | None) -> Contents:
    """The contents of a folder of ``engine.save_checkpoint``.

    Args:
        path: it, or one of its tags as ``run/global_step100``; otherwise the tag in its file ``latest`` is taken.
        names: for stage 0, a file with the parameters' names in the optimizer's order, where shapes do not tell.

    Raises:
        ValueError: no such folder, a file that is missing or damaged, or another optimizer.
    """
    folder = _tagged(path)
    what = f"the deepspeed checkpoint at {folder}"
    files = _by_rank(folder)
    if not files:
        file = folder / _STAGE_0
        if not file.is_file():
            raise ValueError(f"{folder} holds no DeepSpeed checkpoint (no optim_states.pt): name the folder of a tag")
        return contents_of(load_file(file), file, "flashdist", what, None, names)
    if names is not None:
        raise ValueError("--names is not needed here, the checkpoint has the parameters' names: leave it out")
    models = sorted(folder.glob("*model_states.pt"))
    if not models:
        raise ValueError(f"{folder} lacks its model_states.pt: copy the whole folder")
    model = load_file(models[0])
    listed = model.get("param_shapes") if isinstance(model, dict) else None
    if not isinstance(listed, list):
        raise ValueError(f"{models[0]} lists no parameters: it is damaged")
    shapes = {name: tuple(shape) for group in listed for name, shape in group.items()}
    aliases = {alias: name for alias, name in (model.get("shared_params") or {}).items() if alias != name}
    saved = list(_saved(files, what))
    notes = []
    if is_stock(saved[0]) and PAYLOAD not in saved[0]:
        stock = StockPartitions(saved, shapes, what)
        groups = stock.groups
        group_of = {name: _group_of(i, groups, what) for name, i in stock.partition_of.items()}
        bf16 = files[0].name.startswith("bf16_")
        dtypes = {n: t.dtype for n, t in (model.get("module") or {}).items() if isinstance(t, Tensor)}
        default = torch.bfloat16 if bf16 else torch.float16
        items = [stock.item(name, shape, dtypes.get(name, default)) for name, shape in shapes.items()]
        notes.append("weight decay is taken to be AdamW's, which DeepSpeed's files do not say")
    else:
        parts = _read_parts(saved, files, what)
        if set(shapes) != set(parts.pieces):
            odd = sorted(set(shapes) ^ set(parts.pieces))
            raise ValueError(f"{what} is not whole: its files list different parameters, as {', '.join(odd[:3])}")
        groups, group_of = parts.groups, parts.group_of
        items = [_item(parts, name, shape) for name, shape in shapes.items()]
    items += _rest(model, shapes, aliases, what)
    settings = [
        {
            **{k: v for k, v in group.items() if k in SETTINGS},
            "params": [name for name in shapes if group_of[name] == i],
        }
        for i, group in enumerate(groups)
    ]
    return Contents(what, items, aliases, "AdamW", settings, notes)


def _tagged(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"{path} is no folder, --from deepspeed reads the folder of engine.save_checkpoint")
    latest = path / "latest"
    if not latest.is_file():
        return path
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if Path(tag).name != tag or not (path / tag).is_dir():
        raise ValueError(f"{latest} names {tag!r}, which is no folder in {path}: name the folder of a tag")
    return path / tag


def _by_rank(folder: Path) -> list[Path]:
    found = {}
    for file in folder.glob(_FILES):
        rank = re.search(r"zero_pp_rank_(\d+)_", file.name)
        assert rank is not None
        found[int(rank.group(1))] = file
    count = max(found) + 1 if found else 0
    return [found.get(rank, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt") for rank in range(count)]


def _saved(files: Sequence[Path], what: str) -> Iterator[dict[str, Any]]:
    """The optimizer's entry of each rank's file."""
    for rank, file in enumerate(files):
        with reading_codes():
            loaded = load_file(file, _ADMITTED)
        saved = loaded.get(_OPTIMIZER) if isinstance(loaded, dict) else None
        if not isinstance(saved, dict) or not (isinstance(saved.get(PAYLOAD), list) or is_stock(saved)):
            raise ValueError(f"{file} holds no optimizer of a ZeRO stage: make fp32 weights of it by zero_to_fp32.py")
        count = saved.get("partition_count", len(files))
        count = max(count) if isinstance(count, list | tuple) else int(count)
        if count > len(files):
            raise ValueError(f"{what} was saved on {count} ranks, the optimizer files of some are missing: copy all")
        if rank >= count:
            return  # left from an earlier save of more ranks
        yield saved


def _read_parts(all_saved: Sequence[dict[str, Any]], files: Sequence[Path], what: str) -> _Parts:
    parts: _Parts | None = None
    for saved, file in zip(all_saved, files, strict=False):
        if PAYLOAD not in saved:
            raise ValueError(f"{file} is of another optimizer than the first rank's: copy the whole folder again")
        groups = (saved.get("base_optimizer_state") or saved[_OPTIMIZER])["param_groups"]
        if parts is None:
            parts = _Parts(what, groups)
        for i, payload in enumerate(saved[PAYLOAD]):
            if payload["optimizer"] != "FlashAdamW" or tuple(payload["moments"]) != MOMENTS:
                raise ValueError(f"{what} is of {payload['optimizer']}, only AdamW's state is converted")
            packed = unpack(payload)
            for s, segment in enumerate(packed.segments):
                parts.pieces.setdefault(segment.name, []).append((packed, s))
                parts.group_of[segment.name] = _group_of(i, groups, what)
    assert parts is not None
    return parts


def _group_of(partition: int, groups: list[dict[str, Any]], what: str) -> int:
    found = [g for g, group in enumerate(groups) if partition in group["params"]]
    if len(groups) == 1:
        return 0
    if len(found) != 1:
        raise ValueError(f"{what} does not say which param group a partition belongs to: load it by DeepSpeed instead")
    return found[0]


def _whole(parts: _Parts, name: str, shape: tuple[int, ...]) -> Packed:
    """A parameter as one partition, its codes copied from where they lie."""
    numel = math.prod(shape)
    group = parts.groups[parts.group_of[name]]
    dtype = parts.pieces[name][0][0].weight.dtype
    packed = pack(torch.zeros(numel, dtype=dtype), list(cut(name, shape, 0, numel, 0)), ADAMW, group)
    for t in range(len(packed.segments)):
        fill_segment(packed, t, parts.pieces[name])
    return packed


def _item(parts: _Parts, name: str, shape: tuple[int, ...]) -> Item:
    def values(key: str | None) -> Tensor:
        packed = _whole(parts, name, shape)
        return packed.read(0, packed.weight.numel(), key).view(shape)

    packed, at = parts.pieces[name][0]
    state = AdamState(float(packed.steps[at]), lambda place: values(MOMENTS[place]))
    return Item(
        name, shape, packed.weight.dtype, lambda: _whole(parts, name, shape).weight.view(shape),
        lambda: values(None), state,
    )  # fmt: skip


def _rest(model: dict[str, Any], stepped: dict[str, Any], aliases: dict[str, str], what: str) -> list[Item]:
    """Buffers, and parameters that were not trained."""
    if model.get("frozen_param_fragments"):
        raise ValueError(f"{what} keeps frozen parameters in parts: only those of stages 0 to 2 are converted")
    items = []
    for name, tensor in (model.get("module") or {}).items():
        if name not in stepped and name not in aliases and isinstance(tensor, Tensor):
            items.append(Item(name, tuple(tensor.shape), tensor.dtype, partial(copy_of, tensor)))
    return items
