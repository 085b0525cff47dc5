"""Loading what ``engine.load_checkpoint`` finds: our files of any number of ranks, DeepSpeed's, universal ones."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashdist.integrations.deepspeed_checkpoint import PAYLOAD, reading_codes, unpack
from flashdist.integrations.deepspeed_packed import Packed
from flashdist.integrations.deepspeed_reshard import covered, fill
from flashdist.integrations.deepspeed_state import FlatStepping
from flashdist.optimizer import FlashOptimizer
from flashdist.state_loading import VERSION_KEY, own_settings, set_groups, torch_settings

# Under which name DeepSpeed's tools keep a moment that has another name in torch.
UNIVERSAL_NAMES = {"momentum_buffer": "exp_avg"}
OPTIMIZER = "optimizer_state_dict"


def log(text: str) -> None:
    """Say it once, in DeepSpeed's log."""
    from deepspeed.utils import logger

    if dist.get_rank() == 0:
        logger.info(f"flashdist: {text}")


def load_folder(zero: Any, folder: str) -> bool:
    """Load the optimizer files of a ZeRO checkpoint into this rank's partitions.

    A rank reads its own file where that holds exactly its partitions, otherwise what it needs from all files, of which
    only those parts are brought into memory.

    Returns:
        False where there are no optimizer files (DeepSpeed then takes the weights as they are).

    Raises:
        ValueError: for files of another model, optimizer, state format or format version.
    """
    files = rank_files(folder)
    if not files:
        return False
    opt: FlatStepping = zero.optimizer
    rank = dist.get_rank(zero.dp_process_group)
    own = read_codes(files[rank] if rank < len(files) else files[0])
    groups = check_groups(opt, _groups_of(own))
    if PAYLOAD not in own:
        _load_dense(zero, _read_dense(files, rank), groups)
        return True
    targets = opt.states()
    sources = [unpack(saved) for saved in own[PAYLOAD]]
    same = len(targets) == len(sources) and all(map(covered, targets, sources))
    anew: dict[str, int] = {}
    if same and rank < len(files):
        for target, source in zip(targets, sources, strict=True):
            fill(target, [source])
    else:
        everything = [unpack(saved) for file in files for saved in read_codes(file)[PAYLOAD]]
        for target in targets:
            for name, count in fill(target, everything).items():
                anew[name] = anew.get(name, 0) + count
    _finish(zero, own, groups)
    _report(zero, anew)
    return True


def rank_files(folder: str | os.PathLike[str]) -> list[str]:
    """The optimizer files of a ZeRO checkpoint by rank; none where there are none.

    Files of more ranks may be left from an earlier save under the same tag: the first one says how many there are.

    Raises:
        ValueError: a file is missing.
    """
    found = glob.glob(os.path.join(folder, "*zero_pp_rank_*_mp_rank_00_optim_states.pt"))
    by_rank = {_rank_of(file): file for file in found}
    if 0 not in by_rank:
        return []
    count = read_codes(by_rank[0])["partition_count"]
    count = max(count) if isinstance(count, list | tuple) else int(count)
    missing = [rank for rank in range(count) if rank not in by_rank]
    if missing:
        raise ValueError(
            f"the checkpoint in {folder} was saved on {count} ranks, the files of ranks {missing} are missing"
        )
    return [by_rank[rank] for rank in range(count)]


def _rank_of(path: str) -> int:
    found = re.search(r"zero_pp_rank_(\d+)_", os.path.basename(path))
    assert found is not None
    return int(found.group(1))


def read_codes(file: str) -> dict[str, Any]:
    """The optimizer's part of a file, with nothing expanded."""
    with reading_codes():
        # Mapped: a rank that needs a part of a file reads that part.
        return torch.load(file, map_location="cpu", mmap=True, weights_only=False)[OPTIMIZER]


def _groups_of(saved: dict[str, Any]) -> Sequence[dict[str, Any]]:
    base = saved.get("base_optimizer_state")
    if isinstance(base, list):
        raise ValueError("the ZeRO checkpoint is an elastic one: convert it with DeepSpeed's ds_to_universal.py")
    found: Sequence[dict[str, Any]] = (base or saved[OPTIMIZER])["param_groups"]
    return found


