"""The manifest of a checkpoint: what it holds, which bytes of which file, and the checksum of each.

``manifest.json`` is plain JSON, written in one canonical form: it is damaged unless it reads back to the very same
bytes and its body has the checksum given beside it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashdist.checkpoint.jsonable import dtype_name, dtype_of, from_json, tensor_names
from flashdist.checkpoint.ranks import CheckpointError
from flashdist.checkpoint.shard_file import FileRecord

FILE_NAME = "manifest.json"
FORMAT = "flashdist-checkpoint"
FORMAT_VERSION = 1
# How the names of stored tensors begin.
MODEL, OPTIM, RNG, VALUES = "model.", "optim.", "rng.", "values."


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor: the file, the byte in it, where the box begins in the tensor, and its shape."""

    file: str
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: dtype, global shape, and the boxes that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass
class Manifest:
    """All that a checkpoint says about itself.

    Attributes:
        world_size: number of ranks that saved it.
        strategy: how they shared the model, for people: ``single``, ``ddp``, ``ddp_zero1``, ``fsdp2``, ``hsdp``, ...
        created: UTC time, ISO 8601.
        versions: of flashdist, torch and Python.
        bytes_by_kind: stored bytes of weights, buffers, corrections, moments, ...
        files: size and checksum of each rank's file.
        tensors: name to what is stored.
        aliases: further names of tied weights.
        optimizer: class name and param groups (with names of parameters), or None where only a model was saved.
        values: scheduler and extra as JSON (:mod:`flashdist.checkpoint.jsonable`).
    """

    world_size: int
    strategy: str
    created: str
    versions: dict[str, str]
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The canonical form."""
        body = asdict(self)
        for tensor in body["tensors"].values():
            tensor["dtype"] = dtype_name(tensor["dtype"])
        return _canonical(body)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: no checkpoint, a damaged manifest, or one of a newer format.
    """
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no checkpoint at {folder}: {'it is a file' if folder.exists() else 'no such folder'}"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} is no flashdist checkpoint: its {FILE_NAME} cannot be read ({error.strerror}). "
            "flashdist.checkpoint.import_optimizer reads checkpoints of torch."
        ) from error
    try:
        document = json.loads(data)
        version, body = document["format_version"], document["body"]
        is_ours = document["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not the JSON that flashdist writes ({error!r})") from error
    if not is_ours:
        raise CheckpointError(f"{path} is not of a flashdist checkpoint")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format version {version}, this release of flashdist reads {FORMAT_VERSION}: "
            "load it with the release that wrote it, or a newer one"
        )
    if _canonical(body) != data:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit")
    try:
        return _parse(body)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged or forged: {error!r}") from error


def _canonical(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "body": body,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _parse(body: dict[str, Any]) -> Manifest:
    _check_types(body)
    files = {name: FileRecord(**record) for name, record in body["files"].items()}
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"the manifest names a file outside of its folder: {name!r}")
    tensors = {
        name: StoredTensor(
            dtype_of(t["dtype"]),
            tuple(t["shape"]),
            tuple(StoredPiece(p["file"], p["start"], tuple(p["offsets"]), tuple(p["sizes"])) for p in t["pieces"]),
        )
        for name, t in body["tensors"].items()
    }
    unlisted = {piece.file for stored in tensors.values() for piece in stored.pieces} - files.keys()
    if unlisted:
        raise CheckpointError(f"the manifest has tensors in files without a checksum: {sorted(unlisted)}")
    for name, stored in tensors.items():
        _check_pieces(name, stored, files)
    for first in body["aliases"].values():
        if MODEL + first not in tensors:
            raise ValueError(f"a further name of {first!r}, which it does not hold")
    _check_optimizer(body["optimizer"])
    for key in ("scheduler", "extra"):
        value = body["values"].get(key)
        # A trial: names of tensors that are not there, and marks around what they cannot hold.
        from_json(value, {name: _stand_in(tensors, name) for name in tensor_names(value)})
    return Manifest(**{**body, "files": files, "tensors": tensors})


def _stand_in(tensors: dict[str, StoredTensor], name: str) -> torch.Tensor:
    if VALUES + name not in tensors:
        raise KeyError(VALUES + name)
    return torch.empty(0)


def _check_types(body: dict[str, Any]) -> None:
    """TypeError unless each part of the body is of the JSON type that flashdist writes."""
    _require("world_size", body["world_size"], int)
    for key in ("strategy", "created"):
        _require(key, body[key], str)
    for key, kind in (("versions", str), ("bytes_by_kind", int), ("aliases", str), ("files", dict), ("tensors", dict)):
        _require(key, body[key], dict)
        for name, value in body[key].items():
            _require(f"{key}[{name!r}]", value, kind)
    for name, record in body["files"].items():
        _require(f"bytes of {name}", record["bytes"], int)
        _require(f"sha256 of {name}", record["sha256"], str)
    for name, stored in body["tensors"].items():
        _require_sizes(f"shape of {name}", stored["shape"])
        for piece in stored["pieces"]:
            _require(f"file of {name}", piece["file"], str)
            _require(f"start of {name}", piece["start"], int)
            _require_sizes(f"offsets of {name}", piece["offsets"])
            _require_sizes(f"sizes of {name}", piece["sizes"])
    _require("values", body["values"], dict)
    _require("values['scheduler_class']", body["values"].get("scheduler_class", ""), str)


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is None:
        return
    _require("optimizer", optimizer, dict)
    _require("optimizer's class", optimizer.get("class", ""), str)
    _require("optimizer's kind", optimizer["flashdist"], bool)
    _require("param groups", optimizer["param_groups"], list)
    for i, group in enumerate(optimizer["param_groups"]):
        _require(f"param group {i}", group, dict)
        _require(f"params of param group {i}", group["params"], list)
        for name in group["params"]:
            _require(f"a parameter of param group {i}", name, str)
        from_json({k: v for k, v in group.items() if k != "params"}, {})


def _require(what: str, value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise TypeError(f"{what} must be of type {kind.__name__}, it is {value!r}"[:300])


def _require_sizes(what: str, value: Any) -> None:
    _require(what, value, list)
    for size in value:
        _require(what, size, int)
        if size < 0 or size >= 1 << 63:
            raise ValueError(f"{what} has {size}")


def _check_pieces(name: str, stored: StoredTensor, files: dict[str, FileRecord]) -> None:
    """CheckpointError unless the pieces lie inside their files and make up the tensor, without holes and overlaps."""
    rank = len(stored.shape)
    for piece in stored.pieces:
        inside = len(piece.offsets) == len(piece.sizes) == rank and all(
            0 <= o and 0 < n and o + n <= whole
            for o, n, whole in zip(piece.offsets, piece.sizes, stored.shape, strict=True)
        )
        end = piece.start + math.prod(piece.sizes) * stored.dtype.itemsize
        if not inside or piece.start < 0 or end > files[piece.file].bytes:
            raise CheckpointError(f"the manifest is damaged or forged: a piece of {name} lies outside of it: {piece}")
    # Boxes inside the tensor that have its volume in all leave a hole only where two of them overlap.
    if sum(math.prod(piece.sizes) for piece in stored.pieces) != math.prod(stored.shape) or _overlap(stored.pieces):
        raise CheckpointError(f"the manifest is damaged or forged: the pieces of {name} do not make it up")


def _overlap(pieces: tuple[StoredPiece, ...]) -> bool:
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    for i, piece in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if piece.offsets and other.offsets[0] >= piece.offsets[0] + piece.sizes[0]:
                break  # and so do all that follow
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            ):
                return True
    return False
