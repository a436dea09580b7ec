"""Triton helpers for planar quantised weights: from packed words to numbers of 16 bits.

A masked nibble, taken as it is for a float16 or bfloat16, is a subnormal number: its value times
2^-24 or 2^-133. One packed multiply-add by a power of two turns two of them into exact numbers,
and adds the zero point on the way. No integer is converted. Results are (code - zero) * 2^-e with
e = 9 in float16 and 6 in bfloat16, where the multiplier is the largest power of two there is.
"""

import triton
import triton.language as tl

#: 2^e, which the caller owes the results.
PLANAR_FLOAT16 = tl.constexpr(512.0)
PLANAR_BFLOAT16 = tl.constexpr(64.0)


@triton.jit
def planar_zero(zero, DTYPE: tl.constexpr, ASM: tl.constexpr):
    # Integer zero points (int16) as what `planar_unpack4` adds: -zero * 2^-e.
    if ASM:
        if DTYPE == tl.float16:
            addend = tl.inline_asm_elementwise(
                "{ .reg .b32 m; mov.b32 m, 0xf800f800; fma.rn.f16x2 $0, $1, m, $2; }",
                "=r,r,r",
                [zero, tl.full((), 0.0, DTYPE)],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
        else:
            addend = tl.inline_asm_elementwise(
                "{ .reg .b32 m; mov.b32 m, 0xff00ff00; fma.rn.bf16x2 $0, $1, m, $2; }",
                "=r,r,r",
                [zero, tl.full((), 0.0, DTYPE)],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
    else:
        SCALE: tl.constexpr = PLANAR_FLOAT16 if DTYPE == tl.float16 else PLANAR_BFLOAT16
        addend = (zero.to(tl.float32) * (-1.0 / SCALE)).to(DTYPE)
    return addend


@triton.jit
def planar_eight(DTYPE: tl.constexpr):
    # The same for the zero point of symmetric weights, as a scalar.
    SCALE: tl.constexpr = PLANAR_FLOAT16 if DTYPE == tl.float16 else PLANAR_BFLOAT16
    return tl.full((), -8.0 / SCALE, tl.float32).to(DTYPE)  # the interpreter fills no bfloat16


@triton.jit
def planar_unpack4(words, addend, DTYPE: tl.constexpr, ASM: tl.constexpr):
    # The four planes of int16 words, each of the words' shape and layout.
    if ASM:
        if DTYPE == tl.float16:
            planes = tl.inline_asm_elementwise(
                """{
                .reg .b32 t, a, b, c, d, m0, m1;
                mov.b32 m0, 0x78007800; mov.b32 m1, 0x68006800;
                shr.u32 t, $4, 8;
                and.b32 a, $4, 0x000f000f; and.b32 b, $4, 0x00f000f0;
                and.b32 c, t, 0x000f000f; and.b32 d, t, 0x00f000f0;
                fma.rn.f16x2 $0, a, m0, $5; fma.rn.f16x2 $1, b, m1, $5;
                fma.rn.f16x2 $2, c, m0, $5; fma.rn.f16x2 $3, d, m1, $5;
                }""",
                "=r,=r,=r,=r,r,r",
                [words, addend],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            planes = tl.inline_asm_elementwise(
                """{
                .reg .b32 t, a, b, c, d, m0, m1;
                mov.b32 m0, 0x7f007f00; mov.b32 m1, 0x7d007d00;
                shr.u32 t, $4, 8;
                and.b32 a, $4, 0x000f000f; and.b32 b, $4, 0x00f000f0;
                and.b32 c, t, 0x000f000f; and.b32 d, t, 0x00f000f0;
                fma.rn.bf16x2 $0, a, m0, $5; fma.rn.bf16x2 $1, b, m1, $5;
                fma.rn.bf16x2 $2, c, m0, $5; fma.rn.bf16x2 $3, d, m1, $5;
                }""",
                "=r,=r,=r,=r,r,r",
                [words, addend],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        return planes
    else:
        bits = words.to(tl.uint16, bitcast=True)
        high = (bits >> 8).to(tl.uint16)
        a = _portable(bits, 0xF, 32768.0, addend, DTYPE)
        b = _portable(bits, 0xF0, 2048.0, addend, DTYPE)
        c = _portable(high, 0xF, 32768.0, addend, DTYPE)
        d = _portable(high, 0xF0, 2048.0, addend, DTYPE)
        return a, b, c, d


@triton.jit
def _portable(bits, MASK: tl.constexpr, FACTOR: tl.constexpr, addend, DTYPE: tl.constexpr):
    kept = (bits & MASK).to(tl.uint16)
    if DTYPE == tl.float16:
        return (kept.to(tl.float16, bitcast=True) * FACTOR + addend).to(tl.float16)
    else:
        # AMD computes bfloat16 in float32, where these subnormals may be flushed.
        shift: tl.constexpr = 1.0 / 64.0 if MASK == 0xF else 1.0 / 1024.0
        return (kept.to(tl.float32) * shift + addend.to(tl.float32)).to(tl.bfloat16)
