"""Forward mode and the tangent of the backward: the passes of :mod:`kernels.tangent` over the tensors of a call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilewise.backends.base import (
    Directions,
    Grads,
    Inputs,
    Output,
    OutputGrads,
    gradients_of_no_pair,
    has_no_pair,
    tangents_of_no_pair,
)
from tilewise.backends.triton.config import INTERPRETED, architecture, may_round, memory_limit, row_for
from tilewise.backends.triton.host.buffers import BackwardBuffers
from tilewise.backends.triton.host.call import Call, sink_gradient, tile_slots
from tilewise.backends.triton.host.descriptors import operand_views, statistics_view
from tilewise.backends.triton.host.launch import run_statistics
from tilewise.backends.triton.host.leaf_sums import LeafSums
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.host.runtime import KernelLaunch, View, aligned, kernels
from tilewise.backends.triton.kernels.emit import Emitted, emit
from tilewise.backends.triton.tiles import Tiles, columns
from tilewise.caching import cached_property
from tilewise.problem import Problem

PASSES = ("tangent", "dq_tangent", "dkdv_tangent")
# Tiles of the kernels of tangents by the largest head dim (docs/decisions.md#triton-tangents), of the pass over query tiles that computes
# o's tangent, of that which computes dQ's, and of the pass over key tiles. On Hopper the fastest on an H200; elsewhere, where tiles do
# not come by descriptor, those with which ptxas spills least for sm_90.
TANGENT_TILES = {
    64: (Tiles(128, 32, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2)),
    128: (Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 128, 8, 2)),
    256: (Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
}
HOPPER_TILES = {
    64: (Tiles(64, 64, 4, 3, tma=True), Tiles(64, 64, 4, 2, tma=True), Tiles(64, 64, 4, 3, tma=True)),
    128: (Tiles(128, 64, 8, 2, tma=True), Tiles(64, 32, 4, 2, tma=True), Tiles(32, 64, 4, 2, tma=True)),
    256: (Tiles(128, 64, 8, 2, tma=True), Tiles(64, 64, 8, 2, tma=True), Tiles(64, 64, 8, 2, tma=True)),
}
# Of fp32 that is not rounded to tf32. Arithmetic units read registers, of which tiles of half precision are too large.
FLOAT_TILES = {
    128: (Tiles(32, 32, 8, 1),) * 3,
    256: (Tiles(16, 16, 8, 1),) * 3,
}
MAX_HEAD_DIM = min(map(max, (HOPPER_TILES, TANGENT_TILES, FLOAT_TILES)))
# What is made smaller, in turn, until tiles fit.
_SMALLER = (
    {"num_stages": 1},
    {"tile_m": 64, "tile_n": 64},
    {"tile_m": 32, "tile_n": 32, "num_warps": 4},
    {"tile_m": 16, "tile_n": 16},
)


def tangent_tiles(problem: Problem, kernel: str) -> Tiles:
    """The tiles of a kernel of tangents on the problem's device."""
    if problem.device.type == "cpu":
        return INTERPRETED.forward
    limit, half = memory_limit(problem.device), problem.dtype.itemsize == 2
    table = HOPPER_TILES if half and architecture(problem.device) == "sm90" else TANGENT_TILES
    if not half and not may_round(problem):
        table = FLOAT_TILES
    dims = problem.head_dim, problem.head_dim_v
    tiles = row_for(table, problem)[PASSES.index(kernel)]
    for smaller in _SMALLER:
        if tangent_memory(dims, problem.dtype.itemsize, kernel, tiles) > limit:
            tiles = replace(tiles, **{name: min(n, getattr(tiles, name)) for name, n in smaller.items()})
    return tiles


def tangent_memory(head_dims: tuple[int, int], itemsize: int, kernel: str, tiles: Tiles) -> int:
    """Bytes of shared memory that a kernel of tangents needs at most: what stays, what its loop streams, and two tiles of pairs."""
    w, wv = (columns(d, tiles) for d in head_dims)
    m, n, stages = tiles.tile_m, tiles.tile_n, tiles.num_stages
    rows = {
        "tangent": 2 * m * w + stages * n * 2 * (w + wv),
        "dq_tangent": 2 * m * (w + wv) + stages * n * 2 * (w + wv),
        "dkdv_tangent": 2 * n * (w + wv) + stages * m * 2 * (w + wv),
    }
    return itemsize * (rows[kernel] + 2 * m * n) + 2048


