"""The words of other attention libraries, keywords and functions, and what says the same here: for the errors of the public face."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def raise_wrong(call: str, reasons: Iterable[str]) -> None:
    """Raise ValueError with every reason why ``call`` was called wrongly; without reasons do nothing."""
    told = "".join(f"\n  {reason}" for reason in reasons)
    if told:
        raise ValueError(f"{call} was called wrongly{told}")


_NO_LENGTH = "leave it out: no maximum length is needed"
_WITH_LSE = "call tw.attention_with_lse"
_PAGED = "call tw.attention_paged(q, tw.paged(k_pages, v_pages, block_table, seqlens_k))"
_CHOSEN = "leave it out: tiles and splits are chosen for the call, and tw.explain says which"
_SINK, _SCALE, _DROPOUT = "write sink=", "write softmax_scale=", "write dropout_p="
HERE = {
    # PyTorch's SDPA, nn.MultiheadAttention and FlexAttention
    "is_causal": "write causal=True, which aligns the last query with the last key (SDPA the first ones: mask=tw.causal(align='first'))",
    "attn_mask": "write mask= for a bool tensor (True = kept), score= for one that is added",
    "scale": _SCALE,
    "sm_scale": _SCALE,
    "enable_gqa": "leave it out: q may have a multiple of the heads of k and v",
    "score_mod": "write score=, with the same function",
    "mask_mod": "write mask=, with the same function",
    "block_mask": "write mask=, with the function (mask_mod) that it was made of",
    "kernel_options": _CHOSEN,
    "return_aux": _WITH_LSE,
    "need_weights": "leave it out: the probabilities are in tilewise.reference.attention",
    "key_padding_mask": "write mask=tw.key_lengths(lengths), or mask=kept[:, None, None, :] of a bool tensor (True = kept)",
    # flash-attn
    "window_size": "write mask=tw.window(left, right), with None where flash-attn has -1",
    "softcap": "write score=tw.softcap(cap)",
    "logits_soft_cap": "write score=tw.softcap(cap)",
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
    "block_table": _PAGED,
    "page_table": _PAGED,
    "num_splits": _CHOSEN,
    "cache_seqlens": "call tw.attention_paged(q, tw.dense_cache(k, v, seqlens_k))",
    "learnable_sink": _SINK,
    "generator": "write dropout_seed=, a number or an int64 tensor",
    "seed": "write dropout_seed=",
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
KEYWORDS = (
    "causal", "mask", "score", "softmax_scale", "sink", "dropout_p", "dropout_seed", "deterministic", "backend", "parallel",
)  # fmt: skip
"""The keywords of ``attention``, which a misspelt one may resemble."""
MASKS = ("window", "prefix", "key_range", "key_lengths", "documents", "keep", "dense", "block_sparse", "selected")
SCORES = ("alibi", "bias")
"""The functions that make a mask or a score, which someone may take for keywords."""
_FLASH_ATTN = "from tilewise.compat.flash_attn import {0}"
_SDPA = "from tilewise.compat.sdpa import {0}"
_FLEX = "from tilewise.compat.flex_attention import {0}"
NAMES = {
    "flash_attn_func": _FLASH_ATTN,
    "flash_attn_varlen_func": _FLASH_ATTN,
    "flash_attn_qkvpacked_func": _FLASH_ATTN,
    "flash_attn_kvpacked_func": _FLASH_ATTN,
    "flash_attn_with_kvcache": _FLASH_ATTN,
    "install_as_flash_attn": _FLASH_ATTN,
    "scaled_dot_product_attention": _SDPA,
    "sdpa": "from tilewise.compat.sdpa import scaled_dot_product_attention",
    "patch": _SDPA,
    "flex_attention": _FLEX,
    "create_block_mask": _FLEX,
    "sliding_window": "write tw.causal() & tw.window(left=sliding_window - 1)",
    "prefix_lm": "write tw.prefix(length)",
    "memory_efficient_attention": "from tilewise.compat.xformers import {0}",
    "reference": "import tilewise.reference",
    "jax": "import tilewise.jax as tw",
    "register": "import tilewise.compat.transformers, which has register()",
    "compat": "import what is needed of it: tilewise.compat.flash_attn, .flex_attention, .sdpa, .transformers, .xformers or .layouts",
}
"""Where to find it, or what to write, by the name that someone looks for in ``tilewise``."""


def refused(function: str, names: Iterable[str], more: Sequence[object] = ()) -> TypeError:
    """Return the error of unknown keywords and of too many arguments by position, with what says the same here."""
    wrong = [f"{function}() got an unexpected keyword argument {name!r}{_instead(name)}" for name in names]
    if more:
        known = dict.fromkeys(filter(None, (_by_keyword(x, function) for x in more)))
        instead = "; ".join(known) or f"by keyword: one of {', '.join(KEYWORDS)}"
        wrong.insert(0, f"{function}() got {len(more)} too many arguments by position; {instead}")
    return TypeError("\n  ".join(wrong))


def _by_keyword(value: object, function: str) -> str:
    """Say what to write instead of a value given by position, if its type tells."""
    if isinstance(value, bool):
        return f"by keyword: causal={value}"
    if isinstance(value, int) and "varlen" in function:
        return f"leave {value} out: no maximum length is needed"
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return ""
    if "float" in str(dtype):
        return "write score= for a tensor that is added"
    if "bool" in str(dtype):
        return "write mask= for a bool tensor"
    return _PAGED if "paged" in function else HERE["cu_seqlens"]


def _instead(name: str) -> str:
    """Return the words after a refused keyword: the word for it here, the argument of a mask or a score, or a similar keyword."""
    if name in HERE:
        return f"; {HERE[name]}"
    if name in KEYWORDS:
        return ", which other functions of tilewise have"
    argument = "mask" if name in MASKS else "score" if name in SCORES else ""
    return f"; write {argument}=tw.{name}(...)" if argument else resembles(name, KEYWORDS)


def missing(name: str, known: Sequence[str]) -> AttributeError:
    """Return the error of a missing name of ``tilewise``, with its place or the word for it here."""
    hint = f"; {NAMES[name].format(name)}" if name in NAMES else resembles(name, known)
    return AttributeError(f"module 'tilewise' has no attribute {name!r}{hint}")


def resembles(name: str, known: Sequence[str]) -> str:
    near = [] if name.startswith("_") else get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
