"""torch.vmap over an attention, and batched gradients: the mapped dimension becomes a part of the batch, or the call runs once for each."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import tilewise as tw
from bench.testing import normal

F64 = torch.float64
EXAMPLES = 3
LENGTHS = torch.tensor([4, 9])


def drawn(batch: int = 2) -> tuple[torch.Tensor, ...]:
    """q, k, v of each example, and a bias for each."""
    shapes = (batch, 9, 4, 4), (batch, 9, 2, 4), (batch, 9, 2, 3)
    q, k, v = (normal(EXAMPLES, *shape, dtype=F64, seed=n) for n, shape in enumerate(shapes, 1))
    return q, k, v, normal(EXAMPLES, 4, 9, 9, dtype=F64, seed=5)


def looped(f, *tensors):
    """``vmap(f)`` by definition: one example after the other."""
    return torch.stack([f(*[x[n] for x in tensors]) for n in range(EXAMPLES)])


def plain(q, k, v, bias):
    return tw.attention(q, k, v, causal=True)


def biased(q, k, v, bias):
    return tw.attention(q, k, v, score=tw.bias(bias) >> tw.softcap(3.0), mask=tw.key_lengths(LENGTHS))


def by_element(q, k, v, bias):
    """A mask that asks for the batch index of the example itself."""
    return tw.attention(q, k, v, mask=lambda b, h, i, j: (i + j + b) % 2 == 0, backend="portable")


def padded(q, k, v, bias):
    """A mask of another tensor for each example, broadcast over its batch."""
    return tw.attention(q, k, v, mask=(bias[:1] > -0.5).unsqueeze(0))


def largest(q, k, v, bias):
    return tw.attention_with_stats(q, k, v, score=tw.bias(bias), per="head").max_logit


@pytest.mark.parametrize("f", [plain, biased, by_element, padded, largest], ids=lambda f: f.__name__)
def test_vmap_is_the_loop_over_its_examples(f):
    tensors = drawn()
    torch.testing.assert_close(vmap(f)(*tensors), looped(f, *tensors))


def test_the_mapped_dimension_may_be_anywhere_or_missing_and_maps_may_be_nested():
    q, k, v, bias = drawn(batch=1)
    moved = vmap(plain, (1, 2, None, None), 1)(q.movedim(0, 1), k.movedim(0, 2), v[0], None)
    torch.testing.assert_close(moved.movedim(1, 0), looped(lambda q, k: plain(q, k, v[0], None), q, k))
    both = [torch.stack([x, x + 1]) for x in (q, k, v, bias)]
    nested = torch.stack([looped(biased_alone, *[x[n] for x in both]) for n in (0, 1)])
    torch.testing.assert_close(vmap(vmap(biased_alone))(*both), nested)


def biased_alone(q, k, v, bias):
    return tw.attention(q, k, v, score=tw.bias(bias), causal=True)


def loss(q, k, v, bias, sink):
    o, lse = tw.attention_with_lse(q, k, v, score=tw.bias(bias), sink=sink, causal=True)
    return o.square().sum() + lse.sum()


@pytest.mark.parametrize("argument", range(5), ids=["q", "k", "v", "bias", "sink"])
def test_the_gradient_of_each_example(argument):
    """Of tensors of its own, and of tensors that all examples share."""
    q, k, v, bias = drawn()
    shared = k[0], v[0], bias[0], normal(4, dtype=F64, seed=8)
    each = vmap(grad(loss, argument), (0, None, None, None, None))(q, *shared)
    torch.testing.assert_close(each, looped(lambda q: grad(loss, argument)(q, *shared), q))
    if argument < 4:
        own = lambda *x: grad(loss, argument)(*x, shared[3])  # noqa: E731
        torch.testing.assert_close(vmap(own)(q, k, v, bias), looped(own, q, k, v, bias))


@pytest.mark.parametrize("how", ["backward", "torch.func"])
def test_a_gradient_through_the_map(how):
    q, k, v, bias = drawn()
    rest = [x.requires_grad_() if how == "backward" else x for x in (k, v, bias)]

    def total(mapped):
        return lambda q: mapped(q, *rest).square().sum()

    if how == "torch.func":
        found, expected = (grad(total(mapped))(q) for mapped in (vmap(biased), lambda *x: looped(biased, *x)))
    else:
        q.requires_grad_()
        found, expected = (
            torch.autograd.grad(total(mapped)(q), (q, *rest))
            for mapped in (vmap(biased), lambda *x: looped(biased, *x))
        )
    torch.testing.assert_close(found, expected)


def test_jacobians_by_every_way():
    q, k, v, bias = (x[0] for x in drawn())
    for f, x in (
        (lambda x: biased(x, k, v, bias).sum((0, 1)), q),
        (lambda x: biased(q, k, v, x).sum((0, 1)), bias),
    ):
        expected = torch.autograd.functional.jacobian(f, x)
        torch.testing.assert_close(torch.autograd.functional.jacobian(f, x, vectorize=True), expected)
        forward = torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode")
        torch.testing.assert_close(forward, expected)
        torch.testing.assert_close(jacrev(f)(x), expected)
        torch.testing.assert_close(jacfwd(f)(x), expected)


def test_batched_gradients_are_those_of_each():
    q, k, v, bias = (x[0].requires_grad_() for x in drawn())
    o, do = biased(q, k, v, bias), normal(EXAMPLES, 2, 9, 4, 3, dtype=F64, seed=9)
    found = torch.autograd.grad(o, (q, k, v, bias), do, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(o, (q, k, v, bias), x, retain_graph=True) for x in do]
    expected = tuple(torch.stack(x) for x in zip(*each, strict=True))
    torch.testing.assert_close(found, expected)
    mapped = vmap(lambda do: torch.autograd.grad(o, (q, k, v, bias), do, retain_graph=True))(do)
    torch.testing.assert_close(mapped, expected)


def test_a_hessian_is_that_of_pytorch():
    q, k, v, _ = (x[0, :1, :3] for x in drawn())
    f = lambda q: tw.attention(q, k, v, causal=True, backend="portable").square().sum()  # noqa: E731
    torch.testing.assert_close(hessian(f)(q), torch.autograd.functional.hessian(f, q))


PACKED = torch.tensor([0, 4, 9])
ONE_BY_ONE = {
    "dropout": lambda x, s: tw.attention(x, x, x, sink=s, dropout_p=0.5, dropout_seed=3),
    "packed sequences": lambda x, s: tw.attention_varlen(x[0], x[0], x[0], PACKED, sink=s),
    "a prepared mask": lambda x, s: tw.attention(x, x, x, sink=s, mask=_prepared(x)),
}


def _prepared(x: torch.Tensor) -> tw.Mask:
    like = torch.empty(x.shape, dtype=x.dtype)
    return tw.keep(lambda b, h, i, j: i != j).prepare(like, like)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["portable", "cpu"])
def test_a_mask_that_examples_share_beside_a_score_that_they_do_not(backend, dtype):
    """Both name an element of an example, and a mask's tiles are listed where no score has been computed."""
    q, k, v = (normal(2, 40, 2, 8, seed=n, dtype=dtype) for n in range(3))
    slopes, indices = normal(3, 2, 2, seed=3, dtype=dtype), torch.arange(2 * 20 * 3).view(2, 1, 20, 3) * 7 % 40
    kept = normal(2, 1, 40, 40, seed=4) > 0

    for mask in (tw.selected(indices, block_q=2), tw.dense(kept)):

        def attend(q, slopes, mask=mask):
            return tw.attention(q, k, v, mask=mask, score=tw.alibi(slopes), backend=backend)

        def gradient(q, slopes, attend=attend):
            return grad(lambda q: attend(q, slopes).square().sum())(q)

        for f in (attend, gradient):
            found = vmap(f, in_dims=(None, 0))(q, slopes)
            for n in range(3):
                torch.testing.assert_close(found[n], f(q, slopes[n]))


