"""The keywords and objects of other libraries, as someone who comes from one writes them: the error says what to write here."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

import tilewise as tw
from tilewise import words
from tilewise.compat.flash_attn import flash_attn_func
from tilewise.testing import qkv

PUBLIC = (
    tw.attention,
    tw.attention_with_lse,
    tw.attention_with_stats,
    partial(tw.attention_varlen, cu_seqlens_q=torch.tensor([0, 1])),
    partial(tw.attention_paged, cache=None),
    partial(tw.attention_paged_with_lse, cache=None),
    tw.explain,
)


@pytest.mark.parametrize("function", PUBLIC)
def test_every_public_function_says_what_the_word_of_another_library_is_here(function):
    arguments = qkv()[:1] if "cache" in getattr(function, "keywords", {}) else qkv()
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'is_causal'; write causal=True"):
        function(*arguments, is_causal=True)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'casual'$"):
        function(*arguments, casual=True)


@pytest.mark.parametrize("word", words.HERE)
def test_what_is_to_be_written_instead_exists(word):
    names = re.findall(r"tw\.(\w+)", words.HERE[word])
    assert all(hasattr(tw, name) for name in names)
    written = re.findall(r"(\w+)=", words.HERE[word].replace("left=", "").replace("seqlens_k=", ""))
    assert names or written or words.HERE[word].startswith("leave it out")
    assert set(written) <= set(tw.attention.__kwdefaults__)


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
    "window-of-flash-attn": (
        lambda: flash_attn_func(*qkv(), window_size=128),
        "window_size must be (left, right), -1 unbounded, got 128",
    ),
    "documents-of-floats": (lambda: tw.documents(torch.zeros(4)), "got torch.float32 (4,)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_object_in_the_wrong_place_is_told_its_own(name):
    call, says = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(says)):
        call()
