"""A model under DeepSpeed: `parallel.strategy=deepspeed`, whichever launcher has started the ranks.

| ZeRO | weights     | states      | gradients              | checkpoints                            |
|------|-------------|-------------|------------------------|----------------------------------------|
| 0    | whole       | whole       | averaged               | flashdist's, as of every other strategy |
| 1    | whole       | 1/N of them | averaged               | DeepSpeed's, by deepspeed_folder.py    |
| 2    | whole       | 1/N of them | averaged, 1/N of them  | the same                               |
| 3    | 1/N of them | 1/N of them | averaged, 1/N of them  | the same                               |
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed_folder
import torch
import torch.distributed as dist
from config import UserError
from deepspeed_settings import Settled
from torch import Tensor, nn

from flashdist import FlashOptimizer, checkpoint
from flashdist.integrations.deepspeed_convert import load_flashdist_checkpoint

# What is raised for a configuration that cannot be, by DeepSpeed, pydantic and flashdist.
MISTAKES = (ValueError, TypeError, KeyError, AssertionError, NotImplementedError)


def prepare(device: torch.device) -> Any:
    """DeepSpeed, on the process group that is there.

    Raises:
        UserError: it is not installed.
    """
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # Under mpirun, and alone, nobody has set what DeepSpeed reads.
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"parallel.strategy=deepspeed: deepspeed cannot be imported ({error}): pip install 'flashdist[deepspeed]'"
        ) from error
    deepspeed.utils.logger.setLevel("WARNING")
    if device.type == "cpu":
        # DeepSpeed would compile an extension for sums in shared memory; gloo's are what the tests have compared.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)
    return deepspeed


def make_engine(deepspeed: Any, module: nn.Module, optimizer: FlashOptimizer, settled: Settled) -> Any:
    """The engine.

    Raises:
        UserError: a JSON that DeepSpeed or flashdist refuses.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch|deepspeed")
            return deepspeed.initialize(model=module, optimizer=optimizer, config=settled.config)[0]
    except (*MISTAKES, deepspeed.DeepSpeedConfigError) as error:
        raise UserError(f"{settled.where}: {' '.join(str(error).split())}") from error


class Spread:
    """An engine, and what a launcher asks of it besides forward passes.

    Args:
        engine: of `make_engine`.
        stage: of ZeRO.
        device: where this rank computes.
    """

    def __init__(self, engine: Any, stage: int, device: torch.device) -> None:
        self.engine, self.stage, self.device = engine, stage, device

    @property
    def optimizer(self) -> FlashOptimizer:
        """Whose param groups have the learning rate."""
        found: FlashOptimizer = self.engine.basic_optimizer
        return found

    def norm(self) -> Tensor:
        """The last step's gradient norm before clipping."""
        return torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)

    def weights(self) -> Iterator[Tensor]:
        """What this rank holds of the parameters."""
        return map(_held, self.engine.module.parameters())

    def parameters(self) -> int:
        """How many there are on all ranks together."""
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters())

    @torch.no_grad()
    def whole_weights(self, master: bool) -> dict[str, Tensor]:
        """All parameters by name on rank 0's CPU, gathered one at a time; nothing on other ranks. Collective.

        Args:
            master: fp32 master weights instead of the bf16 weights.
        """
        import deepspeed

        found = {}
        for name, p in self.engine.module.named_parameters():
            if master and p.requires_grad and self.stage:
                value = deepspeed.utils.safe_get_full_fp32_param(p)
            elif master and p.requires_grad:
                value = self.optimizer.master_weight(p)
            else:
                with deepspeed.zero.GatheredParameters([p]):
                    value = p.detach().clone()
            if dist.get_rank() == 0:
                found[name] = value.to("cpu")
        return found

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Saves a checkpoint. Collective."""
        if not self.stage:
            checkpoint.save(path, self.engine.module, self.optimizer, extra=extra)
            return

        def save(folder: Path) -> None:
            self.engine.save_checkpoint(str(folder), tag=deepspeed_folder.TAG)

        deepspeed_folder.write(path, deepspeed_folder.Note(self.stage, extra), save)

    def load(self, path: Path) -> dict[str, Any]:
        """Loads a checkpoint of the same stage and any number of ranks, or one of flashdist's. Collective.

        Returns:
            The `extra` it was saved with.

        Raises:
            UserError: a damaged file, or another stage.
            ValueError, CheckpointError: of another model or optimizer.
        """
        if deepspeed_folder.holds(path):
            return self._load_zero(path)
        if self.stage:
            extra: dict[str, Any] = load_flashdist_checkpoint(self.engine, path)
        else:
            extra = checkpoint.load(path, self.engine.module, self.optimizer)
        return extra

    def _load_zero(self, path: Path) -> dict[str, Any]:
        note = deepspeed_folder.check(path)
        if note.stage != self.stage:
            raise UserError(
                f"cannot resume from {path}: it was saved at ZeRO stage {note.stage}, the JSON says {self.stage}: take "
                "the first JSON, or go on by parallel.strategy=single (or ddp) to a checkpoint that every stage loads"
            )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", module="torch|deepspeed")
                found, _ = self.engine.load_checkpoint(
                    str(path), tag=deepspeed_folder.TAG, load_lr_scheduler_states=False
                )
        except (RuntimeError, KeyError, AssertionError) as error:
            text = " ".join(str(error).split())[:300]
            raise ValueError(f"it is of another model or optimizer: {text}") from error
        if found is None:
            raise ValueError("DeepSpeed found no model file in it")
        return note.extra


def _held(p: Any) -> Tensor:
    if not hasattr(p, "ds_tensor"):
        whole: Tensor = p
        return whole
    part: Tensor = p.ds_tensor
    # What fills up the last ranks' parts has never been written.
    here = min(max(p.ds_numel - dist.get_rank() * part.numel(), 0), part.numel())
    return part[:here]
