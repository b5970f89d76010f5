"""The choice of a kernel for a step of decoding, and of the number of shares. Nothing here imports the DSL."""

from __future__ import annotations

import math

from tilewise import device as devices
from tilewise import expr, sizes
from tilewise.backends.hopper.config import DTYPES, LONG, ORDERED_KEYS, band_of, cap_of, keys_before
from tilewise.backends.hopper.decoding.config import (
    BOX_ROWS,
    SEGMENT_KEYS,
    TILES,
    DecodingConfig,
    rows_of,
)
from tilewise.backends.hopper.forward.paged_config import pool_reasons
from tilewise.backends.hopper.forward.tiles import WIDEST_JOINED
from tilewise.problem import Problem

ONE_SEGMENT = 1 << 17  # blocks of a sequence that is one segment, at most
MOST_SEGMENTS = 1 << 13  # of so many blocks each, whose sum kernels count in 32 bits
LEAST_KEYS_A_QUERY = 16  # of a dense call, for each query after the first


def choose(problem: Problem) -> DecodingConfig | None:
    """The kernel for a problem that has no reasons against a forward over its keys; None where it is no step of decoding, or its queries
    are not few beside dense keys, so that tiles of more warpgroups take less time (docs/decisions.md#hopper-decoding)."""
    many = not problem.paged and problem.seqlen_k < LEAST_KEYS_A_QUERY * (problem.seqlen_q - 1)
    return None if many else fitting(problem)


def fitting(problem: Problem) -> DecodingConfig | None:
    """The kernel that computes a problem, without reasons against a forward over its keys; None where it is no step of decoding."""
    spec, cap = problem.spec, cap_of(problem)
    if problem.packed or problem.latent or problem.quantised or spec.needs_grad:
        return None
    if (cap is not None and math.isnan(cap)) or spec.dropout_p or problem.head_dim_v != problem.head_dim:
        return None
    score = "" if cap is None else "softcap"
    rows = next((n for n in rows_of(score) if problem.seqlen_q * problem.group <= n), 0)
    width = next((width for width, _ in TILES if problem.head_dim <= width), 0)
    tiles = TILES.get((width, rows))
    part, found = part_rows(problem), ends(problem)
    if tiles is None or part is None or found is None or str(problem.dtype) not in DTYPES or not problem.seqlen_q:
        return None
    # A part of a block whose first rows no query sees must have keys to its end (pages.box_of).
    if 1 - found[0] < part or pool_reasons(problem):
        return None
    if segment_of(problem, tiles.tile_n) == ONE_SEGMENT:
        keys = problem.capacity if problem.paged else problem.seqlen_k
        if problem.batch > MOST_SEGMENTS or keys > ONE_SEGMENT * tiles.tile_n:
            return None
    return DecodingConfig(DTYPES[str(problem.dtype)], tiles, part, score)


def reads_ends(problem: Problem) -> bool:
    """Whether tensors say which keys the one query of each sequence sees, all heads the same: an interval of dense keys."""
    region = problem.spec.region
    if problem.paged or problem.seqlen_q != 1 or band_of(problem) is not None or region.predicate is not None:
        return False
    # The kernel would count blocks and segments from the first key that the query sees.
    if problem.spec.everywhere and keys_before(problem) < math.inf:
        return False
    return "h" not in expr.depends_on(*[end for end in (region.lo, region.hi) if end is not None])


def part_rows(problem: Problem) -> int | None:
    """The rows that one box brings, of one page; dense keys are one page a sequence. None: no kernel has boxes so small."""
    page = problem.page_size if problem.paged else problem.seqlen_k
    if not problem.paged or page == problem.capacity:
        return BOX_ROWS[0] if page else None  # what a box has past the page's end are zeros
    return next((n for n in BOX_ROWS if page % n == 0), None)


def ends(problem: Problem) -> tuple[int, int] | None:
    """``(lo, hi)``: row i sees the keys from ``i + off + lo`` on and below ``i + off + hi``, the sequence's last one at least where it
    is the last row; None: the mask is no such band. Where a call :func:`reads_ends`, a sequence has no other keys than those it sees."""
    if reads_ends(problem):
        return -LONG, LONG
    band = band_of(problem)
    keys = problem.capacity if problem.paged else problem.seqlen_k
    if band is None or (band.start, band.stop) != (0, keys):
        return None
    off = 0 if problem.paged else keys - problem.seqlen_q  # which the ends of dense keys have in them
    lo = -LONG if band.lo is None else band.lo - off
    hi = LONG if band.hi is None else band.hi - off
    return (max(lo, -LONG), min(hi, LONG)) if hi >= 1 else None


def shares_of(problem: Problem, segment: int, tile_n: int) -> int:
    """Into how many shares the keys of each key head are cut: even ones, a CTA for each multiprocessor; or as many segments as the
    longest sequences have."""
    if segment == 1:
        return max(1, devices.of(problem.device).cores // problem.heads_k)
    keys = problem.capacity if problem.paged else problem.seqlen_k
    return problem.batch * sizes.larger(-(-keys // (segment * tile_n)), 1)


def segment_of(problem: Problem, tile_n: int) -> int:
    """The blocks of every share where results may not depend on batch-mates, or have one order of sums; 1: shares are even."""
    if problem.spec.everywhere:
        return ORDERED_KEYS // tile_n if problem.head_dim <= WIDEST_JOINED else ONE_SEGMENT
    return SEGMENT_KEYS // tile_n if problem.spec.deterministic else 1
