"""The loss in blocks: equal to torch's, its gradients too, and never more than a block of logits alive."""

from __future__ import annotations

import chunked_loss
import pytest
import torch
import torch.nn.functional as F
from chunked_loss import IGNORE, linear_cross_entropy


def case(dtype, vocab=50, ignored=3):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (12,), generator=generator)
    targets[:ignored] = IGNORE
    return hidden, weight, targets


@pytest.mark.parametrize("block", [1, 7, 25, 50, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_cross_entropy_of_the_logits(dtype, block):
    hidden, weight, targets = case(dtype)
    loss = linear_cross_entropy(hidden, weight, targets, block)
    (3 * loss).backward()
    ours = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    expected = F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORE)
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    # In bf16 the logits' gradient is rounded to bf16 on both ways; sums differ in their order.
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2e-2, 2e-3)
    for mine, theirs in zip(ours, (hidden.grad, weight.grad), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


def test_no_more_than_a_block_of_logits(monkeypatch):
    hidden, weight, targets = case(torch.float32)
    sizes = []
    plain = F.linear
    monkeypatch.setattr(chunked_loss.F, "linear", lambda h, w: sizes.append(len(w)) or plain(h, w))
    linear_cross_entropy(hidden, weight, targets, block=20).backward()
    assert sizes == [20, 20, 10, 20, 20, 10]


def test_the_heads_gradient_is_not_copied():
    """The gradient that backward makes is the one that the parameter gets: a copy would double its 1 GiB."""
    hidden, weight, targets = case(torch.bfloat16)
    addresses = []
    weight.register_hook(lambda grad: addresses.append(grad.data_ptr()))
    linear_cross_entropy(hidden, weight, targets).backward()
    assert addresses == [weight.grad.data_ptr()]


def test_autocast_computes_in_its_dtype():
    hidden, weight, targets = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
        expected = F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORE)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    loss.backward()
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("targets", [[IGNORE] * 12, [50] + [0] * 11, [-1] + [0] * 11])
def test_without_a_target_or_outside_the_vocabulary_the_loss_is_nan(targets):
    hidden, weight, _ = case(torch.float32)
    assert linear_cross_entropy(hidden, weight, torch.tensor(targets)).isnan()


def test_a_frozen_head():
    hidden, weight, targets = case(torch.float32)
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad is None
    assert hidden.grad is not None
