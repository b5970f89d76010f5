"""The arithmetic that emitted expressions call where torch's differs from Triton's: JIT functions of scalars and of tiles.

Shapes are free: a function takes scalars, rows, columns or tiles, and broadcasts as Triton does.
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

import struct

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import num_threads

# tanh(x) / x as a quotient of polynomials in x²: its relative error is at most 2e-8 up to x = 9, where tanh is 1.
NUMERATOR = tl.constexpr((0.99999998, 0.13381024, 3.4955867e-3, 2.0609060e-5, 1.3354633e-8))
DENOMINATOR = tl.constexpr((1.0, 0.46714340, 2.5876977e-2, 3.2856326e-4, 7.7765463e-7))
# The same as one polynomial in x², with a relative error of at most 1.6e-8 up to each bound of x².
NEAR = {
    0.1: (0.99999998428, -0.33332828916, 0.13307916205, -0.049828685986),
    0.5: (0.9999999847, -0.33333111247, 0.13328055876, -0.053502928255, 0.019964745232, -5.0348893575e-3),
}

# Added and taken away again, they leave of a number what is a multiple of 2**60, 2**40, 2**20 and 1.
ROUNDERS = tl.constexpr(tuple(1.5 * 2.0 ** (23 + n) for n in (60, 40, 20, 0)))

PARTIAL = tl.constexpr(8)  # sums of a row that are added up at last: the columns after which a product's layout repeats


@triton.jit
def plain(x):
    """The whole number x, which the host passes as ``2 x + 3`` (docs/decisions.md#triton-opaque-sizes)."""
    return (x - 3) >> 1


@triton.jit
def plain_all(numbers):
    """The whole numbers of a tuple, each as :func:`plain` has it."""
    found = ()
    for n in tl.static_range(len(numbers)):
        found = found + (plain(numbers[n]),)
    return found


@triton.jit
def multiple(x, unit):
    """``x``, a multiple of ``unit``, in a form in which the compiler sees that: ``tl.multiple_of`` is lost on the result of a call."""
    return x // unit * unit


@triton.jit
def whole(x):
    """The whole number x of a tensor, in 32 bits if it has fewer: sums of narrow ones would wrap."""
    if x.dtype.primitive_bitwidth < 32:
        return x.to(tl.int32)
    else:
        return x


@triton.jit
def maximum(x, y):
    """The larger of x and y, NaN if one of them is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(x, y):
    """The smaller of x and y, NaN if one of them is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lshift(x, n):
    """``x << n``, 0 for an n that is no bit of x."""
    both = x + n * 0
    inside = (n >= 0) & (n < both.dtype.primitive_bitwidth)
    return tl.where(inside, both << tl.where(inside, n, 0), 0)


@triton.jit
def rshift(x, n):
    """``x >> n``, x's sign for an n that is no bit of x."""
    both = x + n * 0
    last = both.dtype.primitive_bitwidth - 1
    return both >> tl.where((n >= 0) & (n < last), n, last)


@triton.jit
def _scaled(x, y):
    """x and y in fp32, times a power of two, or minus one, that makes y positive and 1 / y finite; that inverse, and 1 over the power."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    sign, tiny = tl.where(y < 0, -1.0, 1.0), tl.abs(y) < 2.0**-100
    scale = tl.where(tiny, sign * 2.0**100, sign)
    return x * scale, y * scale, 1.0 / (y * scale), tl.where(tiny, sign * 2.0**-100, sign)


@triton.jit
def divide(x, y):
    """``x / y`` as IEEE rounds it, 1 ulp off where x is tiny. Triton's errs by 2, so that 41 / 41 may be less than 1."""
    x, y, inverse, _ = _scaled(x, y)
    first = x * inverse
    better = tl.fma(tl.fma(first, y, x * -1.0), inverse * -1.0, first)
    # Of infinities, and by 0, the correction is no number.
    return tl.where(better == better, better, first)


@triton.jit
def _divided(x, y, FIRST: tl.constexpr):
    """The quotient of floats rounded down, and the rest as torch has it; exact up to quotients of 2**20 times ``ROUNDERS[FIRST]``'s unit.

    A quotient by the inverse has some 22 right bits, so 20 at a time are taken, the highest first. Each product is a multiple of y so
    near to what is left that the difference is exact. The inverse is a little too small: else what is just below half of a multiple
    could be rounded up, and the difference would need one bit more than there are.
    """
    finite, by_zero = tl.abs(x.to(tl.float32)) < float("inf"), y == 0
    x, y, inverse, unit = _scaled(x, y)
    rest, ratio, quotient = x, x * inverse, 0.0
    for n in tl.static_range(FIRST, 4):
        digits = tl.fma(rest, inverse * (1 - 2.0**-22), ROUNDERS[n]) - ROUNDERS[n]
        rest = tl.fma(digits, y * -1.0, rest)
        quotient += digits
    # An x below y is its own rest, also where y is infinite. Zeros have the signs of x and of x / y.
    small = tl.abs(x) < y
    rest = tl.where(small, x, tl.where(rest == 0, x * 0.0, rest))
    quotient = tl.where(small | (quotient == 0), ratio * 0.0, quotient)
    quotient = tl.where((tl.abs(ratio) > 2.0**30) & (finite | by_zero), ratio, quotient)
    below = rest < 0
    return tl.where(below, quotient - 1, quotient), tl.where(below, rest + y, rest) * unit


@triton.jit
def floordiv(x, y):
    """``x // y`` rounded down for integers too, as Python and torch do; Triton rounds towards zero."""
    if x.dtype.is_floating() or y.dtype.is_floating():
        return _divided(x, y, 2)[0]  # above 2**30 no fp32 number has all digits of a quotient
    else:
        quotient = x // y
        rest = x - quotient * y
        # Triton's quotient is rounded towards zero: one too many where a rest is left and the signs differ.
        return quotient - tl.where((rest != 0) & ((rest < 0) != (y < 0)), 1, 0)


@triton.jit
def mod(x, y):
    """``x % y`` with the sign of y, as Python and torch do."""
    if x.dtype.is_floating() or y.dtype.is_floating():
        return _divided(x, y, 0)[1]
    else:
        return x - floordiv(x, y) * y


if triton.knobs.runtime.interpret:

    def on_nvidia():
        """False: the interpreter has no inline assembly."""
        return False

else:

    @tl.core.builtin
    def on_nvidia(_semantic=None):
        """Whether the kernel is being compiled for one of NVIDIA's GPUs; the machine that compiles it may have none."""
        return tl.constexpr(getattr(_semantic.builder.options, "backend_name", "") == "cuda")


@triton.jit
def anchor():
    """A zero, int32, that the compiler does not know, of a volatile instruction: what needs it is computed where it stands.

    It is a scalar, which has no layout. Of a volatile instruction over a tile Triton 3.9 makes no second one in the layout of the scores,
    as 3.8 did: 27 of 331 kernels for sm_90 carried kept pairs, or what they looked up, through shared memory in their loops, with products
    that wait for each other (compiled, 11-26).
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def here(x, FACTS: tl.constexpr):
    """The int32 positions ``x``, unchanged, but so that the compiler keeps what is computed from them inside a branch.

    It matters where ``FACTS.whole`` makes the mask a branch of run time, as no predicate's is (``mask.over_tiles``). Beside a score, LLVM
    turns a branch without side effects into selections, and then every tile pays for a mask that few tiles need. It cannot move what needs
    an :func:`anchor`, nor see through these instructions. A zero that is added instead takes up to 32 registers more.
    """
    if FACTS.whole and FACTS.keep is None and FACTS.score is not None and on_nvidia():
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [x, anchor()], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return x


@triton.jit
def partial_sums(x):
    """The sums of every eighth column of a tile, (rows, PARTIAL): in the layout of a product a thread holds all that it adds."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // PARTIAL, PARTIAL]), 1)


@triton.jit
def together(whole, i, j):
    """The sum of a scalar ``whole``, and of numbers of a tile's queries and keys, a row and a column of it, all whole numbers in fp32."""
    if (
        i.shape[1] == 1
    ):  # a thread holds few rows of a tile and many columns: first the one addition that is not of every pair
        return (whole + i) + j
    else:
        return (whole + j) + i


@triton.jit
def elements(pointers, inside):
    """The elements at ``pointers``, 0 where they are not ``inside``; None: all are.

    Those of a tile's rows or columns are read as one dimension (docs/decisions.md#triton-lines).
    """
    if len(pointers.shape) == 2 and pointers.shape[0] == 1 and pointers.shape[1] > 1:
        return _line_of(pointers, inside)[None, :]
    elif len(pointers.shape) == 2 and pointers.shape[1] == 1 and pointers.shape[0] > 1:
        return _line_of(pointers, inside)[:, None]
    elif inside is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def _line_of(pointers, inside):
    line = tl.reshape(pointers, (pointers.numel,))
    if inside is None:
        return tl.load(line)
    else:
        return tl.load(line, mask=tl.reshape(inside, (pointers.numel,)), other=0)


@triton.jit
def element(pointers):
    """The elements at ``pointers``, in the layout that these have.

    ``tl.load`` of a tile reads in a layout of its own and changes it through shared memory, though neighbours share most elements.
    The instruction is not volatile, so that there may be one for each layout; an anchor that it does not read keeps it in its place.
    """
    kind: tl.constexpr = pointers.dtype.element_ty
    if on_nvidia() and kind == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.f32 $0, [$1];",
            "=f,l,r",
            [pointers.to(tl.int64), anchor()],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif on_nvidia() and kind == tl.int32:
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l,r", [pointers.to(tl.int64), anchor()], dtype=tl.int32, is_pure=True, pack=1
        )
    elif on_nvidia() and (kind == tl.bfloat16 or kind == tl.float16):
        bits = tl.inline_asm_elementwise(
            "ld.global.b16 $0, [$1];", "=h,l,r", [pointers.to(tl.int64), anchor()], dtype=tl.int16, is_pure=True, pack=1
        )
        return bits.to(kind, bitcast=True)
    else:
        return tl.load(pointers)


