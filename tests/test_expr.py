"""Expressions: what can be traced, what it says, what it is worth, and its derivative."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import expr
from tilewise.expr import (
    OPERATIONS,
    Expr,
    abstract,
    apply,
    derivative,
    evaluate,
    kind,
    lookup,
    nodes,
    number,
    parse,
    symbol,
    to_text,
    trace,
)
from tilewise.leaf_gradients import read_adjoint

NAMES = ("s", "b", "h", "i", "j")
SHAPE = (2, 3, 4, 5)
DTYPES = [torch.float32, torch.float64]
S, B, H, I, J = (symbol(name) for name in NAMES)


def leaves(dtype=torch.float64) -> SimpleNamespace:
    """The tensors that traced functions of these tests read, by what they are indexed with."""
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return SimpleNamespace(
        h=draw(3),
        hi=draw(3, 4),
        bhij=draw(2, 3, 4, 5),
        scalar=draw(),
        order=torch.tensor([3, 1, 0, 2]),
        flag=torch.tensor([True, False, True]),
        three=torch.tensor(3),
    )


def environment(dtype=torch.float64, starts=(0, 0, 0, 0)) -> dict[str, torch.Tensor]:
    """s random; b, h, i, j along their own axis, counting from ``starts``."""
    env = {"s": torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)}
    for axis, (name, size, start) in enumerate(zip("bhij", SHAPE, starts, strict=True)):
        env[name] = torch.arange(start, start + size).view([size if a == axis else 1 for a in range(4)])
    return env


def through_text(e: Expr) -> tuple[Expr, tuple[torch.Tensor, ...]]:
    text, tensors = to_text(e)
    return parse(text), tensors


def traced(fn, dtype=torch.float64) -> torch.Tensor:
    """What ``fn(leaves, s, b, h, i, j)`` is worth as an expression that was printed and read back."""
    e, tensors = through_text(trace(partial(fn, leaves(dtype)), NAMES))
    return evaluate([e], environment(dtype), tensors, dtype)[0]


def in_torch(fn, dtype=torch.float64) -> torch.Tensor:
    """What it is worth on tensors; torch computes int / int in its default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return fn(leaves(dtype), *[environment(dtype)[name] for name in NAMES])
    finally:
        torch.set_default_dtype(before)


# -- Tracing -------------------------------------------------------------------------------------------------------

