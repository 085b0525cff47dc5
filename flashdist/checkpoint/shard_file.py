"""One rank's file: safetensors, written and read in blocks, so that no second copy of a tensor is held.

Any tool that reads safetensors can look into it. A tensor that is stored whole goes by its name, a part of one by its
name and the offsets of its first element, as in ``model.wte.weight@512,0``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

BLOCK = 16 << 20  # bytes
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


@dataclass(frozen=True)
class Piece:
    """A box of a tensor.

    Attributes:
        name: the tensor's name.
        offsets: where the box begins in the tensor.
        tensor: its values, a plain tensor of the box's shape.
        whole: whether the box is the whole tensor.
    """

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor
    whole: bool

    @property
    def key(self) -> str:
        return self.name if self.whole else f"{self.name}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and checksum of a file of a checkpoint."""

    bytes: int
    sha256: str


def nbytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(sizes) * dtype.itemsize


def in_file_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Wide elements first: every piece then lies at a multiple of its element's size."""
    return sorted(pieces, key=lambda piece: -piece.tensor.element_size())


def shard_header(
    pieces: Sequence[Piece], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[Piece], list[int]]:
    """Header, the pieces in their order in the file, and the byte each begins at."""
    ordered = in_file_order(pieces)
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    begins, position = [], 0
    for piece in ordered:
        end = position + nbytes(piece.tensor.shape, piece.tensor.dtype)
        if piece.key in entries:
            raise ValueError(f"two tensors would be called {piece.key} in the checkpoint: rename one of them")
        entries[piece.key] = {
            "dtype": DTYPES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [position, end],
        }
        begins.append(position)
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, ordered, [len(header) + begin for begin in begins]


def write_shard(path: Path, pieces: Sequence[Piece]) -> tuple[dict[str, int], FileRecord]:
    """Write a rank's pieces to a new file and have it on the disk before returning.

    Args:
        path: must not exist.
        pieces: on any device; device tensors come to the host a block at a time.

    Returns:
        Where each piece's key begins in the file, in bytes, and the file's size and checksum.
    """
    file = StreamedFile(path, pieces)
    try:
        for piece in in_file_order(pieces):
            file.write(piece.tensor.detach())
        return file.starts, file.close()
    except BaseException:
        file.abandon()
        raise


class StreamedFile:
    """A safetensors file that is written tensor by tensor.

    Args:
        path: must not exist.
        pieces: what it is to hold; of their tensors only shapes and dtypes are looked at.
        metadata: texts that the file's header carries.

    Attributes:
        starts: where each piece's key begins in the file, in bytes.
    """

    def __init__(self, path: Path, pieces: Sequence[Piece], metadata: dict[str, str] | None = None) -> None:
        header, ordered, begins = shard_header(pieces, metadata)
        self.starts = {piece.key: begin for piece, begin in zip(ordered, begins, strict=True)}
        self._digest, self._size = hashlib.sha256(), 0
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close() or abandon()
        try:
            self._put(memoryview(header))
        except BaseException:
            self._file.close()
            raise

    def write(self, tensor: Tensor) -> None:
        """Write the next piece's tensor, in the order of :func:`in_file_order`; from a device a block at a time."""
        for block in _blocks(tensor):
            host = block.cpu().resolve_neg()  # a view that negates lazily has other bytes than values
            self._put(view_bytes(host))

    def _put(self, view: memoryview) -> None:
        self._digest.update(view)
        written = 0
        while written < len(view):
            written += self._file.write(view[written:])
        self._size += written

    def close(self) -> FileRecord:
        """Have the file on the disk; its size and checksum."""
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._size, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close an unfinished file."""
        self._file.close()


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in contiguous parts of at most BLOCK bytes, in order of its elements."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(BLOCK // tensor.element_size())
        return
    row = nbytes(tensor.shape[1:], tensor.dtype)
    if row > BLOCK:
        for inner in tensor:
            yield from _blocks(inner)
        return
    for rows in tensor.split(max(BLOCK // row, 1)):
        yield rows.contiguous()


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; the tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def file_record(path: Path) -> FileRecord:
    """Size and checksum of a file as it is now."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(4 << 20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def read_box(
    file: BinaryIO,
    start: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    target: Tensor,
) -> None:
    """Read a box of a stored piece into a tensor.

    Args:
        file: opened unbuffered for reading.
        start: byte at which the piece begins.
        sizes: shape of the stored piece, contiguous.
        offsets: where the box begins in the piece.
        target: of the box's shape and the piece's dtype, on any device, with any strides; it is overwritten.

    Raises:
        EOFError: the file ends too early.
    """
    if target.numel() == 0:
        return
    row = nbytes(sizes[1:], target.dtype)
    if target.dim() == 0 or tuple(target.shape[1:]) == tuple(sizes[1:]):
        begin = start + (offsets[0] * row if target.dim() else 0)
        _read_run(file, begin, target)
    elif row > BLOCK or len(target) == 1:
        for i in range(len(target)):
            read_box(file, start + (offsets[0] + i) * row, sizes[1:], offsets[1:], target[i])
    else:
        count = max(BLOCK // row, 1)
        for first in range(0, len(target), count):
            part = target[first : first + count]
            rows = torch.empty((len(part), *sizes[1:]), dtype=target.dtype)
            _read_run(file, start + (offsets[0] + first) * row, rows)
            box = tuple(slice(o, o + n) for o, n in zip(offsets[1:], part.shape[1:], strict=True))
            part.copy_(rows[(slice(None), *box)])


def _read_run(file: BinaryIO, begin: int, target: Tensor) -> None:
    """Read consecutive bytes into a tensor, straight into its storage where that is possible."""
    if target.device.type == "cpu" and target.is_contiguous():
        file.seek(begin)
        _read_all(file, view_bytes(target))
        return
    row = nbytes(target.shape[1:], target.dtype)
    if row > BLOCK and target.dim() > 0:
        for i, inner in enumerate(target):
            _read_run(file, begin + i * row, inner)
        return
    parts = target.split(max(BLOCK // row, 1)) if target.dim() else (target,)
    for part in parts:
        host = torch.empty(part.shape, dtype=part.dtype)
        file.seek(begin)
        _read_all(file, view_bytes(host))
        part.copy_(host)
        begin += nbytes(part.shape, part.dtype)


def _read_all(file: BinaryIO, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"{file.name} ends {len(view) - done} bytes too early")
        done += count