@triton.jit
def below(leaf, first, count, stride, key):
    """How many elements of a row are below a key: of ``count`` that never decrease, ``stride`` apart, the first one at ``leaf + first``.

    By halving: as many loads as the count has bits, of which neighbours share most.
    """
    found, step = (first + key) * 0, 1
    while 2 * step <= count:
        step = 2 * step
    while step > 0:
        at = found + step
        value = tl.load(leaf + (first + (at - 1) * stride), mask=at <= count, other=0x7FFFFFFF)
        found = tl.where((at <= count) & (value < key), at, found)
        step = step // 2
    return found


@triton.jit
def element_of(leaf, first, count, stride, at):
    """Element ``at`` of a row (:func:`below`); past the last one a number that is no key."""
    return tl.load(leaf + (first + at * stride), mask=at < count, other=0x7FFFFFFF)


@triton.jit
def among(leaf, first, count, stride, key):
    """Whether each key is in its row (:func:`below`)."""
    return element_of(leaf, first, count, stride, below(leaf, first, count, stride, key)) == key


@triton.jit
def some_among(leaf, first, count, stride, low, high):
    """Whether a row (:func:`below`) has an element from ``low`` to ``high``."""
    return element_of(leaf, first, count, stride, below(leaf, first, count, stride, low)) <= high


