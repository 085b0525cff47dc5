"""A Llama-shaped model with its optimizer under any strategy: what benchmarks.sharded_speed measures.

Arms: ``flash`` is FlashAdamW on bf16 weights; ``torch`` is torch's fused AdamW on fp32 weights, computed in bf16, and
under DeepSpeed its own AdamW ("FusedAdam" on a GPU).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.llama import LLAMA_3_1_8B, TINY, Llama, Shape
from flashdist import FlashAdamW
from flashdist.sharding.local_shard import local
from flashdist.sharding.replicated import shard_states

SHAPES = {
    "tiny": TINY,
    "llama1b": Shape(vocab=128256, width=2048, mlp=8192, layers=16, heads=32, kv_heads=8),
    "llama8b": LLAMA_3_1_8B,
}
STRATEGIES = ("fsdp2", "hsdp", "ddp_zero1", "deepspeed1", "deepspeed2", "deepspeed3")
ARMS = ("flash", "torch")
LEARNING_RATE = 1e-4
MAX_NORM = 1.0


class Sharded:
    """A model, its optimizer, and how they make a step."""

    def __init__(self, shape: str, strategy: str, arm: str, device: torch.device, micro_batch: int) -> None:
        self.device, self.strategy, self.arm = device, strategy, arm
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.engine: Any = None
        dtype = torch.bfloat16 if arm == "flash" or strategy.startswith("deepspeed") else torch.float32
        with torch.device("meta"):
            self.plain = Llama(SHAPES[shape]).to(dtype)
        self.model: nn.Module = self.plain
        self.vocab = SHAPES[shape].vocab
        self.numel = sum(p.numel() for p in self.plain.parameters())
        if strategy in ("fsdp2", "hsdp"):
            self._fully_shard()
        self._draw_weights()
        if strategy == "ddp_zero1":
            ids = [device.index] if device.type == "cuda" else None
            self.model = nn.parallel.DistributedDataParallel(self.plain, ids, gradient_as_bucket_view=True)
        if strategy.startswith("deepspeed"):
            self._deepspeed(int(strategy[-1]), micro_batch)
        else:
            self.optimizer = self._optimizer()

    def _fully_shard(self) -> None:
        if self.strategy == "hsdp":
            mesh = init_device_mesh(self.device.type, (2, self.ranks // 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh(self.device.type, (self.ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.plain.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.plain, mesh=mesh, mp_policy=policy)

    def _draw_weights(self) -> None:
        self.plain.to_empty(device=self.device)
        torch.manual_seed(self.rank if self.strategy in ("fsdp2", "hsdp") else 0)
        if self.strategy == "hsdp":  # replicas must agree
            torch.manual_seed(self.rank % (self.ranks // 2))
        with torch.no_grad():
            for p in self.plain.parameters():
                part = local(p)
                part.fill_(1) if p.dim() == 1 else part.normal_(std=0.02)

    def _optimizer(self) -> Any:
        parameters = self.plain.parameters()
        if self.arm == "torch":
            return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1, fused=True)
        opt = FlashAdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1)
        if self.strategy == "ddp_zero1":
            shard_states(opt)
        return opt

    def _deepspeed(self, stage: int, micro_batch: int) -> None:
        import deepspeed

        name = "FlashAdamW" if self.arm == "flash" else "AdamW"
        config = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "bf16": {"enabled": True},
            "gradient_clipping": MAX_NORM,
            "optimizer": {"type": name, "params": {"lr": LEARNING_RATE, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage},
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine, self.optimizer, *_ = deepspeed.initialize(
                model=self.plain, model_parameters=list(self.plain.parameters()), config=config
            )

    def tokens(self, batch: int, length: int, step: int) -> Tensor:
        """int64 (B, T + 1), other ones on every rank and in every step."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randint(self.vocab, (batch, length + 1), generator=generator).to(self.device)

    def backward(self, tokens: Tensor) -> Tensor:
        """Forward and backward; returns the loss."""
        mixed = self.arm == "torch" and self.strategy == "ddp_zero1"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            loss: Tensor = (self.engine or self.model)(tokens)
        self.engine.backward(loss) if self.engine else loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Clipping and the optimizer's step, whatever the strategy adds to them, and the end of the gradients."""
        if self.engine:
            self.engine.step()
            return
        if self.arm == "flash":
            self.optimizer.clip_grad_norm_(MAX_NORM)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held_bytes(self) -> dict[str, float] | None:
        """Bytes on this rank, by kind, per parameter of the whole model: storages of weights and of states.

        None under DeepSpeed, which keeps them in buffers of its own (tests/integrations measure those).
        """
        if self.engine:
            return None
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        return {"weights": self._per_parameter(list(self.plain.parameters())), "states": self._per_parameter(states)}

    def _per_parameter(self, tensors: list[Any]) -> float:
        storages = {local(t).untyped_storage().data_ptr(): local(t).untyped_storage().nbytes() for t in tensors}
        return sum(storages.values()) / self.numel

    def local_numel(self) -> int:
        """Elements that this rank steps."""
        if self.strategy == "ddp_zero1" and self.arm == "flash":
            return sum(local(state["exp_avg"]).numel() for state in self.optimizer.state.values())
        return sum(local(p).numel() for p in self.plain.parameters())
