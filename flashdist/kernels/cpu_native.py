"""The native CPU backend: ``native/step.cpp``, compiled for this very machine when it is asked for.

The compiled library is loaded and its file removed again: nothing is cached, so nothing can be stale or made for
another machine. Compiling takes a few seconds.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdist.kernels.backend import ParamState, StepInputs, dithered
from flashdist.kernels.eager import EagerBackend, grad_factor
from flashdist.numerics import companding, fingerprint
from flashdist.numerics.rules import GroupScalars
from flashdist.numerics.weight_split import correction_bits

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
# No errno and no traps, so that roots and comparisons become vector code; neither changes a result.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-strict-aliasing", "-fwrapv", "-fPIC", "-shared", "-pthread"),
)
# Fewer tiles than this are not worth a thread.
TILES_PER_THREAD = 64

# int64 table, one row a tensor; the names are the constants of step.cpp.
COLUMNS = (
    *("WEIGHT", "GRAD", "CORRECTION", "MOMENT1", "SCALE1", "MOMENT2", "SCALE2", "FINGERPRINT"),
    *("RULE", "WEIGHT_TYPE", "GRAD_TYPE", "LO_BITS", "QUANTIZED", "NUM_MOMENTS"),
    *("NUMEL", "NUM_GROUPS", "ROW", "FIRST_TILE", "SCALAR_ROW", "DITHER_BASE"),
)
_COLUMN = {name: i for i, name in enumerate(COLUMNS)}
_RULES = ("adamw", "adam", "lion", "sgd", "sgdw")
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
# fp32 rows: numerics.rules.StepScalars, then the factor of the gradients.
SCALARS = 13


def defines() -> list[str]:
    """The constants that the sources take from here, as compiler flags."""
    constants = {
        **_COLUMN,
        "COLUMNS": len(COLUMNS),
        "SCALARS": SCALARS,
        "GRAD_FACTOR": SCALARS - 1,
        "GROUP": companding.GROUP,
        "TILE_GROUPS": fingerprint.TILE_GROUPS,
        "MOMENTUM_CODES": companding.MOMENTUM_CODES,
        "VARIANCE_CODES": companding.VARIANCE_CODES,
        "DITHER_LANE": f"{companding.DITHER_LANE}u",
        "PLACE_MULTIPLIER": f"{fingerprint.PLACE_MULTIPLIER}u",
        "PLACE_OFFSET": f"{fingerprint.PLACE_OFFSET}u",
    }
    return [f"-D{name}={value}" for name, value in constants.items()]


@cache
def compile_step() -> Any:
    """Compile and load the step, once a process.

    Returns:
        The C function ``flashdist_step``.

    Raises:
        RuntimeError: no compiler, or it failed (with what it said).
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise RuntimeError(
            f"the native CPU step needs a C++ compiler, and none of {', '.join(COMPILERS)} was found. Install one "
            "(Debian and Ubuntu: 'apt install g++'; conda: 'conda install gxx'), or keep the default step."
        )
    with tempfile.TemporaryDirectory(prefix="flashdist-") as folder:
        library = Path(folder, "step.so")
        command = [compiler, *FLAGS, *defines(), str(SOURCES / "step.cpp"), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{compiler} could not compile the native CPU step; the default step needs no compiler. It said:\n"
                f"{done.stderr[-2000:]}"
            )
        step = ctypes.CDLL(str(library)).flashdist_step
    step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    step.restype = None
    return step


class NativeBackend:
    """See :class:`flashdist.kernels.backend.Backend`. One pass over memory; reads the step counts on the host."""

    def __init__(self) -> None:
        self._step = compile_step()
        self._last: Sequence[ParamState] | None = None
        self._table = torch.empty(0, len(COLUMNS), dtype=torch.int64)

    def step(
        self,
        states: Sequence[ParamState],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        groups: Sequence[GroupScalars],
        inputs: StepInputs,
    ) -> list[Tensor] | None:
        if inputs.found_inf is not None and bool(inputs.found_inf):
            return None
        if states is not self._last:
            self._table, self._last = _constant_table(states), states
        scalars = self._fill(states, weights, grads, groups, grad_factor(inputs))
        tiles = int(self._table[-1, _COLUMN["FIRST_TILE"]]) + _tiles(states[-1]) if states else 0
        threads = max(1, min(torch.get_num_threads(), tiles // TILES_PER_THREAD))
        lost = torch.zeros(threads, len(states), dtype=torch.int64) if inputs.count_lost else None
        self._step(
            self._table.data_ptr(), scalars.data_ptr(), len(states), tiles, threads,
            None if lost is None else lost.data_ptr(),
        )  # fmt: skip
        return None if lost is None else list(lost.sum(dim=0).unbind())

    def _fill(
        self,
        states: Sequence[ParamState],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        groups: Sequence[GroupScalars],
        factor: float,
    ) -> Tensor:
        """Advance the step counts, and write what changes from step to step: the columns here and the scalars."""
        rows: dict[tuple[int, int], int] = {}
        scalars: list[float] = []
        columns: dict[str, list[int]] = {"SCALAR_ROW": [], "DITHER_BASE": []}
        for state in states:
            state.step += 1
            key = state.group, int(state.step)
            group = groups[state.group]
            if key not in rows:
                rows[key] = len(rows)
                scalars += [*group.at(key[1]), -factor if group.maximize else factor]
            columns["SCALAR_ROW"].append(rows[key])
            columns["DITHER_BASE"].append(companding.dither_base(key[1]) if dithered(state.rule, group) else -1)
        columns["WEIGHT"] = list(map(Tensor.data_ptr, weights))
        columns["GRAD"] = list(map(Tensor.data_ptr, grads))
        columns["GRAD_TYPE"] = [_TYPES.index(g.dtype) for g in grads]
        if states:
            for name, values in columns.items():
                self._table[:, _COLUMN[name]] = torch.frombuffer(array("q", values), dtype=torch.int64)
        return torch.tensor(scalars, dtype=torch.float32)

    def grad_square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        return EagerBackend().grad_square_sum(grads)


def _constant_table(states: Sequence[ParamState]) -> Tensor:
    first, rows = 0, []
    for state in states:
        row = dict.fromkeys(COLUMNS, 0)
        for i, (moment, scale) in enumerate(zip(state.moments, state.scales or state.moments, strict=True), start=1):
            row[f"MOMENT{i}"], row[f"SCALE{i}"] = moment.data_ptr(), scale.data_ptr()
        if state.correction is not None and state.fingerprint is not None:
            row["CORRECTION"], row["FINGERPRINT"] = state.correction.data_ptr(), state.fingerprint.data_ptr()
            row["LO_BITS"] = correction_bits(state.correction.dtype)
        row["RULE"], row["WEIGHT_TYPE"] = _RULES.index(state.rule.name), _TYPES.index(state.weight_dtype)
        row["QUANTIZED"], row["NUM_MOMENTS"] = int(state.quantized), len(state.moments)
        row["NUMEL"], row["NUM_GROUPS"] = state.layout.numel, state.layout.num_groups
        row["ROW"], row["FIRST_TILE"] = max(state.layout.row, 1), first
        first += _tiles(state)
        rows.append([row[name] for name in COLUMNS])
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), len(COLUMNS))


def _tiles(state: ParamState) -> int:
    return fingerprint.num_tiles(state.layout.num_groups)
