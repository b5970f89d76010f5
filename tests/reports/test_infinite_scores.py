"""Rows whose softmax is undefined: eager attention answers NaN, and so does every backend, in results and gradients."""

import pytest
import torch

import tilewise as tw
from bench.testing import qkv
from tilewise.backends.triton import interpreting

BACKENDS = [
    "reference",
    "portable",
    "cpu",
    pytest.param("triton", marks=pytest.mark.skipif(not interpreting(), reason="Triton's kernels are not interpreted")),
]
HIDDEN = torch.ones(5, 6, dtype=torch.bool)
HIDDEN[1] = False  # this row sees no key


def results(backend, tensors, **options):
    """o, lse and max_logit, each with a row for each query, and the gradients of q, k, v and the further tensors."""
    s = tw.attention_with_stats(*tensors[:3], backend=backend, **options)
    grads = torch.autograd.grad((s.o, s.lse), tensors, (torch.ones_like(s.o), torch.ones_like(s.lse)))
    return s.o[0], s.lse[0].mT, s.max_logit[0].mT, grads


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_infinity_leaves_no_number_in_rows_with_keys(backend):
    tensors = [x.requires_grad_() for x in (*qkv(1, 5, 6, 2, 1, 8, 8), torch.tensor([torch.inf, 0.5]))]
    o, lse, largest, (dq, dk, dv, dsink) = results(backend, tensors, mask=HIDDEN, sink=tensors[3])
    seen = [0, 2, 3, 4]
    for x in (o, lse.unsqueeze(-1), dq[0]):
        assert x[seen, 0].isnan().all()
        assert not x[:, 1].isnan().any()
    assert o[1].eq(0).all()  # a row without keys has its sink as lse
    assert torch.equal(lse[1], tensors[3])
    assert dk.isnan().all()
    assert dv.isnan().all()
    assert dsink.isnan().tolist() == [True, False]
    assert torch.equal(largest == -torch.inf, ~HIDDEN.any(1, keepdim=True).expand(5, 2))
    assert not largest.isnan().any()  # it comes before the sink


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=["inf", "nan"])
def test_a_score_of_infinity_or_nan_leaves_no_number_in_its_row(bad, backend):
    bias = torch.zeros(5, 6)
    bias[3, 2] = bad
    tensors = [x.requires_grad_() for x in (*qkv(1, 5, 6, 2, 1, 8, 8), bias)]
    o, lse, largest, (dq, dk, dv, dbias) = results(backend, tensors, score=tw.bias(bias))
    hit = torch.arange(5) == 3
    for x in (o, lse, largest, dq[0], dbias):
        assert torch.equal(x.isnan(), hit.view(-1, *[1] * (x.ndim - 1)).expand_as(x))
    assert dk.isnan().all()
    assert dv.isnan().all()
