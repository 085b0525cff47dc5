"""A Llama-shaped model in plain torch, as lean as Hugging Face's: bf16 stream, SDPA, fused norm, checkpointed layers.

Letters in the shape comments: B sequences, T tokens, D width, H heads, K heads of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launch.chunked_loss import linear_cross_entropy


@dataclass(frozen=True)
class Shape:
    """The numbers of a model."""

    vocab: int
    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int


LLAMA_3_1_8B = Shape(vocab=128256, width=4096, mlp=14336, layers=32, heads=32, kv_heads=8)
TINY = Shape(vocab=512, width=64, mlp=128, layers=3, heads=4, kv_heads=2)


class Norm(nn.Module):
    """RMS norm, in fp32 inside torch's kernel, in the dtype of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D) to (..., D)."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-5)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        kv = shape.kv_heads * self.head_width
        self.norm1, self.norm2 = Norm(shape.width), Norm(shape.width)
        self.q, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.width, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.width, shape.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        B, T, D = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(B, T, -1, self.head_width).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, rope), rotate(k, rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # (B, H, T, D/H)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary positions on (B, H, T, D/H), in the dtype of x."""
    cos, sin = rope.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """The model; its forward returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Random weights on the parameters' device: normal with std 0.02, norms 1."""
        for p in self.parameters():
            if p.dim() == 1:
                p.fill_(1)
            else:
                p.normal_(std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of the next token; tokens (B, T + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rope = self.rotation(inputs.shape[1], x.device)
        for layer in self.layers:
            x = checkpoint(layer, x, rope, use_reentrant=False, preserve_rng_state=False)
        return linear_cross_entropy(self.norm(x).flatten(0, 1), self.head.weight, targets.flatten())

    def rotation(self, T: int, device: torch.device) -> Tensor:
        """Cosines and sines, fp32 (2, T, D/H)."""
        width = self.shape.width // self.shape.heads
        frequencies = 500000.0 ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
        angles = torch.arange(T, device=device, dtype=torch.float32)[:, None] * frequencies
        return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2)
