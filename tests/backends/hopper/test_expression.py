"""Expressions as the Hopper kernels compute them, on the emulated machine, against :func:`tilewise.expr.evaluate`."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from tests.backends.contract import IN_NO_KERNEL
from tests.backends.hopper import emulated
from tests.reports import test_divisions as divisions
from tilewise import expr
from tilewise.backends.hopper import capped, operations
from tilewise.expr import OPERATIONS, Expr, apply, symbol

EXPRESSION, SOFTMAX = emulated.imported("kit.expression", "kit.softmax")
S, I, J = (symbol(name) for name in "sij")
N = emulated.THREADS.size
LEAVES = (torch.randn(5, 400), torch.arange(7) > 3, torch.tensor([3, 1 << 40, -2]), torch.tensor(0.5))


def both(e: Expr, i, j, s) -> tuple[np.ndarray, torch.Tensor]:
    """The kernel's values and torch's, for one row and the first column of every thread."""
    e = expr.parse(str(e))  # leaves by number
    leaves = tuple(emulated.Global(x.reshape(x.shape or (1,)).numpy()) for x in LEAVES)
    common = {"b": 1, "h": 2, "off": 3, "seqlen_q": 40, "seqlen_k": 43}
    pairs = EXPRESSION.Pairs(common, ("i", "j"), [np.asarray(i)] * 2, np.asarray(j), leaves, ())
    with np.errstate(all="ignore"):
        found = EXPRESSION.Values([e], pairs).at(0, 0, np.asarray(s, np.float32))[0]
    env = {"i": torch.as_tensor(i), "j": torch.as_tensor(j), "s": torch.as_tensor(s).float()}
    env |= {name: torch.tensor(x) for name, x in common.items()}
    return np.broadcast_to(found, (N,)), expr.evaluate([e], env, LEAVES, torch.float32)[0].expand(N)


NO_BOOLS = (
    "lshift",
    "rshift",
    "sub",
    "neg",
    "abs",
    "sign",
    "floordiv",
    "mod",
    "pow",
    "floor",
    "ceil",
    "round",
    "trunc",
    "relu",
)
NO_FLOATS = ("and", "or", "xor", "not", "lshift", "rshift")


def cases() -> dict[str, Expr]:
    found = {}
    for name, operation in OPERATIONS.items():
        if name in IN_NO_KERNEL:
            continue
        whole = (
            (I, J % 4) if name in ("pow", "lshift") else (I, J * 2 - 7)
        )  # no division by 0, no power below 0, 32 bits
        for kind, args in {"float": (S, J * 0.5), "int": whole, "bool": (I > J, J > 9), "mixed": (S, J)}.items():
            if name in NO_BOOLS * (kind == "bool") + NO_FLOATS * (kind in ("float", "mixed")):
                continue
            given = [I > J, *args] if name == "where" else args[: operation.arguments]
            found[f"{name}-{kind}"] = apply(name, *given)
    return found


CASES = cases()


def test_the_operations_are_known_without_the_dsl():
    assert operations.traceable() == set(OPERATIONS) - IN_NO_KERNEL
    known = {operation for table in EXPRESSION.FUNCTIONS.values() for operation in table}
    assert known | {*operations.SAME, "where"} == set(OPERATIONS) - IN_NO_KERNEL


@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_torch_s(name):
    rng = np.random.default_rng(3)
    i, j, s = rng.integers(0, 40, N), rng.integers(0, 40, N), rng.standard_normal(N) * 3
    positive = name.startswith(("log", "sqrt", "rsqrt", "pow"))
    found, expected = both(CASES[name], i, j, (np.abs(s) if positive else s).astype(np.float32))
    assert (np.asarray(found).dtype == bool) == (expected.dtype == torch.bool)
    found = torch.from_numpy(np.array(found)).double()
    torch.testing.assert_close(found, expected.double(), rtol=3e-6, atol=1e-6, equal_nan=True)


CORNERS = [-np.inf, -7.5, -3.0, -0.0, 0.0, 0.1, 0.7, 3.0, np.inf, np.nan]


@pytest.mark.parametrize("name", ["maximum", "minimum", "relu", "abs", "mod", "floordiv"])
def test_a_float_operation_is_torch_s_at_infinities_multiples_and_nan(name):
    left, right = (x.ravel().astype(np.float32) for x in np.meshgrid(CORNERS, [x for x in CORNERS if x != 0.0]))
    args = [left, right][: OPERATIONS[name].arguments]
    with np.errstate(all="ignore"):
        found = EXPRESSION.FUNCTIONS["float"][name](*args)
    expected = OPERATIONS[name].torch(*map(torch.from_numpy, args))
    torch.testing.assert_close(torch.from_numpy(found.astype(np.float32)), expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "case"), [("mod", "rest"), ("floordiv", "quotient rounded down"), ("pow", "power")])
def test_rests_quotients_and_powers_are_torch_s_at_the_ends_of_fp32(name, case):
    x, y = divisions.pairs(case)
    with np.errstate(all="ignore"):
        found = torch.from_numpy(EXPRESSION.FUNCTIONS["float"][name](x.numpy(), y.numpy()))
    wanted = OPERATIONS[name].torch(x, y)
    wrong = ~divisions.is_worth(found, wanted)
    assert not wrong.any(), torch.stack([x, y, found, wanted], -1)[wrong].tolist()


POWERS = [*product(range(-9, 10), range(10)), (3, 19), (-1, 33), (46340, 2), (-1, -3), (1, -2), (5, -1)]
SHIFTS = [*product((-(2**31), -3, -1, 0, 1, 5, 2**31 - 1), (-1, 0, 1, 7, 30, 31, 32, 63, 99))]


@pytest.mark.parametrize(("name", "pairs"), [("pow", POWERS), ("lshift", SHIFTS), ("rshift", SHIFTS)])
def test_whole_powers_and_shifts_are_exact(name, pairs):
    left, right = np.array(pairs, np.int32).T
    with np.errstate(all="ignore"):
        found = EXPRESSION.FUNCTIONS["int"][name](left, right).astype(np.int32)
    exact = OPERATIONS[name].torch(torch.from_numpy(left.copy()), torch.from_numpy(right.copy()))
    assert np.array_equal(found, exact.numpy())


def test_whole_powers_of_64_bits_are_exact():
    left, right = np.array([(2, 40), (3, 33), (-2, 63), (-1, 61), (7, 0), (5, 47)], np.int64).T
    with np.errstate(all="ignore"):
        found = EXPRESSION.FUNCTIONS["int"]["pow"](left, right)
    exact = torch.pow(torch.from_numpy(left.copy()), torch.from_numpy(right.copy()))
    assert np.array_equal(found, exact.numpy())


READS = {
    "float": Expr("lookup", (LEAVES[0], I - 2, J)),
    "bool": Expr("lookup", (LEAVES[1], J)),
    "int64": Expr("lookup", (LEAVES[2], I)),
    "scalar": Expr("lookup", (LEAVES[3],)) * S,
}


@pytest.mark.parametrize("name", READS)
def test_a_tensor_is_read_within_its_bounds(name):
    slots = {id(x): n for n, x in enumerate(LEAVES)}
    leaf = expr.lookups(READS[name])[0].args[0]
    text = expr.to_text(READS[name])[0]
    e = expr.parse(text, lambda _: slots[id(leaf)])
    found, expected = both(e, np.arange(N), np.arange(N) * 4, np.ones(N))
    torch.testing.assert_close(torch.from_numpy(np.array(found)).double(), expected.double(), rtol=1e-6, atol=0)


def test_whole_numbers_of_any_size_divide_as_python_s_do():
    rng = np.random.default_rng(5)
    a = rng.integers(-(2**31) + 1, 2**31 - 1, 4096) >> rng.integers(0, 31, 4096)
    b = np.where(rng.random(4096) < 0.5, 1, -1) * (1 + (rng.integers(0, 2**31 - 1, 4096) >> rng.integers(0, 31, 4096)))
    assert np.array_equal(EXPRESSION.floor_divide(a, b), a // b)


@pytest.mark.parametrize("together", [8, 12, 16])
@pytest.mark.parametrize("largest", [0.3, 0.7, 2.0, 9.5])
def test_a_softcap_is_right_to_its_own_size(largest, together):
    """Small scores under a large cap are what lse shows; the largest, in caps, take each of the three ways and end where tanh is 1."""
    cap, scale = np.float32(30.0), np.float32(0.25)
    s = np.geomspace(1e-6, largest * 30 / 0.25, 2 * 32 * N).astype(np.float32).reshape(2, 32, N)
    s[1] = -s[1]
    found, cap2 = s.copy(), np.float32(2 * np.log2(np.e)) * scale / cap
    SOFTMAX.softcap(found, cap2, np.float32(20.0), together)
    exact = 20.0 * np.tanh(s.astype(np.float64) * 0.25 / 30.0)
    assert np.abs(found / exact - 1).max() < 6e-7
    below = (np.float32(3.0), np.float32(-1.0))
    SOFTMAX.softcap(s, cap2, np.float32(20.0), together, below)
    power = np.exp2(exact - np.array(below, np.float64)[:, None, None])
    assert np.abs(s / power - 1).max() < 20 * 6e-7


@pytest.mark.parametrize("together", [8, 12, 16])
@pytest.mark.parametrize("largest", [0.45, 1.4, 9.5])
def test_one_large_score_decides_for_its_columns(largest, together):
    """At any row and column, of one thread alone: the polynomial of the others would miss it."""
    exact = 20.0 * np.tanh(np.float64(np.float32(largest)))
    for row, column in np.ndindex(2, 32):
        s = np.full((2, 32, N), 0.01, np.float32)
        s[row, column, 5] = largest
        SOFTMAX.softcap(s, np.float32(2 * np.log2(np.e)), np.float32(20.0), together)
        assert abs(s[row, column, 5] / exact - 1) < 6e-7


def test_a_softcap_keeps_nan_and_ends_infinity():
    s = np.full((2, 8, N), np.inf, np.float32)
    s[0, 0], s[1, 1] = np.nan, -np.inf
    SOFTMAX.softcap(s, np.float32(1.0), np.float32(1.0), 16)
    assert np.isnan(s[0, 0]).all()
    assert np.abs(s[1, 1] + 1).max() < 3e-7
    assert np.abs(s[:, 2:] - 1).max() < 3e-7


SCALE2, CAP2 = (
    np.float32(30.0 * np.log2(np.e)),
    np.float32(2 * np.log2(np.e) * 0.25 / 30.0),
)  # a cap of 30, a softmax_scale of 0.25
BELOW = (np.float32(3.0), np.float32(-1.0))
VOTES = len(capped.LEVELS)


def capped_powers(s: np.ndarray, wait: int, scale2=SCALE2, cap2=CAP2) -> tuple:
    """A steady block's powers, their sums by row and thread, and for how many blocks each thread then waits."""
    powers, totals, waits = s.astype(np.float32), np.zeros((2, N), np.float32), np.full((1, N), wait)
    emulated.role.threads = N
    levels = SOFTMAX.ShortTanh.of(tuple(np.float32(x) for x in capped.numbers(float(scale2), float(cap2))))
    SOFTMAX.capped_powers(powers, scale2, BELOW, SOFTMAX.Capped(cap2, 8, levels, waits), totals, 0)
    return powers, totals, waits[0]


