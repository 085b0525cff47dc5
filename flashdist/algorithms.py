"""The five optimizers: for each its defaults, its checks, and what its hyperparameters mean to the update rule."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any

from torch import Tensor

from flashdist.numerics import rules
from flashdist.numerics.rules import GroupScalars, Rule
from flashdist.numerics.weight_split import CORRECTION_DTYPES
from flashdist.optimizer import FlashOptimizer

# bf16 momentum scales follow a momentum that changes by at least about half a percent a step.
SLOW_MOMENTUM = 0.995


def _check(ok: bool, name: str, value: object, range_: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {range_}, got {value!r}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")


def _check_common(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor):
        # On a GPU only its shape is looked at: reading the number would synchronise.
        _check(lr.numel() == 1, "lr", tuple(lr.shape), "a number or a tensor with one element")
        if lr.device.type == "cpu":
            _check(0 <= float(lr) < math.inf, "lr", float(lr), "a finite number >= 0")
    else:
        _check_number("lr", lr)
        _check(lr >= 0 and math.isfinite(lr), "lr", lr, "a finite number >= 0")
    decay = group["weight_decay"]
    _check_number("weight_decay", decay)
    _check(decay >= 0 and math.isfinite(decay), "weight_decay", decay, "a finite number >= 0")
    bits = group["master_weight_bits"]
    _check(bits is None or bits in CORRECTION_DTYPES, "master_weight_bits", bits, "24, 32 or None")
    _check(isinstance(group["quantize"], bool), "quantize", group["quantize"], "True or False")
    if group.get("decouple_lr"):
        base = group.get("base_lr", lr)
        _check(float(base) > 0, "lr", base, "above 0 at construction when decouple_lr=True (decay is lr / initial lr)")


def _check_betas(group: dict[str, Any]) -> None:
    betas = group["betas"]
    _check(isinstance(betas, (tuple, list)) and len(betas) == 2, "betas", betas, "two numbers")
    for i, beta in enumerate(betas):
        _check_number(f"betas[{i}]", beta)
        _check(0.0 <= beta < 1.0, f"betas[{i}]", beta, "in [0, 1)")


def _warn_slow_momentum(name: str, value: float, group: dict[str, Any]) -> None:
    if group["quantize"] and value > SLOW_MOMENTUM:
        warnings.warn(
            f"{name} = {value} is above {SLOW_MOMENTUM}: a momentum this slow changes less in a step than its 8-bit "
            "codes resolve. Use quantize=False for it.",
            stacklevel=3,
        )


def _refuse_torch_arguments(amsgrad: bool, differentiable: bool) -> None:
    if amsgrad:
        raise ValueError(
            "amsgrad=True is not supported: the running maximum would need a third moment. Leave it out, or take "
            "torch.optim's optimizer"
        )
    if differentiable:
        raise ValueError(
            "differentiable=True is not supported: the step works in place, outside autograd. Leave it out, or take "
            "torch.optim's optimizer"
        )


def _decay_per_lr(group: dict[str, Any]) -> float:
    """Decoupled weight decay per unit of lr; with decouple_lr relative to the lr that the group was built with."""
    return group["weight_decay"] / (group["base_lr"] if group["decouple_lr"] else 1.0)


_COMMON_ARGS = """
        maximize: maximise the objective instead.
        master_weight_bits: 24 (one INT8 byte beside a 16-bit weight; 1-D and tiny tensors get INT16 all the same),
            32 (INT16) or None (no correction). May be set per param group.
        quantize: 8-bit moments where the shape has rows of at least 32 elements; False keeps fp32 moments. May be set
            per param group.
        check_numerics: raise NumericsError where more than half of a tensor's updates are lost in rounding. Costs a
            synchronisation a step: for the first steps of a run.
        foreach, fused, capturable: accepted for torch's sake; the step is fused and capturable anyway.

    Raises:
        ValueError: a hyperparameter out of range, ``amsgrad=True``, ``differentiable=True``.
        TypeError: a parameter that is not bf16, fp16 or fp32.
