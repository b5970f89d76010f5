"""Tensor descriptors: through them Hopper and newer GPUs load whole tiles, and zeros past a tensor's last row.

Each is made once for a launch and then given the tensor of a call: its checks would take as long as a launch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.buffers import sheet_shape, statistics_rows
from tilewise.backends.triton.host.call import Call
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.host.runtime import View
from tilewise.backends.triton.tiles import Tiles, pieces

Pieces = tuple[tuple[int, int, int], ...]


def operand_views(
    call: Call, tiles: Tiles, *names: str, cuts: Mapping[str, Pieces] | None = None
) -> tuple[View | None, ...]:
    """Two descriptors of each operand, for the pieces of its head dim; the second is None where there is one piece.

    All are None where one is impossible, or a piece is padded. ``cuts``: the pieces, where they are not :func:`tiles.pieces`.

    With ``tiles.chunk`` one descriptor serves all pieces of an operand, and the second is of the operand that it is multiplied by; where
    descriptors may not read every tile, all are None.
    """
    if tiles.chunk:
        return _views_of_chunks(call, tiles, names)
    problem = call.plan.problem  # an operand's own rows may hold several terms of a head dim
    dims = {"q": problem.head_dim, "k": problem.head_dim, "v": problem.head_dim_v, "do": problem.head_dim_v}
    cuts = {name: pieces(dims[name], tiles) for name in names} if cuts is None else cuts
    found: list[View | None] = []
    if tiles.tma and call.align > 1 and not any(n != wide or len(cuts[x]) > 2 for x in names for _, n, wide in cuts[x]):
        for name in names:
            if views := _views(call, tiles, name, [piece for _, _, piece in cuts[name]]):
                found += [*views, None][:2]
    return tuple(found) if len(found) == 2 * len(names) else (None,) * (2 * len(names))


_FACTORS = {"q": "k", "k": "q", "v": "do", "do": "v"}


def _views_of_chunks(call: Call, tiles: Tiles, names: tuple[str, ...]) -> tuple[View | None, ...]:
    """The :func:`operand_views` of tiles that are read in chunks."""
    plan, found = call.plan, []
    if tiles.tma and call.align > 1 and plan.whole:
        for name in (x for pair in zip(names, map(_FACTORS.get, names), strict=True) for x in pair):
            # A forward has no dO.
            found += _views(call, tiles, name, [tiles.chunk]) if name in call.operands else [None]
    return tuple(found) if len(found) == 2 * len(names) else (None,) * (2 * len(names))


def _views(call: Call, tiles: Tiles, name: str, widths: list[int]) -> list[View]:
    """Descriptors of an operand, of (1, 1, rows, width) tiles for each of ``widths``; none where there can be none."""
    problem, (align, strides) = call.plan.problem, call.layout
    operand, by_queries = call.operands[name], name in ("q", "do")
    heads, rows = (problem.heads_q, tiles.tile_m) if by_queries else (problem.heads_k, tiles.tile_n)
    batch = operand.shape[0] if operand.ndim == 4 else 1
    axes = four_axes(operand, tuple(n * align for n in strides[name]), heads, batch)
    return [_view(name, operand.dtype, *axes, [1, 1, rows, width]) for width in widths] if axes else []


def _view(name: str, dtype: torch.dtype, shape: list[int], strides: list[int], block: list[int]) -> View:
    """A view by a descriptor that keeps no tensor's memory alive, to be given one later."""
    return View(name, runtime.kernels().TensorDescriptor(torch.empty(0, dtype=dtype), shape, strides, block))


def four_axes(x: Tensor, strides: tuple[int, ...], heads: int, batch: int) -> tuple[list[int], list[int]] | None:
    """Shape and strides of a descriptor, (batch, heads, rows, columns), of a tensor with ``(batch, row, head)`` strides.

    None where there is none: a descriptor takes neither an empty tensor nor a stride of 0.
    """
    by_batch, row, head = strides
    shape = [batch, heads, x.shape[-3], x.shape[-1]]
    if not all(shape) or row == 0 or (heads > 1 and head == 0) or (batch > 1 and by_batch == 0):
        return None
    legal = 16 // x.element_size()  # of an axis of one element the stride is not used, but must be a legal one
    return shape, [by_batch or legal, head or legal, row, 1]


def pair_view(call: Call, tiles: Tiles) -> View | None:
    """A descriptor of the leaf that the score reads at i and j; None where there can be none."""
    leaf = call.named["pair"]
    if leaf is None or not tiles.tma or not call.aligned:
        return None
    missing = 4 - leaf.ndim
    shape, strides = [1] * missing + list(leaf.shape), [16] * missing + list(leaf.stride())
    return _view("pair", leaf.dtype, shape, strides, [1, 1, tiles.tile_m, tiles.tile_n])


def statistics_view(call: Call, tiles: Tiles, name: str, count: int, apart: int = 1) -> View:
    """A descriptor of the rows' statistics, of which the tensor ``name`` is the first: of both, or of that alone, as ``count`` says.

    A plain load would cost each thread an address for every number.

    Args:
        apart: the second one is so many statistics behind the first.
    """
    rows = statistics_rows(call.plan.problem)
    return _view(name, torch.float32, [2, rows], [apart * rows, 1], [count, tiles.tile_m])


def sheet_view(plan: Plan, tiles: Tiles) -> View:
    """A descriptor of a sheet of dS, for tiles no longer than the strips in which they lie."""
    shape = list(sheet_shape(plan))
    strides = list(torch.empty(shape, device="meta").stride())
    return _view("sheet", plan.problem.dtype, shape, strides, [1, 1, 1, tiles.tile_n, tiles.tile_m])
