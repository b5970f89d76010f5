"""Forward and backward as lists of passes over the tensors of a call."""

from __future__ import annotations

import math

from torch import Tensor

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
from tilewise.backends.triton.host.buffers import BackwardBuffers, new_sheet, partial_states, sheet_shape
from tilewise.backends.triton.host.call import Call, sink_gradient, tile_slots
from tilewise.backends.triton.host.descriptors import operand_views, pair_view, sheet_view, statistics_view
from tilewise.backends.triton.host.leaf_sums import LeafSums, Strips, size_of_sum
from tilewise.backends.triton.host.paged import attend_pages, merge_rows
from tilewise.backends.triton.host.plan import Plan, Role
from tilewise.backends.triton.host.runtime import KernelLaunch, View, kernels
from tilewise.backends.triton.host.terms import TERM_ROWS
from tilewise.backends.triton.paging import PagedConfig
from tilewise.backends.triton.sheet import (
    SHEET_STRIP,
    SheetPart,
    pairs_tiles,
    product_tiles,
    sheet_tiles,
    summed_beside,
)
from tilewise.backends.triton.tiles import OVER_KEYS, Tiles
from tilewise.leaf_gradients import DIAGONALS, TILES, Read
from tilewise.masks.facts import as_band

SUMMING = Tiles(16, 64, 4, 1, padded=True)


# -- Forward -------------------------------------------------------------------------------------------------------


def forward(plan: Plan, inputs: Inputs) -> Output:
    plan = plan.few or plan
    out = empty_output(plan.problem, inputs.q, inputs.v)
    if has_no_pair(plan.problem):
        return output_of_no_pair(plan.problem, inputs)
    call, config = Call.of(plan, inputs), plan.config
    if not isinstance(config, PagedConfig):
        call.run("forward", lambda call: [_attend(call)], **out.named)
    elif config.splits == 1:
        call.run("forward", lambda call: [attend_pages(call)], **out.named)
    else:
        states = partial_states(out, config.splits)
        call.run("splits", lambda call: [attend_pages(call)], **states.named)
        partial = {f"partial_{name}": x for name, x in states.named.items()}
        call.run("merge", lambda call: [merge_rows(call)], **out.named, **partial)
    return out


def _attend(call: Call) -> KernelLaunch:
    """The forward kernel."""
    plan, problem, tiles = call.plan, call.plan.problem, call.plan.config.forward
    slots = tile_slots(problem, problem.seqlen_q, tiles.tile_m)
    views = operand_views(call, tiles, "k", "v")
    pair = pair_view(call, tiles) if tiles.ahead else None  # by pointers its loads hide under Q Kᵀ
    chosen = {}
    if pair is not None:
        chosen["pair"] = plan.pair_leaf[1]
    if problem.spec.max_logit:  # bounded scores are summed up without their maximum
        chosen |= {"max_logit": True, "bounded": False}
    facts = call.facts(tiles, views, **chosen)
    grid = (slots * problem.heads_q * problem.batch_dim, tiles.column_parts)
    return call.launch(kernels().forward, grid, tiles, call.sizes(slots), facts, *views, pair, lists=False)


# -- Backward ------------------------------------------------------------------------------------------------------


