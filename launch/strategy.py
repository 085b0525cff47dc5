"""From a config to a model that is spread over the ranks, and its optimizer: the only place that knows the strategies.

| strategy  | weights     | states        | gradients                                        |
|-----------|-------------|---------------|--------------------------------------------------|
| single    | whole       | whole         | of one rank                                      |
| ddp       | whole       | whole         | averaged                                         |
| ddp_zero1 | whole       | 1/N of them   | averaged                                         |
| fsdp2     | 1/N of them | 1/N of them   | averaged, 1/N of them                            |
| hsdp      | 1/S of them | 1/S of them   | averaged, 1/S of them; S ranks share one copy    |
| deepspeed | as its JSON says: ZeRO 0 to 3 (deepspeed_engine.py)                            |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed_folder
import torch
import torch.distributed as dist
from config import UserError
from model import GPT, GPTConfig, init_weights, weight_decay_groups
from pretrain_config import OptimizerSection, ParallelSection, PretrainConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import flashdist
from flashdist import checkpoint
from flashdist.integrations.deepspeed_convert import load_zero_checkpoint
from flashdist.sharding.local_shard import local
from flashdist.sharding.replicated import shard_states

FLASH = {
    "flash_adamw": flashdist.FlashAdamW,
    "flash_adam": flashdist.FlashAdam,
    "flash_lion": flashdist.FlashLion,
    "flash_sgd": flashdist.FlashSGD,
    "flash_sgdw": flashdist.FlashSGDW,
}


@dataclass(frozen=True)
class Trainee:
    """What the training loop works with.

    Attributes:
        module: the model itself, whose parameters are trained and saved.
        call: what computes: the model, or what DDP has put around it.
        optimizer: of the module's parameters.
        clip: clips the global norm of the gradients, and returns the norm before.
        reducing: the context of a micro-batch's forward and backward; its argument says whether the gradients that
            have come together are averaged over ranks then.
        whole: whether each rank has all weights and states.
    """

    module: GPT
    call: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], Tensor]
    reducing: Callable[[bool], AbstractContextManager[Any]]
    whole: bool

    def backward(self, x: Tensor, y: Tensor, turns: int, last: bool) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            x, y: ids and the ids that follow, (B, T).
            turns: how many micro-batches a step has.
            last: whether this is the last one.

        Returns:
            Its share of the step's loss, detached.
        """
        with self.reducing(last):
            loss = self.call(x, y).mean() / turns
            loss.backward()
        return loss.detach()

    def start_step(self) -> None:
        """Before the first micro-batch."""
        self.optimizer.zero_grad()

    def step(self, max_norm: float) -> Tensor:
        """Clips and steps; the gradient norm before clipping."""
        norm = self.clip(max_norm)
        self.optimizer.step()
        return norm

    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        """Each sequence's mean loss (B,), without gradients."""
        losses: Tensor = self.module(x, y)
        return losses

    def end_evaluation(self) -> None:
        """After the last batch of an evaluation."""
        if isinstance(self.module, FSDPModule):
            # Without a backward pass the outermost parameters would stay gathered, and be what is saved next.
            self.module.reshard()

    def weights(self) -> Iterator[Tensor]:
        """What this rank holds of the parameters."""
        return (local(p) for p in self.module.parameters())

    def parameters(self) -> int:
        """How many there are on all ranks together."""
        return sum(p.numel() for p in self.module.parameters())  # a DTensor's are all of them

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        """Saves a checkpoint. Collective."""
        checkpoint.save(path, self.module, self.optimizer, extra=extra)

    def load(self, path: Path) -> dict[str, Any]:
        """Loads a checkpoint. Collective.

        Returns:
            The `extra` it was saved with.
        """
        if deepspeed_folder.holds(path):
            return self._load_zero(path)
        extra: dict[str, Any] = checkpoint.load(path, self.module, self.optimizer)
        return extra

    def _load_zero(self, path: Path) -> dict[str, Any]:
        """Loads what DeepSpeed saved into a model that is whole on each rank."""
        if not self.whole or not isinstance(self.optimizer, flashdist.FlashOptimizer):
            raise ValueError(
                "it was saved under ZeRO: go on with parallel.strategy=deepspeed, single or ddp, and one of "
                "flashdist's optimizers (what these save, every strategy loads)"
            )
        note = deepspeed_folder.check(path)
        load_zero_checkpoint(path / deepspeed_folder.TAG, self.module, self.optimizer)
        return note.extra


