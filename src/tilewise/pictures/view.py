"""The contents of a picture of a mask or a score: the status of each tile, the bytes that the visited ones move, the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import expr
from tilewise.amounts import in_bytes
from tilewise.expr import Expr
from tilewise.masks import Mask, MaskFunction, Region, as_mask, region
from tilewise.planning.tiles import EMPTY, FULL, PARTIAL, Grid, TileMap
from tilewise.problem import show_reasons
from tilewise.scores import Score, expression
from tilewise.words import raise_wrong

NAMES = {FULL: "full", PARTIAL: "partial", EMPTY: "skipped"}
MOST_TILES = 1 << 22


@dataclass(frozen=True)
class View:
    """The tiles of one head of an attention.

    Attributes:
        title: what is shown, in words.
        grid: the pairs of the one batch element and head.
        tile_m, tile_n: queries and keys of a tile.
        status: EMPTY, PARTIAL or FULL, uint8 ``(query tiles, key tiles)``: what :class:`tilewise.planning.tiles.TileMap` says.
    """

    title: str
    grid: Grid
    tile_m: int
    tile_n: int
    status: Tensor

    @classmethod
    def of(cls, title: str, grid: Grid, tile: tuple[int, int]) -> View:
        """Return the view of a grid that has one batch element and one head.

        Raises:
            ValueError: tiles of no size, or too many of them.
        """
        tile_m, tile_n = tile
        if tile_m < 1 or tile_n < 1:
            raise ValueError(f"a tile has at least one query and one key, got {tile_m} x {tile_n}")
        lines, columns = -(-grid.seqlen_q // tile_m), -(-grid.keys // tile_n)
        if lines * columns > MOST_TILES:
            raise ValueError(f"{lines} x {columns} tiles are more than a picture holds; take larger tiles")
        status = TileMap.build(grid, tile_m, tile_n).status
        return cls(title, grid, tile_m, tile_n, status.expand(1, 1, lines, columns)[0, 0].cpu())

    @property
    def lengths(self) -> tuple[int, int]:
        """The queries and keys of the sequence."""
        return self.grid.seqlen_q, self.grid.keys

    @property
    def status_of_pairs(self) -> Tensor:
        """The status of each pair's tile, uint8 ``(queries, keys)``."""
        of_pair = self.status.repeat_interleave(self.tile_m, 0).repeat_interleave(self.tile_n, 1)
        return of_pair[: self.lengths[0], : self.lengths[1]]

    @property
    def kept(self) -> Tensor:
        """Whether each pair is kept, bool ``(queries, keys)``."""
        return self.grid.pairs()[0, 0]

    @property
    def counts(self) -> dict[str, int]:
        """How many tiles are full, partial and skipped."""
        return {name: int((self.status == what).sum()) for what, name in NAMES.items()}

    def bytes_moved(self, head_dim: int = 128, itemsize: int = 2, *, pair_bytes: int = 0, masked: bool = True) -> int:
        """Return the bytes that one head's forward moves to and from slow memory; each visited tile loads its keys.

        q is read and o written once, lse is written in 4 bytes a row, and each tile that is not skipped reads its k and v:
        FlashAttention-2's Algorithm 1. What the mask itself reads does not count.

        Args:
            head_dim, itemsize: numbers in a row of q, k, v and o, and bytes of each.
            pair_bytes: what a score reads for each pair of a visited tile, such as a bias.
            masked: False takes every tile as visited.
        """
        queries, keys = (_extents(n, tile) for n, tile in zip(self.lengths, (self.tile_m, self.tile_n), strict=True))
        visited = (self.status != EMPTY) if masked else torch.ones_like(self.status, dtype=torch.bool)
        loaded = int((visited * keys).sum())
        pairs = int((visited * keys * queries.unsqueeze(-1)).sum())
        rows = self.lengths[0] * (2 * head_dim * itemsize + 4)
        return rows + loaded * 2 * head_dim * itemsize + pairs * pair_bytes

    def summary(self, head_dim: int = 128, itemsize: int = 2, pair_bytes: int = 0) -> list[str]:
        """Return the counts and the bytes in words, a line each."""
        counts, total = self.counts, max(1, self.status.numel())
        share = ", ".join(f"{n:,} {name} ({n / total:.0%})" for name, n in counts.items())
        moved, every = (
            self.bytes_moved(head_dim, itemsize, pair_bytes=pair_bytes, masked=masked) for masked in (True, False)
        )
        size = f"{itemsize} bytes a number, head_dim {head_dim}"
        return [
            f"{self.lengths[0]:,} queries, {self.lengths[1]:,} keys, tiles {self.tile_m} x {self.tile_n}: {share}",
            f"forward of a head: {in_bytes(moved)} moved, {in_bytes(every)} with every tile visited ({size})",
        ]


def _extents(length: int, tile: int) -> Tensor:
    """Return the size of each tile along one axis: the last may be smaller."""
    return (length - torch.arange(0, length, tile, device="cpu")).clamp(max=tile)