def backward(plan: Plan, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
    problem = plan.problem
    if has_no_pair(problem):
        return gradients_of_no_pair(problem, inputs, dlse)
    call = Call.of(plan, inputs, do)
    buffers = BackwardBuffers.empty(problem, inputs, plan.config.group_parts)
    sums = LeafSums(plan, inputs)  # may launch kernels; what overlaps follows one another in the stream
    run_statistics(call, out, dlse, buffers)
    (lse2, delta), (dk, dv) = buffers.statistics.unbind(), buffers.over_keys
    written = {"lse2": lse2, "delta": delta, "dq": buffers.dq, "dk": dk, "dv": dv, "grads": sums.buffers}
    written |= {"dk_sums": buffers.dk, "dv_sums": buffers.dv}
    # lse has what a sink changes: no kernel of a backward is another one for it.
    call.run("backward", _passes, sink=None, **written, **new_sheet(plan, inputs.q))
    dsink = sink_gradient(inputs, out.lse, buffers.delta(problem))
    return Grads(buffers.dq, buffers.dk, buffers.dv, dsink, sums.totals())


def _passes(call: Call) -> list[KernelLaunch]:
    """The launches of a backward behind that of the statistics."""
    plan, reads = call.plan, call.plan.emitted.reads
    if plan.sheet:
        passes = _passes_over_pairs(call) if plan.keeps_pairs else _passes_over_sheets(call, reads[0])
    else:
        # dQ first: where its programs have a multiprocessor each, two of the next pass's fill one that has no more of them.
        passes = [_pass(call, "dq", role="reads")]
        passes += [_pass(call, name, role="joins") for name in plan.config.passes if name in OVER_KEYS]
        passes += [_pair_sum(call, n, read) for n, read in enumerate(reads) if read.how == TILES]
        passes += [_strip_sum(call, n, read) for n, read in enumerate(reads) if read.how == DIAGONALS]
    if plan.config.group_parts > 1:
        passes.append(_sum_group_parts(call))
    return passes


def run_statistics(call: Call, out: Output, dlse: Tensor, buffers: BackwardBuffers, **chosen: object) -> None:
    """Computes the rows' statistics, lse in base 2 and delta; ``chosen`` are facts in place of the defaults."""
    plan, problem = call.plan, call.plan.problem
    tiles = Tiles(64 if plan.terms == 1 else TERM_ROWS, 64, 4, 1)
    slots = -(-problem.seqlen_q // tiles.tile_m)

    def new(call: Call) -> list[KernelLaunch]:
        only = ("tile_m", "tile_n", "align", "unit", "natural", "terms", "term_unit", "overlap")
        facts = call.facts(tiles, only=only, overlap=plan.overlap("leads"), **chosen)
        grid = (slots * problem.heads_q * problem.batch_dim,)
        reads = ("o", "lse", "do", "dlse", "lse2", "delta")
        return [call.launch(kernels().delta, grid, tiles, call.sizes(slots), facts, reads=reads)]

    lse2, delta = buffers.statistics.unbind()
    call.run(("statistics", *chosen.items()), new, o=out.o, lse=out.lse, dlse=dlse, lse2=lse2, delta=delta)


def _pass(call: Call, name: str, part: SheetPart | None = None, *, role: Role = "reads") -> KernelLaunch:
    """One of ``Config.passes`` of the backward: for a ``part`` of dS alone, it leaves that in a sheet; "pairs" leaves P too."""
    plan, problem, over_keys = call.plan, call.plan.problem, name in OVER_KEYS
    tiles = pairs_tiles(problem, plan.config) if name == "pairs" else plan.config.passes[name]
    length, tile = (problem.seqlen_k, tiles.tile_n) if over_keys else (problem.seqlen_q, tiles.tile_m)
    if part is not None:
        length = min(part.keys, problem.seqlen_k - part.first_key)
    slots = tile_slots(problem, length, tile)
    views = operand_views(call, tiles, *(("q", "do") if over_keys else ("k", "v")))
    sums = {"dk": name in ("dkdv", "dk"), "dv": name in ("dkdv", "dv")}
    chosen = {**sums, "again": True, "sink": False, "overlap": plan.overlap(role)}
    if part is not None:
        chosen["sheet"] = max(SHEET_STRIP, sheet_tiles(problem, plan.config).tile_m)
    if over_keys:
        more, facts_of_them = _views_over_keys(call, name, tiles, part, views[0] is not None)
        views, chosen = (*views, *more), chosen | facts_of_them | {"in_parts": plan.config.group_parts > 1}
    chosen |= {"rows": None, "leaves": None, "row_grads": ()} if over_keys else {"columns": None}
    facts = call.facts(tiles, views, **chosen)
    sizes = call.sizes(slots) if part is None else _sheet_sizes(call, slots, part)
    outer = (part.heads if part else problem.heads_k) * plan.config.group_parts if over_keys else problem.heads_q
    kernel = kernels().dkdv if over_keys else kernels().dq
    grid = (slots * outer * (part.batches if part else problem.batch_dim), tiles.column_parts)
    return call.launch(kernel, grid, tiles, sizes, facts, *views, lists=over_keys)


def _sum_group_parts(call: Call) -> KernelLaunch:
    """Adds up dK and dV of the parts of each group's heads."""
    problem, block = call.plan.problem, SUMMING.tile_m * SUMMING.tile_n
    rows = problem.seqlen_k * problem.heads_k * problem.batch_dim
    grid = (-(-rows * max(problem.head_dim, problem.head_dim_v) // block),)
    only = ("tile_m", "tile_n", "packed", "overlap")
    facts = call.facts(SUMMING, only=only, overlap=call.plan.overlap("reads"))
    views = View("dk_sums"), View("dv_sums")
    return call.launch(kernels().group_parts, grid, SUMMING, call.sizes(1), facts, *views, reads=("dk", "dv"))


def _views_over_keys(
    call: Call, name: str, tiles: Tiles, part: SheetPart | None, tma: bool
) -> tuple[tuple[View | None, ...], dict[str, object]]:
    """The further views of a pass over key tiles, of the statistics, a pair leaf and a sheet; and the facts that tell of them."""
    plan, facts = call.plan, {}
    pair = pair_view(call, tiles)
    if pair is not None:
        facts["pair"] = plan.pair_leaf[1]
    statistics, sheet = None, None
    if tma and not plan.problem.packed and not tiles.chunk:
        statistics = statistics_view(call, tiles, "lse2", 1 if name == "dv" else 2)
    if part is not None and tma and tiles.tile_m <= SHEET_STRIP and name != "pairs":
        sheet, facts["strips"] = sheet_view(plan, tiles), SHEET_STRIP
    return (statistics, pair, sheet), facts


def _pair_sum(call: Call, n: int, read: Read) -> KernelLaunch:
    """Adds up the gradient of a leaf that is read at i and j, the n-th read, over what it is broadcast over."""
    plan, problem = call.plan, call.plan.problem
    tiles = pair_sum_tiles(problem, plan.config.dq)
    loops = ("b" in read.loops, "h" in read.loops)
    outer = (1 if loops[0] else problem.batch) * (1 if loops[1] else problem.heads_q)
    grid = (-(-problem.seqlen_q // tiles.tile_m), -(-problem.seqlen_k // tiles.tile_n), outer)
    facts = call.facts(tiles, lists=False, again=True, read=n)
    return call.launch(kernels().tile, grid, tiles, call.sizes(1), facts, n, *loops)


def _strip_sum(call: Call, n: int, read: Read) -> KernelLaunch:
    """Adds up the gradient of a leaf that is read by distance, the n-th read, near the diagonal."""
    plan, problem = call.plan, call.plan.problem
    strips = Strips.of(plan, read)
    grid = (strips.number, strips.parts, problem.heads_q * problem.batch_dim)
    facts = call.facts(strips.tiles, lists=False, again=True, read=n)
    band = as_band(problem.spec.region, None if problem.packed else 0, problem.seqlen_k) is not None
    sizes = call.sizes(strips.slots, portion=strips.slots_of_part)
    return call.launch(kernels().strip, grid, strips.tiles, sizes, facts, n, band)


# -- Sheets of dS --------------------------------------------------------------------------------------------------


def _passes_over_sheets(call: Call, read: Read) -> list[KernelLaunch]:
    """The passes over key tiles leave parts of dS behind; from these come dQ and the gradient of a pair bias, or of a table.

    These then take one product of a tile, not five.
    """
    plan, config = call.plan, call.plan.config
    launched = [] if config.dv is None else [_pass(call, "dv")]
    for part in plan.sheet:
        launched.append(_pass(call, "dkdv" if config.dv is None else "dk", part))
        launched.append(_sum_sheet(call, read, part))
        if read.how == DIAGONALS:
            launched.append(_sum_sheet_strips(call, read, part))
    return launched


def _passes_over_pairs(call: Call) -> list[KernelLaunch]:
    """A pass leaves parts of dS and P behind; from these come dQ, dK and dV, each by one product of a tile."""
    launched = []
    for part in call.plan.sheet:
        launched.append(_pass(call, "pairs", part))
        launched.append(_sum_sheet(call, None, part))
        launched += [_sum_pairs(call, name, part) for name in ("dk", "dv")]
    return launched


def _sum_pairs(call: Call, name: str, part: SheetPart) -> KernelLaunch:
    """Adds up dK of a part of dS, or dV of one of P."""
    problem, tiles = call.plan.problem, product_tiles(call.plan.problem, call.plan.config)
    slots = tile_slots(problem, problem.seqlen_k, tiles.tile_n)
    views = operand_views(call, tiles, "do" if name == "dv" else "q")
    facts = call.facts(tiles, views)
    grid = (slots * part.heads * part.batches, tiles.column_parts)
    sizes = _sheet_sizes(call, slots, part, beside=(1, 1))
    return call.launch(kernels().kept_pairs, grid, tiles, sizes, facts, *views, name == "dv")


def _sheet_sizes(call: Call, slots: int, part: SheetPart, **chosen: tuple[int, int]):
    """The whole numbers of a launch for a part of dS; ``chosen`` as in :meth:`Call.sizes`."""
    of_part = {"batches": (part.first_batch, part.batches), "heads": (part.first_head, part.heads)}
    return call.sizes(slots, portion=part.first_key, sheet=sheet_shape(call.plan)[2:4], **of_part, **chosen)


def _sum_sheet(call: Call, read: Read | None, part: SheetPart) -> KernelLaunch:
    """Adds up dQ of a part of dS, with sums from part to part of the keys, and the gradient of a pair bias, ``read``, that it makes."""
    plan, problem = call.plan, call.plan.problem
    tiles = (product_tiles if read is None else sheet_tiles)(problem, plan.config)
    slots = tile_slots(problem, problem.seqlen_q, tiles.tile_m)
    views = operand_views(call, tiles, "k")
    grad, loops, splits, of_sum = None, (), (1, 0), {"adds": part.first_batch > 0}
    if read is not None:
        grad, loops = 0 if read.how == TILES else None, read.loops
        of_sum |= {"read": 0, "unit": math.gcd(problem.seqlen_k, 16 // problem.dtype.itemsize)}
        splits = plan.splits[0], size_of_sum(problem, read)
    facts = call.facts(tiles, views, **of_sum)
    grid = (slots * part.heads * problem.group * part.batches, tiles.column_parts)
    more, last = part.first_key > 0, part.first_key == plan.sheet[-1].first_key
    together = summed_beside(part.batches, part.heads * problem.group, loops)
    sizes = _sheet_sizes(call, slots, part, beside=together, splits=splits)
    between = *views, View("dq_sums"), grad, "b" in loops, "h" in loops, more, last
    return call.launch(kernels().sheet, grid, tiles, sizes, facts, *between)


def _sum_sheet_strips(call: Call, read: Read, part: SheetPart) -> KernelLaunch:
    """Adds up the gradient of a tensor that is read by distance, from a part of dS that has all keys of its heads."""
    plan, problem = call.plan, call.plan.problem
    strips = Strips.of(plan, read)
    grid = (strips.number, strips.parts, part.heads * problem.group * part.batches)
    facts = call.facts(strips.tiles, lists=False, read=0)
    sizes = _sheet_sizes(call, strips.slots_of_part, part)
    return call.launch(kernels().sheet_strip, grid, strips.tiles, sizes, facts, 0)
