"""xformers' names: its documented biases and layouts, judged against plain formulas in float64; and any order of dimensions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.compat.eager import agree, attend, normal
from tilewise.compat import layouts, stand_in
from tilewise.compat import xformers as xf
from tilewise.compat.xformers import attn_bias as ab

B, H, NQ, NK, D = 2, 4, 13, 21, 8
Q, K = [5, 1, 7], [8, 1, 12]  # lengths of blocks: 13 queries, 21 keys
PADDING, STARTS = 12, [0, 9, 12, 30]


def blocks(kept, q=Q, k=K, starts=None) -> Tensor:
    """The matrix of blocks that keeps ``kept(i, j, queries, keys)``; ``starts``: of the slots of keys."""
    starts = [0, *itertools.accumulate(k)] if starts is None else starts
    matrix, row = torch.zeros(sum(q), starts[-1], dtype=torch.bool), 0
    for nq, nk, start in zip(q, k, starts, strict=False):
        i, j = torch.arange(nq).view(-1, 1), torch.arange(nk)
        matrix[row : row + nq, start : start + nk] = kept(i, j, nq, nk)
        row += nq
    return matrix


def whole(kept) -> Tensor:
    return blocks(kept, [NQ], [NK])


def everything(i, j, nq, nk):
    return (i >= 0) & (j >= 0)


def first(i, j, nq, nk):
    return j <= i


def last(i, j, nq, nk):
    return j <= i + nk - nq


def within(kept, size):
    """And of those keys the last few."""
    shift = 0 if kept is first else 1
    return lambda i, j, nq, nk: kept(i, j, nq, nk) & (j > i + shift * (nk - nq) - size)


def around(i, j, nq, nk):
    return (j >= i + nk - nq - 2) & (j <= i + nk - nq + 1)


SLOTS, GAPS = [0, 12, 24, 36], (Q, STARTS, K)
PADDED = (Q, PADDING, K)
BIASES = {
    "LowerTriangularMask": (lambda: ab.LowerTriangularMask(), whole(first)),
    "LowerTriangularFromBottomRightMask": (lambda: ab.LowerTriangularFromBottomRightMask(), whole(last)),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        lambda: ab.LowerTriangularFromBottomRightMask().make_local_attention(4),
        whole(within(last, 4)),
    ),
    "LocalAttentionFromBottomRightMask": (lambda: ab.LocalAttentionFromBottomRightMask(2, 1), whole(around)),
    "BlockDiagonalMask": (lambda: ab.BlockDiagonalMask.from_seqlens(Q, K), blocks(everything)),
    "BlockDiagonalCausalMask": (lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_causal(), blocks(first)),
    "BlockDiagonalCausalFromBottomRightMask": (
        lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_causal_from_bottomright(),
        blocks(last),
    ),
    "BlockDiagonalCausalLocalAttentionMask": (
        lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention(3),
        blocks(within(first, 3)),
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        lambda: ab.BlockDiagonalMask.from_seqlens(Q, K).make_local_attention_from_bottomright(3),
        blocks(within(last, 3)),
    ),
    "BlockDiagonalPaddedKeysMask": (
        lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens(*PADDED),
        blocks(everything, starts=SLOTS),
    ),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (
        lambda: ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(*PADDED),
        blocks(last, starts=SLOTS),
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        lambda: ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(*PADDED, window_left=2, window_right=1),
        blocks(around, starts=SLOTS),
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        lambda: ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(*PADDED, 3),
        blocks(within(last, 3), starts=SLOTS),
    ),
    "BlockDiagonalGappyKeysMask": (
        lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens(*GAPS),
        blocks(everything, starts=STARTS),
    ),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        lambda: ab.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(*GAPS),
        blocks(last, starts=STARTS),
    ),
}


def qkv(batch: int = B, nk: int = NK, heads: int = H) -> tuple[Tensor, ...]:
    return tuple(normal(batch, n, heads, D, seed=s) for s, n in ((1, NQ), (2, nk), (3, nk)))


def formula(arithmetic, q, k, v, kept, bias=0.0):
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    o, lse = attend(*heads, arithmetic, scale=0.3, change=lambda s: s + bias, kept=kept)
    return o.transpose(1, 2), lse


def run(bias):
    return lambda q, k, v: (xf.memory_efficient_attention(q, k, v, bias, scale=0.3, op=("a", "b")),)


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_class_keeps_its_documented_pairs(name):
    make, kept = BIASES[name]
    bias = make()
    assert type(bias).__name__ == name
    tensors = qkv(1 if name.startswith("Block") else B, kept.shape[1])
    agree(run(bias), lambda a, *x: formula(a, *x, kept)[:1], tensors, ("o",))
    assert torch.equal(bias.to("cpu").materialize((2, *kept.shape)).isfinite(), kept.expand(2, -1, -1))


def test_every_known_bias_has_its_case():
    assert set(BIASES) | {"LowerTriangularMaskWithTensorBias"} == set(ab.BANDS)


def test_biases_of_the_real_package_are_read_by_their_names():
    q, k, v = qkv()
    theirs = type("LocalAttentionFromBottomRightMask", (), {"window_left": 2, "window_right": 1})()
    expected = tw.attention(q, k, v, mask=tw.window(2, 1))
    assert torch.equal(xf.memory_efficient_attention(q, k, v, theirs), expected)


def test_the_real_packages_triangles_are_tensors_and_are_no_bias():
    """They are wrappers without storage, which hold their tensor as ``_subtensor`` (xformers 0.0.35)."""

    def wrapped(name: str, held: Tensor, shape: tuple[int, ...]) -> Tensor:
        refusing = classmethod(lambda *_: NotImplemented)
        made = Tensor._make_wrapper_subclass(
            type(name, (Tensor,), {"__torch_dispatch__": refusing}), shape, dtype=held.dtype
        )
        made._subtensor = held
        return made

    q, k, v = qkv()
    matrix = normal(B, H, NQ, NK, seed=5).requires_grad_()
    plain, both = (
        wrapped("LowerTriangularMask", torch.empty(0), ()),
        wrapped("LowerTriangularMaskWithTensorBias", matrix, matrix.shape),
    )
    assert torch.equal(
        xf.memory_efficient_attention(q, k, v, plain), xf.memory_efficient_attention(q, k, v, ab.LowerTriangularMask())
    )
    found, expected = (
        xf.memory_efficient_attention(q, k, v, x) for x in (both, ab.LowerTriangularMask().add_bias(matrix))
    )
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(o.sum(), matrix)[0] for o in (found, expected)))


@pytest.mark.parametrize("shape", [(B, H, NQ, NK), (1, H, NQ, NK), (B, 1, 1, NK)], ids=str)
def test_a_tensor_is_added_and_has_its_gradient(shape):
    run = lambda q, k, v, bias: (xf.memory_efficient_attention(q, k, v, bias, scale=0.3),)  # noqa: E731
    everything = torch.ones(NQ, NK, dtype=torch.bool)
    agree(
        run,
        lambda a, q, k, v, bias: formula(a, q, k, v, everything, bias)[:1],
        (*qkv(), normal(*shape, seed=5)),
        ("o",),
    )


def test_a_triangle_with_a_tensor_has_both():
    run = lambda q, k, v, t: (xf.memory_efficient_attention(q, k, v, ab.LowerTriangularMask().add_bias(t), scale=0.3),)  # noqa: E731
    tensors = (*qkv(), normal(B, H, NQ, NK, seed=5))
    agree(run, lambda a, q, k, v, t: formula(a, q, k, v, whole(first), t)[:1], tensors, ("o",))


def test_one_head_and_groups_have_their_own_layouts():
    q, k, v = qkv()
    bias = normal(B, H, NQ, NK, seed=5)
    expected = xf.memory_efficient_attention(q, k, v, bias)
    alone = xf.memory_efficient_attention(q[:, :, 1], k[:, :, 1], v[:, :, 1], bias[:, 1])
    torch.testing.assert_close(alone, expected[:, :, 1])
    five = [x.unflatten(2, (2, 2)) for x in (q, k, v)]
    grouped = xf.memory_efficient_attention(*five, bias.unflatten(1, (2, 2)))
    assert torch.equal(grouped.flatten(2, 3), expected)
    shared = [x[:, :, :, :1].expand(-1, -1, -1, 2, -1) for x in five[1:]]
    o, lse = xf.memory_efficient_attention_forward_requires_grad(five[0], *shared)
    few = tw.attention_with_lse(q, *[x[:, :, ::2] for x in (k, v)])
    assert torch.equal(o.flatten(2, 3), few[0])
    assert torch.equal(lse.flatten(1, 2), few[1])


@pytest.mark.parametrize("shape", [(B, 2, 1, NQ, NK), (B, 1, 2, NQ, NK), (1, 1, 1, 1, NK)], ids=str)
def test_a_bias_of_groups_broadcasts_and_has_its_gradient(shape):
    groups = lambda x: x.unflatten(2, (2, 2))  # noqa: E731
    run = lambda *x: (xf.memory_efficient_attention(*map(groups, x[:3]), x[3], scale=0.3).flatten(2, 3),)  # noqa: E731
    wide = lambda bias: bias.expand(-1, 2, 2, -1, -1).flatten(1, 2)  # noqa: E731
    everything = torch.ones(NQ, NK, dtype=torch.bool)
    agree(run, lambda a, *x: formula(a, *x[:3], everything, wide(x[3]))[:1], (*qkv(), normal(*shape, seed=5)), ("o",))


def test_a_head_that_one_of_keys_and_values_shares_is_expanded():
    q, k, v = (x.unflatten(2, (2, 2)) for x in qkv())
    one = k[:, :, :, :1]
    got = xf.memory_efficient_attention(q, one, v.requires_grad_())
    assert torch.equal(got, xf.memory_efficient_attention(q, one.expand(-1, -1, -1, 2, -1), v))


@pytest.mark.parametrize("how", ["leaf", "graph", "compiled", "vmap"])
def test_expanded_heads_have_gradients_of_their_own(how):
    q, narrow = normal(B, 5, 2, 3, 4), normal(B, 6, 2, 1, 4, seed=1)
    attend = xf.memory_efficient_attention
    if how == "compiled":
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    if how == "vmap":
        attend = lambda *x: torch.vmap(xf.memory_efficient_attention)(*(t[:, None] for t in x))  # noqa: E731
    wide = (narrow.requires_grad_() if how == "graph" else narrow).expand(-1, -1, -1, 3, -1)
    found = []
    for k in (wide if how == "graph" else wide.detach().requires_grad_(), wide.detach().contiguous().requires_grad_()):
        found.append(torch.autograd.grad(attend(q, k, k).square().sum(), k)[0])
    torch.testing.assert_close(*found)


def test_tensors_of_several_lengths_are_packed_and_split_again():
    parts = [normal(2, 3, H, D, seed=1), normal(1, 5, H, D, seed=2), normal(3, 1, H, D, seed=4)]
    bias, x = ab.BlockDiagonalMask.from_tensor_list(parts)
    assert x.shape == (1, 14, H, D)
    out = bias.split(xf.memory_efficient_attention(x, x, x, bias.make_causal()))
    for part, got in zip(parts, out, strict=True):
        torch.testing.assert_close(got, tw.attention(part, part, part, causal=True))
    bias, q, k, v = ab.BlockDiagonalMask.from_tensor_lists_qkv(parts, parts[::-1][2:] + parts[1:], None)
    assert v is None
    assert torch.equal(q, k)


def test_dropout_dtype_and_no_gradient():
    q, k, v = (x.requires_grad_() for x in qkv())
    torch.manual_seed(3)
    got = xf.memory_efficient_attention(q, k, v, p=0.4, output_dtype=torch.float64)
    torch.manual_seed(3)
    assert torch.equal(got, tw.attention(q, k, v, dropout_p=0.4).double())
    assert not xf.memory_efficient_attention_forward(q, k, v).requires_grad


PAGED = type("PagedBlockDiagonalPaddedKeysMask", (), {})()
FIVE = torch.ones(B, 5, 2, 4, D)
WRONG = {
    "paged": (lambda: xf.memory_efficient_attention(*qkv(), PAGED), NotImplementedError, "Paged.*tw.attention_paged"),
    "unknown": (
        lambda: xf.memory_efficient_attention(*qkv(), SimpleNamespace()),
        NotImplementedError,
        "SimpleNamespace is not known; known are tensors and LowerTriangularMask",
    ),
    "blocks": (
        lambda: xf.memory_efficient_attention(*qkv(), ab.BlockDiagonalMask.from_seqlens(Q, K)),
        ValueError,
        "of 13 queries and 21 keys in a batch of 1; got 2 batches",
    ),
    "dimensions": (
        lambda: xf.memory_efficient_attention(*(x[0, 0] for x in qkv())),
        ValueError,
        "3, 4 or 5 dimensions",
    ),
    "heads of a group": (
        lambda: xf.memory_efficient_attention(FIVE, *[FIVE[:, :, :, :1].expand(-1, -1, -1, 3, -1)] * 2),
        ValueError,
        "groups of query, and its heads or one",
    ),
    "groups": (
        lambda: xf.memory_efficient_attention(FIVE[:, :, :, :1], *[FIVE[:, :, :1, :1]] * 2),
        ValueError,
        "groups of query, and its heads or one",
    ),
    "bias of other groups": (
        lambda: xf.memory_efficient_attention(FIVE, FIVE, FIVE, torch.zeros(B, 4, 2, 5, 5)),
        ValueError,
        r"its groups and heads, \(2, 4\), or 1; got \(2, 4, 2, 5, 5\)",
    ),
    "slots": (lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [5]), ValueError, "do not fit"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_honoured_says_why(name):
    call, error, says = WRONG[name]
    with pytest.raises(error, match=says):
        call()


def test_arguments_have_xformers_names_and_order():
    p = inspect.signature(xf.memory_efficient_attention).parameters
    assert list(p) == ["query", "key", "value", "attn_bias", "p", "scale", "op", "output_dtype"]
    assert [x.name for x in p.values() if x.kind is x.KEYWORD_ONLY] == ["op", "output_dtype"]


@pytest.mark.skipif(importlib.util.find_spec("xformers") is not None, reason="xformers is installed")
def test_installed_under_its_name_it_is_what_libraries_import(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(stand_in.Distributions, "standing", {})
    with pytest.raises(ImportError):
        import xformers
    try:
        xf.install_as_xformers()
        xf.install_as_xformers()
        import xformers.ops
        from xformers.ops import fmha
        from xformers.ops.fmha.attn_bias import BlockDiagonalMask

        assert xformers.ops.memory_efficient_attention is xf.memory_efficient_attention
        assert fmha.BlockDiagonalMask is BlockDiagonalMask is ab.BlockDiagonalMask
        assert importlib.metadata.version("xformers") == xformers.__version__
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "xformers"]:
            del sys.modules[name]
    monkeypatch.setitem(sys.modules, "xformers", type(sys)("xformers"))
    monkeypatch.setattr(stand_in.Distributions, "standing", {})
    with pytest.raises(ValueError, match="xformers is already there"):
        xf.install_as_xformers()


# -- Any order of dimensions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BNHD", "BHND", "NBHD", "HNBD", "NHD", "HND", "BND", "ND"])
def test_a_layout_is_an_order_of_the_same_tensors(layout):
    batch, heads = B if "B" in layout else 1, H if "H" in layout else 1
    ours = [x.requires_grad_() for x in qkv(batch, heads=heads)]
    order = ["BNHD".index(c) for c in layout]
    missing = [n for n, c in enumerate("BNHD") if c not in layout]
    theirs = [x.permute(*missing, *order)[(0,) * len(missing)] for x in ours]
    o, lse = layouts.attention_with_lse(*theirs, layout=layout, causal=True)
    expected, expected_lse = tw.attention_with_lse(*ours, causal=True)
    assert torch.equal(o, expected.permute(*missing, *order)[(0,) * len(missing)])
    rows = expected_lse.transpose(1, 2).permute(*missing, *order[:-1])
    assert torch.equal(lse, rows[(0,) * len(missing)])
    assert torch.equal(layouts.attention(*theirs, layout=layout, causal=True), o)
    for x, y in zip(*(torch.autograd.grad(x.sum(), ours) for x in (o, expected)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("layout", ["BHDN", "BNH", "BHSD", "BBND", "BHD", ""])
def test_another_layout_is_refused(layout):
    with pytest.raises(ValueError, match="B, N, H and D in any order, D last"):
        layouts.attention(*qkv(), layout=layout)


def test_tensors_of_another_number_of_dimensions_are_refused():
    with pytest.raises(ValueError, match=r'layout "HND" has 3 dimensions, got q \(2, 13, 4, 8\), k'):
        layouts.attention(*qkv(), layout="HND")
