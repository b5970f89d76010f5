"""The choice of a kernel that gathers the keys that each query selected, where its heads fill a tile. Nothing here imports the DSL."""

from __future__ import annotations

from tilewise.backends import listed
from tilewise.backends.hopper.config import DTYPES, LONG, MULTIPLE, ROWS
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.tiles import SELECTED_TILES, Tiles
from tilewise.backends.listed import places_of, rows_of
from tilewise.backends.triton.listed import has_gradients
from tilewise.problem import Problem

WIDEST = max(width for width, _ in SELECTED_TILES)
PART, PART_OF_STEP = 2, 6  # of all pairs, that those of lists may be in a forward, and in one with gradients
WHOLE = 64  # keys of a block, of which tiles with a bit for each pair hold nothing else


def serves(problem: Problem) -> bool:
    """Whether a forward gathers the selected keys of one key head, and a call takes less time than tiles with a bit for each pair would."""
    spec, dims = problem.spec, (problem.head_dim, problem.head_dim_v)
    if (
        not (listed.asked(problem) and listed.pool_is_rows(problem))
        or problem.heads_k != 1
        or problem.softmax_scale <= 0
    ):
        return False
    if str(problem.dtype) not in DTYPES or max(dims) > WIDEST or any(n % MULTIPLE for n in dims):
        return False
    if spec.needs_grad and not has_gradients(problem):
        return False
    anyhow = problem.packed or problem.paged  # no tiles with bits are of these
    return max(listed.rows_of_keys(problem), rows_of(problem)) < LONG and (anyhow or _is_sooner(problem))


def _is_sooner(problem: Problem) -> bool:
    """Whether a query's keys and the rows of its tile are a part of the pairs of all keys and its heads: what tiles with bits visit."""
    places, block = places_of(problem)
    rows = -(-problem.group // tiles_of(problem).tile_m) * tiles_of(problem).tile_m
    part = PART_OF_STEP if problem.spec.needs_grad else PART
    return block < WHOLE and part * places * rows <= problem.seqlen_k * problem.group


def tiles_of(problem: Problem) -> Tiles:
    """The tiles that hold a problem's head dims and query heads."""
    wide = max(problem.head_dim, problem.head_dim_v)
    fitting = [tiles for (width, _), tiles in SELECTED_TILES.items() if wide <= width]
    return fitting[0] if problem.group <= ROWS else fitting[1]


def choose(problem: Problem) -> Config:
    """The kernel for a problem that it :func:`serves`."""
    return Config(tiles_of(problem), DTYPES[str(problem.dtype)], "upper", selected=True)
