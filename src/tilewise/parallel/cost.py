"""The cost of an attention over ranks beside its products, by scheme: bytes that each rank receives and copies, and their time.

A step is a forward and, where gradients are wanted, its backward. The products are left out: they are the same in every scheme.
The constants are those of H200s joined by NVLink under NCCL (docs/parallel.md, "Which scheme"); other machines have others, but
what is compared are two exchanges over the same links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilewise.problem import Problem

RECEIVED_PER_SECOND = 330e9
COPIED_PER_SECOND = 2e12  # of a copy's bytes, which are read and written
SECONDS_A_COLLECTIVE = 65e-6


@dataclass(frozen=True)
class Cost:
    """The exchange of one attention, per rank.

    Attributes:
        received, copied: bytes. collectives: how many, of those that move tensors.
    """

    received: int
    copied: int
    collectives: int

    @property
    def milliseconds(self) -> float:
        seconds = self.received / RECEIVED_PER_SECOND + self.copied / COPIED_PER_SECOND
        return 1e3 * (seconds + self.collectives * SECONDS_A_COLLECTIVE)

    def __str__(self) -> str:
        return (
            f"{self.milliseconds:.3g} ms: receives {self.received / 2**20:.3g} MiB in {self.collectives} collectives, "
            f"copies {self.copied / 2**20:.3g} MiB"
        )


class Keys(NamedTuple):
    """How many keys travel when they are gathered.

    Attributes:
        fetched: the most that one rank fetches from others. lent: the most that others fetch from one, counted for each.
        kept: the backward does not fetch them again.
    """

    fetched: int
    lent: int
    kept: bool

    @staticmethod
    def all(seqlen: int, ranks: int) -> Keys:
        """Every rank's rows see all keys."""
        others = seqlen - seqlen // ranks
        return Keys(others, others, ranks < 3)


def kept(fetched: int, lengths: Sequence[int]) -> bool:
    """Whether ranks keep the keys of others for the backward: where none keeps more of them than the most that one has of its own."""
    return fetched <= max(lengths)


def gathering(whole: Problem, ranks: int, keys: Keys | None = None) -> Cost:
    """K and V of the keys that a rank's rows see, and dK and dV of them, in fp32, back to their ranks.

    Args:
        keys: how many travel; by default all.
    """
    keys = Keys.all(whole.seqlen_k, ranks) if keys is None else keys
    if not keys.fetched:
        return Cost(0, 0, 0)
    row = _elements(whole)[1] // max(whole.seqlen_k, 1)
    narrow, wide = row * whole.dtype.itemsize, row * whole.compute_dtype.itemsize
    # What travels is copied before it leaves and after it has come.
    if not whole.spec.needs_grad:
        return Cost(keys.fetched * narrow, 2 * keys.fetched * narrow, 1)
    passes = 1 if keys.kept else 2
    received = passes * keys.fetched * narrow + keys.lent * wide
    return Cost(received, 2 * passes * keys.fetched * narrow + 2 * (keys.fetched + keys.lent) * wide, passes + 1)


def exchanging_heads(whole: Problem, ranks: int, keys: Keys | None = None) -> Cost:
    """q, K and V to all rows of some heads and o back to rows of all heads; backward dO, and dq, dK and dV back."""
    own = sum(_elements(whole)) * whole.dtype.itemsize // ranks
    passes = 2 if whole.spec.needs_grad else 1
    # Each tensor is copied before it leaves and after it has come.
    return Cost(passes * own * (ranks - 1) // ranks, passes * 2 * own, passes * 2)


COSTS = {"gather": gathering, "heads": exchanging_heads}


def _elements(whole: Problem) -> tuple[int, int]:
    """How many numbers q and o, and K and V, have."""
    *_, seqlen_q, heads_q, _ = whole.q.shape
    *_, seqlen_k, heads_k, _ = whole.k.shape
    batch = 1 if whole.packed else whole.batch
    dims = whole.head_dim + whole.head_dim_v
    return batch * seqlen_q * heads_q * dims, batch * seqlen_k * heads_k * dims
