"""Attention inside ``torch.func.functionalize``, which PyTorch refuses for every autograd.Function."""

import pytest
import torch
from torch.func import functionalize, grad, jvp, vmap

import tilewise as tw

G = torch.Generator().manual_seed(2)
QKV = tuple(torch.randn(2, 6, 2, 4, generator=G, dtype=torch.float64) for _ in range(3))
DO = torch.randn(2, 6, 2, 4, generator=G, dtype=torch.float64)
IDS, LATER = torch.arange(6) // 2, torch.arange(6) // 4
CALLS = {
    "causal": lambda q, k, v: tw.attention(q, k, v, causal=True),
    "documents": lambda q, k, v: tw.attention(q, k, v, mask=tw.documents(IDS)),
    "selected": lambda q, k, v: tw.attention(q, k, v, mask=tw.selected(IDS.view(1, 1, 6, 1))),
    "a bias and a sink": lambda q, k, v: tw.attention(q, k, v, score=tw.bias(q[0, :, :1, 0] * k[0, :, 0, 0]), sink=v[0, 0, :, 0]),
    "dropout": lambda q, k, v: tw.attention(q, k, v, dropout_p=0.3, dropout_seed=1),
    "a write before": lambda q, k, v: tw.attention(q.clone().mul_(2), k, v),
}  # fmt: skip


def loss(call):
    return lambda *qkv: (call(*qkv) * DO).sum()


def of_each(call):
    return vmap(lambda *qkv: call(*[x[None] for x in qkv])[0])


def along(call):
    return lambda *qkv: jvp(lambda q: call(q, *qkv[1:]), qkv[:1], qkv[1:2])


ORDERS = {
    "alone": (functionalize, lambda call: call),
    "without views": (lambda call: functionalize(call, remove="mutations_and_views"), lambda call: call),
    "around grad": (lambda call: functionalize(grad(loss(call), (0, 1, 2))), lambda call: grad(loss(call), (0, 1, 2))),
    "inside grad": (lambda call: grad(loss(functionalize(call)), (0, 1, 2)), lambda call: grad(loss(call), (0, 1, 2))),
    "inside jvp": (lambda call: along(functionalize(call)), along),
    "around vmap": (lambda call: functionalize(of_each(call)), of_each),
    "inside vmap": (lambda call: of_each(functionalize(call)), of_each),
    "around grad of grad": (
        lambda call: functionalize(grad(lambda *x: grad(loss(call))(*x).square().sum())),
        lambda call: grad(lambda *x: grad(loss(call))(*x).square().sum()),
    ),
}


@pytest.mark.filterwarnings("ignore:torch.vmap calls this attention once")
@pytest.mark.parametrize(("inside", "outside"), ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_transform_has_the_results_that_it_has_without_functionalize(call, inside, outside):
    torch.testing.assert_close(inside(call)(*QKV), outside(call)(*QKV))


def test_the_gradients_of_autograd_pass_through():
    wanting = [x.clone().requires_grad_() for x in QKV]
    expected = grad(loss(CALLS["causal"]), (0, 1, 2))(*QKV)
    torch.testing.assert_close(torch.autograd.grad(functionalize(CALLS["causal"])(*wanting), wanting, DO), expected)


def test_a_mask_sees_what_is_written_inside():
    def attend(q, ids, later):
        mask = tw.documents(ids)
        first = tw.attention(q, q, q, mask=mask)
        ids.copy_(later)
        return first, tw.attention(q, q, q, mask=mask)

    q = QKV[0]
    for got, ids in zip(functionalize(attend)(q, IDS.clone(), LATER), (IDS, LATER), strict=True):
        torch.testing.assert_close(got, tw.attention(q, q, q, mask=tw.documents(ids)))


def test_a_mask_whose_writes_are_not_seen_is_not_prepared():
    def attend(q, ids):
        return tw.attention(q, q, q, mask=tw.documents(ids).prepare(q, q))

    with pytest.raises(ValueError, match=r"or torch.func, whose writes PyTorch does not count"):
        functionalize(attend)(QKV[0], IDS)


def test_functions_of_others_stay_refused():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.mul_(2)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    with pytest.raises(RuntimeError, match="Functionalize rule"):
        functionalize(Doubled.apply)(QKV[0].clone())
