"""How the gradient of a bias that the batch shares is summed beside dQ: batch elements at a time, and copies of the sums.

The kernel is :mod:`kernels.shared_bias` (docs/decisions.md#triton-shared-bias).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise import device as devices
from tilewise.backends.triton.config import Config, with_stages
from tilewise.backends.triton.tiles import Tiles, batches_beside
from tilewise.problem import Problem

COPIES_BYTES = 112 << 20  # of all copies of the sums; one may take more
RESIDENT = 2  # programs of a multiprocessor


@dataclass(frozen=True)
class SharedSums:
    """How a backward sums the gradient of a bias that all batch elements share.

    Attributes:
        batches: the elements that a program takes at a time.
        of_copy: the elements of a copy, a multiple of ``batches``; the last may have fewer.
        copies: sums of the whole bias, fp32, that are added up in the end.
    """

    batches: int
    of_copy: int
    copies: int


def shared_sums(problem: Problem, config: Config) -> SharedSums | None:
    """Return how the gradient is summed beside dQ, or None where head dims are too wide for that, or there is one batch element."""
    batches = batches_beside(max(problem.head_dim, problem.head_dim_v))
    if not batches or problem.batch < 2 or problem.dtype.itemsize != 2:
        return None
    batches = min(batches, 1 << (problem.batch - 1).bit_length())
    groups, tiles = -(-problem.batch // batches), shared_tiles(problem, config)
    programs = problem.heads_q * -(-problem.seqlen_q // tiles.tile_m)
    size = 4 * programs * tiles.tile_m * -(-problem.seqlen_k // tiles.tile_n) * tiles.tile_n
    places = RESIDENT * devices.of(problem.device).cores
    most = max(min(groups, COPIES_BYTES // size), 1)
    # Rounds of groups until the last program ends; of equal counts the fewest copies.
    copies = min(range(1, most + 1), key=lambda n: -(-programs * n // places) * -(-groups // n))
    of_copy = -(-groups // copies) * batches
    return SharedSums(batches, of_copy, -(-problem.batch // of_copy))


def shared_tiles(problem: Problem, config: Config) -> Tiles:
    """Return the tiles of the pass for dQ and the gradient of a shared bias."""
    tiles = replace(config.dq, num_stages=2) if config.dq.tma else config.dq
    return with_stages(problem, "dq_dbias", tiles)
