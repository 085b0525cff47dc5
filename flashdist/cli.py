"""The ``flashdist`` command. Every error of the user's is one line that says what to do; no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress
except ModuleNotFoundError as error:
    print(f"flashdist: the command needs {error.name}: pip install 'flashdist[cli]'", file=sys.stderr)
    sys.exit(2)

from flashdist import plan_tables, planner
from flashdist.checkpoint.describe import describe, tables
from flashdist.checkpoint.folder import find
from flashdist.checkpoint.manifest import read_manifest
from flashdist.checkpoint.ranks import CheckpointError
from flashdist.checkpoint.reading import check_files
from flashdist.convert.run import SOURCES, TARGETS, Options
from flashdist.convert.run import convert as convert_checkpoint
from flashdist.model_shapes import model_shape

app = typer.Typer(
    name="flashdist",
    help="Look into checkpoints of flashdist, check and convert them, and plan memory.",
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


@app.command(epilog="Example: flashdist plan --model llama-3.1-8b --gpu-memory 48 --release --compare")
def plan(
    model: Annotated[str, typer.Option(help="llama-3.1-8b, a config.json or its folder, or params=7e9")],
    gpus: Annotated[int, typer.Option(help="number of GPUs")] = 1,
    gpu_memory: Annotated[float, typer.Option(help="memory of each, GB")] = 80.0,
    strategy: Annotated[str | None, typer.Option(help=", ".join(planner.STRATEGIES), show_default="by gpus")] = None,
    optimizer: Annotated[str, typer.Option(help=", ".join(planner.RULES))] = "adamw",
    micro_batch: Annotated[int, typer.Option(help="sequences a GPU takes at a time")] = 1,
    seq: Annotated[int, typer.Option(help="tokens in a sequence")] = 4096,
    checkpointing: Annotated[bool, typer.Option(help="recompute layers in the backward pass")] = True,
    chunked_loss: Annotated[bool, typer.Option(help="never hold all logits")] = True,
    release: Annotated[bool, typer.Option("--release", help="gradient release")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="beside other optimizers")] = False,
    as_json: _AsJson = False,
) -> None:
    """Memory of training a model, by kind and rank, and whether it fits. Weights and states are exact."""
    setting = planner.Setting(
        gpus=gpus, gpu_memory=gpu_memory, strategy=strategy or ("fsdp2" if gpus > 1 else "single"),
        optimizer=optimizer, micro_batch=micro_batch, seq=seq, checkpointing=checkpointing,
        chunked_loss=chunked_loss, release=release,
    )  # fmt: skip
    found = planner.report(model_shape(model), setting, compare)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        plan_tables.show(found, Console())


_CONVERT_EXAMPLES = """Examples:

flashdist convert run/step-1000 model --to hf --config my-model

flashdist convert run/step-1000 weights.safetensors --to safetensors-fp32

flashdist convert run/step-1000 adamw.pt --to torch-adamw

flashdist convert adamw.pt run/step-0 --to flashdist --from torch-adamw"""


@app.command(epilog=_CONVERT_EXAMPLES)
def convert(
    path: Annotated[Path, typer.Argument(help="the checkpoint, a file or a folder", show_default=False)],
    out: Annotated[Path, typer.Argument(help="what is to be made; it must not exist", show_default=False)],
    to: Annotated[str, typer.Option(help=", ".join(TARGETS), show_default=False)],
    source: Annotated[str | None, typer.Option("--from", help=", ".join(SOURCES), show_default="found out")] = None,
    config: Annotated[Path | None, typer.Option(help="hf: folder with config.json and tokenizer")] = None,
    dtype: Annotated[str | None, typer.Option(help="hf: bf16, fp16, fp32", show_default="as trained")] = None,
    weights: Annotated[Path | None, typer.Option(help="the model's weights, if the checkpoint has none")] = None,
    names: Annotated[Path | None, typer.Option(help="parameters' names in the optimizer's order, one a line")] = None,
    master_weight_bits: Annotated[int, typer.Option(help="flashdist: 24 or 32")] = 24,
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
) -> None:
    """From flashdist's checkpoints to others and back, one tensor at a time. Nothing in a file is ever executed."""
    options = Options(config, dtype, weights, names, master_weight_bits)
    console = Console(stderr=True)
    silent = quiet or not console.is_terminal
    with Progress(*Progress.get_default_columns(), DownloadColumn(), console=console, disable=silent) as bar:
        task = bar.add_task("converting", total=None)
        try:
            found = convert_checkpoint(
                path, out, to, source, options, lambda n, of: bar.update(task, completed=n, total=of)
            )
        except CheckpointError as error:
            raise ValueError(str(error)) from error
    if not quiet:
        for note in found.notes:
            print(note)
        print(f"{out}: {len(found.items)} tensors of {found.what}")


def main() -> None:
    """Run the command. Errors are one line on stderr: exit status 1 for a damaged checkpoint or none, else 2."""
    try:
        app()
    except (CheckpointError, ValueError, TypeError, OSError) as error:
        print(f"flashdist: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, CheckpointError) else 2)


if __name__ == "__main__":
    main()
