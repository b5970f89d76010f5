"""Scores: what happens to the products of queries and keys (:mod:`tilewise.scores.catalogue`), and what their text means
(:mod:`tilewise.scores.reading`). The names below are those that the rest of tilewise uses."""

from tilewise.scores.catalogue import THEN, Score, ScoreFunction, as_score
from tilewise.scores.reading import expression, symbols_of

__all__ = ["THEN", "Score", "ScoreFunction", "as_score", "expression", "symbols_of"]
