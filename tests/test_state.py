"""States (o, lse) under their merge, against softmax over the concatenated keys, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tilewise as tw
from tilewise import state

ROWS, DIM = 7, 5


def attend(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``s (ROWS, keys)``, ``v (keys, DIM)``; rows without keys give (0, -inf)."""
    lse = torch.logsumexp(s, -1)
    p = torch.where(s == -torch.inf, 0.0, torch.exp(s - lse.unsqueeze(-1)))
    return p @ v, lse


@pytest.fixture
def parts():
    """Scores and values of three sets of keys: usual ones, huge ones, and one that hides whole rows."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    s = [draw(ROWS, 4), 500 * draw(ROWS, 3), draw(ROWS, 6)]
    for hidden in s:
        hidden[0] = -torch.inf  # the first row sees nothing anywhere
    s[2][:4] = -torch.inf
    return [(x, draw(x.shape[1], DIM)) for x in s]


def test_merging_two_sets_of_keys_is_attention_over_their_union(parts):
    (s, v), (t, w), _ = parts
    expected = attend(torch.cat([s, t], -1), torch.cat([v, w]))
    for got, x in zip(state.merge(*attend(s, v), *attend(t, w)), expected, strict=True):
        assert_close(got, x)


def test_merge_is_associative_and_commutative(parts):
    a, b, c = (attend(*part) for part in parts)
    for x, y in zip(state.merge(*state.merge(*a, *b), *c), state.merge(*a, *state.merge(*b, *c)), strict=True):
        assert_close(x, y)
    assert all(torch.equal(x, y) for x, y in zip(state.merge(*a, *b), state.merge(*b, *a), strict=True))


def test_nothing_seen_is_the_identity_bit_for_bit(parts):
    nothing = torch.zeros(ROWS, DIM, dtype=torch.float64), torch.full((ROWS,), -torch.inf, dtype=torch.float64)
    for part in parts:
        a = attend(*part)
        for merged in (state.merge(*a, *nothing), state.merge(*nothing, *a)):
            assert all(torch.equal(x, y) for x, y in zip(merged, a, strict=True))


@pytest.mark.parametrize("dim", [0, 1])
def test_merging_many_is_merging_one_after_the_other(parts, dim):
    states = [attend(*part) for part in parts]
    o, lse = torch.stack([o for o, _ in states], dim), torch.stack([lse for _, lse in states], dim)
    expected = state.merge(*state.merge(*states[0], *states[1]), *states[2])
    for got, x in zip(state.merge_all(o, lse, dim), expected, strict=True):
        assert_close(got, x)


def test_merging_one_changes_nothing(parts):
    o, lse = attend(*parts[0])
    assert all(torch.equal(x, y) for x, y in zip(state.merge_all(o[None], lse[None], 0), (o, lse), strict=True))


def test_rows_that_nobody_sees_stay_zero_and_minus_infinity(parts):
    a, b, c = (attend(*part) for part in parts)
    o, lse = torch.stack([a[0], b[0], c[0]]), torch.stack([a[1], b[1], c[1]])
    for merged_o, merged_lse in (state.merge(*a, *b), state.merge_all(o, lse, 0)):
        assert bool((merged_o[0] == 0).all())
        assert merged_lse[0] == -torch.inf


def test_a_sink_is_a_key_without_value(parts):
    s, v = parts[0]
    for sink in (0.7, -300.0, 300.0):
        logit = torch.full((ROWS,), sink, dtype=torch.float64)
        expected = attend(torch.cat([s, logit[:, None]], -1), torch.cat([v, torch.zeros(1, DIM, dtype=torch.float64)]))
        for got, x in zip(state.add_sink(*attend(s, v), logit), expected, strict=True):
            assert_close(got, x)


def test_a_sink_takes_a_row_without_keys_whole(parts):
    o, lse = state.add_sink(*attend(*parts[0]), torch.tensor(1.5, dtype=torch.float64))
    assert bool((o[0] == 0).all())
    assert lse[0] == 1.5


def test_a_sink_of_minus_infinity_is_no_sink(parts):
    before = attend(*parts[0])
    after = state.add_sink(*before, torch.tensor(-torch.inf, dtype=torch.float64))
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


def test_a_sink_is_merged_once_at_the_end_or_with_one_part(parts):
    a, b, _ = (attend(*part) for part in parts)
    sink = torch.tensor(0.3, dtype=torch.float64)
    late, early = state.add_sink(*state.merge(*a, *b), sink), state.merge(*state.add_sink(*a, sink), *b)
    for x, y in zip(late, early, strict=True):
        assert_close(x, y)


def test_the_sink_gradient_is_autograds(parts):
    s, v = parts[0]
    g = torch.Generator().manual_seed(1)
    do = torch.randn(ROWS, DIM, generator=g, dtype=torch.float64)
    dlse = torch.randn(ROWS, generator=g, dtype=torch.float64)
    sink = torch.linspace(-2, 2, ROWS, dtype=torch.float64, requires_grad=True)
    logits = torch.cat([s, sink[:, None]], -1)
    o = torch.softmax(logits, -1)[:, :-1] @ v
    lse = torch.logsumexp(logits, -1)
    (expected,) = torch.autograd.grad((o * do).sum() + (lse * dlse).sum(), sink)
    with torch.no_grad():
        assert_close(state.sink_gradient(sink, lse, (do * o).sum(-1) - dlse), expected)
    assert expected[0] == dlse[0]  # the row without keys: lse is the sink


def test_the_sink_gradient_of_minus_infinity_is_zero():
    lse, delta = torch.tensor([0.5, -torch.inf]), torch.tensor([2.0, 3.0])
    assert bool((state.sink_gradient(torch.tensor(-torch.inf), lse, delta) == 0).all())


def test_the_weights_of_states_add_up_to_one_however_large_lse_is():
    lse_a, lse_b = torch.tensor([1e4, -1e4, 500.0, 300.0]), torch.tensor([-1e4, -1e4, 500.0, 301.0])
    ones = torch.ones(4, 1)
    two = state.merge(ones, lse_a, ones, lse_b)[0]
    many = state.merge_all(ones.expand(3, 4, 1), torch.stack([lse_a, lse_b, lse_b]), 0)[0]
    for o in (two, many):
        assert_close(o, ones, rtol=4 * torch.finfo(o.dtype).eps, atol=0)
    half = state.add_sink(torch.full((4, 1), 2.0), lse_b, lse_b)[0]
    assert_close(half, ones, rtol=4 * torch.finfo(half.dtype).eps, atol=0)


# -- The public merge, of what attention_with_lse returns ----------------------------------------------------------


def tensors(packed: bool = False):
    g = torch.Generator().manual_seed(1)
    shapes = ((5, 4, 8), (9, 2, 8), (9, 2, 6)) if packed else ((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6))
    return [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]


def pieces(q, k, v, ends):
    """Attention over each run of keys that ends at one of ``ends``; rows 0 and 1 see nothing of the last."""
    found, start = [], 0
    for end in ends:
        rows = slice(start, end)
        hidden = tw.keep(lambda b, h, i, j: i >= 2) if end == ends[-1] else None
        found.append(tw.attention_with_lse(q, k[:, rows], v[:, rows], mask=hidden))
        start = end
    return found


@pytest.mark.parametrize("ends", [(9,), (4, 9), (1, 2, 9)])
def test_merged_pieces_are_the_whole_and_so_are_their_gradients(ends):
    q, k, v = tensors()
    first = 0 if len(ends) == 1 else ends[-2]
    whole = tw.attention_with_lse(q, k, v, mask=tw.keep(lambda b, h, i, j: (i >= 2) | (j < first)))
    merged = tw.merge(pieces(q, k, v, ends))
    do, dlse = torch.randn_like(whole[0]), torch.randn_like(whole[1])
    for got, x in zip(merged, whole, strict=True):
        assert_close(got, x)
    gradients = [
        torch.autograd.grad((o * do).sum() + torch.where(lse == -torch.inf, 0.0, lse * dlse).sum(), (q, k, v))
        for o, lse in (merged, whole)
    ]
    for got, x in zip(*gradients, strict=True):
        assert_close(got, x)


def test_merged_pieces_of_packed_sequences_are_the_whole():
    q, k, v = tensors(packed=True)
    cu_q, ends = torch.tensor([0, 2, 5]), (torch.tensor([0, 4, 9]), torch.tensor([0, 3, 5]))
    rows = [torch.cat([torch.arange(0, 3), torch.arange(4, 6)]), torch.tensor([3, 6, 7, 8])]
    parts = [
        tw.attention_varlen(q, k[r], v[r], cu_q, cu, return_lse=True)
        for r, cu in zip(rows, (ends[1], torch.tensor([0, 1, 4])), strict=True)
    ]
    for got, x in zip(tw.merge(parts), tw.attention_varlen(q, k, v, cu_q, ends[0], return_lse=True), strict=True):
        assert_close(got, x)


def test_a_part_that_saw_nothing_counts_for_nothing_and_gets_no_gradient():
    q, k, v = tensors()
    o, lse = (x.detach().requires_grad_() for x in tw.attention_with_lse(q, k, v))
    nothing = torch.full_like(o, torch.nan).requires_grad_(), torch.full_like(lse, -torch.inf).requires_grad_()
    merged = tw.merge([(o, lse), nothing])
    assert all(torch.equal(got, x) for got, x in zip(merged, (o, lse), strict=True))
    gradients = torch.autograd.grad(merged[0].sum() + merged[1].sum(), (o, lse, *nothing))
    assert_close(gradients[0], torch.ones_like(o))
    assert_close(gradients[1], torch.ones_like(lse))
    assert all(bool((x == 0).all()) for x in gradients[2:])


def test_where_no_part_saw_anything_the_merge_is_the_empty_state():
    o, lse = torch.zeros(1, 3, 2, 4, requires_grad=True), torch.full((1, 2, 3), -torch.inf, requires_grad=True)
    merged = tw.merge([(o, lse), (o, lse)])
    assert all(torch.equal(got, x) for got, x in zip(merged, (o, lse), strict=True))
    assert all(bool((x == 0).all()) for x in torch.autograd.grad(merged[0].sum(), (o, lse)))


def test_sixteen_bit_parts_are_merged_in_fp32():
    q, k, v = (x.detach().bfloat16() for x in tensors())
    o, lse = tw.merge(pieces(q, k, v, (4, 9)))
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact = tw.merge([(o.double(), lse.double()) for o, lse in pieces(q, k, v, (4, 9))])
    assert_close(o.double(), exact[0], rtol=2**-8, atol=0)  # one rounding of the exact merge


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda o, lse: [], "at least one"),
        (lambda o, lse: [o, lse], "pair of tensors"),
        (lambda o, lse: [(o, lse.mT)], r"lse \(batch, heads, seqlen\)"),
        (lambda o, lse: [(o, lse), (o[:, :3], lse[..., :3])], "o of part 1 is"),
        (lambda o, lse: [(o, lse), (o.float(), lse)], "float32.*must be alike"),
        (lambda o, lse: [(o, lse.half())], "float32 or float64"),
    ],
)
def test_parts_that_are_not_alike_are_refused_in_words(change, said):
    q, k, v = tensors()
    o, lse = (x.detach() for x in tw.attention_with_lse(q, k, v))
    with pytest.raises(ValueError, match=f"merge was called wrongly(.|\n)*{said}"):
        tw.merge(change(o, lse))


def test_a_row_and_its_sink_have_the_same_bits_wherever_the_row_lies():
    o, lse, sink = torch.randn(3, 129, 8), torch.randn(3, 129), torch.randn(3, 1)
    whole = state.add_sink(o, lse, sink)
    for n in range(129):
        for rows in (slice(n, n + 1), slice(n, n + 3), slice(n, None)):
            found = state.add_sink(o[:, rows], lse[:, rows], sink)
            assert torch.equal(found[0], whole[0][:, rows])
            assert torch.equal(found[1], whole[1][:, rows])
        turned = state.add_sink(o[:, n:], lse.T.contiguous().T[:, n:], sink)
        assert torch.equal(turned[1], whole[1][:, n:])


def test_a_sink_is_a_logit_without_a_value():
    inf = torch.inf
    lse = torch.tensor([-inf, -inf, 0.5, 0.5, 90.0, -90.0], dtype=torch.float64)
    sink = torch.tensor([-inf, 2.0, -inf, 0.5, -90.0, 90.0], dtype=torch.float64)
    o, total = state.add_sink(torch.ones(6, 2, dtype=torch.float64), lse, sink)
    torch.testing.assert_close(total, torch.logaddexp(lse, sink))
    expected = torch.where(lse == -inf, 0.0, torch.exp(lse - torch.logaddexp(lse, sink)))
    torch.testing.assert_close(o, expected[:, None].expand(6, 2))
