"""The choice of a kernel for a step of decoding, and of the number of shares. Nothing here imports the DSL."""

from __future__ import annotations

from tilewise import device as devices
from tilewise.backends.hopper.config import DTYPES, band_of
from tilewise.backends.hopper.decoding.config import MOST_HEADS, PART, TILES, DecodingConfig
from tilewise.backends.hopper.forward.paged_config import pool_reasons
from tilewise.problem import Problem


def choose(problem: Problem) -> DecodingConfig | None:
    """The kernel for a problem that has no reasons against a forward over its keys; None where it is no step of decoding, or one whose
    results must not depend on batch-mates, as those of even shares do."""
    spec, band = problem.spec, band_of(problem)
    plain = not (problem.packed or problem.latent or problem.quantised or spec.needs_grad or spec.deterministic)
    if not plain or problem.seqlen_q != 1 or problem.group > MOST_HEADS or spec.score is not None or spec.dropout_p:
        return None
    tiles = TILES.get(problem.head_dim)
    if tiles is None or problem.head_dim_v != problem.head_dim or str(problem.dtype) not in DTYPES or band is None:
        return None
    # Of one sequence splits that another kernel merges take less time (docs/decisions.md#hopper-decoding).
    if problem.paged and problem.batch == 1:
        return None
    keys = problem.capacity if problem.paged else problem.seqlen_k
    band = band if problem.paged else band.cut(1)
    sees_all = band.lo is None and (band.start, band.stop) == (0, keys) and (band.hi is None or band.hi == 1)
    if not sees_all or not keys or (problem.paged and problem.page_size % PART and problem.page_size != keys):
        return None
    return None if pool_reasons(problem) else DecodingConfig(DTYPES[str(problem.dtype)], tiles)


def shares_of(problem: Problem) -> int:
    """Into how many even shares the keys of each key head are cut: a CTA for each multiprocessor."""
    return max(1, devices.of(problem.device).cores // problem.heads_k)