@triton.jit
def every_among(leaf, first, count, stride, low, high):
    """Whether a row (:func:`below`) has all of ``low`` to ``high``; False also where these are more than eight, or one stands twice."""
    at = below(leaf, first, count, stride, low)
    found = element_of(leaf, first, count, stride, at) == low
    for n in range(1, tl.minimum(high - low, 7) + 1):
        found &= element_of(leaf, first, count, stride, at + n) == low + n
    return found & (high - low < 8)


@triton.jit
def reciprocal(x):
    """``1 / x`` to 1 ulp for normal numbers; a division costs five instructions more."""
    if on_nvidia():
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def tanh(x):
    """``tanh(x)`` to 3 ulp."""
    return scaled_tanh(x, 1.0)


@triton.jit
def scaled_tanh(x, c):
    """``c tanh(x)`` to 3 ulp; the number c becomes part of the numerator's coefficients."""
    # From 9 on tanh is 1 in fp32 and the quotient is no fit any more; NaN has to stay NaN.
    x = tl.clamp(x, -9.0, 9.0, propagate_nan=tl.PropagateNan.ALL)
    y = x * x
    # c times the coefficients costs nothing where c is a scalar: once for a tile, not once an element.
    p = c * NUMERATOR[1] + y * (c * NUMERATOR[2] + y * (c * NUMERATOR[3] + y * (c * NUMERATOR[4])))
    p = c * NUMERATOR[0] + y * p
    q = DENOMINATOR[1] + y * (DENOMINATOR[2] + y * (DENOMINATOR[3] + y * DENOMINATOR[4]))
    return x * p * reciprocal(DENOMINATOR[0] + y * q)


