"""The choice of a kernel for latent attention over keys that each query selected. Nothing here imports the DSL."""

from __future__ import annotations

from tilewise.backends.hopper.config import DTYPES, LONG, ROWS
from tilewise.backends.hopper.latent.config import KEYS, PAIR, WIDTH, WIDTH_V, LatentConfig, best_splits
from tilewise.backends.hopper.latent.gradients_config import GradientsConfig
from tilewise.backends.listed import mask_reasons, places_of, pool_is_rows, rows_of, rows_of_keys
from tilewise.backends.triton.listed import has_gradients
from tilewise.problem import Problem

# Query heads of a key head: of more, these gradients are sooner than Triton's (docs/decisions.md#hopper-listed-gradients).
MANY_HEADS = 16


def asked(problem: Problem) -> bool:
    """Whether a call selects 16-bit keys of latent attention's widths."""
    dims = problem.head_dim, problem.head_dim_v
    return bool(problem.spec.region.selections) and not problem.quantised and dims == (WIDTH, WIDTH_V)


def reasons(problem: Problem) -> list[str]:
    """Every reason why no kernel gathers the keys of a call that is :func:`asked`, whatever machine it is."""
    spec, what = problem.spec, f"selected keys with head dims {WIDTH} and {WIDTH_V}"
    found = [] if str(problem.dtype) in DTYPES else [f"{problem.dtype}: its kernels take float16 and bfloat16"]
    found += [] if problem.latent else [f"{what} and v outside of k's memory: its kernel takes v = k[..., :{WIDTH_V}]"]
    found += [] if problem.heads_k == 1 else [f"{what} and {problem.heads_k} key heads: its kernel takes one"]
    if spec.needs_grad and not has_gradients(problem):
        found.append(f"{what} and gradients: they add up in any order, and need the package triton")
    found += [f"{what} and a score"] if spec.score is not None else []
    found += [f"{what} and dropout"] if spec.dropout_p else []
    found += [f"{what} under vmap"] if spec.mapped else []
    if problem.softmax_scale <= 0:
        found.append(f"softmax_scale {problem.softmax_scale} is not above 0")
    rows = max(rows_of_keys(problem), rows_of(problem))
    found += [f"{rows} rows, {LONG} or more"] if rows >= LONG else []
    found += (
        []
        if pool_is_rows(problem)
        else [f"{what} in pages that are not rows one behind the other, at multiples of 16 bytes"]
    )
    return found + mask_reasons(problem)


def own_gradients(problem: Problem) -> list[GradientsConfig]:
    """The kernels of a call's gradients, if it gets our own."""
    if not (problem.spec.needs_grad and asked(problem) and problem.group > MANY_HEADS):
        return []
    return [GradientsConfig(DTYPES[str(problem.dtype)], queries) for queries in (False, True)]


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
