"""Scores: what happens to ``s = softmax_scale * q·k`` before the mask and the softmax.

A :class:`Score` is text and tensors, as a Mask is: stages joined by ``>>`` ("then"), each an expression of ``s``, the
indices ``b h i j``, ``off`` and tensor leaves. Floating leaves get gradients. :mod:`tilewise.scores.reading` reads the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tilewise import expr
from tilewise.caching import check_forms, form
from tilewise.expr import Expr, apply, number, symbol, trace
from tilewise.masks import Mask, broadcast_lookup

S, B, H, I, J, OFF = (symbol(name) for name in ("s", "b", "h", "i", "j", "off"))
THEN = " >> "
ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]  # of (s, b, h, i, j); traced, as a mask's is


class Score:
    """A change of the scores; made by the functions of this module, composed by ``>>``: the left one first.

    It holds the tensors that it reads. A module makes a score of its parameter in ``forward``: ``fully_shard``, ``functional_call`` and
    ``load_state_dict(assign=True)`` give a module other parameters, and a score made before still reads the old ones.
    """

    def __init__(self, text: str, leaves: tuple[torch.Tensor, ...] = ()):
        self.text, self.parts = text, leaves
        self.forms = tuple([form(t) for t in leaves])

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the text reads, in the order of the text."""
        check_forms(self.text, self.parts, self.forms)
        return self.parts

    def __rshift__(self, other: Score) -> Score:
        if not isinstance(other, Score):
            raise ValueError(
                f"a score is followed by a score, got {type(other).__name__}; wrap it: tw.score(fn), tw.bias(t); a mask goes to mask="
            )
        if not (self.text and other.text):  # one that changes nothing
            return self if self.text else other
        found = Score(f"{self.text}{THEN}{other.text}", (*self.parts, *other.parts))
        found.forms = (*self.forms, *other.forms)
        return found

    def __bool__(self) -> bool:
        raise ValueError("a score has no truth value; `and`, `or` and `not` would drop one: compose scores with >>")

    if not TYPE_CHECKING:  # a type checker refuses these operators itself

        def __and__(self, other):
            raise ValueError("scores are composed with >>, the left one first: tw.softcap(30.0) >> tw.bias(t)")

        __add__ = __or__ = __and__

        def __rrshift__(self, other):
            raise ValueError(
                f"a score follows a score, got {type(other).__name__}; a mask is a keyword beside it: mask="
            )

    def __repr__(self) -> str:
        return f"Score({self.text})"


def _made(e: Expr) -> Score:
    text, leaves = expr.to_text(e)
    return Score(text, leaves)


def score(fn: ScoreFunction) -> Score:
    """``s`` replaced by ``fn(s, b, h, i, j)``: FlexAttention's ``score_mod``.

    Args:
        fn: elementwise in the score ``s`` and four integer scalars; may index tensors with them (``table[h, i - j]``),
            which then get gradients; an index out of range is clamped. It is called once. A result of ``-inf`` hides the pair,
            but a NaN in its row of v still reaches o; a mask keeps it out.

    Raises:
        NotImplementedError: an operation cannot be traced (``if``, ``int()``, reductions); the message names it.
    """
    return _of_function(trace(fn, ("s", "b", "h", "i", "j")))


def score_wrapping(fn: ScoreFunction) -> Score:
    """:func:`score` of a function in which whole numbers of 8 and 16 bits wrap around, as they do in tensors of torch."""
    return _of_function(expr.wrapping(trace(fn, ("s", "b", "h", "i", "j"))))


def _of_function(e: Expr) -> Score:
    if expr.kind(e) == "bool":
        raise ValueError(
            f"score(fn): fn must return a number, it returned a truth value: {e}; for masks use tw.keep(fn)"
        )
    return _made(e)