@triton.jit
def power_of_tanh(x, c):
    """``2^(c tanh(x))``, the exponential of a softmax under a softcap.

    Where a tile gives each thread a multiple of PACK elements, a warp takes a shorter polynomial whenever all of its elements are
    near 0 (docs/decisions.md#triton-softcap).
    """
    if on_nvidia() and x.numel % (PACK * num_threads()) == 0:
        p = tl.inline_asm_elementwise(POWERS, PLACES, [x, c], dtype=tl.float32, is_pure=True, pack=PACK)
    else:
        p = tl.exp2(scaled_tanh(x, c))
    return p


def powers_of_tanh(count: int) -> str:
    """The PTX of :func:`power_of_tanh`. Its operands are ``count`` results, ``count`` x, and ``count`` c of which the first is read."""
    x = [f"${count + n}" for n in range(count)]

    def number(value: float) -> str:
        """An fp32 literal of PTX."""
        return "0f" + struct.pack(">f", value).hex()

    def polynomial(to: str, y: str, coefficients: list[str]) -> list[str]:
        """Lines that compute a polynomial in ``y`` by Horner's rule; the lowest coefficient comes first."""
        *rest, top = coefficients
        return [f"mov.f32 {to}, {top};", *(f"fma.rn.f32 {to}, {to}, {y}, {each};" for each in reversed(rest))]

    def scaled(coefficients: tuple) -> tuple[list[str], list[str]]:
        """Names of registers for c times each coefficient, and the lines that fill them."""
        names = [f"c{n}" for n in range(len(coefficients))]
        pairs = zip(names, coefficients, strict=True)
        return names, [f"mul.f32 {name}, ${2 * count}, {number(value)};" for name, value in pairs]

    above, above_lines = scaled(NUMERATOR.value)
    below = [number(value) for value in DENOMINATOR.value]
    lines = [f".reg .f32 y<{count}>, c<{max(map(len, NEAR.values()))}>, t, p, q;"]
    lines += [".reg .b32 far<4>, bits;", ".reg .pred any;"]
    lines += [f"mul.f32 y{n}, {x[n]}, {x[n]};" for n in range(count)]
    # The largest y: as integers, the bits of numbers that are not negative have their order, and NaN is above all. There are
    # four chains of maxima, because one chain would wait for itself.
    lines += [f"mov.b32 far{n}, y{n};" for n in range(4)]
    lines += [f"mov.b32 bits, y{n}; max.s32 far{n % 4}, far{n % 4}, bits;" for n in range(4, count)]
    lines += [f"max.s32 far0, far0, far{n};" for n in (1, 2, 3)]
    for tier, (bound, coefficients) in enumerate(NEAR.items()):
        near, near_lines = scaled(coefficients)
        # All lanes of a warp take the same way: a warp that splits would run both.
        lines += [
            f"setp.gt.s32 any, far0, 0x{struct.pack('>f', bound).hex()};",
            "vote.sync.any.pred any, any, 0xffffffff;",
        ]
        lines += [f"@any bra.uni above{tier};", *near_lines]
        for n in range(count):
            lines += [*polynomial("p", f"y{n}", near), f"mul.f32 p, p, {x[n]};", f"ex2.approx.ftz.f32 ${n}, p;"]
        lines += ["bra.uni done;", f"above{tier}:"]
    lines += above_lines
    for n in range(count):
        y = f"y{n}"
        lines += [f"max.NaN.f32 t, {x[n]}, {number(-9.0)};", f"min.NaN.f32 t, t, {number(9.0)};", f"mul.f32 {y}, t, t;"]
        lines += [*polynomial("p", y, above), *polynomial("q", y, below), "rcp.approx.ftz.f32 q, q;"]
        lines += ["mul.f32 p, p, t;", "mul.f32 p, p, q;", f"ex2.approx.ftz.f32 ${n}, p;"]
    return "\n".join(["{", *lines, "done:", "}"])


