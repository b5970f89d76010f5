"""Errors that name what the reader of them should change, and values of NumPy and torch that calls and mods take."""

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import tilewise as tw
from tilewise.compat import cuequivariance, flash_attn, sdpa, xformers
from tilewise.compat import flex_attention as flex

torch_sdpa = torch.nn.functional.scaled_dot_product_attention
Q = torch.randn(2, 16, 4, 8, generator=torch.Generator().manual_seed(1))
LAYOUT = r"layout is \(batch, heads, seqlen, head_dim\): x.transpose\(1, 2\)"
CU = torch.tensor([0, 5, 16])
SPARSE = r"cannot read torch.sparse_coo; make it dense: t.to_dense\(\)"
WRONG = {
    "SDPA's door given seqlen before heads": (
        lambda: sdpa.scaled_dot_product_attention(Q, Q[:, :9], Q[:, :9]),
        LAYOUT,
    ),
    "FlexAttention's door given seqlen before heads": (lambda: flex.flex_attention(Q, Q[:, :9], Q[:, :9]), LAYOUT),
    "a lower right CausalBias": (lambda: tw.attention(Q, Q, Q, mask=causal_lower_right(16, 16)), r"mask=tw.causal\(\)"),
    "an upper left CausalBias": (lambda: tw.attention(Q, Q, Q, mask=causal_upper_left(16, 16)), r'mask=tw.causal\(align="first"\)'),
    "a CausalBias as a score": (lambda: tw.attention(Q, Q, Q, score=causal_lower_right(16, 16)), r"mask=tw.causal\(\)"),
    "a CausalBias as a bias": (lambda: tw.bias(causal_upper_left(16, 16)), r'mask=tw.causal\(align="first"\)'),
    "a CausalBias that a score reads": (lambda: tw.score(lambda s, b, h, i, j: s + causal_upper_left(16, 16)[h, i, j]), r"align="),
    "a CausalBias beside a mask": (lambda: tw.causal() & causal_lower_right(16, 16), r"mask=tw.causal\(\)"),
    "a CausalBias as a dense mask": (lambda: tw.dense(causal_lower_right(16, 16)), r"mask=tw.causal\(\)"),
    "a CausalBias in xformers' door": (lambda: xformers.memory_efficient_attention(Q, Q, Q, causal_lower_right(16, 16)), r"causal\(\)"),
    "documents of cu_seqlens": (lambda: tw.attention(Q, Q, Q, mask=tw.documents(CU)), r"documents\(ids\).*cu_seqlens.*attention_varlen"),
    "a padding mask of two axes": (
        lambda: sdpa.scaled_dot_product_attention(*[Q.transpose(1, 2)] * 3, attn_mask=torch.ones(2, 16, dtype=torch.bool)),
        r"attn_mask\[:, None, None\]",
    ),
    "key_lengths of another batch": (lambda: tw.attention(Q, Q, Q, mask=tw.causal() & tw.key_lengths(CU)), "tensor of key_lengths"),
    "key_range of another batch": (lambda: tw.attention(Q, Q, Q, mask=tw.key_range(CU, 3) | tw.window(1)), "key_range"),
    "prefix of another batch, after a function": (
        lambda: tw.attention(Q, Q, Q, mask=tw.keep(lambda b, h, i, j: CU[b] > j) & tw.prefix(CU + 1)),
        "tensor of prefix",
    ),
    "causal by position": (lambda: tw.attention(Q, Q, Q, True), r"by keyword: causal=True"),
    "causal by position, packed": (lambda: tw.attention_varlen(Q[0], Q[0], Q[0], CU, CU, 16, True), r"leave 16 out: .* causal=True"),
    "a mask by position": (lambda: tw.attention_with_lse(Q, Q, Q, torch.ones(16, 16) > 0), r"write mask= for a bool tensor"),
    "scores joined by `and`": (lambda: tw.softcap(5.0) and tw.alibi(torch.ones(4)), "would drop one: compose scores with >>"),
    "flash_attn's window of None": (lambda: flash_attn.flash_attn_func(Q, Q, Q, window_size=None), "unbounded, got None"),
    "a sparse mask": (lambda: tw.attention(Q, Q, Q, mask=torch.ones(16, 16).bool().to_sparse()), SPARSE),
    "a sparse bias": (lambda: tw.attention(Q, Q, Q, score=torch.ones(16, 16).to_sparse()), SPARSE),
    "a sparse tensor that a score reads": (lambda: tw.score(lambda s, b, h, i, j: s + torch.ones(16).to_sparse()[j]), SPARSE),
    "sparse documents": (lambda: tw.documents(torch.ones(16).long().to_sparse()), SPARSE),
    "sparse lengths": (lambda: tw.key_lengths(torch.ones(2).long().to_sparse()), SPARSE),
    "sparse selections": (lambda: tw.selected(torch.ones(1, 1, 16, 2).int().to_sparse()), SPARSE),
    "a sparse sink": (lambda: tw.attention(Q, Q, Q, sink=torch.ones(4).to_sparse()), r"sink is torch.sparse_coo; .*sink.to_dense\(\)"),
    "sparse cu_seqlens": (lambda: tw.attention_varlen(Q[0], Q[0], Q[0], CU.to_sparse()), r"cu_seqlens_q.to_dense\(\)"),
    "a nested bias": (
        lambda: tw.bias(torch.nested.nested_tensor([torch.ones(16, n) for n in (9, 16)], layout=torch.jagged)),
        r"a nested tensor; .*to_padded_tensor\(0\)",
    ),
    "detach of the score": (lambda: tw.attention(Q, Q, Q, score=lambda s, b, h, i, j: s - s.detach()), "compute what is detached before"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_what_to_write(name):
    call, words = WRONG[name]
    with pytest.raises((ValueError, NotImplementedError, TypeError), match=words):
        call()


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"softmax_scale": np.float32(0.5)}, {"softmax_scale": 0.5}),
        ({"causal": np.bool_(True), "deterministic": np.bool_(False)}, {"causal": True}),
        ({"dropout_p": np.float32(0.5), "dropout_seed": np.int64(5)}, {"dropout_p": 0.5, "dropout_seed": 5}),
        ({"score": lambda s, b, h, i, j: s * np.float32(2) + np.int64(1) * j}, {"score": lambda s, b, h, i, j: s * 2.0 + j}),
        ({"mask": lambda b, h, i, j: (i > j) | np.bool_(True)}, {}),
    ],
    ids=["scale", "truth values", "dropout", "in a score", "in a mask"],
)  # fmt: skip
def test_scalars_of_numpy_are_numbers(given, same):
    torch.testing.assert_close(tw.attention(Q, Q, Q, **given), tw.attention(Q, Q, Q, **same))


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_div_rounds_as_torchs(mode):
    def changed(s, b, h, i, j):
        return s + 0.1 * torch.div(i - 7, j - 20, rounding_mode=mode) + 0.01 * (s * 40).div(3, rounding_mode=mode)

    i, j = torch.arange(16)[:, None], torch.arange(16)[None, :]
    s = changed(torch.einsum("bihd,bjhd->bhij", Q, Q) / 8**0.5, 0, 0, i, j)
    expected = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), Q)
    torch.testing.assert_close(tw.attention(Q, Q, Q, score=changed), expected, rtol=1e-3, atol=1e-3)


