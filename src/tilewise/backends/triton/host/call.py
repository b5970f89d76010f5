"""The tensors of one call, in the forms that kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import dropout
from tilewise.backends.base import Inputs, unit_last
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.buffers import seqlen_q_rounded
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.host.launched import Launched, View
from tilewise.backends.triton.host.plan import Layout, Plan
from tilewise.backends.triton.host.terms import TermsLaunch, split_into_terms
from tilewise.backends.triton.tiles import Tiles
from tilewise.problem import Problem
from tilewise.tiles import PARTIAL, Grid, TileLists, TileMap


@dataclass
class Call:
    """A plan and the tensors of one call.

    Attributes:
        operands: q, k, v and, in a backward, do, with a last stride of 1; their bf16 terms where kernels read these; of a quantised
            cache k and v :func:`by_twos`.
        strides: of the operands, in units of ``align`` elements.
        align: the elements of 16 bytes, of the narrowest operand, where every stride is a multiple of them and every operand is
            aligned; else 1.
        steady: every pointer is aligned.
        copied: some operand's last stride was not 1.
        terms: what made the operands' terms; None where there are none.
    """

    plan: Plan
    inputs: Inputs
    operands: dict[str, Tensor]
    strides: dict[str, tuple[int, int, int]]
    align: int
    steady: bool
    copied: bool
    terms: TermsLaunch | None

    @classmethod
    def of(cls, plan: Plan, inputs: Inputs, do: Tensor | None = None) -> Call:
        given = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | ({} if do is None else {"do": do})
        operands = {name: unit_last(x) for name, x in given.items()}
        copied = any(operands[name] is not x for name, x in given.items())
        if plan.problem.quantised:
            operands |= {name: by_twos(operands[name]) for name in ("k", "v")}
        terms = None
        if plan.terms > 1:
            operands, terms = split_into_terms(plan, operands, is_aligned(*operands.values()))
        # The strides of q, k and v are the problem's.
        key = None if do is None else operands["do"].stride()
        layout = plan.layouts.of(key, lambda: Layout.of(plan.problem, operands))
        in_units = layout.in_units is not None and is_aligned(*operands.values())
        align, strides = (layout.unit, layout.in_units) if in_units else (1, layout.strides)
        others = inputs.leaves if inputs.seed is None else (*inputs.leaves, inputs.seed)
        return cls(plan, inputs, operands, strides, align, align > 1 and is_aligned(*others), copied, terms)

    def tensors(self, **named: object):
        """The pointers of a launch: the call's, and those given by name."""
        inputs = self.inputs
        return runtime.kernels().Tensors(
            **self.operands,
            cu_seqlens_q=inputs.cu_seqlens_q,
            cu_seqlens_k=inputs.cu_seqlens_k,
            sink=inputs.sink,
            seed=inputs.seed,
            k_scale=inputs.k_scale,
            v_scale=inputs.v_scale,
            piece=self.plan.piece_start,
            leaves=tuple(self.plan.leaves(inputs)),
            **named,
        )

    def sizes(self, slots: int, *, portion: int = 0, lists: TileLists | None = None, **chosen: tuple[int, ...]):
        """The whole numbers of a launch; the same object again where they are the same and all pointers are aligned.

        Args:
            slots: programs of a head (:func:`tile_slots`).
            portion: as in :class:`kernels.arguments.Sizes`.
            chosen: fields of Sizes in place of the defaults.
        """
        if not self.steady:
            return self._sizes(slots, portion, lists, chosen)
        key = (slots, portion, self.strides.get("do"), list_strides(lists), *chosen.items())
        return self.plan.sizes.of(key, lambda: self._sizes(slots, portion, lists, chosen))

    def _sizes(self, slots: int, portion: int, lists: TileLists | None, chosen: dict[str, tuple[int, ...]]):
        plan, problem = self.plan, self.plan.problem
        config = plan.config
        chosen = {"beside": config.beside, "heads": (0, problem.heads_k), "group_parts": config.group_parts} | chosen
        sizes = runtime.kernels().Sizes(
            batch=problem.batch,
            heads_q=problem.heads_q,
            heads_k=problem.heads_k,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            slots=slots,
            **self.strides,
            seqlen_q_rounded=seqlen_q_rounded(problem),
            portion=portion,
            threshold=dropout.threshold(problem.spec.dropout_p) if problem.spec.dropout_p else 0,
            **chosen,
            list_strides=list_strides(lists),
            extents=plan.extents,
            grad_extents=plan.grad_extents,
        )
        return runtime.opaque(sizes)

    def launch(
        self,
        kernel,
        grid: tuple[int, ...],
        tiles: Tiles,
        tensors: object,
        sizes: object,
        facts: Facts,
        *between: object,
    ) -> Launched:
        """Launches a kernel.

        Args:
            between: what the kernel takes between its scales and its facts: views and constants.
        """
        bundles = (tensors, sizes, self.plan.scales)
        values = [x.value if isinstance(x, View) else x for x in between]
        compiled = self.plan.start(kernel, grid, tiles, *bundles, *values, facts)
        return Launched.of(compiled, grid, bundles, between, facts)

    def tile_lists(self, tiles: Tiles, by_columns: bool) -> TileLists | None:
        """The lists of a predicate's tiles; the same again while the mask's tensors are the same, unchanged."""
        plan = self.plan
        if not plan.lists:
            return None
        key, leaves = (tiles.tile_m, tiles.tile_n, by_columns), plan.mask_leaves(self.inputs)
        return plan.tile_lists.of(key, leaves, lambda: new_tile_lists(plan.problem, self.inputs, tiles, by_columns))