PACK = tl.constexpr(32)
POWERS = tl.constexpr(powers_of_tanh(PACK.value))
PLACES = tl.constexpr(",".join(["=f"] * PACK.value + ["f"] * 2 * PACK.value))


@triton.jit
def rough_tanh(x):
    """``tanh(x)`` in one instruction, with a relative error of 2^-11: no more than the rounding of s to 16 bits causes."""
    if on_nvidia():
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tanh(x)


@triton.jit
def exp(x):
    """``e^x`` to 1 ulp for the probabilities of fp32 inputs; 0 where x < -87.

    The hardware's exp2 errs by 2 ulp, and by the rounding of x log2 e. Here ``e^x = 2^n e^r`` with ``|r| <= ln 2 / 2``, and e^r is
    the polynomial of Cephes' expf (Moshier).
    """
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = tl.fma(n, -0.693359375, x)  # ln 2 in two parts, the first of so few bits that the product is exact
    r = tl.fma(n, 2.12194440e-4, r)
    p = 4.1665795894e-2 + r * (8.3334519073e-3 + r * (1.3981999507e-3 + r * 1.9875691500e-4))
    p = 1.0 + (r + r * r * (5.0000001201e-1 + r * (1.6666665459e-1 + r * p)))
    # 2^n by its exponent field; n is limited so that it cannot run into the sign. Its lower end is 0, and its upper one
    # infinity.
    power_of_two = (tl.minimum(tl.maximum(n, -127.0), 128.0).to(tl.int32) + 127) << 23
    return tl.where(x < -87.0, 0.0, p * power_of_two.to(tl.float32, bitcast=True))


@triton.jit
def log(x):
    """``ln x`` to 1 ulp, for the sum of a row.

    The hardware's log2 errs by 2^-22 of its result or of 1, whichever is larger, and that is an error of all probabilities of the
    row. Here ``x = 2^n f`` with f near 1, and ln f is the polynomial of Cephes' logf (Moshier).
    """
    bits = x.to(tl.int32, bitcast=True)
    n = (bits - 0x3F3504F3) >> 23  # 0x3F3504F3 is sqrt(1/2): f lies between that and sqrt(2)
    z = (bits - (n << 23)).to(tl.float32, bitcast=True) - 1.0
    n = n.to(tl.float32)
    p = 1.1676998740e-1 + z * (-1.1514610310e-1 + z * 7.0376836292e-2)
    p = 2.0000714765e-1 + z * (-1.6668057665e-1 + z * (1.4249322787e-1 + z * (-1.2420140846e-1 + z * p)))
    p = z * z * z * (3.3333331174e-1 + z * (-2.4999993993e-1 + z * p))
    y = z + (p - 2.12194440e-4 * n - 0.5 * z * z)
    # ln 2 in two parts again, the larger one last. Zero, infinity, NaN and negative numbers are the hardware's.
    return tl.where((x > 0) & (x < float("inf")), y + 0.693359375 * n, tl.log(x))


