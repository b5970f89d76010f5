"""Tile sizes of the portable backend: what one step of its loops holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.problem import Problem

TILE_ELEMENTS = 1 << 16  # scores of one key head in a step, 256 KiB of fp32: docs/decisions.md#portable-tiles
STEP_ELEMENTS = {"cpu": 1 << 20}  # scores of a step; on an accelerator as many as fill the machine:
ACCELERATOR_ELEMENTS = 1 << 25
STEP_ROWS_BYTES = 1 << 24  # accumulators of a step, so that memory does not grow with the heads
SPLIT_KEYS = 4096
ONE_ORDER = (64, 128)  # queries and keys of a tile of all calls that are deterministic everywhere


@dataclass(frozen=True)
class Config:
    """One step computes the scores of ``heads_k`` key heads of ``batch`` rows, ``tile_m`` queries and ``tile_n`` keys.

    Attributes:
        split: keys of a split, or None if keys are not split.
    """

    tile_m: int
    tile_n: int
    batch: int
    heads_k: int
    split: int | None = None

    def describe(self) -> str:
        split = f", keys split by {self.split}" if self.split else ""
        return f"tiles {self.tile_m} x {self.tile_n}, {self.batch} x {self.heads_k} key heads a step{split}"

    def bytes(self, p: Problem) -> int:
        """Return the bytes that a step needs: at most about three tiles of scores."""
        size = torch.empty((), dtype=p.compute_dtype).element_size()
        return 3 * size * self.batch * self.heads_k * p.group * self.tile_m * self.tile_n

    def traffic(self, p: Problem) -> int:
        """Bytes of the forward: Q and O once, K and V once per query tile (an upper bound under a mask)."""
        size = torch.empty((), dtype=p.dtype).element_size()
        query_tiles = -(-p.seqlen_q // self.tile_m) + (p.batch if p.packed and p.paged else 0)
        width = p.head_dim + p.head_dim_v
        rows = p.heads_q * p.seqlen_q * width + query_tiles * p.heads_k * p.seqlen_k * width
        return size * rows * (1 if p.packed else p.batch)


def _power_of_two(n: int, low: int, high: int) -> int:
    """Return the smallest power of two that is at least n, within low and high."""
    return max(low, min(high, 1 << max(n - 1, 0).bit_length()))


def choose(p: Problem, share: int = 1) -> Config:
    """Choose tiles by shape alone.

    Deterministic problems take one key head of one sequence a step, and packed ones take tiles whatever the lengths are, so that bits
    cannot depend on the rest of the batch.

    Args:
        share: divides the scores of a step, for passes that hold more tiles of them at once than a forward.
    """
    if p.spec.everywhere:
        return _everywhere(p, share)
    own_lengths = p.packed or p.paged  # each sequence has lengths of its own
    seqlen_q, seqlen_k = (1 << 30, 1 << 30) if own_lengths else (p.seqlen_q, p.seqlen_k)
    tile_m = _power_of_two(seqlen_q, 1, max(16, 256 // p.group))
    tile_n = _power_of_two(seqlen_k, 16, max(16, min(SPLIT_KEYS, TILE_ELEMENTS // (tile_m * p.group))))
    batch = heads_k = 1
    if not p.spec.deterministic:
        head = tile_m * tile_n * p.group
        elements = STEP_ELEMENTS.get(p.device.type, ACCELERATOR_ELEMENTS) // share
        row_bytes = 8 * p.group * max(p.seqlen_q, 1) * max(p.head_dim, p.head_dim_v)
        at_once = max(1, min(elements // head, STEP_ROWS_BYTES // row_bytes))
        heads_k = min(p.heads_k, at_once)
        batch = 1 if own_lengths else max(1, min(p.batch, at_once // p.heads_k))
    few_queries = p.seqlen_q <= 16 and p.seqlen_k >= 2 * SPLIT_KEYS and not own_lengths
    return Config(tile_m, tile_n, batch, heads_k, SPLIT_KEYS if few_queries else None)


def _everywhere(p: Problem, share: int) -> Config:
    """Return the tiles of the one order. No product is a library's, so that a step may hold any number of rows and heads."""
    tile_m, tile_n = ONE_ORDER
    elements = STEP_ELEMENTS.get(p.device.type, ACCELERATOR_ELEMENTS) // share
    at_once = max(1, elements // (min(tile_m, max(p.seqlen_q, 1)) * tile_n * p.group))
    heads_k = min(p.heads_k, at_once)
    return Config(tile_m, tile_n, 1 if p.packed or p.paged else max(1, min(p.batch, at_once // heads_k)), heads_k)
