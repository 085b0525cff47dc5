"""Cross-entropy straight from the hidden states, in blocks of the vocabulary: the logits never exist as a whole.

A Llama-3.1 head on 4096 tokens makes logits of 2 GB in fp32, and their gradient again. Here a block of them is made,
used and dropped, in forward for the normaliser and once more in backward for the gradients: one more product with the
head, which is 1 to 2 % of a training step, for 4 GB of memory.

The blocks cut the vocabulary and not the tokens. So each row of the head's gradient is computed by one product, and is
rounded once, as without blocks; the gradient of the hidden states is summed over the blocks in fp32.

Letters in the shape comments: N tokens, D width, V vocabulary, K tokens of the vocabulary in a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
BLOCK = 8192


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, block: int = BLOCK) -> Tensor:
    """Mean cross-entropy of ``softmax(hidden @ weight.T)`` over the tokens that have a target.

    Args:
        hidden: (N, D), the input of the head.
        weight: (V, D), the head.
        targets: int64 (N,); IGNORE for tokens without a target.
        block: logits of this many vocabulary entries exist at a time.

    Returns:
        fp32 0-d. NaN where no token has a target, or one has a target outside the vocabulary.

    Under autocast it computes in autocast's dtype, like a linear layer; logits are rounded to it, then summed in fp32.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(hidden.to(dtype), weight.to(dtype), targets, block)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, block: int) -> Tensor:
        normaliser = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        chosen = hidden.new_full((len(hidden),), torch.nan, dtype=torch.float32)
        for start in range(0, len(weight), block):
            logits = _logits(hidden, weight, start, block)
            normaliser = torch.logaddexp(normaliser, logits.logsumexp(dim=1))
            inside, place = _place(targets, start, logits.shape[1])
            chosen = torch.where(inside, logits.gather(1, place).squeeze(1), chosen)
        valid = targets != IGNORE
        count = valid.sum()
        ctx.block = block
        ctx.save_for_backward(hidden, weight, targets, normaliser, count)
        return torch.where(valid, normaliser - chosen, 0.0).sum() / count

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets, normaliser, count = ctx.saved_tensors
        scale = torch.where(targets != IGNORE, grad_loss / count, 0.0).unsqueeze(1)  # (N, 1)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(weight), ctx.block):
            part = _logits(hidden, weight, start, ctx.block)
            inside, place = _place(targets, start, part.shape[1])
            # softmax - one-hot, scaled; in place, since this block is the largest thing alive.
            part.sub_(normaliser.unsqueeze(1)).exp_()
            part.scatter_add_(1, place, -inside.unsqueeze(1).to(part.dtype))
            grad_logits = part.mul_(scale).to(hidden.dtype)
            del part
            if grad_weight is not None:
                torch.mm(grad_logits.t(), hidden, out=grad_weight[start : start + ctx.block])
            grad_hidden += grad_logits @ weight[start : start + ctx.block]
            del grad_logits
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


def _logits(hidden: Tensor, weight: Tensor, start: int, block: int) -> Tensor:
    """fp32 (N, K), rounded to the weight's dtype on the way as a head's output is; a new tensor, free to be changed."""
    logits = F.linear(hidden, weight[start : start + block])
    return logits.float() if logits.dtype != torch.float32 else logits


def _place(targets: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in a block (N,), and their columns there (N, 1); some column for the others."""
    place = targets - start
    inside = (place >= 0) & (place < size)
    return inside, place.clamp(0, size - 1).unsqueeze(1)
