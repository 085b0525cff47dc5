"""The pretraining experiment's model, data and common start: a GPT-2 trained by fp32 AdamW up to the branching point.

The start is made anew on each machine: 1.6 GB of weights and moments need not travel. It depends on the config and the
corpus alone, but for the order in which a GPU's attention sums its gradients, so runs are paired within one start only.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.arms import BETA1, EPS, Start, groups_of
from benchmarks.quality.corpus import Corpus
from launch.model import GPT, GPTConfig, init_weights


@dataclass(frozen=True)
class Config:
    """The experiment; see the JSON files in configs/.

    Attributes:
        layers, heads, width, context, vocab_size: the model.
        matmul_dtype: what matrix products are computed in, in every arm.
        batch: sequences in a step.
        lr, warmup, start_steps: the start rises to `lr` and stays there; a branch falls from `lr` to 0, linearly.
        branch_steps: steps of a branch.
        max_norm: the global gradient norm is clipped to it.
        start_beta2: of the start's AdamW. The variances for the other values are accumulated beside it.
        eval_sequences: held-out sequences of `context` tokens that decide the validation loss.
        plan: runs in order of importance: {"arms": [...], "beta2": [...], "seeds": [...]}, seeds outermost.
        track: in the run of `adamw` with this seed all schemes' moments are followed on its gradients (numerics.py).
    """

    layers: int
    heads: int
    width: int
    context: int
    vocab_size: int
    matmul_dtype: str
    batch: int
    lr: float
    warmup: int
    start_steps: int
    branch_steps: int
    max_norm: float
    start_beta2: float
    eval_sequences: int
    plan: list[dict[str, Any]] = field(default_factory=list)
    track: int | None = None

    def runs(self) -> Iterator[tuple[str, float, int]]:
        """Arm, beta2 and seed of every run, the most important first."""
        for part in self.plan:
            for seed in part["seeds"]:
                for beta2 in part["beta2"]:
                    for arm in part["arms"]:
                        yield arm, beta2, seed

    def betas(self) -> list[float]:
        """Every beta2 that a run needs, the start's own first."""
        return list(dict.fromkeys([self.start_beta2, *(beta2 for _, beta2, _ in self.runs())]))

    def start_key(self) -> str:
        """What the start depends on."""
        entries = {k: v for k, v in asdict(self).items() if k not in ("plan", "track", "branch_steps")}
        return repr([sorted(entries.items()), sorted(self.betas())])


class Data:
    """Both parts of the corpus on the device, and batches cut from them."""

    def __init__(self, corpus: Corpus, config: Config, device: str) -> None:
        self.train = torch.from_numpy(corpus.train.astype("int32")).to(device)
        self.val = torch.from_numpy(corpus.val.astype("int32")).to(device)
        self.batch, self.context, self.device = config.batch, config.context, device
        if len(self.val) <= config.eval_sequences * config.context:
            raise ValueError(
                f"{config.eval_sequences} sequences of {config.context} need more than {len(self.val)} tokens"
            )

    def _cut(self, part: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = part[starts[:, None] + torch.arange(self.context + 1, device=self.device)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def batches(self, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Training batches at random places, the same for one seed."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.train) - self.context, (steps, self.batch), generator=generator).to(self.device)
        for row in starts:
            yield self._cut(self.train, row)

    def held_out(self, sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The validation sequences, one behind the other."""
        for first in range(0, sequences, self.batch):
            yield self._cut(self.val, torch.arange(first, first + self.batch, device=self.device) * self.context)


class Models:
    """One model for each weight dtype, which all runs share: what torch.compile made of it is made once."""

    def __init__(self, config: Config, device: str, compiled: bool) -> None:
        self.config, self.device, self.compiled = config, device, compiled
        self._models: dict[torch.dtype, GPT] = {}

    def get(self, dtype: torch.dtype) -> GPT:
        """The model whose parameters have this dtype; its weights are those of the last run."""
        if dtype not in self._models:
            c = self.config
            shape = {"layers": c.layers, "heads": c.heads, "width": c.width, "context": c.context}
            model = GPT(GPTConfig(vocab_size=c.vocab_size, matmul_dtype=getattr(torch, c.matmul_dtype), **shape))
            model = model.to(device=self.device, dtype=dtype)
            if self.compiled:
                for block in model.blocks:
                    block.compile(dynamic=False)
            self._models[dtype] = model
        return self._models[dtype]


@torch.no_grad()
def validation_loss(model: nn.Module, data: Data, sequences: int) -> float:
    """Mean cross-entropy over the held-out sequences."""
    losses = [model(x, y).double() for x, y in data.held_out(sequences)]
    return float(torch.cat(losses)[:sequences].mean())


def make_start(config: Config, models: Models, data: Data) -> tuple[Start, dict[str, Any]]:
    """Train the start; returns it and what a result says about it."""
    began = time.time()
    model = models.get(torch.float32)
    init_weights(model, seed=0)
    named = list(model.named_parameters())
    params = [p for _, p in named]
    betas = (BETA1, config.start_beta2)
    fused = {"fused": True}
    optimizer = torch.optim.AdamW(groups_of(named), lr=config.lr, betas=betas, eps=EPS, **fused)  # type: ignore[arg-type]
    beside = {b: [torch.zeros_like(p) for p in params] for b in config.betas()[1:]}
    losses = []
    for t, (x, y) in enumerate(data.batches(config.start_steps, seed=0)):
        loss = model(x, y).mean()
        loss.backward()
        losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(params, config.max_norm, foreach=True)
        grads = [p.grad for p in params if p.grad is not None]
        for beta2, variances in beside.items():
            torch._foreach_mul_(variances, beta2)
            torch._foreach_addcmul_(variances, grads, grads, value=1.0 - beta2)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (t + 1) / config.warmup)
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in named]
    state = [optimizer.state[p] for p in params]
    variance = {config.start_beta2: [s["exp_avg_sq"] for s in state], **beside}
    weights = {name: p.detach().clone() for name, p in named}
    start = Start(
        id=f"{zlib.crc32(model.final_norm.weight.detach().cpu().numpy().tobytes()):08x}",
        step=config.start_steps,
        weights=weights,
        exp_avg=dict(zip(names, (s["exp_avg"] for s in state), strict=True)),
        exp_avg_sq={b: dict(zip(names, kept, strict=True)) for b, kept in variance.items()},
    )
    about = {
        "id": start.id,
        "val_loss": validation_loss(model, data, config.eval_sequences),
        "curve": torch.stack(losses).tolist()[::10],
        "seconds": time.time() - began,
    }
    return start, about


def load_or_make_start(
    config: Config, models: Models, data: Data, corpus: Corpus, path: Path | None
) -> tuple[Start, dict[str, Any]]:
    """The start from a file of an earlier command on the same machine, or trained and put there."""
    key = config.start_key() + corpus.checksum
    if path is not None and path.exists():
        saved = torch.load(path, map_location=data.device, weights_only=True)
        if saved["key"] == key:
            return Start(**saved["start"]), saved["about"]
    start, about = make_start(config, models, data)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"key": key, "start": vars(start), "about": about}, path)
    return start, about
