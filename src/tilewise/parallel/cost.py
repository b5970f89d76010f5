"""The cost of an attention over ranks beside its products, by scheme: bytes that each rank receives and copies, and their time.

A step is a forward and, where gradients are wanted, its backward. The products are left out: they are the same in every scheme.
The constants are those of H200s joined by NVLink under NCCL (docs/parallel.md, "Which scheme"); other machines have others, but
what is compared are two exchanges over the same links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilewise.parallel.heads import groups_of
from tilewise.problem import Problem

RECEIVED_PER_SECOND = 330e9
COPIED_PER_SECOND = 2e12  # of a copy's bytes, which are read and written
SECONDS_A_COLLECTIVE = 65e-6


@dataclass(frozen=True)
class Cost:
    """The exchange of one attention, per rank.

    Attributes:
        received, copied: bytes. collectives: how many, of those that move tensors.
        groups: all but one of so many equal parts of the exchange pass under the attention.
    """

    received: int
    copied: int
    collectives: int
    groups: int = 1

    @property
    def milliseconds(self) -> float:
        exchange = self.received / RECEIVED_PER_SECOND + self.collectives * SECONDS_A_COLLECTIVE
        return 1e3 * (exchange / self.groups + self.copied / COPIED_PER_SECOND)

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
        joined: each rank makes one call, whose gradients need no wider numbers to be added in.
    """

    fetched: int
    lent: int
    kept: bool
    joined: bool = False

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
    own = whole.seqlen_k // ranks
    # What travels is packed, and put together with the rank's own keys.
    together = (2 * keys.fetched + own) * narrow
    if not whole.spec.needs_grad:
        return Cost(keys.fetched * narrow, together, 1)
    passes, back = (1, 2) if keys.kept else (2, 3)
    if keys.joined:
        return Cost(
            (passes * keys.fetched + keys.lent) * narrow, passes * together + (2 * keys.lent + own) * narrow, back
        )
    # dK and dV of pieces are added up, packed, and added up again where they belong.
    added = 2 * (own + keys.fetched) + 2 * (keys.fetched + keys.lent) + 2 * own
    return Cost(passes * keys.fetched * narrow + keys.lent * wide, passes * together + added * wide, back)


def exchanging_heads(whole: Problem, ranks: int, keys: Keys | None = None) -> Cost:
    """q, K and V to all rows of some heads and o back to rows of all heads; backward dO, and dq, dK and dV back."""
    own = sum(_elements(whole)) * whole.dtype.itemsize // ranks
    passes, groups = 2 if whole.spec.needs_grad else 1, groups_of(whole, ranks)
    # Each tensor is copied before it leaves and after it has come.
    return Cost(passes * own * (ranks - 1) // ranks, passes * 2 * own, passes * 2 * groups, groups)


COSTS = {"gather": gathering, "heads": exchanging_heads}


def _elements(whole: Problem) -> tuple[int, int]:
    """How many numbers q and o, and K and V, have."""
    *_, seqlen_q, heads_q, _ = whole.q.shape
    *_, seqlen_k, heads_k, _ = whole.k.shape
    batch = 1 if whole.packed else whole.batch
    dims = whole.head_dim + whole.head_dim_v
    return batch * seqlen_q * heads_q * dims, batch * seqlen_k * heads_k * dims
