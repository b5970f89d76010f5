"""The tensors of one call, in the forms that kernels read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise import dropout, state
from tilewise.backends.base import Inputs, unit_last
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.buffers import seqlen_q_rounded
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.host.plan import Plan, in_units, operand_strides
from tilewise.backends.triton.host.runtime import KernelLaunch, View
from tilewise.backends.triton.host.terms import split_into_terms
from tilewise.backends.triton.tiles import Tiles
from tilewise.caching import cached_property
from tilewise.device import given_to_graphs
from tilewise.planning.tiles import PARTIAL, Grid, SeenKeys, TileMap, seen_keys
from tilewise.problem import Problem


@dataclass
class Call:
    """A plan and the tensors of one call.

    Attributes:
        operands: q, k, v and, in a backward, do, with a last stride of 1; their bf16 terms where kernels read these; of a quantised
            cache two numbers of k and v as one int16 (``kernels.e4m3``).
        named: the tensors that every launch of the call may read, by name.
        aligned: whether the operands, and the leaf that a descriptor may bring, begin at multiples of 16 bytes.
        all_aligned: whether all of ``named`` do.
    """

    plan: Plan
    inputs: Inputs
    operands: dict[str, Tensor]
    named: dict[str, Any]
    aligned: bool
    all_aligned: bool

    @classmethod
    def of(cls, plan: Plan, inputs: Inputs, do: Tensor | None = None) -> Call:
        given = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | ({} if do is None else {"do": do})
        operands = {name: unit_last(x) for name, x in given.items()}
        if plan.problem.quantised:
            operands |= {name: operands[name].view(torch.int16) for name in ("k", "v")}
        if plan.zeroed:
            operands |= zeroed(plan, inputs, operands)
        if plan.terms > 1:
            operands = split_into_terms(plan, operands)
        pair = None if plan.pair_leaf is None else inputs.leaves[plan.pair_leaf[0]]
        named = operands | {
            "cu_seqlens_q": inputs.cu_seqlens_q,
            "cu_seqlens_k": inputs.cu_seqlens_k,
            "sink": inputs.sink,
            "seed": inputs.seed,
            "k_scale": inputs.k_scale,
            "v_scale": inputs.v_scale,
            "block_table": inputs.block_table,
            "seqlens_k": inputs.seqlens_k,
            "piece": given_to_graphs(plan.piece_start),
            "leaves": tuple(plan.leaves(inputs)),
            "grads": (),
            "pair": pair,
        }
        every = runtime.aligned(named.values())
        return cls(plan, inputs, operands, named, every or runtime.aligned((*operands.values(), pair)), every)

    @cached_property
    def layout(self) -> tuple[int, dict[str, tuple[int, ...]]]:
        """``(align, strides)``: the ``(batch, row, head)`` strides of the operands, in units of ``align`` elements: 16 bytes of the
        narrowest operand, where every stride is a multiple of them and every operand is aligned; else 1."""
        unit = 16 // min(x.element_size() for x in self.operands.values()) if self.aligned else 1
        return in_units({name: operand_strides(x) for name, x in self.operands.items()}, unit)

    @property
    def align(self) -> int:
        return self.layout[0]

    def run(self, key: object, new: Callable[[Call], Sequence[KernelLaunch]], **named: object) -> None:
        """Runs launches that the plan keeps, or makes by ``new``.

        Args:
            key: tells them from the plan's others, beside strides and alignments, which may differ: k and v may be copies.
            named: tensors beside those of every launch.
        """
        key = key, self.aligned, tuple([x.stride() for x in self.operands.values()])
        tensors = self.named | named
        aligned = self.all_aligned and runtime.aligned(named.values())
        for launch in self.plan.launches.of(key, lambda: new(self)):
            launch(tensors if launch.lists is None else tensors | tile_lists(self, *launch.lists), aligned)

    def sizes(self, slots: int, **chosen: int | tuple[int, ...]):
        """The whole numbers of a launch.

        Args:
            slots: programs of a head (:func:`tile_slots`).
            chosen: fields of :class:`kernels.arguments.Sizes` in place of the defaults.
        """
        plan, problem, config = self.plan, self.plan.problem, self.plan.config
        default = {"beside": config.beside, "batches": (0, problem.batch), "heads": (0, problem.heads_k)}
        sizes = runtime.kernels().Sizes(
            batch=problem.batch,
            heads_q=problem.heads_q,
            heads_k=problem.heads_k,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            dims=plan.dims,
            slots=slots,
            **self.layout[1],
            seqlen_q_rounded=seqlen_q_rounded(problem),
            threshold=dropout.threshold(problem.spec.dropout_p) if problem.spec.dropout_p else 0,
            group_parts=config.group_parts,
            **default | chosen,
            extents=plan.extents,
            grad_extents=plan.grad_extents,
        )
        return runtime.opaque(sizes)

    def facts(self, tiles: Tiles, views: Sequence[View | None] = (None,), **chosen: object) -> Facts:
        """:meth:`Plan.facts` of a launch of this call; by descriptor come all tiles that may, or none, as the first of ``views`` says."""
        tma = views[0] is not None
        return self.plan.facts(tiles, self.align, **{"tma": tma, "whole": tma and self.plan.whole, **chosen})

    def launch(
        self, kernel, grid, tiles: Tiles, sizes, facts, *between, lists: bool | None = None, reads: tuple[str, ...] = ()
    ) -> KernelLaunch:
        """A launch of a kernel; the arguments are those of :class:`KernelLaunch`.

        Args:
            lists: whether the lists of a predicate's tiles are by columns; None: the kernel walks over none.
            reads: of a kernel that knows nothing of mask and score, which compile none anew then.
        """
        scales, listed = self.plan.scales, None if lists is None or not self.plan.lists else (tiles, lists)
        if reads:
            sizes, scales = sizes._replace(extents=(), grad_extents=()), scales._replace(numbers=())
        return KernelLaunch(kernel, grid, tiles, sizes, scales, between, facts, listed, reads)


def sink_gradient(inputs: Inputs, lse: Tensor, delta: Tensor) -> Tensor | None:
    """The gradient of the sink, if there is one; ``lse`` and ``delta`` in lse's public shape."""
    if inputs.sink is None:
        return None
    rows = state.sink_gradient(inputs.sink.float().view(-1, 1), lse, delta)
    return rows.sum((0, 2) if lse.ndim == 3 else -1).to(inputs.sink.dtype)


