"""Forward mode and the tangent of the backward: the passes of :mod:`kernels.tangent` over the tensors of a call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilewise import state
from tilewise.backends.base import Directions, Grads, Inputs, Output, OutputGrads
from tilewise.backends.triton.config import INTERPRETED, SHARED_MEMORY, memory_limit
from tilewise.backends.triton.host.buffers import BackwardBuffers
from tilewise.backends.triton.host.call import Call, is_aligned, list_pointers, tile_slots
from tilewise.backends.triton.host.launch import _batches, _statistics
from tilewise.backends.triton.host.leaf_sums import LeafSums
from tilewise.backends.triton.host.plan import Plan, extents_of
from tilewise.backends.triton.host.runtime import kernels
from tilewise.backends.triton.kernels.emit import Emitted, emit
from tilewise.backends.triton.tiles import Tiles, columns
from tilewise.caching import cached_property
from tilewise.problem import Problem

PASSES = ("tangent", "dq_tangent", "dkdv_tangent")
# Tiles of the kernels of tangents by the largest head dim (docs/decisions.md#triton-tangents): the fastest on an H200 of those that
# fit by `tangent_memory`; above 128, which was not timed, those with which ptxas spills least for sm_90.
TANGENT_TILES = {
    64: {"tangent": (128, 32, 4, 2), "dq_tangent": (64, 64, 4, 2), "dkdv_tangent": (32, 64, 4, 2)},
    128: {"tangent": (128, 64, 8, 2), "dq_tangent": (64, 32, 4, 2), "dkdv_tangent": (32, 128, 8, 2)},
    256: {"tangent": (128, 64, 8, 2), "dq_tangent": (64, 64, 8, 2), "dkdv_tangent": (64, 64, 8, 2)},
}
# What is made smaller, in turn, until tiles fit.
_SMALLER = (
    {"num_stages": 1},
    {"tile_m": 64, "tile_n": 64},
    {"tile_m": 32, "tile_n": 32, "num_warps": 4},
    {"tile_m": 16, "tile_n": 16},
)


def tangent_tiles(problem: Problem, kernel: str, limit: int | None = None) -> Tiles:
    """The tiles of a kernel of tangents, for ``limit`` bytes of shared memory: by default those of the problem's device."""
    if problem.device.type == "cpu":
        return INTERPRETED.forward
    limit = limit or memory_limit(problem.device, SHARED_MEMORY["sm90"])
    largest = max(problem.head_dim, problem.head_dim_v)
    tiles = Tiles(*next(row for most, row in TANGENT_TILES.items() if largest <= most)[kernel])
    for smaller in _SMALLER:
        dims = problem.head_dim, problem.head_dim_v
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

    moving: tuple[int, ...] = ()
    tiles: dict[str, Tiles] = field(default_factory=dict)

    @cached_property
    def emitted(self) -> Emitted:
        count = len(self.problem.extras)
        wide = self.wide | {count + n for n in self.wide}
        return emit(self.problem, wide, tangents={n: count + n for n in self.moving})

    @cached_property
    def extents(self) -> tuple[tuple[int, ...], ...]:
        """Size and stride of every axis of the leaves and of their tangents, which are contiguous."""
        extras = self.problem.extras
        whole = [torch.empty(x.shape, device="meta") for x in extras]
        axes = [(x.shape, x.stride) for x in extras] + [(x.shape, x.stride()) for x in whole]
        return tuple(extents_of(*axes[n]) for n in self.emitted.slots)

    @cached_property
    def grad_extents(self) -> tuple[tuple[int, ...], ...]:
        """Size and stride of every axis of contiguous tensors of the same shapes."""
        extras = self.problem.extras
        whole = [torch.empty(extras[n % len(extras)].shape, device="meta") for n in self.emitted.slots]
        return tuple(extents_of(x.shape, x.stride()) for x in whole)

    def moved_facts(self, **flags: bool) -> dict[str, object]:
        """The facts that kernels of tangents have beside the others."""
        return flags | {name: self.emitted.functions.get(name) for name in ("moved", "moved_slope")}


def new_plan(problem: Problem, config, moving: tuple[int, ...]) -> TangentPlan:
    """The plan of a problem's tangents: fp32 comes as it is, not as bf16 terms."""
    config = replace(config, products="tf32" if config.products == "tf32" else "ieee")
    return TangentPlan(problem, config, moving=moving, tiles={name: tangent_tiles(problem, name) for name in PASSES})


