"""ZeRO stage 0: DeepSpeed without partitions. The optimizer steps the model's own bf16 parameters."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch import Tensor

from flashdist.optimizer import FlashOptimizer


class Stage0Optimizer(DeepSpeedOptimizer):  # type: ignore[misc]
    """What DeepSpeed's engine asks of an optimizer for 16-bit weights, without its fp32 copy of them.

    Args:
        optimizer: steps the model's parameters.
        clip_grad: largest gradient norm; 0 for none. The factor is applied inside the kernel.
        check_overflow: leave out a step whose gradient norm is not finite (``bf16.check_grad_overflow``).
        mpu: DeepSpeed's model-parallel unit, if any.
    """

    def __init__(self, optimizer: FlashOptimizer, clip_grad: float, check_overflow: bool, mpu: Any = None) -> None:
        self.optimizer = optimizer
        self.clip_grad, self.check_overflow, self.mpu = clip_grad, check_overflow, mpu
        self.overflow = False
        self._global_grad_norm: Any = 0.0
        self.custom_loss_scaler, self.external_loss_scale = False, None
        self.loss_scale = self.cur_scale = 1.0
        # DeepSpeed has dropped param groups without parameters.
        optimizer._reset_caches()
        for i, group in enumerate(optimizer.param_groups):
            optimizer._know(group, i)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def scale_if_loss(self, value: Any) -> Any:
        return value

    def step(self, closure: Any = None) -> None:
        """Clip, look for an overflow, step. The norm is computed on the device; only the check waits for it."""
        norm = self.optimizer.clip_grad_norm_(self.clip_grad if self.clip_grad > 0 else torch.inf)
        self.overflow = self.check_overflow and not bool(torch.isfinite(norm))
        self._global_grad_norm = float("inf") if self.overflow else norm
        if self.overflow:
            self.zero_grad()
            return
        if not self.clip_grad > 0:
            self.optimizer._clip_factor = None
        self.optimizer.step()
        # Some releases of DeepSpeed leave this to the optimizer.
        self.zero_grad()

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> Any:
        return self.param_groups[0]["lr"]

    def refresh_fp32_params(self) -> None:
        """Weights were loaded without states: their corrections no longer belong to them."""
        for state in self.optimizer.state.values():
            if "error" in state:
                state["error"].zero_()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        """Load the states, or (with ``load_optimizer_states=False``) only take notice that weights were replaced.

        Raises:
            ValueError: the checkpoint has no states, or those of another optimizer.
        """
        if not load_optimizer_states:
            self.refresh_fp32_params()
        elif not state_dict or "param_groups" not in state_dict:
            found = "another optimizer's states" if state_dict else "no optimizer states"
            raise ValueError(
                f"the checkpoint of ZeRO stage 0 has {found}: call engine.load_checkpoint(..., "
                "load_optimizer_states=False) to go on from its weights with new states"
            )
        else:
            self.optimizer.load_state_dict(state_dict)
