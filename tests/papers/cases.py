"""Heads and machines that the tests of this folder share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import tilewise as tw
from tilewise import dropout
from tilewise_papers.head import Blocks, Dropout, Head
from tilewise_papers.machine import Level, Machine

WORD, HEADS, DROPOUT_P, DROPOUT_SEED = 2, 4, 0.25, 11


@dataclass(frozen=True)
class Case:
    """A head by its sizes and options, and the blocks that programs run it with."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    blocks: Blocks
    causal: bool = False
    dropout: bool = False
    softmax_scale: float | None = None

    def __str__(self) -> str:
        sizes = (
            f"{self.seqlen_q}x{self.seqlen_k} d{self.head_dim},{self.head_dim_v} b{self.blocks.rows}x{self.blocks.cols}"
        )
        return sizes + " causal" * self.causal + " dropout" * self.dropout

    def tensors(self) -> tuple[list[np.ndarray], ...]:
        """q, k, v, do: float32, one array for each head."""
        widths = (self.seqlen_q, self.head_dim), (self.seqlen_k, self.head_dim), (self.seqlen_k, self.head_dim_v)
        shapes = (*widths, (self.seqlen_q, self.head_dim_v))
        rng = np.random.default_rng(0)
        return tuple([rng.standard_normal(shape).astype(np.float32) for _ in range(HEADS)] for shape in shapes)

    def head(self, h: int = 0) -> Head:
        q, k, v, _ = (x[h] for x in self.tensors())
        return Head(q, k, v, self.softmax_scale, self.causal, self.drop(h) if self.dropout else None)

    def drop(self, h: int) -> Dropout:
        """The mask that tilewise itself would draw."""
        keep = tw.dropout_mask(DROPOUT_SEED, DROPOUT_P, 1, HEADS, self.seqlen_q, self.seqlen_k)
        return Dropout(keep[0, h].numpy(), dropout.keep_scale(DROPOUT_P))

    def do(self, h: int = 0) -> np.ndarray:
        return self.tensors()[3][h]


# Ragged tiles, Nq above and below Nk (above, with causal: rows that see no key), one tile that holds all, tiles of one row.
CASES = [
    Case(64, 64, 16, 16, Blocks(16, 16)),
    Case(64, 96, 16, 8, Blocks(32, 16), dropout=True),
    Case(37, 53, 16, 24, Blocks(16, 8), causal=True),
    Case(149, 133, 16, 16, Blocks(24, 40), causal=True, dropout=True),
    Case(131, 131, 16, 16, Blocks(160, 160), causal=True),
    Case(19, 40, 16, 16, Blocks(4, 7), dropout=True),
    Case(129, 130, 32, 32, Blocks(48, 24), causal=True),
]


def machine(levels: int = 2, *, fast_bytes: float = 1e6, dry: bool = False) -> Machine:
    """Slow memory without end, and faster levels of fast_bytes each."""
    names = ("slow", "sram", "registers", "latches")[:levels]
    return Machine([Level(n, 1e12 if n == "slow" else fast_bytes) for n in names], word=WORD, dry=dry)
