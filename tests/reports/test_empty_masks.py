"""A mask or a score that changes nothing is neutral in each combination: GPT-Neo's layers without padding meet one."""

import pytest
import torch

import tilewise as tw
from tilewise.masks import Mask
from tilewise.scores import Score

ALL, BAND, N = Mask(""), tw.window(left=3), 9
COMBINED = {
    "empty & band": (lambda: ALL & BAND, BAND),
    "band & empty": (lambda: BAND & ALL, BAND),
    "empty & empty": (lambda: ALL & ALL, ALL),
    "empty | band": (lambda: ALL | BAND, ALL),
    "band | empty": (lambda: BAND | ALL, ALL),
    "(empty & band) | key_range": (lambda: (ALL & BAND) | tw.key_range(0, 2), BAND | tw.key_range(0, 2)),
    "(empty | band) & causal": (lambda: (ALL | BAND) & tw.causal(), tw.causal()),
}


@pytest.mark.parametrize("name", COMBINED)
def test_a_mask_that_hides_nothing_is_neutral_for_and_and_takes_all_for_or(name):
    made, same = COMBINED[name]
    q = torch.randn(1, N, 2, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(tw.attention(q, q, q, mask=made()), tw.attention(q, q, q, mask=same))
    assert tw.show_mask(made(), N, N) == tw.show_mask(same, N, N)


def test_a_mask_that_hides_nothing_can_be_prepared_and_combined_with_causal():
    q = torch.randn(1, N, 2, 8, generator=torch.Generator().manual_seed(1))
    prepared = ALL.prepare(q, q)
    assert torch.equal(tw.attention(q, q, q, mask=prepared), tw.attention(q, q, q))
    assert torch.equal(tw.attention(q, q, q, mask=ALL, causal=True), tw.attention(q, q, q, causal=True))


@pytest.mark.parametrize("score", [Score("") >> tw.softcap(3.0), tw.softcap(3.0) >> Score("")], ids=["before", "after"])
def test_a_score_that_changes_nothing_is_neutral(score):
    q = torch.randn(1, N, 2, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(tw.attention(q, q, q, score=score), tw.attention(q, q, q, score=tw.softcap(3.0)))
