"""Attention over ranks that are threads of one process: every mask, score and option against one device, and every refusal."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tilewise as tw
from bench.testing import normal, qkv
from tests.parallel.ranks import CALLS, inputs, on_this_rank, together, wrong
from tests.pieces import TOTAL_K, TOTAL_Q
from tilewise.parallel import Layout, balanced, simulate
from tilewise.piece import Piece
from tilewise.spec import Options

UNEQUAL = Layout((((0, 3), (30, 40)), ((3, 30),), ()))


def whole(ranks: int, name: str, dtype: torch.dtype = torch.float32, **options) -> dict[str, torch.Tensor]:
    """What all ranks compute, put together."""
    contexts = {}

    def one(exchange):
        parallel = contexts[exchange.rank] = tw.context_parallel(exchange, **options)
        return on_this_rank(parallel, name, dtype)

    parts = simulate(ranks, one)
    return together(contexts[0], parts)


@pytest.mark.parametrize(("ranks", "scheme"), [(2, "gather"), (3, "gather")])
@pytest.mark.parametrize("name", CALLS)
def test_every_mask_score_and_option_is_that_of_one_device(name, ranks, scheme):
    assert not wrong(whole(ranks, name, scheme=scheme), name)


# What a rank that has some of the heads cannot do is named by head_axes or by reasons; the other scheme does it.
NOT_BY_HEADS = {
    "keep": "the mask or score computes with the head's number",
    "selected": "the mask or score computes with the head's number",  # of its key head
    "dropout": "dropout counts the heads",
    "dropout-window-alibi": "dropout counts the heads",
}


@pytest.mark.parametrize("name", CALLS)
def test_heads_are_computed_as_on_one_device_or_refused_by_name(name):
    if name in NOT_BY_HEADS:
        with pytest.raises(NotImplementedError, match=f"  heads: {NOT_BY_HEADS[name]}"):
            whole(2, name, scheme="heads")
        assert not wrong(whole(2, name), name)
    else:
        assert not wrong(whole(2, name, scheme="heads"), name)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 4, 5])
def test_any_number_of_ranks_in_any_layout(ranks, layout):
    assert not wrong(whole(ranks, "causal-alibi", layout=layout), "causal-alibi")


@pytest.mark.parametrize("after", ["of-q", "of-what-comes-after"])
@pytest.mark.parametrize("scheme", ["gather", "heads"])
def test_a_second_derivative_raises_also_where_only_a_part_of_the_loss_needs_it(scheme, after):
    """PyTorch leaves out what a gradient depends on where that is tied to nothing, and gives the derivative of the other terms."""

    def one(exchange):
        parallel = tw.context_parallel(exchange, scheme=scheme)
        q, k, v = (parallel.shard(x).requires_grad_() for x in qkv(nq=40, nk=40))
        weight = torch.ones(q.shape[-1], requires_grad=True)
        o = tw.attention(q, k, v, causal=True, parallel=parallel)
        plain = torch.autograd.grad((o * weight).sum(), q, retain_graph=True)[0]
        (dq,) = torch.autograd.grad((o * weight).sum(), q, create_graph=True)
        torch.testing.assert_close(dq, plain, rtol=0, atol=0)
        wanted = q if after == "of-q" else weight
        with pytest.raises(NotImplementedError, match="second derivatives of an attention over ranks"):
            torch.autograd.grad(dq.square().sum() + wanted.sum(), wanted)
        said = tw.explain(q, k, v, causal=True, parallel=parallel)
        assert (said.tangents, said.second) == (None, None)
        assert f"second    no backend, not {said.chosen}: not built over ranks" in str(said)

    simulate(2, one)


def _dual(f, q):
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)))


TRANSFORMS = {
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (torch.ones_like(q),)),
    "dual": _dual,
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "vmap": lambda f, q: torch.func.vmap(f)(q[None]),
}


@pytest.mark.parametrize("how", TRANSFORMS)
@pytest.mark.parametrize("transformed", [(0, 1), (1,)], ids=["on-all-or-the-first", "on-the-second"])
def test_transforms_are_refused_on_every_rank_with_what_to_write(how, transformed):
    if len(transformed) > 1 and how in ("jvp", "dual"):
        transformed = (0,)  # a process has one level of forward mode, which threads cannot enter at once

    def run(exchange):
        parallel = tw.context_parallel(exchange)
        q, k, v = (parallel.shard(x) for x in qkv(nq=40, nk=40))
        transform = TRANSFORMS[how] if exchange.rank in transformed else lambda f, q: f(q)
        transform(lambda q: tw.attention(q, k, v, causal=True, parallel=parallel), q)

    errors = refused(2, run)
    assert len(errors) == 2
    assert all(
        "torch.func (grad, jvp, vmap) and forward mode of an attention over ranks are not built" in x for x in errors
    )
    assert all("torch.autograd.grad(o, (q, k, v), do)" in x for x in errors)


def test_shards_may_be_unequal_and_a_rank_may_hold_nothing():
    q, k, v = (x.requires_grad_() for x in qkv(nq=40, nk=40))
    do = normal(*q.shape, seed=5)
    alone = tw.attention(q, k, v, mask=tw.window(9, 3))
    grads = torch.autograd.grad((alone * do).sum(), (q, k, v))

    def one(exchange):
        parallel = tw.context_parallel(exchange, layout=UNEQUAL, scheme="gather")
        local = [parallel.shard(x).detach().requires_grad_() for x in (q, k, v)]
        o = tw.attention(*local, mask=tw.window(9, 3), parallel=parallel)
        return o.detach(), *torch.autograd.grad((o * parallel.shard(do)).sum(), local)

    for parts, expected in zip(zip(*simulate(3, one), strict=True), (alone, *grads), strict=True):
        torch.testing.assert_close(UNEQUAL.unshard(parts, 1), expected)


@pytest.mark.parametrize("name", ["causal", "documents", "causal-bias", "dropout-window-alibi"])
def test_sixteen_bits(name):
    assert not wrong(whole(2, name, torch.bfloat16, scheme="gather"), name, torch.bfloat16)


def test_dropout_keeps_the_pairs_of_one_device_bit_for_bit():
    q, k, v = qkv(nq=32, nk=32)
    v = torch.eye(32).view(1, 32, 1, 32).expand(2, 32, 2, 32)  # o shows each pair's weight
    alone = tw.attention(q, k, v, dropout_p=0.3, dropout_seed=5)

    def one(exchange):
        parallel = tw.context_parallel(exchange)
        return tw.attention(*[parallel.shard(x) for x in (q, k, v)], parallel=parallel, dropout_p=0.3, dropout_seed=5)

    parts = simulate(2, one)
    parallel = tw.context_parallel(_Alone(2))
    assert torch.equal(parallel.layout_of(32).unshard(parts, 1) == 0, alone == 0)


def test_the_first_ranks_seed_is_that_of_all():
    q, k, v = qkv(nq=32, nk=32)
    v = torch.eye(32).view(1, 32, 1, 32).expand(2, 32, 2, 32)

    def one(exchange):
        parallel = tw.context_parallel(exchange, layout="contiguous")
        seed = torch.tensor([7 + exchange.rank])
        return tw.attention(
            *[parallel.shard(x) for x in (q, k, v)], parallel=parallel, dropout_p=0.5, dropout_seed=seed
        )

    o = torch.cat(simulate(2, one), 1)
    assert torch.equal(o.transpose(1, 2) != 0, tw.dropout_mask(7, 0.5, 2, 4, 32, 32))


def test_keys_that_nobody_sees_never_touch_a_result_even_if_they_hold_nan():
    q, k, v = qkv(nq=40, nk=40)
    mask = tw.key_lengths(torch.tensor([33, 20]))
    clean = tw.attention(q, k, v, mask=mask)
    for b, n in enumerate((33, 20)):
        k[b, n:] = v[b, n:] = torch.nan

    def one(exchange):
        parallel = tw.context_parallel(exchange, scheme="gather")
        local = [parallel.shard(x).requires_grad_() for x in (q, k, v)]
        o = tw.attention(*local, mask=mask, parallel=parallel)
        return o.detach(), torch.autograd.grad(o.sum(), local)

    parts = simulate(2, one)
    layout = tw.context_parallel(_Alone(2)).layout_of(40)
    torch.testing.assert_close(layout.unshard([o for o, _ in parts], 1), clean)
    assert all(bool(g.isfinite().all()) for _, grads in parts for g in grads)


def test_leaf_gradients_are_summed_over_ranks_or_left_to_the_caller():
    alone = whole(1, "causal-alibi")

    def local(exchange):
        return on_this_rank(tw.context_parallel(exchange, sum_leaf_gradients=False), "causal-alibi")

    parts = simulate(3, local)
    leaf = next(name for name in alone if name.startswith("dleaf"))
    torch.testing.assert_close(sum(part[leaf] for part in parts), alone[leaf])
    assert not torch.allclose(parts[0][leaf], alone[leaf])


def test_results_repeat_bit_for_bit():
    first, again = (whole(3, "causal-bias", scheme="gather") for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_error_does_not_grow_with_the_ranks(ranks):
    """The rule of one device holds for any number: one kernel computes each row's softmax."""
    assert not wrong(whole(ranks, "causal", torch.bfloat16, scheme="gather"), "causal", torch.bfloat16)


