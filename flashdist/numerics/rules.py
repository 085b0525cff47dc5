"""The update rules in fp32: momentum, variance and weight of one step from the ones before and the gradient.

A rule is a function ``rule(p, g, m, v, s) -> (p, m, v)`` on fp32 tensors of one shape; ``s`` are the scalars of the
step. Moments that a rule does not have are passed through. Each rule has a twin of the same name in
``kernels/triton_rules.py``.

What a param group's hyperparameters mean to a rule is put into :class:`GroupScalars` (fp64, host) by the algorithm;
:meth:`GroupScalars.at` adds what depends on the step count. The Triton backend does the same on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class StepScalars(NamedTuple):
    """What one parameter's step needs besides tensors; Python floats, used as fp32."""

    lr: float
    shrink: float  # decoupled weight decay: p is multiplied by this first
    l2: float  # coupled weight decay: l2 * p is added to the gradient
    decay1: float
    gain1: float
    decay2: float
    gain2: float
    eps: float
    step_size: float  # lr / (1 - beta1^t)
    root_bias2: float  # 1 / sqrt(1 - beta2^t)
    grad_weight: float
    buffer_weight: float


@dataclass(frozen=True)
class GroupScalars:
    """The numbers of one param group that rules read, in fp64 (lr may be a 0-d tensor, on any device).

    ``decay_per_lr`` is the decoupled weight decay per unit of lr; ``bias1`` and ``bias2`` are the bases of the bias
    corrections (0 for none); ``first_gain1`` replaces ``gain1`` at a parameter's first step; ``grad_weight`` and
    ``buffer_weight`` mix gradient and momentum buffer into SGD's direction.
    """

    lr: float | Tensor
    decay_per_lr: float = 0.0
    l2: float = 0.0
    decay1: float = 0.0
    gain1: float = 1.0
    first_gain1: float = 1.0
    decay2: float = 0.0
    gain2: float = 1.0
    eps: float = 0.0
    bias1: float = 0.0
    bias2: float = 0.0
    grad_weight: float = 0.0
    buffer_weight: float = 1.0
    maximize: bool = False

    def at(self, step: int) -> StepScalars:
        """The scalars of a parameter's step number ``step`` (1 for its first), computed in fp64."""
        lr = float(self.lr)
        return StepScalars(
            lr=lr,
            shrink=1.0 - lr * self.decay_per_lr,
            l2=self.l2,
            decay1=self.decay1,
            gain1=self.first_gain1 if step == 1 else self.gain1,
            decay2=self.decay2,
            gain2=self.gain2,
            eps=self.eps,
            step_size=lr / (1.0 - self.bias1**step),
            root_bias2=(1.0 - self.bias2**step) ** -0.5,
            grad_weight=self.grad_weight,
            buffer_weight=self.buffer_weight,
        )


Update = Callable[[Tensor, Tensor, Tensor, Tensor, StepScalars], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Rule:
    """An update rule and the names under which its moments are kept."""

    name: str
    update: Update
    moments: tuple[str, ...]


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: StepScalars) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW: decoupled weight decay. Loshchilov and Hutter, arXiv 1711.05101, algorithm 2 (as in torch, eps
    outside)."""
    m = s.decay1 * m + s.gain1 * g
    v = s.decay2 * v + s.gain2 * (g * g)
    return s.shrink * p - s.step_size * (m / (v.sqrt() * s.root_bias2 + s.eps)), m, v


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: StepScalars) -> tuple[Tensor, Tensor, Tensor]:
    """Adam with L2 weight decay in the gradient. Kingma and Ba, arXiv 1412.6980, algorithm 1."""
    return adamw(p, g + s.l2 * p, m, v, s)


def lion(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: StepScalars) -> tuple[Tensor, Tensor, Tensor]:
    """Lion: the sign of an interpolated momentum. Chen et al., arXiv 2302.06675, algorithm 2."""
    c = s.decay1 * m + s.gain1 * g
    # torch's sign of NaN is 0, which would quietly freeze a weight whose momentum is lost.
    direction = c.sign().where(c == c, c)
    return s.shrink * p - s.lr * direction, s.decay2 * m + s.gain2 * g, v


def sgd(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: StepScalars) -> tuple[Tensor, Tensor, Tensor]:
    """SGD with momentum, dampening, Nesterov and L2 weight decay. Sutskever et al., ICML 2013, eq. 1 to 4, torch's
    form."""
    g = g + s.l2 * p
    m = s.decay1 * m + s.gain1 * g
    return s.shrink * p - s.lr * (s.grad_weight * g + s.buffer_weight * m), m, v


def sgdw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: StepScalars) -> tuple[Tensor, Tensor, Tensor]:
    """SGD with decoupled weight decay. Loshchilov and Hutter, arXiv 1711.05101, algorithm 1."""
    m = s.decay1 * m + s.gain1 * g
    return s.shrink * p - s.lr * (s.grad_weight * g + s.buffer_weight * m), m, v


ADAMW = Rule("adamw", adamw, ("exp_avg", "exp_avg_sq"))
ADAM = Rule("adam", adam, ("exp_avg", "exp_avg_sq"))
LION = Rule("lion", lion, ("exp_avg",))
SGD = Rule("sgd", sgd, ("momentum_buffer",))
SGDW = Rule("sgdw", sgdw, ("momentum_buffer",))
# Without momentum there is no buffer to keep; the arithmetic is the same with an empty one.
SGD_PLAIN = Rule("sgd", sgd, ())
SGDW_PLAIN = Rule("sgdw", sgdw, ())