def scores(largest: float) -> np.ndarray:
    """Scores of (2 rows, 32 columns, thread) of both signs, up to ``largest`` caps."""
    found = np.geomspace(1e-6, largest * 30 / 0.25, 2 * 32 * N).astype(np.float32).reshape(2, 32, N)
    return found * np.where(np.arange(N) % 2 == 0, 1, -1).astype(np.float32)


@pytest.mark.parametrize("level", range(VOTES + 1))
def test_a_steady_block_s_capped_scores_are_right_by_every_polynomial_and_by_votes(level):
    s = scores(0.999 * (capped.LEVELS[level].reach if level < VOTES else 0.74))
    wait = SOFTMAX.first_of(level)
    powers, totals, waits = capped_powers(s, wait)
    exponent = 30.0 * np.log2(np.e) * np.tanh(s.astype(np.float64) * 0.25 / 30.0)
    exact = np.exp2(exponent - np.array(BELOW, np.float64)[:, None, None])
    # tanh errs by at most four roundings to fp32, the exponent and its power by one each.
    allowed = (4 * 2.0**-24 * np.abs(exponent) + 2.0**-24 * (np.abs(exponent) + 3)) * np.log(2) + 2.0**-22
    assert (np.abs(powers / exact - 1) <= allowed).all()
    assert np.abs(totals / exact.sum(1) - 1).max() < 4e-6
    assert (waits == max(wait - 1, 0)).all()