@pytest.mark.filterwarnings("ignore:torch.vmap calls")
@pytest.mark.parametrize("says", ONE_BY_ONE)
def test_what_does_not_fold_runs_once_for_each_example_and_says_so(says):
    x, sinks = normal(EXAMPLES, 2, 9, 4, 4, dtype=F64), normal(EXAMPLES, 4, dtype=F64)
    f = ONE_BY_ONE[says]
    with pytest.warns(UserWarning, match=f"once for each example: {says}"):
        found = vmap(f)(x, sinks)
    torch.testing.assert_close(found, looped(f, x, sinks))
    gradient = grad(lambda x, s: f(x, s).square().sum(), (0, 1))
    for n, found in enumerate(vmap(gradient)(x, sinks)):
        torch.testing.assert_close(found, looped(lambda x, s, n=n: gradient(x, s)[n], x, sinks))
    one = lambda x: f(x, sinks[0])  # noqa: E731
    torch.testing.assert_close(jacfwd(one)(x[0]), jacrev(one)(x[0]))


@pytest.mark.filterwarnings("ignore:torch.vmap calls")
@pytest.mark.parametrize("says", ONE_BY_ONE)
def test_no_examples_have_results_without_elements(says):
    x, sinks, f = normal(0, 2, 9, 4, 4), normal(4, 0), ONE_BY_ONE[says]
    of_one = f(normal(2, 9, 4, 4), normal(4))
    assert vmap(f, in_dims=(0, 1))(x, sinks).shape == (0, *of_one.shape)
    gradient = grad(lambda x, s: f(x, s).square().sum(), (0, 1))
    assert [tuple(g.shape) for g in vmap(gradient, in_dims=(0, 1))(x, sinks)] == [(0, 2, 9, 4, 4), (0, 4)]


