"""From live tensors to a checkpoint's files: who writes what, the writing, and the publication."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor, Replicate

from flashdist.checkpoint.contents import collect
from flashdist.checkpoint.folder import SavingFolder, check_mark, saving_folder
from flashdist.checkpoint.manifest import FILE_NAME, MODEL, OPTIM, RNG, Manifest, StoredPiece, StoredTensor
from flashdist.checkpoint.ranks import Ranks
from flashdist.checkpoint.shard_file import DTYPES, FileRecord, Piece, nbytes, write_shard

logger = logging.getLogger(__name__)
# Beyond the tensors: the manifest and the files' headers, per piece.
OVERHEAD = 2048


@dataclass
class Save:
    """A save whose plan is made: what this rank writes, and on rank 0 what all of them do.

    Attributes:
        path: where the checkpoint is going to be.
        ranks: who takes part.
        pieces: what this rank writes, still in the live tensors.
        manifest: without files and pieces so far.
        folder: on rank 0, the folder in the making.
    """

    path: Path
    ranks: Ranks
    pieces: list[Piece]
    manifest: Manifest
    folder: SavingFolder | None

    def stage(self) -> None:
        """Copy what this rank writes to the host, so that training can go on while it is written."""
        self.pieces = [Piece(p.name, p.offsets, _host_copy(p.tensor), p.whole) for p in self.pieces]

    def write(self) -> None:
        """Write this rank's file; then rank 0 publishes the checkpoint. Collective.

        Raises:
            OSError: what the file system said, on all ranks alike.
            CheckpointError: the path was taken in the meantime.
        """
        try:
            with self.ranks.together():
                written = self._write_file()
            everything = self.ranks.gather(written)
            with self.ranks.together():
                if everything is not None:
                    self._publish(everything)
        except BaseException:
            if self.folder is not None:
                self.folder.discard()
            raise

    def _write_file(self) -> tuple[str, FileRecord, list[tuple[str, StoredPiece]]] | None:
        if not self.pieces:
            return None
        name = f"rank-{self.ranks.rank:05d}.safetensors"
        starts, record = write_shard(saving_folder(self.path) / name, self.pieces)
        places = [(p.name, StoredPiece(name, starts[p.key], p.offsets, tuple(p.tensor.shape))) for p in self.pieces]
        return name, record, places

    def _publish(self, everything: list[tuple[str, FileRecord, list[tuple[str, StoredPiece]]] | None]) -> None:
        assert self.folder is not None
        self.folder.check_files((name, record.bytes) for name, record, _ in filter(None, everything))
        manifest = self.manifest
        pieces: dict[str, list[StoredPiece]] = {name: [] for name in manifest.tensors}
        for written in filter(None, everything):
            file_name, record, places = written
            manifest.files[file_name] = record
            for name, place in places:
                pieces[name].append(place)
        for name, stored in manifest.tensors.items():
            found = tuple(sorted(pieces[name], key=lambda piece: piece.offsets))
            manifest.tensors[name] = StoredTensor(stored.dtype, stored.shape, found)
        with open(self.folder.folder / FILE_NAME, "xb") as file:
            file.write(manifest.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        self.folder.publish()


def plan_save(
    path: Path,
    model: nn.Module,
    opt: torch.optim.Optimizer | None,
    scheduler: Any,
    extra: Any,
    overwrite: bool,
    ranks: Ranks,
) -> Save:
    """Decide who writes what. Collective; nothing is written but rank 0's empty folder.

    Raises:
        FileExistsError: the path is taken, or another job saves to it.
        CheckpointError: a rank does not see the folder that rank 0 has made.
        OSError: the disk is too small, or not to be written.
        ValueError: replicas of a tensor differ between ranks, or ranks give different ``extra``.
    """
    folder: SavingFolder | None = None
    with ranks.together():
        tensors, manifest = collect(model, opt, scheduler, extra, ranks)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, is_coordinator=ranks.rank == 0)
        local_plan = planner.create_local_plan()
        facts = _facts(tensors, manifest, planner, local_plan, ranks.size)
    gathered = ranks.gather((local_plan, facts))
    shares: list[tuple[SavePlan, str]] | None = None
    try:
        with ranks.together():
            if gathered is not None:
                _compare(gathered[0][1], [facts for _, facts in gathered])
                plans, metadata = planner.create_global_plan([plan for plan, _ in gathered])
                for name, described in metadata.state_dict_metadata.items():
                    assert isinstance(described, TensorStorageMetadata)
                    manifest.tensors[name] = StoredTensor(described.properties.dtype, tuple(described.size), ())
                manifest.bytes_by_kind = bytes_by_kind(manifest)
                folder = SavingFolder(path, overwrite)
                folder.check_space(sum(manifest.bytes_by_kind.values()) + OVERHEAD * len(manifest.tensors) * ranks.size)
                word = folder.mark() if ranks.size > 1 else ""
                shares = [(plan, word) for plan in plans]
        share, word = ranks.scatter(shares)
        with ranks.together():
            if ranks.size > 1:
                check_mark(path, word)
        plan = planner.finish_plan(share)
    except BaseException:
        if folder is not None:
            folder.discard()
        raise
    pieces = [_piece(planner, item) for item in plan.items]
    return Save(path, ranks, [p for p in pieces if p.tensor.numel()], manifest, folder)


def _piece(planner: DefaultSavePlanner, item: WriteItem) -> Piece:
    name = item.index.fqn
    assert item.tensor_data is not None
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    chunk = item.tensor_data.chunk
    return Piece(name, tuple(chunk.offsets), tensor.detach(), tuple(chunk.sizes) == tuple(item.tensor_data.size))


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


@dataclass(frozen=True)
class _Facts:
    """What ranks must agree on: a digest of the JSON, and sums of the pieces that several of them hold."""

    values: str
    sums: dict[tuple[str, tuple[int, ...]], int]


def _facts(
    tensors: dict[str, Any], manifest: Manifest, planner: DefaultSavePlanner, plan: SavePlan, size: int
) -> _Facts:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}, which a checkpoint does not take")
    if size == 1:
        return _Facts("", {})
    described = json.dumps([manifest.values, manifest.optimizer, manifest.aliases], sort_keys=True)
    pieces = [_piece(planner, item) for item in plan.items if _is_replicated(item.index.fqn, tensors)]
    sums = {(p.name, p.offsets): _bit_sum(p.tensor) for p in pieces}
    return _Facts(hashlib.sha256(described.encode()).hexdigest(), sums)


def _is_replicated(name: str, tensors: dict[str, Any]) -> bool:
    """Whether other ranks hold the same piece. Buffers may differ for a while: DDP sends them before a forward."""
    tensor = tensors[name]
    if isinstance(tensor, DTensor):
        return any(
            isinstance(p, Replicate) and tensor.device_mesh.size(dim) > 1 for dim, p in enumerate(tensor.placements)
        )
    if name.startswith(MODEL):
        return type(tensor) is Tensor and f"{OPTIM}{name.removeprefix(MODEL)}.step" in tensors
    return type(tensor) is Tensor and not name.startswith(RNG)


def _bit_sum(tensor: Tensor) -> int:
    """The sum of a tensor's elements, taken as integers."""
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.view(as_integers).reshape(-1)
    if flat.numel() == 0:
        return 0
    # In parts: on a CPU the sum would convert all of it to int64 first.
    return int(sum(part.sum(dtype=torch.int64) for part in flat.split(1 << 20)))


