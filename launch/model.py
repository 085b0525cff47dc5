"""A decoder-only transformer in two shapes, GPT-2's and Llama's, written to be read: the model of the launch scripts.

Letters in the shape comments: B sequences in the batch, T tokens in a sequence, D width, H heads, K heads of keys and
values, V vocabulary.

The matrices are the parameters worth compressing, so they may be BF16; everything that is cheap and sensitive stays in
fp32: the residual stream, the norms' arithmetic, the rotation of the positions and the loss. There are no buffers and
no biases, so a model made on meta is complete once its parameters are filled (`init_weights`).
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model, and the precision it computes in.

    Arguments:
        vocab_size, context, layers, heads, width: the shape; `width` is a multiple of `heads`.
        fp32_residual: keep the hidden stream in fp32 between blocks, whatever the weights' dtype.
        matmul_dtype: the dtype of the matrix products; None means the weights' own. CPUs without BF16 instructions
            multiply BF16 matrices some 40 times slower than fp32 ones, so BF16 weights are best widened there.
        kind: `gpt2` has learned positions, layer norms and a GELU; `llama` has rotary positions, RMS norms and SwiGLU.
        kv_heads: heads of keys and values, of which `heads` is a multiple; None means `heads`.
        mlp_width: the MLP's inner width; None means 4 x width (gpt2), or 8/3 x width rounded up to 128 (llama).
        rope_base: the base of the rotary positions' frequencies.
        tied_head: the output head is the token embedding.
        activation_checkpointing: keep a block's input alone and compute its inside again in the backward pass.
    """

    vocab_size: int
    context: int
    layers: int
    heads: int
    width: int
    fp32_residual: bool = True
    matmul_dtype: torch.dtype | None = None
    kind: Literal["gpt2", "llama"] = "gpt2"
    kv_heads: int | None = None
    mlp_width: int | None = None
    rope_base: float = 500000.0
    tied_head: bool = True
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.kind == "llama" and self.head_width % 2:
            raise ValueError(f"width {self.width} over heads {self.heads} is odd, which rotary positions cannot take")

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.width // self.heads

    @property
    def inner_width(self) -> int:
        """Elements of the MLP's inside."""
        if self.mlp_width is not None:
            return self.mlp_width
        return 4 * self.width if self.kind == "gpt2" else 128 * math.ceil(8 * self.width / 3 / 128)

    def unseen(self) -> dict[str, Any]:
        """What makes another function of the same weights, and no tensor's shape shows."""
        rotary = {"rope_base": self.rope_base} if self.kind == "llama" else {}
        return {"heads": self.heads, "kv_heads": self.kv_heads or self.heads, **rotary}


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


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square in fp32 arithmetic, with a weight of any dtype."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., D) to (..., D) in fp32."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)


def norm(config: GPTConfig) -> nn.Module:
    """The norm of the model's kind."""
    return LayerNorm(config.width) if config.kind == "gpt2" else RMSNorm(config.width)


