"""The table of cases says what its sources say, and its predicates count what they keep."""

import pytest
import torch

from bench.cases import CASES, LARGE, MASKS, SCORES, draw, named, tagged


def test_h200_grid_is_36_rows_of_16384_tokens_and_hidden_size_2048():
    grid = tagged("h200")
    assert len(grid) == 36
    assert {c.batch * c.seqlen_q for c in grid} == {16384}
    assert {c.heads_q * c.head_dim for c in grid} == {2048}
    assert {(c.head_dim, c.seqlen_q, c.mask) for c in grid} == {
        (d, n, m) for d in (64, 128, 256) for n in (512, 1024, 2048, 4096, 8192, 16384) for m in (None, "causal")
    }


def test_contract_cases_use_every_mask_and_score_of_the_table_but_the_large_ones():
    contract = tagged("contract")
    assert {c.score for c in contract} >= set(SCORES)
    assert {c.mask for c in contract} >= set(MASKS) - set(LARGE)


def test_contract_cases_are_small_enough_for_an_interpreter():
    assert all(c.batch * c.heads_q * c.seqlen_q * c.seqlen_k <= 1_000_000 for c in tagged("contract"))


def test_flops_are_the_papers_count():
    full, causal = named("h200-d64-n512-full"), named("h200-d64-n512-causal")
    assert full.flops("forward") == 4 * full.batch * full.heads_q * 512**2 * 64
    assert full.flops("backward") == 2.5 * full.flops("forward")
    assert causal.flops("forward") == full.flops("forward") * (512 + 1) / (2 * 512)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("contract-n129-causal", 129 * 130 // 2),
        ("contract-more-keys-causal", sum(range(61, 101))),
        ("contract-more-queries-causal", 40 * 41 // 2),
        ("contract-packed-causal", sum(n * (n + 1) // 2 for n in (5, 0, 64, 1, 33))),
        ("contract-nothing", 0),
        ("contract-key-lengths", 67 * (67 + 67 - 67 // 4)),
    ],
)
def test_kept_pairs_count_what_the_mask_keeps(name, pairs):
    assert named(name).kept_pairs() == pairs


def test_same_seed_draws_the_same_numbers_and_another_seed_others():
    case = named("contract-bias")
    a, b, other = draw(case, seed=3), draw(case, seed=3), draw(case, seed=4)
    assert torch.equal(a.q, b.q)
    assert torch.equal(a.leaves["bias"], b.leaves["bias"])
    assert not torch.equal(a.q, other.q)


def test_float64_copy_holds_the_same_rounded_numbers_and_wants_the_same_gradients():
    x = draw(named("contract-bfloat16-window-alibi-sink"))
    exact = x.to(torch.float64)
    assert torch.equal(exact.q, x.q.double())
    assert exact.q.dtype == exact.leaves["slopes"].dtype == torch.float64
    assert list(exact.wanted) == list(x.wanted) == ["dq", "dk", "dv", "dsink", "dslopes"]
    assert all(t.requires_grad for t in exact.wanted.values())


def test_unknown_names_and_tags_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="h200-d64-n512-full"):
        named("h200-d64-n512-ful")
    with pytest.raises(ValueError, match=r"the tags are .*contract"):
        tagged("contrct")


def test_every_case_names_a_mask_and_a_score_of_the_table():
    for case in CASES.values():
        assert case.mask is None or case.mask in MASKS
        assert case.score is None or case.score in SCORES
