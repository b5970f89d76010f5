"""Calls without gradients that come again: whatever has changed since is honoured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.testing import normal
from tilewise import dispatch, repeated

Qkv = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _nothing_known():
    dispatch.of_calls.clear()


def drawn(keys: int = 70, **options: object) -> Qkv:
    return tuple(normal(2, n, h, 32, **options, seed=n + h) for n, h in ((5, 4), (keys, 2), (keys, 2)))


OPTIONS: dict[str, Callable[[], dict]] = {
    "nothing": dict,
    "causal": lambda: {"causal": True},
    "window": lambda: {"mask": tw.window(9, 2)},
    "causal-and-window": lambda: {"mask": tw.window(9, 2), "causal": True},
    "scale": lambda: {"softmax_scale": 0.3},
    "softcap": lambda: {"score": tw.softcap(2.0)},
    "deterministic": lambda: {"deterministic": True},
    "portable": lambda: {"backend": "portable"},
    "lengths": lambda: {"mask": tw.key_lengths(torch.tensor([3, 60]))},
    "tensor": lambda: {"mask": normal(5, 70) > -1},
    "tensor-and-causal": lambda: {"mask": normal(5, 70) > -1, "causal": True},
    "bias": lambda: {"score": tw.bias(normal(5, 70))},
    "sink": lambda: {"sink": normal(4)},
}


def test_each_option_is_honoured_whatever_came_before():
    q, k, v = drawn()
    expected = {name: tw.attention_with_lse(*drawn(), **options(), backend="reference") for name, options in OPTIONS.items()
                if name != "portable"}  # fmt: skip
    expected["portable"] = expected["nothing"]
    for _ in range(3):
        for name, options in OPTIONS.items():
            o, lse = tw.attention_with_lse(q, k, v, **options())
            torch.testing.assert_close(tw.attention(q, k, v, **options()), o, rtol=0, atol=0)
            torch.testing.assert_close((o, lse), expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_sizes_strides_and_dtypes_are_told_apart():
    for _ in range(2):
        for keys in (70, 71):
            for dtype in (torch.float32, torch.float64):
                q, k, v = drawn(keys, dtype=dtype)
                expected = tw.attention(q, k, v, backend="reference")
                turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
                for given in ((q, k, v), (q, *turned)):
                    torch.testing.assert_close(tw.attention(*given), expected)


def test_keys_of_a_batch_of_one_serve_every_query():
    q, k, v = drawn()
    for _ in range(2):
        found = tw.attention(q, k[:1], v[:1])
        torch.testing.assert_close(found, tw.attention(q, k[:1].expand_as(k), v[:1].expand_as(v)))


def test_a_gradient_that_is_wanted_later_is_there():
    q, k, v = drawn()
    for _ in range(2):
        tw.attention(q, k, v)
    wanted = q.clone().requires_grad_()
    o = tw.attention(wanted, k, v)
    o.sum().backward()
    assert wanted.grad is not None
    with torch.no_grad():
        assert not tw.attention(wanted, k, v).requires_grad
    with torch.inference_mode():
        assert tw.attention(wanted, k, v).is_inference()


def test_what_asks_for_the_operator_gets_it():
    q, k, v = drawn()
    for _ in range(2):
        o = tw.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.attention(q, k, v).dtype == torch.bfloat16
    mapped = torch.vmap(lambda x: tw.attention(x[None], k[:1], v[:1])[0])(q)
    torch.testing.assert_close(mapped, tw.attention(q, k[:1], v[:1]))
    _, tangent = torch.func.jvp(lambda x: tw.attention(x, k, v), (q,), (torch.ones_like(q),))
    assert tangent.abs().max() > 0
    with torch.profiler.profile() as seen:
        tw.attention(q, k, v)
    assert any("tilewise" in event.key for event in seen.key_averages())
    torch.testing.assert_close(tw.attention(q, k, v), o)


def test_deterministic_algorithms_are_another_call():
    q, k, v = drawn()
    tw.attention(q, k, v)
    count = len(dispatch.of_calls)
    torch.use_deterministic_algorithms(True)
    try:
        tw.attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(dispatch.of_calls) == count + 1


def test_a_call_of_one_order_is_known_by_its_words_unless_documents_part_it():
    q, k, v = (normal(1, 40, h, 32, seed=h) for h in (4, 2, 2))
    for known, mask in ((1, tw.causal()), (0, tw.documents(torch.tensor([0] * 13 + [1] * 27)) & tw.causal())):
        dispatch.of_calls.clear()
        o = tw.attention(q, k, v, mask=mask, deterministic="everywhere")
        assert len(dispatch.of_calls) == known
        torch.testing.assert_close(o, tw.attention(q, k, v, mask=mask, backend="reference"))
    assert repeated.texts_of((False, mask, None, None, "everywhere", None, False)) is None
    with pytest.raises(ValueError, match="deterministic must be"):
        tw.attention(q, k, v, deterministic="elsewhere")


def test_values_in_the_memory_of_selected_keys_are_told_from_others_of_their_shape():
    q, (k, other) = normal(2, 5, 4, 32), (normal(2, 70, 2, 32, seed=n) for n in range(2))
    mask = tw.selected(torch.zeros(2, 2, 5, 1).long())
    for v in (k, other):
        tw.attention(q, k, v[..., :16], mask=mask)
    assert [plan.problem.latent for plan in dispatch.of_calls.values()] == [True, False]


def test_a_wrong_call_raises_after_a_right_one_that_is_equal():
    q, k, v = drawn()
    tw.attention(q, k, v, causal=True, softmax_scale=1.0)
    with pytest.raises(ValueError, match="causal must be True or False"):
        tw.attention(q, k, v, causal=1, softmax_scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="softmax_scale must be a number, got bool"):
        tw.attention(q, k, v, causal=True, softmax_scale=True)


def test_heads_may_come_first():
    q, k, v = drawn()
    words = True, None, None, 0.2, None, None, False
    expected = tw.attention(q, k, v, causal=True, softmax_scale=0.2)
    for _ in range(2):
        found, _ = repeated.attend(*(x.transpose(1, 2) for x in (q, k, v)), words, lse=False, heads_first=True)
        torch.testing.assert_close(found, expected)


def over_pages(values_in_keys: bool = False) -> tuple[Tensor, tw.PagedCache]:
    k = normal(6, 16, 2, 40)
    v = k[..., :32] if values_in_keys else normal(6, 16, 2, 40, seed=2)[..., :32]
    table, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([[3, 1, 5], [0, 4, 2]], [40, 17]))
    return normal(2, 3, 4, 40, seed=3), tw.paged(k, v, table, lengths)


def test_pages_are_read_as_they_are_by_then():
    """Lengths, tables and sinks change in place; values lie in the memory of keys, or in their own."""
    (q, cache), (_, latent) = over_pages(), over_pages(values_in_keys=True)
    sink, cu = normal(4), torch.tensor([0, 3, 6])
    ways = ({}, {"sink": sink}, {"mask": tw.window(9, 0)}, {"cu_seqlens_q": cu, "causal": True})

    def same(again: int) -> None:
        for of, options in ((of, options) for _ in range(again) for of in (cache, latent) for options in ways):
            given = q.flatten(0, 1) if "cu_seqlens_q" in options else q
            expected = tw.attention_paged(given, of, **options, backend="reference")
            torch.testing.assert_close(tw.attention_paged(given, of, **options), expected)

    same(2)
    for of in (cache, latent):
        of.seqlens_k.copy_(torch.tensor([5, 48]))
        of.block_table.copy_(of.block_table.flip(0))
    sink.add_(1)
    same(1)
    cache.seqlens_k.fill_(49)
    with pytest.raises(ValueError, match="seqlens_k"):
        tw.attention_paged(q, cache)
    o, lse = tw.attention_paged_with_lse(q, latent)
    assert (o.shape, lse.shape) == ((2, 3, 4, 32), (2, 4, 3))


def test_packed_calls_are_told_apart_by_what_their_tensors_are():
    """One tensor for both, two that are equal, more sequences, and lengths that are wrong."""
    q, k, v = (normal(9, h, 32, seed=h) for h in (4, 2, 2))
    cu, other = torch.tensor([0, 4, 9]), torch.tensor([0, 4, 9])
    for given in ((cu, None), (cu, cu), (cu, other), (torch.tensor([0, 1, 2, 9]), None)) * 2:
        expected = tw.attention_varlen(q, k, v, *given, causal=True, backend="reference")
        torch.testing.assert_close(tw.attention_varlen(q, k, v, *given, causal=True), expected)
    cu[2] = 10
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        tw.attention_varlen(q, k, v, cu, causal=True)


def test_a_sink_that_wants_a_gradient_gets_it():
    q, k, v = drawn()
    for sink in (normal(4), normal(4).requires_grad_()) * 2:
        assert tw.attention(q, k, v, sink=sink).requires_grad == sink.requires_grad


def test_few_calls_are_kept(monkeypatch):
    monkeypatch.setattr(dispatch, "PLANS_LIMIT", 3)
    for keys in range(60, 70):
        tw.attention(*drawn(keys))
    assert len(dispatch.of_calls) <= 3


# -- Training steps ------------------------------------------------------------------------------------------------------


STEPS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]] = {
    "o": lambda o, lse: (torch.cos(o), None),
    "lse": lambda o, lse: (None, torch.sin(lse)),
    "both": lambda o, lse: (torch.cos(o), torch.sin(lse)),
    "expanded": lambda o, lse: (torch.ones(()).expand_as(o), None),
    "columns-apart": lambda o, lse: (torch.cos(o).transpose(1, 3).contiguous().transpose(1, 3), None),
}


def gradients(q: Tensor, k: Tensor, v: Tensor, step: str, **options: object) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = tw.attention_with_lse(*leaves, causal=True, **options)
    given = [
        (x, grad) for x, grad in zip((o, lse), STEPS[step](o.detach(), lse.detach()), strict=True) if grad is not None
    ]
    return torch.autograd.grad([x for x, _ in given], leaves, [grad for _, grad in given])


@pytest.mark.parametrize("step", STEPS)
def test_steps_of_known_and_of_new_lengths_have_the_gradients_of_the_reference(step):
    for keys in (70, 70, 75, 80, 81, 81):
        q, k, v = drawn(keys)
        torch.testing.assert_close(gradients(q, k, v, step), gradients(q, k, v, step, backend="reference"))


def test_only_gradients_that_are_wanted_come_and_others_are_not_kept():
    q, k, v = drawn()
    expected = gradients(q, k, v, "o")
    for n in (0, 1, 2, 0):
        given = [x.detach().requires_grad_(at == n) for at, x in enumerate((q, k, v))]
        o = tw.attention(*given, causal=True)
        o.backward(torch.cos(o.detach()))
        assert [x.grad is None for x in given] == [at != n for at in range(3)]
        torch.testing.assert_close(given[n].grad, expected[n])


@pytest.mark.parametrize("written", range(4), ids=["q", "k", "v", "o"])
def test_what_a_backward_reads_may_not_be_written_before(written):
    for _ in range(2):
        given = [x.requires_grad_() for x in drawn()]
        o = tw.attention(*given, causal=True)
        with torch.no_grad():
            (*given, o)[written].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


def test_hooks_of_saved_tensors_may_bring_them_in_another_layout():
    q, k, v = drawn()
    expected = gradients(q, k, v, "both")
    turned = lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(turned, lambda x: x):
        torch.testing.assert_close(gradients(q, k, v, "both"), expected)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(gradients(q, k, v, "both"), expected)


@pytest.mark.parametrize("changed", [lambda x: x.bfloat16(), lambda x: x[:1]], ids=["dtype", "size"])
def test_hooks_of_saved_tensors_that_bring_other_numbers_are_refused(changed):
    q, k, v = drawn()
    with torch.autograd.graph.saved_tensors_hooks(changed, lambda x: x):
        o = tw.attention(q.requires_grad_(), k, v)
    with pytest.raises(ValueError, match=r"the backward of attention was called wrongly\n  do must be torch\."):
        o.sum().backward()


def test_a_step_can_be_differentiated_again():
    q, k, v = (x[:1, ..., :3].double().requires_grad_() for x in drawn(4))
    for _ in range(2):
        assert torch.autograd.gradgradcheck(lambda *x: tw.attention(*x, causal=True), (q, k, v))
