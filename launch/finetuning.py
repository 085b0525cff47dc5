"""One finetuning run: its model, optimizer and rows, and a step of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import resuming
import torch
from chunked_loss import IGNORE
from config import UserError
from finetune_config import FinetuneConfig, TrainSection
from finetune_data import Packing, Rows, order, pack, read_documents, split
from finetune_memory_table import planned, show
from finetune_model import check_source, export, load_model, load_tokenizer, loss_of
from run_folder import RunFolder, save_step
from torch import Tensor

from flashdist import FlashAdamW, FlashOptimizer, checkpoint, enable_gradient_release


def learning_rate(train: TrainSection, base: float, step: int, steps: int) -> float:
    """The rate of a step (from 0): a linear rise, then a fall to a tenth, or none."""
    if step < train.warmup:
        return base * (step + 1) / train.warmup
    done = (step - train.warmup) / max(1, steps - train.warmup)
    if train.schedule == "constant":
        return base
    share = 0.5 * (1 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1 - done
    return base * (0.1 + 0.9 * share)


def build_optimizer(config: FinetuneConfig, model: Any, more: dict[str, Any] | None = None) -> torch.optim.Optimizer:
    """The optimizer; matrices decay, vectors do not. `more` are further arguments of FlashAdamW.

    Raises:
        UserError: an argument that it refuses.
    """
    section = config.optimizer
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if section.name == "torch_adamw":
        return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
    settings = {key: getattr(section, key) for key in ("lr", "betas", "eps", "master_weight_bits")}
    try:
        return FlashAdamW(groups, **settings, **(more or {}))
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer: {error}") from error


def load_rows(config: FinetuneConfig, tokenizer: Any) -> tuple[Packing, Packing | None]:
    """Training and held-out rows."""
    data = config.data
    assert data.train is not None
    documents, held_out = read_documents(data.train, tokenizer), []
    if data.validation is not None:
        held_out = read_documents(data.validation, tokenizer)
    else:
        documents, held_out = split(documents, data.validation_share)
    if not documents:
        raise UserError(f"{data.train} has too few records to hold some out: set data.validation_share=0")
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    return pack(documents, data.sequence, padding), pack(held_out, data.sequence, padding) if held_out else None


def random_rows(config: FinetuneConfig, vocabulary: int) -> Packing:
    """Rows of random tokens, all of them targets; for memory and speed."""
    generator = torch.Generator().manual_seed(config.train.seed)
    tokens = torch.randint(vocabulary, (64, config.data.sequence + 1), generator=generator)
    positions = torch.arange(config.data.sequence).expand(64, -1).contiguous()
    rows = Rows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)
    return Packing(rows, 64, 0, 0, 1.0, rows.targets.numel())


class Finetuning:
    """One run: model, optimizer, rows, and where it stands. On one device; finetuning_deepspeed.py has that on many."""

    rank = 0

    def __init__(self, config: FinetuneConfig, device: torch.device, resume: Path | None) -> None:
        self.config, self.device = config, device
        if config.model.loss == "liger" and device.type != "cuda":
            raise UserError("model.loss=liger needs a GPU: take model.loss=blocks")
        check_source(config.model)
        self.tokenizer = load_tokenizer(config.model) if config.data.train is not None else None
        self.validation: Packing | None = None
        if self.tokenizer is not None:
            self.training, self.validation = load_rows(config, self.tokenizer)
        self.model = load_model(config.model, device, config.train.seed)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if self.tokenizer is None:
            self.training = random_rows(config, vocabulary)
        largest = int(self.training.rows.tokens.max())
        if largest >= vocabulary:
            raise UserError(
                f"the tokenizer has the id {largest}, the model {vocabulary} tokens: they do not belong together"
            )
        self.opt = self.build_optimizer()
        self.steps = config.train.steps or max(1, config.train.epochs * len(self.training.rows) // config.train.batch)
        self.step = 0
        self.clip = config.train.clip
        self.release = None
        if config.train.gradient_release:
            clip = {"clip": "previous_norm", "max_norm": self.clip} if self.clip else {}
            assert isinstance(self.opt, FlashOptimizer)
            self.release = enable_gradient_release(self.model, self.opt, **cast(Any, clip))
        if resume is not None:
            self.load(resume)
        self.rows = order(len(self.training.rows), config.train.batch, config.train.seed, self.step)

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters."""
        return build_optimizer(self.config, self.model)

    def plan(self) -> str:
        """What the run will need."""
        return show("planned", planned(self.opt, self.config.train.gradient_release))

    def loss(self, rows: Rows) -> Tensor:
        """The mean loss of rows on the CPU."""
        wide = self.device.type == "cuda" and self.config.model.dtype == "fp32"
        with torch.autocast("cuda", torch.bfloat16) if wide else nullcontext():
            return loss_of(self.model, rows, self.config.model.loss)

    def set_learning_rate(self) -> None:
        """In all param groups, that of the step which comes next."""
        rate = learning_rate(self.config.train, self.config.optimizer.lr, self.step, self.steps)
        for group in self.opt.param_groups:
            group["lr"] = rate

    def train_step(self) -> Tensor:
        """One step; the loss stays on the device.

        Raises:
            UserError: rows without a target, which have no loss.
        """
        self.set_learning_rate()
        which = next(self.rows)
        if self.release is not None and self.clip and self.release.last_norm is None:
            # The first step is clipped by its own norm. The random numbers are drawn again for the step itself.
            with self.release.measure(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                self.backward(which)
        loss = self.backward(which)
        if self.clip and isinstance(self.opt, FlashOptimizer) and self.release is None:
            self.opt.clip_grad_norm_(self.clip)
        elif self.clip and self.release is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.opt.step()
        self.opt.zero_grad()
        self.step += 1
        return loss

    def backward(self, which: Tensor) -> Tensor:
        """Gradients of the mean loss over these rows' targets; the loss stays on the device."""
        total = int((self.training.rows.take(which).targets != IGNORE).sum())
        loss = torch.zeros((), device=self.device)
        for part in which.chunk(self.config.train.accumulate):
            rows = self.training.rows.take(part)
            targets = int((rows.targets != IGNORE).sum())
            if not targets:
                raise UserError(f"the rows {part.tolist()} have no token to learn: raise train.batch or data.sequence")
            piece = self.loss(rows) * (targets / total)
            piece.backward()
            loss += piece.detach()
        return loss

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """The mean loss over all targets of the held-out rows; None where nothing is held out."""
        if self.validation is None:
            return None
        self.model.eval()
        total = 0.0
        for which in torch.arange(len(self.validation.rows)).split(self.config.train.batch):
            rows = self.validation.rows.take(which)
            count = int((rows.targets != IGNORE).sum())
            if count:
                total += float(self.loss(rows)) * count
        self.model.train()
        return total / self.validation.targets

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        extra = resuming.read(path, self.read, self.opt, {"step", "norm"})
        remedies = {
            "data": "data.train, data.validation_share, data.sequence and the tokenizer must give the same rows",
            "seed": "set train.seed to the first value",
            "batch": "set train.batch to the first value",
        }
        resuming.compare(path, extra, self.reading, remedies, "change the order of the data")
        self.step = int(extra["step"])
        if self.release is not None and self.clip and extra["norm"] is not None:
            self.release.last_norm = torch.tensor(extra["norm"], device=self.device)

    @cached_property
    def reading(self) -> dict[str, Any]:
        """What decides which rows a step sees: their digest, the seed of their order, and how many a step takes."""
        digest = hashlib.sha256()
        rows = self.training.rows
        for part in (rows.tokens, rows.targets, rows.positions):
            digest.update(f"{tuple(part.shape)}".encode())
            digest.update(part.contiguous().numpy().data)
        return {"data": digest.hexdigest(), "seed": self.config.train.seed, "batch": self.config.train.batch}

    def save(self, folder: RunFolder) -> None:
        """A checkpoint of this step. The norm is what clipping by the previous norm goes on with.

        Raises:
            RunError: weights that are no longer finite, or it cannot be written.
        """
        norm = None if self.release is None else self.release.last_norm
        extra = {"step": self.step, "norm": None if norm is None else float(norm), **self.reading}
        keep = self.config.run.keep_last
        save_step(folder, self.step, self.weights(), lambda path: self.write(path, extra), self.rank, keep)

    def weights(self) -> Iterable[Tensor]:
        """What this rank holds of the parameters."""
        return cast(Iterable[Tensor], self.model.parameters())

    def read(self, path: Path) -> Any:
        """Load a checkpoint; the `extra` it was saved with."""
        return checkpoint.load(path, self.model, self.opt)

    def write(self, path: Path, extra: dict[str, Any]) -> None:
        """Save a checkpoint."""
        checkpoint.save(path, self.model, self.opt, extra=extra)

    def export(self, folder: Path) -> None:
        """Write the folder that transformers loads."""
        assert self.config.run.export is not None
        export(folder, self.model, self.opt, self.tokenizer, self.config.run.export)
