"""What a checkpoint holds, for people and as JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashdist.checkpoint.jsonable import dtype_name
from flashdist.checkpoint.manifest import MODEL, OPTIM, Manifest
from flashdist.checkpoint.reading import Reader, read_plain

if TYPE_CHECKING:
    from rich.table import Table

_KIND_NAMES = {"model": "weights and buffers", "error": "corrections", "rng": "random states", "values": "extra"}


def describe(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """A checkpoint in plain values: what ``flashdist inspect --json`` prints.

    Returns:
        A dict with ``path``, ``created``, ``world_size``, ``strategy``, ``versions``, ``parameters`` (elements of
        stepped weights), ``step`` (smallest and largest), ``bytes`` (in files), ``bytes_by_kind``,
        ``bytes_per_parameter`` (weights and states), ``optimizer``, ``has_scheduler``, ``extra``, ``aliases``,
        ``files`` and ``tensors``.
    """
    steps = [name for name in manifest.tensors if name.startswith(OPTIM) and name.endswith(".step")]
    counts = sorted(float(t) for t in read_plain(Reader(folder, manifest), steps).values())
    stepped = {name.removeprefix(OPTIM).rsplit(".", 1)[0] for name in steps}
    numel = sum(math.prod(t.shape) for n, t in manifest.tensors.items() if n.removeprefix(MODEL) in stepped)
    kinds = manifest.bytes_by_kind
    own = sum(size for kind, size in kinds.items() if kind not in ("rng", "values"))
    return {
        "path": str(folder),
        "created": manifest.created,
        "world_size": manifest.world_size,
        "strategy": manifest.strategy,
        "versions": manifest.versions,
        "parameters": numel,
        "step": [counts[0], counts[-1]] if counts else None,
        "bytes": sum(record.bytes for record in manifest.files.values()),
        "bytes_by_kind": kinds,
        "bytes_per_parameter": own / numel if numel else None,
        "optimizer": manifest.optimizer,
        "has_scheduler": manifest.values.get("scheduler") is not None,
        "extra": manifest.values.get("extra"),
        "aliases": manifest.aliases,
        "files": {name: {"bytes": r.bytes, "sha256": r.sha256} for name, r in manifest.files.items()},
        "tensors": {
            name: {"dtype": dtype_name(t.dtype), "shape": list(t.shape), "pieces": len(t.pieces)}
            for name, t in manifest.tensors.items()
        },
    }


def tables(found: dict[str, Any], with_tensors: bool) -> list[Table]:
    """The description as tables of rich."""
    from rich.table import Table

    about = Table(title=found["path"], show_header=False)
    optimizer = found["optimizer"]["class"] if found["optimizer"] else "none, weights alone"
    steps = found["step"]
    rows = {
        "created": found["created"],
        "saved by": f"{found['world_size']} rank(s), {found['strategy']}",
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "optimizer": optimizer,
        "step": "-"
        if steps is None
        else f"{steps[-1]:.0f}"
        if steps[0] == steps[-1]
        else f"{steps[0]:.0f} to {steps[-1]:.0f}",
        "parameters": f"{found['parameters']:,}",
        "bytes per parameter": "-" if found["bytes_per_parameter"] is None else f"{found['bytes_per_parameter']:.4f}",
        "scheduler": "yes" if found["has_scheduler"] else "no",
        "files": f"{len(found['files'])}, {found['bytes']:,} bytes",
    }
    for name, value in rows.items():
        about.add_row(name, str(value))
    kinds = Table("kind", title="bytes by kind")
    kinds.add_column("bytes", justify="right")
    for kind, size in found["bytes_by_kind"].items():
        kinds.add_row(_KIND_NAMES.get(kind, kind), f"{size:,}")
    result = [about, kinds]
    if with_tensors:
        listed = Table("tensor", "dtype", "shape", "pieces", title=f"{len(found['tensors'])} tensors")
        for name, t in found["tensors"].items():
            listed.add_row(name, t["dtype"], str(tuple(t["shape"])), str(t["pieces"]))
        result.append(listed)
    return result