@pytest.mark.parametrize("transform", [vmap, grad], ids=lambda x: x.__name__)
def test_a_cache_inside_a_transform_is_refused_with_what_to_do(transform):
    x, k = normal(EXAMPLES, 2, 3, 4, 4), normal(2, 9, 2, 4)
    cache = tw.dense_cache(k, k, torch.tensor([9, 5], dtype=torch.int32))
    f = lambda q: tw.attention_paged(q, cache, causal=True)  # noqa: E731
    with pytest.raises((NotImplementedError, ValueError), match="a cache has no gradient"):
        transform(f)(x if transform is vmap else x[0])
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match="outside, with the examples as sequences of the cache"),
    ):
        vmap(f)(x)


@pytest.mark.filterwarnings("ignore:torch.vmap calls")
def test_dropout_that_is_drawn_follows_the_randomness_of_the_map():
    x = normal(2, 9, 4, 4, dtype=F64).expand(EXAMPLES, -1, -1, -1, -1)
    f = lambda x: tw.attention(x, x, x, dropout_p=0.5)  # noqa: E731
    same, different = (vmap(f, randomness=how)(x) for how in ("same", "different"))
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(f)(x)


@pytest.mark.filterwarnings("ignore:torch.vmap calls")
def test_each_example_may_have_a_seed_of_its_own():
    x, seeds = normal(EXAMPLES, 2, 9, 4, 4, dtype=F64), torch.tensor([[3], [4], [5]])
    f = lambda x, seed: tw.attention(x, x, x, dropout_p=0.5, dropout_seed=seed)  # noqa: E731
    torch.testing.assert_close(vmap(f)(x, seeds), looped(f, x, seeds))


def test_a_wrong_call_inside_the_map_is_a_wrong_call():
    with pytest.raises(ValueError, match="heads of q"):
        vmap(lambda q: tw.attention(q, q[:, :, :3], q[:, :, :3]))(normal(EXAMPLES, 2, 9, 4, 4))
