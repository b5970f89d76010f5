"""Layouts: every position has one holder, index maps invert each other, and work is dealt evenly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.parallel import Layout, balanced, contiguous, zigzag
from tilewise.parallel.balance import TILE, chunk_costs
from tilewise.parallel.layout import chunks

MAKERS = {
    "contiguous": contiguous,
    "chunks": chunks,
    "zigzag": zigzag,
    "balanced": lambda n, ranks: balanced(tw.causal(), n, ranks),
}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seqlen=st.integers(0, 700), ranks=st.integers(1, 9))
def test_every_position_has_one_holder(name, seqlen, ranks):
    layout = MAKERS[name](seqlen, ranks)
    assert layout.ranks == ranks
    assert layout.seqlen == seqlen
    held = torch.cat([layout.positions(rank) for rank in range(ranks)])
    assert torch.equal(held.sort().values, torch.arange(seqlen))


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seqlen=st.integers(1, 300), ranks=st.integers(1, 5))
def test_shards_are_the_positions_and_are_put_together_again(name, seqlen, ranks):
    layout = MAKERS[name](seqlen, ranks)
    x = torch.arange(2 * seqlen).view(2, seqlen)
    parts = [layout.shard(x, rank, 1) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, x[:, layout.positions(rank)])
        assert part.shape[1] == layout.lengths[rank]
    longest = max(layout.lengths)
    padded = [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=-1) for part in parts]
    for given_parts in (parts, padded):
        assert torch.equal(layout.unshard(given_parts, 1), x)


def test_a_zigzag_pairs_the_first_chunk_with_the_last():
    assert zigzag(16, 2).pieces == (((0, 4), (12, 16)), ((4, 12),))
    assert zigzag(3, 1).pieces == (((0, 3),),)


@pytest.mark.parametrize(("seqlen", "ranks"), [(10, 4), (5, 4), (8, 2), (0, 3)])
def test_chunks_are_those_of_torch(seqlen, ranks):
    expected = [len(x) for x in torch.arange(seqlen).chunk(ranks)] if seqlen else []
    assert list(chunks(seqlen, ranks).lengths) == expected + [0] * (ranks - len(expected))


@pytest.mark.parametrize("pieces", [((0, 4), (5, 8)), ((0, 4), (3, 8)), ((0, 0),), ((1, 8),)])
def test_pieces_that_overlap_or_leave_gaps_are_refused(pieces):
    with pytest.raises(ValueError, match="must cover 0 to the sequence's length once"):
        Layout((pieces,))


SEQLEN = 64 * TILE
IDS = torch.cat([torch.full((n,), i) for i, n in enumerate((300, 4000, 1000, 2500, SEQLEN - 7800))])
MASKS = {
    "causal": tw.causal(),
    "documents": tw.causal() & tw.documents(IDS),
    "window": tw.causal() & tw.window(left=700),
    "prefix": tw.prefix(3000),
    "blocks": tw.block_sparse(torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.1, TILE, TILE),
    "several": [tw.causal(), tw.causal() & tw.window(left=500), None],
    "lengths": tw.causal() & tw.key_lengths(torch.tensor([SEQLEN, 900])),
}


def loads(layout, masks):
    """Visited tiles of each rank."""
    rows = chunk_costs(masks, SEQLEN, range(SEQLEN + 1))
    return [sum(sum(rows[start:stop]) for start, stop in held) for held in layout.pieces]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", MASKS)
def test_every_rank_visits_about_as_many_tiles_whatever_the_mask(name, ranks):
    found = loads(balanced(MASKS[name], SEQLEN, ranks), MASKS[name])
    assert max(found) <= 1.08 * sum(found) / ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_holds_about_as_many_rows(ranks):
    for mask in MASKS.values():
        lengths = balanced(mask, SEQLEN, ranks).lengths
        assert max(lengths) - min(lengths) <= -(-SEQLEN // (8 * ranks))


def test_a_zigzag_is_no_balance_for_documents():
    found = loads(zigzag(SEQLEN, 4), MASKS["documents"])
    assert max(found) > 1.15 * sum(found) / 4


def test_costs_are_the_tiles_that_a_mask_leaves():
    costs = chunk_costs(tw.causal(), 4 * TILE, [0, TILE, 2 * TILE, 4 * TILE])
    assert costs == [TILE, 2 * TILE, 7 * TILE]


def test_a_layout_shows_who_holds_what():
    assert zigzag(8, 2).show(8) == "rank 0   ██····██  4\nrank 1   ··████··  4"


@pytest.mark.parametrize(
    "layout", [zigzag(48, 6), Layout((((0, 3), (20, 24)), ((3, 9),), ((9, 10), (11, 20)), ((10, 11),)))]
)
def test_neighbours_hold_the_pieces_of_their_neighbourhood(layout):
    coarse = layout.across(2)
    assert coarse.ranks == layout.ranks // 2
    for group in range(coarse.ranks):
        local = layout.within(2, group)
        assert local.seqlen == coarse.lengths[group]
        for place in range(2):
            rows = coarse.positions(group)[local.positions(place)]
            assert torch.equal(rows, layout.positions(2 * group + place))


def test_neighbours_of_a_zigzag_are_a_zigzag_of_neighbourhoods():
    assert zigzag(48, 6).across(3) == zigzag(48, 2)
