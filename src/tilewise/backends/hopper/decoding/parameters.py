"""The parameters of a launch of decoding, in order. Imports no DSL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.hopper.parameters import (
    COUNTS,
    FP32,
    LENGTHS,
    PAGES,
    POOL,
    Parameter,
    Parameters,
    numbers,
    tiled,
)

if TYPE_CHECKING:
    from tilewise.backends.hopper.decoding.config import DecodingConfig


def parameters(config: DecodingConfig) -> Parameters:
    """The parameters of :func:`tilewise.backends.hopper.decoding.kernel.launch`."""
    tiles, lanes = config.tiles, 32 * config.tiles.row_warps
    rows, pool = ("queries", "batch", "heads_q", "dim"), ("pages", "seqlen_k", "heads_k", "dim")
    return (
        tiled("q", *rows), tiled("k", *pool), tiled("v", *pool), tiled("o", *rows),
        Parameter("lse", FP32, ("queries", "heads_q", "batch"), 0), Parameter("sink", FP32, ("heads_q",)),
        (   # As DecodingParams has them.
            *numbers("shares", "segment", "cached", "sinks"), *numbers("scale2", "cap2", dtype=FP32), *numbers("lo", "hi"), LENGTHS, PAGES,
            Parameter("part_o", FP32, ("states", tiles.fours, lanes, 4), None, 16),
            Parameter("part_lse", FP32, ("states", lanes, 2 * tiles.own_rows), None, 16),
            COUNTS, *POOL,
        ),
    )  # fmt: skip