"""


class _Adam(FlashOptimizer):
    """What AdamW and Adam share."""

    def _check_group(self, group: dict[str, Any]) -> None:
        _check_common(group)
        _check_betas(group)
        eps = group["eps"]
        _check_number("eps", eps)
        _check(eps >= 0 and math.isfinite(eps), "eps", eps, "a finite number >= 0")

    def _moments(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "lr": group["lr"], "decay1": beta1, "gain1": 1.0 - beta1, "first_gain1": 1.0 - beta1, "decay2": beta2,
            "gain2": 1.0 - beta2, "eps": group["eps"], "bias1": beta1, "bias2": beta2, "maximize": group["maximize"],
        }  # fmt: skip


class FlashAdamW(_Adam):
    __doc__ = f"""AdamW with a 16-bit weight plus correction and 8-bit moments, in one fused step.

    Args:
        params: parameters or param groups, bf16, fp16 or fp32.
        lr: learning rate; a float or a one-element tensor on any device.
        betas: decay of momentum and variance, each in [0, 1).
        eps: added to the root of the variance.
        weight_decay: decoupled weight decay.
        decouple_lr: decay by ``weight_decay * lr / initial lr`` instead of ``weight_decay * lr``.{_COMMON_ARGS}
    Source: Loshchilov and Hutter, arXiv 1711.05101; FlashOptim, arXiv 2602.23349.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        decouple_lr: bool = False,
        master_weight_bits: int | None = 24,
        quantize: bool = True,
        check_numerics: bool = False,
        amsgrad: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _refuse_torch_arguments(amsgrad, differentiable)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "decouple_lr": decouple_lr, "master_weight_bits": master_weight_bits, "quantize": quantize,
        }  # fmt: skip
        super().__init__(params, defaults, check_numerics=check_numerics)
        for group in self.param_groups:
            _warn_slow_momentum("betas[0]", group["betas"][0], group)

    def _rule(self, group: dict[str, Any]) -> Rule:
        return rules.ADAMW

    def _scalars(self, group: dict[str, Any]) -> GroupScalars:
        return GroupScalars(decay_per_lr=_decay_per_lr(group), **self._moments(group))


class FlashAdam(_Adam):
    __doc__ = f"""Adam (L2 weight decay in the gradient) with a 16-bit weight plus correction and 8-bit moments.

    Args:
        params: parameters or param groups, bf16, fp16 or fp32.
        lr: learning rate; a float or a one-element tensor on any device.
        betas: decay of momentum and variance, each in [0, 1).
        eps: added to the root of the variance.
        weight_decay: L2 coefficient.{_COMMON_ARGS}
    Source: Kingma and Ba, arXiv 1412.6980; FlashOptim, arXiv 2602.23349.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master_weight_bits: int | None = 24,
        quantize: bool = True,
        check_numerics: bool = False,
        amsgrad: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _refuse_torch_arguments(amsgrad, differentiable)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "master_weight_bits": master_weight_bits, "quantize": quantize,
        }  # fmt: skip
        super().__init__(params, defaults, check_numerics=check_numerics)
        for group in self.param_groups:
            _warn_slow_momentum("betas[0]", group["betas"][0], group)

    def _rule(self, group: dict[str, Any]) -> Rule:
        return rules.ADAM

    def _scalars(self, group: dict[str, Any]) -> GroupScalars:
        return GroupScalars(l2=group["weight_decay"], **self._moments(group))


class FlashLion(FlashOptimizer):
    __doc__ = f"""Lion with a 16-bit weight plus correction and an 8-bit momentum.

    Args:
        params: parameters or param groups, bf16, fp16 or fp32.
        lr: learning rate (a third to a tenth of AdamW's); a float or a one-element tensor on any device.
        betas: interpolation for the sign and decay of the momentum, each in [0, 1).
        weight_decay: decoupled weight decay.
        decouple_lr: decay by ``weight_decay * lr / initial lr`` instead of ``weight_decay * lr``.{_COMMON_ARGS}
    Source: Chen et al., arXiv 2302.06675, algorithm 2; FlashOptim, arXiv 2602.23349.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decouple_lr: bool = False,
        master_weight_bits: int | None = 24,
        quantize: bool = True,
        check_numerics: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _refuse_torch_arguments(False, differentiable)
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "decouple_lr": decouple_lr,
            "master_weight_bits": master_weight_bits, "quantize": quantize,
        }  # fmt: skip
        super().__init__(params, defaults, check_numerics=check_numerics)
        for group in self.param_groups:
            _warn_slow_momentum("betas[1]", group["betas"][1], group)

    def _check_group(self, group: dict[str, Any]) -> None:
        _check_common(group)
        _check_betas(group)

    def _rule(self, group: dict[str, Any]) -> Rule:
        return rules.LION

    def _scalars(self, group: dict[str, Any]) -> GroupScalars:
        beta1, beta2 = group["betas"]
        return GroupScalars(
            lr=group["lr"], decay_per_lr=_decay_per_lr(group), decay1=beta1, gain1=1.0 - beta1,
            first_gain1=1.0 - beta1, decay2=beta2, gain2=1.0 - beta2, maximize=group["maximize"],
        )  # fmt: skip


