"""The parameters of a launch of latent attention, in order. Imports no DSL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.hopper.parameters import (
    ANY,
    FP32,
    LENGTHS,
    LISTS,
    PAGES,
    POOL,
    STARTS,
    Parameter,
    Parameters,
    numbers,
    tiled,
)

if TYPE_CHECKING:
    from tilewise.backends.hopper.latent.config import LatentConfig


def parameters(config: LatentConfig) -> Parameters:
    """The parameters of :func:`tilewise.backends.hopper.latent.kernel.launch`."""
    width, width_v = config.tiles.width, config.tiles.width_v
    k, found = tiled("k", "pages", "seqlen_k", "heads_k", width), [STARTS[0], LENGTHS, PAGES, POOL[0]]
    if config.e4m3:
        k = k._replace(dtype="uint8", step=16)
        found += (Parameter(name, FP32, (ANY, "heads_k"), 0) for name in ("k_scale", "v_scale"))
    if config.selected:
        found = [*LISTS]
    if config.split:
        # States are stored two numbers at a time (instructions.put_pair), so their rows are at multiples of 8 bytes.
        states = "splits", 1, "heads_q", "rows"
        found += Parameter("part_o", FP32, (*states, width_v), 2, 16), Parameter("part_lse", FP32, states, 1, 16)
    return (
        tiled("q", 1, "rows", "heads_q", width), k, tiled("o", 1, "rows", "heads_q", width_v),
        Parameter("lse", FP32, (1, "heads_q", "rows"), 0), Parameter("sink", FP32, ("heads_q",)), tuple(found),
        # As LatentParams has them; the grid's tiles and splits.
        (*numbers("lo", "hi", "tiles", "splits", "least", "sinks", "even"), Parameter("scale2", FP32)),
    )  # fmt: skip
