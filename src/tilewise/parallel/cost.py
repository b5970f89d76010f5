"""The cost of an attention over ranks beside its products, by scheme: bytes that each rank receives, copies and needs, and their time.

A step is a forward and, if gradients are wanted, its backward. The products are the same in every scheme and are left out. The constants
are those of H200s joined by NVLink (docs/parallel.md, "Which scheme"). Other machines have others, but the schemes are compared over the
same links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tilewise.amounts import in_bytes
from tilewise.masks.facts import kept_pairs
from tilewise.problem import Problem

RECEIVED_PER_SECOND = 330e9
RECEIVED_BETWEEN_NODES = 45e9  # assumed, not measured: a port of 400 Gb/s for each GPU
COPIED_PER_SECOND = 2e12  # of a copy's bytes, which are read and written
SECONDS_A_COLLECTIVE = 65e-6
MOST_MEMORY = 1 / 4
"""The share of a rank's memory that "auto" may use for one attention, if another scheme needs less."""
MOST_GROUPS = 2
WORTH_A_GROUP = 3e11
"""The least operations of a group's forward that justify a call of its own: half a millisecond of an H200."""


@dataclass(frozen=True)
class Cost:
    """The exchange of one attention, per rank.

    Attributes:
        received, copied: bytes.
        collectives: the number of those that move tensors.
        hidden: the share of the exchange that the attention hides.
        memory: the most bytes that a step needs at once beside the rank's own q, k and v.
        per_second: bytes that a rank receives.
        within: the exchange of heads among neighbouring ranks before and after, if there is one.
    """

    received: int
    copied: int
    collectives: int
    hidden: float = 0.0
    memory: int = 0
    per_second: float = RECEIVED_PER_SECOND
    within: Cost | None = None

    @property
    def all_received(self) -> int:
        """Bytes, including those between neighbours."""
        return self.received + (0 if self.within is None else self.within.received)

    @property
    def milliseconds(self) -> float:
        exchange = 1e3 * (self.received / self.per_second + self.collectives * SECONDS_A_COLLECTIVE)
        before = 0.0 if self.within is None else self.within.milliseconds
        return before + (1 - self.hidden) * exchange + 1e3 * self.copied / COPIED_PER_SECOND

    def __str__(self) -> str:
        collectives = self.collectives + (0 if self.within is None else self.within.collectives)
        copied = self.copied + (0 if self.within is None else self.within.copied)
        return (
            f"{self.milliseconds:.3g} ms: receives {in_bytes(self.all_received)} in {collectives} collectives, "
            f"copies {in_bytes(copied)}, needs {in_bytes(self.memory)}"
        )


class Machines(NamedTuple):
    """The machines of the ranks.

    Attributes:
        ranks: their number.
        nodes: the number of machines.
        memory: bytes of the rank with the least, or 0 if unknown.
        neighbours: the ranks that exchange heads in combined schemes, which alone are wanted then; 0 means as many as possible.
    """

    ranks: int
    nodes: int = 1
    memory: int = 0
    neighbours: int = 0

    @property
    def per_second(self) -> float:
        """The bytes per second that a rank receives from the others."""
        return RECEIVED_PER_SECOND if self.nodes == 1 else RECEIVED_BETWEEN_NODES

    def among(self, neighbours: int) -> float:
        """Return the bytes per second that a rank receives from so many neighbours, if each machine has equally many ranks."""
        return RECEIVED_PER_SECOND if self.ranks // self.nodes % neighbours == 0 else self.per_second


class Keys(NamedTuple):
    """The number of keys that are sent when they are gathered.

    Attributes:
        fetched: the most that one rank fetches from others.
        lent: the most that others fetch from one, counted for each of them.
        kept: the backward does not fetch them again.
        joined: each rank makes one call, whose gradients need no wider numbers.
    """

    fetched: int
    lent: int
    kept: bool
    joined: bool = False

    @staticmethod
    def all(whole: Problem, ranks: int) -> Keys:
        """Return the numbers if every rank's rows see all keys."""
        own = whole.seqlen_k // ranks
        others = whole.seqlen_k - own
        return Keys(others, others, kept(others, [own], whole.heads_q, whole.heads_k))


def kept(fetched: int, lengths: Sequence[int], heads_q: int, heads_k: int) -> bool:
    """Return whether ranks keep others' keys for the backward.

    They do if K and V take at most half the memory of q, k, v and o of the largest rank's rows, which are kept anyway."""
    return 2 * fetched * heads_k <= max(lengths) * (heads_q + heads_k)


def gathering(whole: Problem, ranks: int, keys: Keys | None = None, per_second: float = RECEIVED_PER_SECOND) -> Cost:
    """Return the cost of sending K and V that a rank's rows see, and dK and dV back in fp32.

    Args:
        keys: the number that is sent, all by default.
        per_second: bytes that a rank receives.
    """
    keys = Keys.all(whole, ranks) if keys is None else keys
    size = _Sizes.of(whole, ranks)
    row, own, seen = size.row, size.keys, size.keys + keys.fetched
    narrow, wide = row * size.narrow, row * (size.narrow if keys.joined else size.wide)
    if not keys.fetched:
        return Cost(0, 0, 0, memory=size.results(whole))
    # Sent keys are packed, and joined with the rank's own.
    together = (2 * keys.fetched + own) * narrow
    if not whole.spec.needs_grad:
        return Cost(keys.fetched * narrow, together, 1, memory=size.results(whole) + together, per_second=per_second)
    passes, back = (1, 2) if keys.kept else (2, 3)
    # dK and dV of pieces are summed, packed, and summed again at their ranks. Those of a single call are only packed.
    added = 2 * keys.lent + own if keys.joined else 2 * seen + 2 * (keys.fetched + keys.lent) + 2 * own
    # The peak is a kernel's sum of dq, or the packing of dK and dV of all pieces.
    held = size.results(whole) + 2 * seen * narrow
    travelling = (keys.fetched + keys.lent) * wide + (0 if keys.joined else seen * wide)
    memory = held + max(size.summed_queries, travelling)
    received = passes * keys.fetched * narrow + keys.lent * wide
    return Cost(received, passes * together + added * wide, back, memory=memory, per_second=per_second)