def by_twos(x: Tensor) -> Tensor:
    """Numbers of 8 bits as half as many int16 (``kernels.e4m3``): a view."""
    return x.view(torch.int16)


def is_aligned(*tensors: Tensor) -> bool:
    """Whether all start at a multiple of 16 bytes."""
    return not sum(x.data_ptr() % 16 for x in tensors)


def tile_slots(problem: Problem, length: int, tile: int) -> int:
    """The tiles of a head; packed, enough for every sequence and the rows past the last (``kernels.arguments.work_tile``)."""
    return length // tile + problem.batch + 1 if problem.packed else -(-length // tile)


def new_tile_lists(problem: Problem, inputs: Inputs, tiles: Tiles, by_columns: bool) -> TileLists:
    """The partial and the full tiles of a predicate, listed by query tiles or by key tiles."""
    shape = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    grid = Grid.whole(problem.spec.region, inputs.leaves, shape, inputs.q.device)
    tile_map = TileMap.build(grid, tiles.tile_m, tiles.tile_n, by_columns)
    # Full tiles are read without bounds, so those at a ragged end count as partial.
    if problem.seqlen_k % tiles.tile_n:
        tile_map.status[..., -1:].clamp_(max=PARTIAL)
    if problem.seqlen_q % tiles.tile_m:
        tile_map.status[..., -1:, :].clamp_(max=PARTIAL)
    return tile_map.lists(by_columns)


def list_strides(lists: TileLists | None) -> tuple[int, ...]:
    """``(batch, head, line)`` strides of a list and ``(batch, head)`` strides of its counts, 0 where they are shared."""
    if lists is None:
        return (0, 0, 0, 0, 0)
    by_batch, by_head = _shared_strides(lists.partial)
    return (by_batch, by_head, lists.partial.stride(2), *_shared_strides(lists.partial_count))


def _shared_strides(x: Tensor) -> list[int]:
    """``(batch, head)`` strides, 0 where there is one for all."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True)]


def list_pointers(lists: TileLists | None) -> tuple[Tensor, ...] | None:
    """The four tensors of the lists; kernels take both lists, and both counts, to have the same strides."""
    return None if lists is None else (lists.partial, lists.partial_count, lists.full, lists.full_count)
