"""Forward mode and the tangent of the backward by Triton's kernels, through its interpreter, judged by the error rule."""

import pytest
import torch

import tilewise as tw
from tilewise import accuracy
from tilewise.backends.base import Directions, Inputs, OutputGrads
from tilewise.backends.portable import Portable
from tilewise.backends.triton import Triton, interpreting
from tilewise.backends.triton.host import tangent
from tilewise.backends.triton.tiles import Tiles
from tilewise.problem import check
from tilewise.testing import Call, call, normal, poisoned, qkv

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")

CU = torch.tensor([0, 17, 17, 40])
# Each option that a kernel of tangents reads in at least one case; 40 queries and 70 keys are tiles of every kind.
CASES = {
    "causal-sink-dropout": lambda: {"causal": True, "sink": normal(4), "dropout_p": 0.3, "dropout_seed": 3},
    "softcap-bias-keep": lambda: {
        "score": tw.softcap(3.0) >> tw.bias(normal(2, 1, 40, 70).requires_grad_()[:1]),
        "mask": lambda b, h, i, j: (i + j) % 3 != 0,
    },
    "packed-product": lambda: {
        "score": _product(normal(4).requires_grad_(), normal(60, seed=8).requires_grad_()),
        "causal": True,
        "cu_seqlens_q": CU,
        "cu_seqlens_k": CU,
    },
}


def _product(t: torch.Tensor, c: torch.Tensor):
    """A score that reads one tensor by rows, another by columns and scattered."""
    return lambda s, b, h, i, j: s * s * t[h] * torch.sigmoid(c[j]) + c[i - j + 30] * t[h]


def found(backend, c: Call, tangents: list, changes: tuple) -> dict[str, torch.Tensor]:
    """The tangents of a call's outputs and gradients, by name, after the forward of ``portable``."""
    out = Portable().forward(c.p, c.t)
    along = Directions.of(c.p, tangents)
    with poisoned():
        moved = backend.jvp(c.p, c.t, out, along)
        grads = backend.backward_jvp(c.p, c.t, out, OutputGrads(c.do, c.dlse, *changes), along, moved)
    return accuracy.tensors(moved, grads)


def in_float64(c: Call) -> Call:
    """The same call in float64."""
    q, k, v, do, dlse = (x.double() for x in (c.t.q, c.t.k, c.t.v, c.do, c.dlse))
    p = check(q, k, v, c.t.leaves, c.t.seed, c.p.spec)
    return Call(p, Inputs.of(p, q, k, v, c.t.leaves, c.t.seed), do, dlse)


@pytest.mark.parametrize("name", CASES)
def test_tangents_are_as_good_as_those_of_plain_tiles_in_fp32(name):
    as_good_as_plain_tiles(name)


@pytest.mark.parametrize("name", ["causal-sink-dropout", "packed-product"])
def test_tiles_by_descriptor_change_nothing(name, monkeypatch):
    monkeypatch.setattr(tangent, "tangent_tiles", lambda problem, kernel: Tiles(32, 32, 4, 2, tma=True))
    as_good_as_plain_tiles(name)


def as_good_as_plain_tiles(name):
    options = CASES[name]()
    q, k, v = qkv(batch=1, nq=40, nk=70, hq=4, hk=2, d=16, dv=16)
    q, k, v = (x[0, :40] if "cu_seqlens_q" in options else x for x in (q, k, v))
    c = call(q, k, v, **options)
    inputs = (c.t.q, c.t.k, c.t.v, *c.t.leaves)
    tangents = [normal(*x.shape, seed=20 + n) if x.is_floating_point() else None for n, x in enumerate(inputs)]
    changes = (normal(*c.do.shape, seed=30), normal(*c.dlse.shape, seed=31)) if c.p.packed else (None, None)
    got = found(Triton(), c, tangents, changes)
    exact, plain = (
        found(Portable(), x, [t if t is None else t.to(x.p.dtype) for t in tangents], changes)
        for x in (in_float64(c), c)
    )
    errors = [accuracy.judge(n, x, exact[n], [plain[n]]) for n, x in got.items()]
    assert not [str(e) for e in errors if not e.ok]


def test_a_tangent_that_is_zero_is_not_read():
    c = call(*qkv(batch=1, nq=40, nk=40, hq=2, hk=1, d=16, dv=16))
    tangents = [normal(*x.shape, seed=20 + n) for n, x in enumerate((c.t.q, c.t.k, c.t.v))]
    for moving in range(3):
        one = [x if n == moving else None for n, x in enumerate(tangents)]
        zeros = [torch.zeros_like(x) if n != moving else x for n, x in enumerate(tangents)]
        got, expected = (found(Triton(), c, x, (None, None)) for x in (one, zeros))
        for name, x in got.items():
            torch.testing.assert_close(x, expected[name], msg=name)


def test_half_precision_is_as_good_as_eagers():
    q, k, v = qkv(batch=1, nq=40, nk=40, hq=2, hk=2, d=16, dv=16, dtype=torch.float16)
    c = call(q, k, v).with_constant_scores()
    tangents = [normal(*x.shape, dtype=x.dtype, seed=20 + n) for n, x in enumerate((q, k, v))]

    def eager(dtype):
        def gradient(q, k, v):
            def loss(q, k, v):
                s = torch.einsum("bihd,bjhd->bhij", q, k) / 4
                o, lse = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1)
                return (o * c.do.to(dtype)).sum() + (lse * c.dlse.to(dtype)).sum(), (o, lse)

            return torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

        grads, (o, lse) = torch.func.jvp(
            gradient, tuple(x.to(dtype) for x in (q, k, v)), tuple(x.to(dtype) for x in tangents)
        )[1]
        return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True))

    got, exact, rounded = found(Triton(), c, tangents, (None, None)), eager(torch.float64), eager(torch.float16)
    rounded["lse"] = eager(torch.float32)["lse"]
    errors = [accuracy.judge(n, x, exact[n], [rounded[n]]) for n, x in got.items()]
    assert not [str(e) for e in errors if not e.ok]


def test_a_broadcast_biass_second_derivative_is_refused_when_deterministic():
    c = call(*qkv(), score=tw.bias(normal(1, 4, 70, 70).requires_grad_()), deterministic=True)
    (reason,) = Triton().without_tangents(c.p)
    assert "added atomically" in reason
    assert not Triton().without_tangents(call(*qkv(), score=tw.bias(normal(1, 4, 70, 70).requires_grad_())).p)
