"""Every rule and state format once, as the tests of the CPU's steps run over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashdist import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW
from flashdist.numerics.companding import DITHER_ABOVE_BETA2

CASES: dict[str, tuple[Callable[..., FlashOptimizer], dict[str, Any]]] = {
    "adamw": (FlashAdamW, {"weight_decay": 0.1}),
    "adamw without dither": (FlashAdamW, {"betas": (0.9, DITHER_ABOVE_BETA2)}),
    "adamw 32 bits": (FlashAdamW, {"master_weight_bits": 32}),
    "adamw without correction": (FlashAdamW, {"master_weight_bits": None}),
    "adamw fp32 moments": (FlashAdamW, {"quantize": False}),
    "adamw eps 0": (FlashAdamW, {"eps": 0.0}),
    "adam": (FlashAdam, {"weight_decay": 0.1, "maximize": True}),
    "lion": (FlashLion, {"weight_decay": 0.1}),
    "sgd": (FlashSGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.1}),
    "plain sgd": (FlashSGD, {}),
    "sgdw": (FlashSGDW, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "plain sgdw": (FlashSGDW, {}),
}
