"""Scores: the catalogue's values, composition, and the numbering of leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import expr
from tilewise.expr import evaluate
from tilewise.scores import Score, as_score, expression
from tilewise.spec import Extras

BATCH, HEADS, NQ, NK = 2, 3, 4, 6
OFF = NK - NQ
GENERATOR = torch.Generator().manual_seed(0)
I, J = torch.arange(NQ).view(-1, 1), torch.arange(NK)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


S = normal(BATCH, HEADS, NQ, NK) * 3
SLOPES, BIAS = normal(HEADS), normal(BATCH, HEADS, NQ, NK)


def value(score: Score, dtype: torch.dtype = torch.float64) -> Tensor:
    """What a score makes of S, its leaves placed as in an operator's call."""
    extras = Extras()
    e = expression(score.text, extras.slots(score.leaves))
    env = {"s": S.to(dtype), "b": torch.arange(BATCH).view(-1, 1, 1, 1), "h": torch.arange(HEADS).view(-1, 1, 1)}
    env |= {"i": I, "j": J, "off": torch.tensor(OFF)}
    return evaluate([e], env, extras.tensors, dtype)[0]


CATALOGUE = {
    "softcap": (lambda: tw.softcap(2.0), lambda: 2 * torch.tanh(S / 2)),
    "softcap-int": (lambda: tw.softcap(30), lambda: 30 * torch.tanh(S / 30)),
    "alibi": (lambda: tw.alibi(SLOPES), lambda: S - SLOPES.view(-1, 1, 1) * (I + OFF - J).abs()),
    "alibi-per-batch": (lambda: tw.alibi(BIAS[:, :, 0, 0]), lambda: S - BIAS[:, :, :1, :1] * (I + OFF - J).abs()),
    "alibi-one-slope": (lambda: tw.alibi(SLOPES[:1]), lambda: S - SLOPES[0] * (I + OFF - J).abs()),
    "bias": (lambda: tw.bias(BIAS), lambda: S + BIAS),
    "bias-over-batch": (lambda: tw.bias(BIAS[:1]), lambda: S + BIAS[:1]),
    "bias-over-heads": (lambda: tw.bias(BIAS[:, :1]), lambda: S + BIAS[:, :1]),
    "bias-over-queries": (lambda: tw.bias(BIAS[:, :, :1]), lambda: S + BIAS[:, :, :1]),
    "bias-over-keys": (lambda: tw.bias(BIAS[..., :1]), lambda: S + BIAS[..., :1]),
    "bias-3d": (lambda: tw.bias(BIAS[0]), lambda: S + BIAS[0]),
    "bias-2d": (lambda: tw.bias(BIAS[0, 0]), lambda: S + BIAS[0, 0]),
    "bias-keys": (lambda: tw.bias(BIAS[0, 0, 0]), lambda: S + BIAS[0, 0, 0]),
    "bias-scalar": (lambda: tw.bias(BIAS[0, 0, 0, 0]), lambda: S + BIAS[0, 0, 0, 0]),
    "function": (lambda: tw.score(lambda s, b, h, i, j: s * SLOPES[h] - j), lambda: S * SLOPES.view(-1, 1, 1) - J),
    "function-of-the-offset": (lambda: tw.score(lambda s, b, h, i, j: s / (1 + i + tw.offset)), lambda: S / (1 + I + OFF)),
    "replaced": (lambda: tw.score(lambda s, b, h, i, j: BIAS[b, h, i, j]), lambda: BIAS),
}  # fmt: skip


@pytest.mark.parametrize(("build", "expected"), CATALOGUE.values(), ids=CATALOGUE)
def test_a_score_is_worth_its_formula(build, expected):
    torch.testing.assert_close(value(build()), expected())


def test_half_precision_leaves_are_read_in_the_compute_dtype():
    half = BIAS.half()
    assert torch.equal(value(tw.bias(half)), S + half.double())
    assert torch.equal(value(tw.bias(half), torch.float32), S.float() + half.float())


def test_then_applies_the_left_score_first():
    capped = lambda x: 2 * torch.tanh(x / 2)  # noqa: E731
    torch.testing.assert_close(value(tw.softcap(2.0) >> tw.bias(BIAS)), capped(S) + BIAS)
    torch.testing.assert_close(value(tw.bias(BIAS) >> tw.softcap(2.0)), capped(S + BIAS))


def test_then_is_associative():
    a, b, c = tw.alibi(SLOPES), tw.softcap(2.0), tw.bias(BIAS)
    left, right = (a >> b) >> c, a >> (b >> c)
    assert left.text == right.text
    assert [x is y for x, y in zip(left.leaves, right.leaves, strict=True)] == [True, True]


def test_stages_number_their_leaves_on_their_own():
    twice = tw.score(lambda s, b, h, i, j: s * SLOPES[h] + BIAS[b, h, i, j] - SLOPES[h])
    chain = twice >> tw.softcap(4.0) >> tw.alibi(SLOPES) >> tw.bias(BIAS[0, 0])
    slopes = SLOPES.view(-1, 1, 1)
    inner = 4 * torch.tanh((S * slopes + BIAS - slopes) / 4)
    torch.testing.assert_close(value(chain), inner - slopes * (I + OFF - J).abs() + BIAS[0, 0])
    assert len(chain.leaves) == 4


def test_one_tensor_in_several_stages_travels_once():
    extras = Extras()
    chain = tw.alibi(SLOPES) >> tw.score(lambda s, b, h, i, j: s + BIAS[b, h, i, j] * SLOPES[h]) >> tw.bias(BIAS)
    slots = extras.slots(chain.leaves)
    assert slots == (0, 1, 0, 1)
    assert [x is y for x, y in zip(extras.tensors, (SLOPES, BIAS), strict=True)] == [True, True]