@dataclass(eq=False)
class TangentPlan(Plan):
    """The plan of a problem's tangents.

    Attributes:
        moving: the slots of leaves that have tangents, which are leaves too, behind the others.
        tiles: of each kernel.
    """

    zeroed = False  # the tangents of k and v would have to be, too
    moving: tuple[int, ...] = ()
    tiles: dict[str, Tiles] = field(default_factory=dict)

    @cached_property
    def emitted(self) -> Emitted:
        count = len(self.problem.extras)
        wide = self.wide | {count + n for n in self.wide}
        return emit(self.problem, wide, tangents={n: count + n for n in self.moving})


def new_plan(problem: Problem, config, moving: tuple[int, ...]) -> TangentPlan:
    """The plan of a problem's tangents: fp32 comes as it is, not as bf16 terms."""
    config = replace(config, products="tf32" if may_round(problem) else "ieee")
    return TangentPlan(problem, config, moving=moving, tiles={name: tangent_tiles(problem, name) for name in PASSES})


def jvp(plan: TangentPlan, inputs: Inputs, out: Output, along: Directions) -> Output:
    """The tangents of o and lse."""
    problem = plan.problem
    if has_no_pair(problem):
        return tangents_of_no_pair(out, along)
    call = _moving_call(plan, inputs, along, None)
    moved = Output(torch.empty_like(out.o), torch.empty_like(out.lse))
    directions = _directions(along, None)
    given = kernels().Moved(**directions, o=moved.o, lse=moved.lse, sink=along.sink)

    def new(call: Call) -> list[KernelLaunch]:
        tiles = plan.tiles["tangent"]
        slots = tile_slots(problem, problem.seqlen_q, tiles.tile_m)
        views = _views(call, tiles, directions, "k", "v")
        facts = call.facts(tiles, views, again=True)
        grid = (slots * problem.heads_q * problem.batch_dim,)
        return [
            call.launch(kernels().tangent, grid, tiles, call.sizes(slots), facts, View("moved"), *views, lists=False)
        ]

    tensors = {"moved": given, **_named(directions), "o": contiguous(out.o), "lse": out.lse}
    call.run(("tangent", along.sink is not None, *_forms(directions)), new, **tensors)
    return moved


def backward_jvp(
    plan: TangentPlan, inputs: Inputs, out: Output, grad: OutputGrads, along: Directions, moved: Output
) -> Grads:
    """The tangents of dq, dk, dv and of the gradients of the sink and of the score's tensors."""
    problem = plan.problem
    if has_no_pair(problem):
        return gradients_of_no_pair(problem, inputs, grad.dlse_tangent)
    call = _moving_call(plan, inputs, along, grad.do)
    buffers = BackwardBuffers.empty(problem, inputs)
    # By what they are of, and by lse and delta: fp32 (2, 2, rows). Each lies at the same distance from its tangent.
    statistics = buffers.statistics.new_empty((2, *buffers.statistics.shape))
    buffers.statistics, changes = statistics[0], replace(buffers, statistics=statistics[1])
    out = Output(contiguous(out.o), out.lse)
    run_statistics(call, out, grad.dlse, buffers)
    _moved_statistics(call, out, grad, moved, changes)
    (lse2, delta), (moved_lse, moved_delta) = (x.unbind() for x in statistics)
    sums = LeafSums(plan, call.inputs)
    directions = _directions(along, grad.do_tangent)

    def new(call: Call) -> list[KernelLaunch]:
        return [_pass(call, name, directions) for name in ("dq_tangent", "dkdv_tangent")]

    given = kernels().Moved(**directions, lse=moved_lse, delta=moved_delta)
    tensors = {"moved": given, **_named(directions), "lse2": lse2, "delta": delta, "grads": sums.buffers}
    tensors |= {"dq": buffers.dq, "dk": buffers.dk, "dv": buffers.dv}
    call.run(("backward", *_forms(directions)), new, **tensors)
    by = (0.0 if along.sink is None else along.sink.float().view(-1, 1)) - moved.lse
    dsink = sink_gradient(inputs, out.lse, by * buffers.delta(problem) + changes.delta(problem))
    return Grads(buffers.dq, buffers.dk, buffers.dv, dsink, sums.totals())


