"""Products with a Hessian by each of PyTorch's ways, beside those of plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import jacfwd, jacrev

import tilewise as tw
from bench.testing import normal

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # NumPy's in the interpreter, of infinities that are selected away


def inputs(dtype: torch.dtype = F64) -> tuple[Tensor, ...]:
    """q, k, v, a sink and a bias of each pair."""
    shapes = (1, 2, 2, 4), (1, 3, 1, 4), (1, 3, 1, 3), (2,), (1, 2, 2, 3)
    return tuple(normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes, 1))


def plain(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, bias: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5 + bias
    lse = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1).logsumexp(-1)
    o = torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse.unsqueeze(-1)), v)
    return (o**3).sum() + (lse**2).sum()


def ours(backend: str | None):
    def loss(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, bias: Tensor) -> Tensor:
        o, lse = tw.attention_with_lse(q, k, v, sink=sink, score=tw.bias(bias), backend=backend)
        return (o**3).sum() + (lse**2).sum()

    return loss


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("product", ["hvp", "vhp"])
def test_a_hessian_times_a_vector(product, backend):
    """hvp differentiates a gradient's gradient with respect to its cotangent: "a third derivative is not built"."""
    by = getattr(torch.autograd.functional, product)
    along = tuple(normal(*x.shape, dtype=F64, seed=9) for x in inputs())
    expected = by(plain, inputs(), along)[1]
    dtype = F64 if backend is None else torch.float32
    found = by(ours(backend), inputs(dtype), tuple(x.to(dtype) for x in along))[1]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-9 if dtype == F64 else 1e-4, rtol=1e-4)


def test_forward_mode_twice_says_what_to_write():
    q, *others = inputs()
    f = lambda q: ours(None)(q, *others)  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"jacfwd\(jacrev\(f\)\) is jacfwd\(jacfwd\(f\)\)"):
        jacfwd(jacfwd(f))(q)
    torch.testing.assert_close(jacfwd(jacrev(f))(q), jacrev(jacrev(lambda q: plain(q, *others)))(q))
