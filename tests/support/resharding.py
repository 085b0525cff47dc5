"""Save under one strategy and number of ranks, load under another, in every way there is: does any bit differ?

``python -m tests.support.resharding docs/reshard-matrix.md`` tries all pairs and writes the table.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from flashdist import checkpoint
from flashdist.sharding.local_shard import local
from flashdist.sharding.row_shard import RowShard
from tests.support.odd_model import STRATEGIES, build, fill, make_optimizer, part_of, step, tensors_of
from tests.support.ranks import run_ranks

Tensors = dict[str, Tensor]
Side = tuple[str, int]  # a strategy and its number of ranks
ALL: list[Side] = [(strategy, size) for strategy, sizes in STRATEGIES.items() for size in sizes]
OWN, NESTED, FLATTENED, FULL, FROM_RANK_0 = "own", "nested", "flattened", "full", "full from rank 0"
WAYS = (OWN, NESTED, FLATTENED, FULL, FROM_RANK_0)
EQUAL, REFUSED = "equal", "refused"
SECONDS = 240  # a busy machine takes long over hundreds of small collective calls
# What torch itself does not do, with a word of its message: where, and what to do instead.
KNOWN_REFUSALS = {
    (FULL, "to fsdp2_tp"): (
        "AssertionError",
        "distribute_tensor cuts no uneven strided shard: broadcast_from_rank0=True",
    ),
    (FULL, "from ddp_zero1"): (
        "would lose the others",
        "torch gathers DTensors only: full_state_dict(opt), or dcp.save",
    ),
    (FROM_RANK_0, "from ddp_zero1"): ("would lose the others", "the same"),
    (FROM_RANK_0, "to ddp_zero1"): ("", "torch broadcasts into DTensors and plain tensors only: full, on every rank"),
}


def options(way: str) -> StateDictOptions:
    return StateDictOptions(
        flatten_optimizer_state_dict=way == FLATTENED,
        full_state_dict=way in (FULL, FROM_RANK_0),
        broadcast_from_rank0=way == FROM_RANK_0,
    )


def trained(strategy: str, world_size: int, seeds: range, device: str = "cpu") -> tuple[Any, Any]:
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    model = build(strategy, world_size, device=device)
    opt = make_optimizer(model, strategy)
    fill(model, seeds.start)
    for seed in seeds:
        step(model, opt, seed)
    opt.state_dict()  # allocates also what has had no gradient
    return model, opt


@functools.cache
def expected(device: str = "cpu") -> tuple[Tensors, Tensors]:
    """All tensors of one process after the three steps, and after the next. (Sharded runs have the same bits.)"""
    model, opt = trained("single", 1, range(3), device)
    saved = {name: t.clone() for name, t in tensors_of(model, opt).items()}
    step(model, opt, 7)
    return saved, tensors_of(model, opt)


def differing(model: Any, opt: Any, whole: Tensors) -> list[str]:
    """Names of the tensors of which this rank's part differs from that of ``whole``: no communication."""
    found = tensors_of(model, opt)
    return sorted({*(n for n, t in found.items() if n not in whole or not same(t, whole[n])), *(whole.keys() - found)})


def same(mine: Tensor, whole: Tensor) -> bool:
    part = mine.rows.of(whole) if isinstance(mine, RowShard) else local(part_of(whole, mine))
    mine = local(mine).detach().reshape(-1)
    return mine.dtype == part.dtype and torch.equal(mine.view(torch.uint8), part.reshape(-1).view(torch.uint8))


def save_worker(rank: int, world_size: int, strategy: str, path: str, device: str = "cpu") -> list[str]:
    """Train and save in every way; the names of what then differs from one process."""
    model, opt = trained(strategy, world_size, range(3), device)
    checkpoint.save(f"{path}/{OWN}", model, opt)
    for way in (NESTED, FLATTENED, FULL):
        weights, states = get_state_dict(model, opt, options=options(way))
        if way != FULL:
            dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{path}/{way}")
        elif rank == 0:
            try:
                torch.save({"model": weights, "optim": states}, f"{path}/{way}")
            except TypeError as error:
                Path(f"{path}/{REFUSED}").write_text(str(error), encoding="utf-8")
    return differing(model, opt, expected(device)[0])


