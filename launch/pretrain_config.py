"""What a pretraining run is made of: the sections of its YAML file, their defaults and their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from model import GPTConfig

Strategy = Literal["single", "ddp", "ddp_zero1", "fsdp2", "hsdp", "deepspeed"]
OptimizerName = Literal["flash_adamw", "flash_adam", "flash_lion", "flash_sgd", "flash_sgdw", "torch_adamw"]


@dataclass(frozen=True)
class ModelSection:
    """The model's shape. Zeros mean: derived (`vocab_size` from the tokenizer, the others from `width`, `heads`)."""

    kind: Literal["gpt2", "llama"] = "gpt2"
    layers: int = 12
    heads: int = 12
    kv_heads: int = 0
    width: int = 768
    mlp_width: int = 0
    context: int = 1024
    vocab_size: int = 0
    rope_base: float = 500000.0
    tied_head: bool = True
    fp32_residual: bool = True
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        _at_least(1, layers=self.layers, heads=self.heads, width=self.width, context=self.context)
        _at_least(0, kv_heads=self.kv_heads, mlp_width=self.mlp_width, vocab_size=self.vocab_size)
        self.shape(vocab_size=self.vocab_size or 256)  # checks what the numbers are to each other

    def shape(self, vocab_size: int) -> GPTConfig:
        """What model.py takes, for a vocabulary of `vocab_size`."""
        return GPTConfig(
            vocab_size=vocab_size,
            context=self.context,
            layers=self.layers,
            heads=self.heads,
            width=self.width,
            kind=self.kind,
            kv_heads=self.kv_heads or self.heads,
            mlp_width=self.mlp_width or None,
            rope_base=self.rope_base,
            tied_head=self.tied_head,
            fp32_residual=self.fp32_residual,
            activation_checkpointing=self.activation_checkpointing,
        )


@dataclass(frozen=True)
class DataSection:
    """Where the text comes from and how it becomes tokens."""

    # A folder of text files, searched with all its subfolders; null takes the text that comes with Python.
    folder: Path | None = None
    pattern: str = "*"
    # `bytes` (256 tokens), `bpe` (trained once on this text), or the path of a tokenizer.json.
    tokenizer: str = "bpe"
    vocab_size: int = 16384
    # One document in this many is held out for evaluation, chosen by its name alone.
    validation_share: int = 20
    cache: Path = field(default_factory=lambda: Path("~/.cache/flashdist/tokens").expanduser())

    def __post_init__(self) -> None:
        _at_least(257, vocab_size=self.vocab_size)
        _at_least(2, validation_share=self.validation_share)


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer by name, and what it is built with. `betas` are left to its own default where null."""

    name: OptimizerName = "flash_adamw"
    lr: float = 6e-4
    betas: tuple[float, float] | None = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    master_weight_bits: Literal[24, 32] | None = 24
    quantize: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be above 0, got {self.lr}")


@dataclass(frozen=True)
class TrainSection:
    """Steps, batch and learning rate over time."""

    steps: int = 1000
    # Sequences of one optimizer step over all ranks, and of one forward pass on one rank; what is between is reached
    # by gradient accumulation.
    batch: int = 512
    micro_batch: int = 8
    warmup: int = 100
    # The learning rate ends at this share of its peak, after half a cosine.
    final_lr: float = 0.1
    max_norm: float = 1.0
    seed: int = 0
    compile: bool = False
    # Deterministic kernels on a GPU as well, where they are slower; on a CPU a run is deterministic anyway.
    deterministic: bool = False

    def __post_init__(self) -> None:
        _at_least(1, steps=self.steps, batch=self.batch, micro_batch=self.micro_batch)
        _at_least(0, warmup=self.warmup, seed=self.seed)
        if self.batch > 2**24:  # its sample ids are listed for each step
            raise ValueError(f"batch must be at most {2**24} sequences, got {self.batch}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63, got {self.seed}")
        if not 0 <= self.final_lr <= 1:
            raise ValueError(f"final_lr is a share between 0 and 1, got {self.final_lr}")
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be above 0, got {self.max_norm}; .inf switches clipping off")


@dataclass(frozen=True)
class ParallelSection:
    """How the work is spread over ranks."""

    strategy: Strategy = "fsdp2"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # deepspeed: a JSON such as configs/deepspeed/zero2.json.
    deepspeed_config: Path | None = None
    # hsdp: how many ranks share one copy of the model.
    shard_ranks: int = 0
    # Gradients of fsdp2 and hsdp are averaged over ranks in this dtype (and come out in that of the weights).
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    # fsdp2, hsdp: reduce after each micro-batch instead of keeping whole gradients until the last one: less memory,
    # more traffic, and sums in the dtype of the weights.
    reduce_every_micro_batch: bool = False
    # Threads of each rank on a CPU; 0: the cores over the ranks of this machine.
    threads: int = 0
    # Minutes after which a rank that waits for others gives up.
    timeout_minutes: float = 30.0

    def __post_init__(self) -> None:
        _at_least(0, shard_ranks=self.shard_ranks, threads=self.threads)
        if not 0 < self.timeout_minutes <= 1e6:  # NaN too
            raise ValueError(f"timeout_minutes must be above 0 and at most 1000000, got {self.timeout_minutes}")
        if self.strategy == "hsdp" and self.shard_ranks < 1:
            raise ValueError("strategy hsdp needs shard_ranks: how many ranks share one copy of the model")
        if self.deepspeed_config is not None and self.strategy != "deepspeed":
            raise ValueError(
                f"deepspeed_config is given, but strategy is {self.strategy}: take strategy deepspeed, or leave it null"
            )


@dataclass(frozen=True)
class RunSection:
    """Where a run writes, and how often."""

    folder: Path = Path("runs/pretrain")
    save_every: int = 500  # steps; 0 saves at the end only
    keep_last: int = 2
    log_every: int = 1
    eval_every: int = 250  # steps; 0 evaluates at the end only
    eval_sequences: int = 256
    # Ends after this step as if SIGTERM had come; the learning rate still follows train.steps. 0: does not.
    stop_after: int = 0

    def __post_init__(self) -> None:
        _at_least(1, keep_last=self.keep_last, log_every=self.log_every)
        _at_least(0, save_every=self.save_every, eval_every=self.eval_every, eval_sequences=self.eval_sequences)
        _at_least(0, stop_after=self.stop_after)


@dataclass(frozen=True)
class PretrainConfig:
    """A whole run."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        flash = self.optimizer.name.startswith("flash_")
        if self.parallel.strategy == "ddp_zero1" and not flash:
            raise ValueError(
                f"parallel.strategy ddp_zero1 shards the states of flashdist's optimizers only, "
                f"not of {self.optimizer.name}: take ddp or fsdp2"
            )

    def learning_rate(self, step: int) -> float:
        """The rate of the step after `step` finished ones: a linear warm-up, then half a cosine."""
        peak, warmup, steps = self.optimizer.lr, self.train.warmup, self.train.steps
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        low = self.train.final_lr
        return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
