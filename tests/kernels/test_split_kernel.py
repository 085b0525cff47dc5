"""The device twins of split and join against numerics.weight_split, NaNs of every make included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flashdist.kernels import triton_numerics as device
from flashdist.numerics import weight_split
from tests.support.backends import BackendUnderTest

BLOCK = 1024
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def split_and_join(x, hi, lo, joined, WEIGHT: tl.constexpr, LO_BITS: tl.constexpr, FAST: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    new_hi, new_lo, _ = device.split(tl.load(x + at), WEIGHT, LO_BITS, FAST)
    tl.store(hi + at, new_hi)
    tl.store(lo + at, new_lo)
    tl.store(joined + at, device.join(new_hi, new_lo, 1, WEIGHT, LO_BITS, FAST))


def patterns() -> Tensor:
    """Every upper half of an fp32 number with telling lower halves; of the NaNs only quiet ones."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = torch.tensor([0x0000, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFF])
    bits = (upper[:, None] | lower).flatten()
    magnitude = bits & 0x7FFFFFFF
    bits = bits[(magnitude <= 0x7F800000) | (magnitude >= 0x7FC00000)]
    bits = torch.cat([bits, bits.new_zeros(-len(bits) % BLOCK)])
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("lo_dtype", [torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_split_and_join(triton_backend: BackendUnderTest, dtype: torch.dtype, lo_dtype: torch.dtype):
    x = patterns()
    if triton_backend.device.type == "cpu":
        x = torch.cat([x.view(-1, BLOCK)[::16].flatten(), x[-BLOCK:]])  # the interpreter is slow: a sixteenth, the NaNs
    on = triton_backend.device
    out: Any = [torch.empty(x.shape, dtype=t, device=on) for t in (torch.int16, lo_dtype, torch.float32)]
    split_and_join[(len(x) // BLOCK,)](
        x.to(on), *out, WEIGHT=TYPES[dtype], LO_BITS=weight_split.correction_bits(lo_dtype), FAST=on.type == "cuda"
    )
    hi, lo, joined = (t.cpu() for t in out)
    expected_hi, expected_lo = weight_split.split(x, dtype, lo_dtype)
    # A NaN keeps its sign in the kernel.
    nan = x.isnan()
    hi = torch.where(nan, hi & 0x7FFF, hi)
    torch.testing.assert_close(hi, expected_hi.view(torch.int16), rtol=0, atol=0)
    torch.testing.assert_close(lo, expected_lo, rtol=0, atol=0)
    expected = weight_split.join(expected_hi, expected_lo)
    torch.testing.assert_close(joined, expected, rtol=0, atol=0, equal_nan=True)
