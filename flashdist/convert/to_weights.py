"""Writing weights alone: a folder that transformers loads, or one safetensors file of fp32 master weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdist.checkpoint.shard_file import Piece, StreamedFile, in_file_order
from flashdist.convert.contents import Contents, Item, wide

FILE_NAME, INDEX_NAME, CONFIG_NAME = "model.safetensors", "model.safetensors.index.json", "config.json"
MAX_FILE_BYTES = 5_000_000_000
# Without it older releases of transformers refuse the file.
_METADATA = {"format": "pt"}
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
# Weights of others, which must not lie beside the new ones.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def write_fp32(contents: Contents, out: Path, done: Callable[[int], None]) -> None:
    """One safetensors file: parameters in fp32 as the optimizer sees them, buffers in their own dtype, tied ones once.

    Args:
        contents: what to write.
        out: a file that does not exist.
        done: told the bytes of each tensor that is written.
    """
    _write(out, [(item.name, item, torch.float32) for item in contents.items], done)


def write_hf(
    contents: Contents,
    out: Path,
    config: Path | None,
    dtype: torch.dtype | None,
    done: Callable[[int], None],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """A folder as Hugging Face keeps a model: weights in files of at most 5 GB with their index, and the config.

    Args:
        contents: what to write.
        out: an empty folder.
        config: folder whose config.json, tokenizer and other small files are copied; None for weights alone.
        dtype: of parameters; None for the dtype they are trained in. Buffers keep theirs.
        done: told the bytes of each tensor that is written.
        max_file_bytes: a new file is begun before one grows beyond this.

    Raises:
        ValueError: the folder has no config.json, or one that is no JSON.
    """
    settings = None if config is None else _read_config(config)
    once = settings is None or settings.get("tie_word_embeddings", True)
    named = [(item.name, item) for item in contents.items]
    if not once:  # the model will hold them apart, and look for each
        by_name = dict(named)
        named += [(alias, by_name[first]) for alias, first in contents.aliases.items()]
    entries = [(name, item, _dtype(item, dtype)) for name, item in named]
    files = _divided(entries, max_file_bytes)
    for name, members in files.items():
        _write(out / name, members, done)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(_bytes(entry) for entry in entries)},
            "weight_map": {entry[0]: name for name, members in files.items() for entry in members},
        }
        (out / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    if config is not None and settings is not None:
        _copy_config(config, settings, out, entries, contents)


def _dtype(item: Item, dtype: torch.dtype | None) -> torch.dtype:
    return item.dtype if item.master is None or dtype is None else dtype


_Entry = tuple[str, Item, torch.dtype]


def _bytes(entry: _Entry) -> int:
    return math.prod(entry[1].shape) * entry[2].itemsize


def _divided(entries: list[_Entry], max_file_bytes: int) -> dict[str, list[_Entry]]:
    parts: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if parts[-1] and size + _bytes(entry) > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += _bytes(entry)
    if len(parts) == 1:
        return {FILE_NAME: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _write(path: Path, entries: list[_Entry], done: Callable[[int], None]) -> None:
    items = {name: (item, dtype) for name, item, dtype in entries}
    pieces = [
        Piece(name, (), torch.empty(item.shape, dtype=dtype if item.master else item.dtype, device="meta"), True)
        for name, item, dtype in entries
    ]
    file = StreamedFile(path, pieces, metadata=_METADATA)
    try:
        for piece in in_file_order(pieces):
            values = _values(*items[piece.name])
            file.write(values)
            done(values.numel() * values.element_size())
        file.close()
    except BaseException:
        file.abandon()
        raise


def _values(item: Item, dtype: torch.dtype) -> Tensor:
    if item.master is None or item.dtype == dtype:
        return item.weight().contiguous()
    return wide(item).to(dtype).contiguous()


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise ValueError(f"--config {folder} has no {CONFIG_NAME}: name the folder of the model that was trained")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): name the folder of the model that was trained") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is no JSON object: name the folder of the model that was trained")
    return found


def _copy_config(folder: Path, settings: dict[str, Any], out: Path, entries: list[_Entry], contents: Contents) -> None:
    """config.json with the dtype that the weights have now, and what else is small: tokenizer, generation config."""
    dtypes = {dtype for _, item, dtype in entries if item.master is not None}
    if len(dtypes) == 1:
        key = "torch_dtype" if "torch_dtype" in settings else "dtype"
        settings[key] = str(dtypes.pop()).removeprefix("torch.")
    if contents.aliases:  # as it is by default, or is said already; some kinds of model have another default
        settings.setdefault("tie_word_embeddings", True)
    elif any(item.name.endswith(_HEADS) for item in contents.items):
        settings["tie_word_embeddings"] = False  # else the head would be read, and thrown away
    (out / CONFIG_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name != CONFIG_NAME and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, out / file.name)
