"""Checkpoints that torch.distributed.checkpoint has written, read without running what they contain.

Their ``.metadata`` is a pickle, and so is every entry that is no tensor. The first goes through an unpickler that knows
the classes of such metadata and nothing else; the second are not read at all.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from flashdist.checkpoint.manifest import StoredTensor
from flashdist.checkpoint.ranks import CheckpointError

METADATA_FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"
_ADMITTED = {
    f"{_DCP}.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}  # fmt: skip
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class _MetadataUnpickler(pickle.Unpickler):
    """Admits the classes that the metadata of a checkpoint consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return getattr(pathlib, name if "Pure" in name else f"Pure{name}")
        raise CheckpointError(
            f"the checkpoint's {METADATA_FILE} refers to {module}.{name}, which has no place there: it is damaged, or "
            "was made to run code. Nothing was executed."
        )


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint of torch.distributed.checkpoint.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, or one whose metadata would run code.
    """
    try:
        data = (folder / METADATA_FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint of torch.distributed.checkpoint: {error}") from error
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # pickles fail in many ways
        raise CheckpointError(f"{folder / METADATA_FILE} is damaged: {error!r}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{folder / METADATA_FILE} is damaged: it holds a {type(metadata).__name__}")
    for place in (metadata.storage_data or {}).values():
        inside = os.path.normpath(place.relative_path)
        if os.path.isabs(inside) or inside.startswith(os.pardir):
            raise CheckpointError(
                f"{folder / METADATA_FILE} names a file outside of its folder: {place.relative_path!r}"
            )
    return metadata


class _Storage(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(Path(self.path))


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor but a pickle, which is not read")


class TorchSource:
    """The tensors of such a checkpoint (see :class:`flashdist.checkpoint.reading.Source`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = read_metadata(folder)
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(stored.properties.dtype, tuple(stored.size), ())
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    @torch.no_grad()
    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Overwrite tensors with what is stored under their names."""
        storage = _Storage(self._folder)
        storage.set_up_storage_reader(self._metadata, is_coordinator=False)
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=False)
        plan = planner.create_local_plan()
        assert all(item.type == LoadItemType.TENSOR for item in plan.items)
        storage.read_data(plan, planner).wait()
