"""Tensor descriptors: through them Hopper and newer GPUs load whole tiles, and zeros past a tensor's last row.

Each is made once for a plan and then given the tensor of a call: its checks would take as long as a launch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.call import Call, is_aligned
from tilewise.backends.triton.host.launched import View, rebased
from tilewise.backends.triton.sheet import SHEET_STRIP
from tilewise.backends.triton.tiles import Tiles, pieces

Pieces = tuple[tuple[int, int, int], ...]


def operand_views(call: Call, tiles: Tiles, *names: str, cuts: Mapping[str, Pieces] | None = None) -> tuple[View, ...]:
    """Two descriptors of each operand, for the pieces of its head dim; the second is None where there is one piece.

    All are None where one is impossible, or a piece is padded. ``cuts``: the pieces, where they are not :func:`tiles.pieces`.
    """
    problem = call.plan.problem  # an operand's own rows may hold several terms of a head dim
    dims = {"q": problem.head_dim, "k": problem.head_dim, "v": problem.head_dim_v, "do": problem.head_dim_v}
    cuts = {name: pieces(dims[name], tiles) for name in names} if cuts is None else cuts
    found = {}
    if tiles.tma and call.align > 1 and not any(n != wide or len(cuts[x]) > 2 for x in names for _, n, wide in cuts[x]):
        found = {name: _operand_descriptors(call, tiles, name, cuts[name]) for name in names}
    if not found or None in found.values():
        return tuple(View(name, None) for name in names for _ in range(2))
    return tuple(
        View(name, rebased(descriptor, call.operands[name]) if descriptor is not None else None)
        for name, (first, *second) in found.items()
        for descriptor in (first, *(second or (None,)))
    )


def _operand_descriptors(call: Call, tiles: Tiles, name: str, cuts: Pieces) -> list | None:
    """Descriptors of an operand's (1, 1, rows, columns) tiles, one for each piece of its head dim; None where it can have none."""
    problem, operand = call.plan.problem, call.operands[name]
    heads, rows = (problem.heads_q, tiles.tile_m) if name in ("q", "do") else (problem.heads_k, tiles.tile_n)

    def make() -> list | None:
        strides = tuple(n * call.align for n in call.strides[name])
        view = four_axes(operand, strides, heads, operand.shape[0] if operand.ndim == 4 else 1)
        return view and [_of_nothing(operand, *view, [1, 1, rows, piece]) for _, _, piece in cuts]

    return call.plan.descriptors.of((name, rows, cuts, call.strides[name]), make)


def _of_nothing(like: Tensor, shape: list[int], strides: list[int], block: list[int]):
    """A like descriptor that keeps no tensor's memory alive, to be moved to another address later."""
    return runtime.kernels().TensorDescriptor(torch.empty(0, dtype=like.dtype), shape, strides, block)


def four_axes(x: Tensor, strides: tuple[int, int, int], heads: int, batch: int) -> tuple[list[int], list[int]] | None:
    """Shape and strides of a descriptor, (batch, heads, rows, columns), of a tensor with ``(batch, row, head)`` strides.

    None where there is none: a descriptor takes neither an empty tensor nor a stride of 0.
    """
    by_batch, row, head = strides
    shape = [batch, heads, x.shape[-3], x.shape[-1]]
    if not all(shape) or row == 0 or (heads > 1 and head == 0) or (batch > 1 and by_batch == 0):
        return None
    legal = 16 // x.element_size()  # of an axis of one element the stride is not used, but must be a legal one
    return shape, [by_batch or legal, head or legal, row, 1]


def pair_view(call: Call, tiles: Tiles) -> View:
    """A descriptor of the leaf that the score reads at i and j; None in it where there can be none."""
    plan = call.plan
    if plan.pair_leaf is None:
        return View("", None)
    slot, _ = plan.pair_leaf
    leaf, name = call.inputs.leaves[slot], plan.leaf_names[plan.emitted.slots.index(slot)]
    if not tiles.tma or not is_aligned(leaf):
        return View(name, None)

    def make():
        missing = 4 - leaf.ndim
        shape, strides = [1] * missing + list(leaf.shape), [16] * missing + list(leaf.stride())
        return _of_nothing(leaf, shape, strides, [1, 1, tiles.tile_m, tiles.tile_n])

    return View(name, rebased(plan.descriptors.of(("pair", tiles.tile_m, tiles.tile_n), make), leaf))


def statistics_view(call: Call, tiles: Tiles, lse2: Tensor, count: int, apart: int = 1) -> View:
    """A descriptor of the rows' statistics, of which ``lse2`` is the first: of both, or of that alone, as ``count`` says.

    A plain load would cost each thread an address for every number.

    Args:
        apart: the second one is so many statistics behind the first.
    """

    def make():
        rows = lse2.numel()
        return _of_nothing(lse2, [2, rows], [apart * rows, 1], [count, tiles.tile_m])

    return View("lse2", rebased(call.plan.descriptors.of(("statistics", tiles.tile_m, count, apart), make), lse2))


def sheet_view(sheet: Tensor, tiles: Tiles) -> View | None:
    """A descriptor of a sheet of dS; None where a tile is longer than the strips in which it lies."""
    if tiles.tile_m > SHEET_STRIP:
        return None
    block = [1, 1, 1, tiles.tile_n, tiles.tile_m]
    return View("sheet", runtime.kernels().TensorDescriptor(sheet, list(sheet.shape), list(sheet.stride()), block))
