"""The parameters of a forward's launch, in order. Imports no DSL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.hopper import capped
from tilewise.backends.hopper.parameters import (
    ANY,
    DROPOUT,
    FP32,
    HEADS,
    LENGTHS,
    LISTS,
    PAGES,
    POOL,
    QUEUE,
    SCORES,
    SEEN,
    STARTS,
    Parameter,
    Parameters,
    numbers,
    of_mask,
    tiled,
)

if TYPE_CHECKING:
    from tilewise.backends.hopper.forward.config import Config


STATISTICS = 2  # fours of a thread's maxima and sums, of the segments that wait and of the one that ends


def parameters(config: Config) -> Parameters:
    """The parameters of :func:`tilewise.backends.hopper.forward.kernel.launch`."""
    rows, keys = ("batch", "seqlen_q", "heads_q"), ("batch", "seqlen_k", "heads_k")
    if config.paged:  # (page, row of the page, head, column)
        keys = "pages", *keys[1:]
    heads = ANY if config.selected else "heads_q"  # a query's heads are rows
    if config.selected:
        keys = 1, *keys[1:]
    return (
        tiled("q", *rows, "dim"), tiled("k", *keys, "dim"), tiled("v", *keys, "dim_v"), tiled("o", *rows, "dim_v"),
        Parameter("lse", FP32, (*HEADS, "seqlen_q")), Parameter("sink", FP32, (heads,)), tuple(others(config)),
    )  # fmt: skip


def others(config: Config) -> list[Parameter]:
    """The numbers of every launch, and what only some kernels have."""
    # The band's ends, heads of a section, CTAs, whether there are sinks; in base 2, as ForwardParams has them.
    found = [*numbers("band_lo", "band_hi", "section_heads", "ctas", "sinks"), *numbers("scale2", "cap2", dtype=FP32)]
    if config.split:
        # The states of splits of keys are stored two numbers at a time (instructions.put_pair): rows at multiples of 8 bytes.
        states = "splits", *HEADS, "seqlen_q"
        found += (
            Parameter("part_o", FP32, (*states, config.tiles.width_v), 2, 16),
            Parameter("part_lse", FP32, states, 1, 16),
        )
    if config.tiles.segment:
        # Of each warpgroup O, and behind it statistics of rows, as forward.segments has them.
        fours = config.tiles.width_v // 8 + STATISTICS
        found += (Parameter("part_o", FP32, ("ctas", config.tiles.warpgroups, fours, 128, 4), None, 16),)
    found += of_mask(config.form, "seqlen_q", config.tiles.tile_n)
    found += DROPOUT if config.dropout else ()
    found += SCORES[config.score].reads
    found += LISTS if config.selected else ()
    if config.paged:
        found += STARTS[0], QUEUE, LENGTHS, PAGES, *POOL
    else:
        found += (*STARTS, *SEEN) if config.packed else ()
        found += (QUEUE,) if config.queued else ()
    found += config.traced.leaf_parameters
    short = [f"number{n}" for n in range(capped.COUNT)] if config.short_tanh else []
    return [*found, *config.traced.number_parameters, *numbers(*short, dtype=FP32)]
