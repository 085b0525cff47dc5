"""Writing a file as torch.save does, one tensor at a time: torch.save itself wants all of them in memory.

The file is a zip archive of uncompressed entries: a pickle, in which a tensor is a reference to a storage, and one
entry of raw bytes for each storage. ``torch.load(weights_only=True)`` and ``mmap=True`` read it.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdist.checkpoint.shard_file import BLOCK, view_bytes

_ALIGNMENT = 64
_STORAGES = {
    torch.float32: torch.FloatStorage, torch.float64: torch.DoubleStorage, torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}  # fmt: skip


class Later:
    """Stands for a tensor in what is saved; its values are asked for when their turn comes.

    Args:
        shape: the tensor's.
        dtype: the tensor's.
        get: gives it. One object that stands in several places is saved once, as tied weights are.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, get: Callable[[], Tensor]) -> None:
        self.shape, self.dtype, self.get = shape, dtype, get

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class _Storage:
    def __init__(self, key: str, later: Later) -> None:
        self.key, self.later = key, later


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, _Storage] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", _STORAGES[obj.later.dtype], obj.key, "cpu", obj.later.numel)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Later):
            return NotImplemented
        storage = self.storages.setdefault(id(obj), _Storage(str(len(self.storages)), obj))
        stride = [math.prod(obj.shape[i + 1 :]) for i in range(len(obj.shape))]
        arguments: Any = (storage, 0, tuple(obj.shape), tuple(stride), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


def write_torch(path: Path, value: Any, done: Callable[[int], None]) -> None:
    """Save a structure of plain values and :class:`Later`.

    Args:
        path: must not exist.
        value: dicts, lists, tuples, numbers, strings and :class:`Later`.
        done: told the bytes of each tensor that is written.
    """
    described = io.BytesIO()
    pickler = _Pickler(described)
    pickler.dump(value)
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        root = path.stem
        _add(archive, f"{root}/data.pkl", described.getvalue())
        _add(archive, f"{root}/byteorder", sys.byteorder.encode())
        for storage in pickler.storages.values():
            tensor = storage.later.get().to(storage.later.dtype).contiguous()
            if tuple(tensor.shape) != storage.later.shape:
                raise ValueError(f"a tensor has shape {tuple(tensor.shape)}, {storage.later.shape} was announced")
            with archive.open(_entry(archive, f"{root}/data/{storage.key}"), "w", force_zip64=True) as file:
                for block in tensor.view(-1).split(max(BLOCK // tensor.element_size(), 1)):
                    file.write(view_bytes(block))
            done(tensor.numel() * tensor.element_size())
            del tensor
        _add(archive, f"{root}/version", b"3\n")


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    with archive.open(_entry(archive, name), "w", force_zip64=True) as file:
        file.write(data)


def _entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """An entry whose bytes begin at a multiple of 64, as torch's do: its header is filled up."""
    info = zipfile.ZipInfo(name)
    assert archive.fp is not None
    # A header has 30 bytes, the name, 20 for sizes of 64 bits and 4 before the filling.
    begin = archive.fp.tell() + 30 + len(name.encode()) + 20 + 4
    fill = -begin % _ALIGNMENT
    info.extra = struct.pack("<HH", 0x4246, fill) + b"Z" * fill
    return info
