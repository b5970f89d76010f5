"""How often ranks talk before a call, and that they agree whatever happened to one of them since the call before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.testing import normal
from tilewise.parallel import simulate
from tilewise.parallel.context import ContextParallel
from tilewise.parallel.exchange import Simulated

SEQLEN, RANKS = 256, 2


class Counting(Simulated):
    """A simulated rank that counts how often it told the others numbers."""

    told = 0

    def numbers(self, values: list[int]) -> list[list[int]]:
        self.told += 1
        return super().numbers(values)


def on_ranks(run: Callable[[ContextParallel, Callable[[], Tensor], Tensor], object]) -> list:
    """What each rank returns of ``run(group, call, ids)``, where a call attends within the documents of the rank's ids."""

    def one(exchange: Simulated) -> object:
        ids = torch.arange(SEQLEN) // 60
        parallel = tw.context_parallel(Counting(exchange.rank, exchange.meeting), scheme="gather")
        q, k, v = (parallel.shard(normal(1, SEQLEN, 2, 16, seed=n)) for n in range(3))
        mask = tw.causal() & tw.documents(ids)
        return run(parallel, lambda: tw.attention(q, k, v, mask=mask, parallel=parallel), ids)

    return simulate(RANKS, one)


def whole(ids: Tensor) -> Tensor:
    q, k, v = (normal(1, SEQLEN, 2, 16, seed=n) for n in range(3))
    return tw.attention(q, k, v, mask=tw.causal() & tw.documents(ids))


def test_ranks_whose_plans_stand_talk_once_before_a_call():
    def run(parallel, call, ids):
        found = []
        for step in range(4):
            if step == 2:
                ids[100:] += 1  # on all ranks alike
            before = parallel.exchange.told
            call()
            found.append(parallel.exchange.told - before)
        return found

    assert on_ranks(run) == [[2, 1, 2, 1]] * RANKS


def test_a_rank_whose_documents_change_alone_is_found_after_calls_that_agreed():
    def run(parallel, call, ids):
        call()
        call()
        if parallel.rank == 1:
            ids.zero_()
        with pytest.raises(ValueError, match="the mask's tensors hold other numbers on each rank"):
            call()
        if parallel.rank == 1:
            ids.copy_(torch.arange(SEQLEN) // 60)
        return parallel.unshard(call())

    for found in on_ranks(run):
        torch.testing.assert_close(found, whole(torch.arange(SEQLEN) // 60))


def test_a_rank_that_forgot_its_plan_computes_with_the_others():
    def run(parallel, call, ids):
        call()
        if parallel.rank == 0:
            parallel.plans._found.clear()
        found = parallel.unshard(call())
        if parallel.rank == 1:
            parallel.plans._agreed.clear()
        return found, parallel.unshard(call())

    for found in on_ranks(run):
        for x in found:
            torch.testing.assert_close(x, whole(torch.arange(SEQLEN) // 60))


def test_documents_that_all_ranks_write_anew_between_calls_are_followed():
    def run(parallel, call, ids):
        found = []
        for width in (60, 33, 60, 90):
            ids.copy_(torch.arange(SEQLEN) // width)
            found.append(parallel.unshard(call()))
        return found

    for found in on_ranks(run):
        for x, width in zip(found, (60, 33, 60, 90), strict=True):
            torch.testing.assert_close(x, whole(torch.arange(SEQLEN) // width))


def test_a_call_of_another_length_with_the_same_mask_is_agreed_on_anew():
    mask = tw.prefix(torch.tensor([40]))

    def one(exchange: Simulated) -> list[int]:
        parallel, found = tw.context_parallel(Counting(exchange.rank, exchange.meeting), scheme="gather"), []
        for seqlen in (SEQLEN, SEQLEN, SEQLEN // 2, SEQLEN, SEQLEN // 2):
            q, k, v = (normal(1, seqlen, 2, 16, seed=n) for n in range(3))
            before = parallel.exchange.told
            o = tw.attention(*map(parallel.shard, (q, k, v)), mask=mask, parallel=parallel)
            found.append(parallel.exchange.told - before)
            torch.testing.assert_close(parallel.unshard(o), tw.attention(q, k, v, mask=mask))
        return found

    assert simulate(RANKS, one) == [[2, 1, 2, 2, 2]] * RANKS
