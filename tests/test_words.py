"""The keywords and objects of other libraries, as someone who comes from one writes them: the error says what to write here."""

from __future__ import annotations

import importlib
import math
import re
from functools import partial

import pytest
import torch

import tilewise as tw
import tilewise.parallel
from bench.testing import qkv
from tilewise import words
from tilewise.compat.flash_attn import flash_attn_func
from tilewise.compat.flex_attention import create_block_mask, flex_attention
from tilewise.pictures import reading

PUBLIC = (
    tw.attention,
    tw.attention_with_lse,
    tw.attention_with_stats,
    partial(tw.attention_varlen, cu_seqlens_q=torch.tensor([0, 1])),
    partial(tw.attention_varlen_with_lse, cu_seqlens_q=torch.tensor([0, 1])),
    partial(tw.attention_backward, o=None, lse=None, v=None),
    partial(tw.attention_paged, cache=None),
    partial(tw.attention_paged_with_lse, cache=None),
    tw.explain,
)


@pytest.mark.parametrize("function", PUBLIC)
def test_every_public_function_says_what_the_word_of_another_library_is_here(function):
    arguments = qkv()[:1] if "cache" in getattr(function, "keywords", {}) else qkv()
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'is_causal'; write causal=True"):
        function(*arguments, is_causal=True)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nonsense'$"):
        function(*arguments, nonsense=True)


@pytest.mark.parametrize("name", ["block_table", "k_scale", "piece", "seqlens_k"])
def test_explain_takes_the_tensors_of_a_cache_from_a_cache_alone(name):
    with pytest.raises(TypeError, match=rf"explain\(\) got an unexpected keyword argument '{name}'"):
        tw.explain(*qkv(), **{name: torch.ones(())})


def test_a_misspelt_keyword_is_told_the_one_that_it_resembles():
    assert set(words.KEYWORDS) == set(tw.attention.__kwdefaults__)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'casual'; did you mean 'causal'\?"):
        tw.attention(*qkv(), casual=True)


def test_every_mask_and_score_of_the_catalogues_may_be_taken_for_a_keyword():
    known = {*words.MASKS, *words.SCORES, *words.KEYWORDS, *words.HERE}
    assert {*reading.MASKS, *reading.SCORES} <= known


@pytest.mark.parametrize("word", [*words.MASKS, *words.SCORES])
def test_a_mask_or_a_score_that_is_given_as_a_keyword_is_told_its_argument(word):
    assert hasattr(tw, word)
    with pytest.raises(TypeError, match=rf"'{word}'; write (mask|score)=tw\.{word}\("):
        tw.attention(*qkv(), **{word: 3})


@pytest.mark.parametrize("name", words.NAMES)
def test_a_name_of_another_library_is_told_what_is_here_instead(name):
    hint = str(words.missing(name, ())).partition("; ")[2]
    assert set(re.findall(r"tw\.(\w+)", hint)) <= set(tw.__all__)
    imported = re.match(r"from (?P<module>\S+) import (?P<function>\w+)$", hint)
    if imported:
        assert callable(getattr(importlib.import_module(imported["module"]), imported["function"]))
    assert imported or "tw." in hint or "tilewise." in hint


def test_a_name_that_is_not_here_says_so_and_which_one_it_resembles():
    with pytest.raises(
        AttributeError, match=r"no attribute 'flash_attn_func'; from tilewise\.compat\.flash_attn import"
    ):
        tw.flash_attn_func  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'atention'; did you mean 'attention'\?"):
        tw.atention  # noqa: B018
    assert not hasattr(tw, "__nonsense__")


@pytest.mark.parametrize("word", words.HERE)
def test_what_is_to_be_written_instead_exists(word):
    names = re.findall(r"tw\.(\w+)", words.HERE[word])
    assert all(hasattr(tw, name) for name in names)
    written = re.findall(
        r"(\w+)=", words.HERE[word].replace("left=", "").replace("align=", "").replace("seqlens_k=", "")
    )
    assert names or written or words.HERE[word].startswith("leave it out")
    assert set(written) <= set(tw.attention.__kwdefaults__)


def test_explain_asks_about_the_layout_if_heads_and_rows_look_exchanged():
    q, k = torch.empty(2, 8, 256, 64), torch.empty(2, 2, 256, 64)
    assert "pass x.transpose(1, 2)" in str(tw.explain(q, k, k))
    assert "transpose" not in str(tw.explain(*(x.transpose(1, 2) for x in (q, k, k))))
    assert "transpose" not in str(tw.explain(q[:, :1], k, k))  # a step of decoding


