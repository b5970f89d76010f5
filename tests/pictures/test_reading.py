"""Masks and scores from text: what the catalogue writes is read, everything else is refused in words and never run."""

import inspect

import pytest
import torch

import tilewise as tw
from tilewise.masks import catalogue as masks
from tilewise.masks import patterns
from tilewise.pictures.reading import MASKS, PATTERNS, SCORES, read_mask, read_score
from tilewise.scores import catalogue as scores

LONG = torch.arange(40)


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("tw.causal() & window(left=3, right=None)", tw.causal() & tw.window(left=3)),
        ("causal(align='first') & window(3, align='last')", tw.causal(align="first") & tw.window(3)),
        ("causal() | window(-(-2), 0)", tw.causal() | tw.window(2, 0)),
        ("documents([0] * 10 + [1] * 30)", tw.documents((LONG >= 10).long())),
        ("documents(torch.arange(40) // 7)", tw.documents(LONG // 7)),
        ("prefix(7) & key_range(2, 30)", tw.prefix(7) & tw.key_range(2, 30)),
        ("key_lengths([20, 30])", tw.key_lengths(torch.tensor([20, 30]))),
        ("block_sparse(strided(5, 5, stride=2), 8, 8)", tw.block_sparse(tw.strided(5, 5, 2), 8, 8)),
        ("dense([[1, 0] * 20] * 40)", tw.dense((LONG % 2 == 0).expand(40, 40))),
        ("keep(lambda b, h, i, j: (i + j) % 3 != 0)", tw.keep(lambda b, h, i, j: (i + j) % 3 != 0)),
        (
            "keep(lambda b, h, q, k: where(q > 9, abs(q - k) < 4, k >= 2))",
            tw.keep(lambda b, h, i, j: torch.where(i > 9, abs(i - j) < 4, j >= 2)),
        ),
    ],
)
def test_the_text_of_a_mask_is_that_mask(text, mask):
    assert tw.show_mask(read_mask(text), 40) == tw.show_mask(mask, 40)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("softcap(30) >> alibi([0.5, 0.25])", tw.softcap(30) >> tw.alibi(torch.tensor([0.5, 0.25]))),
        ("score(lambda s, b, h, i, j: s - abs(i - j) / 8)", tw.score(lambda s, b, h, i, j: s - abs(i - j) / 8)),
    ],
)
def test_the_text_of_a_score_is_that_score(text, score):
    found = read_score(text)
    assert found.text == score.text
    assert all(map(torch.equal, found.leaves, score.leaves))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('id')",
        "causal().__class__",
        "causal.__globals__",
        "(lambda: causal())()",
        "[causal() for x in [1]][0]",
        "keep(lambda b, h, i, j: open('/etc/passwd'))",
        "keep(lambda b, h, i, j: tw.expr.trace(i))",
        "keep(lambda b, h, i: i > 0)",
        "keep(lambda b, h, i, j: (lambda: i)() > 0)",
        "softcap(30)",
        "windows(3)",
        "window('3')",
        "causal(align='middle')",
        "keep('causal()')",
        "window(2 ** 99)",
        "documents([0] * 10 ** 9)",
        "documents([[0] * 99999] * 99999)",
        "documents(arange(99999999))",
        "causal() and window(2)",
        "causal(",
        "window(*[1, 2])",
        "window(**{})",
        "causal() & 1",
        "",
        "3",
        "causal()" + " & causal()" * 2000,
    ],
)
def test_any_other_text_is_refused_in_words(text):
    with pytest.raises(ValueError, match="a mask is made of causal, window"):
        read_mask(text)


def test_a_mask_is_no_score():
    with pytest.raises(ValueError, match="a score is made of softcap, alibi, bias, score"):
        read_score("causal()")


def test_every_public_mask_pattern_and_score_can_be_read():
    rooms = {module.__name__ for module in (masks, patterns, scores)}
    functions = [name for name in tw.__all__ if inspect.isfunction(getattr(tw, name))]
    public = {name for name in functions if getattr(tw, name).__module__ in rooms}
    assert public == {*MASKS, *PATTERNS, *SCORES}, (
        "tilewise.pictures.reading has the names; the catalogue's page draws each"
    )
