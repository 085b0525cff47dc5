"""What a backend is, and which one serves a device.

A backend steps all parameters of an optimizer that live on one kind of device. It sees local, plain, contiguous tensors
only: sharding has been resolved before, and everything is written in place.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flashdist.numerics.companding import DITHER_ABOVE_BETA2
from flashdist.numerics.groups import GroupLayout
from flashdist.numerics.rules import GroupScalars, Rule


@dataclass(eq=False, slots=True)
class ParamState:
    """The state of one parameter as the kernels see it.

    Attributes:
        rule: the update rule; ``len(moments) == len(rule.moments)``.
        layout: the groups of the local tensor.
        group: index of the parameter's param group.
        step: fp32 0-d, steps taken so far.
        correction: int8 or int16 of the weight's shape, or None.
        moments: codes (int8, then uint8) where ``scales`` are there, fp32 tensors otherwise.
        scales: bf16 (momentum) and fp32 (variance) of ``layout.scale_shape``; empty for fp32 moments.
        fingerprint: int32 ``[tiles]`` where there is a correction.
        weight_dtype: the weight's dtype, to which a correction belongs.
    """

    rule: Rule
    layout: GroupLayout
    group: int
    step: Tensor
    correction: Tensor | None
    moments: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    fingerprint: Tensor | None
    weight_dtype: torch.dtype

    @property
    def quantized(self) -> bool:
        return bool(self.scales)


@dataclass(frozen=True)
class StepInputs:
    """What else a step takes. Scalars are on the device and never read by the host; None where not in use.

    Attributes:
        clip_factor: the gradients are multiplied by it.
        grad_scale: the gradients are divided by it (GradScaler).
        found_inf: where it is not 0, nothing changes (GradScaler).
        count_lost: count the elements whose update is lost in rounding.
        weight_addresses: ``data_ptr()`` of every weight, in order.
        subset: which of several recurring sets of parameters this is: what is kept from step to step is kept by it.
    """

    clip_factor: Tensor | None = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    count_lost: bool = False
    weight_addresses: list[int] | None = None
    subset: Hashable = None


class Backend(Protocol):
    """Steps parameters that live on one kind of device."""

    def step(
        self,
        states: Sequence[ParamState],
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        groups: Sequence[GroupScalars],
        inputs: StepInputs,
    ) -> list[Tensor] | None:
        """Step every parameter once, in place.

        Args:
            states, weights, grads: one of each a parameter, in the same order; weights and gradients contiguous.
            groups: the scalars of every param group.
            inputs: device scalars of this step.

        Returns:
            With ``inputs.count_lost`` an int count a parameter: elements whose new fp32 weight differs from the old one
            while the stored weight and correction do not.
        """
        ...

    def grad_square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        """Sum of squares of all gradients, fp32 0-d on their device, without a synchronisation."""
        ...


def dithered(rule: Rule, group: GroupScalars) -> bool:
    """Whether a step rounds the codes of this group with the dither: Adam's, both moments or neither."""
    return len(rule.moments) == 2 and group.decay2 > DITHER_ABOVE_BETA2


def make_backend(device_type: str) -> Backend:
    """A backend for a kind of device: Triton for ``cuda`` (NVIDIA and ROCm), eager for anything else."""
    if device_type == "cuda":
        try:
            from flashdist.kernels.triton_launch import TritonBackend
        except ImportError as error:
            raise RuntimeError(
                "stepping parameters on a GPU needs Triton, which could not be imported: install it with "
                "'pip install triton' (PyTorch's own CUDA and ROCm builds bring it)"
            ) from error
        return TritonBackend()
    from flashdist.kernels.eager import EagerBackend

    return EagerBackend()
