"""What a finetuning run is made of: the sections of its YAML file, their defaults and their checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ModelSection:
    """Where the model comes from.

    `source` is a Hugging Face folder, a GGUF file, or `random:CONFIG` for drawn weights, where CONFIG is a config.json
    or one of the shapes in finetune_model.py. Without `tokenizer` it is the one that lies beside the model.
    """

    source: str = ""
    tokenizer: Path | None = None
    dtype: Literal["bf16", "fp32"] = "bf16"
    activation_checkpointing: bool = True
    # `blocks` is chunked_loss.py; `liger` needs the liger-kernel package and a GPU.
    loss: Literal["blocks", "liger"] = "blocks"

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("source is missing: a Hugging Face folder, a GGUF file, or random:llama3.1-8b")


@dataclass(frozen=True)
class DataSection:
    """JSONL files, one record a line: `{"messages": [{"role": ..., "content": ...}]}` or `{"text": ...}`."""

    # null draws random tokens, for memory and speed with a random model.
    train: Path | None = None
    # Without a file one record in `validation_share` is held out; 0 holds out none.
    validation: Path | None = None
    validation_share: int = 20
    sequence: int = 2048

    def __post_init__(self) -> None:
        if self.sequence < 2 or self.validation_share < 0 or self.validation_share == 1:
            raise ValueError("sequence must be at least 2, validation_share 0 or at least 2")


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer. torch_adamw on fp32 weights (and bf16 autocast on a GPU) is there to compare with."""

    name: Literal["flash_adamw", "torch_adamw"] = "flash_adamw"
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    master_weight_bits: int = 24

    def __post_init__(self) -> None:
        if self.lr < 0 or self.master_weight_bits not in (24, 32):
            raise ValueError(
                f"lr must be >= 0 and master_weight_bits 24 or 32, got {self.lr}, {self.master_weight_bits}"
            )


@dataclass(frozen=True)
class TrainSection:
    """How long, how fast, and in which pieces."""

    # 0 means `epochs` passes over the data.
    steps: int = 0
    epochs: int = 1
    # Rows of data.sequence tokens in a step, in `accumulate` pieces.
    batch: int = 8
    accumulate: int = 1
    warmup: int = 10
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    # Largest gradient norm, 0 for none. With gradient_release the factor comes from the norm of the step before.
    clip: float = 1.0
    gradient_release: bool = True
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        if min(self.steps, self.warmup) < 0 or min(self.epochs, self.batch, self.accumulate) < 1 or self.clip < 0:
            raise ValueError("steps, warmup and clip must be >= 0, epochs, batch and accumulate >= 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be at least 0 and below 2^63, got {self.seed}")
        if self.batch % self.accumulate:
            raise ValueError(f"batch={self.batch} is no multiple of accumulate={self.accumulate}")
        if self.gradient_release and self.accumulate > 1:
            raise ValueError(
                f"accumulate={self.accumulate} cannot go with gradient_release: a parameter is stepped when its first "
                "gradient is complete. Take accumulate=1 (activations are what a larger batch costs), or "
                "gradient_release=false"
            )


@dataclass(frozen=True)
class ParallelSection:
    """One device, or DeepSpeed's ZeRO on any number of them."""

    strategy: Literal["single", "deepspeed"] = "single"
    # deepspeed: a JSON such as configs/deepspeed/zero2.json.
    deepspeed_config: Path | None = None
    # Minutes after which a rank that waits for others gives up.
    timeout_minutes: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout_minutes <= 1e6:  # NaN too
            raise ValueError(f"timeout_minutes must be above 0 and at most 1000000, got {self.timeout_minutes}")
        if self.deepspeed_config is not None and self.strategy != "deepspeed":
            raise ValueError("deepspeed_config is given, but strategy is single: take strategy deepspeed")


@dataclass(frozen=True)
class RunSection:
    """What a run writes."""

    folder: Path = Path("runs/finetune")
    # Steps between checkpoints and between evaluations; 0 means at the end only.
    save_every: int = 500
    keep_last: int = 1
    eval_every: int = 100
    # The Hugging Face folder written at the end, in `folder/export`; null writes none.
    export: Literal["bf16", "fp32"] | None = "bf16"

    def __post_init__(self) -> None:
        if min(self.save_every, self.eval_every) < 0 or self.keep_last < 1:
            raise ValueError("save_every and eval_every must be >= 0, keep_last >= 1")


@dataclass(frozen=True)
class FinetuneConfig:
    """All sections."""

    model: ModelSection
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    run: RunSection = field(default_factory=RunSection)

    def __post_init__(self) -> None:
        if self.optimizer.name == "torch_adamw" and self.train.gradient_release:
            raise ValueError("optimizer.name=torch_adamw has no gradient release: set train.gradient_release=false")
        if self.parallel.strategy == "deepspeed":
            self._check_deepspeed()
        if self.data.train is None and not self.model.source.startswith("random:"):
            raise ValueError("data.train is missing: a JSONL file (random tokens are for random models alone)")
        if self.data.train is None and not self.train.steps:
            raise ValueError("train.steps is missing: random tokens have no end")

    def _check_deepspeed(self) -> None:
        if self.train.gradient_release:
            raise ValueError(
                "parallel.strategy=deepspeed has no gradient release, DeepSpeed steps all parameters together: set "
                "train.gradient_release=false"
            )
        if self.model.dtype != "bf16":
            raise ValueError("parallel.strategy=deepspeed trains bf16 weights: set model.dtype=bf16")