def jvp(plan: TangentPlan, inputs: Inputs, out: Output, along: Directions) -> Output:
    """The tangents of o and lse."""
    problem = plan.problem
    call = _moving_call(plan, inputs, along, None)
    moved = Output(torch.empty_like(out.o, memory_format=torch.contiguous_format), torch.empty_like(out.lse))
    directions = _directions(inputs, along)
    tiles = plan.tiles["tangent"]
    lists = call.tile_lists(tiles, False)
    slots = tile_slots(problem, problem.seqlen_q, tiles.tile_m)
    tensors = call.tensors(o=aligned(out.o), lse=out.lse.contiguous(), lists=list_pointers(lists))
    given = kernels().Moved(**directions, o=moved.o, lse=moved.lse, sink=along.sink)
    facts = plan.facts(
        tiles, call.align, again=True, **plan.moved_facts(moved_sink=along.sink is not None, moved_do=False)
    )
    grid = (slots * problem.heads_q * _batches(problem),)
    call.launch(kernels().tangent, grid, tiles, tensors, call.sizes(slots, lists=lists), facts, given)
    return moved


def backward_jvp(
    plan: TangentPlan, inputs: Inputs, out: Output, grad: OutputGrads, along: Directions, moved: Output
) -> Grads:
    """The tangents of dq, dk, dv and of the gradients of the sink and of the score's tensors."""
    problem = plan.problem
    call = _moving_call(plan, inputs, along, grad.do)
    buffers = BackwardBuffers.empty(problem, inputs)
    out = Output(aligned(out.o), out.lse.contiguous())
    _statistics(call, out, grad.dlse, buffers)
    changes = _moved_delta(call, out, grad, moved)
    lse2, delta = buffers.statistics.unbind()
    sums = LeafSums(plan, call.inputs)
    tensors = call.tensors(lse2=lse2, delta=delta, dq=buffers.dq, dk=buffers.dk, dv=buffers.dv, grads=sums.buffers)
    given = kernels().Moved(
        **_directions(inputs, along),
        do=None if grad.do_tangent is None else aligned(grad.do_tangent),
        lse=moved.lse.contiguous(),
        delta=changes.statistics[1],
    )
    more = plan.moved_facts(moved_sink=False, moved_do=grad.do_tangent is not None)
    for name, by_columns in (("dq_tangent", False), ("dkdv_tangent", True)):
        tiles = plan.tiles[name]
        lists = call.tile_lists(tiles, by_columns)
        length, tile = (problem.seqlen_k, tiles.tile_n) if by_columns else (problem.seqlen_q, tiles.tile_m)
        slots = tile_slots(problem, length, tile)
        heads = problem.heads_k if by_columns else problem.heads_q
        grid = (slots * heads * _batches(problem),)
        bundle = tensors if lists is None else tensors._replace(lists=list_pointers(lists))
        facts = plan.facts(tiles, call.align, again=True, **more)
        call.launch(getattr(kernels(), name), grid, tiles, bundle, call.sizes(slots, lists=lists), facts, given)
    dsink = None
    if inputs.sink is not None:
        sink = inputs.sink.float().view(-1, 1)
        by = (0.0 if along.sink is None else along.sink.float().view(-1, 1)) - moved.lse
        dsink = state.sink_gradient(sink, out.lse, by * buffers.delta(problem) + changes.delta(problem))
        dsink = dsink.sum(-1 if problem.packed else (0, 2)).to(inputs.sink.dtype)
    return Grads(buffers.dq, buffers.dk, buffers.dv, dsink, sums.totals())


def _moved_delta(call: Call, out: Output, grad: OutputGrads, moved: Output) -> BackwardBuffers:
    """The tangent of delta, (32), in the statistics of buffers that are otherwise empty."""
    problem, none = call.plan.problem, call.inputs.q.new_empty(0)
    buffers = BackwardBuffers.empty(problem, Inputs(none, none, none))
    no_dlse = torch.zeros_like(out.lse) if grad.dlse_tangent is None else grad.dlse_tangent
    buffers.statistics = torch.empty_like(BackwardBuffers.empty(problem, call.inputs).statistics)
    _statistics(call, Output(aligned(moved.o), out.lse), no_dlse, buffers)
    if grad.do_tangent is not None:
        products = (grad.do_tangent.float() * out.o.float()).sum(-1)
        buffers.delta(problem).add_(products.transpose(-1, -2))
    return buffers


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy that is contiguous and starts at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if is_aligned(x) else x.clone()


def _directions(inputs: Inputs, along: Directions) -> dict[str, Tensor]:
    """The tangents of q, k and v by name, zeros where there is none."""
    pairs = {"q": (inputs.q, along.q), "k": (inputs.k, along.k), "v": (inputs.v, along.v)}
    return {name: x.new_zeros(x.shape) if tangent is None else aligned(tangent) for name, (x, tangent) in pairs.items()}


def _moving_call(plan: TangentPlan, inputs: Inputs, along: Directions, do: Tensor | None) -> Call:
    """The call with the leaves' tangents behind the leaves."""
    moved = [None if x is None else aligned(x) for x in along.leaves]
    leaves = replace(along, leaves=moved).with_leaves(inputs.leaves)
    return Call.of(plan, replace(inputs, leaves=leaves), None if do is None else aligned(do))