TRACED = {
    "add": lambda t, s, b, h, i, j: s + i + 2 + 0.5,
    "radd": lambda t, s, b, h, i, j: 2 + i + (0.5 + s),
    "sub": lambda t, s, b, h, i, j: s - i - 2,
    "rsub": lambda t, s, b, h, i, j: 2 - i - (0.5 - s),
    "mul": lambda t, s, b, h, i, j: s * i * 3 * 0.3,
    "rmul": lambda t, s, b, h, i, j: 3 * i * (0.3 * s),
    "div": lambda t, s, b, h, i, j: s / (i + 1) / 3,
    "rdiv": lambda t, s, b, h, i, j: 2 / (i + 3),
    "int-div-int": lambda t, s, b, h, i, j: i / (j + 3),
    "floordiv": lambda t, s, b, h, i, j: (i - j) // 3 + s // 0.25,
    "rfloordiv": lambda t, s, b, h, i, j: -7 // (i + 1),
    "mod": lambda t, s, b, h, i, j: (i - j) % 3 + s % 0.25,
    "rmod": lambda t, s, b, h, i, j: -7 % (i + 1),
    "pow": lambda t, s, b, h, i, j: s**2 + i**2,
    "rpow": lambda t, s, b, h, i, j: 2**i + 1.5**s,
    "negative-base": lambda t, s, b, h, i, j: (-2) ** i + (-s) ** 2 - s**2,
    "negative-exponent": lambda t, s, b, h, i, j: (i + 1.5) ** -2,
    "alibi-slope": lambda t, s, b, h, i, j: s - 2 ** (-8 * (h + 1) / 3) * abs(i - j),
    "and-or-xor-not": lambda t, s, b, h, i, j: ((i > 1) & (j > 1)) | ((i == 0) ^ ~(j < 3)),
    "bool-left": lambda t, s, b, h, i, j: True & (i > 1) | False ^ (j != 2),
    "bits": lambda t, s, b, h, i, j: (i & 3) | (j ^ 1),
    "compare": lambda t, s, b, h, i, j: (i <= j) & (s >= -1) & (i < 3) & (j > 0) & (i == i) & (s != 0),
    "compare-left": lambda t, s, b, h, i, j: (1 <= i) & (3 > j) & (0.5 >= s) & (2 != i),
    "unary": lambda t, s, b, h, i, j: -s + abs(s) + -i + +s,
    "torch-functions": lambda t, s, b, h, i, j: torch.tanh(s) + torch.exp(-s) * torch.sigmoid(s) + torch.sin(i) + torch.sqrt(j),
    "log-functions": lambda t, s, b, h, i, j: torch.log(i + 1) + torch.log2(s.abs() + 1) + torch.log1p(j) + torch.expm1(s),
    "torch-arithmetic": lambda t, s, b, h, i, j: torch.add(s, i) + torch.sub(2, i) + torch.mul(s, 2) + torch.div(i, 3) + torch.pow(2, i),
    "torch-compare": lambda t, s, b, h, i, j: torch.lt(i, j) & torch.ge(s, 0) | torch.eq(i, j) & torch.not_equal(i, 2),
    "torch-logical": lambda t, s, b, h, i, j: torch.logical_and(i > 1, j > 1) | torch.logical_not(torch.logical_or(i > 0, s > 0)),
    "torch-rounding": lambda t, s, b, h, i, j: torch.floor(s) + torch.ceil(s) + torch.round(s) + torch.trunc(s) + torch.sign(s),
    "rsub-function": lambda t, s, b, h, i, j: torch.rsub(i, 7) + torch.rsub(s, 0.5),
    "minmax": lambda t, s, b, h, i, j: torch.maximum(s, t.scalar) + torch.minimum(i, j) + torch.relu(s),
    "minmax-methods": lambda t, s, b, h, i, j: s.maximum(t.scalar) + i.minimum(j) + s.relu(),
    "methods": lambda t, s, b, h, i, j: s.tanh().exp().mul(2).add(i).abs().sqrt() + s.square() + (s + 9).reciprocal() + (i + 1).rsqrt(),
    "dtype-methods": lambda t, s, b, h, i, j: (s * 3).int() + (s > 0).int() + i.float() / 2 + (s * 2).long() + s.to(torch.int64),
    "bool-method": lambda t, s, b, h, i, j: i.bool() & j.to(torch.bool),
    "clamp": lambda t, s, b, h, i, j: torch.clamp(s, -0.5, 0.5) + torch.clamp(i, max=2) + s.clamp(min=0.0) + s.clip(-1, 1),
    "clamp-one-sided": lambda t, s, b, h, i, j: s.clamp_min(0.1) + torch.clamp_max(s, 0.2) + torch.clamp(s, t.scalar),
    "where": lambda t, s, b, h, i, j: torch.where(j <= i, s, -torch.inf),
    "where-method": lambda t, s, b, h, i, j: s.where(i > j, 0.0) + i.where(s > 0, other=j),
    "where-method-of-a-scalar": lambda t, s, b, h, i, j: t.scalar.where(i > j, s),
    "erf": lambda t, s, b, h, i, j: 0.5 * s * (1 + torch.erf(s / math.sqrt(2))) + torch.exp2(s) + torch.cos(s) + torch.rsqrt(s.abs() + 1),
    "lookup": lambda t, s, b, h, i, j: s + t.bhij[b, h, i, j] + t.hi[h, i] + t.h[h],
    "lookup-mixed": lambda t, s, b, h, i, j: t.hi[0, i] + t.bhij[b, 1, i, 2] + t.hi[h, 3],
    "lookup-computed": lambda t, s, b, h, i, j: t.hi[h, (i + j) % 4] + t.bhij[b, h, t.order[i], j // 2],
    "lookup-shared": lambda t, s, b, h, i, j: t.hi[h, i] * t.hi[h, 3 - i] + t.hi[2 - h, i],
    "lookup-int-and-bool": lambda t, s, b, h, i, j: torch.where(t.flag[h], t.order[i], 7),
    "tangents": lambda t, s, b, h, i, j: torch.tan(s) + s.atan() + torch.atan2(s, t.scalar) + torch.arctan2(i, j + 1),
    "arcs": lambda t, s, b, h, i, j: torch.asin(s / 9) + (s / 9).acos() + torch.erfc(s),
    "hyperbolic": lambda t, s, b, h, i, j: torch.sinh(s) + s.cosh() + torch.hypot(s, t.scalar) + s.hypot(s + 1),
    "fmod": lambda t, s, b, h, i, j: torch.fmod(s, 0.7) + (i - 2).fmod(3) + torch.fmod(s, t.scalar),
    "logaddexp": lambda t, s, b, h, i, j: torch.logaddexp(s, t.scalar) + s.logaddexp(s) + torch.lerp(s, t.scalar, 0.3),
    "finite": lambda t, s, b, h, i, j: torch.where(torch.isfinite(1 / j) & ~torch.isnan(s / s), s, 0) + torch.isinf(1 / i),
    "scalar-index": lambda t, s, b, h, i, j: t.hi[t.three - 1, i % 2] + t.hi[h, t.three],
    "scalar": lambda t, s, b, h, i, j: s * t.scalar + t.scalar / 2,
    "scalar-left": lambda t, s, b, h, i, j: t.scalar * s + (t.scalar - s) / (t.scalar + i) + t.scalar / (i + 1) - t.scalar**2,
    "scalar-int": lambda t, s, b, h, i, j: t.three - i + (t.three // (i + 1)) + t.three % (i + 1) + (t.three == i) + (t.three & j),
    "scalar-compare": lambda t, s, b, h, i, j: (t.three > i) & (t.scalar <= s) | (t.three != j),
    "scalar-power": lambda t, s, b, h, i, j: t.three**i + (t.scalar + 3) ** s,
    "shifts": lambda t, s, b, h, i, j: (i << 2) + (j >> 1) + (1 << i) + (9 >> j) + (i << j) + torch.bitwise_left_shift(i, 1),
    "scalar-shifts": lambda t, s, b, h, i, j: (t.three << i) + (i << t.three) + torch.bitwise_right_shift(t.three, j),
    "constants": lambda t, s, b, h, i, j: s + torch.zeros_like(s) + b.new_ones((), dtype=torch.int64) + torch.full_like(s, 0.25),
    "bool-constants": lambda t, s, b, h, i, j: (b.new_ones((), dtype=torch.bool) & (i > j)) | b.new_zeros((), dtype=torch.bool),
    "new-full": lambda t, s, b, h, i, j: torch.where(i > j, s.new_full((), -torch.inf), s) + s.new_zeros((), device=s.device),
    "masked-fill": lambda t, s, b, h, i, j: s.masked_fill(j > i, -torch.inf) + torch.masked_fill(s, i > j, 2),
    "dtypes": lambda t, s, b, h, i, j: t.order[i].to(s.dtype) * s + i.type_as(s) + (s > 0).to(i.dtype),
    "activations": lambda t, s, b, h, i, j: F.gelu(s) + F.gelu(s, approximate="tanh") + F.silu(s) - F.logsigmoid(s),  # none cancels
    "softplus": lambda t, s, b, h, i, j: F.softplus(s) + F.softplus(s, beta=2.5) + F.softplus(9 * s),
    "aug-assign": lambda t, s, b, h, i, j: _augmented(s, i),
}  # fmt: skip


def _augmented(s, i):
    s *= 2
    s += i
    return s


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
@pytest.mark.parametrize("fn", TRACED.values(), ids=TRACED)
def test_a_traced_function_is_worth_what_torch_computes(fn, dtype):
    got, expected = traced(fn, dtype), in_torch(fn, dtype)
    assert got.is_floating_point() == expected.is_floating_point()
    assert not got.is_floating_point() or got.dtype == dtype
    torch.testing.assert_close(got, expected, check_dtype=False, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0)


@pytest.mark.parametrize(
    "fn",
    [lambda t, b, h, i, j: t[b][h][i][j], lambda t, b, h, i, j: t[b, h][i, j], lambda t, b, h, i, j: t[b][h, i, j]],
    ids=["one-by-one", "two-and-two", "one-and-three"],
)
def test_chained_indices_are_one_lookup(fn):
    t = leaves().bhij
    e = trace(lambda s, b, h, i, j: fn(t, b, h, i, j), NAMES)
    assert str(e) == "float0[b, h, i, j]"
    assert e.args[0] is t


def test_an_index_of_a_number_first_is_a_view_that_is_read():
    t = leaves().hi
    e = trace(lambda s, b, h, i, j: t[1][i], NAMES)
    got = evaluate([parse(str(e))], environment(), to_text(e)[1], torch.float64)[0]
    assert torch.equal(got.flatten(), t[1])


SIZES = {"b": 3, "h": 4, "i": 50, "j": 70}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_whole_number_is_larger_than_it_was_said_to_be(data):
    """Expressions of whole numbers that are said to fit 32 bits do, at each of their nodes."""

    def grown(inner):
        binary = ["add", "sub", "mul", "maximum", "minimum", "and", "or", "xor", "lshift", "rshift"]
        numbers = st.integers(1, 9).map(number)
        return st.one_of(
            st.tuples(st.sampled_from(binary), inner, inner).map(lambda x: apply(*x)),
            st.tuples(st.sampled_from(["floordiv", "mod", "pow"]), inner, numbers).map(lambda x: apply(*x)),
            st.tuples(st.sampled_from(["floordiv", "mod"]), inner, numbers).map(lambda x: apply(x[0], x[1], -x[2])),
            st.tuples(st.sampled_from(["neg", "abs", "sign", "relu", "not", "floor"]), inner).map(lambda x: apply(*x)),
            st.tuples(inner, inner, inner).map(lambda x: apply("where", apply("gt", x[0], x[1]), x[1], x[2])),
        )

    leaves_of = st.sampled_from(["b", "h", "i", "j", "off", "seqlen_q", "seqlen_k"]).map(symbol)
    numbers = st.integers(-(10**5), 10**5).map(number)
    e = data.draw(st.recursive(st.one_of(leaves_of, numbers), grown, max_leaves=6))
    if expr.beyond_32_bits((e,), SIZES):
        return
    axes = dict(zip("bhij", range(4), strict=True))
    env = {n: torch.arange(size).view([-1 if a == axes[n] else 1 for a in range(4)]) for n, size in SIZES.items()}
    lengths = {"seqlen_q": SIZES["i"], "seqlen_k": SIZES["j"], "off": SIZES["j"] - SIZES["i"]}
    env |= {name: torch.tensor(n) for name, n in lengths.items()}
    values = [evaluate([x], env, [], torch.float32)[0] for x in nodes(e)]
    assert all(x.long().abs().max() < 2**31 for x in values)


@pytest.mark.parametrize(
    ("fn", "fits"),
    [
        (lambda i, j: (i * j) % 7, (46341, 46341)),
        (lambda i, j: (i - j) ** 2, (46341, 46341)),
        (lambda i, j: i * 100 + j, (21474836, 48)),
        (lambda i, j: ((i % 64) * 65536 + (j // 3)) ^ 5, (1 << 24, 100)),
        (lambda i, j: (i + 1) * 4096 % 5, (524287, 1)),
    ],
)
def test_sizes_that_32_bits_hold_are_told_exactly(fn, fits):
    e = trace(lambda s, b, h, i, j: fn(i, j) + 0, NAMES)
    queries, keys = fits
    sizes = {"b": 1, "h": 1, "i": queries, "j": keys}
    assert expr.beyond_32_bits((e,), sizes) == ""
    assert expr.beyond_32_bits((e,), sizes | {"i": 64 * queries, "j": 64 * keys}) or "% 64" in str(e)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex64], ids=str)
def test_a_tensor_with_which_torch_or_no_kernel_computes_is_refused(dtype):
    with pytest.raises(ValueError, match=r"cannot read a tensor of .*; convert it: t\.long\(\)"):
        expr.lookup(torch.zeros(3, dtype=dtype), symbol("h"))


def test_lookup_says_the_same_as_indexing():
    t = leaves().hi
    spelt = trace(lambda s, b, h, i, j: expr.lookup(t, h, i - 1), NAMES)
    indexed = trace(lambda s, b, h, i, j: t[h, i - 1], NAMES)
    assert str(spelt) == str(indexed) == "float0[h, i - 1]"


@pytest.mark.parametrize("shapes", [((3, 1), (4,)), ((), (0, 1)), ((1, 1, 1, 1), (2, 5)), ((0,), (1,)), ((2, 3),)])
def test_broadcast_shape_is_torch_s(shapes):
    assert expr.broadcast_shape(*shapes) == tuple(torch.broadcast_shapes(*shapes))


def test_one_tensor_read_twice_is_one_leaf_and_equal_tensors_are_two():
    t, twin = leaves().h, leaves().h
    text, tensors = to_text(trace(lambda s, b, h, i, j: t[h] + t[2 - h] + twin[h], NAMES))
    assert text == "(float0[h] + float0[2 - h]) + float1[h]"
    assert [x is y for x, y in zip(tensors, (t, twin), strict=True)] == [True, True]


def test_leaves_are_named_by_their_kind():
    t = leaves()
    text, _ = to_text(trace(lambda s, b, h, i, j: torch.where(t.flag[h], t.order[i], t.h[h]), NAMES))
    assert text == "where(bool0[h], int1[i], float2[h])"


def test_a_function_is_called_once():
    calls = []
    trace(lambda s, b, h, i, j: calls.append(1) or s, NAMES)
    assert calls == [1]


def test_a_function_may_return_a_constant():
    assert torch.equal(traced(lambda t, *_: 2.5), torch.tensor(2.5, dtype=torch.float64))
    assert traced(lambda t, *_: True).item() is True
    assert traced(lambda t, *_: t.scalar) == leaves().scalar


def test_numpy_numbers_are_numbers():
    e = trace(lambda s, b, h, i, j: np.float64(0.5) * i + i * np.float64(0.5), NAMES)
    assert kind(e) == "float"
    assert torch.equal(evaluate([through_text(e)[0]], environment(), (), torch.float64)[0], environment()["i"].double())


# -- Refusals ------------------------------------------------------------------------------------------------------

REFUSED = {
    "if": (lambda t, s, b, h, i, j: s if s > 0 else -s, "`if`"),
    "and": (lambda t, s, b, h, i, j: (i > j) and (i > 2), "and"),
    "not": (lambda t, s, b, h, i, j: not i, "not"),
    "chained-comparison": (lambda t, s, b, h, i, j: 0 < i < 3, "and"),
    "min-builtin": (lambda t, s, b, h, i, j: min(i, j), "`if`"),
    "int": (lambda t, s, b, h, i, j: int(i), r"int\(\)"),
    "float": (lambda t, s, b, h, i, j: float(s), r"float\(\)"),
    "math": (lambda t, s, b, h, i, j: math.exp(s), r"float\(\)"),
    "range": (lambda t, s, b, h, i, j: list(range(i)), "index"),
    "list-index": (lambda t, s, b, h, i, j: [1, 2, 3][i], "index"),
    "numpy-index": (lambda t, s, b, h, i, j: s + np.arange(9)[j], r"NumPy; .*torch\.from_numpy"),
    "numpy-where": (lambda t, s, b, h, i, j: np.where(i > j, s, 0.0), "NumPy"),
    "iteration": (lambda t, s, b, h, i, j: list(s), "iteration"),
    "sum": (lambda t, s, b, h, i, j: s.sum(), "sum`"),
    "torch-sum": (lambda t, s, b, h, i, j: torch.sum(s, -1), "`sum`"),
    "mean": (lambda t, s, b, h, i, j: s.mean(), "mean`"),
    "max": (lambda t, s, b, h, i, j: s.max(), "max`"),
    "torch-min": (lambda t, s, b, h, i, j: torch.min(s), "`min`"),
    "max-over-dim": (lambda t, s, b, h, i, j: torch.max(s, 0), "`max`"),
    "amax": (lambda t, s, b, h, i, j: s.amax(-1), "amax`"),
    "any": (lambda t, s, b, h, i, j: (i > j).any(), "any`"),
    "softmax": (lambda t, s, b, h, i, j: torch.softmax(s, -1), "`softmax`"),
    "cumsum": (lambda t, s, b, h, i, j: torch.cumsum(s, 0), "`cumsum`"),
    "matmul": (lambda t, s, b, h, i, j: torch.matmul(s, s), "`matmul`"),
    "item": (lambda t, s, b, h, i, j: s.item(), "item`"),
    "in-place": (lambda t, s, b, h, i, j: [s.add_(1), s][1], "add_`"),
    "in-place-used": (lambda t, s, b, h, i, j: s.mul_(2), "mul_`"),
    "ndim": (lambda t, s, b, h, i, j: s if s.ndim == 0 else 2 * s, "ndim"),
    "shape": (lambda t, s, b, h, i, j: s * len(s.shape), "shape"),
    "alpha": (lambda t, s, b, h, i, j: torch.add(s, i, alpha=2), "alpha"),
    "decimals": (lambda t, s, b, h, i, j: torch.round(s, decimals=1), "decimals"),
    "too-many-arguments": (lambda t, s, b, h, i, j: s.abs(1), "`abs`"),
    "one-argument-where": (lambda t, s, b, h, i, j: torch.where(i > j), "`where`"),
    "where-of-no-truth-value": (lambda t, s, b, h, i, j: torch.where(i, s, 0), "`where`"),
    "to-device": (lambda t, s, b, h, i, j: s.to("cpu"), r"`\.to`"),
    "shift": (lambda t, s, b, h, i, j: s << 1, "shift of a float"),
    "bits-of-a-float": (lambda t, s, b, h, i, j: s & 1, "`&` of a float"),
    "difference-of-truth-values": (lambda t, s, b, h, i, j: (i > j) - (i < j), r"`-` of truth values; .*x\.int\(\)"),
    "negative-truth-value": (lambda t, s, b, h, i, j: s * -(i > j), "`neg` of truth values"),
    "negative-power-of-a-whole-number": (lambda t, s, b, h, i, j: (i + 1) ** -1, "negative power"),
    "to-an-unread-dtype": (lambda t, s, b, h, i, j: i.to(torch.uint32), "uint32"),
    "constant-of-a-shape": (lambda t, s, b, h, i, j: s.new_zeros(3), "shape 3"),
    "dot": (lambda t, s, b, h, i, j: s + torch.dot(t.hi[h], t.hi[h]), "append them to q and k"),
    "slice": (lambda t, s, b, h, i, j: t.hi[h, :], "slice"),
    "chained-slice": (lambda t, s, b, h, i, j: t.hi[h][1:], "slice"),
    "ellipsis": (lambda t, s, b, h, i, j: t.hi[..., i], "slice"),
    "none-index": (lambda t, s, b, h, i, j: t.hi[None, h, i], "`None`"),
    "float-index": (lambda t, s, b, h, i, j: t.hi[h, i / 2], "index"),
    "score-index": (lambda t, s, b, h, i, j: t.h[s], "index"),
    "bool-index": (lambda t, s, b, h, i, j: t.hi[h, i > j], "index"),
    "too-few-indices": (lambda t, s, b, h, i, j: s + t.hi[h], r"\(3, 4\)"),
    "too-few-indices-left": (lambda t, s, b, h, i, j: t.hi[h] + s, r"\(3, 4\)"),
    "too-few-indices-returned": (lambda t, s, b, h, i, j: t.hi[h], r"\(3, 4\)"),
    "too-few-indices-compared": (lambda t, s, b, h, i, j: t.hi[h] > 0, r"\(3, 4\)"),
    "too-few-indices-negated": (lambda t, s, b, h, i, j: -t.hi[h], r"\(3, 4\)"),
    "too-few-indices-in-torch": (lambda t, s, b, h, i, j: torch.tanh(t.hi[h]), r"\(3, 4\)"),
    "if-too-few-indices": (lambda t, s, b, h, i, j: s if t.hi[h] else 2 * s, r"\(3, 4\)"),
    "whole-tensor": (lambda t, s, b, h, i, j: s + t.hi, r"\(3, 4\)"),
    "whole-tensor-left": (lambda t, s, b, h, i, j: t.hi + s, r"\(3, 4\)"),
    "tuple-returned": (lambda t, s, b, h, i, j: (s, i), "tuple"),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "what"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_traced_is_refused_by_name(fn, what):
    with pytest.raises(NotImplementedError, match=what):
        trace(partial(fn, leaves()), NAMES)


def test_too_many_or_too_few_indices_of_a_lookup_are_a_value_error():
    t = leaves().hi
    with pytest.raises(ValueError, match=r"\(3, 4\) needs 2 indices, got 3"):
        lookup(t, H, I, J)
    with pytest.raises(ValueError, match=r"\(3, 4\) needs 2 indices, got 1"):
        lookup(t, H)


def test_logical_functions_of_integers_ask_whether_they_are_zero():
    for fn in (torch.logical_and, torch.logical_or, torch.logical_xor):
        assert torch.equal(
            traced(lambda t, s, b, h, i, j, fn=fn: fn(i, j)), in_torch(lambda t, s, b, h, i, j, fn=fn: fn(i, j))
        )
    assert torch.equal(
        traced(lambda t, s, b, h, i, j: torch.logical_not(i)), in_torch(lambda t, s, b, h, i, j: torch.logical_not(i))
    )


# -- Text ----------------------------------------------------------------------------------------------------------


def test_a_shared_node_is_printed_once_so_twenty_squarings_stay_short():
    x = S
    for _ in range(20):
        x = x * x
    text, _ = to_text(x)
    assert len(text) < 500
    again = parse(text)
    assert sum(e.op == "mul" for e in nodes(again)) == 20
    near_one = torch.tensor(1 + 2**-20, dtype=torch.float64)
    torch.testing.assert_close(evaluate([again], {"s": near_one}, (), torch.float64)[0], near_one**2**20)


def test_text_is_a_fixed_point_of_printing_what_was_read():
    for fn in TRACED.values():
        text, _ = to_text(trace(partial(fn, leaves()), NAMES))
        assert to_text(parse(text))[0] == text


def test_equal_functions_have_equal_texts():
    fns = [lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0) - (i - j).abs() * 0.1 for _ in range(100)]
    assert {to_text(trace(fn, NAMES))[0] for fn in fns} == {"(30.0 * tanh(s / 30.0)) - (abs(i - j) * 0.1)"}


def test_leaf_numbers_are_moved_to_their_slots_when_read():
    e = parse("float0[h] + float1[h] * float0[i]", lambda n: (5, 2)[n])
    assert [node.args[0] for node in expr.lookups(e)] == [("float", 5), ("float", 2), ("float", 5)]


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 1e-300, -1e30, 2**40, -(2**40), 0.1, True])
def test_a_number_keeps_its_value_and_kind_through_text(value):
    again = parse(str(number(value)))
    assert (again.op, again.args) == ("number", (value,))
    assert type(again.args[0]) is type(value)
    assert math.copysign(1, again.args[0]) == math.copysign(1, value)


def test_a_nan_keeps_its_value_through_text():
    assert math.isnan(parse(str(number(math.nan))).args[0])


def deep(depth: int):
    def fn(s, b, h, i, j):
        for _ in range(depth):
            s = s * 1.5 - i
        return s

    return fn


@pytest.mark.parametrize("depth", [70, 300])
def test_a_deep_function_keeps_its_meaning(depth):
    e, _ = through_text(trace(deep(depth), NAMES))
    env = environment()
    got = evaluate([e], env, (), torch.float64)[0]
    torch.testing.assert_close(got, deep(depth)(*[env[name] for name in NAMES]))


UNARY = ["neg", "abs", "tanh", "sigmoid", "sin", "relu", "exp2", "erf"]
BINARY = ["add", "sub", "mul", "maximum", "minimum"]
_LEAF = torch.randn(3, 4, generator=torch.Generator().manual_seed(8), dtype=torch.float64)

_read = lambda *index: Expr("lookup", (("float", 0), *index))  # noqa: E731
_READ = _read(H, I)


@st.composite
def expressions(draw, size: int = 8) -> Expr:
    """A random expression of s, i, j and a leaf; its nodes use earlier nodes, so that many are shared."""
    made = [S, I, J, number(0.5), number(-2), _READ]
    for _ in range(draw(st.integers(1, size))):
        pick = lambda: made[draw(st.integers(0, len(made) - 1))]  # noqa: E731
        form = draw(st.sampled_from(["unary", "binary", "binary", "where", "div", "lookup"]))
        if form == "unary":
            made.append(apply(draw(st.sampled_from(UNARY)), apply("float", pick())))
        elif form == "binary":
            made.append(apply(draw(st.sampled_from(BINARY)), pick(), pick()))
        elif form == "where":
            made.append(apply("where", pick() > pick(), apply("float", pick()), pick()))
        elif form == "div":
            made.append(pick() / (apply("abs", pick()) + number(1.5)))
        else:
            made.append(_read(H, apply("int", apply("clamp_max", pick(), 99.0))))
    return made[-1] * S


@settings(max_examples=150, deadline=None, derandomize=True)
@given(expressions())
def test_any_expression_means_the_same_after_its_round_trip_through_text(e):
    got, expected = (evaluate([x], environment(), [_LEAF], torch.float64)[0] for x in (parse(str(e)), e))
    assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(expected))