class _SGD(FlashOptimizer):
    """What SGD and SGDW share."""

    def _check_group(self, group: dict[str, Any]) -> None:
        _check_common(group)
        _check_number("momentum", group["momentum"])
        _check_number("dampening", group["dampening"])
        _check(0.0 <= group["momentum"] < 1.0, "momentum", group["momentum"], "in [0, 1)")
        _check(math.isfinite(group["dampening"]), "dampening", group["dampening"], "a finite number")
        if group["nesterov"]:
            fits = group["momentum"] > 0 and group["dampening"] == 0
            _check(fits, "nesterov", True, "used with a momentum above 0 and no dampening")

    def _direction(self, group: dict[str, Any]) -> dict[str, Any]:
        momentum = group["momentum"]
        return {
            "lr": group["lr"], "decay1": momentum, "gain1": 1.0 - group["dampening"] if momentum else 1.0,
            "grad_weight": 1.0 if group["nesterov"] else 0.0, "buffer_weight": momentum if group["nesterov"] else 1.0,
            "maximize": group["maximize"],
        }  # fmt: skip


class FlashSGD(_SGD):
    __doc__ = f"""SGD (L2 weight decay in the gradient) with a 16-bit weight plus correction and an 8-bit momentum.

    Args:
        params: parameters or param groups, bf16, fp16 or fp32.
        lr: learning rate; a float or a one-element tensor on any device.
        momentum: decay of the momentum buffer, in [0, 1); 0 keeps no buffer.
        dampening: the gradient enters the buffer with ``1 - dampening``, from the second step on.
        weight_decay: L2 coefficient.
        nesterov: step along ``gradient + momentum * buffer``.{_COMMON_ARGS}
    Source: Sutskever et al., ICML 2013, in torch's form; FlashOptim, arXiv 2602.23349.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master_weight_bits: int | None = 24,
        quantize: bool = True,
        check_numerics: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _refuse_torch_arguments(False, differentiable)
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "master_weight_bits": master_weight_bits, "quantize": quantize,
        }  # fmt: skip
        super().__init__(params, defaults, check_numerics=check_numerics)
        for group in self.param_groups:
            _warn_slow_momentum("momentum", group["momentum"], group)

    def _rule(self, group: dict[str, Any]) -> Rule:
        return rules.SGD if group["momentum"] else rules.SGD_PLAIN

    def _scalars(self, group: dict[str, Any]) -> GroupScalars:
        return GroupScalars(l2=group["weight_decay"], **self._direction(group))


class FlashSGDW(_SGD):
    __doc__ = f"""SGD with decoupled weight decay, a 16-bit weight plus correction and an 8-bit momentum.

    Args:
        params: parameters or param groups, bf16, fp16 or fp32.
        lr: learning rate; a float or a one-element tensor on any device.
        momentum: decay of the momentum buffer, in [0, 1); 0 keeps no buffer.
        dampening: the gradient enters the buffer with ``1 - dampening``, from the second step on.
        weight_decay: decoupled weight decay.
        nesterov: step along ``gradient + momentum * buffer``.
        decouple_lr: decay by ``weight_decay * lr / initial lr`` instead of ``weight_decay * lr``.{_COMMON_ARGS}
    Source: Loshchilov and Hutter, arXiv 1711.05101, algorithm 1; FlashOptim, arXiv 2602.23349.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        decouple_lr: bool = False,
        master_weight_bits: int | None = 24,
        quantize: bool = True,
        check_numerics: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _refuse_torch_arguments(False, differentiable)
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "decouple_lr": decouple_lr, "master_weight_bits": master_weight_bits,
            "quantize": quantize,
        }  # fmt: skip
        super().__init__(params, defaults, check_numerics=check_numerics)
        for group in self.param_groups:
            _warn_slow_momentum("momentum", group["momentum"], group)

    def _rule(self, group: dict[str, Any]) -> Rule:
        return rules.SGDW if group["momentum"] else rules.SGDW_PLAIN

    def _scalars(self, group: dict[str, Any]) -> GroupScalars:
        return GroupScalars(decay_per_lr=_decay_per_lr(group), **self._direction(group))
