"""Forward mode and the tangent of the backward by Triton's kernels, through its interpreter, judged by the error rule."""

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, qkv
from tests.backends.tangents import CASES, found, worse_than_eager, worse_than_plain_tiles
from tilewise.backends.portable import Portable
from tilewise.backends.triton import Triton, interpreting
from tilewise.backends.triton.host import tangent
from tilewise.backends.triton.tiles import Tiles

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")


@pytest.mark.parametrize("name", CASES)
def test_tangents_are_as_good_as_those_of_plain_tiles_in_fp32(name):
    assert not worse_than_plain_tiles(Triton(), name)


@pytest.mark.parametrize("name", ["causal-sink-dropout", "packed-product"])
def test_tiles_by_descriptor_change_nothing(name, monkeypatch):
    monkeypatch.setattr(tangent, "tangent_tiles", lambda problem, kernel: Tiles(32, 32, 4, 2, tma=True))
    assert not worse_than_plain_tiles(Triton(), name)


def test_a_tangent_that_is_zero_is_not_read():
    c = call(*qkv(batch=1, nq=40, nk=40, hq=2, hk=1, d=16, dv=16))
    tangents = [normal(*x.shape, seed=20 + n) for n, x in enumerate((c.t.q, c.t.k, c.t.v))]
    for moving in range(3):
        one = [x if n == moving else None for n, x in enumerate(tangents)]
        zeros = [torch.zeros_like(x) if n != moving else x for n, x in enumerate(tangents)]
        got, expected = (found(Triton(), c, x, (None, None)) for x in (one, zeros))
        for name, x in got.items():
            torch.testing.assert_close(x, expected[name], msg=name)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=["no-queries", "no-keys"])
def test_calls_without_a_pair_have_the_tangents_of_their_sinks(lengths):
    nq, nk = lengths
    options = {"mask": lambda b, h, i, j: j % 3 != 1, "score": tw.bias(normal(1, 4, nq, nk).requires_grad_())}
    c = call(*qkv(batch=1, nq=nq, nk=nk), sink=normal(4).requires_grad_(), **options)
    tangents = [normal(*x.shape, seed=20 + n) for n, x in enumerate((c.t.q, c.t.k, c.t.v, *c.t.leaves))]
    changes = normal(*c.do.shape, seed=7), normal(*c.dlse.shape, seed=8)
    _are_those_of_plain_tiles(c, tangents, changes)


def test_rows_of_no_sequence_have_no_tangent_of_a_sink():
    q, k, v = (x[0] for x in qkv(batch=1, nq=9, nk=0))
    lengths = {"cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_k": torch.zeros(3, dtype=torch.int64)}
    sink = torch.tensor([0.5, -torch.inf, -2.0, 0.0], requires_grad=True)
    c = call(q, k, v, sink=sink, **lengths)
    tangents = [normal(*x.shape, seed=20 + n).to(x.dtype) for n, x in enumerate((q, k, v, *c.t.leaves))]
    _are_those_of_plain_tiles(c, tangents, (normal(*c.do.shape, seed=7), normal(*c.dlse.shape, seed=8)))


def _are_those_of_plain_tiles(c, tangents, changes):
    got, expected = (found(backend, c, tangents, changes) for backend in (Triton(), Portable()))
    assert got.keys() == expected.keys()
    for name, x in got.items():
        torch.testing.assert_close(x, expected[name], msg=name)


def test_half_precision_is_as_good_as_eagers():
    assert not worse_than_eager(Triton(), torch.float16)


def test_a_broadcast_biass_second_derivative_is_refused_when_deterministic():
    c = call(*qkv(), score=tw.bias(normal(1, 4, 70, 70).requires_grad_()), deterministic=True)
    (reason,) = Triton().without_tangents(c.p, second=True)
    assert "added atomically" in reason
    assert not Triton().without_tangents(c.p, second=False)
    other = call(*qkv(), score=tw.bias(normal(1, 4, 70, 70).requires_grad_()))
    assert not Triton().without_tangents(other.p, second=True)
