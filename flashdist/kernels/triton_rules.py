"""Device twins of the update rules in numerics/rules.py; one signature, so that one kernel serves all of them.

``s`` are the scalars of the step, in the order of numerics.rules.StepScalars.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdist.kernels.triton_numerics import divide


@triton.jit
def adamw(p, g, m, v, s, FAST: tl.constexpr):
    lr, shrink, l2, decay1, gain1, decay2, gain2, eps, step_size, root_bias2, grad_weight, buffer_weight = s
    m = decay1 * m + gain1 * g
    v = decay2 * v + gain2 * (g * g)
    return shrink * p - step_size * divide(m, tl.sqrt(v) * root_bias2 + eps, FAST), m, v


@triton.jit
def adam(p, g, m, v, s, FAST: tl.constexpr):
    lr, shrink, l2, decay1, gain1, decay2, gain2, eps, step_size, root_bias2, grad_weight, buffer_weight = s
    g = g + l2 * p
    m = decay1 * m + gain1 * g
    v = decay2 * v + gain2 * (g * g)
    return shrink * p - step_size * divide(m, tl.sqrt(v) * root_bias2 + eps, FAST), m, v


@triton.jit
def lion(p, g, m, v, s, FAST: tl.constexpr):
    lr, shrink, l2, decay1, gain1, decay2, gain2, eps, step_size, root_bias2, grad_weight, buffer_weight = s
    c = decay1 * m + gain1 * g
    # The last branch keeps 0 and NaN.
    direction = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c))
    return shrink * p - lr * direction, decay2 * m + gain2 * g, v


@triton.jit
def sgd(p, g, m, v, s, FAST: tl.constexpr):
    lr, shrink, l2, decay1, gain1, decay2, gain2, eps, step_size, root_bias2, grad_weight, buffer_weight = s
    g = g + l2 * p
    m = decay1 * m + gain1 * g
    return shrink * p - lr * (grad_weight * g + buffer_weight * m), m, v


@triton.jit
def sgdw(p, g, m, v, s, FAST: tl.constexpr):
    lr, shrink, l2, decay1, gain1, decay2, gain2, eps, step_size, root_bias2, grad_weight, buffer_weight = s
    m = decay1 * m + gain1 * g
    return shrink * p - lr * (grad_weight * g + buffer_weight * m), m, v


RULES = {"adamw": adamw, "adam": adam, "lion": lion, "sgd": sgd, "sgdw": sgdw}
