"""The cost of an attention over ranks beside its products, by scheme: bytes that each rank receives and copies, and their time.

A step is a forward and, where gradients are wanted, its backward. The products are left out: they are the same in every scheme.
The constants are those of H200s joined by NVLink under NCCL (docs/parallel.md, "Which scheme"); other machines have others, but
what is compared are two exchanges over the same links.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def gathering(whole: Problem, ranks: int) -> Cost:
    """K and V of all ranks on each, in the order of positions; backward again, and dK and dV of all keys, in fp32, to their ranks."""
    keys, element, wide = _elements(whole)[1], whole.dtype.itemsize, whole.compute_dtype.itemsize
    received, copied = keys * element * (ranks - 1) // ranks, keys * element
    if not whole.spec.needs_grad:
        return Cost(received, copied, 2)
    # dK and dV are set to zero, added to by each piece (two are usual), dealt to ranks, and added up.
    return Cost(2 * received + keys * wide * (ranks - 1) // ranks, 2 * copied + 6 * keys * wide, 6)


def exchanging_heads(whole: Problem, ranks: int) -> Cost:
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
