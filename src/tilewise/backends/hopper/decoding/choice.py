"""The choice of a kernel for a step of decoding, and of the number of shares. Nothing here imports the DSL."""

from __future__ import annotations

from tilewise import device as devices
from tilewise import expr
from tilewise.backends.hopper.config import DTYPES, LONG, band_of
from tilewise.backends.hopper.decoding.config import BOX_ROWS, ROWS, TILES, DecodingConfig
from tilewise.backends.hopper.forward.paged_config import pool_reasons
from tilewise.problem import Problem

LEAST_DENSE, LEAST_DENSE_OF_QUERIES = 512, 2048  # keys of a dense call with one query a sequence, and with more


def choose(problem: Problem) -> DecodingConfig | None:
    """The kernel for a problem that has no reasons against a forward over its keys; None where it is no step of decoding, or another
    forward takes less time."""
    found = fitting(problem)
    return None if found is None or _others_are_faster(problem, found) else found


def _others_are_faster(problem: Problem, config: DecodingConfig) -> bool:
    """Whether another forward takes less time for a problem that a kernel fits (docs/decisions.md#hopper-decoding)."""
    if reads_ends(problem):  # another forward would read V from a copy without the keys that no query sees
        return False
    if not problem.paged:  # a forward of more warpgroups, where a sequence is soon at its end or its rows are many
        few = problem.seqlen_k < (LEAST_DENSE if problem.seqlen_q == 1 else LEAST_DENSE_OF_QUERIES)
        return few or (problem.head_dim == 64 and config.tiles.rows == ROWS[-1])
    # One sequence of which all keys are read, by Triton's splits, which another kernel merges.
    whole = problem.batch == 1 and config.paged == BOX_ROWS[0] and band_of(problem).lo is None
    return whole and problem.head_dim < 256


def fitting(problem: Problem) -> DecodingConfig | None:
    """The kernel that computes a problem, without reasons against a forward over its keys; None where it is no step of decoding, or
    one whose results must not depend on batch-mates, as those of even shares do."""
    spec = problem.spec
    if problem.packed or problem.latent or problem.quantised or spec.needs_grad or spec.deterministic:
        return None
    if spec.score is not None or spec.dropout_p or problem.head_dim_v != problem.head_dim:
        return None
    rows = next((n for n in ROWS if problem.seqlen_q * problem.group <= n), 0)
    tiles, part, found = TILES.get((problem.head_dim, rows)), part_rows(problem), ends(problem)
    if tiles is None or part is None or found is None or str(problem.dtype) not in DTYPES or not problem.seqlen_q:
        return None
    # A part of a block whose first rows no query sees must have keys to its end (pages.box_of).
    if 1 - found[0] < part or pool_reasons(problem):
        return None
    return DecodingConfig(DTYPES[str(problem.dtype)], tiles, part)


def reads_ends(problem: Problem) -> bool:
    """Whether tensors say which keys the one query of each sequence sees, all heads the same: an interval of dense keys."""
    region = problem.spec.region
    if problem.paged or problem.seqlen_q != 1 or band_of(problem) is not None or region.predicate is not None:
        return False
    return "h" not in expr.depends_on(region.lo, region.hi)


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


def shares_of(problem: Problem) -> int:
    """Into how many even shares the keys of each key head are cut: a CTA for each multiprocessor."""
    return max(1, devices.of(problem.device).cores // problem.heads_k)