def exchanging_heads(
    whole: Problem, ranks: int, keys: Keys | None = None, per_second: float = RECEIVED_PER_SECOND, neighbours: int = 0
) -> Cost:
    """Return the cost of exchanging rows for heads: q, K, V and back o; in the backward dO, and back dq, dK, dV.

    Args:
        neighbours: the ranks that exchange heads of their rows; 0 means all.
    """
    size, needs_grad = _Sizes.of(whole, ranks), whole.spec.needs_grad
    own = size.queries + size.outputs + size.keys * size.row * size.narrow
    passes, groups = 2 if needs_grad else 1, 1 if neighbours else groups_of(whole, ranks)
    peers = neighbours or ranks
    inputs = own - size.outputs
    # A rank holds q, k and v of its heads, their gradients, o and dO, and the fp32 sums of dq, dk and dv.
    memory = own + size.outputs
    if needs_grad:
        memory += inputs + size.outputs + size.summed_queries + size.keys * size.row * size.wide
    # Each tensor is copied before it is sent and after it is received.
    return Cost(
        passes * own * (peers - 1) // peers, passes * 2 * own, passes * 2 * groups, hidden=1 - 1 / groups, memory=memory,
        per_second=per_second,
    )  # fmt: skip


def groups_of(whole: Problem, ranks: int, most: int = MOST_GROUPS) -> int:
    """Return the number of groups of a rank's heads: at most ``most``, a divisor of its key heads, and each worth a call.

    Ranks must decide alike, so no tensor is read. If only tensors or a function tell a mask's work, it is computed in one group.
    """
    pairs = None if whole.packed else kept_pairs(whole.spec.whole_region, whole.seqlen_q, whole.seqlen_k)
    if pairs is None:
        return 1
    forward = 2 * pairs * whole.batch * whole.heads_q * (whole.head_dim + whole.head_dim_v)
    worth = forward / ranks / WORTH_A_GROUP
    return max(n for n in range(1, most + 1) if n == 1 or (whole.heads_k // ranks % n == 0 and n <= worth))


def combining(whole: Problem, neighbours: int, keys: Keys, machines: Machines) -> Cost:
    """Return the cost of exchanging heads among neighbouring ranks, and of gathering keys between neighbourhoods.

    Args:
        keys: the number that is sent between neighbourhoods.
    """
    ranks = machines.ranks
    within = exchanging_heads(whole, ranks, None, machines.among(neighbours), neighbours)
    found = gathering(with_fewer_heads(whole, neighbours), ranks // neighbours, keys, machines.per_second)
    size = _Sizes.of(whole, ranks)
    memory = found.memory + within.memory - size.results(whole) - (size.summed_queries if whole.spec.needs_grad else 0)
    return replace(found, memory=memory, within=within)


def with_fewer_heads(whole: Problem, ranks: int) -> Problem:
    """Return the attention of one rank's heads, of so many ranks."""
    tensors = {}
    for name in "qkv":
        x = getattr(whole, name)
        tensors[name] = x._replace(shape=(*x.shape[:-2], x.shape[-2] // ranks, x.shape[-1]))
    return replace(whole, **tensors)


COSTS = {"gather": gathering, "heads": exchanging_heads}
COMBINED = "heads+gather"
"""The scheme that exchanges heads among neighbours and gathers keys between neighbourhoods."""


class _Sizes(NamedTuple):
    """A rank's part of an attention.

    Attributes:
        queries, outputs: bytes of q, and of o.
        keys: their number.
        row: numbers of K and V for each key.
        narrow, wide: bytes of a number, and of a number in a sum.
    """

    queries: int
    outputs: int
    keys: int
    row: int
    narrow: int
    wide: int

    @staticmethod
    def of(whole: Problem, ranks: int) -> _Sizes:
        *_, seqlen_q, heads_q, _ = whole.q.shape
        *_, seqlen_k, heads_k, _ = whole.k.shape
        batch, narrow = 1 if whole.packed else whole.batch, whole.dtype.itemsize
        rows, dims = batch * seqlen_q * heads_q * narrow // ranks, whole.head_dim + whole.head_dim_v
        return _Sizes(
            rows * whole.head_dim, rows * whole.head_dim_v, seqlen_k // ranks, batch * heads_k * dims, narrow,
            whole.compute_dtype.itemsize,
        )  # fmt: skip

    @property
    def summed_queries(self) -> int:
        """Return the bytes of dq while it is summed."""
        return self.queries // self.narrow * self.wide

    def results(self, whole: Problem) -> int:
        """Return the bytes of o, and of dq, dk and dv if they are wanted."""
        return self.outputs + (self.queries + self.keys * self.row * self.narrow if whole.spec.needs_grad else 0)
