"""How much memory training takes, on each rank: exact for weights and states, estimated for activations.

Bytes of weights, corrections, moments and scales follow from the shapes as the optimizer itself lays them out. The peak
is the larger of two moments: the begin of the backward pass, where all saved activations and the loss are alive, and
its end, where all gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flashdist.memory import state_kind
from flashdist.model_shapes import ModelShape
from flashdist.numerics import rules
from flashdist.numerics.groups import group_layout
from flashdist.numerics.state_format import state_format

GIB = 1 << 30
RULES = {"adamw": rules.ADAMW, "adam": rules.ADAM, "lion": rules.LION, "sgd": rules.SGD}
STRATEGIES = ("single", "fsdp2", "hsdp", "ddp", "ddp_zero1", "zero1", "zero2", "zero3")
# Gradients that gradient release gathers before it steps small parameters together.
RELEASE_BATCH = 64 << 20
# The CUDA context, library workspaces and what the allocator cannot use.
RESERVE = 0.05
# Logits that are alive at a time where the loss is computed in chunks.
CHUNKED_LOGITS = 256 << 20


@dataclass(frozen=True)
class Setting:
    """How a model is to be trained.

    Attributes:
        gpus: number of ranks.
        gpu_memory: of each, in GB as cards are named, which is close to GiB.
        strategy: one of STRATEGIES.
        optimizer: one of RULES.
        micro_batch, seq: sequences a rank takes at a time, and their length.
        checkpointing: layers are recomputed in the backward pass.
        chunked_loss: logits never exist as a whole.
        release: gradient release.
        node: for hsdp, the ranks that share the states.
    """

    gpus: int = 1
    gpu_memory: float = 80.0
    strategy: str = "single"
    optimizer: str = "adamw"
    micro_batch: int = 1
    seq: int = 4096
    checkpointing: bool = True
    chunked_loss: bool = True
    release: bool = False
    node: int = 8

    def check(self) -> None:
        """Raise ValueError for what cannot be, naming the value and the remedy."""
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if self.optimizer not in RULES:
            raise ValueError(f"optimizer must be one of {', '.join(RULES)}, got {self.optimizer!r}")
        for name in ("gpus", "micro_batch", "seq", "node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.gpu_memory > 0:
            raise ValueError(f"gpu_memory must be above 0 GB, got {self.gpu_memory}")
        if self.strategy == "single" and self.gpus > 1:
            raise ValueError(f"strategy single uses one GPU, got gpus={self.gpus}: take fsdp2 or ddp_zero1")
        if self.release and self.strategy not in ("single", "fsdp2", "hsdp"):
            raise ValueError(f"gradient release does not work with {self.strategy}: take single, fsdp2 or hsdp")


@dataclass(frozen=True)
class Plan:
    """Bytes on one rank.

    Attributes:
        weights, corrections, moments, scales, steps: what is there between two steps.
        gradients: largest amount alive at a time.
        gathered: weights and gradients of the layers that a sharded model has whole for a moment.
        activations: saved for the backward pass, and one layer's recomputation.
        logits: of the loss.
        peak: the most that is alive at a time.
        limit: what a rank may use.
    """

    weights: int
    corrections: int
    moments: int
    scales: int
    steps: int
    gradients: int
    gathered: int
    activations: int
    logits: int
    peak: int
    limit: int

    @property
    def steady(self) -> int:
        """Between two steps."""
        return self.weights + self.corrections + self.moments + self.scales + self.steps

    @property
    def fits(self) -> bool:
        """Whether the peak stays below the limit."""
        return self.peak <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """The fields, ``steady`` and ``fits``."""
        return {**asdict(self), "steady": self.steady, "fits": self.fits}


def weight_shards(setting: Setting) -> int:
    """Among how many ranks weights are shared."""
    if setting.strategy in ("fsdp2", "zero3"):
        return setting.gpus
    return min(setting.node, setting.gpus) if setting.strategy == "hsdp" else 1


def gradient_bytes(model: ModelShape, setting: Setting) -> int:
    """The most gradients that a rank has at a time."""
    whole, shards = 2 * model.parameters, weight_shards(setting)
    if setting.release:
        return min(whole // shards, (2 * model.largest + RELEASE_BATCH) // shards)
    if setting.strategy == "zero1":  # the optimizer's own partition is beside the model's gradients
        return whole + whole // setting.gpus
    return whole // (setting.gpus if setting.strategy == "zero2" else shards)


def state_bytes(model: ModelShape, optimizer: str) -> dict[str, int]:
    """Bytes of the whole model's weights and states by kind, in the formats that the optimizer would choose."""
    found = {"weights": 0, "corrections": 0, "moments": 0, "scales": 0, "steps": 0}
    counts: dict[tuple[int, ...], int] = {}
    for shape in model.shapes:
        counts[shape] = counts.get(shape, 0) + 1
    for shape, count in counts.items():
        found["weights"] += 2 * math.prod(shape) * count
        for entry in state_format(RULES[optimizer], group_layout(shape), torch.bfloat16, 24, True):
            found[state_kind(entry.key)] += math.prod(entry.shape) * entry.dtype.itemsize * count
    return found


