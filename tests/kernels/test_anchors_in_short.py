"""Case 25 in short, on every backend: S1, S2 and S3. In depth, for the eager backend, in tests/numerics."""

from __future__ import annotations

import torch
from torch import nn

from flashdist import FlashAdamW
from tests.support.backends import FP32, BackendUnderTest
from tests.support.tolerances import tolerance

LR = 1e-3


def test_s1_a_masked_neighbour_does_not_jump(backend: BackendUnderTest):
    """A gets +-1; B beside it gets 1e-3 for a while, then exactly 0, and must not take a step of 95,000 lr."""
    p = nn.Parameter(torch.zeros(1, 32, device=backend.device))
    opt = backend.build(FlashAdamW, [p], lr=LR, weight_decay=0.0)
    largest = 0.0
    for t in range(40):
        p.grad = torch.zeros_like(p)
        p.grad[0, 0] = (-1.0) ** t
        p.grad[0, 1] = 1e-3 if t < 25 else 0.0
        before = p.detach().clone()
        opt.step()
        largest = max(largest, float((p.detach() - before)[0, 1].abs()))
    assert 0.5 * LR < largest <= tolerance("S1 largest step, lr") * LR


def test_s2_and_s3_steps_do_not_depend_on_the_size_of_gradients(backend: BackendUnderTest):
    sizes = torch.tensor([1e-9, 1e-7, 1e-5, 1.0, 1e5, 1e6], dtype=torch.float64).view(-1, 1)
    p = nn.Parameter(torch.zeros(6, 32, dtype=FP32, device=backend.device))
    exact = nn.Parameter(torch.zeros(6, 32, dtype=torch.float64))
    opt = backend.build(FlashAdamW, [p], lr=LR, weight_decay=0.0, eps=1e-16)
    reference = torch.optim.AdamW([exact], lr=LR, weight_decay=0.0, eps=1e-16)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        grad = torch.randn(6, 32, generator=generator, dtype=torch.float64) * sizes
        p.grad, exact.grad = grad.to(FP32).to(backend.device), grad
        opt.step()
        reference.step()
    found, expected = (x.detach().cpu().double().square().mean(dim=1).sqrt() for x in (p, exact))
    torch.testing.assert_close(found, expected, rtol=tolerance("S2 rms of the drift, relative"), atol=0)