def softcap(cap: float) -> Score:
    """``cap * tanh(s / cap)`` (Gemma 2); ``cap`` a finite number > 0."""
    if isinstance(cap, torch.Tensor):  # as a number it would lose its gradient
        raise ValueError(
            "softcap(cap): cap must be a number, got a tensor; write a learned cap as a score: "
            "tw.score(lambda s, b, h, i, j: cap * torch.tanh(s / cap))"
        )
    symbolic = isinstance(cap, (int, float, torch.SymInt, torch.SymFloat))  # of which Dynamo tells no attributes
    if not (symbolic or hasattr(cap, "__float__")) or not 0 < cap < math.inf:
        raise ValueError(f"softcap(cap): cap must be > 0 and finite, got {cap!r}")
    cap = float(expr.concrete(cap))
    return _made(number(cap) * apply("tanh", S / number(cap)))


def alibi(slopes: torch.Tensor) -> Score:
    """``s - slope * |i + off - j|`` (Press et al. 2022); ``slopes`` floating, ``(heads_q,)`` or ``(batch, heads_q)``."""
    if not isinstance(slopes, torch.Tensor) or not slopes.dtype.is_floating_point or slopes.ndim not in (1, 2):
        found = f"{slopes.dtype} {tuple(slopes.shape)}" if isinstance(slopes, torch.Tensor) else type(slopes).__name__
        instead = (
            "convert it: slopes.float()"
            if isinstance(slopes, torch.Tensor) and slopes.ndim in (1, 2)
            else "one slope a head"
        )
        instead = "make it one: torch.tensor(slopes)" if isinstance(slopes, (list, tuple)) else instead
        raise ValueError(
            f"alibi(slopes) takes a floating tensor (heads_q,) or (batch, heads_q), got {found}; {instead}"
        )
    index = (H,) if slopes.ndim == 1 else (B, H)
    return _made(S - broadcast_lookup(slopes, index, "alibi(slopes)") * apply("abs", I + OFF - J))


def bias(t: torch.Tensor) -> Score:
    """``s + t[b, h, i, j]``; ``t`` floating, broadcastable to ``(batch, heads_q, seqlen_q, seqlen_k)``.

    On a GPU, a ``t`` ``(..., seqlen_q, seqlen_k)`` is read in place if it is expanded, or if its last stride is 1 and its rows begin at
    multiples of 16 bytes. Otherwise each call copies it.
    """
    if not isinstance(t, torch.Tensor) or not t.dtype.is_floating_point:
        found = t.dtype if isinstance(t, torch.Tensor) else type(t).__name__
        raise ValueError(f"bias(t) takes a floating tensor, got {found}; {_instead_of_bias(t)}")
    return _made(S + broadcast_lookup(t, (B, H, I, J), "bias(t)"))


def _instead_of_bias(t: object) -> str:
    """Return what to write instead of ``tw.bias(t)``."""
    if not isinstance(t, torch.Tensor):
        return "a function is tw.score(fn)" if callable(t) else "make it one: torch.tensor(t, dtype=torch.float32)"
    if t.dtype == torch.bool:
        return "a bool tensor is a mask: mask=t"
    return "pass its real part: t.real" if t.is_complex() else "convert it: t.float()"


def as_score(value: Score | torch.Tensor | ScoreFunction | None) -> Score:
    """The Score of whatever the ``score=`` keyword takes: a Score, a floating tensor (``bias``) or a function."""
    if value is None:
        return Score("")
    if isinstance(value, Score):
        return value
    if isinstance(value, torch.Tensor):
        return bias(value)
    if not callable(value):
        hint = f"; a softcap of that is score=tw.softcap({value})" if isinstance(value, (int, float)) else ""
        hint = "; it goes to mask=" if isinstance(value, Mask) else hint
        hint = "; a score by name is score=tw.softcap(50.0)" if isinstance(value, str) else hint
        hint = "; compose scores with >>" if isinstance(value, (list, tuple)) else hint
        raise ValueError(
            f"score= takes a Score, a float tensor or a function of (s, b, h, i, j), got {type(value).__name__}{hint}"
        )
    return score(value)
