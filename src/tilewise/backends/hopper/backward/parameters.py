"""The parameters of a backward's launch, in order. Imports no DSL.

What the pass over keys, or over queries, has alone begins with the name of the pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, SHEET_BLOCK, PlanRow, left_elements
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.parameters import (
    DIVISION,
    DROPOUT,
    FP32,
    HEADS,
    INT32,
    ORDERED,
    PORTION,
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
    from tilewise.backends.hopper.backward.config import Backward

Q_ROWS, K_ROWS = ("batch", "seqlen_q", "heads_q"), ("batch", "seqlen_k", "heads_k")


def parameters(config: Backward) -> Parameters:
    """The parameters of :func:`tilewise.backends.hopper.backward.launch.launch`: tensors that it reads, that it writes, and numbers."""
    found = [tiled("q", *Q_ROWS, "dim"), tiled("k", *K_ROWS, "dim"), tiled("v", *K_ROWS, "dim_v")]
    found += (tiled(name, *Q_ROWS, "dim_v") for name in ("o", "do"))
    found += (Parameter(name, FP32, (*HEADS, "seqlen_q")) for name in ("lse", "dlse"))
    # The band's ends; for each pass heads of a section and CTAs; scales as BackwardParams has them.
    found += numbers("band_lo", "band_hi", "section_k", "ctas_k", "section_q", "ctas_q")
    found += numbers("scale", "scale2", "cap2", dtype=FP32)
    # In the pass over keys a mask is read by columns: the queries that see a key, and lists of query blocks.
    found += of_mask(config.form, "seqlen_k", config.keys.tile_m, "keys_")
    found += of_mask(config.form, "seqlen_q", config.keys.tile_m, "queries_") if config.queries else ()
    found += DROPOUT if config.dropout else ()
    found += SCORES[config.score].reads
    found += PORTION if config.continues else ()
    found += DIVISION if config.parted else ()
    found += ORDERED if config.orders else ()
    found += (*config.traced.leaf_parameters, *config.traced.number_parameters)
    if config.packed:
        # Each pass takes its tiles from a queue of its own, since both may be at work at a time; `portion`: the number of the launch among
        # those that share the heads.
        queues = (Parameter(name, INT32, (1,)) for name in ("counts_k", "counts_q"))
        found += (*STARTS, *queues, *SEEN, *numbers(*["portion"] * config.packs_sheet))
    tensors, scalars = ([x for x in found if (x.shape is None) == number] for number in (False, True))
    return tuple(tensors), tuple(made(config)), tuple(scalars)


def made(config: Backward) -> list[Parameter]:
    """The tensors that a launch writes."""
    keys, score = config.keys, SCORES[config.score]
    found = [tiled("dq", *Q_ROWS, "dim"), tiled("dk", *K_ROWS, "dim"), tiled("dv", *K_ROWS, "dim_v")]
    # Whole query blocks, and at multiples of 16 bytes, since a bulk copy brings their rows with a block of Q or dO.
    words = "words" if config.subtracts else "statistics"
    found += (Parameter(*x, 4, 16) for x in (("lse2", FP32, (*HEADS, words)), ("delta", FP32, (*HEADS, "statistics"))))
    if keys.sums_dq:
        # One part for each warpgroup and query block, in the order of the registers that add to it.
        found.append(Parameter("dq_sums", FP32, (*HEADS, "blocks", KEY_GROUPS, keys.part_elements), 4, 16))
    if config.stores_first or config.orders:  # of each part of a block of dQ
        found.append(Parameter("semaphores", INT32, (*HEADS, "block_parts")))
    if keys.keeps_ds:
        blocks = ("sheet_blocks",) if config.packed else ("sheet_heads", "sheet_keys", "sheet_queries")
        found.append(Parameter("sheet", "", (*blocks, SHEET_BLOCK), SHEET_BLOCK, 128))
    if config.continues:  # dQ of the keys of earlier launches
        shape = "sum_heads", "sum_tiles", "sum_parts", ROWS * config.queries.width
        found.append(Parameter("kept_sums", FP32, shape, SHEET_BLOCK, 128))
    if config.planned:
        found.append(Parameter("plan", INT32, (len(PlanRow), "sequences")))
    if config.parted:  # dK and dV of the parts of shared tiles
        found.append(Parameter("tile_parts", FP32, ("shared_parts", KEY_GROUPS, left_elements(keys)), 4, 16))
    found += [Parameter("keys_queue", INT32, (1,))] * config.makes_queue
    return found + [score.gradient] * config.trained
