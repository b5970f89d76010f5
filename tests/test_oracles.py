"""Remembered results of the oracle are those of the same call, bit for bit, and of no other."""

import torch

import tilewise as tw
from bench.testing import call, qkv
from tests.oracles import remember
from tilewise.accuracy import Expected


def test_the_same_call_has_the_same_results_and_another_has_its_own():
    remember()
    expected = lambda c: Expected.of(c.p, c.t, c.do, c.dlse)  # noqa: E731
    q, k, v = qkv(batch=1, nq=5, nk=7)
    first = expected(call(q, k, v, causal=True))
    assert expected(call(q.clone(), k, v, causal=True)) is first
    assert torch.equal(first.oracle["o"], tw.reference.attention(*(x.double() for x in (q, k, v)), causal=True)[0])
    other = q.clone()
    other[0, 0, 0, 0] = torch.nextafter(other[0, 0, 0, 0], torch.tensor(9.0))
    c = call(q, k, v, causal=True)
    others = [
        call(other, k, v, causal=True),
        call(q, k, v),
        call(q, k, v, causal=True, softmax_scale=0.5),
        call(q, k, v, causal=True, sink=torch.zeros(q.shape[2])),
        call(q.double(), k.double(), v.double(), causal=True),
        call(q, k, v, torch.ones_like(c.do), causal=True),
    ]
    found = [first, Expected.of(c.p, c.t), *map(expected, others)]
    assert len({id(x) for x in found}) == len(found)