def check_ranks(parallel: ParallelSection, size: int) -> None:
    """Refuse a number of ranks that a strategy cannot work with.

    Raises:
        UserError: naming the strategy, the number and what would do.
    """
    if parallel.strategy == "single" and size > 1:
        raise UserError(f"parallel.strategy=single is for one process, {size} were started: take ddp or fsdp2")
    if parallel.strategy == "hsdp":
        shard = parallel.shard_ranks
        if size % shard or size < 2 * shard:
            raise UserError(
                f"parallel.strategy=hsdp with shard_ranks={shard} needs {2 * shard} ranks, or a larger multiple; "
                f"started: {size}. Start more, set parallel.shard_ranks, or take fsdp2"
            )


def build(config: PretrainConfig, shape: GPTConfig, device: torch.device) -> Trainee:
    """Makes the model with its first weights, spreads it over the default process group, and makes its optimizer.

    The first weights depend on `train.seed` alone. No rank ever holds the whole of a model that is sharded.

    Args:
        config: a whole run.
        shape: the model's shape; its `matmul_dtype` is chosen here.
        device: where this rank computes.
    """
    flash = config.optimizer.name in FLASH
    on_gpu = device.type == "cuda"
    # Products run in BF16 on a GPU and in fp32 on a CPU, whichever the weights are.
    shape = replace(shape, matmul_dtype=torch.bfloat16 if on_gpu else torch.float32)
    strategy = config.parallel.strategy
    if strategy == "deepspeed":
        from deepspeed_strategy import build_under_deepspeed

        return build_under_deepspeed(config, shape, device)
    with torch.device("meta"):
        module = GPT(shape)
    if flash:
        flashdist.cast_model(module)
    if config.train.compile:
        module.compile_parts()
    if strategy in ("fsdp2", "hsdp"):
        _shard(module, config.parallel, device, gather_bf16=on_gpu and not flash)
    module.to_empty(device=device)
    init_weights(module, config.train.seed)

    call: nn.Module = module
    if strategy.startswith("ddp"):
        call = DistributedDataParallel(
            module, device_ids=[device] if on_gpu else None, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    optimizer = build_optimizer(module, config.optimizer, on_gpu)
    if strategy == "ddp_zero1" and isinstance(optimizer, flashdist.FlashOptimizer):
        shard_states(optimizer)
    reducing = _reducing_of(module, call, config.parallel)
    return Trainee(module, call, optimizer, _clip_of(optimizer), reducing, whole=strategy in ("single", "ddp"))


def _shard(module: GPT, parallel: ParallelSection, device: torch.device, gather_bf16: bool) -> None:
    size = dist.get_world_size()
    if parallel.strategy == "hsdp":
        copies = size // parallel.shard_ranks
        mesh = init_device_mesh(device.type, (copies, parallel.shard_ranks), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh(device.type, (size,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if gather_bf16 else None,
        reduce_dtype=torch.float32 if parallel.reduce_dtype == "fp32" else torch.bfloat16,
        cast_forward_inputs=False,  # the stream between blocks stays fp32
    )
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def build_optimizer(
    module: nn.Module, section: OptimizerSection, on_gpu: bool, more: dict[str, Any] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a config, over param groups in which matrices decay and vectors do not.

    Args:
        module: the model.
        section: the config's.
        on_gpu: whether torch's own may be the fused one.
        more: further arguments of a flashdist optimizer.

    Raises:
        UserError: an argument that it refuses.
    """
    groups = weight_decay_groups(module, section.weight_decay)
    settings = optimizer_settings(section)
    try:
        if section.name in FLASH:
            return FLASH[section.name](groups, **settings, **(more or {}))
        return torch.optim.AdamW(groups, fused=True if on_gpu else None, **settings)
    except (ValueError, TypeError) as error:
        raise UserError(f"optimizer: {error}") from error


def optimizer_settings(section: OptimizerSection) -> dict[str, Any]:
    """The arguments of the optimizer's constructor that a config gives, but for weight decay."""
    settings: dict[str, Any] = {"lr": section.lr}
    if section.name in ("flash_sgd", "flash_sgdw"):
        settings["momentum"] = section.momentum
    else:
        if section.betas is not None:
            settings["betas"] = section.betas
        if section.name != "flash_lion":
            settings["eps"] = section.eps
    if section.name in FLASH:
        settings |= {"master_weight_bits": section.master_weight_bits, "quantize": section.quantize}
    return settings


def _clip_of(optimizer: torch.optim.Optimizer) -> Callable[[float], Tensor]:
    if isinstance(optimizer, flashdist.FlashOptimizer):
        return optimizer.clip_grad_norm_

    def clip(max_norm: float) -> Tensor:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    return clip


def _reducing_of(
    module: nn.Module, call: nn.Module, parallel: ParallelSection
) -> Callable[[bool], AbstractContextManager[Any]]:
    def reducing(last: bool) -> AbstractContextManager[Any]:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last or parallel.reduce_every_micro_batch)
        elif isinstance(call, DistributedDataParallel) and not last:
            return call.no_sync()
        return nullcontext()

    return reducing
