"""Reading stored tensors into live ones, whatever their placements: each rank reads the bytes of its own part.

Which part of which stored piece belongs to which part of a target is torch.distributed.checkpoint's planner's work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from flashdist.checkpoint.manifest import Manifest, StoredPiece, StoredTensor, read_manifest
from flashdist.checkpoint.ranks import CheckpointError
from flashdist.checkpoint.shard_file import file_record, read_box


def check_files(folder: Path, manifest: Manifest, place: int = 0, of: int = 1) -> None:
    """Compare files with their sizes and checksums: every ``of``-th of them, from ``place`` on.

    Raises:
        CheckpointError: naming each file that is missing, truncated or damaged.
    """
    faults = []
    for name, record in sorted(manifest.files.items())[place::of]:
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.stat().st_size != record.bytes:
            faults.append(f"{name} has {path.stat().st_size} bytes instead of {record.bytes}")
        elif file_record(path) != record:
            faults.append(f"{name} is damaged (its checksum differs)")
    if faults:
        raise CheckpointError(f"the checkpoint at {folder} cannot be used, nothing was loaded: {'; '.join(faults)}")


def open_checkpoint(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check all of its files; CheckpointError as in :func:`check_files`."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


class Source(Protocol):
    """Stored tensors that can be read into live ones."""

    tensors: Mapping[str, StoredTensor]

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Overwrite tensors with what is stored under their names.

        Args:
            targets: name to a plain tensor, a DTensor or anything with torch's ``_Checkpointable`` protocol, of the
                stored dtype and global shape. Ranks need not have the same names: there is no communication.
        """
        ...


class Reader:
    """The tensors of a checkpoint.

    Attributes:
        folder: the checkpoint's.
        manifest: its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.tensors: Mapping[str, StoredTensor] = manifest.tensors

    @torch.no_grad()
    def read(self, targets: Mapping[str, Tensor]) -> None:
        """See :class:`Source`."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), metadata_of(self.tensors, targets), is_coordinator=False)
        by_file: dict[str, list[tuple[StoredPiece, ReadItem]]] = {}
        pieces = {(name, p.offsets): p for name in targets for p in self.tensors[name].pieces}
        for item in planner.create_local_plan().items:
            index = item.storage_index
            assert index.offset is not None
            piece = pieces[index.fqn, tuple(index.offset)]
            by_file.setdefault(piece.file, []).append((piece, item))
        for file_name, reads in by_file.items():
            with open(self.folder / file_name, "rb", buffering=0) as file:
                for piece, item in sorted(reads, key=lambda read: read[0].start):
                    target = planner.resolve_tensor(item).detach()
                    read_box(file, piece.start, piece.sizes, tuple(item.storage_offsets), target)


def read_plain(source: Source, names: Iterable[str]) -> dict[str, Tensor]:
    """Whole tensors on the CPU."""
    found = {name: torch.empty(source.tensors[name].shape, dtype=source.tensors[name].dtype) for name in names}
    source.read(found)
    return found


def metadata_of(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> Metadata:
    """Stored tensors as torch.distributed.checkpoint describes them."""
    return Metadata({name: _metadata_of(tensors[name]) for name in names})


def _metadata_of(stored: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in stored.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks)
