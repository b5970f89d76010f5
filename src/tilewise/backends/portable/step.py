"""One step of the portable loops: some rows of the batch and some heads, walked tile by tile.

Products see a tile as ``(batch * heads_k, group * queries, keys)``. Masks, scores and dropout see it as ``(batch, heads_q, queries,
keys)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise import dropout, expr
from tilewise.backends.base import Inputs
from tilewise.backends.portable.config import Config
from tilewise.device import is_captured
from tilewise.planning.tiles import EMPTY, FULL, Grid, TileMap, seen_keys
from tilewise.problem import Problem


@dataclass
class Step:
    """Views of what one step works on: q ``(batch, seqlen_q, heads_q, D)``, k, v ``(batch, keys, heads_k, D)``.

    Attributes:
        at: the place of the step's rows in outputs: (batch, rows of q, rows of k, heads_q, heads_k) as slices.
        seen: keys that some query sees, ``(batch * heads_k, keys, 1)``; None means all.
    """

    p: Problem
    t: Inputs
    config: Config
    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid
    at: tuple[slice, slice, slice, slice, slice]
    seen: Tensor | None = None

    def __post_init__(self):
        seen = seen_keys(self.grid, self.p.group)
        if seen is not None and not bool(seen.all()):
            shape = (self.q.shape[0], self.k.shape[2], self.k.shape[1])
            self.seen = seen.expand(shape).reshape(-1, shape[2], 1)

    def tile_map(self, by_columns: bool = False) -> list[list[int]]:
        """Return the status of every tile over the step's rows and heads: full or empty only if it is so in all of them."""
        status = TileMap.build(self.grid, self.config.tile_m, self.config.tile_n, by_columns).status
        status = status.flatten(0, 1)
        full, empty = (status == FULL).all(0), (status == EMPTY).all(0)
        return torch.where(full, FULL, torch.where(empty, EMPTY, 1)).tolist()

    def query_tile(self, x: Tensor, rows: slice) -> Tensor:
        """Return ``(batch * heads_k, group * rows, D)`` in the compute dtype, from ``(batch, seqlen_q, heads_q, D)``."""
        x = x[:, rows].unflatten(2, (-1, self.p.group)).permute(0, 2, 3, 1, 4)
        return self.placed(x.to(self.p.compute_dtype).reshape(x.shape[0] * x.shape[1], -1, x.shape[4]))

    def key_tile(self, x: Tensor, keys: slice) -> Tensor:
        """Return ``(batch * heads_k, keys, D)`` in the compute dtype. Keys that no query sees are zero."""
        x = x[:, keys].transpose(1, 2)
        x = x.to(self.p.compute_dtype).reshape(-1, x.shape[2], x.shape[3])
        return self.placed(x if self.seen is None else x.where(self.seen[:, keys], 0))

    def placed(self, tile: Tensor) -> Tensor:
        """Return a tile in memory of its own if bits must repeat: a library's product chooses its kernel by the alignment of memory."""
        spec = self.p.spec
        return tile.clone(memory_format=torch.contiguous_format) if spec.deterministic and not spec.everywhere else tile

    def row_tile(self, x: Tensor, rows: slice) -> Tensor:
        """Return ``(batch * heads_k, group * rows, 1)`` from a statistic ``(batch, heads_q, seqlen_q)``."""
        x = x[..., rows].unflatten(1, (-1, self.p.group))
        return x.reshape(x.shape[0] * x.shape[1], -1, 1)

    def by_head(self, tile: Tensor, rows: int) -> Tensor:
        """View a product tile as ``(batch, heads_q, rows, keys)``."""
        return tile.view(self.q.shape[0], self.q.shape[2], rows, tile.shape[-1])

    def rows_of(self, x: Tensor) -> Tensor:
        """The step's part of a tensor laid out as q, ``(batch, seqlen_q, heads_q, ...)``."""
        batch, rows, _, heads_q, _ = self.at
        return x[None, rows, heads_q] if self.p.packed else x[batch, :, heads_q]

    def keys_of(self, x: Tensor) -> Tensor:
        """The step's part of a tensor laid out as k."""
        batch, _, keys, _, heads_k = self.at
        return x[None, keys, heads_k] if self.p.packed else x[batch, :, heads_k]

    def statistic_of(self, x: Tensor) -> Tensor:
        """The step's part of a tensor laid out as lse, ``(batch, heads_q, seqlen_q)``."""
        batch, rows, _, heads_q, _ = self.at
        return x[None, heads_q, rows] if self.p.packed else x[batch, heads_q]

    def env(self, rows: slice, keys: slice, s: Tensor | None = None) -> dict[str, Tensor]:
        device = self.q.device
        i, j = (torch.arange(x.start, x.stop, device=device) for x in (rows, keys))
        env = self.grid.env(i, j)
        return env if s is None else env | {"s": s}

    def scores(self, products: Tensor, rows: slice, keys: slice, full: bool) -> Tensor:
        """Apply score and mask to a tile of ``softmax_scale * q·k``, in place if possible."""
        spec, s = self.p.spec, self.by_head(products, rows.stop - rows.start)
        if spec.score is not None:
            value = expr.evaluate([spec.score], self.env(rows, keys, s), self.t.leaves, s.dtype)[0]
            s = (
                value
                if value.shape == s.shape and value.dtype == s.dtype
                else value.to(s.dtype).expand(s.shape).contiguous()
            )
        if not full:
            inside = self.grid.region.inside
            kept = expr.evaluate([inside], self.env(rows, keys), self.t.leaves, self.grid.dtype)[0]  # as Grid does
            s = s.masked_fill_(~kept, -torch.inf)
        return s.view(products.shape)

    def dropped(self, rows: slice, keys: slice) -> Tensor | None:
        """Return dropout's factor, 0 or ``keep_scale``, as a product tile, or None without dropout."""
        p = self.p.spec.dropout_p
        if not p:
            return None
        head = self.grid.b.view(-1, 1) * self.p.heads_q + self.grid.h
        first_row, first_key = self.p.starts  # the counters are those of the whole attention
        rows, keys = (slice(x.start + n, x.stop + n) for x, n in ((rows, first_row), (keys, first_key)))
        origin = 0 if self.grid.key_origin is None else self.grid.key_origin
        if isinstance(origin, Tensor):  # splits of keys: each row of the batch has its own columns
            tiles = [dropout.keep(self.t.seed, p, h, (rows.start, rows.stop), (keys.start + o, keys.stop + o))
                     for h, o in zip(head, origin.tolist(), strict=True)]  # fmt: skip
            kept = torch.stack(tiles)
        else:
            kept = dropout.keep(self.t.seed, p, head, (rows.start, rows.stop), (keys.start, keys.stop))
        kept = kept.to(self.p.compute_dtype).mul_(dropout.keep_scale(p))
        return kept.view(-1, self.p.group * kept.shape[2], kept.shape[3])