def test_equal_scores_have_equal_texts_whatever_their_tensors():
    chain = lambda: tw.alibi(normal(HEADS)) >> tw.softcap(5.0) >> tw.score(lambda s, b, h, i, j: s * 2)  # noqa: E731
    assert chain().text == chain().text == "s - (fitted_float0[h] * abs((i + off) - j)) >> 5.0 * tanh(s / 5.0) >> s * 2"


def test_the_slope_of_a_chain_is_autograds():
    chain = tw.softcap(2.0) >> tw.alibi(SLOPES) >> tw.score(lambda s, b, h, i, j: s * torch.sigmoid(s))
    e = expression(chain.text, (0,))
    s = S.clone().requires_grad_()
    env = {"s": s, "h": torch.arange(HEADS).view(-1, 1, 1), "i": I, "j": J, "off": torch.tensor(OFF)}
    (expected,) = torch.autograd.grad(evaluate([e], env, [SLOPES], torch.float64)[0].sum(), s)
    got = evaluate([expr.derivative(e, expr.symbol("s"))], env | {"s": S}, [SLOPES], torch.float64)[0]
    torch.testing.assert_close(got, expected)


def test_what_the_score_keyword_takes_becomes_a_score():
    fn = lambda s, b, h, i, j: s + BIAS[b, h, i, j]  # noqa: E731
    for given in (fn, BIAS, tw.bias(BIAS), tw.score(fn)):
        assert torch.equal(value(as_score(given)), S + BIAS)
    assert expression(as_score(None).text, ()) is None


BAD = {
    "softcap-zero": (lambda: tw.softcap(0.0), "cap must be > 0 and finite, got 0.0"),
    "softcap-negative": (lambda: tw.softcap(-3), "cap must be > 0 and finite, got -3"),
    "softcap-nan": (lambda: tw.softcap(float("nan")), "cap must be > 0 and finite, got nan"),
    "softcap-inf": (lambda: tw.softcap(float("inf")), "cap must be > 0 and finite, got inf"),
    "softcap-text": (lambda: tw.softcap("30"), "cap must be > 0 and finite, got '30'"),
    "softcap-learned": (lambda: tw.softcap(torch.nn.Parameter(torch.ones(()))), r"write a learned cap as a score: tw\.score"),
    "alibi-ints": (lambda: tw.alibi(torch.ones(3).int()), r"\(batch, heads_q\), got torch\.int32 \(3,\); convert it: slopes\.float"),
    "alibi-scalar": (lambda: tw.alibi(torch.tensor(0.5)), r"floating tensor \(heads_q,\) .*got torch\.float32 \(\); one slope a head"),
    "alibi-list": (lambda: tw.alibi([0.5, 0.25]), r"floating tensor .*got list; make it one: torch\.tensor\(slopes\)"),
    "bias-bool": (lambda: tw.bias(torch.ones(2, 2).bool()), "a bool tensor is a mask: mask=t"),
    "bias-ints": (lambda: tw.bias(torch.ones(2, 2).int()), r"floating tensor, got torch\.int32; convert it: t\.float"),
    "bias-bytes": (lambda: tw.bias(torch.ones(2, 2).to(torch.int8)), r"floating tensor, got torch\.int8; convert it: t\.float"),
    "bias-complex": (lambda: tw.bias(torch.ones(2, 2).cfloat()), r"got torch\.complex64; pass its real part: t\.real"),
    "bias-function": (lambda: tw.bias(lambda s, *_: s), r"got function; a function is tw\.score\(fn\)"),
    "bias-number": (lambda: tw.bias(0.5), r"floating tensor, got float; make it one: torch\.tensor"),
    "bias-dims": (lambda: tw.bias(torch.ones(1, 1, 1, 2, 2)), r"at most 4 dimensions, got shape \(1, 1, 1, 2, 2\)"),
    "truth-value": (lambda: tw.score(lambda s, b, h, i, j: s > 0), r"truth value: s > 0; for masks use tw\.keep"),
    "keyword": (lambda: as_score(0.5), "Score, a float tensor or a function .* got float"),
    "then-function": (lambda: tw.softcap(2) >> (lambda s, *_: s), r"got function; wrap it: tw\.score\(fn\), tw\.bias"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "message"), BAD.values(), ids=BAD)
def test_a_bad_argument_is_a_value_error_that_says_what_is_allowed(build, message):
    with pytest.raises(ValueError, match=message):
        build()


WRONG_SHAPES = {
    "alibi-heads": (lambda: tw.alibi(torch.ones(4)), "axis 0 must be heads_q = 2"),
    "bias-queries": (lambda: tw.bias(torch.ones(7, 8)), "axis 0 must be seqlen_q = 8"),
    "bias-keys": (lambda: tw.bias(torch.ones(8, 9)), "axis 1 must be seqlen_k = 8"),
    "bias-batch": (lambda: tw.bias(torch.ones(3, 1, 8, 8)), "axis 0 must be batch = 1"),
    "function": (lambda: tw.score(lambda s, b, h, i, j: s * torch.ones(1)[h]), "axis 0 must be at least heads_q = 2"),
    "empty": (lambda: tw.score(lambda s, b, h, i, j: s * torch.ones(0)[i - j]), "is empty"),
}


@pytest.mark.parametrize(("build", "message"), WRONG_SHAPES.values(), ids=WRONG_SHAPES)
def test_a_tensor_that_does_not_fit_the_call_is_a_value_error(build, message):
    q = torch.zeros(1, 8, 2, 4)
    with pytest.raises(ValueError, match=message):
        tw.attention(q, q, q, score=build())
