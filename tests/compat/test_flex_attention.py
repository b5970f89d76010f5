"""FlexAttention's own names: torch's calls as they stand, with its masks in blocks, its own flags and its refusals."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import tilewise as tw
from tests.compat.eager import F64, agree, attend, normal
from tests.compat.test_flex import CATALOGUE, HK, B, D, H, N, causal, evaluated
from tilewise.compat import flex_attention as door
from tilewise.compat.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

NAMES = (
    "mask-document-window", "mask-natten", "mask-per-batch-and-head", "mask-tree", "mask-noop",
    "score-alibi-softcap-causal", "score-buckets", "score-gates", "score-bias-documents", "score-table-natten",
)  # fmt: skip


def qkv(dtype=torch.float32):
    """Heads first."""
    return tuple(normal(B, h, N, D, seed=n, dtype=dtype) for n, h in enumerate((H, HK, HK), 1))


def blocks(mask_mod, size=16):
    return torch_flex.create_block_mask(mask_mod, B, H, N, N, device="cpu", BLOCK_SIZE=size)


def by_hand(mask_mod=None, full=True) -> BlockMask:
    """Blocks of 12 by 12 of 36 queries and keys: row 0 lists block 2 and, as full, block 0; row 1 blocks 0 and 1; row 2 none."""
    counts, indices = torch.tensor([[[1, 2, 0]]]), torch.tensor([[[[2, 0, 1], [0, 1, 2], [0, 1, 2]]]])
    of_full = (torch.tensor([[[1, 0, 0]]]), torch.tensor([[[[0, 1, 2]] * 3]])) if full else (None, None)
    return BlockMask.from_kv_blocks(counts, indices, *of_full, BLOCK_SIZE=12, mask_mod=mask_mod, seq_lengths=(N, N))


def kept_by_hand(kept: torch.Tensor, full=True) -> torch.Tensor:
    """The pairs of :func:`by_hand`, where ``kept`` is what its mask_mod gives."""
    pairs = torch.zeros(N, N, dtype=torch.bool)
    pairs[:12, 24:], pairs[12:24, :24] = kept[:12, 24:], kept[12:24, :24]
    if full:
        pairs[:12, :12] = True
    return pairs


@pytest.mark.parametrize(
    "make_blocks", [blocks, lambda mod: create_block_mask(mod, B, H, N, N)], ids=["torchs", "ours"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_flex_attention_agrees_with_float64_with_all_gradients(name, make_blocks):
    mod = CATALOGUE[name]

    def ours(q, k, v, *captured):
        score_mod, mask_mod = mod.make(*captured)
        block_mask = None if mask_mod is None else make_blocks(mask_mod)
        return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True)

    def expected(arithmetic, q, k, v, *captured):
        o, lse = evaluated(mod, arithmetic, *(x.transpose(1, 2) for x in (q, k, v)), *captured)
        return o.transpose(1, 2), lse

    agree(ours, expected, (*qkv(), *mod.captured))


@pytest.mark.parametrize("full", [True, False], ids=["full-blocks", "no-full-blocks"])
@pytest.mark.parametrize("mask_mod", [None, lambda b, h, i, j: (i + j) % 2 == 0], ids=["noop", "checkerboard"])
def test_a_block_mask_made_by_hand_means_what_its_lists_say(mask_mod, full):
    i, j = torch.arange(N).view(-1, 1), torch.arange(N)
    pairs = kept_by_hand((i + j) % 2 == 0 if mask_mod else torch.ones(N, N, dtype=torch.bool), full)
    assert not pairs[24:].any()
    agree(
        lambda *x: flex_attention(*x, block_mask=by_hand(mask_mod, full), enable_gqa=True, return_lse=True),
        lambda a, *x: attend(*x, a, kept=pairs),
        qkv(),
    )


def test_calls_share_the_mask_of_a_block_mask_until_something_changes():
    """Each change alone, with the mask asked for before and after it; what a call computes is that of its lists and mod now."""
    ids, reach = torch.arange(N) // 9, [5]
    block_mask = by_hand(lambda b, h, i, j: (ids[i] == ids[j]) | (i - j < reach[0]))
    q, k, v = qkv()
    ours = lambda: door._mask(block_mask, q, k)  # noqa: E731

    def right() -> bool:
        i, j = torch.arange(N)[:, None], torch.arange(N)
        mod, pairs = block_mask.mask_mod(0, 0, i, j), torch.zeros(N, N, dtype=torch.bool)
        for lists, kept in (
            (("kv_num_blocks", "kv_indices"), mod),
            (("full_kv_num_blocks", "full_kv_indices"), mod | True),
        ):
            counts, indices = (getattr(block_mask, name)[0, 0].tolist() for name in lists)
            for row, (count, columns) in enumerate(zip(counts, indices, strict=True)):
                for column in columns[:count]:
                    block = slice(12 * row, 12 * row + 12), slice(12 * column, 12 * column + 12)
                    pairs[block] |= kept[block]
        expected = tw.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=tw.dense(pairs)).transpose(1, 2)
        return torch.allclose(flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True), expected, atol=1e-5)

    first = ours()
    assert right()
    assert ours() is first
    ids.copy_(torch.arange(N) // 7)  # the same mask, which sees it itself
    assert ours() is first
    assert right()
    changes = (
        lambda: reach.__setitem__(0, 9),
        lambda: block_mask.kv_num_blocks.copy_(torch.tensor([[[2, 1, 1]]])),
        lambda: block_mask.full_kv_indices.copy_(torch.tensor([[[[1, 0, 2]] * 3]])),
        lambda: setattr(block_mask, "kv_indices", torch.tensor([[[[1, 2, 0], [0, 1, 2], [2, 1, 0]]]])),
        lambda: setattr(block_mask, "mask_mod", lambda b, h, i, j: i >= j),
    )
    for change in changes:
        before = ours()
        change()
        assert ours() is not before
        assert ours() is ours()
        assert right()


def test_lists_of_inference_mode_are_read_at_each_call():
    with torch.inference_mode():
        block_mask, (q, k, _) = by_hand(causal), qkv()
        assert door._mask(block_mask, q, k) is not door._mask(block_mask, q, k)


def test_a_block_mask_is_not_kept_alive():
    block_mask, (q, k, _) = by_hand(causal), qkv()
    door._mask(block_mask, q, k)
    gone, count = weakref.ref(block_mask), len(door._held)
    del block_mask
    gc.collect()
    assert gone() is None
    assert len(door._held) == count - 1


def test_flags_and_scale_are_those_of_flex_attention(monkeypatch):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # eager, by its own switch
    q, k, v = qkv(F64)
    call = {"block_mask": blocks(causal), "scale": 0.4, "enable_gqa": True, "kernel_options": {"BLOCK_M": 64}}
    expected, aux = torch_flex.flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **call)
    scores = (q @ k.repeat_interleave(H // HK, 1).mT * 0.4).masked_fill(~torch.ones(N, N).tril().bool(), -torch.inf)
    for asked in (AuxRequest(), AuxRequest(lse=True), AuxRequest(max_scores=True), AuxRequest(True, True)):
        o, got = flex_attention(q, k, v, return_aux=asked, **call)
        torch.testing.assert_close(o, expected)
        assert (got.lse is not None, got.max_scores is not None) == tuple(asked)
        if asked.lse:
            torch.testing.assert_close(got.lse, aux.lse)
        if asked.max_scores:
            torch.testing.assert_close(got.max_scores, scores.amax(-1))
    torch.testing.assert_close(flex_attention(q, k, v, **call), expected)
    torch.testing.assert_close(flex_attention(q, k, v, return_lse=True, **call)[1], aux.lse)


def test_keys_of_one_batch_element_serve_all():
    q, k, v = qkv(F64)
    got = flex_attention(q, k[:1], v[:1], enable_gqa=True)
    torch.testing.assert_close(got, flex_attention(q, *(x[:1].expand(B, -1, -1, -1) for x in (k, v)), enable_gqa=True))
    torch.testing.assert_close(got[1:], flex_attention(q[1:], k[:1], v[:1], enable_gqa=True))


@pytest.mark.parametrize(
    "make_blocks", [blocks, lambda mod: create_block_mask(mod, B, H, N, N)], ids=["torchs", "ours"]
)
def test_it_compiles_in_one_graph(make_blocks):
    block_mask, tensors = make_blocks(causal), qkv(F64)
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    got = compiled(*tensors, block_mask=block_mask, enable_gqa=True)
    torch.testing.assert_close(got, flex_attention(*tensors, block_mask=block_mask, enable_gqa=True))


def test_any_mask_of_tilewise_is_taken():
    tensors = qkv(F64)
    expected = flex_attention(*tensors, block_mask=blocks(causal), enable_gqa=True)
    for mask in (tw.causal(), causal, torch.ones(N, N).tril().bool()):
        torch.testing.assert_close(flex_attention(*tensors, block_mask=mask, enable_gqa=True), expected)


def test_its_names_and_arguments_are_those_of_torch():
    assert set(torch_flex.__all__) - set(door.__all__) <= {"FlexKernelOptions"}
    assert set(door.__all__) <= set(torch_flex.__all__)
    assert list(inspect.signature(flex_attention).parameters) == list(
        inspect.signature(torch_flex.flex_attention).parameters
    )
    theirs = list(inspect.signature(torch_flex.create_block_mask).parameters)  # older versions have fewer
    assert list(inspect.signature(create_block_mask).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_gqa": False}, "query has 4 heads, key 2; grouped ones need enable_gqa=True"),
        ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, "return_lse and return_aux exclude each other"),
        ({"return_aux": True}, r"return_aux must be AuxRequest\(.* or None, got True"),
        ({"key": torch.zeros(3, HK, N, D)}, "batch differs: query 2, key 3, value 2"),
        ({"query": torch.zeros(H, N, D)}, r"are \(batch, heads, seqlen, head_dim\), got \(4, 36, 16\)"),
        ({"query": torch.zeros(B, H, N + 1, D), "block_mask": blocks(causal)}, r"for lengths \(36, 36\) but the call has \(37, 36\)"),
        ({"block_mask": (1, 2)}, "got tuple"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused_as_torch_refuses_it(change, message):
    q, k, v = qkv()
    with pytest.raises(ValueError, match=message):
        flex_attention(**{"query": q, "key": k, "value": v, "enable_gqa": True} | change)