def _grid(call: str, mask: Mask, lengths: tuple[int, int], at: tuple[int, int]) -> Grid:
    leaves = [leaf.cpu() for leaf in mask.leaves]
    kept = region(mask.text, tuple(range(len(leaves))))
    _check(call, kept, leaves, lengths, at)
    b, h = (torch.tensor([n], device="cpu") for n in at)
    return Grid(kept, leaves, *lengths, b, h, lengths[1])


def show_mask(
    mask: Mask | Tensor | MaskFunction, seqlen_q: int, seqlen_k: int | None = None, *, batch: int = 0, head: int = 0
) -> str:
    """Return the 0/1 matrix of a mask as text: one line a query, ``1`` for a kept key, ``.`` for a hidden one.

    Raises:
        ValueError: the mask does not fit these lengths, or has no such batch element or head.
    """
    lengths = seqlen_q, seqlen_q if seqlen_k is None else seqlen_k
    pairs = _grid("show_mask", as_mask(mask), lengths, (batch, head)).pairs()[0, 0]
    return "\n".join(" ".join("1" if kept else "." for kept in row) for row in pairs.tolist())


def mask_view(
    mask: Mask, lengths: tuple[int, int], tile: tuple[int, int], at: tuple[int, int] = (0, 0), title: str = ""
) -> View:
    """Return the view of a mask for ``lengths`` (queries, keys), ``at`` a batch element and query head.

    Raises:
        ValueError: the mask is not for these lengths, or has no such batch element or head.
    """
    return View.of(title or mask.text or "every pair", _grid("show", mask, lengths, at), tile)


def _check(
    call: str, kept: Region, leaves: Sequence[Tensor], lengths: tuple[int, int], at: tuple[int, int],
    score: Expr | None = None,
) -> None:  # fmt: skip
    """Raise ValueError, with every reason, where a mask's or a score's tensors do not fit."""
    places = dict(zip(("seqlen_q", "seqlen_k", "batch", "head"), (*lengths, *at), strict=True))
    raise_wrong(call, show_reasons(kept, [tuple(leaf.shape) for leaf in leaves], places, score))


@dataclass(frozen=True)
class ScoreView:
    """A score of one head, as a function of s and of the places i and j.

    Attributes:
        title: the score in words.
        score: its expression; ``leaves`` the tensors that it reads, by slot.
        at: the batch element and query head whose score it is.
    """

    title: str
    score: Expr
    leaves: Sequence[Tensor]
    at: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, score: Score, lengths: tuple[int, int], at: tuple[int, int] = (0, 0), title: str = "") -> ScoreView:
        """Return the view of a score for ``lengths`` (queries, keys).

        Raises:
            ValueError: the score is not for these lengths, or has no such batch element or head.
        """
        leaves = [leaf.detach().cpu() for leaf in score.leaves]
        found = expression(score.text, tuple(range(len(leaves))))
        _check("show", Region(), leaves, lengths, at, found)
        return cls(title or score.text, expr.symbol("s") if found is None else found, leaves, at)

    @property
    def _fixed(self) -> dict[str, Tensor]:
        return {name: torch.tensor(n, device="cpu") for name, n in zip(("b", "h"), self.at, strict=True)}

    @property
    def by_place(self) -> bool:
        """Whether it depends on where the pair lies."""
        return bool(expr.depends_on(self.score) & {"i", "j"})

    @property
    def pair_bytes(self) -> int:
        """Return the bytes read for each pair, from tensors indexed by i and j themselves, as a bias is."""
        reads = {e.args[0][1] for e in expr.lookups(self.score) if {"i", "j"} <= {str(x) for x in e.args[1:]}}
        return sum(self.leaves[slot].element_size() for slot in reads)

    def places(self, i: Tensor, j: Tensor, lengths: tuple[int, int]) -> Tensor:
        """Return the score of s = 0 at the places ``i`` x ``j`` (1-d): fp32 ``(len(i), len(j))``."""
        sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "off": lengths[1] - lengths[0]}
        env = {name: torch.tensor(n, device="cpu") for name, n in sizes.items()} | {"i": i.unsqueeze(-1), "j": j}
        env |= self._fixed | {"s": torch.tensor(0.0, device="cpu")}
        found = expr.evaluate([self.score], env, self.leaves, torch.float32)[0]
        return found.expand(expr.broadcast_shape(found.shape, (len(i), len(j))))

    def curve(self, s: Tensor) -> Tensor:
        """Its value at scores ``s`` (1-d) for the first query and key."""
        env = {name: torch.tensor(0, device="cpu") for name in ("i", "j", "off", "seqlen_q", "seqlen_k")}
        env |= self._fixed | {"s": s}
        return expr.evaluate([self.score], env, self.leaves, torch.float32)[0].expand(s.shape)


def centres(length: int, cells: int) -> Tensor:
    """Return the middle index of each of ``cells`` equal parts of an axis."""
    return ((torch.arange(cells, device="cpu") + 0.5) * length / cells).long().clamp(max=max(0, length - 1))
