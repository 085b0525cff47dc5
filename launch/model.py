"""A small GPT, written to be read: the model behind the demo and the pretraining script.

Letters in the shape comments: B sequences in the batch, T tokens in a sequence, D width, H heads, V vocabulary.

The matrices are the parameters worth compressing, so they may be BF16; everything that is cheap and sensitive stays in
fp32: the residual stream, the layer norms' arithmetic and the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model, and the precision it computes in.

    Arguments:
        vocab_size, context, layers, heads, width: the shape; `width` is a multiple of `heads`.
        fp32_residual: keep the hidden stream in fp32 between blocks, whatever the weights' dtype.
        matmul_dtype: the dtype of the matrix products; None means the weights' own. CPUs without BF16 instructions
            multiply BF16 matrices some 40 times slower than fp32 ones, so BF16 weights are best widened there.
    """

    vocab_size: int
    context: int
    layers: int
    heads: int
    width: int
    fp32_residual: bool = True
    matmul_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


GPT2_124M = GPTConfig(vocab_size=50257, context=1024, layers=12, heads=12, width=768)


class Linear(nn.Linear):
    """A linear layer that brings its input to the dtype of the product, instead of refusing a mixture."""

    def __init__(self, inputs: int, outputs: int, matmul_dtype: torch.dtype | None) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.matmul_dtype = matmul_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        return matmul(x, self.weight, self.matmul_dtype)


def matmul(x: Tensor, weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x @ weight.T in `dtype` (None: the weight's own); each gradient comes back in its input's dtype."""
    dtype = dtype or weight.dtype
    return F.linear(x.to(dtype), weight.to(dtype))


class LayerNorm(nn.LayerNorm):
    """A layer norm in fp32 arithmetic, with a weight of any dtype and no bias."""

    def __init__(self, width: int) -> None:
        super().__init__(width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D) to (..., D) in fp32."""
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), None, self.eps)


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width, config.matmul_dtype)
        self.out = Linear(config.width, config.width, config.matmul_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        B, T, D = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D/H)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """Two linear layers, the inner one four times as wide."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, 4 * config.width, config.matmul_dtype)
        self.down = Linear(4 * config.width, config.width, config.matmul_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then an MLP, each behind a norm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D) in the dtype of x: an fp32 stream plus a BF16 branch stays fp32."""
        x = x + self.attention(self.attention_norm(x)).to(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).to(x.dtype)


class GPT(nn.Module):
    """A decoder-only transformer whose output head is its token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = LayerNorm(config.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal with std 0.02, smaller where a branch joins the stream."""
        branch_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=branch_std if name.endswith(("out.weight", "down.weight")) else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps token ids (B, T) to logits (B, T, V) in fp32."""
        T = tokens.shape[1]
        if T > self.config.context:
            raise ValueError(f"{T} tokens do not fit a context of {self.config.context}")
        x = self.token_embedding(tokens) + self.position_embedding.weight[:T]  # (B, T, D)
        if self.config.fp32_residual:
            x = x.float()
        for block in self.blocks:
            x = block(x)
        logits = matmul(self.final_norm(x), self.token_embedding.weight, self.config.matmul_dtype)
        return logits.float()

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, a scalar in fp32, of predicting `targets` (B, T) from `tokens` (B, T)."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups for an optimizer: matrices decay, norm weights and biases do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
