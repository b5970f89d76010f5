"""What judges a backend's tangents: cases, and the tangents of plain tiles and of eager attention beside which they stand."""

import torch

import tilewise as tw
from bench.testing import Call, call, normal, poisoned, qkv
from tilewise import accuracy
from tilewise.backends.base import Backend, Directions, Inputs, OutputGrads
from tilewise.backends.portable import Portable
from tilewise.problem import check

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
    """A score that reads one tensor by rows, another by columns and scattered; halved, since the error of an exponent grows with it."""
    return lambda s, b, h, i, j: 0.5 * s * s * t[h] * torch.sigmoid(c[j]) + c[i - j + 30] * t[h]


def found(backend: Backend, c: Call, tangents: list, changes: tuple) -> dict[str, torch.Tensor]:
    """The tangents of a call's outputs and, where the backend has them, of its gradients, by name.

    They follow the backend's own forward, whose products have the same roundings, or that of ``portable`` where an interpreter would
    take long.
    """
    out = (Portable() if backend.name == "triton" else backend).forward(c.p, c.t)
    along = Directions.of(c.p, tangents)
    with poisoned():
        moved = backend.jvp(c.p, c.t, out, along)
        if backend.without_tangents(c.p, second=True):
            return accuracy.tensors(moved, None)
        grads = backend.backward_jvp(c.p, c.t, out, OutputGrads(c.do, c.dlse, *changes), along, moved)
    return accuracy.tensors(moved, grads)


def in_float64(c: Call) -> Call:
    """The same call in float64."""
    q, k, v, do, dlse = (x.double() for x in (c.t.q, c.t.k, c.t.v, c.do, c.dlse))
    p = check(q, k, v, c.t.leaves, c.t.seed, c.p.spec)
    return Call(p, Inputs.of(p, q, k, v, c.t.leaves, c.t.seed), do, dlse)


def worse_than_plain_tiles(backend: Backend, name: str) -> list[str]:
    """The tangents of a case in fp32 that err more than the rule allows beside those of plain tiles."""
    options = CASES[name]()
    q, k, v = qkv(batch=1, nq=40, nk=70, hq=4, hk=2, d=16, dv=16)
    q, k, v = (x[0, :40] if "cu_seqlens_q" in options else x for x in (q, k, v))
    c = call(q, k, v, **options)
    inputs = (c.t.q, c.t.k, c.t.v, *c.t.leaves)
    tangents = [normal(*x.shape, seed=20 + n) if x.is_floating_point() else None for n, x in enumerate(inputs)]
    changes = (normal(*c.do.shape, seed=30), normal(*c.dlse.shape, seed=31)) if c.p.packed else (None, None)
    got = found(backend, c, tangents, changes)
    exact = found(Portable(), in_float64(c), [t if t is None else t.double() for t in tangents], changes)
    plain = found(Portable(), c, tangents, changes)
    errors = [accuracy.judge(n, x, exact[n], [plain[n]]) for n, x in got.items()]
    return [str(e) for e in errors if not e.ok]


def worse_than_eager(backend: Backend, half: torch.dtype) -> list[str]:
    """The tangents in 16 bits that err more than the rule allows beside those of eager attention."""
    q, k, v = qkv(batch=1, nq=40, nk=40, hq=2, hk=2, d=16, dv=16, dtype=half)
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

    got, exact, rounded = found(backend, c, tangents, (None, None)), eager(torch.float64), eager(half)
    rounded["lse"] = eager(torch.float32)["lse"]
    errors = [accuracy.judge(n, x, exact[n], [rounded[n]]) for n, x in got.items()]
    return [str(e) for e in errors if not e.ok]
