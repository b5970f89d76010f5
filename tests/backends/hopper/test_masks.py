"""What masks give the Hopper kernels beside numbers."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.backends.contract import call, normal
from tilewise.backends.hopper.host import masks
from tilewise.backends.hopper.kit import schedule
from tilewise.planning.bit_tiles import may_hide_keys
from tilewise.planning.tiles import Grid

IDS = torch.tensor([0] * 9 + [4] + [2] * 20 + [3] * 40)
MASKS = {
    "prefix": lambda: tw.prefix(30),
    "documents": lambda: tw.documents(IDS) & tw.causal(),
    "lengths": lambda: tw.key_lengths(torch.tensor([13, 70])),
    "per-head": lambda: tw.key_range(torch.tensor([[0, 9, 50, 70]]), 60) & tw.window(20),
    "either": lambda: tw.window(3, 3) | tw.keep(lambda b, h, i, j: j < 5),
}


def a_call(mask, nq=70, nk=70):
    q, k = normal(2, nq, 4, 16, dtype=torch.bfloat16), normal(2, nk, 2, 16, dtype=torch.bfloat16)
    return call(q, k, k, mask=mask)


def kept(c):
    shape = c.p.batch, c.p.heads_q, c.p.seqlen_q, c.p.seqlen_k
    grid = Grid.whole(c.p.spec.region, c.t.leaves, shape, torch.device("cpu"))
    return grid.kept(torch.arange(shape[2]), torch.arange(shape[3])).expand(shape)


def ends_of(c, of_lines):
    """The ends of every line as a launch has them."""
    made = masks.EndsOf(c.p, of_lines)
    views, memory = made.views("ends"), made.making(c.t.leaves, torch.device("cpu"))
    return [memory.as_strided(views[name].shape, views[name].strides, views[name].offset) for name in ("lo", "hi")]


@pytest.mark.parametrize("name", [name for name in MASKS if name != "either"])
def test_the_ends_of_rows_and_of_columns_hold_what_the_mask_keeps(name):
    c = a_call(MASKS[name]())
    lo, hi = (x.unsqueeze(-1) for x in ends_of(c, masks.row_ends))
    first, last = (x.unsqueeze(-2) for x in ends_of(c, masks.column_ends))
    assert all(x.dtype == torch.int32 for x in (lo, hi, first, last))
    i, j = torch.arange(70).unsqueeze(-1), torch.arange(70)
    assert torch.equal((lo <= j) & (j < hi), kept(c))
    assert torch.equal((first <= i) & (i < last), kept(c))


@pytest.mark.parametrize("name", [name for name in MASKS if name != "either"])
@pytest.mark.parametrize("lengths", [(70, 70), (75, 70), (40, 70), (69, 70), (9, 70)], ids=str)
def test_no_block_of_ds_is_read_that_was_not_written(name, lengths):
    seqlen_q, seqlen_k = lengths
    c, size = a_call(MASKS[name](), *lengths), 8
    of_rows, of_columns = (ends_of(c, make) for make in (masks.row_ends, masks.column_ends_of_rows))
    for b, h in [(b, h) for b in range(2) for h in range(4)]:
        lo, hi, first, last = (x[b, h].tolist() for x in (*of_rows, *of_columns))
        # As kernels read them: past the last row or key, its own ends.
        by_rows = schedule.Band(
            lambda i, x=lo: x[min(i, seqlen_q - 1)], lambda i, x=hi: x[min(i, seqlen_q - 1)], seqlen_k
        )
        ends = (lambda j, x=x: x[min(j, seqlen_k - 1)] for x in (first, last))
        by_columns = schedule.Band(None, None, seqlen_k, *ends)
        written = {
            (m, n)
            for n in range(-(-seqlen_k // size))
            for m in range(*schedule.query_blocks(size * n, size, size, seqlen_q, by_columns))
        }
        read = {
            (m, n)
            for m in range(-(-seqlen_q // size))
            for n in range(*schedule.seen_blocks(size * m, size, size, by_rows))
        }
        assert read <= written  # beside these a last block of queries may be written, as zeros
        pairs = kept(c)[b, h].nonzero().tolist()
        assert {(i // size, j // size) for i, j in pairs} <= read


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [(70, 70), (75, 70), (40, 70)], ids=str)
def test_seen_keys_are_those_that_some_query_of_the_group_keeps(name, lengths):
    c = a_call(MASKS[name](), *lengths)
    expected = kept(c).any(2).unflatten(1, (2, 2)).any(2)
    found = masks.seen(c.p, c.t.leaves, c.p.group)
    assert torch.equal(expected, found.expand_as(expected))


def test_masks_that_are_known_to_show_every_key_list_no_seen_keys():
    known = [tw.causal(), tw.documents(IDS) & tw.causal(), tw.prefix(9), tw.window(3, 0) | tw.key_range(5, 9)]

    def hides(p) -> bool:
        return may_hide_keys(p.spec.region, (p.seqlen_q, p.seqlen_k))

    assert not any(hides(c.p) for c in map(a_call, known))
    assert hides(a_call(tw.key_lengths(torch.tensor([70, 70]))).p)


def test_tiles_within_the_blocks_of_a_pattern_hide_no_key_of_which_a_pair_is_seen():
    pattern = tw.keep(lambda b, h, i, j: (j // 64 + i) % 3 == 0)
    for mask, tile_n, hides in ((pattern, 64, False), (pattern, 128, True), (tw.key_range(0, 30) & pattern, 64, True)):
        assert may_hide_keys(a_call(mask).p.spec.region, (70, 70), tile_n) == hides