def _pass(call: Call, name: str, directions: dict[str, Tensor | None]) -> KernelLaunch:
    """One of the passes of the backward's tangent."""
    plan, problem, by_columns = call.plan, call.plan.problem, name == "dkdv_tangent"
    tiles = plan.tiles[name]
    length, tile = (problem.seqlen_k, tiles.tile_n) if by_columns else (problem.seqlen_q, tiles.tile_m)
    slots = tile_slots(problem, length, tile)
    grid = (slots * (problem.heads_k if by_columns else problem.heads_q) * problem.batch_dim,)
    views = _views(call, tiles, directions, *(("q", "do") if by_columns else ("k", "v")))
    facts = call.facts(tiles, views, again=True)
    if by_columns:
        described = facts.tma and not problem.packed
        views += tuple(statistics_view(call, tiles, x, 2, apart=2) if described else None for x in ("lse2", "delta"))
    sizes = call.sizes(slots)
    return call.launch(getattr(kernels(), name), grid, tiles, sizes, facts, View("moved"), *views, lists=by_columns)


def _moved_statistics(call: Call, out: Output, grad: OutputGrads, moved: Output, changes: BackwardBuffers) -> None:
    """Computes the tangents of lse and of delta, (32), as the statistics of ``changes``."""
    no_dlse = torch.zeros_like(out.lse) if grad.dlse_tangent is None else grad.dlse_tangent
    # In fp32's units the kernel passes on an lse as it is.
    run_statistics(call, Output(contiguous(moved.o), moved.lse), no_dlse, changes, natural=True)
    if grad.do_tangent is not None:
        products = (grad.do_tangent.float() * out.o.float()).sum(-1)
        changes.delta(call.plan.problem).add_(products.transpose(-1, -2))


def contiguous(x: Tensor) -> Tensor:
    """``x``, which is contiguous, or a copy where it does not begin at a multiple of 16 bytes."""
    return x if aligned((x,)) else x.clone()


def _directions(along: Directions, do_tangent: Tensor | None) -> dict[str, Tensor | None]:
    """The tangents of q, k, v and dO by name, None where one is zero."""
    named = {"q": along.q, "k": along.k, "v": along.v, "do": do_tangent}
    return {name: None if x is None else contiguous(x) for name, x in named.items()}


def _named(directions: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The tangents of operands as views name them."""
    return {f"moved_{name}": x for name, x in directions.items()}


def _forms(directions: dict[str, Tensor | None]) -> tuple:
    """What of tangents a launch is made for: their strides, None of a zero."""
    return tuple(None if x is None else x.stride() for x in directions.values())


def _views(call: Call, tiles: Tiles, directions: dict[str, Tensor | None], *names: str) -> tuple[View | None, ...]:
    """A descriptor of each operand, then one of each operand's tangent; None where it is zero, and everywhere where one is impossible."""
    none = (None,) * (2 * len(names))
    plain = operand_views(call, tiles, *names)
    if plain[0] is None or any(plain[1::2]):  # a head dim of two pieces
        return none
    given = {name: x for name in names if (x := directions[name]) is not None}
    moved = replace(call, operands=call.operands | given)
    views = operand_views(moved, tiles, *given)[::2]
    if None in views:
        return none
    by_name = {view.name: view._replace(name=f"moved_{view.name}") for view in views}
    return (*plain[::2], *(by_name.get(name) for name in names))


def _moving_call(plan: TangentPlan, inputs: Inputs, along: Directions, do: Tensor | None) -> Call:
    """The call with the leaves' tangents behind the leaves."""
    moved = [None if x is None else contiguous(x) for x in along.leaves]
    leaves = replace(along, leaves=moved).with_leaves(inputs.leaves)
    return Call.of(plan, replace(inputs, leaves=leaves), None if do is None else contiguous(do))