@pytest.mark.parametrize(("ranks", "scheme"), [(1, "gather"), (3, "gather"), (2, "heads")])
def test_the_largest_scores_are_those_of_one_device(ranks, scheme):
    q, k, v = qkv(nq=40, nk=40)
    options = {"mask": tw.window(9, 3), "score": tw.softcap(2.0), "backend": "portable"}
    rows, heads = (tw.attention_with_stats(q, k, v, per=per, **options) for per in ("row", "head"))

    def one(exchange):
        parallel = tw.context_parallel(exchange, scheme=scheme)
        local = [parallel.shard(x).requires_grad_() for x in (q, k, v)]
        largest = [tw.attention_with_stats(*local, per=per, parallel=parallel, **options) for per in ("row", "head")]
        assert not any(x.max_logit.requires_grad for x in largest)
        assert all(x.o.requires_grad for x in largest)
        return parallel.unshard(largest[0].max_logit, 2), largest[1].max_logit

    for by_row, by_head in simulate(ranks, one):
        torch.testing.assert_close(by_row, rows.max_logit)
        torch.testing.assert_close(by_head, heads.max_logit)


@pytest.mark.parametrize("name", ["causal", "full"])
def test_bytes_are_those_of_the_keys_of_other_ranks_that_a_ranks_rows_see(name):
    def one(exchange):
        parallel = tw.context_parallel(exchange, layout="contiguous", scheme="gather")
        q, k, v, *_ = inputs()
        local = [parallel.shard(x).requires_grad_() for x in (q, k, v)]
        o = tw.attention(*local, parallel=parallel, **CALLS[name]())
        forward = exchange.received
        o.sum().backward()
        return forward, exchange.received - forward, parallel.positions(TOTAL_Q), parallel.positions(TOTAL_K)

    agreement, key = 3 * 8, 2 * 2 * 2 * 16 * 4  # of K and V: batch, heads, head_dim, bytes of fp32
    seen = torch.ones(TOTAL_Q, TOTAL_K).tril(TOTAL_K - TOTAL_Q) if name == "causal" else torch.ones(TOTAL_Q, TOTAL_K)
    parts = simulate(2, one)
    for (forward, backward, queries, keys), (_, _, others, _) in zip(parts, reversed(parts), strict=True):
        fetched = int(seen[queries].any(0).sum()) - int(seen[queries].any(0)[keys].sum())
        lent = int(seen[others].any(0)[keys].sum())
        assert forward - fetched * key in (0, agreement)
        assert backward == lent * key  # dK and dV in fp32; the other rank's keys are kept


