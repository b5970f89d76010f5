"""One attention head, as every program of this package takes it, and the tiling of its loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tilewise_papers.machine import Machine, Tile


@dataclass(frozen=True)
class Dropout:
    """keep: bool (seqlen_q, seqlen_k), the pairs that stay. scale: what kept probabilities are multiplied by.

    It stands for a random generator that can make any tile of the mask on chip: reading it moves nothing.
    """

    keep: np.ndarray
    scale: float


@dataclass(frozen=True)
class Blocks:
    """rows: queries in a tile (the papers' Br). cols: keys in a tile (Bc)."""

    rows: int
    cols: int

    def __post_init__(self):
        if self.rows < 1 or self.cols < 1:
            raise ValueError(f"blocks need at least 1 row and 1 column, got {self.rows} × {self.cols}")


@dataclass(frozen=True)
class Head:
    """q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v), and what is done to the scores.

    softmax_scale: None is 1/√head_dim. causal: key j is visible to query i if j <= i + seqlen_k − seqlen_q.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    softmax_scale: float | None = None
    causal: bool = False
    dropout: Dropout | None = None

    @staticmethod
    def blank(seqlen: int, head_dim: int, *, causal: bool = False, dropout: bool = False) -> Head:
        """A head of a shape without numbers, for a dry machine."""
        x = Machine.blank((seqlen, head_dim))
        drop = Dropout(np.broadcast_to(np.True_, (seqlen, seqlen)), 1.0) if dropout else None
        return Head(x, x, x, causal=causal, dropout=drop)

    @property
    def scale(self) -> float:
        return self.q.shape[1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def sizes(self) -> tuple[int, int]:
        """(seqlen_q, seqlen_k)."""
        return len(self.q), len(self.k)

    def place(self, machine: Machine) -> tuple[Tile, Tile, Tile]:
        """q, k, v in slow memory, where the programs find them."""
        return machine.place("Q", self.q), machine.place("K", self.k), machine.place("V", self.v)

    def visible(self, rows: slice, cols: slice) -> np.ndarray:
        """bool (rows, cols): which pairs of a tile the causal mask keeps.

        Two queries, four keys:   1 1 1 0
                                  1 1 1 1
        """
        i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(cols.start, cols.stop)
        return j <= i + len(self.k) - len(self.q)

    def masked(self, s: Tile, rows: slice, cols: slice) -> Tile:
        """MASK(S) in place, if there is a mask."""
        return s.put(s.select(lambda: self.visible(rows, cols))) if self.causal else s

    def dropped(self, p: Tile, rows: slice, cols: slice) -> Tile:
        """P ∘ Z in place, if there is dropout; Z is `scale` where a pair is kept and 0 elsewhere, made on chip."""
        return p.put(p.times(lambda: self.drop_factor(rows, cols))) if self.dropout else p

    def drop_factor(self, rows: slice, cols: slice) -> np.ndarray:
        return self.dropout.keep[rows, cols] * self.q.dtype.type(self.dropout.scale)


@dataclass(frozen=True)
class Gradients:
    """dq, dk, dv, with the shapes of q, k, v."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def tiles(length: int, size: int) -> Iterator[slice]:
    """0:size, size:2·size, ... up to length; the last may be shorter."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
