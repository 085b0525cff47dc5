"""Opening files of torch.save and safetensors: mapped, not read, and never executed."""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from flashdist.checkpoint.shard_file import DTYPES, read_box

_WEIGHT_KEYS = ("model", "state_dict", "model_state_dict", "module")
_INDEX = "model.safetensors.index.json"


def load_file(path: Path, admitted: list[Any] | None = None) -> Any:
    """What a file of torch.save holds, its tensors mapped from the file.

    Args:
        path: the file.
        admitted: classes and functions that it may refer to besides torch's own.

    Raises:
        ValueError: no such file, no file of torch.save, a damaged one, or one that would run code.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: name what torch.save has written")
    with torch.serialization.safe_globals(admitted or []):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError, AttributeError) as error:
            text = str(error)
            named = re.search(r"GLOBAL ([\w.]+)", text)
            if named:
                raise ValueError(
                    f"{path} refers to {named.group(1)}, which could run code when it is loaded; "
                    "nothing was executed. Save it anew with tensors and plain values alone"
                ) from error
            raise ValueError(
                f"{path} cannot be read as a file of torch.save, it is damaged or of another format "
                f"({text.splitlines()[0][:120] if text else type(error).__name__}): save it anew"
            ) from error


Weights = dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[], Tensor]]]


def in_model_order(path: Path) -> bool:
    """Whether a weights file keeps the model's order: safetensors sort names, so that layer 10 comes before layer 2."""
    return not path.is_dir() and path.suffix != ".safetensors"


def read_weights(path: Path) -> tuple[Weights, dict[str, str]]:
    """The tensors of a model's file or folder: shapes, dtypes and how to get them; and further names of tied ones.

    Args:
        path: a safetensors file, a folder of them as Hugging Face keeps it, or a file of torch.save.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if path.is_dir():
        index = path / _INDEX
        names = {"model.safetensors"}
        if index.is_file():
            try:
                names = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, KeyError, AttributeError) as error:
                raise ValueError(f"{index} is damaged ({error!r}): copy the model's folder again") from error
        found: Weights = {}
        for name in sorted(names):
            found.update(_safetensors(path / Path(name).name))
        return found, {}
    if path.suffix == ".safetensors":
        return _safetensors(path), {}
    return weights_of(find_weights(load_file(path), path))


def find_weights(loaded: Any, path: Path) -> dict[str, Tensor]:
    """The model's state dict in what a file holds.

    Raises:
        ValueError: there is none.
    """
    if isinstance(loaded, dict):
        for candidate in (*(loaded.get(key) for key in _WEIGHT_KEYS), loaded):
            if isinstance(candidate, dict) and candidate and all(isinstance(v, Tensor) for v in candidate.values()):
                return cast("dict[str, Tensor]", candidate)
    raise ValueError(
        f"{path} holds no weights (looked under {', '.join(_WEIGHT_KEYS)}): give the model's file by --weights"
    )


def weights_of(state_dict: dict[str, Tensor]) -> tuple[Weights, dict[str, str]]:
    """A state dict's tensors without what wrappers put before names; tensors that share memory are tied."""
    found: Weights = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    prefix = "module." if all(name.startswith("module.") for name in state_dict) else ""
    for full_name, tensor in state_dict.items():
        name = full_name.removeprefix(prefix).replace("_orig_mod.", "")
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(place, name) != name:
            aliases[name] = first[place]
            continue
        found[name] = (tuple(tensor.shape), tensor.dtype, lambda t=tensor: copy_of(t))  # type: ignore[misc]
    return found, aliases


def copy_of(tensor: Tensor) -> Tensor:
    """A mapped tensor read into memory."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _safetensors(path: Path) -> Weights:
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        found: Weights = {}
        for name, entry in _tensors(header):
            shape, dtype = tuple(entry["shape"]), dtypes[entry["dtype"]]
            begin, end = entry["data_offsets"]
            wanted = torch.Size(shape).numel() * dtype.itemsize
            if end - begin != wanted or begin < 0 or 8 + length + end > size:
                raise ValueError(f"the bytes of {name} are not all there")
            found[name] = (shape, dtype, _reader(path, 8 + length + begin, shape, dtype))
        return found
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be read as safetensors ({said}): copy or export it again") from error


def _tensors(header: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, entry) for name, entry in header.items() if name != "__metadata__")


def _reader(path: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
    def read() -> Tensor:
        out = torch.empty(shape, dtype=dtype)
        with open(path, "rb", buffering=0) as file:
            read_box(cast("Any", file), start, shape, (0,) * len(shape), out)
        return out

    return read
