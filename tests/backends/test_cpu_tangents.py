"""Forward mode by the native library, on every instruction set of this machine, judged by the error rule."""

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, qkv
from tests.backends.tangents import CASES, found, worse_than_eager, worse_than_plain_tiles
from tests.backends.test_cpu import need_isa
from tilewise.backends.cpu import Cpu, library

LOADED = library.load()
SETS = () if isinstance(LOADED, str) else LOADED.isas
pytestmark = pytest.mark.skipif(isinstance(LOADED, str), reason="no native library")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("isa", SETS)
def test_tangents_are_as_good_as_those_of_plain_tiles_in_fp32(name, isa):
    need_isa(isa)
    assert not worse_than_plain_tiles(Cpu(isa=isa), name)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", SETS)
def test_half_precision_is_as_good_as_eagers(isa, half):
    need_isa(isa)
    assert not worse_than_eager(Cpu(isa=isa), half)


def test_a_tangent_that_is_zero_is_as_one_that_is_not_given():
    c = call(*qkv(batch=2, nq=300, nk=270, hq=4, hk=2, d=40, dv=24), causal=True)
    tangents = [normal(*x.shape, seed=20 + n) for n, x in enumerate((c.t.q, c.t.k, c.t.v))]
    for moving in range(3):
        one = [x if n == moving else None for n, x in enumerate(tangents)]
        zeros = [torch.zeros_like(x) if n != moving else x for n, x in enumerate(tangents)]
        got, expected = (found(Cpu(), c, x, (None, None)) for x in (one, zeros))
        torch.testing.assert_close(got, expected)


def test_second_derivatives_are_refused_by_name():
    q, k, v = qkv()
    q.requires_grad_()
    (dq,) = torch.autograd.grad(tw.attention(q, k, v, backend="cpu").square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match='backend="cpu" cannot run second derivatives of this attention'):
        dq.sum().backward()
