"""A small residual network on scikit-learn's digits: accuracy with torch's optimizers in fp32 and with ours.

Both arms of a seed have the same split, initial weights and batches. Convolutions multiply in fp32 in both, so that
what differs is the optimizer, with bf16 weights and gradients in ours.

Usage: python -m benchmarks.quality.images [--out FILE.json] [--seeds 5] [--epochs 12]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.quality import results
from flashdist import FlashAdamW, FlashSGD, cast_model

HELD_OUT = 450  # of 1,797 images
BATCH = 64
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
ADAMW = {"lr": 2e-3, "weight_decay": 0.05}
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[tuple[str, str], Build] = {
    ("SGD with momentum", "torch fp32"): lambda params: torch.optim.SGD(params, **SGD),
    ("SGD with momentum", "flashdist"): lambda params: FlashSGD(params, **SGD),
    ("AdamW", "torch fp32"): lambda params: torch.optim.AdamW(params, **ADAMW),
    ("AdamW", "flashdist"): lambda params: FlashAdamW(params, **ADAMW),
}


class Conv(nn.Conv2d):
    """A convolution in its input's dtype, whatever its weight's is."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, size: int = 3) -> None:
        super().__init__(inputs, outputs, size, stride, size // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        return F.conv2d(x, self.weight.to(x.dtype), None, self.stride, self.padding)


class Block(nn.Module):
    """A residual block of two convolutions. Source: He et al., arXiv 1512.03385."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = Conv(inputs, outputs, stride), Conv(outputs, outputs)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short = nn.Identity() if stride == 1 and inputs == outputs else Conv(inputs, outputs, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """A stem and three blocks for images of 8 x 8; 77,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = Conv(1, 16), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 8, 8) -> logits (N, 10)."""
        x = self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3))
        return F.linear(x, self.head.weight.to(x.dtype), self.head.bias.to(x.dtype))


def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8), standardised, and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None]
    return (x - x.mean()) / x.std(), torch.tensor(data.target, dtype=torch.int64)


def accuracy(build: Build, bf16: bool, seed: int, epochs: int, x: Tensor, y: Tensor) -> float:
    """Train one network; per cent of the held-out images that it names rightly."""
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    model = ResNet()
    if bf16:
        cast_model(model)
    optimizer = build(list(model.parameters()))
    base = [group["lr"] for group in optimizer.param_groups]
    batches, t = len(train) // BATCH, 0
    for _ in range(epochs):
        shuffled = train[torch.randperm(len(train))]
        for i in range(batches):
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * t / (epochs * batches)))
            rows = shuffled[i * BATCH : (i + 1) * BATCH]
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            t += 1
    model.eval()
    with torch.no_grad():
        return 100 * float((model(x[test]).argmax(1) == y[test]).float().mean())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=results.default_path("images"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x, y = digits()
    result = {**results.head("images"), "epochs": args.epochs, "rows": []}
    for (optimizer, arm), build in OPTIMIZERS.items():
        found = [accuracy(build, arm == "flashdist", seed, args.epochs, x, y) for seed in range(args.seeds)]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        row = {
            "optimizer": optimizer,
            "arm": arm,
            "accuracies": found,
            "mean": statistics.mean(found),
            "spread": spread,
        }
        result["rows"].append(row)
        print(row, flush=True)
        results.write(result, args.out)


if __name__ == "__main__":
    main()