def _compare(mine: _Facts, everyone: Sequence[_Facts]) -> None:
    first = dict(mine.sums)
    for rank, facts in enumerate(everyone):
        if facts.values != mine.values:
            raise ValueError(
                f"ranks 0 and {rank} have different param groups, scheduler states, `extra` or tied weights; a "
                "checkpoint keeps one of each. Gather what differs into one value that all ranks give."
            )
        differing = sorted({name for (name, at), s in facts.sums.items() if first.setdefault((name, at), s) != s})
        if differing:
            raise ValueError(
                f"rank {rank} and a lower one hold replicas of {differing[:5]} ({len(differing)} tensors) that differ: "
                "the ranks have diverged, or keep different tensors under one name. A checkpoint would mix them."
            )


def bytes_by_kind(manifest: Manifest) -> dict[str, int]:
    """Bytes of a checkpoint's tensors: weights, corrections, each moment and its scales, ..."""
    kinds: Counter[str] = Counter()
    for name, stored in manifest.tensors.items():
        kind = name.rsplit(".", 1)[-1] if name.startswith(OPTIM) else name.split(".", 1)[0]
        kinds[kind] += nbytes(stored.shape, stored.dtype)
    return dict(sorted(kinds.items()))


class AsyncSave:
    """A save that goes on in a thread. What it saves is what there was when :func:`async_save` returned."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save to {save.path}", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._save.write()
        except BaseException as error:
            self._error = error
            logger.error("the checkpoint at %s was not saved: %s", self._save.path, error)

    def done(self) -> bool:
        """Whether the checkpoint is published, or has failed."""
        return not self._thread.is_alive()

    def result(self) -> None:
        """Wait until the checkpoint is published; raise what went wrong. Collective: every rank calls it."""
        self._thread.join()
        self._save.ranks.close()
        self._save.pieces = []
        if self._error is not None:
            raise self._error
