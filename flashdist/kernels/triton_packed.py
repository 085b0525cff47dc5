"""Between packed 8- and 16-bit storage and 32-bit registers: a portable form, and one in PTX for NVIDIA GPUs.

Two bf16 values or four bytes travel in one register. The portable form leaves unpacking to the compiler, which spends
two instructions on most values; the PTX form (FAST) says it in one byte permutation each. Both give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bf16_bits(x, FAST: tl.constexpr):
    """int16 bf16 patterns -> the fp32 patterns of the same numbers, as int32."""
    if FAST:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.int32) << 16


@triton.jit
def high_halves(x, FAST: tl.constexpr):
    """int32 -> its upper 16 bits as int16."""
    if FAST:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [x], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        return (x >> 16).to(tl.int16)


@triton.jit
def signed_bytes_shifted(x, FAST: tl.constexpr):
    """int8 -> int32, times 256."""
    if FAST:
        return tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $4, 0, 0x8804;
            prmt.b32 $1, $4, 0, 0x9914;
            prmt.b32 $2, $4, 0, 0xaa24;
            prmt.b32 $3, $4, 0, 0xbb34;
            """,
            "=r,=r,=r,=r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        return x.to(tl.int32) << 8


@triton.jit
def signed_bytes_to_float(x, FAST: tl.constexpr):
    """int8 -> fp32."""
    if FAST:
        # 2^23 + (x + 128) is a float whose lowest byte is x + 128.
        return (
            tl.inline_asm_elementwise(
                """
                {
                .reg .b32 t;
                xor.b32 t, $4, 0x80808080;
                prmt.b32 $0, t, 0x4b000000, 0x7440;
                prmt.b32 $1, t, 0x4b000000, 0x7441;
                prmt.b32 $2, t, 0x4b000000, 0x7442;
                prmt.b32 $3, t, 0x4b000000, 0x7443;
                }
                """,
                "=r,=r,=r,=r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=4,
            )
            - 8388736.0
        )
    else:
        return x.to(tl.float32)


@triton.jit
def scaled_bytes(x, scale, FAST: tl.constexpr):
    """uint8 times fp32 -> fp32, rounded once."""
    if FAST:
        shifted = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $4, 0x4b000000, 0x7440;
            prmt.b32 $1, $4, 0x4b000000, 0x7441;
            prmt.b32 $2, $4, 0x4b000000, 0x7442;
            prmt.b32 $3, $4, 0x4b000000, 0x7443;
            """,
            "=r,=r,=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
        # (2^23 + x) * scale - 2^23 * scale; the second product is exact and the fused sum rounds once.
        return tl.fma(shifted, scale + tl.zeros_like(shifted), scale * -8388608.0 + tl.zeros_like(shifted))
    else:
        return x.to(tl.float32) * scale


@triton.jit
def second_bytes(x, FAST: tl.constexpr):
    """int32 -> bits 8 to 15 as int8."""
    if FAST:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            prmt.b32 a, $1, $2, 0x0051;
            prmt.b32 b, $3, $4, 0x0051;
            prmt.b32 $0, a, b, 0x5410;
            }
            """,
            "=r,r,r,r,r",
            [x],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        return (x >> 8).to(tl.int8)


@triton.jit
def low_bytes(x, FAST: tl.constexpr):
    """int32 -> bits 0 to 7 as int8."""
    if FAST:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            prmt.b32 a, $1, $2, 0x0040;
            prmt.b32 b, $3, $4, 0x0040;
            prmt.b32 $0, a, b, 0x5410;
            }
            """,
            "=r,r,r,r,r",
            [x],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        return x.to(tl.int8)


@triton.jit
def truncated(x, FAST: tl.constexpr):
    """fp32 in [0, 256) -> an int32 whose lowest byte is the integer part."""
    if FAST:
        return tl.inline_asm_elementwise(
            "add.rz.f32 $0, $1, 0f4B000000;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return x.to(tl.int32)
