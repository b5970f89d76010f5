"""Forwards over a cache in pages, and of few queries: the launch over it, and the merge of its split keys."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.call import Call, tile_slots
from tilewise.backends.triton.host.descriptors import operand_views
from tilewise.backends.triton.host.runtime import KernelLaunch, View
from tilewise.backends.triton.paging import E4M3_PAIR, addressing
from tilewise.backends.triton.tiles import Tiles, pieces, shared_pieces
from tilewise.problem import Problem

MERGED_AT_ONCE = 32  # states of a row that are read at once


def attend_pages(call: Call) -> KernelLaunch:
    """The kernel over pages: o and lse, or their partial states of each split of the keys."""
    plan, problem, inputs = call.plan, call.plan.problem, call.inputs
    tiles, splits = plan.config.forward, plan.config.splits
    pages, cuts = addressing(problem, tiles.tile_n), stored_pieces(problem, tiles)
    names = ("k",) if problem.latent else ("k", "v")
    # A descriptor brings a tile of one page.
    views = operand_views(call, tiles if pages != "several" else replace(tiles, tma=False), *names, cuts=cuts)
    views += (None,) * (4 - len(views))
    chosen = {
        "whole": False,  # what lies behind a sequence's keys may hold anything
        "pages": pages,
        "page_size": 0 if pages in ("whole", "dense") else problem.page_size,
        "group": problem.group,
        # The fewest key tiles of a split.
        "split_tiles": max((plan.config.split or 0) // tiles.tile_n, 1),
        "pieces": cuts["k"],
        "pieces_v": cuts["v"],
        "latent": problem.latent,
    }
    if splits > 1:
        chosen |= {"split": True, "sink": False, "overlap": plan.overlap("leads")}
    if problem.spec.max_logit:  # bounded scores are summed up without their maximum
        chosen |= {"max_logit": True, "bounded": False}
    if problem.quantised:
        chosen |= {"k_scale": _which(inputs.k_scale), "v_scale": _which(inputs.v_scale)}
    slots = tile_slots(problem, problem.seqlen_q * problem.group, tiles.tile_m)
    grid = (slots * problem.heads_k * problem.batch_dim, splits)
    between = View("block_table"), View("seqlens_k"), cache_sizes(call), *views
    return call.launch(
        runtime.kernels().paged, grid, tiles, call.sizes(slots), call.facts(tiles, views, **chosen), *between
    )


def cache_sizes(call: Call) -> tuple:
    """The whole numbers of the cache, as kernels take them."""
    problem, inputs = call.plan.problem, call.inputs
    scales = (scale_strides(inputs.k_scale), scale_strides(inputs.v_scale)) if problem.quantised else ()
    strides = (*inputs.block_table.stride(), *inputs.seqlens_k.stride()) if problem.paged else (0, 0, 0)
    return runtime.opaque(runtime.kernels().CacheSizes(inputs.k.shape[0], problem.seqlen_k, *strides, scales))


def stored_pieces(problem: Problem, tiles: Tiles) -> dict[str, tuple[tuple[int, int, int], ...]]:
    """The pieces of k's and of v's head dim, in the elements that kernels see: of a quantised cache one for two numbers."""
    each = E4M3_PAIR if problem.quantised else 1
    d, dv = problem.head_dim // each, problem.head_dim_v // each
    if problem.latent:
        return {"k": shared_pieces(d, dv, tiles), "v": pieces(dv, tiles)}
    return {"k": pieces(d, tiles), "v": pieces(dv, tiles)}


def _which(scale: Tensor) -> str:
    """Whether there is one scale for all keys of a sequence and head, or one for each."""
    return "each" if scale.ndim == 3 else "one"


def scale_strides(scale: Tensor) -> tuple[int, int, int, int]:
    """``(sequence, page, row, head)`` strides of a scale, 0 for an axis that it does not have."""
    strides = scale.stride()
    forms = ((0, 0, 0, 0), (0, 0, 0, *strides), (*strides[:1], 0, 0, *strides[1:]), (0, *strides))
    return forms[scale.ndim]


def merge_rows(call: Call) -> KernelLaunch:
    """The kernel that merges the partial states of split keys, a program for each row."""
    plan, problem, splits = call.plan, call.plan.problem, call.plan.config.splits
    tiles = Tiles(min(splits, MERGED_AT_ONCE), 16, 4, 1, padded=True)
    only = ("tile_m", "head_dim_v", "pieces_v", "packed", "sink", "splits", "max_logit", "overlap")
    chosen = {"splits": splits, "max_logit": problem.spec.max_logit, "overlap": plan.overlap("reads")}
    facts = call.facts(tiles, only=only, **chosen)
    rows = problem.seqlen_q * problem.heads_q * problem.batch_dim
    views = [View(f"partial_{name}") for name in ("o", "lse", "max_logit")]
    reads = ("o", "lse", *["max_logit"] * problem.spec.max_logit)
    reads += ("sink",) * (problem.spec.sink_slot is not None) + ("cu_seqlens_q",) * problem.packed
    return call.launch(runtime.kernels().merge_rows, (rows, 1), tiles, call.sizes(1), facts, *views, reads=reads)