WRONG = {
    "mask-is-a-score": (lambda: tw.attention(*qkv(), mask=tw.softcap(3.0)), "got Score; it goes to score="),
    "score-is-a-mask": (lambda: tw.attention(*qkv(), score=tw.causal()), "got Mask; it goes to mask="),
    "keep-of-a-tensor": (lambda: tw.keep(torch.ones(2, 2)), "a bool tensor is tw.dense(t)"),
    "window-of-a-tuple": (lambda: tw.window((128, 0)), "its bounds are two arguments: window(128, 0)"),
    "lengths-in-a-list": (lambda: tw.key_lengths([3, 4]), "one for each batch element is torch.tensor([3, 4])"),
    "lengths-are-a-mask": (
        lambda: tw.key_lengths(torch.ones(2, 4, dtype=torch.bool)),
        "mask of kept keys are mask.sum(-1)",
    ),
    "masks-are-added": (lambda: tw.causal() + tw.window(3), "masks are combined with & (kept by both) and |"),
    "mask-inverted": (lambda: ~tw.causal(), "write the pairs that are kept: tw.keep("),
    "scores-are-added": (lambda: tw.softcap(3.0) + tw.bias(torch.zeros(2, 2)), "scores are composed with >>"),
    "scores-intersect": (lambda: tw.softcap(3.0) & tw.softcap(4.0), "scores are composed with >>"),
    "window-of-flash-attn": (
        lambda: flash_attn_func(*qkv(), window_size=128),
        "window_size must be (left, right), -1 unbounded, got 128",
    ),
    "documents-of-floats": (lambda: tw.documents(torch.zeros(4)), "got torch.float32 (4,); convert it: ids.long()"),
    "documents-in-a-list": (lambda: tw.documents([0, 1]), "got list; make it one: torch.tensor(ids)"),
    "masks-in-a-list": (lambda: tw.attention(*qkv(), mask=[tw.causal()]), "got list; combine masks with & and |"),
    "scores-in-a-list": (lambda: tw.attention(*qkv(), score=[tw.softcap(3.0)]), "got list; compose scores with >>"),
    "score-by-name": (lambda: tw.attention(*qkv(), score="softcap"), "got str; a score by name is score=tw.softcap("),
    "backend-misspelt": (lambda: tw.attention(*qkv(), backend="Trition"), "reference; did you mean 'triton'?"),
    "masks-joined-by-and": (
        lambda: reading.read_mask("causal() and window(3)"),
        "write & and | instead of `and` and `or`",
    ),
    "dense-of-a-function": (lambda: tw.dense(lambda b, h, i, j: i >= j), "a function of (b, h, i, j) is tw.keep(fn)"),
    "merge-of-a-tensor": (lambda: tw.merge(torch.ones(2)), "a list of at least one (o, lse), got Tensor"),
    "merge-of-nothing": (lambda: tw.merge([]), "a list of at least one (o, lse), got an empty one"),
    "one-index-missing": (lambda: tw.lookup(torch.ones(4), 1, 2), "of shape (4,) needs 1 index, got 2"),
    "ranks-0": (lambda: tw.parallel.contiguous(8, 0), "contiguous: ranks must be a whole number >= 1, got 0"),
    "zigzag-ranks-0": (lambda: tw.parallel.zigzag(8, 0), "zigzag: ranks must be a whole number >= 1, got 0"),
    "seqlen-in-text": (lambda: tw.parallel.balanced(None, "8", 2), "balanced: seqlen must be a whole number >= 0"),
    "chunks-0": (lambda: tw.parallel.balanced(None, 8, 2, chunks=0), "balanced: chunks must be a whole number >= 1"),
    "simulate-nobody": (lambda: tw.parallel.simulate(0, print), "simulate: ranks must be a whole number >= 1, got 0"),
    "backward-in-forward-order": (lambda: _in_the_forwards_order(), "in the order do, q, k, v, o, lse"),
    "mask-then-score": (lambda: tw.causal() >> tw.softcap(3.0), "got Mask; a mask is a keyword beside it: mask="),
    "mask-and-score": (lambda: tw.causal() & tw.softcap(3.0), "a score goes to score="),
    "score-then-mask": (lambda: tw.softcap(3.0) >> tw.causal(), "a mask goes to mask="),
    "causal-is-a-mask": (lambda: tw.attention(*qkv(), causal=tw.causal()), "got Mask; other masks go to mask="),
    "score-mod-is-a-mask": (
        lambda: flex_attention(*qkv(), create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 70)),
        "score_mod is a Mask; it goes to block_mask=",
    ),
    "append-to-shared": (
        lambda: tw.append(tw.dense_cache(*qkv()[1:], torch.zeros(2)).share(1), *qkv()[1:]),
        "got SharedCache; append to its .cache, and share what append returns",
    ),
    "mask-misspelt": (lambda: reading.read_mask("casual()"), "did you mean 'causal'?"),
}


def _in_the_forwards_order():
    q, k, v = qkv()
    o, lse = tw.attention_with_lse(q, k, v)
    tw.attention_backward(q, k, v, o, lse, torch.ones_like(o))


@pytest.mark.parametrize("name", WRONG)
def test_an_object_in_the_wrong_place_is_told_its_own(name):
    call, says = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(says)):
        call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda q, k, v: tw.attention(q, k, v, torch.tensor([0, 70])), "call tw.attention_varlen(q, k, v, cu_seqlens)"),
        (
            lambda q, k, v: tw.attention_paged(q, k, v, torch.zeros(2, 1).int(), torch.zeros(2).int()),
            "call tw.attention_paged(q, tw.paged(k_pages, v_pages, block_table, seqlens_k))",
        ),
        (lambda q, k, v: tw.attention(q, k, v, torch.ones(70, 70).bool()), "write mask= for a bool tensor"),
    ],
    ids=["cu_seqlens", "pages", "mask"],
)
def test_a_tensor_too_many_by_position_is_told_its_place(call, says):
    with pytest.raises(TypeError, match=re.escape(says)):
        call(*qkv())


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (lambda s, b, h, i, j: math.tanh(s), "as functions of math do; use torch's functions"),
        (lambda s, b, h, i, j: s[i], "an index of a traced value; it is one number: read a tensor at it"),
    ],
    ids=["math", "index"],
)
def test_a_score_function_that_cannot_be_traced_is_told_what_can(score, says):
    with pytest.raises(NotImplementedError, match=re.escape(says)):
        tw.attention(*qkv(), score=score)
