"""From a DeepSpeed JSON and a launcher's own config to what `deepspeed.initialize` gets. Imports no DeepSpeed.

The launcher's config says how a run trains, the JSON how DeepSpeed spreads it. What both can say (batch sizes,
clipping, the optimizer and its numbers) may be `"auto"` or missing in the JSON, or must be the same there: a
contradiction is refused, because either choice would surprise somebody.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import UserError

AUTO = "auto"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# What the launchers work with. Others would be ignored, or change training in a way that nobody has tried.
KNOWN = (
    *BATCH_KEYS, "gradient_clipping", "bf16", "optimizer", "zero_optimization", "communication_data_type", "data_types",
    "prescale_gradients", "gradient_predivide_factor", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "flops_profiler",
    "tensorboard", "wandb", "csv_monitor",
)  # fmt: skip
REFUSED = {
    "fp16": 'set "bf16": {"enabled": true} instead, the master weight continues a bf16 weight',
    "amp": 'set "bf16": {"enabled": true} instead, the master weight continues a bf16 weight',
    "torch_autocast": 'set "bf16": {"enabled": true} instead, the weights are bf16 themselves',
    "scheduler": "leave it out, the learning rate follows the launcher's config (train.warmup and what is beside it)",
    "activation_checkpointing": "leave it out, model.activation_checkpointing in the launcher's config switches it",
    "checkpoint": "leave it out, checkpoints are the launcher's: run.save_every and --resume",
    "elasticity": "leave it out, the batch is train.batch in the launcher's config for any number of ranks",
}
OPTIMIZERS = {
    "flash_adamw": "FlashAdamW",
    "flash_adam": "FlashAdam",
    "flash_lion": "FlashLion",
    "flash_sgd": "FlashSGD",
    "flash_sgdw": "FlashSGDW",
}


@dataclass(frozen=True)
class Asked:
    """What the launcher's config says.

    Attributes:
        ranks: how many there are.
        batch, micro_batch, pieces: samples of a step over all ranks, of a forward pass on one, passes in a step.
        max_norm: largest gradient norm; 0 or infinity for none.
        optimizer: `optimizer.name`.
        settings: the arguments of its constructor that the config gives.
        batch_keys, norm_key: what these are called in the config.
    """

    ranks: int
    batch: int
    micro_batch: int
    pieces: int
    max_norm: float
    optimizer: str
    settings: Mapping[str, Any]
    batch_keys: tuple[str, str, str] = ("train.batch", "train.micro_batch", "train.batch and train.micro_batch")
    norm_key: str = "train.max_norm"


@dataclass(frozen=True)
class Settled:
    """What DeepSpeed is started with.

    Attributes:
        config: for `deepspeed.initialize`; without "optimizer", which the launcher builds.
        stage: of ZeRO.
        more: arguments of the optimizer's constructor that only the JSON gives.
        where: what messages call the JSON.
    """

    config: dict[str, Any]
    stage: int
    more: dict[str, Any]
    where: str


def settle(path: Path | None, asked: Asked) -> Settled:
    """Reads the JSON and makes one configuration of both.

    Args:
        path: `parallel.deepspeed_config`.
        asked: the launcher's side.

    Raises:
        UserError: no such file, no JSON, a setting that is refused, or one that contradicts the launcher's config.
    """
    if path is None:
        raise UserError(
            "parallel.strategy=deepspeed needs parallel.deepspeed_config: a JSON such as configs/deepspeed/zero2.json"
        )
    where = f"parallel.deepspeed_config {path}"
    given = read(path, where)
    _refuse(given, where)
    stage = _stage(given, where)
    if asked.optimizer not in OPTIMIZERS:
        raise UserError(
            f"parallel.strategy=deepspeed takes {', '.join(OPTIMIZERS)}, not optimizer.name={asked.optimizer}: take "
            "one of them, or another strategy"
        )
    config = {key: value for key, value in given.items() if key not in ("optimizer", *REFUSED)}
    derived = zip(BATCH_KEYS, (asked.batch, asked.micro_batch, asked.pieces), asked.batch_keys, strict=True)
    for key, value, name in derived:
        config[key] = _agreed(given, key, value, f"{name} {'give' if ' and ' in name else 'is'}", where)
    norm = 0.0 if math.isinf(asked.max_norm) else float(asked.max_norm)
    config["gradient_clipping"] = _agreed(given, "gradient_clipping", norm, f"{asked.norm_key} gives", where)
    config.setdefault("steps_per_print", 2**31)  # the launcher says more, in metrics.jsonl
    return Settled(config, stage, _optimizer(given, asked, where), where)


def read(path: Path, where: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: it cannot be read, is no JSON, or has a key twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} is written twice")
            found[key] = value
        return found

    try:
        tree = json.loads(path.expanduser().read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{where} must hold a JSON object, but holds a {type(tree).__name__}")
    return tree


def _refuse(given: dict[str, Any], where: str) -> None:
    for key, remedy in REFUSED.items():
        value = given.get(key)
        if value is None or value is False or (isinstance(value, dict) and value.get("enabled") is False):
            continue
        raise UserError(f'{where}: "{key}" cannot be used here: {remedy}')
    for key in given:
        if key not in KNOWN and key not in REFUSED:
            near = difflib.get_close_matches(key, KNOWN, n=1, cutoff=0.6)
            raise UserError(
                f"{where}: {key!r} is not known here{f' (did you mean {near[0]!r}?)' if near else ''}: leave it out"
            )
    bf16 = given.get("bf16")
    if not isinstance(bf16, dict) or bf16.get("enabled") is not True:
        raise UserError(f'{where}: set "bf16": {{"enabled": true}}, the master weight continues a bf16 weight')


def _stage(given: dict[str, Any], where: str) -> int:
    zero = given.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if not isinstance(zero, dict) or isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
        raise UserError(f'{where}: "zero_optimization" needs a "stage" from 0 to 3, got {stage!r}')
    for key, value in zero.items():
        if value == AUTO:
            raise UserError(f'{where}: zero_optimization.{key} is "auto", which only Hugging Face\'s Trainer fills in: '
                            "write a number, or leave it out")  # fmt: skip
        device = value.get("device", "cpu") if isinstance(value, dict) else value
        if key.startswith("offload_") and device not in (None, "none"):
            raise UserError(
                f"{where}: zero_optimization.{key} ({device}) cannot be used: weights and states live and are stepped "
                "on the device of the model; leave it out"
            )
    return stage


def _agreed(given: dict[str, Any], key: str, value: float, says: str, where: str) -> float:
    """The value, where the JSON does not say another one."""
    found = given.get(key, AUTO)
    if found == AUTO or (_is_number(found) and found == value):
        return value
    raise UserError(f'{where}: "{key}" is {found!r}, but {says} {value:g}: make them equal, or write "auto"')


def _optimizer(given: dict[str, Any], asked: Asked, where: str) -> dict[str, Any]:
    """Arguments that only the JSON gives, once what both give is known to be equal."""
    section = given.get("optimizer")
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise UserError(f'{where}: optimizer must be an object with a "type", got {section!r}')
    kind = section.get("type")
    if kind not in OPTIMIZERS.values():
        raise UserError(
            f"{where}: optimizer.type {kind!r} is none of {', '.join(OPTIMIZERS.values())}: name one of them, or leave "
            '"optimizer" out (optimizer.name of the launcher\'s config decides)'
        )
    if kind != OPTIMIZERS[asked.optimizer]:
        name = next(name for name, cls in OPTIMIZERS.items() if cls == kind)
        raise UserError(
            f"{where}: optimizer.type is {kind}, but optimizer.name is {asked.optimizer}: set optimizer.name={name}, "
            'or leave "optimizer" out of the JSON'
        )
    params = section.get("params") or {}
    if not isinstance(params, dict):
        raise UserError(f"{where}: optimizer.params must be an object, got {params!r}")
    more = {}
    for key, value in params.items():
        if value == AUTO:
            continue
        if key not in asked.settings:
            more[key] = tuple(value) if isinstance(value, list) else value
        elif not _same(value, asked.settings[key]):
            wanted = asked.settings[key]
            wanted = list(wanted) if isinstance(wanted, tuple) else wanted
            raise UserError(
                f"{where}: optimizer.params.{key} is {value!r}, but optimizer.{key} is {wanted!r}: make them equal, or "
                'write "auto"'
            )
    return more


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if _is_number(one) and _is_number(other):
        return bool(one == other)
    return type(one) is type(other) and bool(one == other)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