def plan(model: ModelShape, setting: Setting) -> Plan:
    """The memory of a rank.

    Raises:
        ValueError: a setting that cannot be.
    """
    setting.check()
    shards = weight_shards(setting)
    states = setting.gpus if setting.strategy in ("ddp_zero1", "zero1", "zero2") else shards
    whole = state_bytes(model, setting.optimizer)
    kinds = {kind: math.ceil(size / (shards if kind == "weights" else states)) for kind, size in whole.items()}
    gradients = gradient_bytes(model, setting)
    # Two layers are whole at a time (one computes, the next is on its way), and one layer's gradients.
    whole_layer = model.layer_parameters or model.parameters // 32
    gathered = 0 if shards == 1 else 2 * (2 * max(whole_layer, 0) + max(whole_layer, model.largest))
    saved, layer = activations(model, setting)
    logits = loss_bytes(model, setting)
    steady = sum(kinds.values())
    begin = steady + gathered + saved + max(layer, logits)
    end = steady + gathered + layer + gradients
    if setting.release:
        begin = end = steady + gathered + saved + max(layer, logits) + gradients
    return Plan(
        **kinds,
        gradients=gradients,
        gathered=gathered,
        activations=saved + layer,
        logits=logits,
        peak=max(begin, end),
        limit=int(setting.gpu_memory * GIB * (1 - RESERVE)),
    )


def activations(model: ModelShape, setting: Setting) -> tuple[int, int]:
    """Bytes saved for the whole backward pass, and of one layer in the making; 0 for a bare number of parameters.

    A layer with attention that does not keep its scores saves, in 16 bits: the inputs of both norms and their results,
    queries, keys, values and the attention's result, and four tensors of the feed-forward's width.
    """
    tokens = setting.micro_batch * setting.seq
    layer = 2 * tokens * (6 * model.width + 2 * model.kv_width + 4 * model.mlp_width)
    boundary = 2 * tokens * model.width
    if setting.checkpointing:
        return model.layers * boundary, 2 * layer
    return model.layers * layer, layer


def loss_bytes(model: ModelShape, setting: Setting) -> int:
    """Logits in 16 bits, in fp32, and their gradient; in chunks at most a block of them."""
    whole = setting.micro_batch * setting.seq * model.vocabulary * (2 + 4 + 4)
    return min(whole, CHUNKED_LOGITS) if setting.chunked_loss else whole


