"""The one table of tolerances: a quantity, its bound, and the reason why the bound is what it is.

A test asks for a bound by name (:func:`tolerance`); no test has a number of its own for how wrong a result may be.
A row that needs loosening is a finding first. Bounds that the design fixes say where.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    bound: float
    reason: str


TABLE: dict[str, Row] = {
    # Weight split, |join(split(x)) - x| in ULPs of the 16-bit weight.
    "split bf16 int8, ULP": Row(1 / 512, "design 1.1: half a step of a grid with 256 steps a ULP"),
    "split bf16 int16, ULP": Row(0.0, "design 1.1: bf16 is a prefix of fp32, all of its bits are kept"),
    "split fp16 int8, ULP": Row(1 / 512, "design 1.1: half a step of a grid with 256 steps a ULP"),
    "split fp16 int16, ULP": Row(1 / 131072, "design 1.1: half a step of a grid with 65,536 steps a ULP"),
    # Companding.
    "code tie, codes": Row(
        1e-4,
        "a position this near to a rounding border may fall either way: 255 times a few fp32 roundings",
    ),
    "decoded momentum, relative": Row(2.5e-7, "division and product in fp32: two roundings of 2^-24 each, one spare"),
    "decoded variance, relative": Row(5e-7, "1/255, its product with s, with the code, squared: about seven of 2^-24"),
    "variance scale, relative": Row(2.5e-7, "one fp32 square root, which GPUs may round by two ULPs"),
    "requantized momentum, of the group's peak": Row(
        1 / 127, "half a code of 127 times the slope of the inverse at the peak, 2, and the rounding of the bf16 scale"
    ),
    "requantized root variance, of the group's peak": Row(0.5 / 255 + 1e-6, "half a code of 255, nearest rounding"),
    "dither mean, over 4,096 steps": Row(1e-3, "a Weyl sequence of n points is even to about log(n)/n"),
    # Update rules against torch.optim and the papers' formulas; relative to the largest element of the tensor.
    "rule, 100 fp32 steps": Row(1e-6, "each step rounds a weight by 2^-24 of it; 100 such errors add like a walk"),
    "rule, one fp64 step": Row(1e-14, "the formula itself: nothing but the order of fp64 operations differs"),
    # Anchors: what the design promises for quantized states. Design 1.2 and cases 25 to 27.
    "S1 largest step, lr": Row(3.0, "case 25: a masked neighbour's step; torch takes 1, the published scheme 95,082"),
    "S2 rms of the drift, relative": Row(0.05, "case 25: gradients of 1e-4 to 1e-9; the published scales drift"),
    "S3 rms of the drift, relative": Row(0.05, "case 25: gradients up to 1e6; the published scales overflow at 1e5"),
    "S4 root variance, relative": Row(0.03, "case 25: gradients falling tenfold; bf16 scales end 5.5x too large"),
    "S5 root variance, relative": Row(
        0.05, "case 25: falling and rising beside a steady one; nearest rounding: 0.4, 12"
    ),
    "S5 root variance after a spike, relative": Row(0.20, "case 25: the neighbours of one spike of 1e4; nearest 0.34"),
    "case 26 equal scales, lr": Row(0.03, "case 26: what a step may exceed exact's by after gradients stop"),
    "case 26 lognormal scales, lr": Row(0.6, "case 26: the same, where neighbours differ by e"),
    "case 27 decay, relative": Row(1e-4, "case 27: w = 1, lr * wd = 1e-6, 10,000 steps"),
    # The Triton kernel against the eager backend, one step from the same state.
    # Interpreted: numpy's IEEE arithmetic; torch's own fp32 square root on a CPU is off by an ULP at one number in six.
    "interpreted kernel, momentum codes": Row(0.0, "the same IEEE operations in the same order"),
    "interpreted kernel, variance codes": Row(1.0, "the root's ULP moves a position over a rounding border"),
    "interpreted kernel, momentum scale, relative": Row(0.0, "the same IEEE operations in the same order"),
    "interpreted kernel, variance scale, relative": Row(1.2e-7, "one fp32 ULP of the square root"),
    "interpreted kernel, fp32 moment, of the largest": Row(0.0, "the same IEEE operations in the same order"),
    "interpreted kernel, weight, grid steps": Row(1.0, "the update's ULP moves a weight over a rounding border"),
    "interpreted kernel, weight, of the largest": Row(4e-9, "two ULPs of an update of 0.01, beside weights of 0.5"),
    # Compiled: products and sums are fused, divisions good to 2 ULP, square roots to 1.
    "compiled kernel, momentum codes": Row(1.0, "a position near a rounding border, or the scale's own rounding"),
    "compiled kernel, variance codes": Row(1.0, "a position near a rounding border"),
    "compiled kernel, momentum scale, relative": Row(2.0**-7, "one bf16 ULP: the peak lies near a rounding border"),
    "compiled kernel, variance scale, relative": Row(3.6e-7, "three fp32 ULPs: fused sum, root, torch's root"),
    "compiled kernel, fp32 moment, of the largest": Row(2.4e-7, "two fp32 ULPs, of moment or gradient: fused products"),
    "compiled kernel, weight, grid steps": Row(2.0, "fused sums and a rounding border of the split"),
    "compiled kernel, weight, of the largest": Row(2.4e-7, "two fp32 ULPs of weight or update: fused sums that cancel"),
    "compiled kernel, Lion's signs, share": Row(
        2e-5, "a sum of two terms of about 1 is below an ULP of them (1e-7) at about one element in 10^6; measured 1e-5"
    ),
    "compiled kernel, drift over 200 steps, lr": Row(
        0.3, "rounding borders crossed by an ULP: 0.10 where the eager backend runs with betas one ULP aside"
    ),
    "averaged gradients, training loss, relative": Row(
        1e-3,
        "averaged gradients are rounded to bf16 (2^-9 each) once more, in another order; measured 2.4e-4 in 30 steps",
    ),
    "sum of squares, relative": Row(
        1e-6, "17 squares a lane, then trees over lanes and programs: 30 roundings of 2^-24"
    ),
}


def tolerance(quantity: str) -> float:
    """The bound of one row of the table."""
    return TABLE[quantity].bound