def zeroed(plan: Plan, inputs: Inputs, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """v in a forward, where P multiplies it, and k in a backward, where dS does, with zeros for keys that no query sees; as it is once the
    device has reported that there are none, if descriptors may read it (docs/decisions.md#triton-zeroed-keys)."""
    name = "k" if "do" in operands else "v"
    x, leaves = operands[name], plan.mask_leaves(inputs)
    seen = plan.of_mask.of("seen", leaves, lambda: SeenKeys.of(new_seen_keys(plan.problem, inputs)))
    unaligned = [n for n in x.stride()[:-1] if n * x.element_size() % 16]
    if seen.are_all() and runtime.aligned((x,)) and not unaligned:
        return {}
    return {name: seen.zeroed(x)}


def new_seen_keys(problem: Problem, inputs: Inputs) -> Tensor:
    """The keys that some query of their batch element and head group sees, bool (batch | 1, heads_k | 1, seqlen_k)."""
    found = seen_keys(whole_grid(problem, inputs), problem.group)
    assert found is not None  # some may be hidden
    return found


def whole_grid(problem: Problem, inputs: Inputs) -> Grid:
    """The mask over all pairs of a call."""
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    return Grid.whole(problem.spec.region, inputs.leaves, shape, inputs.q.device)


def tile_slots(problem: Problem, length: int, tile: int) -> int:
    """The tiles of a head; packed, enough for every sequence and the rows past the last (``kernels.arguments.work_tile``)."""
    return length // tile + problem.batch + 1 if problem.packed else -(-length // tile)


def tile_lists(call: Call, tiles: Tiles, by_columns: bool) -> dict[str, tuple]:
    """:func:`new_tile_lists` of a call; the same again while the mask's tensors are the same, unchanged."""
    plan, inputs = call.plan, call.inputs
    make = partial(new_tile_lists, plan.problem, inputs, tiles, by_columns)
    return plan.of_mask.of((tiles.tile_m, tiles.tile_n, by_columns), plan.mask_leaves(inputs), make)


def new_tile_lists(problem: Problem, inputs: Inputs, tiles: Tiles, by_columns: bool) -> dict[str, tuple]:
    """``lists``: the tiles of a predicate to visit, by query tiles or by key tiles, and their counts (:meth:`TileMap.visits`).
    ``list_strides``: ``(batch, head, line)`` strides of the first and ``(batch, head)`` strides of the second, as kernels take them, 0
    where they are shared."""
    tile_map = TileMap.build(whole_grid(problem, inputs), tiles.tile_m, tiles.tile_n, by_columns)
    # Full tiles are read without bounds, so those at a ragged end count as partial.
    if problem.seqlen_k % tiles.tile_n:
        tile_map.status[..., -1:].clamp_(max=PARTIAL)
    if problem.seqlen_q % tiles.tile_m:
        tile_map.status[..., -1:, :].clamp_(max=PARTIAL)
    blocks, counts = tile_map.visits(by_columns)
    strides = *_shared_strides(blocks), blocks.stride(2), *_shared_strides(counts)
    return {"lists": (blocks, counts), "list_strides": runtime.opaque(strides)}


def _shared_strides(x: Tensor) -> list[int]:
    """``(batch, head)`` strides, 0 where there is one for all."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True)]