def add_product(total: Tensor, a: Tensor, b: Tensor, ordered: bool) -> Tensor:
    """Add ``a b`` to ``total`` in place: ``(n, rows, depth)`` times ``(n, depth, columns)``.

    Args:
        ordered: one term after the other, each rounded (docs/algorithm.md#one-order). A library's product chooses an order by its shape.
    """
    if not ordered:
        return total.baddbmm_(a, b)
    for n in range(b.shape[1]):
        total += a[:, :, n : n + 1] * b[:, n : n + 1]
    return total


def product(a: Tensor, b: Tensor, ordered: bool) -> Tensor:
    """Return ``a b``, as :func:`add_product` adds it."""
    return add_product(a.new_zeros(*a.shape[:2], b.shape[2]), a, b, True) if ordered else torch.bmm(a, b)


def row_sums(x: Tensor, ordered: bool) -> Tensor:
    """Return the sums over the last dimension, which stays; ``ordered`` as in :func:`add_product`."""
    if not ordered:
        return x.sum(-1, keepdim=True)
    total = x.new_zeros(*x.shape[:-1], 1)
    for n in range(x.shape[-1]):
        total += x[..., n : n + 1]
    return total


def tiles(length: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def refuse_capture(q: Tensor) -> None:
    """Raise during the capture of a CUDA graph: the host reads a cache's lengths and the tiles to visit.

    Raises:
        NotImplementedError: a graph is being captured on q's device.
    """
    if q.is_cuda and is_captured():
        raise NotImplementedError(
            "portable reads lengths, and which tiles to visit, on the host, which no CUDA graph can hold\n"
            "  Capture a call that hopper or triton runs (tilewise.explain says why they refuse this one), or leave it out of the graph."
        )


def steps(p: Problem, t: Inputs, config: Config) -> Iterator[Step]:
    """Yield the steps of a call. Each packed sequence is an attention of its own, with its own lengths and tiles."""
    refuse_capture(t.q)
    if not p.packed:
        yield from _dense_steps(p, t, config, (t.q, t.k, t.v), 0, (slice(0, p.seqlen_q), slice(0, p.seqlen_k)))
        return
    cu_q, cu_k = t.cu_seqlens_q.tolist(), t.cu_seqlens_k.tolist()
    for b in range(p.batch):  # kernels clamp wrong cu_seqlens to the tensor
        rows = slice(min(cu_q[b], p.seqlen_q), min(cu_q[b + 1], p.seqlen_q))
        keys = slice(min(cu_k[b], p.seqlen_k), min(cu_k[b + 1], p.seqlen_k))
        yield from _dense_steps(p, t, config, (t.q[None, rows], t.k[None, keys], t.v[None, keys]), b, (rows, keys))


def _dense_steps(
    p: Problem, t: Inputs, config: Config, qkv: tuple[Tensor, Tensor, Tensor], b_origin: int, at: tuple[slice, slice]
) -> Iterator[Step]:
    """Yield the steps of equal sequences: ``config.batch`` rows by ``config.heads_k`` key heads, from row ``b_origin`` on."""
    q, k, v = qkv
    if not q.shape[1]:
        return
    device = q.device
    for rows in tiles(q.shape[0], config.batch):
        for heads_k in tiles(p.heads_k, config.heads_k):
            heads_q = slice(heads_k.start * p.group, heads_k.stop * p.group)
            b = torch.arange(rows.start + b_origin, rows.stop + b_origin, device=device)
            h = torch.arange(heads_q.start, heads_q.stop, device=device)
            grid = Grid(p.spec.region, t.leaves, q.shape[1], k.shape[1], b, h, k.shape[1])
            views = q[rows, :, heads_q], k[rows, :, heads_k], v[rows, :, heads_k]
            yield Step(p, t, config, *views, grid, (rows, *at, heads_q, heads_k))


def split_keys(step: Step) -> list[Step]:
    """Return a step as two: whole splits of keys as more rows of the batch, and the rest of the keys."""
    size, grid = step.config.split, step.grid
    splits, batch = grid.keys // size, len(grid.b)
    whole = splits * size
    k, v = (x[:, :whole].unflatten(1, (splits, size)).flatten(0, 1) for x in (step.k, step.v))
    origin = torch.arange(0, whole, size, device=grid.b.device)
    parts = [(step.q.repeat_interleave(splits, 0), k, v, grid.b.repeat_interleave(splits), origin.repeat(batch))]
    if whole < grid.keys:
        rest = torch.full((batch,), whole, device=grid.b.device)
        parts.append((step.q, step.k[:, whole:], step.v[:, whole:], grid.b, rest))
    return [
        replace(step, q=q, k=k, v=v, seen=None, grid=replace(grid, b=b, keys=k.shape[1], key_origin=origin))
        for q, k, v, b, origin in parts
    ]
