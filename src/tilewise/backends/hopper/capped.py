"""The short polynomials by which whole blocks of a softcap compute tanh while scores are small (docs/decisions.md#hopper-softcap)."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import NamedTuple

LN_2 = math.log(2.0)
TINY, HUGE = 2.0**-126, 2.0**127  # fp32 has all digits between them


class Level(NamedTuple):
    """``tanh(x) = x P(x² - reach²)`` for ``|x| <= reach``; the coefficients of P, lowest power first.

    Minimax fits of the relative error times ``1 + exp(-(x / (0.35 reach))²)``: it is 1.2e-7 at most, two roundings to fp32, and half of
    that for small scores, since all of a row's are off alike there, which lse shows.
    """

    reach: float
    coefficients: tuple[float, ...]


# The fewest multiply-adds first.
LEVELS = (
    Level(0.2, (0.9868767222100179, -0.3228688707851131, 0.13028849511799942)),
    Level(0.4, (0.9498722960843062, -0.2945009336055222, 0.10983951128406895, -0.04775521596419596)),
    Level(0.75, (0.846865240715332, -0.22247422342821746, 0.07201074559547475, -0.024246675320565843, 0.0062287736220866695,
                 -0.0047834602495715394)),
)  # fmt: skip
COUNT = sum(1 + len(level.coefficients) for level in LEVELS)


def numbers(scale2: float, cap2: float) -> tuple[float, ...]:
    """``limit, *coefficients`` of each level, with ``scale2 tanh(score / cap) = score P(v)``, ``v = score² - limit``, for ``v <= 0``.

    The factors of a score are in the coefficients, and v's sign says whether P holds: neither a multiplication nor a test is left.
    The levels alternate, highest powers first: numbers that lie side by side are read as a pair, and one instruction takes one number
    from the uniform registers, so that a pair of two of its numbers would take registers of every thread.
    A limit of -inf, so that P never holds, where fp32 does not have these numbers.

    Args:
        scale2: ``log2(e) cap``.
        cap2: ``2 log2(e) softmax_scale / cap``.
    """
    factor = cap2 * (LN_2 / 2)  # x = score factor
    found = []
    for reach, coefficients in LEVELS:
        try:
            limit = (reach / factor) ** 2
            scaled = [scale2 * c * factor ** (2 * n + 1) for n, c in enumerate(coefficients)]
        except (OverflowError, ZeroDivisionError):
            limit, scaled = 0.0, [0.0] * len(coefficients)
        fits = all(TINY <= abs(x) <= HUGE for x in (limit, *scaled))
        found.append([limit, *scaled[::-1]] if fits else [-float("inf"), *[0.0] * len(scaled)])
    return tuple(x for row in zip_longest(*found) for x in row if x is not None)


def by_level(numbers: tuple) -> list[tuple]:
    """``(limit, coefficients)`` of each level, lowest power first, from :func:`numbers`."""
    rest = iter(numbers)
    sizes = [1 + len(level.coefficients) for level in LEVELS]
    rows = [[next(rest) if size > n else None for size in sizes] for n in range(max(sizes))]
    columns = [[x for x in column if x is not None] for column in zip(*rows, strict=True)]
    return [(limit, tuple(scaled[::-1])) for limit, *scaled in columns]