@pytest.mark.parametrize("scheme", ["gather", "heads"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, "zigzag"), (4, "contiguous")])
def test_bytes_on_the_wire_are_those_of_the_cost_model(ranks, layout, scheme):
    """The most that one rank receives in each direction; the model knows it, since no tensor tells which keys a window leaves."""
    q, k, v, do = (normal(1, 640, heads, 16, seed=n) for n, heads in enumerate((8, 4, 4, 8)))

    def one(exchange):
        parallel = tw.context_parallel(exchange, layout=layout, scheme=scheme)
        local = [parallel.shard(x).requires_grad_() for x in (q, k, v)]
        options = Options(mask=tw.causal() & tw.window(left=150))
        found = parallel.explain(*local, options)
        before = exchange.received
        o = tw.attention(*local, mask=options.mask, parallel=parallel)
        forward = exchange.received - before
        torch.autograd.grad(o, local, parallel.shard(do))
        return forward, exchange.received - before - forward, found.costs[scheme].received

    forward, backward, model = zip(*simulate(ranks, one), strict=True)
    assert max(forward) + max(backward) == model[0]


@pytest.mark.parametrize("needs_grad", [True, False])
def test_bytes_of_documents_are_those_that_their_layout_tells_the_cost_model(needs_grad):
    mask = tw.causal() & tw.documents(torch.arange(640) // 90)
    layout = balanced(mask, 640, 4, chunks=16)
    q, k, v, do = (normal(1, 640, heads, 16, seed=n) for n, heads in enumerate((8, 4, 4, 8)))

    def one(exchange):
        parallel = tw.context_parallel(exchange, layout=layout, scheme="gather")
        local = [parallel.shard(x).requires_grad_(needs_grad) for x in (q, k, v)]
        model = parallel.explain(*local, Options(mask=mask)).costs["gather"].received
        before = exchange.received
        o = tw.attention(*local, mask=mask, parallel=parallel)
        forward = exchange.received - before
        if needs_grad:
            torch.autograd.grad(o, local, parallel.shard(do))
        return forward, exchange.received - before - forward, model

    forward, backward, model = zip(*simulate(4, one), strict=True)
    assert max(forward) + max(backward) == model[0] > 0


def test_masks_whose_tensors_differ_are_the_same_error_on_every_rank():
    ids = torch.arange(16) // 5

    errors = refused(2, run_with(lambda rank: {"mask": tw.documents(ids + (ids > 1) * rank), "causal": True}))
    assert not any(errors)  # other numbers, the same documents
    errors = refused(2, run_with(lambda rank: {"mask": tw.documents(torch.arange(16) // (5 + rank))}))
    assert len(set(errors)) == 1
    assert "the mask's tensors hold other numbers on each rank" in errors[0]
    assert errors[0].endswith("a b")


# -- Index maps ----------------------------------------------------------------------------------------------------


def test_index_maps_invert_each_other_and_so_do_their_gradients():
    x, g = normal(2, 19, 3).double(), normal(2, 19, 3, seed=1).double()

    def one(exchange):
        parallel = tw.context_parallel(exchange)
        held = x.clone().requires_grad_()
        local = parallel.shard(held)
        assert torch.equal(local, x[:, parallel.positions(19)])
        again = parallel.unshard(local)
        rolled = parallel.roll(local, -1)
        (grad,) = torch.autograd.grad((parallel.shard(g) * rolled).sum(), held)
        return again.detach(), grad

    found = simulate(3, one)
    assert all(torch.equal(again, x) for again, _ in found)  # each rank's copy of x has its own part of the gradient
    torch.testing.assert_close(sum(grad for _, grad in found), torch.roll(g, 1, 1))


# -- Right or refused ----------------------------------------------------------------------------------------------


class _Alone:
    """A rank that talks to nobody: for what needs no exchange."""

    rank = received = 0

    def __init__(self, size: int):
        self.size = size


def refused(ranks: int, run) -> list[str]:
    """What each rank raises."""

    def one(exchange):
        try:
            run(exchange)
        except (ValueError, NotImplementedError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return simulate(ranks, one)


def run_with(options):
    """A call whose options depend on the rank."""

    def run(exchange):
        parallel = tw.context_parallel(exchange, layout="contiguous")
        q, k, v = qkv(nq=16, nk=16)
        tw.attention(*[parallel.shard(x) for x in (q, k, v)], parallel=parallel, **options(exchange.rank))

    return run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (lambda rank: {"causal": rank == 0}, "mask\n    rank 0: causal()\n    rank 1: "),
        (lambda rank: {"softmax_scale": 1.0 + rank}, "softmax_scale\n    rank 0: 1.0\n    rank 1: 2.0"),
        (lambda rank: {"score": [tw.softcap(9.0), None][rank]}, "score\n    rank 0: "),
        (lambda rank: {"score": tw.alibi(torch.ones(4 if rank else 1))}, "tensors of mask, score and sink"),
        (lambda rank: {"causal": rank == 0}, "mask\n    rank 0: causal()\n    rank 1: none"),
        (lambda rank: {"backend": [None, "portable"][rank]}, "backend\n    rank 0: None\n    rank 1: portable"),
        (
            lambda rank: {"mask": 7} if rank else {},
            "the call\n    rank 0: (not reached)\n    rank 1: ValueError: mask= takes",
        ),
    ],
)
def test_ranks_that_disagree_all_get_one_error_that_names_the_difference(options, said):
    errors = refused(2, run_with(options))
    assert len(set(errors)) == 1
    assert errors[0].startswith("ValueError: the 2 ranks were called differently")
    assert said in errors[0]


def _missing(s, b, h, i, j):
    return {}["slope"] * s


def test_an_error_of_a_score_on_one_rank_is_told_to_the_others_and_keeps_its_kind_on_all():
    alone, other = refused(2, run_with(lambda rank: {"score": [_missing, None][rank]}))
    assert alone == other
    assert "rank 0: KeyError: 'slope'\n    rank 1: (not reached)" in alone
    assert refused(2, run_with(lambda rank: {"score": _missing})) == ["KeyError: 'slope'"] * 2


@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one", "all"])
def test_values_of_other_rows_than_the_keys_are_refused_on_every_rank(ranks):
    def run(exchange):
        parallel = tw.context_parallel(exchange)
        q, k, v = (parallel.shard(x) for x in qkv(nq=16, nk=16))
        tw.attention(q, k, v[:, :-1] if exchange.rank in ranks else v, parallel=parallel)

    errors = refused(2, run)
    assert len(set(errors)) == 1
    assert "seqlen of k (8) and v (7) differ" in errors[0]


def test_a_call_that_no_rank_can_run_keeps_its_kind_of_error():
    errors = refused(2, run_with(lambda rank: {"score": lambda s, b, h, i, j: s + i.item()}))
    assert len(set(errors)) == 1
    assert errors[0].startswith("NotImplementedError: ")


@pytest.mark.parametrize(("keys", "ranks"), [(1, 2), (9, 4)])
def test_a_rank_may_have_queries_and_no_keys(keys, ranks):
    q, k, v = (x.requires_grad_() for x in qkv(nq=12, nk=keys))
    do = normal(*q.shape, seed=5)
    expected = torch.autograd.grad(tw.attention(q, k, v), (q, k, v), do)

    def one(exchange):
        parallel = tw.context_parallel(exchange, layout="chunks", scheme="gather")
        local = [parallel.shard(x).detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(tw.attention(*local, parallel=parallel), local, parallel.shard(do))

    for parts, x in zip(zip(*simulate(ranks, one), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), x)


def test_one_order_of_sums_is_by_heads_whatever_the_scheme():
    def run(exchange, scheme="auto"):
        parallel = tw.context_parallel(exchange, scheme=scheme)
        q, k, v = (parallel.shard(x) for x in qkv(nq=16, nk=16))
        return tw.attention(q, k, v, causal=True, parallel=parallel, deterministic="everywhere")

    by_heads = simulate(2, lambda exchange: run(exchange, "heads"))
    assert all(torch.equal(a, b) for a, b in zip(simulate(2, run), by_heads, strict=True))
    assert all('deterministic="everywhere"' in x for x in refused(2, lambda exchange: run(exchange, "gather")))


def test_a_rank_that_fails_among_some_of_the_ranks_ends_them_all():
    def run(exchange):
        parallel = tw.context_parallel(exchange, scheme="heads+gather")
        q, k, v = (parallel.shard(x) for x in qkv(nq=32, nk=32))
        entries = torch.full((1, 1, 32, 2), 77 if exchange.rank == 3 else 7)
        return tw.attention(q, k, v, parallel=parallel, mask=tw.selected(entries))

    with pytest.raises(ValueError, match="an entry 77 in row"):
        simulate(4, run)


def test_a_call_without_a_tensor_is_the_same_error_on_every_rank():
    def run(exchange):
        q, k, v = (x[:, :8] for x in qkv(nq=16, nk=16))
        tw.attention(None if exchange.rank else q, k, v, parallel=tw.context_parallel(exchange))

    errors = refused(2, run)
    assert len(set(errors)) == 1
    assert "q must be a tensor, got NoneType" in errors[0]


def test_an_empty_batch_is_refused_by_name_on_every_rank():
    def run(exchange):
        parallel = tw.context_parallel(exchange)
        tw.attention(*[parallel.shard(x) for x in qkv(batch=0, nq=16, nk=16)], parallel=parallel, causal=True)

    errors = refused(2, run)
    assert errors == ["NotImplementedError: attention over ranks has an empty batch; skip the call on every rank"] * 2


def test_a_wrong_call_is_the_same_error_on_every_rank():
    errors = refused(3, run_with(lambda rank: {"mask": tw.dense(torch.ones(5, 5, dtype=torch.bool))}))
    assert len(set(errors)) == 1
    assert "q (2, 16, 4, 16)" in errors[0]
    assert "axis 0 must be seqlen_q = 16" in errors[0]


def test_a_later_call_with_another_tensor_is_checked_like_the_first():
    def run(exchange):
        parallel = tw.context_parallel(exchange, layout="contiguous")
        local = [parallel.shard(x) for x in qkv(nq=16, nk=16)]
        for rows in (16, 5):
            tw.attention(*local, parallel=parallel, score=tw.bias(torch.zeros(rows, 16)))

    errors = refused(2, run)
    assert len(set(errors)) == 1
    assert "q (2, 16, 4, 16)" in errors[0]


def test_rows_that_are_not_those_of_the_layout_are_refused_on_every_rank():
    def run(exchange):
        q, k, v = qkv(nq=7 - exchange.rank, nk=7 - exchange.rank)
        tw.attention(q, k, v, parallel=tw.context_parallel(exchange, layout="contiguous"))

    errors = refused(2, run)
    assert len(set(errors)) == 1
    assert "the ranks hold [7, 6] queries" in errors[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda e: tw.context_parallel(e, layout="striped"),
            "layout must be zigzag, contiguous, chunks or a Layout, got 'striped'",
        ),
        (lambda e: tw.context_parallel(e, layout=balanced(None, 16, 3)), "the layout is for 3 ranks, the group has 2"),
        (
            lambda e: tw.context_parallel(e, scheme="fast"),
            "scheme must be auto, gather, heads, heads.gather, got 'fast'; Ulysses is heads",
        ),
        (
            lambda e: tw.context_parallel(e).shard(torch.arange(16)),
            r"dim=1 is to be the sequence, but the tensor is \(16,\); name it: dim=0",
        ),
        (lambda e: tw.context_parallel(e).roll(torch.arange(16), -1), r"the tensor is \(16,\); name it: dim=0"),
        (lambda e: tw.context_parallel(), "torch.distributed is not initialized"),
        (
            lambda e: tw.context_parallel("cp"),
            r"group must be a process group, .*, got 'cp'; a mesh's dimension is mesh\['cp'\]",
        ),
    ],
)
def test_a_wrong_group_or_layout_says_what_is_allowed(make, said):
    with pytest.raises(ValueError, match=said):
        make(_Alone(2))


def test_a_copied_module_has_the_same_ranks_and_a_saved_one_says_what_to_save():
    def ask(rank):
        parallel = tw.context_parallel(rank)
        with pytest.raises(TypeError, match=r"save state_dict\(\), and call context_parallel"):
            pickle.dumps(parallel)
        return copy.deepcopy({"parallel": parallel})["parallel"] is parallel

    assert simulate(2, ask) == [True, True]


def test_a_piece_of_an_attention_is_refused_by_name():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="does not support a piece of an attention"):
        tw.context_parallel(_Alone(2)).attention(q, k, v, Options(piece=Piece(0, 0, 70, 70)))


@pytest.mark.parametrize("of", ["shard", "unshard"])
def test_a_dimension_that_a_tensor_lacks_is_named(of):
    def one(exchange):
        with pytest.raises(ValueError, match=r"dim=5 is to be the sequence, but the tensor is \(2, 8, 3\)"):
            getattr(tw.context_parallel(exchange), of)(torch.zeros(2, 8, 3), 5)

    simulate(2, one)
