"""Selected keys beside the same pairs as a bool tensor, in calls of every kind, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilewise as tw
from bench.testing import call, normal, qkv
from tilewise import selections
from tilewise.expr import number, symbol
from tilewise.masks import region

NQ = NK = 70


def entries(*shape: int, blocks: int, seed: int = 0) -> Tensor:
    return torch.randint(-1, blocks, shape, generator=torch.Generator().manual_seed(seed))


def as_dense(
    indices: Tensor, group: int, block: int = 1, block_q: int = 1, lengths: tuple[int, int] = (NQ, NK)
) -> tw.Mask:
    """The pairs of ``selected`` for ``group`` query heads a key head, entry by entry."""
    batch, heads, _, count = indices.shape
    kept = torch.zeros(batch, heads, *lengths, dtype=torch.bool)
    for n in range(count):
        entry = indices[..., n].repeat_interleave(block_q, 2)[..., : lengths[0], None]
        kept |= (entry >= 0) & (torch.arange(lengths[1]) // block == entry)
    return tw.dense(kept.repeat_interleave(group if heads > 1 else 1, 1))


GIVEN = entries(2, 2, NQ, 6, blocks=NK)


def attended(*tensors: Tensor, mask: tw.Mask, **options) -> list[Tensor]:
    """o, lse and the gradients."""
    inputs = [x.clone().requires_grad_() for x in tensors]
    o, lse = tw.attention_with_lse(*inputs, mask=mask, **options)
    return [o, lse, *torch.autograd.grad((o * normal(*o.shape, seed=3)).sum() + lse.clamp(min=-9).sum(), inputs)]


@pytest.mark.parametrize("backend", ["reference", "portable", "cpu"])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (16, 8), (128, 64)], ids=str)
def test_a_row_of_blocks_serves_its_queries_and_the_heads_of_its_key_head(backend, sizes):
    block, block_q = sizes
    indices = entries(1, 2, -(-NQ // block_q), 3, blocks=-(-NK // block))
    masks = tw.selected(indices, block, block_q), as_dense(indices, 2, block, block_q)
    found, expected = (attended(*qkv(), mask=m | tw.window(2, 0), backend=backend) for m in masks)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_the_order_of_entries_and_the_dtype_of_indices_do_not_matter():
    shuffled = GIVEN[..., torch.randperm(6, generator=torch.Generator().manual_seed(0))]
    found = [tw.attention(*qkv(), mask=tw.selected(x)) for x in (GIVEN, shuffled, GIVEN.int())]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_packed_sequences_count_their_own_queries_and_keys():
    q, k, v = (x[0] for x in qkv(batch=1))
    cu = torch.tensor([0, 30, 30, 70])
    indices = torch.stack([entries(2, 40, 5, blocks=n) for n in (30, 0, 40)])
    found = tw.attention_varlen(q, k, v, cu, mask=tw.causal() & tw.selected(indices))
    for n, (start, end) in ((0, (0, 30)), (2, (30, 70))):
        own = tw.causal() & tw.selected(indices[n : n + 1, :, : end - start])
        alone = tw.attention(*(x[None, start:end] for x in (q, k, v)), mask=own)
        torch.testing.assert_close(found[start:end], alone[0])


@pytest.mark.parametrize("backend", ["portable", "cpu"])
def test_paged_sequences_count_their_own_keys(backend):
    k, v, table = normal(20, 16, 2, 16), normal(20, 16, 2, 16, seed=1), torch.arange(16).flip(0).view(2, 8).int()
    lengths, q = torch.tensor([100, 33], dtype=torch.int32), normal(2, 5, 4, 16, seed=2)
    indices = torch.stack([entries(2, 5, 7, blocks=n) for n in (100, 33)])
    cache = tw.paged(k, v, table, lengths)
    found = tw.attention_paged(q, cache, mask=tw.causal() & tw.selected(indices), backend=backend)
    for b, n in enumerate(lengths.tolist()):
        keys = [x[table[b].long()].flatten(0, 1)[None, :n] for x in (k, v)]
        alone = tw.attention(q[b : b + 1], *keys, mask=tw.causal() & tw.selected(indices[b : b + 1]))
        torch.testing.assert_close(found[b : b + 1], alone)
    with pytest.raises(ValueError, match=r"an entry 33 in row \[1, 1, 4\].*a block of 1 keys, of which there are 33"):
        tw.attention_paged(
            q,
            cache,
            mask=tw.selected(indices.index_put((torch.tensor(1), torch.tensor(1), torch.tensor(4)), torch.tensor(33))),
        )


def test_packed_calls_refuse_missing_rows_and_entries_beyond_their_own_sequence():
    q, k, v = (x[0] for x in qkv(batch=1))
    cu, indices = torch.tensor([0, 30, 70]), torch.full((2, 1, 40, 1), 29)
    tw.attention_varlen(q, k, v, cu, mask=tw.selected(indices))
    indices[0, 0, 30:] = 10**6  # rows of no query
    tw.attention_varlen(q, k, v, cu, mask=tw.selected(indices))
    as_many_as_rows = torch.full((2, 1, 70, 1), 29)
    o = tw.attention_varlen(q, k, v, cu, mask=tw.selected(as_many_as_rows))
    assert torch.equal(o, tw.attention_varlen(q, k, v, cu, mask=tw.selected(as_many_as_rows[:, :, :40])))
    with pytest.raises(ValueError, match="has 39 rows, the longest sequence needs 40"):
        tw.attention_varlen(q, k, v, cu, mask=tw.selected(indices[:, :, :39]))
    with pytest.raises(ValueError, match=r"an entry 30 in row \[0, 0, 7\]"):
        tw.attention_varlen(q, k, v, cu, mask=tw.selected(indices.index_fill(2, torch.tensor([7]), 30)))


def test_entries_out_of_range_are_refused_each_time_and_by_calls_without_gradients():
    indices = GIVEN.clone()
    mask = tw.selected(indices)
    with torch.no_grad():
        for _ in range(3):
            tw.attention(*qkv(), mask=mask)
        indices[1, 0, 69, 5] = NK
        with pytest.raises(ValueError, match=r"an entry 70 in row \[1, 0, 69\]"):
            tw.attention(*qkv(), mask=mask)


def test_unchecked_entries_out_of_range_keep_no_key():
    """What a GPU computes of them."""
    wrong = torch.where(entries(2, 2, NQ, 6, blocks=2, seed=5) > 0, NK + 3, GIVEN)
    hidden = torch.where(wrong >= NK, -1, wrong)
    found, expected = (call(*qkv(), mask=tw.selected(x)) for x in (wrong, hidden))
    for name in ("reference", "portable", "cpu"):
        backend = tw.dispatch.backend(name)
        assert torch.equal(backend.forward(found.p, found.t).o, backend.forward(expected.p, expected.t).o)


@pytest.mark.parametrize("backend", ["portable", "cpu"])
def test_a_prepared_mask_gives_the_same(backend):
    q, k, v = qkv()
    mask = tw.causal() & tw.selected(entries(2, 2, 5, 2, blocks=5), 16, 16)
    torch.testing.assert_close(
        tw.attention(q, k, v, mask=mask.prepare(q, k), backend=backend),
        tw.attention(q, k, v, mask=mask, backend="reference"),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_gives_the_same_with_gradients(dynamic):
    def loss(q, k, v, indices):
        return tw.attention(q, k, v, mask=tw.causal() & tw.selected(indices)).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seed in range(2):  # other entries each time
        indices = entries(2, 2, NQ, 6, blocks=NK, seed=seed)
        grads = []
        for f in (compiled, loss):
            inputs = [x.requires_grad_() for x in qkv()]
            grads.append(torch.autograd.grad(f(*inputs, indices), inputs))
        for x, y in zip(*grads, strict=True):
            torch.testing.assert_close(x, y)


def test_mapped_examples_have_their_own_entries():
    q, k, v = (torch.stack([x, 0.9 * x, 1.1 * x]) for x in qkv())
    indices = torch.stack([entries(2, 2, NQ, 6, blocks=NK, seed=n) for n in range(3)])
    found = torch.vmap(lambda q, k, v, i: tw.attention(q, k, v, mask=tw.selected(i)))(q, k, v, indices)
    for n in range(3):
        torch.testing.assert_close(found[n], tw.attention(q[n], k[n], v[n], mask=tw.selected(indices[n])))


def test_forward_mode_and_second_derivatives_are_those_of_the_same_pairs():
    q, k, v = (x[:1, :3, :, :2].double().requires_grad_() for x in qkv())
    mask = tw.selected(entries(1, 2, 3, 2, blocks=3)) | tw.window(0, 0)
    assert torch.autograd.gradcheck(lambda *x: tw.attention(*x, mask=mask), (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *x: tw.attention(*x, mask=mask), (q, k, v))


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *found) if found else self.elements
        return out


def test_no_tensor_has_an_element_for_each_pair():
    n = 8192
    q, k, v = (normal(1, n, 1, 4, seed=s) for s in range(3))
    indices = torch.arange(n).view(1, 1, n, 1) + torch.arange(-3, 1)
    c = call(q, k, v, mask=tw.causal() & tw.selected(indices.clamp(min=-1)))
    with _Largest() as largest:
        out = tw.dispatch.backend("portable").forward(c.p, c.t)
        tw.dispatch.backend("portable").backward(c.p, c.t, out, c.do, c.dlse)
    assert largest.elements <= 1 << 20


def test_parts_that_are_known_leave_the_rest_of_a_predicate():
    i, j = symbol("i"), symbol("j")
    a, b = i < j, i > number(3)
    assert str(selections.assume((a & b) | (j < 7), {id(a): True})) == "(i > 3) | (j < 7)"
    assert str(selections.assume((a & b) | (j < 7), {id(a): False})) == "j < 7"
    assert str(selections.assume(a | b, {id(a): True})) == "True"


def test_a_text_says_the_query_heads_of_a_key_head_once_the_call_is_known():
    mask = tw.selected(GIVEN)
    assert "h // group" in mask.text
    assert "selected(int0[b, h // 2, i], j)" in str(tw.explain(*qkv(), mask=mask))
    assert str(region(mask.text, (0,)).predicate) == "selected(int0[b, h, i], j)"
