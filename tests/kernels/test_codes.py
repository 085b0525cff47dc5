"""Every code of the 8-bit states goes through decode and encode of a whole step and comes back as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flashdist import FlashAdamW, FlashLion, FlashOptimizer
from tests.support.backends import BF16, BackendUnderTest, assert_same_bits, bits

# Halving these is exact. Squares of the smallest variance code stay normal numbers: below, they count as 0.
MOMENTUM_SCALES = [2.0**-100, 0.296875, 1.0, 2.0**100]
VARIANCE_SCALES = [2.0**-50, 0.3, 1.0, 2.0**60]


def every_code(first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Groups of 32 that hold 31 codes each, and the peak to which the group's scale belongs."""
    codes = torch.arange(first, last + 1)
    codes = torch.cat([codes, codes[: -codes.numel() % 31]]).view(-1, 31)
    peak = torch.full((codes.shape[0], 1), last)
    return torch.cat([codes, peak], dim=1).to(dtype)


def put_state(opt: FlashOptimizer, p: Tensor, **tensors: Tensor) -> None:
    state_dict = copy.deepcopy(opt.state_dict())  # torch hands out its own dicts and tensors
    for key, value in tensors.items():
        state_dict["state"][0][key] = value.to(p.device)
    opt.load_state_dict(state_dict)


def test_momentum(backend: BackendUnderTest):
    codes = every_code(-127, 127, torch.int8).repeat(len(MOMENTUM_SCALES), 1)
    scales = torch.tensor(MOMENTUM_SCALES, dtype=BF16).repeat_interleave(codes.shape[0] // len(MOMENTUM_SCALES))
    p = nn.Parameter(torch.zeros(codes.shape, dtype=BF16, device=backend.device))
    opt = backend.build(FlashLion, [p], lr=0.0, betas=(0.9, 0.5))
    put_state(opt, p, exp_avg=codes, exp_avg_scale=scales.view(-1, 1))
    p.grad = torch.zeros_like(p)
    opt.step()  # halves the momentum, so that only the scale may change
    assert_same_bits(opt.state[p]["exp_avg"].cpu(), codes)
    assert_same_bits(opt.state[p]["exp_avg_scale"].cpu(), scales.view(-1, 1) / 2)


def test_variance(backend: BackendUnderTest):
    codes = every_code(0, 255, torch.uint8).repeat(len(VARIANCE_SCALES), 1)
    scales = torch.tensor(VARIANCE_SCALES).repeat_interleave(codes.shape[0] // len(VARIANCE_SCALES))
    p = nn.Parameter(torch.zeros(codes.shape, dtype=BF16, device=backend.device))
    opt = backend.build(FlashAdamW, [p], lr=0.0, betas=(0.9, 0.25))
    put_state(opt, p, exp_avg_sq=codes, exp_avg_sq_scale=scales.view(-1, 1))
    p.grad = torch.zeros_like(p)
    opt.step()  # quarters the variance, which halves its root
    assert_same_bits(opt.state[p]["exp_avg_sq"].cpu(), codes)
    torch.testing.assert_close(opt.state[p]["exp_avg_sq_scale"].cpu(), scales.view(-1, 1) / 2, rtol=5e-7, atol=0)


@pytest.mark.parametrize("bits_per_master", [24, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_corrections(backend: BackendUnderTest, dtype: torch.dtype, bits_per_master: int):
    """Pairs of weight and correction survive a step of lr 0: all 256 of int8, 512 of int16 with both ends."""
    lo = torch.arange(-128, 128) if bits_per_master == 24 else torch.arange(-32768, 32768, 128)
    lo[-1] = 127 if bits_per_master == 24 else 32767
    lo = lo.to(torch.int8 if bits_per_master == 24 else torch.int16).view(-1, 32)
    for value in (1.0, -0.33, 2.0**-20, -60000.0):
        p = nn.Parameter(torch.full(lo.shape, value, dtype=dtype, device=backend.device))
        opt = backend.build(FlashLion, [p], lr=0.0, weight_decay=0.1, master_weight_bits=bits_per_master)
        # 2^-20 is subnormal in fp16, where a step of int16 below a power of two has no fp32 number of its own.
        exact = lo if dtype == torch.bfloat16 or bits_per_master == 24 else lo // 8 * 8
        put_state(opt, p, error=exact)
        weights = bits(p)
        p.grad = torch.ones_like(p)
        opt.step()
        assert torch.equal(bits(p), weights)
        assert_same_bits(opt.state[p]["error"].cpu(), exact, f"corrections of {value}")
