"""Draws the two figures of docs/how_it_works.md, with the functions that the optimizers are checked against.

python docs/figures.py [FOLDER]        # by default docs/figures; needs matplotlib
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")  # draws into a file, also where there is no display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from flashdist.numerics.companding import (
    GROUP,
    MOMENTUM_CODES,
    decode_momentum,
    decode_variance,
    dither_offsets,
    encode_variance,
)
from flashdist.numerics.groups import group_layout
from flashdist.numerics.weight_split import join, split

HI, LO, DROPPED, GREY = "#3b6fb5", "#e08a2e", "#d9d9d9", "#555555"
SCALE = "#4c9a5b"


def bits_of(axes: Axes, x: float) -> None:
    """The 32 bits of a master weight: what the model holds, what the correction holds, what is rounded away."""
    pattern = int(torch.tensor(x).view(torch.int32)) & 0xFFFFFFFF
    for i in range(32):
        colour = HI if i < 16 else LO if i < 24 else DROPPED
        axes.add_patch(Rectangle((i, 0), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
        text = "black" if i >= 24 else "white"
        axes.text(i + 0.5, 0.47, str((pattern >> (31 - i)) & 1), ha="center", va="center", color=text, fontsize=9)
    for start, stop, label, colour in (
        (0, 16, "weight in the model, bf16: 2 bytes", HI),
        (16, 24, "correction, int8: 1 byte", LO),
        (24, 32, "rounded away", GREY),
    ):
        axes.text((start + stop) / 2, 1.25, label, ha="center", va="bottom", color=colour, fontsize=10)
    for start, stop, label in ((0, 1, "sign"), (1, 9, "exponent"), (9, 32, "fraction")):
        axes.annotate("", (start + 0.08, -0.3), (stop - 0.08, -0.3), arrowprops={"arrowstyle": "-", "color": GREY})
        axes.text((start + stop) / 2, -0.45, label, ha="center", va="top", color=GREY, fontsize=9)
    hi, lo = split(torch.tensor(x), torch.bfloat16, torch.int8)
    # Only of a number whose bits 8 and 16 from the right are 0 are the three parts the bits as they stand.
    assert int(hi.view(torch.int16)) == pattern >> 16
    assert int(lo) == (pattern >> 8) & 0xFF
    sum_ = f"{float(hi)} in the model, {int(lo):+d} steps of 1/256 bf16 ULP: {float(join(hi, lo)):.8f}"
    axes.text(16, -1.35, sum_, ha="center", va="top", fontsize=10)
    axes.set_xlim(0, 32)
    axes.set_ylim(-2.2, 2.1)
    axes.axis("off")
    axes.set_title(f"An fp32 master weight of {x}", fontsize=11)


def small_updates(axes: Axes) -> None:
    """A weight of 0.02 at lr 1e-5: 200 steps of lr times (0.3 + noise), summed up in three ways."""
    steps, start = 200, 0.02
    updates = 1e-5 * (0.3 + 0.3 * torch.randn(steps, generator=torch.Generator().manual_seed(0)))
    exact, hi24, lo24, bf16 = [torch.tensor([start])], *split(
        torch.tensor([start]), torch.bfloat16, torch.int8
    ), torch.tensor([start]).bfloat16()  # fmt: skip
    joined, alone, model = [join(hi24, lo24)], [bf16.float()], [hi24.float()]
    for update in updates:
        exact.append(exact[-1] + update)
        hi24, lo24 = split(join(hi24, lo24) + update, torch.bfloat16, torch.int8)
        joined.append(join(hi24, lo24))
        model.append(hi24.float())
        bf16 = (bf16.float() + update).bfloat16()
        alone.append(bf16.float())
    for values, label, style in (
        (exact, "fp32", {"color": "black", "linewidth": 3.5, "alpha": 0.25}),
        (joined, "weight + correction", {"color": LO, "linewidth": 1.6}),
        (model, "the weight in the model", {"color": HI, "linewidth": 1.6}),
        (alone, "bf16 without a correction", {"color": "#b03a48", "linewidth": 1.6, "linestyle": "--"}),
    ):
        axes.plot(torch.cat(values).numpy(), label=label, **style)
    axes.set_xlabel("steps")
    axes.set_title("A weight of 0.02, updates of about 3e-6", fontsize=11)
    axes.legend(frameon=False, fontsize=9)


def group_picture(axes: Axes) -> None:
    """A matrix of 4 x 80: three groups to a row, the last one of 16; one scale each."""
    rows, columns = 4, 80
    layout = group_layout((rows, columns))
    shades = ["#3b6fb5", "#7ba3d6", "#b4cbe8"]
    for r in range(rows):
        for g in range(layout.groups_per_row):
            width = min(GROUP, columns - g * GROUP)
            place = (g * GROUP, rows - 1 - r)
            axes.add_patch(Rectangle(place, width, 0.8, facecolor=shades[g], edgecolor="white"))
            text = f"{width} codes"
            colour = "white" if g == 0 else "black"
            axes.text(place[0] + width / 2, place[1] + 0.4, text, ha="center", va="center", color=colour, fontsize=8)
            axes.add_patch(Rectangle((columns + 6 + 5 * g, place[1]), 4, 0.8, facecolor=SCALE, edgecolor="white"))
    axes.text(columns / 2, rows + 0.1, f"codes [{rows}, {columns}]", ha="center", va="bottom", fontsize=9)
    shape = list(layout.scale_shape)
    axes.text(columns + 13, rows + 0.1, f"scales {shape}", ha="center", va="bottom", fontsize=9, color=SCALE)
    axes.plot((-2, columns + 22), (1.9, 1.9), color="black", linestyle=":", linewidth=1.3)
    axes.text(-3, 2.9, "rank 0", ha="right", va="center", fontsize=9)
    axes.text(-3, 0.9, "rank 1", ha="right", va="center", fontsize=9)
    axes.set_xlim(-16, columns + 24)
    axes.set_ylim(-0.4, rows + 0.9)
    axes.axis("off")
    axes.set_title("Groups of 32 lie inside rows", fontsize=11)


def code_axis(axes: Axes) -> None:
    """How far apart neighbouring codes are, relative to the value they stand for: small values get fine steps."""
    codes = torch.arange(1, MOMENTUM_CODES + 1, dtype=torch.int8)
    momentum = decode_momentum(codes.unsqueeze(-1), torch.ones(MOMENTUM_CODES, dtype=torch.bfloat16)).squeeze(-1)
    codes = torch.arange(1, 256, dtype=torch.uint8)
    variance = decode_variance(codes.unsqueeze(-1), torch.ones(255)).squeeze(-1)
    linear8 = torch.arange(1, 128) / 127
    for values, label, colour, style in (
        (linear8, "linear int8", GREY, ":"),
        (momentum, "momentum, int8", HI, "-"),
        (variance, "variance, uint8 of its root", LO, "-"),
    ):
        middle, apart = (values[1:] + values[:-1]) / 2, values.diff()
        axes.plot(middle.numpy(), (apart / middle / 2).numpy() * 100, color=colour, linestyle=style, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("value / largest of its group")
    axes.set_ylabel("largest rounding error, %")
    axes.set_title("Bent code axes", fontsize=11)
    axes.legend(frameon=False, fontsize=9)


def dither_picture(axes: Axes) -> None:
    """sqrt(v) where gradients fall tenfold after a while, beside a steady neighbour; beta2 0.999."""
    beta2, steps, falls_at = 0.999, 9000, 1000
    gradient = torch.full((GROUP,), 0.3)
    gradient[0] = 1.0
    falling = gradient.clone()
    falling[1:] = 0.03
    exact = gradient.square()
    coded = {"nearest rounding": encode_variance(exact), "with the dither": encode_variance(exact)}
    shown: dict[str, list[float]] = {name: [] for name in ("exact", *coded)}
    for t in range(1, steps + 1):
        squared = (gradient if t < falls_at else falling).square()
        exact = beta2 * exact + (1 - beta2) * squared
        for name, kept in coded.items():
            v = beta2 * decode_variance(*kept) + (1 - beta2) * squared
            coded[name] = encode_variance(v, dither_offsets(t) if name == "with the dither" else 0.5)
        if t % 20 == 0:
            shown["exact"].append(float(exact[1:].sqrt().mean()))
            for name, kept in coded.items():
                shown[name].append(float(decode_variance(*kept)[1:].sqrt().mean()))
    for (name, values), (colour, width) in zip(
        shown.items(), (("#cccccc", 5), ("#b03a48", 1.6), (HI, 1.6)), strict=True
    ):
        axes.plot(range(20, steps + 1, 20), values, label=name, color=colour, linewidth=width)
    axes.set_yscale("log")
    axes.set_yticks([0.03, 0.1, 0.3], ["0.03", "0.1", "0.3"])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("steps")
    axes.set_title("sqrt(v) when gradients fall tenfold", fontsize=11)
    axes.legend(frameon=False, fontsize=9)


def save(figure: plt.Figure, path: Path) -> None:
    """Writes a small PNG."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


def main(folder: Path) -> None:
    """Draws both into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.2), width_ratios=(1.25, 1), layout="constrained")
    bits_of(left, 0.7)
    small_updates(right)
    save(figure, folder / "split.png")
    figure, panels = plt.subplots(1, 3, figsize=(13, 3.4), width_ratios=(1.25, 1, 1), layout="constrained")
    for draw, axes in zip((group_picture, code_axis, dither_picture), panels, strict=True):
        draw(axes)
    save(figure, folder / "states.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "figures")
