"""Tile sizes of the CPU kernels, which the library chooses (``native/complete.cpp``), and the traffic that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.problem import Problem

NOTES = {"amxbf16_emulated": "AMX in software, for tests"}


@dataclass(frozen=True)
class Config:
    """Tile sizes: ``tile_m`` queries (of ``heads`` query heads at a time) by ``tile_n`` keys in the forward, and the backward's.

    A packed tile of K and V should stay in L2 while all queries of the tile pass. The products' blocks in registers are 6 rows by
    4 vectors (2 vectors without AVX-512), or 32 rows by 32 columns with AMX.

    Attributes:
        isa: the instruction set.
        split: keys of a split of the forward, or 0.
        shares: parts of the keys in the backward, one for each thread, which add to dq in order. 0: as many as the threads of a call need.
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
    shares: int = 0
    gathered: bool = False
    one_order: bool = False

    def of_pass(self, backward: bool) -> dict[str, int]:
        """Return the fields of a pass's struct."""
        tile_m, tile_n = (self.backward_m, self.backward_n) if backward else (self.tile_m, self.tile_n)
        split, shares = (0, self.shares) if backward else (self.split, 1)
        return {
            "tile_m": tile_m, "tile_n": tile_n, "split": split, "heads_per_item": self.heads, "shares": shares, "one_order": self.one_order,
        }  # fmt: skip

    def describe(self) -> str:
        split = f", keys split by {self.split}" if self.split else ""
        heads = f" of {self.heads} heads" if self.heads > 1 else ""
        note = f" ({NOTES[self.isa]})" if self.isa in NOTES else ""
        tiles = f"forward tiles {self.tile_m}{heads} x {self.tile_n}, backward {self.backward_m} x {self.backward_n}"
        split = ", one order of a row's sums" if self.one_order else split
        return f"{self.isa}{note}, {'the selected keys of each query' if self.gathered else tiles}{split}"

    def traffic(self, p: Problem) -> int:
        """Bytes of the forward: Q and O once, K and V once per query tile (an upper bound under a mask)."""
        size = torch.empty((), dtype=p.dtype).element_size()
        width = p.head_dim + p.head_dim_v
        visits = -(-p.seqlen_q // self.tile_m) * -(-p.group // self.heads)
        rows = p.heads_q * p.seqlen_q * width + visits * p.heads_k * p.seqlen_k * width
        return size * rows * (1 if p.packed else p.batch)
