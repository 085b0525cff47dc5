"""PyTorch optimizers that keep a weight in BF16 plus one INT8 byte, momentum and variance in 8 bits."""

from flashdist.algorithms import FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW
from flashdist.cpu_step import compile_cpu_step
from flashdist.integrations import deepspeed as _deepspeed
from flashdist.lost_updates import NumericsError
from flashdist.optimizer import FlashOptimizer
from flashdist.precision import cast_model
from flashdist.sharding.gradient_release import enable_gradient_release
from flashdist.version import __version__

__all__ = [
    "FlashAdam",
    "FlashAdamW",
    "FlashLion",
    "FlashOptimizer",
    "FlashSGD",
    "FlashSGDW",
    "NumericsError",
    "__version__",
    "cast_model",
    "compile_cpu_step",
    "enable_gradient_release",
]

# Their names on torch.optim, for DeepSpeed's JSON; no DeepSpeed is imported.
_deepspeed.install()
