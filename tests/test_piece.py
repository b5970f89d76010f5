"""A piece of an attention: the pieces, merged over keys and put together over queries, are the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from bench.testing import call, qkv
from tests.masks.test_catalogue import BATCH, CASES, HEADS
from tilewise import expr
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper import config as hopper
from tilewise.backends.portable import Portable
from tilewise.backends.triton import Triton
from tilewise.masks import region
from tilewise.masks.facts import as_band, every_key_seen
from tilewise.piece import Piece
from tilewise.planning.tiles import Grid


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_a_piece_of_any_mask_keeps_the_pairs_of_the_whole(name, data):
    """By its rows, by its columns, and as a band where it is one."""
    total_q, total_k = 7, 9
    mask = CASES[name][0](total_q, total_k)
    q0, k0 = data.draw(st.integers(0, total_q - 1)), data.draw(st.integers(0, total_k - 1))
    nq, nk = data.draw(st.integers(1, total_q - q0)), data.draw(st.integers(1, total_k - k0))
    kept = region(mask.text, tuple(range(len(mask.leaves))))
    if kept.prepared is not None:
        return
    all_pairs = Grid.whole(kept, mask.leaves, (BATCH, HEADS, total_q, total_k), torch.device("cpu"))
    expected = all_pairs.kept(torch.arange(q0, q0 + nq), torch.arange(k0, k0 + nk))
    part = Piece(q0, k0, total_q, total_k).region(kept)
    grid = Grid.whole(part, mask.leaves, (BATCH, HEADS, nq, nk), torch.device("cpu"))
    i, j = torch.arange(nq), torch.arange(nk)
    shape = (BATCH, HEADS, nq, nk)
    expected = torch.ones(shape, dtype=torch.bool) if expected is None else expected.expand(shape)
    found = grid.kept(i, j)
    assert torch.equal(torch.ones_like(expected) if found is None else found.expand(shape), expected)
    by_predicate = torch.ones(()) if part.predicate is None else grid.evaluate(part.predicate, i, j)
    (lo, hi), (first, last) = (
        [x.unsqueeze(-1) for x in grid.key_interval(i)],
        [x.unsqueeze(-2) for x in grid.query_interval(j)],
    )
    for inside in ((lo <= j) & (j < hi), (first <= i.view(-1, 1)) & (i.view(-1, 1) < last)):
        assert torch.equal((inside & by_predicate.bool()).expand(shape), expected)
    band = as_band(part, nk - nq, nk)
    if band is not None:
        low, high = (i + x if x is not None else torch.full((nq,), y) for x, y in ((band.lo, 0), (band.hi, nk)))
        rows = (low.unsqueeze(-1) <= j) & (j < high.unsqueeze(-1)) & (band.start <= j) & (j < band.stop)
        assert torch.equal(rows.expand(shape), expected)
    assert not every_key_seen(part, nq, nk) or bool(expected.any(2).all())


def piece_of(q0: int, k0: int, nq: int = 16, nk: int = 16, **options):
    """A call that is a piece of 64 queries and keys."""
    return call(*qkv(nq=nq, nk=nk), piece=Piece(q0, k0, 64, 64), **options)


@pytest.mark.parametrize(
    "mask", [tw.causal(), tw.window(9, 3), tw.prefix(20), tw.keep(lambda b, h, i, j: i % 3 != j % 2)], ids=str
)
def test_pieces_of_an_attention_have_one_form(mask):
    score = tw.alibi(torch.ones(4)) >> tw.softcap(9.0)
    specs = [piece_of(*at, mask=mask, score=score).p.spec for at in ((0, 0), (16, 0), (32, 16), (48, 48))]
    forms = {tuple(str(expr.abstract(e, [])) for e in (*x.region.parts, x.score)) for x in specs}
    assert len(forms) == 1


def test_a_piece_of_a_causal_mask_and_a_window_stays_a_band_of_numbers():
    bands = [hopper.band_of(piece_of(*at, mask=tw.window(9, 3)).p) for at in ((0, 0), (32, 16))]
    assert bands == [hopper.Band(-9, 4, 0, 16), hopper.Band(7, 20, 0, 16)]


def test_the_text_of_a_piece_is_read_back():
    spec = piece_of(16, 32, mask=tw.causal()).p.spec
    assert spec.piece == Piece(16, 32, 64, 64)
    assert str(spec.region.hi) == "i + (-15)"


def test_a_tensor_of_a_piece_has_the_size_of_the_whole():
    piece_of(16, 32, score=tw.bias(torch.zeros(64, 64)))
    with pytest.raises(ValueError, match="must be seqlen_q = 64"):
        piece_of(16, 32, score=tw.bias(torch.zeros(16, 16)))


def test_a_piece_beyond_the_whole_is_a_wrong_call():
    with pytest.raises(ValueError, match="the piece holds queries 56 to 72 of 64"):
        piece_of(56, 0)
    with pytest.raises(ValueError, match="piece must be a Piece or None, got tuple"):
        call(*qkv(), piece=(0, 0, 70, 70))


def test_a_prepared_mask_is_of_a_whole():
    q, k, _ = qkv(nq=16, nk=16)
    with pytest.raises(ValueError, match="not a piece of one"):
        piece_of(0, 0, mask=tw.keep(lambda b, h, i, j: i != j).prepare(q, k))


def test_what_a_backend_cannot_do_with_a_piece_is_refused_by_name():
    options = {"dropout_p": 0.25, "dropout_seed": 1}
    assert "dropout in a piece of an attention" in Hopper().unsupported(piece_of(16, 0, **options).p)
    assert "dropout in a piece that does not begin at multiples of 16" in Triton().unsupported(
        piece_of(16, 8, **options).p
    )
    q, k, v = (x[0] for x in qkv(nq=16, nk=16))
    cu = torch.tensor([0, 16], dtype=torch.int32)
    packed = call(q, k, v, piece=Piece(0, 0, 64, 64), cu_seqlens_q=cu, cu_seqlens_k=cu).p
    assert Portable().unsupported(packed) == ["a piece of packed sequences"]


def test_sums_of_numbers_are_folded_whatever_their_values():
    e = expr.parse("((i + off) - 3) + (j + 2)")
    folded = {str(expr.abstract(Piece(*at).score(e), [])) for at in ((0, 0, 8, 8), (5, 2, 9, 16))}
    assert folded == {"(i + int_0) + (j + int_1)"}
