"""Masks and scores of some thousand terms are right, or refused in words; and texts may be read by several threads at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tilewise as tw
from tilewise import expr
from tilewise.backends import triton
from tilewise.backends.base import long_expressions
from tilewise.backends.cpu import library
from tilewise.masks import region
from tilewise.masks.facts import as_band, monotone_terms
from tilewise.piece import Piece
from tilewise.problem import check
from tilewise.spec import Options, assemble, parse_spec

N = 40
TERMS = 1200
I, J = torch.arange(N)[:, None], torch.arange(N)[None, :]
BACKENDS = [
    "portable",
    pytest.param(
        "cpu", marks=pytest.mark.skipif(isinstance(library.load(), str), reason="the native library is not built")
    ),
    pytest.param(
        "triton",
        marks=[
            pytest.mark.skipif(not (triton.installed() and triton.interpreting()), reason="no Triton that interprets"),
            pytest.mark.filterwarnings("ignore::RuntimeWarning"),
        ],
    ),
]


def union(terms):
    """`|` of short runs of keys, which some rows see none of."""
    mask, kept = tw.window(0, 0), I == J
    for n in range(terms // 2):
        start, end = 7 * n % 31, 7 * n % 31 + n % 3
        mask, kept = (
            mask | (tw.key_range(start, end) & tw.window(n % 5, n % 4)),
            kept | ((start <= J) & (end > J) & (J >= I - n % 5) & (J <= I + n % 4)),
        )
    return mask, kept


def intersection(terms):
    """`&` of intervals in turn, whose ends do not fold."""
    mask, kept = tw.causal(), J <= I
    for n in range(terms):
        left, end = 12 + terms - n, N - 3 + n
        mask, kept = mask & tw.window(left, None) & tw.key_range(0, end), kept & (I - left <= J) & (end > J)
    return mask, kept


def one_function(terms):
    """One function of that many comparisons."""

    def kept(b, h, i, j):
        found = i == j
        for n in range(terms):
            found = found | (i - j == 3 * n + 5) if n % 2 else found ^ (i + j == 5 * n)
        return found

    return tw.keep(kept), kept(0, 0, I, J)


def one_condition(terms):
    """A function that is true on one side of a line, which facts of tiles follow through all of its terms."""

    def kept(b, h, i, j):
        found = i >= j
        for n in range(terms):
            found = found & (i - j <= 9 + n)
        return found

    return tw.keep(kept), kept(0, 0, I, J)


MASKS = [union, intersection, one_function, one_condition]


def qkv(**options):
    g = torch.Generator().manual_seed(5)
    return [torch.randn(1, N, 2, 16, generator=g, **options) for _ in range(3)]


def eager(q, k, v, kept, change=lambda s: s):
    s = change(torch.einsum("bihd,bjhd->bhij", q, k) / 4)
    p = torch.softmax(s.masked_fill(~kept, -torch.inf), -1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def terms_of(backend):
    return 60 if backend == "triton" else TERMS  # the interpreter takes some milliseconds a term


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("made", MASKS, ids=lambda f: f.__name__)
def test_a_mask_of_many_terms_keeps_its_pairs(made, backend):
    mask, kept = made(terms_of(backend))
    q, k, v = qkv()
    torch.testing.assert_close(tw.attention(q, k, v, mask=mask, backend=backend), eager(q, k, v, kept))


@pytest.mark.parametrize("made", MASKS, ids=lambda f: f.__name__)
def test_a_mask_of_many_terms_is_shown_explained_and_prepared(made):
    mask, kept = made(TERMS)
    shown = "\n".join(" ".join("1" if x else "." for x in row) for row in kept.tolist())
    assert tw.show_mask(mask, N, N) == shown
    q, k, v = qkv()
    assert "cpu" in str(tw.explain(q, k, v, mask=mask))
    torch.testing.assert_close(tw.attention(q, k, v, mask=mask.prepare(q, k)), eager(q, k, v, kept))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["then", "one function"])
def test_a_score_of_many_terms_and_its_gradients(how, backend):
    terms = terms_of(backend) // 2
    if how == "then":
        score = tw.softcap(20.0)
        for n in range(terms):
            score = score >> tw.softcap(40.0 + n)
    else:

        def grown(s, b, h, i, j):
            for n in range(terms):
                s = s + (i - j) * (1e-4 * (n % 7)) if n % 3 else s * 1.0001
            return s

        score = tw.score(grown)

    def change(s):
        if how != "then":
            return grown(s, 0, 0, I, J)
        for cap in (20.0, *(40.0 + n for n in range(terms))):
            s = cap * torch.tanh(s / cap)
        return s

    q, k, v = qkv(requires_grad=True)
    o = tw.attention(q, k, v, score=score, causal=True, backend=backend)
    expected = eager(q, k, v, I >= J, change)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, expected)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def problem_of(mask):
    q, k, v = qkv()
    extras, seed, text = assemble(q, k, v, Options(mask=mask))
    return check(q, k, v, extras, seed, parse_spec(text))


@pytest.mark.parametrize("made", MASKS, ids=lambda f: f.__name__)
def test_kernels_of_a_gpu_are_written_at_any_depth(made):
    pytest.importorskip("triton", reason="the package triton is not installed")
    from tilewise.backends.triton.kernels.emit import emit, emit_mask

    problem = problem_of(made(TERMS)[0])
    emitted = emit(problem, frozenset()), emit_mask(problem.spec.region, (), (N, N))
    assert all(len(x.numbers) >= TERMS / 2 for x in emitted)


def test_more_numbers_than_a_launch_holds_are_refused_by_name():
    few, many = problem_of(one_function(2000)[0]), problem_of(one_function(4200)[0])
    assert long_expressions(few) == []
    (reason,) = long_expressions(many)
    assert "put the numbers into a tensor" in reason
    assert triton.Triton().unsupported(many)[-1:] == [reason]


def test_facts_of_a_long_mask():
    mask, _ = one_condition(TERMS)
    kept = region(mask.text, ())
    (term,) = monotone_terms(kept)
    assert len(term) == TERMS + 1
    band = as_band(region(intersection(TERMS)[0].text, ()), 0, N)
    assert (band.lo, band.hi, band.start, band.stop) == (-13, 1, 0, N - 3)


def test_a_piece_of_a_long_mask():
    mask, kept = intersection(TERMS)
    part = Piece(8, 4, N, N).region(region(mask.text, ()))
    env = {"i": torch.arange(16)[:, None], "j": torch.arange(16)[None, :]}
    lo, hi = expr.evaluate(part.ends[:2], env, [], torch.float32)
    assert torch.equal((env["j"] >= lo) & (env["j"] < hi), kept[8:24, 4:20])


def test_a_union_of_many_is_the_pairs_of_any_without_the_bounds_of_each_two():
    text = "((window(1, 0) | key_range(0, 2)) | window(0, 1))"
    predicate = region(text, ()).predicate
    assert sum(e.op == "or" for e in expr.nodes(predicate)) == 2
    assert not any(e.op in ("minimum", "maximum") for e in expr.nodes(predicate))


def test_threads_read_texts_at_once():
    """A first call of each text, from eight threads: CPython 3.11's `ast.parse` raised SystemError in some of 4,000."""

    def read(n):
        text = f"(window({n}, {n % 7}) | keep((i == {n}) | (j == {n % 11}))) & key_range(0, {n + 1})"
        kept = region(text, ())
        shown = expr.to_text(expr.parse(f"(_0 := tanh(s * {n}.5), (_0 * (_0 + {n})) - (i % {n + 1}))"))[0]
        return str(kept.hi), shown

    expected = [read(n) for n in range(4000)]
    region.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(4000))) == expected


