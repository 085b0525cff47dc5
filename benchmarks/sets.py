"""The parameter sets a step is measured on: a name, and the shapes behind it.

Each set stands for one way in which a step can be slow: `flat1b` and `llama1.4b` are bound by memory traffic,
`gpt2_124m` and the ResNets mix few large tensors with many small ones, `tiny2000` is nothing but overhead.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

Shape = tuple[int, ...]


def flat1b() -> list[Shape]:
    """One matrix of 2^30 elements."""
    return [(32768, 32768)]


def llama(layers: int = 4) -> list[Shape]:
    """The embedding and the first `layers` layers of Llama-3.1-8B."""
    hidden, kv, ffn = 4096, 1024, 14336
    layer = [
        *[(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)],  # q, k, v, output
        *[(ffn, hidden), (ffn, hidden), (hidden, ffn)],  # gate, up, down
        *[(hidden,), (hidden,)],  # the two norms
    ]
    return [(128256, hidden), *layer * layers]


def gpt2() -> list[Shape]:
    """GPT-2 124M with a tied head: 148 tensors, 98 of them vectors."""
    d = 768
    layer = [
        *[(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)],  # norm, attention in, attention out
        *[(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)],  # norm, feed-forward in, out
    ]
    return [(50257, d), (1024, d), *layer * 12, (d,), (d,)]


def resnet(blocks: tuple[int, int, int, int]) -> list[Shape]:
    """A bottleneck ResNet for ImageNet, `blocks` bottlenecks in each of its four stages."""

    def conv_bn(out: int, into: int, kernel: int) -> list[Shape]:
        return [(out, into, kernel, kernel), (out,), (out,)]

    shapes = conv_bn(64, 3, 7)
    into = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            shapes += conv_bn(width, into, 1) + conv_bn(width, width, 3) + conv_bn(4 * width, width, 1)
            if block == 0:  # the shortcut changes the number of channels
                shapes += conv_bn(4 * width, into, 1)
            into = 4 * width
    return [*shapes, (1000, into), (1000,)]


def smoke() -> list[Shape]:
    """A few thousand elements in odd shapes, for a run of a second on any machine."""
    return [(33, 50), (64, 64), (7, 129), (5, 3, 3, 3), (100,), (1, 1)]


SETS: dict[str, Callable[[], list[Shape]]] = {
    "flat1b": flat1b,
    "llama1.4b": llama,
    "gpt2_124m": gpt2,
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "tiny2000": lambda: [(64, 64)] * 2000,
    "smoke": smoke,
}


def numel(name: str) -> int:
    """The number of parameters of a set."""
    return sum(prod(shape) for shape in SETS[name]())