def test_a_detached_read_of_a_tensor_has_no_gradient():
    t = torch.randn(4, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
    both = tw.attention(Q, Q, Q, score=lambda s, b, h, i, j: s + t[h, j] * t[h, i].detach() + torch.detach(t[h, j] * 2))
    fixed = t.detach()
    one = tw.attention(Q, Q, Q, score=lambda s, b, h, i, j: s + t[h, j] * fixed[h, i] + fixed[h, j] * 2)
    torch.testing.assert_close(both, one)
    torch.testing.assert_close(*[torch.autograd.grad(o.square().sum(), t)[0] for o in (both, one)])


def test_a_scale_without_dimensions_is_read_as_torch_reads_it():
    for scale in (torch.tensor(0.3), torch.tensor(2)):
        ours = sdpa.scaled_dot_product_attention(Q, Q, Q, scale=scale)
        torch.testing.assert_close(ours, torch_sdpa(Q, Q, Q, scale=scale))
        assert torch.equal(ours, sdpa.scaled_dot_product_attention(Q, Q, Q, scale=scale.item()))


@pytest.mark.parametrize("scale", [torch.tensor([0.3]), torch.tensor(0.3, requires_grad=True)], ids=["(1,)", "learned"])
def test_a_scale_that_torch_does_not_take_is_refused(scale):
    with pytest.raises(TypeError):
        torch_sdpa(Q, Q, Q, scale=scale)
    with pytest.raises(NotImplementedError, match=r"float\(scale\)"):
        sdpa.scaled_dot_product_attention(Q, Q, Q, scale=scale)


ENDS = torch.tensor([0, 16], dtype=torch.int32)
NO_TENSORS = {
    "scaled_dot_product_attention": ("query", lambda x: sdpa.scaled_dot_product_attention(x, Q, Q)),
    "scaled_dot_product_attention-mask": (
        "attn_mask",
        lambda x: sdpa.scaled_dot_product_attention(Q, Q, Q, attn_mask=[x]),
    ),
    "flex_attention": ("key", lambda x: flex.flex_attention(Q, x, Q)),
    "flash_attn_func": ("v", lambda x: flash_attn.flash_attn_func(Q, Q, x)),
    "flash_attn_qkvpacked_func": ("qkv", flash_attn.flash_attn_qkvpacked_func),
    "flash_attn_varlen_func": (
        "cu_seqlens_q",
        lambda x: flash_attn.flash_attn_varlen_func(Q[0], Q[0], Q[0], x, ENDS, 16, 16),
    ),
    "flash_attn_with_kvcache": ("k_cache", lambda x: flash_attn.flash_attn_with_kvcache(Q, x, Q)),
    "memory_efficient_attention": ("value", lambda x: xformers.memory_efficient_attention(Q, Q, x)),
    "triangle_attention": ("bias", lambda x: cuequivariance.triangle_attention(Q[None], Q[None], Q[None], x)),
    "triangle_attention-mask": ("mask", lambda x: cuequivariance.triangle_attention(*[Q[None]] * 4, [x])),
    "append": ("k", lambda x: tw.append(tw.dense_cache(Q, Q, ENDS), x, x)),
    "dense_cache": ("k", lambda x: tw.dense_cache(x, Q, ENDS)),
}


@pytest.mark.parametrize("given", [None, [1.0]], ids=["nothing", "a-list"])
@pytest.mark.parametrize("door", NO_TENSORS)
def test_a_door_names_what_is_no_tensor(door, given):
    name, call = NO_TENSORS[door]
    with pytest.raises(ValueError, match=rf"{name} must be a tensor"):
        call(given)
