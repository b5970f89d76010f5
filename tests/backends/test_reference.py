"""The reference as a backend, and against an independent formula."""

import pytest
import torch

import tilewise as tw
from tests.backends.contract import Contract, call, qkv
from tilewise import reference


class TestReference(Contract):
    backend = reference.Reference()


def test_the_reference_is_softmax_of_scaled_products_times_v():
    q, k, v = (x.double() for x in qkv(hq=2, hk=2))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    o = torch.einsum("bhij,bjhd->bihd", torch.softmax(s, -1), v)
    got, lse, p = reference.attention(q, k, v)
    torch.testing.assert_close(got, o)
    torch.testing.assert_close(lse, torch.logsumexp(s, -1))
    torch.testing.assert_close(p, torch.softmax(s, -1))


@pytest.mark.parametrize("sink", [False, True], ids=["no-sink", "sink"])
def test_the_closed_form_backward_is_autograd_of_the_forward(sink):
    q, k, v = (x.double().requires_grad_() for x in qkv(nq=20, nk=30))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if sink else None
    kept = torch.ones(20, 30).tril(10).bool()
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4
    s = (3 * torch.tanh(s / 3)).masked_fill(~kept, -torch.inf)
    logits = torch.cat([s, sinks.view(1, 4, 1, 1).expand(2, 4, 20, 1)], -1) if sink else s
    o = torch.einsum("bhij,bjhd->bihd", torch.softmax(logits, -1)[..., :30], v.repeat_interleave(2, 2))
    c = call(q, k, v, causal=True, score=tw.softcap(3.0), sink=sinks)
    c.do, c.dlse = c.do.double(), c.dlse.double()
    wanted = [q, k, v] + ([sinks] if sink else [])
    expected = torch.autograd.grad((o * c.do).sum() + (torch.logsumexp(logits, -1) * c.dlse).sum(), wanted)
    got = reference.backward(c.p, c.t, c.do, c.dlse, reference.Arithmetic(torch.float64))
    for x, y in zip((got.dq, got.dk, got.dv, got.sink), expected, strict=False):
        torch.testing.assert_close(x, y)


def test_the_backend_refuses_above_two_gibibytes_of_scores():
    q = torch.empty(1, 1, 1, 8).expand(1, 1 << 15, 1, 8)
    with pytest.raises(NotImplementedError, match=r"4\.0 GiB.*tilewise\.reference\.attention has no bound"):
        tw.attention(q, q, q, backend="reference")


@pytest.mark.parametrize("lengths", [(1, 1), (130, 7), (128, 256), (0, 5)], ids=str)
def test_the_matrix_units_scores_are_those_of_the_rows_alone(lengths, monkeypatch):
    """Whole tiles go through the units, which a CPU stands in for here; rows that fill them up leave nothing behind."""
    shapes = []

    def units(a, b, out_dtype):
        shapes.append((a.shape[1], b.shape[2]))
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(torch, "bmm", units)
    q, k = (torch.randn(2, 3, n, 16).bfloat16().float() for n in lengths)
    got = reference.Arithmetic(torch.float32, units=torch.bfloat16).product(q, k)
    torch.testing.assert_close(got, q @ k.mT)
    assert all(n % reference.UNIT_ROWS == 0 for shape in shapes for n in shape)