@pytest.mark.parametrize("level", range(VOTES))
def test_a_polynomial_is_as_exact_as_it_says(level):
    reach, coefficients = capped.LEVELS[level]
    x = np.linspace(1e-6, reach, 20001)
    error = np.abs(np.polynomial.polynomial.polyval(x * x - reach**2, coefficients) * x / np.tanh(x) - 1)
    assert error.max() < 1.25e-7
    assert error[x < 0.1 * reach].max() < 0.65e-7


@pytest.mark.parametrize("level", range(VOTES))
@pytest.mark.parametrize("bad", [1.05, -1.05, 1e30, np.inf, -np.inf, np.nan])
def test_a_score_that_was_taken_to_be_small_shows_in_its_thread_s_sum(bad, level):
    reach = capped.LEVELS[level].reach
    s = scores(0.999 * reach)
    s[1, 20, 5] = bad * reach * 30 / 0.25 if abs(bad) < 2 else bad
    with np.errstate(all="ignore"):
        _, totals, waits = capped_powers(s, SOFTMAX.first_of(level))
    others = np.arange(N) != 5
    assert not totals[0, 5] < np.inf
    assert np.isfinite(totals[:, others]).all()
    assert waits[5] == SOFTMAX.first_of(level + 1)
    assert (waits[others] == max(SOFTMAX.first_of(level) - 1, 0)).all()