def remedies(model: ModelShape, setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Changes that save memory, the least painful first, each on top of those before it."""
    now = setting
    if not now.chunked_loss:
        now = replace(now, chunked_loss=True)
        yield "a loss in chunks", now
    if not now.checkpointing:
        now = replace(now, checkpointing=True)
        yield "activation checkpointing", now
    if not now.release and now.strategy in ("single", "fsdp2", "hsdp"):
        now = replace(now, release=True)
        yield "gradient release", now
    if now.gpus > 1 and now.strategy not in ("fsdp2", "zero3"):
        now = replace(now, strategy="fsdp2")
        yield "strategy fsdp2", now
    while now.micro_batch > 1:
        now = replace(now, micro_batch=now.micro_batch // 2)
        yield f"micro batch {now.micro_batch}", now
    for gpus in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if gpus > now.gpus:
            strategy = now.strategy if now.strategy in ("fsdp2", "zero3") else "fsdp2"
            yield f"{gpus} GPUs with {strategy}", replace(now, gpus=gpus, strategy=strategy)


def smallest_change(model: ModelShape, setting: Setting) -> tuple[list[str], Setting] | None:
    """What makes a plan fit: one change if one is enough, else as many as it takes; None if nothing does."""
    steps = list(remedies(model, setting))
    for name, _ in steps:
        alone = next((s for n, s in remedies_alone(model, setting) if n == name), None)
        if alone is not None and plan(model, alone).fits:
            return [name], alone
    for i, (_, changed) in enumerate(steps):
        if plan(model, changed).fits:
            # Of several numbers of GPUs only the last one counts.
            named = [n for n, _ in steps[: i + 1] if "GPUs" not in n] + [n for n, _ in steps[i : i + 1] if "GPUs" in n]
            return named, changed
    return None


def remedies_alone(model: ModelShape, setting: Setting) -> Iterator[tuple[str, Setting]]:
    """The same changes, each by itself."""
    yield "a loss in chunks", replace(setting, chunked_loss=True)
    yield "activation checkpointing", replace(setting, checkpointing=True)
    if setting.strategy in ("single", "fsdp2", "hsdp"):
        yield "gradient release", replace(setting, release=True)
    if setting.gpus > 1:
        yield "strategy fsdp2", replace(setting, strategy="fsdp2")


# Bytes per parameter of weights, gradients and optimizer states elsewhere, and where the figure comes from.
PEERS = {
    "torch AdamW, fp32": (4.0, 4.0, 8.0),
    "torch AdamW, pure bf16": (2.0, 2.0, 4.0),
    "flashoptim AdamW, 24 bits": (2.0, 2.0, 3.125),
    "bitsandbytes AdamW 8-bit, bf16 weights": (2.0, 2.0, 2.03125),
}


def peers(model: ModelShape, setting: Setting) -> dict[str, Plan]:
    """The same training with other optimizers; their states are sharded as ours are."""
    own = plan(model, replace(setting, release=False))
    steady, found = own.steady, {}
    for name, (weight, gradient, state) in PEERS.items():
        scale = model.parameters * 1.0
        shards = own.weights / (2 * scale)
        states = (own.corrections + own.moments + own.scales) / (sum(_state_only(model, setting)) or 1)
        weights, moments = int(weight * scale * shards), int(state * scale * states)
        gradients = int(own.gradients * gradient / 2)
        peak = max(
            weights + moments + own.gathered + own.activations + own.logits,
            weights + moments + own.gathered + gradients + (own.peak - steady - own.gathered - own.gradients),
        )
        found[name] = replace(
            own, weights=weights, corrections=0, moments=moments, scales=0, steps=0, gradients=gradients, peak=peak
        )
    return found


def _state_only(model: ModelShape, setting: Setting) -> list[int]:
    kinds = state_bytes(model, setting.optimizer)
    return [kinds["corrections"], kinds["moments"], kinds["scales"]]


def report(model: ModelShape, setting: Setting, compare: bool) -> dict[str, Any]:
    """What ``flashdist plan --json`` prints: model, setting, plan, what would make it fit, and other optimizers."""
    made = plan(model, setting)
    change = None if made.fits else smallest_change(model, setting)
    return {
        "model": {"name": model.name, "parameters": model.parameters},
        "setting": asdict(setting),
        "plan": made.as_dict(),
        "smallest_change": None if change is None else {"changes": change[0], "setting": asdict(change[1])},
        "compare": {name: p.as_dict() for name, p in peers(model, setting).items()} if compare else None,
    }
