"""``flashdist convert``: from which formats to which, and the publication of what was written."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from flashdist.checkpoint.folder import find, fsync_folder
from flashdist.checkpoint.manifest import FILE_NAME as MANIFEST_NAME
from flashdist.checkpoint.torch_source import METADATA_FILE
from flashdist.convert import from_torch
from flashdist.convert.contents import Contents
from flashdist.convert.from_deepspeed import read_deepspeed
from flashdist.convert.from_flashdist import read_flashdist
from flashdist.convert.to_flashdist import write_flashdist
from flashdist.convert.to_torch import write_torch_adamw
from flashdist.convert.to_weights import write_fp32, write_hf
from flashdist.numerics.groups import group_layout
from flashdist.numerics.rules import ADAMW
from flashdist.numerics.state_format import state_format

SOURCES = ("flashdist", "torch-adamw", "deepspeed", "flashoptim", "bitsandbytes")
TARGETS = ("hf", "safetensors-fp32", "torch-adamw", "flashdist")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Options:
    """What some conversions need besides their paths.

    Attributes:
        config: for hf, a folder whose config.json and tokenizer are copied.
        dtype: for hf, ``bf16``, ``fp16`` or ``fp32``; None for the dtype that weights are trained in.
        weights: the model's weights, where the source holds none.
        names: a text file with parameters' names in the optimizer's order, where the source keeps none.
        master_weight_bits: for flashdist, 24 or 32.
    """

    config: Path | None = None
    dtype: str | None = None
    weights: Path | None = None
    names: Path | None = None
    master_weight_bits: int = 24


Progress = Callable[[int, int], None]


@torch.no_grad()
def convert(
    path: Path,
    out: Path,
    to: str,
    source: str | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Contents:
    """Convert a checkpoint, one tensor at a time. What is written appears under ``out`` as a whole, or not at all.

    Args:
        path: the checkpoint, a file or a folder.
        out: what is to be made; it must not exist.
        to: one of :data:`TARGETS`.
        source: one of :data:`SOURCES`; None to find out.
        options: what some formats need besides.
        progress: told, after each tensor, the bytes written and those there will be.

    Returns:
        What was converted.

    Raises:
        ValueError: what cannot be converted, with the remedy.
        FileExistsError: ``out`` exists.
        CheckpointError: a damaged flashdist checkpoint.
    """
    options = options or Options()
    _check(path, out, to, source, options)
    kind = source or detect(path)
    if kind == to:
        raise ValueError(f"{path} is of {kind} already: choose another --to")
    contents = _read(path, kind, options)
    total = planned_bytes(contents, to, options)
    written = 0

    def done(count: int) -> None:
        nonlocal written
        written += count
        if progress is not None:
            progress(written, max(total, written))

    _publish(out, lambda target: _write(contents, target, to, options, done), total)
    return contents


def _check(path: Path, out: Path, to: str, source: str | None, options: Options) -> None:
    """ValueError or FileExistsError for what can be told from the arguments alone."""
    if to not in TARGETS:
        raise ValueError(f"--to must be one of {', '.join(TARGETS)}, got {to!r}")
    if source is not None and source not in SOURCES:
        raise ValueError(f"--from must be one of {', '.join(SOURCES)}, got {source!r}")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    if options.master_weight_bits not in (24, 32):
        raise ValueError(f"--master-weight-bits must be 24 or 32, got {options.master_weight_bits}")
    for option, used, by in (("config", to == "hf", "--to hf"), ("dtype", to == "hf", "--to hf")):
        if getattr(options, option) is not None and not used:
            raise ValueError(f"--{option} is for {by}, not for --to {to}: leave it out")
    if not path.exists() and not find(path).exists():
        raise ValueError(f"there is nothing at {path}: name a checkpoint")
    for option in ("config", "weights", "names"):
        value = getattr(options, option)
        if value is not None and not value.exists():
            raise ValueError(f"--{option} {value} does not exist")
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"{out} exists: convert to another path, or remove it first")


def detect(path: Path) -> str:
    """The format of a checkpoint, where it can be told.

    Raises:
        ValueError: it cannot.
    """
    if not path.is_dir():
        return from_torch.detect(path) if path.exists() else "flashdist"
    if (path / MANIFEST_NAME).is_file():
        return "flashdist"
    if (path / "latest").is_file() or any(path.glob("*_optim_states.pt")):
        return "deepspeed"
    if (path / METADATA_FILE).is_file():
        return "torch-adamw"
    raise ValueError(f"{path} is a folder of no known format: say which by --from ({', '.join(SOURCES)})")


def _read(path: Path, kind: str, options: Options) -> Contents:
    for option in ("weights", "names"):
        unused = kind == "flashdist" or (kind == "deepspeed" and option == "weights")
        if unused and getattr(options, option) is not None:
            raise ValueError(f"--{option} is not for --from {kind}, which holds its own: leave it out")
    if kind == "flashdist":
        return read_flashdist(path)
    if kind == "deepspeed":
        return read_deepspeed(path, options.names)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, --from {kind} reads a file of torch.save: name the file")
    return from_torch.read_torch(path, kind, options.weights, options.names)


def planned_bytes(contents: Contents, to: str, options: Options) -> int:
    """About how large the result will be, without headers."""
    total = 0
    for item in contents.items:
        numel, stepped = math.prod(item.shape), item.master is not None
        if not stepped:
            total += numel * item.dtype.itemsize
        elif to == "flashdist":
            layout = group_layout(item.shape)
            dtype = torch.bfloat16 if item.dtype == torch.float32 else item.dtype
            for entry in state_format(ADAMW, layout, dtype, options.master_weight_bits, quantize=True):
                total += math.prod(entry.shape) * entry.dtype.itemsize
            total += numel * dtype.itemsize
        elif to == "hf":
            total += numel * (item.dtype if options.dtype is None else DTYPES[options.dtype]).itemsize
        else:
            total += numel * (12 if to == "torch-adamw" and item.state is not None else 4)
    return total


def _write(contents: Contents, target: Path, to: str, options: Options, done: Callable[[int], None]) -> None:
    if to == "hf":
        target.mkdir()
        write_hf(contents, target, options.config, DTYPES[options.dtype] if options.dtype else None, done)
    elif to == "safetensors-fp32":
        write_fp32(contents, target, done)
    elif to == "torch-adamw":
        write_torch_adamw(contents, target, done)
    else:
        target.mkdir()
        write_flashdist(contents, target, options.master_weight_bits, done)


def _publish(out: Path, write: Callable[[Path], None], needed: int) -> None:
    """Write beside ``out`` and rename; nothing is left where writing fails."""
    out = Path(os.path.realpath(out.parent)) / out.name
    if not out.parent.is_dir():
        out.parent.mkdir(parents=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise ValueError(f"{out} needs {needed / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB left: make room")
    target = Path(tempfile.mkdtemp(prefix=f".{out.name}.converting-", dir=out.parent)) / out.name
    try:
        write(target)
        _sync(target)
        if out.exists() or out.is_symlink():
            raise FileExistsError(f"{out} has come to exist while it was converted: convert to another path")
        target.rename(out)
        fsync_folder(out.parent)
    finally:
        shutil.rmtree(target.parent, ignore_errors=True)


def _sync(target: Path) -> None:
    """Have what was written on the disk before it gets its name."""
    for file in sorted(target.iterdir()) if target.is_dir() else [target]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    if target.is_dir():
        fsync_folder(target)