def _finish(zero: Any, saved: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Hyperparameters and DeepSpeed's own few values, once the partitions are filled."""
    opt: FlatStepping = zero.optimizer
    set_groups(opt.param_groups, groups)
    for partition in opt.partitions.values():
        partition.trust()
    load = getattr(zero, "_load_global_state", None) or getattr(zero, "_load_global_state_stage3", None)
    if load is not None:
        load(saved)
    zero._weights_loaded()


def check_groups(opt: FlashOptimizer, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hyperparameters that each param group takes from saved ones. Nothing is changed.

    Raises:
        ValueError: another number of groups, a value out of range, or groups of another kind of optimizer.
    """
    if len(groups) != len(opt.param_groups):
        raise ValueError(f"the checkpoint has {len(groups)} param groups, this optimizer {len(opt.param_groups)}")
    taken = []
    for i, (group, saved) in enumerate(zip(opt.param_groups, groups, strict=True)):
        what = f"param group {i} of the checkpoint"
        ours = VERSION_KEY in saved
        settings = own_settings(opt, saved, what) if ours else torch_settings(opt, group, saved, what)
        taken.append({k: v for k, v in settings.items() if k in group})
        opt._check_group({**group, **taken[-1]})
    return taken


def _report(zero: Any, anew: dict[str, int]) -> None:
    """What was encoded anew on any rank."""
    group = zero.dp_process_group
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, anew, group=group)
    total: dict[str, int] = {}
    for counts in everywhere:
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    if total:
        listed = ", ".join(f"{name} ({count} elements)" for name, count in sorted(total.items()))
        log(f"groups that a partition's border had cut were encoded anew: {listed}")


def _read_dense(files: Sequence[str], rank: int) -> dict[str, Any]:
    if rank >= len(files):
        raise ValueError(
            f"the ZeRO checkpoint was saved by another optimizer on {len(files)} ranks: load it on as many, or convert "
            "it with DeepSpeed's ds_to_universal.py"
        )
    return torch.load(files[rank], map_location="cpu", mmap=True, weights_only=False)[OPTIMIZER]


def _load_dense(zero: Any, saved: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """A checkpoint of torch's counterpart of this optimizer under the same ZeRO stage and number of ranks."""
    opt: FlatStepping = zero.optimizer
    base = saved.get("base_optimizer_state") or saved[OPTIMIZER]
    masters = saved[zero.MASTER_KEY]
    if not isinstance(base, dict) or len(masters) != len(opt.partitions):
        raise ValueError(
            f"the ZeRO checkpoint has {len(masters)} partitions a rank, this optimizer {len(opt.partitions)}, or it "
            "is an elastic one: convert it with DeepSpeed's ds_to_universal.py"
        )
    for i, (packed, master) in enumerate(zip(opt.states(), masters, strict=True)):
        state = base["state"].get(i, {})
        _check_dense(packed, state, master)
        packed.write(0, master.view(-1))
        for key in packed.moments:
            packed.write(0, state[key].view(-1)[: packed.weight.numel()], key)
        packed.steps.fill_(float(state.get("step", 0)))
    log("the checkpoint was saved by another optimizer: its fp32 moments were encoded, its weights split")
    _finish(zero, saved, groups)


def _check_dense(packed: Packed, state: dict[str, Any], master: Tensor) -> None:
    missing = [key for key in packed.moments if key not in state]
    if missing or master.numel() > packed.weight.numel():
        raise ValueError(
            f"the ZeRO checkpoint has a partition of {master.numel()} elements with the state {sorted(state)}; here it "
            f"has {packed.weight.numel()} and needs {list(packed.moments)}: it belongs to another optimizer, model or "
            "number of ranks"
        )


def load_universal(zero: Any, folder: str) -> None:
    """Load a folder of DeepSpeed's ``ds_to_universal.py``: fp32 weights are split, fp32 moments encoded.

    Raises:
        ValueError: where the folder lacks a parameter or a moment.
    """
    opt: FlatStepping = zero.optimizer
    folder = os.path.join(folder, "zero")
    common = torch.load(os.path.join(folder, "optimizer_state.pt"), map_location="cpu", weights_only=False)
    groups = check_groups(opt, common.get("param_groups") or common[OPTIMIZER]["param_groups"])
    # Stage 3 has the step count of all parameters here, stages 1 and 2 beside each parameter.
    first = (common.get(OPTIMIZER) or {}).get("state", {}).get(0, {})
    for packed in opt.states():
        for i, segment in enumerate(packed.segments):
            at = os.path.join(folder, segment.name)
            part = slice(segment.start, segment.stop)
            packed.set_master(i, _universal(at, "fp32", segment.numel)[part])
            for key in packed.moments:
                packed.set_moment(i, key, _universal(at, UNIVERSAL_NAMES.get(key, key), segment.numel)[part])
            step_file = os.path.join(at, "step.pt")
            step = torch.load(step_file, weights_only=False) if os.path.exists(step_file) else first.get("step", 0)
            packed.steps[i].fill_(float(step))
    log("all moments were encoded anew from a universal checkpoint")
    _finish(zero, common, groups)


def _universal(folder: str, key: str, numel: int) -> Tensor:
    file = os.path.join(folder, f"{key}.pt")
    if not os.path.exists(file):
        raise ValueError(f"the universal checkpoint lacks {file}: it belongs to another model or optimizer")
    found = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    values: Tensor = (found["param"] if isinstance(found, dict) else found).reshape(-1)
    if values.numel() != numel:
        raise ValueError(f"{file} has {values.numel()} elements, the parameter {numel}")
    return values