# -- Kinds and evaluation ------------------------------------------------------------------------------------------

KINDS = {
    "float": [S, S + I, I / J, apply("tanh", I), I * 0.5, apply("where", I > J, I, 0.5), apply("float", I > J), 2.0**I],
    "int": [I, I + J, I // 2, I % 2, 2**I, apply("int", S), -I, apply("where", I > J, I, 0), (I > J) + I, I & J],
    "bool": [I > J, S == S, (I > J) & (J > 2), ~(I > J), apply("bool", I), number(True), (I > J) | number(False)],
}


@pytest.mark.parametrize(("what", "e"), [(k, e) for k, es in KINDS.items() for e in es], ids=str)
def test_a_kind_is_that_of_the_evaluated_tensor(what, e):
    value = evaluate([e], environment(), (), torch.float64)[0]
    found = "bool" if value.dtype == torch.bool else "float" if value.is_floating_point() else "int"
    assert kind(e) == what == found


def test_integer_division_is_computed_in_the_compute_dtype():
    third = evaluate([I / 3], {"i": torch.tensor([1])}, (), torch.float64)[0]
    assert third.item() == 1 / 3
    assert evaluate([I / 3], {"i": torch.tensor([1])}, (), torch.float32)[0].dtype == torch.float32


def test_numbers_and_leaves_are_taken_in_the_compute_dtype():
    half = torch.tensor([0.1], dtype=torch.float16)
    for dtype in DTYPES:
        value = evaluate([parse("s * 0.1 + float0[0]")], {"s": torch.ones(1, dtype=dtype)}, [half], dtype)[0]
        assert value.dtype == dtype
        assert value.item() == (torch.tensor(0.1, dtype=dtype) + half.to(dtype)).item()


def test_a_value_is_broadcast_from_the_symbols_it_depends_on_alone():
    shapes = [tuple(x.shape) for x in evaluate([I - J, H * 2, S + B], environment(), (), torch.float64)]
    assert shapes == [(1, 1, 4, 5), (1, 3, 1, 1), SHAPE]


def test_an_index_out_of_range_is_clamped():
    t = torch.arange(4.0)
    value = evaluate([parse("float0[i - 2]")], {"i": torch.arange(9)}, [t], torch.float32)[0]
    assert value.tolist() == [0, 0, 0, 1, 2, 3, 3, 3, 3]


def test_a_literal_negative_index_counts_from_the_end():
    t = leaves().hi
    e, tensors = through_text(trace(lambda s, b, h, i, j: t[h, -1] + t[-3, i], NAMES))
    got = evaluate([e], environment(), tensors, torch.float64)[0]
    assert torch.equal(got[0, :, :, 0], t[:, -1:] + t[-3])


# 9 * 0.3 * 10 is 27.000002 in fp32 and 26.999999999999996 in fp64: the floor differs.
COMPUTED_INDEX = lambda s, b, h, i, j: (i * 0.3 * 10).int()  # noqa: E731


def test_a_computed_index_reads_the_same_element_in_every_compute_dtype():
    t = torch.arange(400.0)
    e = parse(f"float0[{trace(COMPUTED_INDEX, NAMES)}]")
    env = {"i": torch.arange(130).view(1, 1, -1, 1)}
    fp32, fp64 = (evaluate([e], env, [t], dtype)[0] for dtype in DTYPES)
    assert torch.equal(fp32.double(), fp64)


# -- Derivatives ---------------------------------------------------------------------------------------------------

_X = [-1.5, -0.5, 0.0, 0.5, 0.5, 2.0, 3.0]
_Y = [0.5, -0.5, 0.0, 0.5, 1.5, -3.0, 3.0]
_POSITIVE = ([0.25, 1.0, 3.0, 7.5],)
_PAIRS = (_X, _Y)  # ties at (-0.5, -0.5), (0, 0), (0.5, 0.5), (3, 3)
_NOT_ZERO = (_X, [1.5, -0.4, 2.0, 0.3, -0.5, -3.0, 0.7])
_BITS = ([0, 1, 2, 3], [3, 2, 2, 0])
POINTS = {
    **dict.fromkeys(("add", "sub", "mul", "maximum", "minimum", "clamp_min", "clamp_max"), _PAIRS),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _PAIRS),
    **dict.fromkeys(("div", "mod", "floordiv"), _NOT_ZERO),
    **dict.fromkeys(("and", "or", "xor", "lshift", "rshift"), _BITS),
    "not": _BITS[:1],
    **dict.fromkeys(("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "relu", "float", "int", "bool"), (_X,)),
    **dict.fromkeys(("exp", "exp2", "expm1", "tanh", "sigmoid", "erf", "erfc", "sin", "cos", "atan"), (_X,)),
    **dict.fromkeys(("asin", "acos"), ([-0.9, -0.5, 0.0, 0.3, 0.99],)),
    "atan2": _NOT_ZERO,
    **dict.fromkeys(("log", "log2", "sqrt", "rsqrt"), _POSITIVE),
    "log1p": ([-0.5, 0.0, 3.0],),
    "pow": ([0.0, 0.0, 0.0, 0.5, 2.0, -2.0, 3.0], [0.0, 2.0, 0.5, 0.5, 3.0, 2.0, -1.0]),
    "where": ([1.0, 1.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]),
}
OF_BITS = ("and", "or", "xor", "not", "lshift", "rshift")
# What the row stands for, where torch's own function of that name has other ties than the one it is computed with.
MEANING = {
    "clamp_min": lambda x, c: torch.clamp(x, min=c),
    "clamp_max": lambda x, c: torch.clamp(x, max=c),
    "where": lambda c, x, y: torch.where(c > 0, x, y),
    "int": lambda x: x.trunc(),
    "bool": lambda x: (x != 0).double(),
}


def _or_zero(slope: Expr | None) -> Expr:
    return number(0.0) if slope is None else slope


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_derivative_of_every_operation_is_autograds(op):
    points = [torch.tensor(p, dtype=torch.int64 if op in OF_BITS else torch.float64) for p in POINTS[op]]
    arguments = [Expr("lookup", ((expr.tensor_kind(p), n), I)) for n, p in enumerate(points)]
    first = [arguments[0] > number(0), *arguments[1:]] if op == "where" else arguments
    e, env = apply(op, *first), {"i": torch.arange(len(points[0]))}
    points = [p.requires_grad_(p.is_floating_point()) for p in points]
    result = MEANING.get(op, OPERATIONS[op].torch)(*points)
    torch.testing.assert_close(evaluate([e], env, points, torch.float64)[0].double(), result.double(), equal_nan=True)
    for n, argument in enumerate(arguments):
        expected = torch.zeros(len(points[0]), dtype=torch.float64)
        if result.requires_grad and op != "floordiv":  # torch refuses to differentiate floor division
            (grad,) = torch.autograd.grad(result.sum(), points[n], retain_graph=True, allow_unused=True)
            expected = expected if grad is None else grad
        value = (
            evaluate([_or_zero(derivative(e, argument))], env, [p.detach() for p in points], torch.float64)[0]
            .double()
            .expand(expected.shape)
        )
        torch.testing.assert_close(value, expected, equal_nan=True, rtol=1e-12, atol=1e-14)


def test_a_derivative_that_is_zero_everywhere_is_none():
    assert derivative(I - J, S) is None
    assert derivative(apply("floor", S), S) is None
    assert derivative(apply("where", S > 0, I, J), S) is None
    assert derivative(apply("int", S) * J, S) is None


COMPOSED = {
    "tan": (torch.tan, _X),
    "sinh": (torch.sinh, [*_X, 1e-9, -1e-9]),
    "cosh": (torch.cosh, _X),
    "hypot": (torch.hypot, _X, _NOT_ZERO[1]),
    "fmod": (torch.fmod, *_NOT_ZERO),
    "logaddexp": (torch.logaddexp, [*_X, -math.inf, -math.inf], [*_Y, -math.inf, 1.0]),
    "lerp": (torch.lerp, _X, _Y, _NOT_ZERO[1]),
    "softplus": (F.softplus, [*_X, -40.0, 40.0]),
    "logsigmoid": (F.logsigmoid, [*_X, -40.0, 40.0]),
    "fmax": (torch.fmax, [*_X, math.nan, 1.0], [*_Y, 1.0, math.nan]),
    "fmin": (torch.fmin, [*_X, math.nan, 1.0], [*_Y, 1.0, math.nan]),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_a_composed_function_and_its_derivatives_are_torchs(name):
    fn, *values = COMPOSED[name]
    points = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in values]
    arguments = [Expr("lookup", (("float", n), I)) for n in range(len(points))]
    e, env, leaves = fn(*arguments), {"i": torch.arange(len(values[0]))}, [p.detach() for p in points]
    result = fn(*points)
    torch.testing.assert_close(evaluate([e], env, leaves, torch.float64)[0], result.detach(), rtol=1e-13, atol=0)
    for argument, grad in zip(arguments, torch.autograd.grad(result.sum(), points), strict=True):
        got = evaluate([derivative(e, argument)], env, leaves, torch.float64)[0].expand(grad.shape)
        finite = torch.isfinite(result)
        torch.testing.assert_close(got[finite].double(), grad[finite], rtol=1e-12, atol=1e-14)


def test_a_branch_not_taken_gives_no_nan_to_the_derivative():
    e = 2 * apply("where", S > 0, apply("sqrt", S) + apply("log", S), S * 3)
    s = torch.tensor([-1.0, 0.0, 4.0], dtype=torch.float64)
    assert evaluate([derivative(e, S)], {"s": s}, (), torch.float64)[0].tolist() == [6.0, 6.0, 2 * (0.25 + 0.25)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(expressions().map(str))
def test_the_derivative_of_any_expression_is_autograds(text):
    e = parse(text)
    env = environment()
    env["s"].requires_grad_()
    leaf = _LEAF.clone().requires_grad_()
    (value,) = evaluate([e], env, [leaf], torch.float64)
    g = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ds, dleaf = torch.autograd.grad((value * g).sum(), (env["s"], leaf), allow_unused=True, materialize_grads=True)
    env["s"] = env["s"].detach()
    finite = torch.isfinite(value) & torch.isfinite(ds)
    slope = _or_zero(derivative(e, S))
    got = (evaluate([slope], env, [_LEAF], torch.float64)[0] * g).expand(SHAPE)
    torch.testing.assert_close(got[finite], ds[finite], rtol=1e-9, atol=1e-9)
    if bool(finite.all()) and bool(torch.isfinite(dleaf).all()):
        total = torch.zeros_like(_LEAF)
        for read in expr.lookups(e):
            slope = _or_zero(derivative(e, read))
            read_adjoint(
                total, read, env, [_LEAF], (evaluate([slope], env, [_LEAF], torch.float64)[0] * g).expand(SHAPE)
            )
        torch.testing.assert_close(total, dleaf, rtol=1e-9, atol=1e-9)


# -- Numbers as arguments ------------------------------------------------------------------------------------------


def test_expressions_that_differ_in_numbers_alone_share_one_abstract_text():
    fn = lambda c, w: lambda s, b, h, i, j: torch.where(j + w > i, c * torch.tanh(s / c), -torch.inf)  # noqa: E731
    texts = {to_text(abstract(trace(fn(c, w), NAMES), []))[0] for c, w in [(30.0, 5), (50.0, 7), (1e-3, 0)]}
    assert texts == {"where((j + int_0) > i, float_1 * tanh(s / float_2), float_3)"}


def test_an_int_and_a_float_number_are_different_parameters():
    assert to_text(abstract(S * 2, []))[0] != to_text(abstract(S * 2.0, []))[0]


def test_an_abstract_text_is_read_back():
    e = abstract(apply("where", I > 3, S * 2.5, S * 2.5 - J), [])
    assert str(parse(str(e))) == str(e)
    assert sorted(x.args for x in nodes(parse(str(e))) if x.op == "param") == [(0, "int"), (1, "float"), (2, "float")]


def test_bools_stay_in_the_abstract_text():
    numbers = []
    assert str(abstract((I > J) | number(True), numbers)) == "(i > j) | True"
    assert numbers == []


@pytest.mark.parametrize("fn", TRACED.values(), ids=TRACED)
def test_an_abstract_expression_with_its_numbers_is_worth_the_same(fn):
    e, tensors = through_text(trace(partial(fn, leaves()), NAMES))
    numbers: list[float] = [99.0]  # numbers are appended to what other trees have left
    general = abstract(e, numbers)
    assert all(isinstance(node.args[0], bool) for node in nodes(general) if node.op == "number")
    got, expected = (evaluate([x], environment(), tensors, torch.float64, numbers)[0] for x in (general, e))
    assert torch.equal(got, expected)


def test_substitution_keeps_what_is_shared_shared():
    x = S * S
    twice = expr.substitute(x + x, {"s": apply("tanh", S)})
    assert [e.op for e in nodes(twice)] == ["symbol", "tanh", "mul", "add"]
