"""Keys that each query selected, read once for all heads that share them.

In the forward every query with these heads is a sequence over a cache in pages: a page has the keys of an entry, and the sorted entries of
a query's row are its block table. A causal mask is a sequence's length. The backward has a kernel of its own (``native/selected.h``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilewise import expr
from tilewise.backends.base import Inputs, Output, PerTensors
from tilewise.backends.cpu import library
from tilewise.backends.cpu.call import Bound, Prepared
from tilewise.planning.tiles import Grid
from tilewise.problem import Problem, TensorFacts
from tilewise.selections import keys_of_entry
from tilewise.spec import parse_spec

_tables = PerTensors()
ENOUGH_PARTS = 8  # of the queries in the backward, with the key heads: each has a dk and a dv of its own


def serves(p: Problem) -> bool:
    """Whether a call selects keys query by query, and nothing else depends on where a key is but an end of those that a query sees.

    Even half of all keys take a quarter of the time of tiles or less: docs/decisions.md#cpu-selected-keys.
    """
    region, score = p.spec.region, p.spec.score
    if region.predicate is None or region.predicate.op != "selected":
        return False
    if p.packed or p.paged or p.spec.piece or p.spec.mapped:
        return False
    block, _ = keys_of_entry(region.predicate)
    plain = p.spec.dropout_p == 0 and (score is None or (expr.depends_on(score) <= {"s"} and not expr.lookups(score)))
    ends = (region.lo is None or expr.is_number(region.lo, 0)) and (
        region.hi is None or "h" not in expr.depends_on(region.hi)
    )
    by_query = expr.same(region.predicate.args[3], expr.symbol("i"))
    return plain and ends and by_query and p.seqlen_k % block == 0 and p.seqlen_k > 0


def forward(p: Problem, t: Inputs, out: Output, run: Callable[[Problem, Inputs, Output], None]) -> None:
    """Write the output of a call that :func:`serves`; ``run`` does so for a call over pages."""
    table, lengths, block = _pages(p, t)
    parts = table.shape[1]  # with keys of their own
    for n in range(parts):
        heads_q, heads_k = (slice(n * heads // parts, (n + 1) * heads // parts) for heads in (p.heads_q, p.heads_k))
        k, v = (x[:, :, heads_k].unflatten(1, (p.seqlen_k // block, block)).flatten(0, 1) for x in (t.k, t.v))
        q, o = (x[:, :, heads_q].flatten(0, 1).unsqueeze(1) for x in (t.q, out.o))
        statistics = [x.new_empty(len(q), q.shape[2], 1) for x in out.tensors[1:]]
        sink = None if t.sink is None else t.sink[heads_q]
        paged = _paged(
            p, Inputs(q, k, v, sink=sink, block_table=table[:, n].flatten(0, 1), seqlens_k=lengths[:, n].flatten())
        )
        run(*paged, Output(o, *statistics))
        for whole, x in zip(out.tensors[1:], statistics, strict=True):
            whole[:, heads_q] = x.view(p.batch, p.seqlen_q, q.shape[2]).transpose(1, 2)


def backward(
    p: Problem, t: Inputs, out: Output, do: Tensor, dlse: Tensor, prepared: Callable[[Problem], Prepared]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(dq, dk, dv, delta)`` of a call that :func:`serves`."""
    spec = replace(p.spec, mask_text="", mask_slots=(), sink_slot=None, grad_slots=())
    plain = Problem(p.q, p.k, p.v, (), p.device, parse_spec(spec.text()))
    bound = Bound(prepared(plain), replace(t, leaves=(), sink=None), backward=True)
    call, (table, lengths, block) = bound.call, _pages(p, t)
    call.block_table, call.table_row, call.page_size = bound.data(table), table.shape[-1], block
    call.hi = library.Ends(bound.data(lengths), lengths.stride(0), lengths.stride(1) if lengths.shape[1] > 1 else 0)
    call.shares = -(-ENOUGH_PARTS // (p.heads_k * (1 if p.spec.deterministic else max(p.batch, 1))))
    dq, delta = torch.empty_like(t.q, memory_format=torch.contiguous_format), torch.zeros_like(out.lse)
    dk, dv = (x.new_zeros((p.batch, call.shares, *x.shape[1:]), dtype=p.compute_dtype) for x in (t.k, t.v))
    call.o, call.lse, call.dout = bound.tensor(out.o), bound.data(out.lse), bound.tensor(do)
    call.dq, call.dk, call.dv = bound.tensor(dq), bound.tensor(dk[:, 0]), bound.tensor(dv[:, 0])
    call.dlse, call.delta = bound.data(dlse.to(out.lse.dtype)), delta.data_ptr()
    bound.run("backward")
    return dq, dk.sum(1).to(p.dtype), dv.sum(1).to(p.dtype), delta


def _pages(p: Problem, t: Inputs) -> tuple[Tensor, Tensor, int]:
    """Return :func:`_table` and the keys of a page."""
    selection = p.spec.region.predicate
    block, leaf = keys_of_entry(selection)[0], t.leaves[selection.args[0][1]]
    return *_tables.of((p.spec.source, p.sizes), t.leaves, lambda: _table(p, t, leaf, block)), block


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


def _paged(p: Problem, t: Inputs) -> tuple[Problem, Inputs]:
    """Return the call over pages of which ``t`` has the tensors, without extras."""
    extras = [x for x in (t.block_table, t.seqlens_k, t.sink) if x is not None]
    slots = {"mask_slots": (), "page_slots": (0, 1), "sink_slot": None if t.sink is None else 2, "grad_slots": ()}
    spec = parse_spec(replace(p.spec, mask_text="", needs_grad=False, **slots).text())
    facts = [TensorFacts.of(x) for x in (t.q, t.k, t.v, *extras)]
    return Problem(*facts[:3], tuple(facts[3:]), p.device, spec), replace(t, leaves=extras)
