"""Models and questions that the tests of cast_model share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class LanguageModel(nn.Module):
    """Embedding, one block and a head; the head may be tied."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": nn.Linear(8, 8)})])
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block["mlp"](block["norm"](x))
        return self.lm_head(self.norm(x))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}


def kept(model: nn.Module) -> set[str]:
    return {name for name, dtype in dtypes(model).items() if dtype == FP32}


def hooks(model: nn.Module) -> dict[str, tuple[int, int]]:
    counts = {n: (len(m._forward_pre_hooks), len(m._forward_hooks)) for n, m in model.named_modules()}
    return {name: count for name, count in counts.items() if count != (0, 0)}


def snapshot(model: nn.Module) -> list[tuple[int, int, torch.dtype]]:
    tensors = [*model.parameters(), *model.buffers()]
    return [(id(t), t.data_ptr(), t.dtype) for t in tensors] + [(0, len(hooks(model)), BF16)]
