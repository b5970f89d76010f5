"""Masks: the matrices they mean, their two forms, and their algebra."""

from __future__ import annotations

import copy
import inspect
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilewise as tw
from tilewise.masks import Mask, as_mask, catalogue, derived, region
from tilewise.planning.tiles import Grid

BATCH, HEADS = 2, 3
LENGTHS = {"square": (7, 7), "more-keys": (5, 9), "more-queries": (9, 5), "one-query": (1, 8), "one-key": (6, 1)}


def grid_of(mask: Mask, nq: int, nk: int) -> Grid:
    return Grid.whole(region(mask.text, tuple(range(len(mask.leaves)))), mask.leaves, (BATCH, HEADS, nq, nk), "cpu")


def matrix(mask: Mask, nq: int, nk: int) -> Tensor:
    """Interval and predicate as kernels apply them: bool (batch, heads, nq, nk)."""
    kept = grid_of(mask, nq, nk).kept(torch.arange(nq), torch.arange(nk))
    return torch.ones(BATCH, HEADS, nq, nk).bool() if kept is None else kept.expand(BATCH, HEADS, nq, nk)


def brute(fn, nq: int, nk: int) -> Tensor:
    """Pair by pair, in Python: ``fn(b, h, i, j, off)`` of ints."""
    off = nk - nq
    rows = [
        [[[bool(fn(b, h, i, j, off)) for j in range(nk)] for i in range(nq)] for h in range(HEADS)]
        for b in range(BATCH)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(BATCH, HEADS, nq, nk)


def run_of(ids, j: int) -> tuple[int, int]:
    """The maximal run of equal ids around position j."""
    start, end = j, j + 1
    while start > 0 and ids[start - 1] == ids[j]:
        start -= 1
    while end < len(ids) and ids[end] == ids[j]:
        end += 1
    return start, end


def _in_document(ids: Tensor):
    def fn(b, h, i, j, off):
        row = ids.expand(BATCH, -1)[b].tolist()
        at = i + off
        return at >= 0 and run_of(row, at)[0] <= j < run_of(row, at)[1]

    return fn


IDS = torch.tensor([[3, 3, 1, 1, 1, 3, 0, 0, 5], [4, 4, 4, 4, 4, 4, 2, 4, 4]])
PER_BATCH = torch.tensor([3, 0])
PER_HEAD = torch.tensor([[4, 2, 9], [0, 1, -3]])
GENERATOR = torch.Generator().manual_seed(0)
DENSE = torch.rand(BATCH, HEADS, 9, 9, generator=GENERATOR) < 0.5
PATTERN = torch.rand(BATCH, HEADS, 5, 3, generator=GENERATOR) < 0.5

# Keys of each query, of 9 keys: some stand twice, and -1 is none. By blocks of 2 queries and 3 keys: blocks 0 to 2.
GIVEN = torch.randint(-1, 9, (BATCH, HEADS, 9, 4), generator=GENERATOR)
BLOCKS = torch.randint(-1, 3, (BATCH, 1, 5, 2), generator=GENERATOR).int()


def chosen(b: int, h: int, i: int, j: int) -> bool:
    return j in GIVEN[b, h, i]


# name: (the mask for nq queries and nk keys, whether (b, h, i, j, off) is kept)
FEWER = lambda nq, nk: PATTERN[..., : -(-nq // 2), : -(-nk // 3)]  # noqa: E731
CHOSEN = lambda nq, nk: tw.selected(GIVEN[:, :, :nq])  # noqa: E731
CASES = {
    "causal": (lambda nq, nk: tw.causal(), lambda b, h, i, j, off: j <= i + off),
    "window": (lambda nq, nk: tw.window(2, 1), lambda b, h, i, j, off: i + off - 2 <= j <= i + off + 1),
    "window-left": (lambda nq, nk: tw.window(left=2), lambda b, h, i, j, off: i + off - 2 <= j),
    "window-right": (lambda nq, nk: tw.window(right=1), lambda b, h, i, j, off: j <= i + off + 1),
    "window-diagonal": (lambda nq, nk: tw.window(0, 0), lambda b, h, i, j, off: j == i + off),
    "window-unbounded": (lambda nq, nk: tw.window(), lambda b, h, i, j, off: True),
    "causal-first": (lambda nq, nk: tw.causal(align="first"), lambda b, h, i, j, off: j <= i),
    "window-first": (lambda nq, nk: tw.window(2, 1, align="first"), lambda b, h, i, j, off: i - 2 <= j <= i + 1),
    "window-first-left": (lambda nq, nk: tw.window(left=2, align="first"), lambda b, h, i, j, off: i - 2 <= j),
    "prefix": (lambda nq, nk: tw.prefix(3), lambda b, h, i, j, off: j < 3 or j <= i + off),
    "prefix-none": (lambda nq, nk: tw.prefix(0), lambda b, h, i, j, off: j <= i + off),
    "prefix-per-batch": (lambda nq, nk: tw.prefix(PER_BATCH), lambda b, h, i, j, off: j < PER_BATCH[b] or j <= i + off),
    "prefix-per-head": (lambda nq, nk: tw.prefix(PER_HEAD), lambda b, h, i, j, off: j < PER_HEAD[b, h] or j <= i + off),
    "key-range": (lambda nq, nk: tw.key_range(1, 4), lambda b, h, i, j, off: 1 <= j < 4),
    "key-range-empty": (lambda nq, nk: tw.key_range(4, 2), lambda b, h, i, j, off: False),
    "key-range-beyond": (lambda nq, nk: tw.key_range(-5, 100), lambda b, h, i, j, off: True),
    "key-range-per-batch": (lambda nq, nk: tw.key_range(PER_BATCH, 5), lambda b, h, i, j, off: PER_BATCH[b] <= j < 5),
    "key-range-scalars": (lambda nq, nk: tw.key_range(torch.tensor(1), torch.tensor(3)), lambda b, h, i, j, off: 1 <= j < 3),
    "key-range-two-tensors": (lambda nq, nk: tw.key_range(PER_BATCH, PER_HEAD), lambda b, h, i, j, off: PER_BATCH[b] <= j < PER_HEAD[b, h]),
    "key-lengths": (lambda nq, nk: tw.key_lengths(PER_HEAD), lambda b, h, i, j, off: j < PER_HEAD[b, h]),
    "keep": (lambda nq, nk: tw.keep(lambda b, h, i, j: (i + j + h) % 3 != b), lambda b, h, i, j, off: (i + j + h) % 3 != b),
    "keep-offset": (lambda nq, nk: tw.keep(lambda b, h, i, j: abs(i + tw.offset - j) < 2), lambda b, h, i, j, off: abs(i + off - j) < 2),
    "keep-constant": (lambda nq, nk: tw.keep(lambda b, h, i, j: True), lambda b, h, i, j, off: True),
    "dense": (lambda nq, nk: tw.dense(DENSE[:, :, :nq, :nk]), lambda b, h, i, j, off: DENSE[b, h, i, j]),
    "dense-over-heads": (lambda nq, nk: tw.dense(DENSE[:, :1, :nq, :nk]), lambda b, h, i, j, off: DENSE[b, 0, i, j]),
    "dense-2d": (lambda nq, nk: tw.dense(DENSE[0, 0, :nq, :nk]), lambda b, h, i, j, off: DENSE[0, 0, i, j]),
    "dense-keys": (lambda nq, nk: tw.dense(DENSE[:, 0, 0, :nk].view(2, 1, 1, nk)), lambda b, h, i, j, off: DENSE[b, 0, 0, j]),
    "block-sparse": (lambda nq, nk: tw.block_sparse(FEWER(nq, nk), 2, 3), lambda b, h, i, j, off: PATTERN[b, h, i // 2, j // 3]),
    "block-sparse-2d": (lambda nq, nk: tw.block_sparse(FEWER(nq, nk)[0, 0], 2, 3), lambda b, h, i, j, off: PATTERN[0, 0, i // 2, j // 3]),
    "selected": (CHOSEN, lambda b, h, i, j, off: chosen(b, h, i, j)),
    "selected-blocks": (
        lambda nq, nk: tw.selected(BLOCKS[:, :, : -(-nq // 2)], 3, block_q=2),
        lambda b, h, i, j, off: j // 3 in BLOCKS[b, 0, i // 2],
    ),
    "selected-one": (lambda nq, nk: tw.selected(GIVEN[:1, :1, :nq, :1]), lambda b, h, i, j, off: j == GIVEN[0, 0, i, 0]),
    "selected-none": (lambda nq, nk: tw.selected(GIVEN[:, :, :nq, :0]), lambda b, h, i, j, off: False),
    "selected-causal": (lambda nq, nk: tw.causal() & CHOSEN(nq, nk), lambda b, h, i, j, off: j <= i + off and chosen(b, h, i, j)),
    "selected-or-window": (
        lambda nq, nk: CHOSEN(nq, nk) | tw.window(1, 0),
        lambda b, h, i, j, off: chosen(b, h, i, j) or 0 <= i + off - j <= 1,
    ),
    "selected-twice": (
        lambda nq, nk: CHOSEN(nq, nk) & tw.selected(GIVEN[:1, :, :nq, 1:]),
        lambda b, h, i, j, off: chosen(b, h, i, j) and j in GIVEN[0, h, i, 1:],
    ),
}  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", CASES)
def test_a_mask_keeps_the_pairs_it_says(name, lengths):
    build, fn = CASES[name]
    assert torch.equal(matrix(build(*lengths), *lengths), brute(fn, *lengths))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("ids", [IDS[0], IDS], ids=["shared", "per-batch"])
def test_documents_keep_the_run_of_equal_ids_around_the_query(ids, lengths):
    ids = ids[..., : lengths[1]]
    assert torch.equal(matrix(tw.documents(ids), *lengths), brute(_in_document(ids), *lengths))


def test_an_id_that_comes_again_starts_a_new_document():
    got = matrix(tw.documents(torch.tensor([1, 1, 2, 1])), 4, 4)[0, 0]
    assert got[3].tolist() == [False, False, False, True]


# -- Row form, column form -----------------------------------------------------------------------------------------


@st.composite
def compositions(draw, nk: int, depth: int = 3) -> Mask:
    """Primitives joined by & and | in a random tree."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        small = st.integers(0, nk)
        tensor = st.lists(st.integers(-2, nk + 2), min_size=BATCH, max_size=BATCH).map(torch.tensor)
        bound, aligned = st.one_of(small, tensor), st.sampled_from(["last", "first"])
        names = ["causal", "window", "prefix", "key_range", "documents", "keep", "block_sparse", "selected"]
        which = draw(st.sampled_from(names))
        if which == "causal":
            return tw.causal(align=draw(aligned))
        if which == "window":
            return tw.window(draw(st.none() | small), draw(st.none() | small), align=draw(aligned))
        if which == "prefix":
            return tw.prefix(draw(bound))
        if which == "key_range":
            return tw.key_range(draw(bound), draw(bound))
        if which == "documents":
            return tw.documents(torch.tensor(draw(st.lists(st.integers(0, 1), min_size=nk, max_size=nk))))
        if which == "keep":
            m = draw(st.integers(2, 4))
            return tw.keep(lambda b, h, i, j: (i + 2 * j + b + h) % m != 0)
        if which == "selected":
            return tw.selected(BLOCKS[:, :, :, : draw(st.integers(0, 2))], 3, 2)
        return tw.block_sparse(DENSE[0, 0, : -(-9 // 2), : -(-nk // 2)], 2, 2)
    a, b = draw(compositions(nk, depth - 1)), draw(compositions(nk, depth - 1))
    return a & b if draw(st.booleans()) else a | b


@st.composite
def composed(draw) -> tuple[Mask, int, int]:
    nq, nk = draw(st.integers(8, 9)), draw(st.integers(1, 9))  # 5 blocks of 2 queries
    return draw(compositions(nk)), nq, nk


def intervals(mask: Mask, nq: int, nk: int) -> tuple[Tensor, Tensor]:
    """The interval by rows and by columns, each as a matrix."""
    grid, i, j = grid_of(mask, nq, nk), torch.arange(nq), torch.arange(nk)
    (lo, hi), (first, last) = grid.key_interval(i), grid.query_interval(j)
    rows = (lo.unsqueeze(-1) <= j) & (j < hi.unsqueeze(-1))
    columns = (first.unsqueeze(-2) <= i.view(-1, 1)) & (i.view(-1, 1) < last.unsqueeze(-2))
    return rows.expand(BATCH, HEADS, nq, nk), columns.expand(BATCH, HEADS, nq, nk)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(composed())
def test_the_row_form_is_the_column_form_and_holds_the_mask(drawn):
    mask, nq, nk = drawn
    rows, columns = intervals(mask, nq, nk)
    assert torch.equal(rows, columns)
    # An end by columns counts rows by their end, also of keys that no row sees: kept dS is written where it will be read.
    grid = grid_of(mask, nq, nk)
    (lo, hi), (first, last) = grid.key_interval(torch.arange(nq)), grid.query_interval(torch.arange(nk))
    for ends, counted in ((first, hi), (last, lo)):
        assert torch.equal(*torch.broadcast_tensors(ends, (counted.unsqueeze(-1) <= torch.arange(nk)).sum(-2)))
    kept = matrix(mask, nq, nk)
    assert not bool((kept & ~rows).any())
    if grid.region.predicate is None:
        assert torch.equal(kept, rows)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(composed())
def test_ends_never_decrease(drawn):
    mask, nq, nk = drawn
    grid = grid_of(mask, nq, nk)
    for end in (*grid.key_interval(torch.arange(nq)), *grid.query_interval(torch.arange(nk))):
        assert bool((end.diff(dim=-1) >= 0).all())


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_an_intersection_of_intervals_needs_no_predicate(lengths):
    mask = (
        tw.causal() & tw.window(3, 3) & tw.prefix(2) & tw.key_range(1, PER_BATCH) & tw.documents(IDS[:, : lengths[1]])
    )
    assert grid_of(mask, *lengths).region.predicate is None


# -- Algebra -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 9).flatmap(
        lambda nk: st.tuples(compositions(nk, 2), compositions(nk, 2), compositions(nk, 1), st.just(nk))
    )
)
def test_masks_are_sets_of_pairs(drawn):
    a, b, c, nk = drawn
    of = lambda m: matrix(m, 9, nk)  # noqa: E731
    assert torch.equal(of(a & b), of(a) & of(b))
    assert torch.equal(of(a | b), of(a) | of(b))
    assert torch.equal(of(a & (b | c)), of((a & b) | (a & c)))
    assert torch.equal(of((a | b) & c), of((b & c) | (c & a)))
    assert torch.equal(of(a & (b & c)), of((a & b) & c))
    assert torch.equal(of(a | (b | c)), of((a | b) | c))


@pytest.mark.parametrize("name", CASES)
def test_a_mask_with_itself_is_itself(name):
    mask = CASES[name][0](7, 7)
    for twice in (mask & mask, mask | mask):
        assert torch.equal(matrix(twice, 7, 7), matrix(mask, 7, 7))


def test_causal_is_a_window_without_a_left_end():
    assert torch.equal(matrix(tw.causal(), 5, 8), matrix(tw.window(None, 0), 5, 8))


def test_an_alignment_is_at_the_last_or_at_the_first():
    with pytest.raises(ValueError, match='align=\'top\': it is "last" or "first"'):
        tw.causal(align="top")
    assert torch.equal(matrix(tw.causal(align="first"), 6, 6), matrix(tw.causal(align="last"), 6, 6))


def test_a_prefix_is_causal_or_the_first_keys():
    assert torch.equal(matrix(tw.prefix(3), 8, 6), matrix(tw.causal() | tw.key_lengths(3), 8, 6))


def test_equal_ends_with_two_numbers_are_folded_into_one():
    hi = region((tw.causal() & tw.window(5, 2) & tw.window(3, 4)).text, ())
    assert (str(hi.lo), str(hi.hi)) == ("(i + off) + (-3)", "(i + off) + 1")


def test_what_the_mask_keyword_takes_becomes_a_mask():
    fn = lambda b, h, i, j: (i + j) % 2 == 0  # noqa: E731
    even = brute(lambda b, h, i, j, off: (i + j) % 2 == 0, 6, 6)
    below = brute(lambda b, h, i, j, off: j <= i, 6, 6)
    for given_mask in (fn, tw.keep(fn), even[0, 0], even):
        assert torch.equal(matrix(as_mask(given_mask), 6, 6), even)
        assert torch.equal(matrix(as_mask(given_mask, causal_too=True), 6, 6), even & below)
    assert torch.equal(matrix(as_mask(None, causal_too=True), 6, 6), below)
    assert bool(matrix(as_mask(None), 6, 6).all())


# -- Patterns ------------------------------------------------------------------------------------------------------


def rows_of(pattern: Tensor) -> list[str]:
    return ["".join("1" if x else "." for x in row) for row in pattern.tolist()]


def test_butterfly_keeps_blocks_that_differ_in_at_most_one_bit():
    expected = [["1" if (r ^ c).bit_count() <= 1 else "." for c in range(11)] for r in range(11)]
    assert rows_of(tw.butterfly(11)) == ["".join(row) for row in expected]


def test_strided_keeps_the_diagonal_band_and_every_strideth_column():
    assert rows_of(tw.strided(5, 5, stride=3, local=2)) == ["1.1..", "111..", ".11..", "..11.", "..111"]
    assert rows_of(tw.strided(2, 4, stride=4)) == ["..11", "...1"]


def test_local_global_keeps_the_neighbours_and_the_first_rows_and_columns():
    assert rows_of(tw.local_global(5, 5)) == ["11111", "111..", "1111.", "1.111", "1..11"]
    assert rows_of(tw.local_global(2, 4, local=0)) == ["1111", "1..1"]
    assert rows_of(tw.local_global(4, 2, local=0)) == ["11", "1.", "1.", "11"]
    assert rows_of(tw.local_global(4, 4, local=0, globals_=0)) == ["1...", ".1..", "..1.", "...1"]


# -- Prepared ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask",
    [
        tw.keep(lambda b, h, i, j: (i // 32 + j // 32 + b) % 2 == 0) & tw.causal(),
        tw.dense(torch.rand(2, 1, 150, 200, generator=GENERATOR) < 0.02),
        tw.causal() & tw.key_lengths(torch.tensor([200, 90])),
        tw.documents(torch.arange(200) // 30) | tw.key_range(0, 5),
    ],
    ids=["keep-and-causal", "dense", "interval", "union"],
)
def test_a_prepared_mask_gives_the_same_results(mask):
    q, k = torch.randn(2, 150, 2, 8, dtype=torch.float64), torch.randn(2, 200, 1, 8, dtype=torch.float64)
    results = []
    for m in (mask, mask.prepare(q, k), mask.prepare(q, k).prepare(q, k)):
        wanted = [x.clone().requires_grad_() for x in (q, k)]
        o, lse = tw.attention_with_lse(*wanted, wanted[1], mask=m)
        grads = torch.autograd.grad(o.sum() + lse.where(lse > -torch.inf, 0).sum(), wanted)
        results.append((o, lse, *grads))
    for x, *others in zip(*results, strict=True):
        assert all(torch.equal(x, other) for other in others)


def test_a_prepared_mask_combines_as_the_mask_it_was():
    k = torch.zeros(2, 70, 1, 8)
    mask = tw.keep(lambda b, h, i, j: (i + j) % 3 == 0)
    prepared = mask.prepare(k, k)
    for got, expected in ((prepared & tw.causal(), mask & tw.causal()), (tw.causal() | prepared, tw.causal() | mask)):
        assert (got.text, len(got.leaves)) == (expected.text, 0)


def test_a_mask_prepared_for_other_shapes_is_refused():
    q = torch.zeros(2, 70, 1, 8)
    mask = tw.keep(lambda b, h, i, j: (i + j) % 3 == 0).prepare(q, q)
    with pytest.raises(ValueError, match=r"prepared for .*\(2, 1, 70, 70\).*\(2, 1, 140, 140\)"):
        tw.attention(*[torch.zeros(2, 140, 1, 8)] * 3, mask=mask)
    with pytest.raises(ValueError, match="attention_varlen"):
        tw.attention_varlen(*[q[0]] * 3, torch.tensor([0, 70]), mask=mask)


WRITTEN = {  # a mask of a tensor, what the tensor holds, and what it holds later
    "documents": (tw.documents, torch.arange(200) // 30, torch.arange(200) // 70),
    "documents-of-each": (tw.documents, torch.arange(200).expand(2, -1) // 30, torch.arange(200).expand(2, -1) // 70),
    "key_lengths": (tw.key_lengths, torch.tensor([200, 20]), torch.tensor([70, 190])),
    "prefix": (tw.prefix, torch.tensor([200, 20]), torch.tensor([70, 190])),
    "key_range": (lambda t: tw.key_range(t, 190), torch.tensor([150, 20]), torch.tensor([70, 180])),
    "dense": (tw.dense, torch.eye(200).bool(), torch.ones(200, 200).tril().bool()),
    "block_sparse": (lambda t: tw.block_sparse(t, 50, 50), torch.eye(4).bool(), torch.ones(4, 4).tril().bool()),
    "selected": (tw.selected, torch.arange(200).view(1, 1, 200, 1), torch.arange(200).view(1, 1, 200, 1) // 3),
    "keep": (lambda t: tw.keep(lambda b, h, i, j: t[j] > 0), torch.arange(200) % 3, torch.arange(200) % 7),
}


@pytest.mark.parametrize(("make", "before", "later"), WRITTEN.values(), ids=WRITTEN)
def test_a_mask_is_what_its_tensors_hold(make, before, later):
    q, k, v = (torch.randn(2, 200, 2, 8) for _ in range(3))
    held = before.clone()
    mask = tw.window(left=120) & make(held)
    first = tw.attention(q, k, v, mask=mask)
    held.copy_(later)
    assert torch.equal(tw.attention(q, k, v, mask=mask), tw.attention(q, k, v, mask=tw.window(left=120) & make(later)))
    assert not torch.equal(tw.attention(q, k, v, mask=mask), first)


@pytest.mark.parametrize(("make", "before", "later"), WRITTEN.values(), ids=WRITTEN)
def test_a_prepared_mask_whose_tensor_was_written_since_is_refused(make, before, later):
    q, k, v = (torch.randn(2, 200, 2, 8) for _ in range(3))
    held = before.clone()
    prepared = make(held).prepare(q, k)
    for mask in (prepared, copy.deepcopy(prepared), prepared & tw.causal()):
        tw.attention(q, k, v, mask=mask)
    twin = copy.deepcopy(prepared)
    held.copy_(later)
    with pytest.raises(ValueError, match=r"was written after the mask .*call mask.prepare\(q, k\) again"):
        tw.attention(q, k, v, mask=prepared)
    assert torch.equal(tw.attention(q, k, v, mask=twin), tw.attention(q, k, v, mask=make(before)))
    assert torch.equal(
        tw.attention(q, k, v, mask=prepared & tw.causal()), tw.attention(q, k, v, mask=tw.causal() & make(later))
    )


def _by_data(held, later):
    held.data = later


def test_a_mask_taken_once_in_a_graph_has_the_values_of_that_time_in_each_call():
    def run(q, given):
        lengths = given + 1
        mask = tw.key_lengths(lengths).once()
        first = tw.attention(q, q, q, mask=mask)
        lengths.sub_(3)
        return (
            first,
            tw.attention(q, q, q, mask=mask & tw.causal()),
            tw.attention(q, q, q, mask=tw.key_lengths(lengths)),
        )

    q, given = torch.randn(2, 9, 1, 8), torch.tensor([4, 7])
    taken = tw.key_lengths(given + 1)
    expected = [tw.attention(q, q, q, mask=m) for m in (taken, taken & tw.causal(), tw.key_lengths(given - 2))]
    for found, right in zip(torch.compile(run, fullgraph=True, backend="aot_eager")(q, given), expected, strict=True):
        torch.testing.assert_close(found, right)
    assert taken.once() is taken


def test_a_prepared_mask_taken_once_in_a_graph_is_read_anew():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def made(kept):
        return tw.dense(kept.clone())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, mask):
        return tw.attention(q, q, q, mask=mask.once())

    q, kept = torch.randn(1, 300, 1, 8), torch.arange(300)[:, None] >= torch.arange(300)
    mask = made(kept)
    prepared = mask.prepare(q, q)
    for _ in range(2):
        torch.testing.assert_close(run(q, prepared), tw.attention(q, q, q, mask=tw.dense(mask.leaves[0])))
        mask.leaves[0].logical_not_()


@pytest.mark.parametrize("replace", [_by_data, torch.utils.swap_tensors])
def test_a_tensor_that_was_given_other_memory_is_another_one(replace):
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    held, later = torch.arange(40) // 9, torch.arange(40) // 13
    expected = tw.attention(q, k, v, mask=tw.documents(later.clone()))
    mask = tw.documents(held)
    prepared = tw.keep(lambda b, h, i, j: held[i] == held[j]).prepare(q, k)
    replace(held, later)
    assert torch.equal(tw.attention(q, k, v, mask=mask), expected)
    with pytest.raises(ValueError, match="was written after the mask"):
        tw.attention(q, k, v, mask=prepared)


def test_what_a_mask_makes_of_a_tensor_is_made_once_and_in_each_capture(monkeypatch):
    made = []
    source = torch.zeros(3)
    found = derived.Derived(source, lambda t: made.append(t.clone()) or (made[-1],))
    assert found.tensors()[0] is made[0]
    source.add_(1)
    assert torch.equal(found.tensors()[0], torch.ones(3))
    assert found.tensors()[0] is made[1]
    assert len(made) == 2
    monkeypatch.setattr(derived, "is_captured", lambda: True)
    assert found.tensors()[0] is not found.tensors()[0]
    found.held = True
    assert found.tensors()[0] is made[1]
    source.add_(1)  # in the capture, or before it and after the last call
    assert torch.equal(found.tensors()[0], torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "make", [lambda ids: tw.documents(ids), lambda ids: tw.keep(lambda b, h, i, j: ids[i] == ids[j])]
)
def test_what_inference_makes_of_a_mask_serves_training_afterwards(make):
    ids, (q, k, v) = torch.zeros(40, dtype=torch.int64), (torch.randn(1, 40, 2, 8) for _ in range(3))
    mask = make(ids)
    ids.copy_(torch.arange(40) // 9)
    with torch.inference_mode():
        tw.attention(q, k, v, mask=mask)
        masks = mask, make(ids), mask.prepare(q, k)
    expected = tw.attention(q, k, v, mask=make(ids))
    for x in masks:
        o = tw.attention(q.clone().requires_grad_(), k, v, mask=x)
        o.sum().backward()
        assert torch.equal(o, expected)


def test_what_a_mode_of_fake_tensors_makes_of_a_mask_is_not_kept():
    ids, (q, k, v) = torch.zeros(40, dtype=torch.int64), (torch.randn(1, 40, 2, 8) for _ in range(3))
    mask = tw.documents(ids)
    ids.copy_(torch.arange(40) // 9)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert tw.attention(*map(mode.from_tensor, (q, k, v)), mask=mask).shape == q.shape
    assert torch.equal(tw.attention(q, k, v, mask=mask), tw.attention(q, k, v, mask=tw.documents(ids.clone())))


# -- Bad arguments -------------------------------------------------------------------------------------------------

FLOATS = torch.zeros(2, 3)
BAD = {
    "window-negative": (lambda: tw.window(left=-1), r"window\(left=-1\)"),
    "window-negative-right": (lambda: tw.window(3, -2), r"window\(right=-2\)"),
    "window-fraction": (lambda: tw.window(1.5), "window"),
    "window-tensor": (lambda: tw.window(torch.tensor([1, 2])), "window"),
    "prefix-floats": (lambda: tw.prefix(FLOATS), r"prefix takes ints .* torch\.float32 \(2, 3\)"),
    "prefix-fraction": (lambda: tw.prefix(2.5), r"prefix takes .*got 2\.5"),
    "key-range-dims": (lambda: tw.key_range(0, torch.zeros(1, 2, 3).int()), r"key_range takes ints .*\(1, 2, 3\)"),
    "key-range-bools": (lambda: tw.key_range(torch.tensor([True]), 3), "key_range takes ints"),
    "key-lengths-fraction": (lambda: tw.key_lengths(3.7), r"takes .*got 3\.7"),
    "documents-floats": (lambda: tw.documents(FLOATS), r"documents\(ids\) takes an integer tensor"),
    "documents-dims": (lambda: tw.documents(torch.zeros(1, 2, 3).int()), r"documents\(ids\) takes an integer tensor"),
    "documents-list": (lambda: tw.documents([0, 0, 1]), r"documents\(ids\) takes an integer tensor"),
    "keep-number": (lambda: tw.keep(lambda b, h, i, j: i - j), "truth value.*int: i - j"),
    "keep-no-function": (lambda: as_mask(3), "Mask, a bool tensor or a function .* got int"),
    "dense-floats": (lambda: tw.dense(FLOATS), r"bool tensor, got torch\.float32.*tw\.bias"),
    "dense-list": (lambda: tw.dense([[True]]), "bool tensor, got list"),
    "dense-dims": (lambda: tw.dense(torch.ones(1, 1, 1, 2, 2).bool()), r"at most \(batch, heads_q, seqlen_q, seqlen_k\), got shape"),
    "block-sparse-ints": (lambda: tw.block_sparse(torch.ones(2, 2).int(), 2, 2), r"got torch\.int32; convert it: pattern\.bool"),
    "block-sparse-list": (lambda: tw.block_sparse([[1]], 2, 2), r"got list; convert it: torch\.tensor\(pattern, dtype=torch\.bool"),
    "block-sparse-zero": (lambda: tw.block_sparse(torch.ones(2, 2).bool(), 0, 2), "block_q must be a whole number >= 1, got 0"),
    "block-sparse-fraction": (lambda: tw.block_sparse(torch.ones(2, 2).bool(), 2, 2.0), r"block_k must be .*got 2\.0"),
    "selected-dims": (lambda: tw.selected(torch.zeros(8, 2).int()), r"int32 or int64 tensor \(batch or 1, .*got torch\.int32 \(8, 2\)"),
    "selected-floats": (lambda: tw.selected(torch.zeros(1, 1, 8, 2)), r"int32 or int64 .*got torch\.float32"),
    "selected-list": (lambda: tw.selected([[[[0]]]]), "got list"),
    "selected-zero": (lambda: tw.selected(torch.zeros(1, 1, 8, 2).int(), block=0), "block must be a whole number >= 1, got 0"),
    "butterfly-negative": (lambda: tw.butterfly(-1), "butterfly: blocks must be a whole number >= 0, got -1"),
    "strided-zero": (lambda: tw.strided(4, 4, 0), "strided: stride must be a whole number >= 1, got 0"),
    "local-global-negative": (lambda: tw.local_global(4, 4, -1), "local_global: local must be a whole number >= 0"),
    "key-lengths-list": (lambda: tw.key_lengths([1, 2]), r"key_lengths takes .*got \[1, 2\]"),
    "key-lengths-numpy": (lambda: tw.key_lengths(np.array([1, 2])), r"got array.* is torch\.tensor\(\[1, 2\]\)"),
    "dense-ints": (lambda: tw.dense(torch.ones(2, 2).int()), r"got torch\.int32; convert zeros and ones: t\.bool"),
    "not-called": (lambda: as_mask(tw.causal), r"function of \(b, h, i, j\) is needed, got causal\(.*to be called: tw\.causal"),
    "five-parameters": (lambda: tw.keep(lambda s, b, h, i, j: i > j), r"\(b, h, i, j\) is needed, got <lambda>\(s, b, h, i, j\)"),
    "no-return": (lambda: tw.keep(lambda b, h, i, j: None), "returned None; is its `return` missing"),
    "keep-tensor": (lambda: tw.keep(torch.ones(2, 2).bool()), r"function of \(b, h, i, j\) is needed, got Tensor"),
    "tensor-and": (lambda: torch.ones(2, 2).bool() & tw.causal(), "combined with masks, got Tensor"),
    "function-or": (lambda: (lambda b, h, i, j: i > j) | tw.causal(), "combined with masks, got function"),
    "python-and": (lambda: tw.causal() and tw.window(1), "no truth value; .* combine masks with & and |"),
    "and-tensor": (lambda: tw.causal() & torch.ones(2, 2).bool(), r"combined with masks, got Tensor; wrap it: tw\.keep"),
    "or-function": (lambda: tw.causal() | (lambda b, h, i, j: i > j), "combined with masks, got function"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "message"), BAD.values(), ids=BAD)
def test_a_bad_argument_is_a_value_error_that_says_what_is_allowed(build, message):
    with pytest.raises(ValueError, match=message):
        build()


WRONG_SHAPES = {
    "dense-keys": (lambda: tw.dense(torch.ones(8, 7).bool()), "axis 1 must be seqlen_k = 8"),
    "dense-heads": (lambda: tw.dense(torch.ones(1, 3, 8, 8).bool()), "axis 1 must be heads_q = 2"),
    "key-lengths-batch": (lambda: tw.key_lengths(torch.tensor([1, 2, 3])), "axis 0 must be batch = 2"),
    "documents-keys": (lambda: tw.documents(torch.zeros(9).int()), "axis 0 must be seqlen_k = 8"),
    "documents-of-no-keys": (lambda: tw.documents(torch.zeros(0).int()), "is empty"),
    "too-few-blocks": (lambda: tw.block_sparse(torch.ones(2, 2).bool(), 2, 2), "must be .*4"),
    "selected-rows": (
        lambda: tw.selected(torch.zeros(1, 1, 7, 1).int()),
        r"the tensor of selected .*axis 2 must be seqlen_q = 8",
    ),
    "selected-row-blocks": (
        lambda: tw.selected(torch.zeros(1, 1, 4, 1).int(), 1, 3),
        r"must be ceil\(seqlen_q / 3\) = 3",
    ),
    "selected-heads": (lambda: tw.selected(torch.zeros(1, 3, 8, 1).int()), "axis 1 must be heads_q = 2"),
    "selected-key": (
        lambda: tw.selected(torch.full((1, 1, 8, 1), 8)),
        r"an entry 8 in row \[0, 0, 0\].*a block of 1 keys, of which there are 8",
    ),
    "selected-block": (lambda: tw.selected(torch.full((1, 1, 8, 1), 2), 4), "an entry 2 .*of which there are 2"),
    "selected-minus-two": (lambda: tw.selected(torch.full((1, 1, 8, 1), -(2**40))), "an entry below -1"),
}


@pytest.mark.parametrize(("build", "message"), WRONG_SHAPES.values(), ids=WRONG_SHAPES)
def test_a_tensor_that_does_not_fit_the_call_is_a_value_error(build, message):
    q = torch.zeros(2, 8, 2, 4)
    with pytest.raises(ValueError, match=message):
        tw.attention(q, q, q, mask=build())


def test_lengths_for_another_number_of_packed_sequences_are_a_value_error():
    q = torch.zeros(30, 2, 8)
    with pytest.raises(ValueError, match="batch = 2"):
        tw.attention_varlen(q, q, q, torch.tensor([0, 10, 30]), mask=tw.key_lengths(torch.tensor([5, 6, 7])))


def test_documents_of_no_keys_leave_rows_empty():
    q, none = torch.zeros(1, 3, 1, 4), torch.zeros(1, 0, 1, 4)
    o, lse = tw.attention_with_lse(q, none, none, mask=tw.documents(torch.zeros(0, dtype=torch.int64)))
    assert bool((o == 0).all())
    assert bool((lse == -torch.inf).all())


# -- What is shown -------------------------------------------------------------------------------------------------

_EXAMPLE = re.compile(
    r"``([a-z_]+\([^`]*\))`` of (\d+) queries and (?:(\d+) )?keys::\n\n((?: +[1.](?: [1.])*(?:\n|$))+)"
)
EXAMPLES = [
    pytest.param(*example, id=example[0])
    for name in tw.__all__
    if inspect.getmodule(getattr(tw, name)) is catalogue
    for example in _EXAMPLE.findall(inspect.getdoc(getattr(tw, name)) or "")
]


@pytest.mark.parametrize(("call", "queries", "keys", "shown"), EXAMPLES)
def test_the_matrix_in_a_docstring_is_what_show_mask_prints(call, queries, keys, shown):
    mask = eval(call, {"torch": torch, **{name: getattr(tw, name) for name in tw.__all__}})
    printed = tw.show_mask(mask, int(queries), int(keys or queries))
    assert printed.split("\n") == [line.strip() for line in shown.strip("\n").split("\n")]


def test_causal_window_and_prefix_show_their_matrix():
    shown = {example.id for example in EXAMPLES}
    assert {"causal()", 'causal(align="first")', "window(1, 0)", "prefix(3)"} <= shown


def test_show_mask_reads_the_batch_element_and_head_asked_for():
    assert tw.show_mask(tw.key_lengths(PER_HEAD), 1, 5, batch=0, head=1) == "1 1 . . ."
    assert tw.show_mask(tw.key_lengths(PER_HEAD), 1, 5, batch=1, head=1) == "1 . . . ."
    assert tw.show_mask(lambda b, h, i, j: (i + j) % 2 == b, 2, batch=1) == ". 1\n1 ."
    assert tw.show_mask(torch.tensor([[True, False]]), 1, 2) == "1 ."
    assert tw.show_mask(tw.key_range(0, 2), 2, 3) == "1 1 .\n1 1 ."


# Clamped lookups would show a matrix that attention refuses to compute.
@pytest.mark.parametrize(
    ("show", "message"),
    [
        (lambda: tw.show_mask(torch.eye(3).bool(), 5), "axis 0 must be seqlen_q = 5"),
        (lambda: tw.show_mask(tw.documents(torch.tensor([0, 0, 1])), 5), "must be seqlen_k = 5"),
        (lambda: tw.show_mask(tw.key_lengths(torch.tensor([1, 2])), 3, batch=2), "batch 2 is out of range: .* has 2"),
        (lambda: tw.show_mask(tw.key_lengths(PER_HEAD), 3, head=7), "head 7 is out of range"),
        (lambda: tw.show_mask(tw.causal(), 2.5), r"seqlen_q must be a whole number >= 0, got 2\.5"),
        (lambda: tw.show_mask(tw.causal(), 2, batch=-1), "batch must be a whole number >= 0, got -1"),
    ],
)
def test_show_mask_refuses_what_attention_would(show, message):
    with pytest.raises(ValueError, match=message):
        show()


@pytest.mark.parametrize("bound", [2**31, 2**62, 2**63 - 1, 2**70])
def test_a_window_as_wide_as_integers_go_is_unbounded(bound):
    assert tw.show_mask(tw.window(bound, bound), 3, 4) == tw.show_mask(tw.window(), 3, 4)
    q = torch.zeros(1, 3, 1, 2)
    assert torch.equal(tw.attention(q, q, q + 1, mask=tw.window(left=bound)), q + 1)


@pytest.mark.parametrize("shape", [(), (1,), (8,), (8, 9), (1, 9), (2, 1, 8, 1), (1, 4, 1, 9)], ids=str)
def test_the_text_of_a_dense_mask_is_that_of_its_lookup(shape):
    allowed = torch.ones(shape, dtype=torch.bool)
    lookup = catalogue.broadcast_lookup(allowed, (catalogue.B, catalogue.H, catalogue.I, catalogue.J), "dense(allowed)")
    assert tw.dense(allowed).text == catalogue._atom("keep", lookup).text
    assert tw.dense(allowed).leaves == (allowed,)
