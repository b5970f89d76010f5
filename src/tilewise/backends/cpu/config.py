"""Tile sizes of the CPU kernels and the traffic that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.problem import Problem

# The smallest and the largest split, and the number of splits, for few queries and many keys: docs/decisions.md#cpu-decode-splits.
SPLIT_KEYS = (1024, 4096)
SPLIT_PARTS = 16
PAGED_SPLIT = 1024  # of a cache, whatever its capacity, so that a sequence's bits are its own
PAGED_ROWS = 16  # queries of a tile, if sequences have few
PREDICATE_TILE = 128  # patterns come in blocks of 64 or 128
AMX = ("amxbf16", "amxbf16_emulated")
NOTES = {"amxbf16_emulated": "AMX in software, for tests"}
ENOUGH_UNITS = 8  # of the backward: with fewer key heads, every tile of keys is a work unit
# Threads take turns at the heads if whole heads would keep them busy for less than this share: docs/decisions.md#cpu-dq-in-turns.
BUSY = 0.875


@dataclass(frozen=True)
class Config:
    """Tile sizes: ``tile_m`` queries (of ``heads`` query heads at a time) by ``tile_n`` keys in the forward, and the backward's.

    A packed tile of K and V should stay in L2 while all queries of the tile pass. The products' blocks in registers are 6 rows by
    4 vectors (2 vectors without AVX-512), or 32 rows by 32 columns with AMX.

    Attributes:
        isa: the instruction set.
        split: keys of a split of the forward, or 0.
        shares: parts of the keys in the backward, one for each thread. They add to dq in order (:meth:`parts`).
        gathered: both passes read the keys that each query selected, without tiles.
        one_order: none of the kernels of few queries whose sums have another order.
    """

    isa: str
    tile_m: int
    tile_n: int
    heads: int
    backward_m: int
    backward_n: int
    split: int = 0
    shares: int = 1
    gathered: bool = False
    one_order: bool = False

    def describe(self) -> str:
        split = f", keys split by {self.split}" if self.split else ""
        heads = f" of {self.heads} heads" if self.heads > 1 else ""
        note = f" ({NOTES[self.isa]})" if self.isa in NOTES else ""
        tiles = f"forward tiles {self.tile_m}{heads} x {self.tile_n}, backward {self.backward_m} x {self.backward_n}"
        split = ", one order of a row's sums" if self.one_order else split
        return f"{self.isa}{note}, {'the selected keys of each query' if self.gathered else tiles}{split}"

    def parts(self, p: Problem, threads: int) -> int:
        """Return ``shares``, or one part per tile of keys if whole heads would leave threads idle.

        The bits are the same, because no leaf of a score has sums of its own."""
        heads = p.batch * p.heads_k
        idle = heads < BUSY * threads * -(-heads // threads)
        if self.shares > 1 or p.packed or not idle or p.spec.lookups:
            return self.shares
        return max(1, -(-p.seqlen_k // self.backward_n))

    def traffic(self, p: Problem) -> int:
        """Bytes of the forward: Q and O once, K and V once per query tile (an upper bound under a mask)."""
        size = torch.empty((), dtype=p.dtype).element_size()
        width = p.head_dim + p.head_dim_v
        visits = -(-p.seqlen_q // self.tile_m) * -(-p.group // self.heads)
        rows = p.heads_q * p.seqlen_q * width + visits * p.heads_k * p.seqlen_k * width
        return size * rows * (1 if p.packed else p.batch)


def choose(p: Problem, isa: str) -> Config:
    """Choose tiles by shape and never by threads, so that bits do not depend on them. Deterministic calls ignore the batch too.

    These tiles were the fastest with 1 MiB of L2 (docs/decisions.md#cpu-tiles).
    """
    block = 32 if isa in AMX and p.dtype == torch.bfloat16 else 6
    tile_n, tile_m = _tile_n(p), _tile_m(p, block)
    if p.spec.region.predicate is not None:  # smaller tiles are more often empty or full
        tile_n, tile_m = min(tile_n, PREDICATE_TILE), min(tile_m, PREDICATE_TILE)
    tile_m = max(1, min(tile_m, p.seqlen_q))
    split = 0 if p.spec.everywhere else PAGED_SPLIT if p.paged else _split(p)
    return Config(
        isa=isa,
        tile_m=tile_m,
        tile_n=128 if split else tile_n,
        heads=1 if p.packed and not p.paged else max(1, min(p.group, 192 // tile_m)),
        backward_m=max(1, min(96 if p.spec.region.predicate is None else PREDICATE_TILE, p.seqlen_q)),
        backward_n=tile_n,
        split=split,
        shares=_shares(p, tile_n),
        one_order=p.spec.everywhere,
    )


def _tile_m(p: Problem, block: int) -> int:
    """Return the queries of a tile: many, to pack K and V less often, yet with tiles for every thread, in blocks of ``block`` rows."""
    if p.packed and p.paged and (p.spec.deterministic or p.seqlen_q <= PAGED_ROWS * p.batch):
        return PAGED_ROWS
    tiles = lambda m: p.heads_q * -(-p.seqlen_q // m) * (1 if p.packed else p.batch)  # noqa: E731
    most = next((m for m in (516 // block * block, 192) if tiles(m) >= 16), 96)
    part = -(-p.seqlen_q // max(1, -(-p.seqlen_q // most)))
    return most if p.packed else max(block, -(-part // block) * block)


def _tile_n(p: Problem) -> int:
    """Return the keys of a tile: as many as fit L2 with K, V and the sums of a tile."""
    row = max(p.head_dim, p.head_dim_v) * (8 if p.dtype == torch.float64 else 4)
    widest = next((n for n, limit in ((256, 256), (192, 512), (128, 1024)) if row <= limit), 64)
    if p.spec.everywhere:  # whatever the length, which over pages is a capacity
        return widest
    return min(widest, max(64, -(-p.seqlen_k // 64) * 64))


def _split(p: Problem) -> int:
    """Return the keys of a split by their number alone: splits for every thread, each long enough that starting it costs little."""
    least, most = SPLIT_KEYS
    idle = p.heads_k * (1 if p.spec.deterministic else p.batch) < 2 * SPLIT_PARTS and p.seqlen_k >= 2 * least
    if p.packed or p.seqlen_q > 16 or not (idle or p.seqlen_k >= 2 * most):
        return 0
    return min(most, max(least, -(-p.seqlen_k // SPLIT_PARTS // 128) * 128))


def _shares(p: Problem, tile_n: int) -> int:
    units = p.heads_k * (1 if p.spec.deterministic else p.batch)
    if p.packed or units >= ENOUGH_UNITS or units == 0:
        return 1
    return max(1, -(-p.seqlen_k // tile_n))