def load(way: str, path: str, model: Any, opt: Any) -> None:
    if way == OWN:
        checkpoint.load(f"{path}/{OWN}", model, opt)
        return
    if way in (NESTED, FLATTENED):
        weights, states = get_state_dict(model, opt, options=options(way))
        loaded = {"model": weights, "optim": states}
        dcp.load(loaded, checkpoint_id=f"{path}/{way}")
    elif Path(f"{path}/{REFUSED}").exists():
        raise TypeError(Path(f"{path}/{REFUSED}").read_text(encoding="utf-8"))
    else:
        loaded = torch.load(f"{path}/{FULL}", weights_only=True)
    if way == FROM_RANK_0:
        # One by one: set_state_dict leaves out what is an empty dict.
        loaded = loaded if dist.get_rank() == 0 else {"model": {}, "optim": {}}
        set_model_state_dict(model, loaded["model"], options=options(way))
        set_optimizer_state_dict(model, opt, loaded["optim"], options=options(way))
        return
    set_state_dict(model, opt, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"], options=options(way))


def load_worker(
    rank: int, world_size: int, strategy: str, path: str, ways: tuple[str, ...], device: str = "cpu"
) -> dict[str, str]:
    """Load into a model that was trained to something else; per way: EQUAL, or what is wrong."""
    found = {}
    model, opt = trained(strategy, world_size, range(99, 100), device)
    for seed, way in enumerate(ways):
        fill(model, 200 + seed)
        for p in getattr(model, "module", model).unused.parameters():
            p.grad = torch.ones_like(p)
        step(model, opt, 300 + seed)
        alike = tensors_of(model, opt).keys() - set(differing(model, opt, expected(device)[0]))
        # What cannot differ: steps count alike now and then, and a part may have no element, or one.
        alike = {n for n in alike if local(tensors_of(model, opt)[n]).numel() > 2}
        assert not alike, f"this test could not tell: {alike}"
        try:
            load(way, path, model, opt)
        except BaseException as error:  # CheckpointException is no Exception
            found[way] = f"{type(error).__name__}: {error}"
            continue
        wrong = differing(model, opt, expected(device)[0])
        step(model, opt, 7)
        wrong_next = differing(model, opt, expected(device)[1])
        found[way] = EQUAL if not wrong + wrong_next else f"DIFFERS: {wrong[:5]}; after a step {wrong_next[:5]}"
    return found


class Matrix:
    """Checkpoints of every side, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: set[Side] = set()

    def outcome(self, source: Side, target: Side, ways: tuple[str, ...] = WAYS) -> dict[str, str]:
        """Per way what came of loading the checkpoint of ``source`` under ``target``, the same on all ranks."""
        path = self.folder / f"{source[0]}-{source[1]}"
        if source not in self._saved:
            path.mkdir()
            wrong = run_ranks(save_worker, source[1], source[0], str(path), timeout=SECONDS)
            assert not any(wrong), f"what {source} has saved is not what one process has: {wrong}"
            self._saved.add(source)
        ranks = run_ranks(load_worker, target[1], target[0], str(path), ways, timeout=SECONDS)
        return {way: next((r[way] for r in ranks if r[way] != EQUAL), EQUAL) for way in ways}


def refusal(way: str, source: Side, target: Side) -> tuple[str, str] | None:
    """The known refusal that a pair falls under: a word of its message, and what to do instead."""
    for where in (f"from {source[0]}", f"to {target[0]}"):
        if (way, where) in KNOWN_REFUSALS:
            return KNOWN_REFUSALS[way, where]
    return None


def write_table(path: Path) -> bool:
    """Try everything; returns whether all is as it should be."""
    started, fine = time.strftime("%Y-%m-%d"), True
    lines = [
        "# Saved under one strategy, loaded under another",
        "",
        "Written by `python -m tests.support.resharding docs/reshard-matrix.md` (torch "
        f"{torch.__version__.split('+')[0]}, gloo, CPU, {started}).",
        "",
        "A model of awkward shapes (tests/support/odd_model.py) with FlashAdamW is trained for three steps and saved.",
        "Another, overwritten with noise, loads it. `=` says that every tensor (weights, corrections, codes, scales,",
        "steps) has the same bits, and again after a further step. The ways, from left to right in each cell:",
        "",
        "1. `flashdist.checkpoint.save` and `load`",
        "2. `get_state_dict`, `dcp.save`, `dcp.load`, `set_state_dict`, nested",
        "3. the same with `flatten_optimizer_state_dict=True`",
        "4. `full_state_dict=True`, `torch.save`, and every rank loads the file",
        "5. the same, rank 0 loads it and `broadcast_from_rank0=True`",
        "",
        "| saved by \\ loaded by | " + " | ".join(f"{s} x{n}" for s, n in ALL) + " |",
        "|---|" + "---|" * len(ALL),
    ]
    notes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        for source in ALL:
            cells = []
            for target in ALL:
                marks = []
                for way, outcome in matrix.outcome(source, target).items():
                    known = refusal(way, source, target)
                    if outcome == EQUAL:
                        marks.append("=")
                    elif known is not None and known[0] in outcome:
                        mark = "abcdef"[list(KNOWN_REFUSALS.values()).index(known)]
                        notes[mark] = f"{known[1]} (torch says: {re.sub(r'[/][^ ]*', '...', outcome)[:110]})"
                        marks.append(mark)
                    else:
                        fine = False
                        marks.append("**X**")
                        print(source, target, way, outcome, flush=True)
                cells.append(" ".join(marks))
            lines.append(f"| {source[0]} x{source[1]} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    lines += ["", "Refused:", "", *(f"- {mark}: {note}" for mark, note in sorted(notes.items()))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return fine


if __name__ == "__main__":
    sys.exit(0 if write_table(Path(sys.argv[1])) else 1)
