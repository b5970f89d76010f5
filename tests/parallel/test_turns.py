"""Backwards over ranks: in one order on all of them, of what any of them reads; and index maps of tensors that are alike."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from bench.testing import normal, qkv
from tilewise.parallel import simulate

SCHEMES = ["gather", "heads"]


def rows(parallel, tensors):
    return [parallel.shard(x).detach().requires_grad_() for x in tensors]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_backwards_in_another_order_raise_on_every_rank(scheme):
    """Of one shape each, the gradients of one call would else be those of the other's rows, and nothing would tell."""

    def one(exchange):
        parallel = tw.context_parallel(exchange, scheme=scheme)
        calls = [rows(parallel, [n * x for x in qkv(nq=24, nk=24)]) for n in (1, 2)]
        outputs = [tw.attention(*local, causal=True, parallel=parallel) for local in calls]
        with pytest.raises(
            ValueError, match="backwards in another order\n  rank 0: call 1, rank 1: call 2 of this group"
        ):
            outputs[exchange.rank].sum().backward()
        for o in reversed(outputs):  # alike, they may run in any order
            o.sum().backward()
        return [x.grad for local in calls for x in local]

    def alike(exchange):
        parallel = tw.context_parallel(exchange, scheme=scheme)
        calls = [rows(parallel, [n * x for x in qkv(nq=24, nk=24)]) for n in (1, 2)]
        sum(tw.attention(*local, causal=True, parallel=parallel).sum() for local in calls).backward()
        return [x.grad for local in calls for x in local]

    for found, expected in zip(simulate(2, one), simulate(2, alike), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_gather_of_rows_has_its_turn_too():
    def one(exchange):
        parallel = tw.context_parallel(exchange)
        x = parallel.shard(normal(2, 8)).requires_grad_()
        both = [parallel.unshard(n * x) for n in (1, 2)]
        with pytest.raises(ValueError, match="rank 0: call 1, rank 1: call 2 of this group"):
            both[exchange.rank].sum().backward()

    simulate(2, one)


@pytest.mark.parametrize("reads", ["lse", "o"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_rank_may_read_what_the_others_leave(scheme, reads):
    q, k, v = qkv(nq=24, nk=24)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = tw.attention_with_lse(*whole, causal=True)

    def loss(o, lse, first):
        return (o.sum() if first or reads == "lse" else 0) + (lse.sum() if first or reads == "o" else 0)

    def one(exchange):
        parallel = tw.context_parallel(exchange, scheme=scheme)
        local = rows(parallel, (q, k, v))
        loss(*tw.attention_with_lse(*local, causal=True, parallel=parallel), exchange.rank == 0).backward()
        return parallel.positions(24), [x.grad for x in local]

    found = simulate(2, one)
    (sum(loss(o[:, held], lse[..., held], rank == 0) for rank, (held, _) in enumerate(found))).backward()
    for held, grads in found:
        for grad, x in zip(grads, whole, strict=True):
            torch.testing.assert_close(grad, x.grad[:, held])


OTHERS = {  # what the second rank gives where the first has (2, 4, 8) of fp32 and gathers dim 1
    "dtype": (lambda: torch.ones(2, 4, 8, dtype=torch.float64), 1),
    "as-many-bytes": (lambda: torch.ones(4, 4, 4), 1),
    "dimensions": (lambda: torch.ones(2, 4), 1),
    "dim": (lambda: torch.ones(2, 4, 8), 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_of_ranks_that_are_not_alike_are_refused_on_all(name):
    def one(exchange):
        parallel = tw.context_parallel(exchange)
        make, dim = OTHERS[name] if exchange.rank else (lambda: torch.ones(2, 4, 8), 1)
        with pytest.raises(
            ValueError, match=r"the tensor, \* for its rows\n    rank 0: \(2, \*, 8\) torch.float32\n    rank 1"
        ):
            parallel.unshard(make(), dim)

    simulate(2, one)


def test_a_gather_of_rows_has_second_derivatives():
    x = normal(2, 9).double()
    whole = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(2 * (whole**3).sum(), whole, create_graph=True)  # the losses of two ranks
    (expected,) = torch.autograd.grad(slope.square().sum(), whole)

    def one(exchange):
        parallel = tw.context_parallel(exchange)
        local = parallel.shard(x).requires_grad_()
        (slope,) = torch.autograd.grad((parallel.unshard(local) ** 3).sum(), local, create_graph=True)
        (found,) = torch.autograd.grad(slope.square().sum(), local)
        torch.testing.assert_close(found, parallel.shard(expected))

    simulate(2, one)
