"""The choice of a kernel for latent attention over keys that each query selected. Nothing here imports the DSL."""

from __future__ import annotations

from tilewise import expr
from tilewise.backends.hopper.config import DTYPES, LONG, ROWS
from tilewise.backends.hopper.latent.config import KEYS, PAIR, WIDTH, WIDTH_V, LatentConfig, best_splits
from tilewise.problem import Problem
from tilewise.selections import keys_of_entry


def asked(problem: Problem) -> bool:
    """Whether a call selects keys of latent attention's widths, in no pages."""
    dims = problem.head_dim, problem.head_dim_v
    return bool(problem.spec.region.selections) and not problem.paged and dims == (WIDTH, WIDTH_V)


def reasons(problem: Problem) -> list[str]:
    """Every reason why no kernel gathers the keys of a call that is :func:`asked`, whatever machine it is."""
    spec, what = problem.spec, f"selected keys with head dims {WIDTH} and {WIDTH_V}"
    found = [] if str(problem.dtype) in DTYPES else [f"{problem.dtype}: its kernels take float16 and bfloat16"]
    found += [] if problem.latent else [f"{what} and v outside of k's memory: its kernel takes v = k[..., :{WIDTH_V}]"]
    found += [] if problem.heads_k == 1 else [f"{what} and {problem.heads_k} key heads: its kernel takes one"]
    found += [f"{what} and gradients"] if spec.needs_grad else []
    found += [f"{what} and a score"] if spec.score is not None else []
    found += [f"{what} and dropout"] if spec.dropout_p else []
    found += [f"{what} under vmap"] if spec.mapped else []
    if problem.softmax_scale <= 0:
        found.append(f"softmax_scale {problem.softmax_scale} is not above 0")
    rows = max(problem.k.shape[0] * (1 if problem.packed else problem.k.shape[1]), rows_of(problem))
    found += [f"{rows} rows, {LONG} or more"] if rows >= LONG else []
    return found + mask_reasons(problem)


def mask_reasons(problem: Problem) -> list[str]:
    """The reasons against the mask of a call with selected keys."""
    region, what = problem.spec.region, "selected keys beside"
    ends = [e for e in (region.lo, region.hi) if e is not None]
    # The keys of a list are one query's: what a mask hides of them has to be an interval, the same for all heads.
    found = [] if region.predicate.op == "selected" else [f"{what} another mask that is no interval of keys"]
    if not found and keys_of_entry(region.predicate)[1]:
        found = ["selected keys in a part of a longer sequence, whose keys do not begin with an entry"]
    return found + ([f"{what} a mask of each head"] if "h" in expr.depends_on(*ends) else [])


def rows_of(problem: Problem) -> int:
    """Rows of q, each with a list of its own."""
    return problem.seqlen_q * (1 if problem.packed else problem.batch)


def tiles_of(problem: Problem) -> int:
    """How many tiles a launch has: those of each row of q."""
    return rows_of(problem) * -(-problem.group // ROWS)


def choose(problem: Problem) -> LatentConfig:
    """The kernel for a call without :func:`reasons`."""
    splits = splits_of(problem)
    return LatentConfig(DTYPES[str(problem.dtype)], splits > 1, splits > PAIR, selected=True)


def splits_of(problem: Problem) -> int:
    """Into how many splits lists are cut. With ``deterministic`` they depend on one sequence's shapes; packed, no host knows these."""
    deterministic = problem.spec.deterministic
    if deterministic and problem.packed:
        return 1
    tiles = tiles_of(problem) // (max(problem.batch, 1) if deterministic else 1)
    return best_splits(problem, tiles, -(-places_of(problem)[0] // KEYS))


def places_of(problem: Problem) -> tuple[int, int]:
    """How many keys a list may name, and how many an entry of it does."""
    selection = problem.spec.region.predicate
    block = keys_of_entry(selection)[0]
    return problem.extras[selection.args[0][1]].shape[-1] * block, block