@pytest.mark.parametrize(
    "text",
    ["", "i +", "(i", "i)", "i j", "f(i)", "x", "i + )", "(i, j)", "i + i)(", "float0[i", "float0(i)", "(~)", "1 := 2",
     "i; j", "tanh(s,)", "[i]", "i $ j", "tanh[i]"],
)  # fmt: skip
def test_what_is_no_expression_is_refused_by_name(text):
    with pytest.raises(ValueError, match="not an expression"):
        expr.parse(text)


@pytest.mark.parametrize("text", ["i < j", "window(0, 0) + causal()", "causal", "(causal() | i)", "unknown()"])
def test_what_is_no_mask_is_refused_by_name(text):
    with pytest.raises(ValueError, match="not a"):
        region(text, ())


@pytest.mark.parametrize(
    ("text", "value"),
    [("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("7 - 2 - 1", 4), ("6 // 4 % 3", 1), ("-3", -3), ("(-2) ** 2", 4), ("2 * 3 ** 2", 18),
     ("1 < 2 & 3", True), ("1 | 6 & 3", 3), ("~(1 < 2)", False), ("(_0 := 2 + 3, (_1 := _0 * _0, _1 - _0))", 20)],
)  # fmt: skip
def test_operators_bind_as_in_python(text, value):
    (found,) = expr.evaluate([expr.parse(text)], {}, [], torch.float32)
    assert found.item() == value
