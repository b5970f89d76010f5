"""What masks give the Hopper kernels beside numbers."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.backends.contract import call, normal
from tilewise.backends.hopper.host import masks
from tilewise.tiles import Grid

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


@pytest.mark.parametrize("name", [name for name in MASKS if name != "either"])
def test_the_ends_of_rows_and_of_columns_hold_what_the_mask_keeps(name):
    c = a_call(MASKS[name]())
    lo, hi = (x.unsqueeze(-1) for x in masks.row_ends(c.p, c.t))
    first, last = (x.unsqueeze(-2) for x in masks.column_ends(c.p, c.t))
    assert all(x.dtype == torch.int32 for x in (lo, hi, first, last))
    i, j = torch.arange(70).unsqueeze(-1), torch.arange(70)
    assert torch.equal((lo <= j) & (j < hi), kept(c))
    assert torch.equal((first <= i) & (i < last), kept(c))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [(70, 70), (75, 70), (40, 70)], ids=str)
def test_seen_keys_are_those_that_some_query_of_the_group_keeps(name, lengths):
    c = a_call(MASKS[name](), *lengths)
    expected = kept(c).any(2).unflatten(1, (2, 2)).any(2).mT.unsqueeze(-1)
    found = masks.seen(c.p, c.t)
    assert torch.equal(
        expected, torch.ones(()).bool().expand_as(expected) if found is None else found.expand_as(expected)
    )


def test_masks_that_are_known_to_show_every_key_list_no_seen_keys():
    known = [tw.causal(), tw.documents(IDS) & tw.causal(), tw.prefix(9), tw.window(3, 0) | tw.key_range(5, 9)]
    assert all(masks.seen(c.p, c.t) is None for c in map(a_call, known))
    c = a_call(tw.key_lengths(torch.tensor([70, 70])))
    assert masks.seen(c.p, c.t) is not None
