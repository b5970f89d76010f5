"""Forward and backward as lists of passes over the tensors of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from tilewise import state
from tilewise.backends.base import (
    Grads,
    Inputs,
    Output,
    empty_output,
    gradients_of_no_pair,
    has_no_pair,
    output_of_no_pair,
)
from tilewise.backends.triton.config import pair_sum_tiles
from tilewise.backends.triton.host.buffers import BackwardBuffers, new_sheet, partial_states
from tilewise.backends.triton.host.call import Call, is_aligned, list_pointers, tile_slots
from tilewise.backends.triton.host.descriptors import operand_views, pair_view, sheet_view, statistics_view
from tilewise.backends.triton.host.launched import Launched, View
from tilewise.backends.triton.host.leaf_sums import LeafSums, Strips
from tilewise.backends.triton.host.paged import attend_pages, merge_rows
from tilewise.backends.triton.host.plan import Plan, Role
from tilewise.backends.triton.host.relaunch import BackwardRelaunch, ForwardRelaunch
from tilewise.backends.triton.host.runtime import kernels
from tilewise.backends.triton.host.terms import TERM_ROWS
from tilewise.backends.triton.sheet import SHEET_STRIP, SheetPart, sheet_tiles, summed_beside
from tilewise.backends.triton.tiles import OVER_KEYS, Tiles
from tilewise.leaf_gradients import DIAGONALS, TILES, Read
from tilewise.masks.facts import as_band
from tilewise.problem import Problem, regrouped_queries

MERGING = Tiles(16, 16, 4, 1, padded=True)
SUMMING = Tiles(16, 64, 4, 1, padded=True)


# -- Forward -------------------------------------------------------------------------------------------------------


def forward(plan: Plan, inputs: Inputs) -> Output:
    if plan.regrouped is not None:
        problem = plan.problem
        return _ungrouped(problem, forward(plan.regrouped, replace(inputs, q=regrouped_queries(problem, inputs.q))))
    out = empty_output(plan.problem, inputs.q, inputs.v)
    relaunch = plan.relaunch(inputs)
    if relaunch is not None and relaunch(inputs, out):
        return out
    if has_no_pair(plan.problem):
        return output_of_no_pair(plan.problem, inputs)
    call, splits = Call.of(plan, inputs), Splits.of(plan)
    if plan.problem.paged:
        relaunch = _forward_over_pages(call, out)
    elif splits is None:
        relaunch = ForwardRelaunch.of(call, _attend(call, out))
    else:
        states = partial_states(out, splits.number)
        main = _attend(call, states, splits)
        relaunch = ForwardRelaunch.of(call, main, _merge(call, out, states), splits.number)
    if relaunch is not None:
        plan.keep(inputs, relaunch)
    return out


def _forward_over_pages(call: Call, out: Output) -> ForwardRelaunch | None:
    splits = call.plan.config.splits
    if splits == 1:
        return ForwardRelaunch.of(call, attend_pages(call, out))
    states = partial_states(out, splits)
    return ForwardRelaunch.of(call, attend_pages(call, states), merge_rows(call, out, states), splits)


@dataclass(frozen=True)
class Splits:
    """The keys in ``number`` splits of ``tiles`` key tiles each."""

    tiles: int
    number: int

    @classmethod
    def of(cls, plan: Plan) -> Splits | None:
        """The splits of a problem's keys; None where each row sees its keys in one program."""
        problem, keys, tile_n = plan.problem, plan.config.split, plan.config.forward.tile_n
        if not keys or problem.packed or problem.paged or plan.lists or problem.seqlen_k <= keys:
            return None
        tiles = -(-keys // tile_n)
        return cls(tiles, -(-problem.seqlen_k // (tiles * tile_n)))


def _attend(call: Call, to: Output, splits: Splits | None = None) -> Launched:
    """Runs the forward kernel: o and lse, or their partial states of each split of the keys."""
    plan, problem, tiles = call.plan, call.plan.problem, call.plan.config.forward
    lists = call.tile_lists(tiles, False)
    slots = tile_slots(problem, problem.seqlen_q, tiles.tile_m)
    views = operand_views(call, tiles, "k", "v")
    pair = pair_view(call, tiles) if tiles.ahead else View("", None)  # by pointers its loads hide under Q Kᵀ
    tma, chosen = views[0].value is not None, {}
    if pair.value is not None:
        chosen["pair"] = plan.pair_leaf[1]
    if splits is not None:
        chosen |= {"split": True, "sink": False}
    if to.max_logit is not None:  # bounded scores are summed up without their maximum
        chosen |= {"max_logit": True, "bounded": False}
    facts = plan.facts(tiles, call.align, tma=tma, whole=tma and plan.whole, **chosen)
    sizes = call.sizes(slots, portion=splits.tiles if splits else 0, lists=lists)
    tensors = call.tensors(**to.named, lists=list_pointers(lists))
    grid = (slots * problem.heads_q * problem.batch_dim, splits.number if splits else 1)
    return call.launch(kernels().forward, grid, tiles, tensors, sizes, facts, *views, pair)


def _merge(call: Call, out: Output, states: Output) -> Launched:
    """Runs the kernel that merges the partial states of split keys."""
    plan, problem = call.plan, call.plan.problem
    slots = tile_slots(problem, problem.seqlen_q, MERGING.tile_m)
    facts = plan.facts(MERGING, call.align, natural=True, dropout=False, max_logit=out.max_logit is not None)
    tensors, sizes = call.tensors(**out.named), call.sizes(slots, portion=len(states.o))
    grid = (slots * problem.heads_q * problem.batch, 1)
    views = [View(f"partial_{name}", getattr(states, name)) for name in ("o", "lse", "max_logit")]
    return call.launch(kernels().merge, grid, MERGING, tensors, sizes, facts, *views)


def _ungrouped(problem: Problem, out: Output) -> Output:
    """The outputs of a decoding step, from those of its :func:`regrouped_problem`."""
    o = out.o.transpose(1, 2).reshape(problem.batch, 1, problem.heads_q, problem.head_dim_v)
    return Output(o, *[x.view(problem.batch, problem.heads_q, 1) for x in out.tensors[1:]])


# -- Backward ------------------------------------------------------------------------------------------------------


def backward(plan: Plan, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
    problem, relaunch = plan.problem, plan.relaunch(inputs, do.stride())
    if relaunch is None and has_no_pair(problem):
        return gradients_of_no_pair(problem, inputs, dlse)
    buffers = BackwardBuffers.empty(problem, inputs, plan.config.group_parts)
    leaves = None if relaunch is None else relaunch(inputs, out, do, dlse, buffers)
    if leaves is None:
        leaves = _first_backward(plan, inputs, out, do, dlse, buffers)
    dsink = None
    if inputs.sink is not None:
        dsink = state.sink_gradient(inputs.sink.float().view(-1, 1), out.lse, buffers.delta(problem))
        dsink = dsink.sum(-1 if problem.packed else (0, 2)).to(inputs.sink.dtype)
    return Grads(buffers.dq, buffers.dk, buffers.dv, dsink, leaves)


def _first_backward(
    plan: Plan, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor, buffers: BackwardBuffers
) -> dict[int, Tensor]:
    """Computes ``buffers`` and the leaves' gradients; where it can, the plan keeps the launches for later calls."""
    call = Call.of(plan, inputs, do)
    sums = LeafSums(plan, inputs)  # may launch kernels; what overlaps follows one another in the stream
    statistics = launch_statistics(call, out, dlse, buffers)
    lse2, delta = buffers.statistics.unbind()
    dk, dv = buffers.over_keys
    tensors = call.tensors(lse2=lse2, delta=delta, dq=buffers.dq, dk=dk, dv=dv, grads=sums.buffers)
    if plan.sheet:
        passes = _passes_over_sheets(call, tensors, sums.reads[0])
    else:
        # dQ first: where its programs have a multiprocessor each, two of the next pass's fill one that has no more of them.
        over_keys = [name for name in plan.config.passes if name in OVER_KEYS]
        passes = [_pass(call, "dq", tensors, role="reads")]
        passes += [_pass(call, name, tensors, role="joins") for name in over_keys]
        passes += [_pair_sum(call, tensors, n, read) for n, read in enumerate(sums.reads) if read.how == TILES]
        passes += [_strip_sum(call, tensors, n, read) for n, read in enumerate(sums.reads) if read.how == DIAGONALS]
    if buffers.parts is not None:
        passes.append(_sum_group_parts(call, tensors, buffers))
    leaves = sums.totals()
    relaunch = BackwardRelaunch.of(call, [statistics, *passes])
    if relaunch is not None:
        plan.keep(inputs, relaunch, do.stride())
    return leaves


def launch_statistics(call: Call, out: Output, dlse: Tensor, buffers: BackwardBuffers, **chosen: object) -> Launched:
    """Computes the rows' statistics, lse in base 2 and delta; ``chosen`` are facts in place of the defaults."""
    plan, problem = call.plan, call.plan.problem
    tiles = Tiles(64 if plan.terms == 1 else TERM_ROWS, 64, 4, 1, padded=True)
    slots = -(-problem.seqlen_q // tiles.tile_m)
    call = call if is_aligned(out.o, out.lse, dlse) else replace(call, steady=False)
    lse2, delta = buffers.statistics.unbind()
    tensors = call.tensors(o=out.o, lse=out.lse, dlse=dlse, lse2=lse2, delta=delta)
    facts = plan.facts(tiles, call.align, **plan.overlap("leads"), **chosen)
    grid = (slots * problem.heads_q * problem.batch_dim,)
    return call.launch(kernels().delta, grid, tiles, tensors, call.sizes(slots), facts)


def _pass(call: Call, name: str, tensors, part: SheetPart | None = None, *, role: Role = "reads") -> Launched:
    """Runs one of ``Config.passes`` of the backward: for a ``part`` of heads and keys alone, it leaves their dS in a sheet."""
    plan, problem, over_keys = call.plan, call.plan.problem, name in OVER_KEYS
    tiles = plan.config.passes[name]
    length, tile = (problem.seqlen_k, tiles.tile_n) if over_keys else (problem.seqlen_q, tiles.tile_m)
    if part is not None:
        length = min(part.keys, problem.seqlen_k - part.first_key)
    slots = tile_slots(problem, length, tile)
    lists = call.tile_lists(tiles, over_keys)
    views = operand_views(call, tiles, *(("q", "do") if over_keys else ("k", "v")))
    tma = views[0].value is not None
    chosen = {"dk": name != "dv", "dv": name != "dk", "again": True, **plan.overlap(role)}
    if part is not None:
        chosen["sheet"] = max(SHEET_STRIP, sheet_tiles(problem, plan.config).tile_m)
    if over_keys:
        more, facts_of_them = _views_over_keys(call, name, tensors, part, tma)
        views, chosen = (*views, *more), chosen | facts_of_them | {"in_parts": plan.config.group_parts > 1}
    facts = plan.facts(tiles, call.align, tma=tma, whole=tma and plan.whole, **chosen)
    sizes = call.sizes(slots, lists=lists) if part is None else _sheet_sizes(call, slots, tensors, part)
    if lists is not None:
        tensors = tensors._replace(lists=list_pointers(lists))
    outer = (part.heads if part else problem.heads_k) * plan.config.group_parts if over_keys else problem.heads_q
    kernel = kernels().dkdv if over_keys else kernels().dq
    return call.launch(kernel, (slots * outer * problem.batch_dim,), tiles, tensors, sizes, facts, *views)


def _sum_group_parts(call: Call, tensors, buffers: BackwardBuffers) -> Launched:
    """Adds up dK and dV of the parts of each group's heads."""
    block = SUMMING.tile_m * SUMMING.tile_n
    grid = (-(-max(buffers.dk.numel(), buffers.dv.numel()) // block),)
    facts = call.plan.facts(SUMMING, call.align, **call.plan.overlap("reads"))
    views = View("dk_sums", buffers.dk), View("dv_sums", buffers.dv)
    return call.launch(kernels().group_parts, grid, SUMMING, tensors, call.sizes(1), facts, *views)


def _views_over_keys(
    call: Call, name: str, tensors, part: SheetPart | None, tma: bool
) -> tuple[tuple[View, ...], dict[str, object]]:
    """The further views of a pass over key tiles, of the statistics, a pair leaf and a sheet; and the facts that tell of them."""
    plan, tiles, facts = call.plan, call.plan.config.passes[name], {}
    pair = pair_view(call, tiles)
    if pair.value is not None:
        facts["pair"] = plan.pair_leaf[1]
    statistics, sheet = View("lse2", None), View("sheet", None)
    if tma and not plan.problem.packed:
        statistics = statistics_view(call, tiles, tensors.lse2, 1 if name == "dv" else 2)
    if part is not None and tma and tiles.tile_m <= SHEET_STRIP:
        sheet, facts["strips"] = sheet_view(tensors.sheet, tiles), SHEET_STRIP
    return (statistics, pair, sheet), facts


def _pair_sum(call: Call, tensors, n: int, read: Read) -> Launched:
    """Adds up the gradient of a leaf that is read at i and j, the n-th read, over what it is broadcast over."""
    plan, problem = call.plan, call.plan.problem
    tiles = pair_sum_tiles(problem, plan.config.dq)
    loops = ("b" in read.loops, "h" in read.loops)
    outer = (1 if loops[0] else problem.batch) * (1 if loops[1] else problem.heads_q)
    grid = (-(-problem.seqlen_q // tiles.tile_m), -(-problem.seqlen_k // tiles.tile_n), outer)
    facts = plan.facts(tiles, call.align, lists=False, again=True, read=n)
    return call.launch(kernels().tile, grid, tiles, tensors, call.sizes(1), facts, n, *loops)


def _strip_sum(call: Call, tensors, n: int, read: Read) -> Launched:
    """Adds up the gradient of a leaf that is read by distance, the n-th read, near the diagonal."""
    plan, problem = call.plan, call.plan.problem
    strips = Strips.of(plan, read)
    grid = (strips.number, strips.parts, problem.heads_q * problem.batch_dim)
    facts = plan.facts(strips.tiles, call.align, lists=False, again=True, read=n)
    band = as_band(problem.spec.region, None if problem.packed else 0, problem.seqlen_k) is not None
    sizes = call.sizes(strips.slots, portion=strips.slots_of_part)
    return call.launch(kernels().strip, grid, strips.tiles, tensors, sizes, facts, n, band)


# -- Sheets of dS --------------------------------------------------------------------------------------------------


def _passes_over_sheets(call: Call, tensors, read: Read) -> list[Launched]:
    """The passes over key tiles leave parts of dS behind; from these come dQ and the gradient of a pair bias, or of a table.

    These then take one product of a tile, not five.
    """
    plan, config = call.plan, call.plan.config
    sheet, sums = new_sheet(plan, call.inputs.q)
    tensors = tensors._replace(sheet=sheet)
    launched = [] if config.dv is None else [_pass(call, "dv", tensors)]
    for part in plan.sheet:
        launched.append(_pass(call, "dkdv" if config.dv is None else "dk", tensors, part))
        launched.append(_sum_sheet(call, tensors, sums, read, part))
        if read.how == DIAGONALS:
            launched.append(_sum_sheet_strips(call, tensors, read, part))
    return launched


def _sheet_sizes(call: Call, slots: int, tensors, part: SheetPart, **chosen: tuple[int, int]):
    """The whole numbers of a launch for a part of dS; ``chosen`` as in :meth:`Call.sizes`."""
    sheet = tuple(tensors.sheet.shape[2:4])
    return call.sizes(slots, portion=part.first_key, heads=(part.first_head, part.heads), sheet=sheet, **chosen)


def _sum_sheet(call: Call, tensors, sums: Tensor | None, read: Read, part: SheetPart) -> Launched:
    """Adds up dQ of a part of dS, with ``sums`` from part to part of the keys, and the gradient of a pair bias that it makes."""
    plan, problem, tiles = call.plan, call.plan.problem, sheet_tiles(call.plan.problem, call.plan.config)
    slots = tile_slots(problem, problem.seqlen_q, tiles.tile_m)
    views = operand_views(call, tiles, "k")
    tma = views[0].value is not None
    unit = math.gcd(problem.seqlen_k, 16 // problem.dtype.itemsize)
    facts = plan.facts(tiles, call.align, tma=tma, whole=tma and plan.whole, read=0, unit=unit)
    grid = (slots * part.heads * problem.group * problem.batch,)
    grad, loops = (0 if read.how == TILES else None), ("b" in read.loops, "h" in read.loops)
    more, last = part.first_key > 0, part.first_key == plan.sheet[-1].first_key
    together = summed_beside(problem, part.heads * problem.group, read.loops)
    sizes = _sheet_sizes(call, slots, tensors, part, beside=together)
    return call.launch(
        kernels().sheet, grid, tiles, tensors, sizes, facts, *views, View("dq_sums", sums), grad, *loops, more, last
    )


def _sum_sheet_strips(call: Call, tensors, read: Read, part: SheetPart) -> Launched:
    """Adds up the gradient of a tensor that is read by distance, from a part of dS that has all keys of its heads."""
    plan, problem = call.plan, call.plan.problem
    strips = Strips.of(plan, read)
    grid = (strips.number, strips.parts, part.heads * problem.group * problem.batch)
    facts = plan.facts(strips.tiles, call.align, lists=False, read=0)
    sizes = _sheet_sizes(call, strips.slots_of_part, tensors, part)
    return call.launch(kernels().sheet_strip, grid, strips.tiles, tensors, sizes, facts, 0)
