"""`parallel.strategy=deepspeed` in launch/pretrain.py: the model in an engine, with the launcher's optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed_engine
import torch
import torch.distributed as dist
from config import UserError
from deepspeed_engine import Spread
from deepspeed_settings import Asked, Settled, settle
from model import GPT, GPTConfig, first_weight, init_weights
from pretrain_config import PretrainConfig
from strategy import Trainee, build_optimizer, optimizer_settings
from torch import Tensor

import flashdist


def settled(config: PretrainConfig, size: int) -> Settled:
    """What DeepSpeed is started with.

    Raises:
        UserError: a JSON that is refused, or contradicts the config.
    """
    train, section = config.train, config.optimizer
    asked = Asked(
        ranks=size,
        batch=train.batch,
        micro_batch=train.micro_batch,
        pieces=train.batch // (train.micro_batch * size),
        max_norm=train.max_norm,
        optimizer=section.name,
        settings={**optimizer_settings(section), "weight_decay": section.weight_decay},
    )
    found = settle(config.parallel.deepspeed_config, asked)
    if config.train.compile and found.stage == 3:
        raise UserError("train.compile=true has not been tested at ZeRO stage 3: set it to false, or take fsdp2")
    return found


@dataclass(frozen=True)
class EngineTrainee(Trainee):
    """A Trainee whose engine does what the launcher does elsewhere.

    Attributes:
        spread: the engine, and saving and loading under it.
    """

    spread: Spread

    def start_step(self) -> None:
        """Nothing: the engine has freed the gradients of the step before."""

    def backward(self, x: Tensor, y: Tensor, turns: int, last: bool) -> Tensor:
        """As of Trainee; the engine divides by the number of micro-batches, and steps after the last one."""
        loss = self.call(x, y).mean()
        self.spread.engine.backward(loss)
        self.spread.engine.step()
        return loss.detach() / turns

    def step(self, max_norm: float) -> Tensor:
        """The norm of the step that the last `backward` has taken."""
        return self.spread.norm()

    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        """As of Trainee; it is the engine that gathers the weights."""
        losses: Tensor = self.call(x, y)
        return losses

    def weights(self) -> Iterator[Tensor]:
        """As of Trainee."""
        return self.spread.weights()

    def parameters(self) -> int:
        """As of Trainee."""
        return self.spread.parameters()

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """As of Trainee."""
        self.spread.save(path, extra)

    def load(self, path: Path) -> dict[str, Any]:
        """As of Trainee."""
        return self.spread.load(path)


def build_under_deepspeed(config: PretrainConfig, shape: GPTConfig, device: torch.device) -> EngineTrainee:
    """Makes the model, its optimizer and the engine around them, on the default process group.

    Args:
        config: a whole run.
        shape: the model's shape.
        device: where this rank computes.

    Raises:
        UserError: a JSON that DeepSpeed or flashdist refuses.
    """
    plan = settled(config, dist.get_world_size())
    deepspeed = deepspeed_engine.prepare(device)
    if plan.stage == 3:
        with deepspeed.zero.Init(config_dict_or_path=plan.config, dtype=torch.bfloat16):  # no rank holds the whole
            module = GPT(shape)
        _fill(deepspeed, module, config.train.seed)
    else:
        with torch.device("meta"):
            module = GPT(shape)
        flashdist.cast_model(module)
        module.to_empty(device=device)
        init_weights(module, config.train.seed)
    if config.train.compile:
        module.compile_parts()
    optimizer = build_optimizer(module, config.optimizer, device.type == "cuda", plan.more)
    assert isinstance(optimizer, flashdist.FlashOptimizer)
    engine = deepspeed_engine.make_engine(deepspeed, module, optimizer, plan)
    spread = Spread(engine, plan.stage, device)
    return EngineTrainee(
        module, engine, optimizer, optimizer.clip_grad_norm_, lambda last: nullcontext(), False, spread
    )


@torch.no_grad()
def _fill(deepspeed: Any, module: GPT, seed: int) -> None:
    """As `init_weights`, of parameters in parts: rank 0's values are what all take."""
    for name, p in module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
            if dist.get_rank() == 0:
                p.copy_(first_weight(name, p.shape, module.config, seed))