def test_votes_go_on_where_a_score_is_beyond_every_polynomial():
    s = scores(2.0)
    _, totals, waits = capped_powers(s, SOFTMAX.first_of(VOTES) - 5)
    exact = np.exp2(
        30.0 * np.log2(np.e) * np.tanh(s.astype(np.float64) * 0.25 / 30.0) - np.array(BELOW, np.float64)[:, None, None]
    )
    assert np.abs(totals / exact.sum(1) - 1).max() < 2e-5
    assert (waits == SOFTMAX.first_of(VOTES)).all()


@pytest.mark.parametrize(
    ("scale2", "cap2"), [(1.0, 1e-30), (1.0, 1e30), (1e38, 1e9), (1.0, 0.0)], ids=["low", "high", "cap", "zero"]
)
def test_coefficients_beyond_fp32_are_never_used(scale2, cap2):
    numbers = capped.numbers(scale2, cap2)
    assert [limit for limit, _ in capped.by_level(numbers)] == [-np.inf] * VOTES
    assert len(numbers) == capped.COUNT


def test_numbers_of_a_launch_are_those_of_each_level_again():
    for (limit, coefficients), level in zip(
        capped.by_level(capped.numbers(float(SCALE2), float(CAP2))), capped.LEVELS, strict=True
    ):
        factor = float(CAP2) * np.log(2) / 2
        assert limit == pytest.approx((level.reach / factor) ** 2)
        expected = [float(SCALE2) * c * factor ** (2 * n + 1) for n, c in enumerate(level.coefficients)]
        assert coefficients == pytest.approx(expected)


@pytest.mark.parametrize(("largest", "level"), [(0.1, 0), (0.18, 1), (0.25, 1), (0.38, 2), (0.7, 2), (0.8, VOTES)])
def test_a_tile_begins_with_the_polynomial_that_its_first_maxima_leave_room_for(largest, level):
    rows = SOFTMAX.SoftmaxState(np.array([SCALE2 * np.tanh(0.01), SCALE2 * np.tanh(largest)], np.float32), None, None)
    assert SOFTMAX.first_wait(rows, SCALE2) == SOFTMAX.first_of(level)


def test_a_node_is_computed_once_for_what_it_depends_on():
    reads = []

    class Counted(emulated.Global):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    text = "(s + float0[h, (j // 16)]) * float0[h, i]"
    row = np.arange(N)
    pairs = EXPRESSION.Pairs({"h": 2}, ("i", "j"), [row, row + 8], row, (Counted(LEAVES[0].numpy()),), ())
    values = EXPRESSION.Values([expr.parse(text)], pairs)
    for c in range(3):
        for r in range(2):
            values.at(r, c, np.ones(N, np.float32))
    assert len(reads) == 2 + 3
