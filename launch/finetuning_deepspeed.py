"""A finetuning run under DeepSpeed: `parallel.strategy=deepspeed` in launch/finetune.py, ZeRO 0 to 3."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed_engine
import torch
import torch.distributed as dist
from chunked_loss import IGNORE
from config import UserError
from deepspeed_engine import Spread
from deepspeed_settings import Asked, Settled, settle
from finetune_config import FinetuneConfig
from finetune_data import Rows
from finetune_model import export, loss_of
from finetuning import Finetuning, build_optimizer
from torch import Tensor

from flashdist import FlashAdamW

BATCH_KEYS = ("train.batch", "train.batch / train.accumulate / ranks", "train.accumulate")


def settled(config: FinetuneConfig, size: int) -> Settled:
    """What DeepSpeed is started with.

    Raises:
        UserError: a batch that the ranks cannot share evenly, or a JSON that is refused or contradicts the config.
    """
    train, section = config.train, config.optimizer
    if train.batch % (train.accumulate * size):
        raise UserError(
            f"train.batch={train.batch} is no multiple of {size} ranks x train.accumulate={train.accumulate}: every "
            "rank takes as many rows as the others"
        )
    keys = ("lr", "betas", "eps", "weight_decay", "master_weight_bits")
    settings = {key: getattr(section, key) for key in keys}
    micro_batch = train.batch // (train.accumulate * size)
    asked = Asked(
        size, train.batch, micro_batch, train.accumulate, train.clip, section.name, settings, BATCH_KEYS, "train.clip"
    )
    return settle(config.parallel.deepspeed_config, asked)


class DeepSpeedFinetuning(Finetuning):
    """One rank of a run. Each sees its share of every batch; the loss is the mean over all targets of all ranks."""

    def __init__(self, config: FinetuneConfig, device: torch.device, resume: Path | None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        super().__init__(config, device, resume)

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside of an engine."""
        config, model = self.config, self.model
        plan = settled(config, self.size)
        deepspeed = deepspeed_engine.prepare(self.device)

        def forward(tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
            # Inside the model's own forward, where ZeRO 3 has the head's weight gathered.
            return loss_of(model, Rows(tokens, targets, positions), config.model.loss)

        model.forward = forward
        optimizer = build_optimizer(config, model, plan.more)
        assert isinstance(optimizer, FlashAdamW)
        engine = deepspeed_engine.make_engine(deepspeed, model, optimizer, plan)
        if plan.stage == 3:
            # Known before the first pass: of a head tied to the embedding ZeRO 3 would free the weight behind the
            # embedding, and the first loss would be computed with what is in that memory then.
            deepspeed.zero.register_external_parameter(model, model.get_output_embeddings().weight)
        self.spread = Spread(engine, plan.stage, self.device)
        return self.spread.optimizer

    def plan(self) -> str:
        """Which share of the run is here."""
        return f"DeepSpeed, ZeRO stage {self.spread.stage}, {self.size} ranks; what is measured is of one rank"

    def loss(self, rows: Rows) -> Tensor:
        """The mean loss of rows on the CPU."""
        loss: Tensor = self.spread.engine(rows.tokens, rows.targets, rows.positions)
        return loss

    def train_step(self) -> Tensor:
        """One step; the loss, over all ranks, stays on the device.

        Raises:
            UserError: rows without a target, which have no loss.
        """
        self.set_learning_rate()
        loss = self.backward(next(self.rows))
        self.step += 1
        return loss

    def backward(self, which: Tensor) -> Tensor:
        """Gradients of the mean loss over these rows' targets, and the engine's step after the last piece."""
        pieces = self.config.train.accumulate
        parts = [part.chunk(self.size) for part in which.chunk(pieces)]
        total = self._targets(which)
        empty = [share.tolist() for part in parts for share in part if not self._targets(share)]
        if empty:  # alike on all ranks
            raise UserError(f"the rows {empty[0]} have no token to learn: raise train.batch or data.sequence")
        loss = torch.zeros((), device=self.device)
        for part in parts:
            mine = part[self.rank]
            share = self.loss(self.training.rows.take(mine)) * (self._targets(mine) / total)
            # The engine divides by both: it takes the mean of means.
            self.spread.engine.backward(share * (self.size * pieces))
            self.spread.engine.step()
            loss += share.detach()
        dist.all_reduce(loss)
        return loss

    def _targets(self, which: Tensor) -> int:
        return int((self.training.rows.take(which).targets != IGNORE).sum())

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """The mean loss over all targets of the held-out rows; None where nothing is held out."""
        if self.validation is None:
            return None
        rows = self.validation.rows
        micro_batch = self.config.train.batch // (self.config.train.accumulate * self.size)
        parts = [
            part for part in torch.arange(len(rows)).split(micro_batch) if (rows.take(part).targets != IGNORE).any()
        ]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        for turn in range(0, len(parts), self.size):
            # Every rank makes as many forward passes as the others, as ZeRO 3 needs; one too much counts nothing.
            mine = turn + self.rank
            taken = rows.take(parts[min(mine, len(parts) - 1)])
            loss = self.loss(taken)
            if mine < len(parts):
                total += loss.double() * int((taken.targets != IGNORE).sum())
        self.model.train()
        dist.all_reduce(total)
        return total.item() / self.validation.targets

    def weights(self) -> Iterable[Tensor]:
        """What this rank holds of the parameters."""
        return self.spread.weights()

    def read(self, path: Path) -> Any:
        """Load a checkpoint; the `extra` it was saved with."""
        return self.spread.load(path)

    def write(self, path: Path, extra: dict[str, Any]) -> None:
        """Save a checkpoint."""
        self.spread.save(path, extra)

    def export(self, folder: Path) -> None:
        """Write the folder that transformers loads; rank 0 has the whole weights for it on the CPU."""
        kind = self.config.run.export
        assert kind is not None
        values = self.spread.whole_weights(master=kind == "fp32")
        if self.rank == 0:
            export(folder, self.model, None, self.tokenizer, kind, values)
        dist.barrier()
