"""What each 8-bit scheme makes of Adam's moments on the gradients of a real run.

A tracker follows one stretch of every matrix. On the same gradients it keeps exact moments and those of each scheme,
all from the same start, and at the end reports, as means over the matrices: the normalised squared error of momentum,
root variance and update direction, the update's gain (its projection on the exact one) and its largest element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.arms import BETA1, EPS, Start
from benchmarks.quality.schemes import SCHEMES

STRETCH = 1 << 17  # elements of a matrix
WIDEST_BLOCK = 256  # a stretch is a whole number of every scheme's blocks
LAST_STEPS = 20  # the measures are means over these


class Tracker:
    """Moments of all schemes on one model's gradients, in step with a run from `start`."""

    def __init__(self, model: nn.Module, start: Start, beta2: float) -> None:
        matrices = [(name, p) for name, p in model.named_parameters() if p.dim() >= 2]
        length = min(STRETCH, min(p.numel() for _, p in matrices) // WIDEST_BLOCK * WIDEST_BLOCK)
        self.names, self.length = [name for name, _ in matrices], length
        self.beta2, self.step = beta2, start.step

        def flat(tensors: dict[str, Tensor]) -> Tensor:
            return torch.stack([tensors[name].reshape(-1)[:length] for name in self.names])

        m, v = flat(start.exp_avg), flat(start.exp_avg_sq[beta2])
        self.kept = {
            name: (scheme.momentum(m, self.step), scheme.variance(v, self.step)) for name, scheme in SCHEMES.items()
        }
        self.measured: dict[str, list[Tensor]] = {name: [] for name in SCHEMES}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the gradients that the model has now."""
        self.step += 1
        parameters = dict(model.named_parameters())
        g = torch.stack([_gradient(parameters[name])[: self.length] for name in self.names])
        exact = self._moments("exact", g)
        for name, scheme in SCHEMES.items():
            moments = self._moments(name, g)
            self.measured[name] = [*self.measured[name][1 - LAST_STEPS :], self._measures(moments, exact)]
            self.kept[name] = (scheme.momentum(moments[0], self.step), scheme.variance(moments[1], self.step))

    def _moments(self, name: str, g: Tensor) -> tuple[Tensor, Tensor]:
        m, v = self.kept[name]
        return m * BETA1 + (1 - BETA1) * g, v * self.beta2 + (1 - self.beta2) * g * g

    def _update(self, m: Tensor, v: Tensor) -> Tensor:
        correction = (1 - self.beta2**self.step) ** 0.5
        return m / (1 - BETA1**self.step) / (v.sqrt() / correction + EPS)

    def _measures(self, moments: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> Tensor:
        """Five measures a matrix, [5, matrices]."""
        u, ue = self._update(*moments), self._update(*exact)
        pairs = ((moments[0], exact[0]), (moments[1].sqrt(), exact[1].sqrt()), (u, ue))
        errors = [((a - b).square().sum(1) / b.square().sum(1)).double() for a, b in pairs]
        gain = ((u * ue).sum(1) / ue.square().sum(1)).double()
        return torch.stack([*errors, gain, u.abs().amax(1).double()])

    def report(self) -> dict[str, Any]:
        """Measures by scheme, over all matrices and by kind of matrix."""
        kinds = sorted({_kind(name) for name in self.names})
        out: dict[str, Any] = {"elements": self.length * len(self.names), "schemes": {}, "update_nmse_by_kind": {}}
        for name, measured in self.measured.items():
            mean = torch.stack(measured).mean(0)
            values = [*mean[:4].mean(1).tolist(), float(torch.stack(measured)[:, 4].max())]
            keys = ("momentum_nmse", "root_variance_nmse", "update_nmse", "gain", "largest_update")
            out["schemes"][name] = dict(zip(keys, values, strict=True))
            out["update_nmse_by_kind"][name] = {
                kind: float(mean[2, [i for i, n in enumerate(self.names) if _kind(n) == kind]].mean()) for kind in kinds
            }
        return out


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad.detach().reshape(-1).float()


def _kind(name: str) -> str:
    """`blocks.3.mlp.up.weight` -> `mlp.up`."""
    return ".".join(part for part in name.removesuffix(".weight").split(".") if part != "blocks" and not part.isdigit())