@triton.jit
def expm1(x):
    """``e^x - 1`` by Kahan's formula: the rounding of e^x cancels between the numerator and the logarithm."""
    e = tl.exp(x)
    # Both sides of a selection are computed: where the formula is 0 / 0 or ∞ - ∞ its operand becomes a harmless 2.
    inner = tl.where((e == 1.0) | (e == 0.0) | (e == float("inf")), 2.0, e)
    return tl.where(e == 1.0, x, tl.where((e == 0.0) | (e == float("inf")), e - 1.0, (inner - 1.0) * x / tl.log(inner)))


@triton.jit
def log1p(x):
    """``ln(1 + x)`` by Kahan's formula: the rounding of 1 + x cancels between the logarithm and the denominator."""
    u = 1.0 + x
    inner = tl.where((u == 1.0) | (u == float("inf")), 2.0, u)
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, tl.log(inner) * x / (inner - 1.0)))


@triton.jit
def round_even(x):
    """The whole number nearest to x; a half is rounded to the even one."""
    r = tl.floor(x + 0.5)
    # x + 0.5 went up at a half: back to the even neighbour where r is odd.
    r = tl.where((r - x == 0.5) & (r - 2.0 * tl.floor(r * 0.5) != 0), r - 1.0, r)
    r = tl.where(r == 0, x * 0.0, r)  # with the sign of x
    return tl.where(tl.abs(x) < 8388608.0, r, x)  # from 2**23 on every fp32 number is whole


@triton.jit
def trunc(x):
    """x rounded towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def sign(x):
    """-1, 0 or 1 in x's dtype."""
    return tl.where(x > 0, 1, tl.where(x < 0, -1, 0)).to(x.dtype)


@triton.jit
def whole_power(x, c):
    """``x ** c`` of whole numbers, by squares of x: fp32 would round above 2**24."""
    # 64 bits if one of both has 64: torch's rule for whole numbers.
    square = x + c * 0
    found = square * 0 + 1
    # Six bits of the exponent: with more of them a power fits 64 bits only where x is 0, 1 or -1.
    for bit in tl.static_range(6):
        found = tl.where((c >> bit) & 1 == 1, found * square, found)
        square = square * square
    found = tl.where((x == 0) & (c > 0), 0, found)
    return tl.where(c >= 0, found, tl.where(x == 1, 1, tl.where(x == -1, 1 - 2 * (c & 1), 0)))


if triton.knobs.runtime.interpret:

    def _pow(x, c):
        """``x ** c`` of the arrays that the interpreter computes with."""
        x, c = tl.broadcast(x, c)
        return tl.tensor(type(x.handle)(x.handle.data**c.handle.data, x.handle.dtype), x.type)

else:
    _pow = libdevice.pow


@triton.jit
def power(x, c):
    """``x ** c`` in fp32, as the chip's maker computes it."""
    return _pow(x.to(tl.float32), c.to(tl.float32))


@triton.jit
def _scaled_root(x):
    """x times a power of four that makes it no subnormal number, the inverse of that's root, and whether the power is not 1."""
    tiny = x < 2.0**-100
    scaled = tl.where(tiny, x * 2.0**100, x)
    return scaled, tl.rsqrt(scaled), tiny


@triton.jit
def rsqrt(x):
    """``1 / sqrt(x)`` to 2 ulp, of subnormal numbers too, which the instruction takes for 0."""
    _, inverse, tiny = _scaled_root(x)
    return tl.where(tiny, inverse * 2.0**50, inverse)


@triton.jit
def sqrt(x):
    """The root of x as IEEE rounds it, so that a square's is exact; Triton's errs by an ulp, and takes subnormal numbers for 0."""
    scaled, inverse, tiny = _scaled_root(x)
    root = scaled * inverse
    root = tl.fma(tl.fma(root, root * -1.0, scaled), 0.5 * inverse, root)
    root = tl.where((scaled == 0) | (scaled == float("inf")), scaled, root)
    return tl.where(tiny, root * 2.0**-50, root)