def rotation(config: GPTConfig, T: int, device: torch.device) -> Tensor:
    """Cosines and sines of the rotary positions, fp32 (2, T, D/H/2). Source: Su et al., arXiv 2104.09864."""
    exponents = torch.arange(0, config.head_width, 2, device=device, dtype=torch.float32) / config.head_width
    angles = torch.arange(T, device=device, dtype=torch.float32)[:, None] * config.rope_base**-exponents
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turns the pairs (first half, second half) of (B, H, T, D/H) by the angles of `rotation`; the dtype stays."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with several heads; several of them may share one head of keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads or config.heads
        self.head_width = config.head_width
        self.qkv = Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_width, config.matmul_dtype)
        self.out = Linear(config.width, config.width, config.matmul_dtype)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        B, T, D = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_width).transpose(1, 2)  # (B, H + 2K, T, D/H)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads < self.heads)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.inner_width, config.matmul_dtype)
        self.down = Linear(config.inner_width, config.width, config.matmul_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """An MLP whose inside is multiplied by a gate. Source: Shazeer, arXiv 2002.05202."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.inner_width, config.matmul_dtype)
        self.up = Linear(config.width, config.inner_width, config.matmul_dtype)
        self.down = Linear(config.inner_width, config.width, config.matmul_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then an MLP, each behind a norm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation_checkpointing = config.activation_checkpointing
        self.attention_norm = norm(config)
        self.attention = Attention(config)
        self.mlp_norm = norm(config)
        self.mlp = MLP(config) if config.kind == "gpt2" else SwiGLU(config)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Maps (B, T, D) to (B, T, D) in the dtype of x: an fp32 stream plus a BF16 branch stays fp32."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            # Inside the module, so that what FSDP2 does around a block stays outside of what is computed twice.
            return checkpoint(self._both, x, rope, use_reentrant=False, preserve_rng_state=False)
        return self._both(x, rope)

    def _both(self, x: Tensor, rope: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope).to(x.dtype)
        return x + self.mlp(self.mlp_norm(x)).to(x.dtype)


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width) if config.kind == "gpt2" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = norm(config)
        self.head = None if config.tied_head else Linear(config.width, config.vocab_size, config.matmul_dtype)
        self._finish = finish
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: normal with std 0.02, smaller where a branch joins the stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=initial_std(name, self.config))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or losses where there are targets (inside forward, where FSDP2 has the head's weight gathered).

        Args:
            tokens: ids (B, T).
            targets: the ids that follow, (B, T).

        Returns:
            Logits (B, T, V), or each sequence's mean cross-entropy (B,); fp32.
        """
        T = tokens.shape[1]
        if T > self.config.context:
            raise ValueError(f"{T} tokens do not fit a context of {self.config.context}")
        x = self.token_embedding(tokens)  # (B, T, D)
        if self.config.fp32_residual:
            x = x.float()
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[:T]
        rope = rotation(self.config, T, x.device) if self.config.kind == "llama" else None
        for block in self.blocks:
            x = block(x, rope)
        weight = self.token_embedding.weight if self.head is None else self.head.weight
        return self._finish(self.final_norm(x), weight, targets, self.config.matmul_dtype)

    def compile_parts(self) -> None:
        """Has torch.compile compile the blocks and what follows them, each for itself, as FSDP2 needs it."""
        for block in self.blocks:
            block.compile()
        self._finish = torch.compile(finish)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, a scalar in fp32, of predicting `targets` (B, T) from `tokens` (B, T)."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def finish(x: Tensor, weight: Tensor, targets: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """From the last norm's output (B, T, D) and the head's weight (V, D) to logits or losses, as GPT.forward gives."""
    logits = matmul(x, weight, dtype).float()
    if targets is None:
        return logits
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(dim=1)


def initial_std(name: str, config: GPTConfig) -> float:
    """The standard deviation that a matrix starts with, by its name."""
    joins_the_stream = name.endswith(("out.weight", "down.weight"))
    return 0.02 / math.sqrt(2 * config.layers) if joins_the_stream else 0.02


def first_weight(name: str, shape: torch.Size, config: GPTConfig, seed: int) -> Tensor:
    """A parameter's first weights by the seed, its name and shape; fp32 of `shape`, on the CPU."""
    if len(shape) == 1:
        return torch.ones(shape)
    # A checksum of both: a generator on a CPU takes no more than 32 bits of what it is seeded with.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(shape).normal_(std=initial_std(name, config), generator=generator)


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Fills the weights with numbers that depend on the seed and each parameter's name and shape alone.

    So they are the same on any device, for any number of ranks and under any sharding. A rank makes one whole tensor at
    a time and keeps its own part; nothing is communicated.
    """
    for name, parameter in model.named_parameters():
        whole = first_weight(name, parameter.shape, model.config, seed).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = whole.to(parameter.device_mesh.device_type)
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups for an optimizer: matrices decay, norm weights and biases do not."""
    # A parameter that DeepSpeed keeps in parts is flat itself, and knows its shape.
    dimensions = {p: len(getattr(p, "ds_shape", p.shape)) for p in model.parameters()}
    matrices = [p for p, count in dimensions.items() if count >= 2]
    vectors = [p for p, count in dimensions.items() if count < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
