"""Derivatives that are mapped over examples: where examples share a tensor, it comes with a stride of 0 along the batch, and where they
do not, in any other layout. Each backend's are those of plain torch in float64, one example after the other."""

from __future__ import annotations

import itertools
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, jvp, vjp, vmap

import tilewise as tw
from bench.testing import normal

EXAMPLES = 3
BACKENDS = ("portable", "cpu", "triton")
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # NumPy's in the interpreter, of infinities that are selected away


def tensors(*lead: int) -> tuple[Tensor, ...]:
    """q, k, v, and a bias of each pair."""
    shapes = (1, 2, 2, 4), (1, 3, 1, 4), (1, 3, 1, 3), (1, 2, 2, 3)
    return tuple(normal(*lead, *shape, seed=n) for n, shape in enumerate(shapes, 1))


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """o and lse, in float64."""
    q, k, v = q.double(), k.double().repeat_interleave(2, 2), v.double().repeat_interleave(2, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    s = s if bias is None else s + bias.double()
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v), s.logsumexp(-1)


def ours(backend: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    score = None if bias is None else tw.bias(bias)
    return tw.attention_with_lse(q, k, v, score=score, backend=backend)


def assert_right(found, expected) -> None:
    if isinstance(found, Tensor):
        found, expected = (found,), (expected,)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)


@lru_cache
def output_gradients() -> tuple[Tensor, Tensor]:
    """dO and dlse of each example."""
    return normal(EXAMPLES, 1, 2, 2, 3, seed=7), normal(EXAMPLES, 1, 2, 2, seed=8)


def one_by_one(f, *mapped: Tensor) -> tuple[Tensor, ...]:
    """``vmap(f)`` by definition."""
    return tuple(map(torch.stack, zip(*[f(*each) for each in zip(*mapped, strict=True)], strict=True)))


@lru_cache
def expected_gradients() -> tuple[Tensor, ...]:
    """The gradients of q, k, v and the bias, of each example."""
    _, pull = vjp(plain, *(x.double() for x in tensors()))
    return one_by_one(lambda *grads: pull(tuple(x.double() for x in grads)), *output_gradients())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["is_grads_batched", "vmap of autograd.grad", "vmap of vjp"])
def test_the_gradient_of_the_output_alone_is_mapped(backend, how):
    """jacrev of one batch element: 49 off, or NaN, from memory behind o and lse."""
    grads, inputs = output_gradients(), tensors()
    if how == "vmap of vjp":
        found = vmap(lambda *grads: vjp(partial(ours, backend), *inputs)[1](grads))(*grads)
    else:
        inputs = [x.requires_grad_() for x in inputs]
        outputs = ours(backend, *inputs)
        if how == "is_grads_batched":
            found = torch.autograd.grad(outputs, inputs, grads, is_grads_batched=True)
        else:
            found = vmap(lambda *grads: torch.autograd.grad(outputs, inputs, grads, retain_graph=True))(*grads)
    assert_right(found, expected_gradients())


class NoMap:
    """The state of a thread that knows of no map, from one hook of the backward to another."""

    up, down = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting

    def begin(self, *_) -> None:
        self.level = self.up() - 1
        for _ in range(self.level + 1):
            self.down()

    def end(self, *_) -> None:
        for _ in range(self.level):
            self.up()
        self.level = 0


def test_a_backward_in_a_thread_that_knows_of_no_map():
    """A GPU's backward under is_grads_batched: "Batching rule not implemented for aten::flatten.using_ints"."""
    inputs = [x.requires_grad_() for x in tensors()]
    outputs, thread = ours("portable", *[x * 1 for x in inputs]), NoMap()
    outputs[0].register_hook(thread.begin)
    outputs[0].grad_fn.register_hook(thread.end)
    try:
        found = torch.autograd.grad(outputs, inputs, output_gradients(), is_grads_batched=True)
    except RuntimeError:  # else all later tests would be mapped
        thread.end()
        thread.up(), thread.down()
        raise
    assert_right(found, expected_gradients())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("argument", range(4), ids=["q", "k", "v", "bias"])
def test_jacobians_by_reverse_and_by_forward_mode(backend, argument):
    inputs = tensors()
    f = lambda x: ours(backend, *inputs[:argument], x, *inputs[argument + 1 :])[0]  # noqa: E731
    expected = jacrev(lambda x: plain(*inputs[:argument], x, *inputs[argument + 1 :])[0])(inputs[argument].double())
    assert_right(jacrev(f)(inputs[argument]), expected)
    assert_right(jacfwd(f)(inputs[argument]), expected)


@pytest.mark.parametrize("backend", ["portable", "triton"])
def test_a_hessian(backend):
    q, k, v, _ = tensors()
    weights = normal(1, 2, 2, 3, seed=9)

    def loss(attention, q):
        return (attention(q, k, v)[0] * weights).sum()

    expected = hessian(partial(loss, plain))(q.double())
    assert_right(hessian(partial(loss, partial(ours, backend)))(q), expected)


SUBSETS = [x for x in itertools.product((None, 0, 2, -1), repeat=4) if x.count(None) < 4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_of_q_k_v_and_a_bias_are_mapped_along_any_axis(backend):
    """Outputs and tangents, and the gradients for a dO that all examples share."""
    for dims in SUBSETS[:: 64 if backend == "triton" else 8]:
        each, shared = tensors(EXAMPLES), tensors()
        inputs = [own if dim is not None else one for own, one, dim in zip(each, shared, dims, strict=True)]
        given = [x if dim is None else x.movedim(0, dim) for x, dim in zip(inputs, dims, strict=True)]
        looped = [
            x.double() if d is not None else x.double().expand(EXAMPLES, *x.shape)
            for x, d in zip(inputs, dims, strict=True)
        ]
        do, dlse = (x[0] for x in output_gradients())

        def both(f, *inputs, do=do, dlse=dlse):
            grads = do.to(f(*inputs)[0].dtype), dlse.to(f(*inputs)[1].dtype)
            outputs, pull = vjp(f, *inputs)
            moved = jvp(f, inputs, tuple(torch.ones_like(x[..., :1]).expand_as(x) for x in inputs))[1]
            return *outputs, *pull(grads), *moved

        found = vmap(partial(both, partial(ours, backend)), in_dims=tuple(dims))(*given)
        assert_right(found, one_by_one(partial(both, plain), *looped))


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_example_has_its_own_sink(backend):
    """ "A sink is one logit for each head, the same for all examples": outputs, tangents, gradients and second derivatives."""
    q, k, v, _ = tensors()
    sinks, do = normal(EXAMPLES, 2, seed=5), normal(1, 2, 2, 3, seed=6)

    def derived(sink, q=q):
        name = "portable" if q.dtype == torch.float64 else backend

        def f(q, sink):
            return tw.attention(q, k.to(q), v.to(q), sink=sink, backend=name)

        o, pull = vjp(f, q, sink)
        moved = jvp(f, (q, sink), (q, sink))[1]
        if backend == "cpu":
            return o, *pull(do.to(q)), moved
        second = jvp(lambda q, s: vjp(f, q, s)[1](do.to(q)), (q, sink), (q, sink))[1]
        return o, *pull(do.to(q)), moved, *second

    expected = one_by_one(partial(derived, q=q.double()), sinks.double())
    assert_right(vmap(derived)(sinks), expected)
