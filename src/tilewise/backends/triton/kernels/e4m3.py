"""Numbers of 8 bits, e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022): read two at a time, and written.

Kernels see two neighbours of a row as one int16: so tiles are loaded, turned and brought into the layouts of matrix units as those of
16-bit numbers are, and become two tiles, of the even and of the odd columns. Read as bytes, values would reach the matrix units one
byte a load (docs/decisions.md#triton-pages).
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

if triton.knobs.runtime.interpret:

    def converts_e4m3():
        """False: the interpreter has no inline assembly."""
        return False

else:

    @tl.core.builtin
    def converts_e4m3(_semantic=None):
        """Whether the GPU for which the kernel is being compiled has instructions that read e4m3: NVIDIA's from sm_89 on."""
        options = _semantic.builder.options
        known = getattr(options, "backend_name", "") == "cuda" and int("".join(filter(str.isdigit, options.arch))) >= 89
        return tl.constexpr(known)


# Two int16 are four numbers. A byte permutation brings the even columns together and the odd ones; each two become fp16, which holds
# e4m3 exactly, NaN too. From there bf16 is two conversions more by way of fp32: those from fp16 straight to bf16 are slow.
_BY_PARITY = """
{
.reg .b32 bytes, even, odd;
.reg .b16 e, o, h0, h1, h2, h3;
.reg .f32 f0, f1, f2, f3;
prmt.b32 bytes, $2, 0, 0x3120;
mov.b32 {e, o}, bytes;
cvt.rn.f16x2.e4m3x2 even, e;
cvt.rn.f16x2.e4m3x2 odd, o;
"""
TO_FP16 = tl.constexpr(_BY_PARITY + "mov.b32 $0, even;\nmov.b32 $1, odd;\n}")
TO_BF16 = tl.constexpr(
    _BY_PARITY
    + """mov.b32 {h0, h1}, even;
mov.b32 {h2, h3}, odd;
cvt.f32.f16 f0, h0;
cvt.f32.f16 f1, h1;
cvt.f32.f16 f2, h2;
cvt.f32.f16 f3, h3;
cvt.rn.bf16x2.f32 $0, f1, f0;
cvt.rn.bf16x2.f32 $1, f3, f2;
}"""
)
TWO_FP16, TWO_BF16 = tl.constexpr((tl.float16, tl.float16)), tl.constexpr((tl.bfloat16, tl.bfloat16))


@triton.jit
def unpacked(x, dtype: tl.constexpr):
    """The numbers in the low bytes of ``x``, int16, and those in the high bytes, in ``dtype``, which holds them exactly."""
    if converts_e4m3() and dtype.primitive_bitwidth == 16 and x.numel % (2 * num_threads()) == 0:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(TO_BF16, "=r,=r,r", [x], dtype=TWO_BF16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(TO_FP16, "=r,=r,r", [x], dtype=TWO_FP16, is_pure=True, pack=2)
    else:
        return from_bits(x, dtype), from_bits(x >> 8, dtype)


@triton.jit
def from_bits(x, dtype: tl.constexpr):
    """The numbers in the low bytes of ``x``, int16, by whole numbers alone."""
    # Sign, exponent and fraction where fp16 has them. Its exponents count from 15, those of e4m3 from 7: a factor of 2^8.
    bits = ((x & 0x80) << 8) | ((x & 0x7F) << 7)
    number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((x & 0x7F) == 0x7F, float("nan"), number).to(dtype)


@triton.jit
def unpacked_tiles(tiles, dtype: tl.constexpr):
    """The tiles of the even columns of all pieces, and behind them those of the odd ones."""
    even, odd = (), ()
    for n in tl.static_range(len(tiles)):
        # int16 (rows, width) to two tiles of as many numbers, each lane keeping its own.
        low, high = unpacked(tiles[n], dtype)
        even = even + (low,)
        odd = odd + (high,)
    return even + odd


@triton.jit
def to_bits(x):
    """The nearest e4m3 number to ``x``, fp32, as uint8; ties go to the even one, what is too large to 448, and NaN to NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Below 2^-6 numbers are multiples of 2^-9, as those of fp32 are from 2^14 on: the addition rounds.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    # Above, three bits of the fraction stay, and the exponent is 120 smaller; the carry of a rounding goes into it.
    large = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
    found = tl.where(size < 0x3C800000, small, tl.minimum(large, 0x7E))
    # A comparison of bits: above those of infinity is NaN, which no rounding may make a number.
    found = tl.where(size > 0x7F800000, 0x7F, found)
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)
