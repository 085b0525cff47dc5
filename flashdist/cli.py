"""The ``flashdist`` command. Every error of the user's is one line that says what to do; no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flashdist.checkpoint.describe import describe, tables
from flashdist.checkpoint.folder import find
from flashdist.checkpoint.manifest import read_manifest
from flashdist.checkpoint.ranks import CheckpointError
from flashdist.checkpoint.reading import check_files

app = typer.Typer(
    name="flashdist",
    help="Look into checkpoints of flashdist, check them, and plan memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_CheckpointPath = Annotated[Path, typer.Argument(help="a checkpoint's folder", show_default=False)]
_AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]


@app.command(epilog="Example: flashdist inspect run/step-1000 --tensors")
def inspect(
    path: _CheckpointPath,
    as_json: _AsJson = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor too")] = False,
) -> None:
    """What a checkpoint holds: bytes by kind, world size, step, versions. Files are not checked."""
    folder = find(path)
    found = describe(folder, read_manifest(folder))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console = Console()
    for table in tables(found, with_tensors=tensors):
        console.print(table)


@app.command(epilog="Example: flashdist verify run/step-1000 && echo fine")
def verify(path: _CheckpointPath, quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False) -> None:
    """Compare every file with its checksum. Exit status 0 if all fit, 1 if not."""
    folder = find(path)
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    if not quiet:
        size = sum(record.bytes for record in manifest.files.values())
        print(f"{folder}: {len(manifest.files)} files, {size:,} bytes, all checksums fit")


def main() -> None:
    """Run the command; errors that are the user's are one line on stderr and exit status 1."""
    try:
        app()
    except (CheckpointError, ValueError, TypeError, OSError) as error:
        print(f"flashdist: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
