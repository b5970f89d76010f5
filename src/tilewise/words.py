"""The keywords of other attention libraries, and what says the same here: for the errors of the public functions."""

from __future__ import annotations

from collections.abc import Iterable

_NO_LENGTH = "leave it out: no maximum length is needed"
_WITH_LSE = "call tw.attention_with_lse"
_SINK, _SCALE, _DROPOUT = "write sink=", "write softmax_scale=", "write dropout_p="
HERE = {
    # PyTorch's SDPA, nn.MultiheadAttention and FlexAttention
    "is_causal": "write causal=True, which aligns the last query with the last key (SDPA the first ones: tilewise.compat.sdpa)",
    "attn_mask": "write mask= for a bool tensor (True = kept), score= for one that is added",
    "scale": _SCALE,
    "enable_gqa": "leave it out: q may have a multiple of the heads of k and v",
    "score_mod": "write score=, with the same function",
    "mask_mod": "write mask=, with the same function",
    "block_mask": "write mask=, with the function (mask_mod) that it was made of",
    "key_padding_mask": "write mask=tw.key_lengths(lengths), or mask=kept[:, None, None, :] of a bool tensor (True = kept)",
    # flash-attn
    "window_size": "write mask=tw.window(left, right), with None where flash-attn has -1",
    "softcap": "write score=tw.softcap(cap)",
    "alibi_slopes": "write score=tw.alibi(slopes)",
    "return_attn_probs": f"{_WITH_LSE}; the probabilities are in tilewise.reference.attention",
    "return_softmax_lse": _WITH_LSE,
    "return_lse": _WITH_LSE,
    "max_seqlen": _NO_LENGTH,
    "max_seqlen_q": _NO_LENGTH,
    "max_seqlen_k": _NO_LENGTH,
    "cu_seqlens_q": "call tw.attention_varlen",
    "cu_seqlens_k": "call tw.attention_varlen",
    "cu_seqlens": "call tw.attention_varlen(q, k, v, cu_seqlens)",
    "block_table": "call tw.attention_paged(q, tw.paged(k_pages, v_pages, block_table, seqlens_k))",
    "cache_seqlens": "call tw.attention_paged(q, tw.dense_cache(k, v, seqlens_k))",
    "learnable_sink": _SINK,
    # xformers and Transformers
    "attn_bias": "write score= for a tensor that is added, mask= for what hides",
    "p": _DROPOUT,
    "dropout": _DROPOUT,
    "scaling": _SCALE,
    "sliding_window": "write mask=tw.causal() & tw.window(left=sliding_window - 1)",
    "attention_mask": "write mask=tw.key_lengths(lengths), or mask=kept[:, None, None, :] of a bool tensor (True = kept)",
    "s_aux": _SINK,
    "sinks": _SINK,
}
"""What to do instead, by the other libraries' keyword."""


def refused(function: str, names: Iterable[str]) -> TypeError:
    """The error of keywords that a public function does not have, with what says the same here."""
    found = [(name, f"; {HERE[name]}" if name in HERE else "") for name in names]
    return TypeError(
        "\n  ".join(f"{function}() got an unexpected keyword argument {name!r}{hint}" for name, hint in found)
    )
