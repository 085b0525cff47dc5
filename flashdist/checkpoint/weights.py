"""Weights for other libraries: safetensors with the master weights, written tensor by tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flashdist.checkpoint.names import ModelTensors
from flashdist.checkpoint.ranks import Ranks
from flashdist.checkpoint.shard_file import Piece, StreamedFile, in_file_order
from flashdist.optimizer import FlashOptimizer

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class _Entry:
    """A tensor to write: its name and dtype, and how every rank together gets it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    get: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@torch.no_grad()
def export_weights(
    path: str | os.PathLike[str],
    model: nn.Module,
    opt: torch.optim.Optimizer | None,
    dtype: torch.dtype = torch.float32,
    *,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write a model's weights as safetensors, as Hugging Face and others load them. Collective.

    In fp32 these are the master weights (weight and correction joined); in the model's own dtype they are its weights.
    Tied weights are written once. Of a sharded model one tensor at a time is gathered.

    Args:
        path: a ``.safetensors`` file, or a folder, which gets ``model.safetensors`` or numbered files and their index.
        model: plain, wrapped or sharded.
        opt: its flashdist optimizer; without one, or for parameters that it does not have, the weights as they are.
        dtype: of floating-point parameters; torch.float32, torch.bfloat16 or torch.float16. Buffers keep theirs.
        max_file_bytes: in a folder, a new file is begun before one grows beyond this.
        overwrite: replace files of these names.

    Raises:
        FileExistsError: a file is there already.
        ValueError: another dtype, ranks that give different paths, or a parameter of the optimizer that the model does
            not have.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.float32, torch.bfloat16 or torch.float16, got {dtype}")
    ranks = Ranks()
    target = ranks.agree_on(Path(os.path.realpath(path)))
    entries = _entries(model, opt, dtype)
    files = {target: entries} if target.suffix == ".safetensors" else _divided(target, entries, max_file_bytes)
    with ranks.together():
        if ranks.rank == 0:
            _check_free(target, list(files), overwrite)
    for file, members in files.items():
        _write(file, members, ranks)
    with ranks.together():
        if ranks.rank == 0 and len(files) > 1:
            index = {
                "metadata": {"total_size": sum(e.bytes for e in entries)},
                "weight_map": {e.name: file.name for file, members in files.items() for e in members},
            }
            (target / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")


def _entries(model: nn.Module, opt: torch.optim.Optimizer | None, dtype: torch.dtype) -> list[_Entry]:
    names = ModelTensors(model)
    stepped = {p for group in opt.param_groups for p in group["params"]} if isinstance(opt, FlashOptimizer) else set()
    for p in stepped:
        names.name_of(p)

    def getter(tensor: Tensor, out: torch.dtype) -> Callable[[], Tensor]:
        def get() -> Tensor:
            wide = tensor in stepped and tensor.dtype != out
            found = opt.master_weight(tensor) if wide and isinstance(opt, FlashOptimizer) else tensor.detach()
            return (found.full_tensor() if isinstance(found, DTensor) else found).to(out)

        return get

    entries = []
    for name, tensor in names.by_name.items():
        out = dtype if tensor in names.parameters and tensor.is_floating_point() else tensor.dtype
        entries.append(_Entry(name, tuple(tensor.shape), out, getter(tensor, out)))
    return entries


def _divided(folder: Path, entries: list[_Entry], max_file_bytes: int) -> dict[Path, list[_Entry]]:
    """Files of a folder and what goes into each, in the model's order."""
    parts: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if parts[-1] and size + entry.bytes > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.bytes
    if len(parts) == 1:
        return {folder / FILE_NAME: parts[0]}
    return {folder / f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _check_free(target: Path, files: list[Path], overwrite: bool) -> None:
    existing = [file for file in [*files, target / INDEX_NAME] if file.exists()]
    if existing and not overwrite:
        raise FileExistsError(f"{existing[0]} exists: export to another path, or with overwrite=True")
    files[0].parent.mkdir(parents=True, exist_ok=True)


def _write(path: Path, entries: list[_Entry], ranks: Ranks) -> None:
    """Write one file beside its name, then rename it. All ranks gather, rank 0 writes."""
    unfinished = path.with_name(path.name + ".unfinished")
    described = {e.name: Piece(e.name, (), torch.empty(e.shape, dtype=e.dtype, device="meta"), True) for e in entries}
    by_name = {e.name: e for e in entries}
    file: StreamedFile | None = None
    error: Exception | None = None
    try:
        if ranks.rank == 0:
            unfinished.unlink(missing_ok=True)
            file = StreamedFile(unfinished, list(described.values()))
    except Exception as raised:
        error = raised
    for tensor in _gathered(by_name, list(described.values())):
        if file is not None and error is None:
            try:
                file.write(tensor)
            except Exception as raised:  # the others wait in the next tensor's gathering: raised after the last
                error = raised
    with ranks.together():
        if error is None and file is not None:
            file.close()
            os.replace(unfinished, path)
        elif error is not None:
            if file is not None:
                file.abandon()
            unfinished.unlink(missing_ok=True)
            raise error


def _gathered(by_name: dict[str, _Entry], pieces: list[Piece]) -> Iterator[Tensor]:
    for piece in in_file_order(pieces):
        yield by_name[piece.name].get()
