"""These optimizers in Hugging Face's Trainer.

    trainer = Trainer(model, args, ..., optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args))
    trainer = use_flash_optimizer(Trainer(model, args, ...))              # the same for a Trainer that is there already

Trainer then builds, schedules, saves and resumes the optimizer as its own: ``optimizer.pt`` of its checkpoints holds
the compact state. With gradient release set ``max_grad_norm=0``. Accelerate needs nothing: give the optimizer to
``accelerator.prepare``.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from flashdist.algorithms import FlashAdam, FlashAdamW
from flashdist.optimizer import FlashOptimizer

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


def optimizer_cls_and_kwargs(
    args: TrainingArguments, cls: type[FlashOptimizer] = FlashAdamW, **overrides: Any
) -> tuple[type[FlashOptimizer], dict[str, Any]]:
    """What Trainer's argument of the same name takes.

    Args:
        args: gives lr, and for Adam and AdamW betas and eps. Weight decay is set per param group by Trainer itself.
        cls: one of this library's optimizers.
        **overrides: constructor arguments that go before those of ``args``, such as ``master_weight_bits=32``.

    Raises:
        TypeError: a class of another library.
        ValueError: a ``weight_decay`` here, which Trainer would overwrite.
    """
    if not (isinstance(cls, type) and issubclass(cls, FlashOptimizer)):
        raise TypeError(f"cls must be one of flashdist's optimizers, got {cls!r}")
    if "weight_decay" in overrides:
        raise ValueError("Trainer sets weight_decay per param group: give it to TrainingArguments(weight_decay=...)")
    kwargs: dict[str, Any] = {"lr": args.learning_rate}
    if issubclass(cls, FlashAdamW | FlashAdam):
        kwargs |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return cls, {**kwargs, **overrides}


def use_flash_optimizer(trainer: Trainer, cls: type[FlashOptimizer] = FlashAdamW, **overrides: Any) -> Trainer:
    """Let a Trainer train with one of these optimizers; returns the Trainer.

    Args:
        trainer: one that has no optimizer yet.
        cls, **overrides: as in :func:`optimizer_cls_and_kwargs`.

    Warns where the weights are fp32: they train, but in 10.2 bytes per parameter and not in 7.2.

    Raises:
        RuntimeError: the Trainer has an optimizer already.
    """
    if trainer.optimizer is not None:
        raise RuntimeError(
            "this Trainer has an optimizer already (it was given one, or has trained): call use_flash_optimizer right "
            "after its construction"
        )
    if any(p.dtype == torch.float32 and p.dim() > 1 and p.requires_grad for p in trainer.model.parameters()):
        warnings.warn(
            "the model has fp32 matrices, so most of the memory is not saved: load it in bf16, or call "
            "flashdist.cast_model(model) before",
            stacklevel=2,
        )
    trainer.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs(trainer.args, cls, **overrides)
    return trainer
