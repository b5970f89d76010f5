"""Forward of keys that each query selected: every query with the heads that share its keys is a sequence over a cache in pages.

A page has the keys of an entry, and the sorted entries of a query's row are its block table, so the kernels that decode over pages read
the selected keys alone, once for all heads. A causal mask is a sequence's length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilewise import expr
from tilewise.backends.base import Inputs, Output, PerTensors, empty_output
from tilewise.problem import Problem, TensorFacts
from tilewise.selections import keys_of_entry
from tilewise.spec import parse_spec
from tilewise.tiles import Grid

WORTH = 4  # a query's entries name at most one key of so many
_tables = PerTensors()


def serves(p: Problem) -> bool:
    """Whether a call selects few keys, query by query, and nothing else depends on where a key is but an end after the last."""
    region, score = p.spec.region, p.spec.score
    if region.predicate is None or region.predicate.op != "selected":
        return False
    if p.packed or p.paged or p.spec.piece or p.spec.mapped:
        return False
    block, _ = keys_of_entry(region.predicate)
    leaf = p.extras[region.predicate.args[0][1]]
    plain = p.spec.dropout_p == 0 and (score is None or (expr.depends_on(score) <= {"s"} and not expr.lookups(score)))
    ends = (region.lo is None or expr.is_number(region.lo, 0)) and (
        region.hi is None or "h" not in expr.depends_on(region.hi)
    )
    by_query = expr.same(region.predicate.args[3], expr.symbol("i"))
    return plain and ends and by_query and p.seqlen_k % block == 0 and leaf.shape[-1] * block * WORTH <= p.seqlen_k


def forward(p: Problem, t: Inputs, run: Callable[[Problem, Inputs], Output]) -> Output:
    """Return the output of a call that :func:`serves`; ``run`` is the forward of a backend that reads pages."""
    selection = p.spec.region.predicate
    block, leaf = keys_of_entry(selection)[0], t.leaves[selection.args[0][1]]
    table, lengths = _tables.of((p.spec.source, p.sizes), t.leaves, lambda: _table(p, t, leaf, block))
    pages = [x.unflatten(1, (p.seqlen_k // block, block)).flatten(0, 1) for x in (t.k, t.v)]
    if leaf.shape[1] == 1:
        return _in_layout_of(p, t, [run(*_paged(p, t, t.q, pages, (table[:, 0], lengths[:, 0]), slice(None)))])
    found = []
    for h in range(p.heads_k):
        heads, key = slice(h * p.group, (h + 1) * p.group), slice(h, h + 1)
        at = t.q[:, :, heads], [x[:, :, key] for x in pages], (table[:, h], lengths[:, h]), heads
        found.append(run(*_paged(p, t, *at)))
    return _in_layout_of(p, t, found)


def _table(p: Problem, t: Inputs, leaf: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the pages of each query, int32 ``(batch, heads_k|1, seqlen_q, entries)``, and its keys: int32, without the last dimension."""
    leaf = leaf.data  # a view would keep the caller's tensor, and with it what is kept for it
    same = (leaf[..., 1:] == leaf[..., :-1]) & (leaf[..., 1:] < expr.WRONG_ENTRY)
    if same.any():
        leaf = leaf.clone()
        leaf[..., 1:][same] = expr.NO_ENTRY
        leaf = leaf.sort(-1).values
    grid = Grid(p.spec.region, t.leaves, p.seqlen_q, p.seqlen_k, torch.arange(p.batch), torch.arange(1), p.seqlen_k)
    shape = (p.batch, *leaf.shape[1:])
    leaf = leaf.expand(shape).contiguous()
    end = grid.key_interval(torch.arange(p.seqlen_q))[1].expand(shape[:-1]).int()
    pages = torch.searchsorted(leaf, -(-end // block).unsqueeze(-1).contiguous(), out_int32=True).squeeze(-1)
    last = leaf.gather(-1, (pages.long() - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)  # which may go on behind the end
    lengths = torch.where(pages > 0, pages * block - (last * block + block - end).clamp(min=0), 0)
    if p.batch > 1:
        leaf = leaf + torch.arange(0, p.batch * (p.seqlen_k // block), p.seqlen_k // block, dtype=leaf.dtype).view(
            -1, 1, 1, 1
        )
    return leaf, lengths.int()


def _paged(
    p: Problem, t: Inputs, q: Tensor, pages: list[Tensor], places: tuple[Tensor, Tensor], heads: slice
) -> tuple[Problem, Inputs]:
    """Return the call over pages of some heads."""
    table, lengths = (x.flatten(0, 1) for x in places)
    q = q.flatten(0, 1).unsqueeze(1)
    sink = None if t.sink is None else t.sink[heads]
    extras = [table, lengths] if sink is None else [table, lengths, sink]
    spec = replace(
        p.spec,
        mask_text="",
        mask_slots=(),
        page_slots=(0, 1),
        sink_slot=None if sink is None else 2,
        grad_slots=(),
        needs_grad=False,
    )
    facts = [TensorFacts.of(x) for x in (q, *pages, *extras)]
    paged = Problem(*facts[:3], tuple(facts[3:]), p.device, parse_spec(spec.text()))
    return paged, Inputs(q, *pages, leaves=extras, sink=sink, block_table=table, seqlens_k=lengths)


def _in_layout_of(p: Problem, t: Inputs, parts: list[Output]) -> Output:
    """Return the outputs of all heads in the layout of the call."""
    out, group = empty_output(p, t.q, t.v), p.heads_q // len(parts)
    for n, part in enumerate(parts):
        heads = slice(n * group, (n + 1) * group)
        out.o[:, :, heads] = part.o.view(p.batch, p.seqlen_q, group, p.head_dim_v)
        for whole, x in zip(out.tensors[1:], part.tensors[1:], strict=True):
            whole[:, heads] = x.view(p.batch, p.seqlen_q, group).transpose(1, 2)
    return out
