"""The reasons against a forward: what no kernel computes on any machine, and what others compute faster on this one. Imports no DSL."""

from __future__ import annotations

import math
import re

from tilewise.backends.hopper.config import (
    DTYPES,
    LONG,
    MAX_COLUMNS,
    MULTIPLE,
    ROWS,
    band_of,
    is_traced,
    keys_before,
    reasons_of_slopes,
)
from tilewise.backends.hopper.forward.config import choose, leaves_idle, mean_seqlen_q
from tilewise.backends.hopper.forward.tiles import (
    MAX_HEAD_DIM,
    ONE_ORDER_TILES,
    PAGE_ROWS,
    TABLE,
    WIDEST_JOINED,
    tiles_of_one_order,
)
from tilewise.problem import Problem


def reasons(problem: Problem, widest: int | None = None) -> list[str]:
    """Every reason why no forward kernel computes a problem, whatever machine it is. ``widest``: of its head dims; None: MAX_HEAD_DIM."""
    widest = widest or MAX_HEAD_DIM
    wide, dims = max(problem.head_dim, problem.head_dim_v), (problem.head_dim, problem.head_dim_v)
    found = [] if str(problem.dtype) in DTYPES else [f"{problem.dtype}: its kernels take float16 and bfloat16"]
    if wide > widest:
        found.append(f"head_dim {wide} is above {widest}")
    # The copy engine takes rows that begin at multiples of 16 bytes.
    if any(dim % MULTIPLE for dim in dims):
        found.append(f"head dims {dims[0]} and {dims[1]} must be multiples of {MULTIPLE}")
    found += _reasons_of_packed(problem) if problem.packed and not problem.paged else []
    found += _reasons_of_wide(problem) if MAX_COLUMNS < wide <= MAX_HEAD_DIM and not problem.paged else []
    # A row's maximum is scaled after it is found, which is right for a positive scale alone.
    if problem.softmax_scale <= 0 and not is_traced(problem):
        found.append(f"softmax_scale {problem.softmax_scale} is not above 0")
    return found


def reasons_of_order(problem: Problem) -> list[str]:
    """Every reason why the sums of a row like this problem's have no one order in all calls. Lengths, pages and packing play no part."""
    dims, text = (problem.head_dim, problem.head_dim_v), problem.spec.mask_text
    found = [] if str(problem.dtype) in DTYPES else [f"{problem.dtype}: bfloat16 and float16 have it"]
    if tiles_of_one_order(*dims) is None or any(dim % MULTIPLE for dim in dims):
        found.append(
            f"head dims {dims[0]} and {dims[1]}: multiples of {MULTIPLE} up to {ONE_ORDER_TILES[-1].width} have it"
        )
    found += ["a score"] if problem.spec.score_text else []
    # In pages a narrower window may lie within what one box brings (``pages.box_of``). Wide heads have the kernels of other calls, which
    # begin at the first key that a row sees.
    least = PAGE_ROWS[0] if max(dims) <= WIDEST_JOINED else math.inf
    if not all(_ORDERED.fullmatch(x) for x in text.split(" & ") if x) or keys_before(problem) + 1 < least:
        windows = f"windows of {PAGE_ROWS[0]} keys or more, up to head dim {WIDEST_JOINED}"
        found.append(f"the mask {text}: causal, key_lengths, no mask, and {windows}, have it")
    return [f'deterministic="everywhere" with {x}' for x in found]


_ORDERED = re.compile(r"causal\(\)|window\(\w+, \w+\)|key_range\(0, [^&]*\)")


def _reasons_of_wide(problem: Problem) -> list[str]:
    """The reasons of the kernels that compute O in pieces of its columns: they know bands and ends of rows, and nothing else."""
    dims, spec = (problem.head_dim, problem.head_dim_v), problem.spec
    found, wide = [], f"head_dim {max(dims)}, above {MAX_COLUMNS}, with"
    if min(dims) <= MAX_COLUMNS:
        found.append(f"head dims {dims[0]} and {dims[1]}, of which one alone is above {MAX_COLUMNS}")
    found += [] if spec.score is None else [f"{wide} a score"]
    found += [f"{wide} dropout"] if spec.dropout_p else []
    found += [] if spec.region.predicate is None else [f"{wide} a mask of pairs"]
    return found


def reasons_of_few(problem: Problem) -> list[str]:
    """The reasons against few queries with a head dim above 256: another backend's smaller tiles and splits of keys take less time."""
    wide, queries = max(problem.head_dim, problem.head_dim_v), mean_seqlen_q(problem)
    if not MAX_COLUMNS < wide <= MAX_HEAD_DIM or problem.paged:
        return []
    # A tile has the rows of one head, and its keys are not split.
    if queries < ROWS:
        return [f"head_dim {wide}, above {MAX_COLUMNS}, with {queries} queries, fewer than {ROWS}"]
    idle = not reasons(problem) and leaves_idle(choose(problem), problem)
    return [f"head_dim {wide}, above {MAX_COLUMNS}, with tiles for less than half of the machine"] if idle else []


def _reasons_of_packed(problem: Problem) -> list[str]:
    rows, found = max(problem.seqlen_q, problem.seqlen_k), []
    if band_of(problem) is None:
        found.append("packed sequences with a mask other than causal, window and a key_range of numbers")
    # Coordinates of the ragged views that tell the copy engine where a sequence ends are below LONG.
    if rows >= LONG:
        found.append(f"{rows} packed rows, {LONG} or more")
    found += _reasons_of_packed_score(problem) if is_traced(problem) else []
    return found + (_reasons_of_packed_dropout(problem) if problem.spec.dropout_p else [])


def _reasons_of_packed_score(problem: Problem) -> list[str]:
    why = reasons_of_slopes(problem)
    if why is None:
        return ["packed sequences with a score other than one softcap and ALiBi"]
    wide, widest = max(problem.head_dim, problem.head_dim_v), max(t.width for r in TABLE.values() if (t := r.alibi))
    # No kernel has both: a pair's draw takes the registers of its bias.
    why += ["dropout"] if problem.spec.dropout_p else []
    why += [f"head_dim {wide}, above {widest}"] if wide > widest else []
    return [f"packed sequences with ALiBi and {reason}" for reason in why]


def _reasons_of_packed_dropout(problem: Problem) -> list[str]:
    band, found = band_of(problem), []
    # Kernels count a sequence's keys from the first one that some row sees, the draws from its first key of all.
    if band is not None and (band.form == "band" or band.start > 0):
        found.append("packed sequences with dropout and a mask whose rows begin after the first key")
    if problem.spec.score is not None and not is_traced(problem):
        found.append("packed sequences with dropout and a softcap")
    wide, widest = max(problem.head_dim, problem.head_dim_v), max(t.width for r in TABLE.values() if (t := r.dropout))
    if wide > widest:
        found.append(f"packed sequences with dropout and head_dim {wide}, above {widest}")
    return found
