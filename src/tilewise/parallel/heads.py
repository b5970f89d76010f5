"""Attention over ranks by exchanging rows for heads: each rank computes all rows of some of the heads (Jacobs et al. 2023, Ulysses).

    forward    q, K, V: rows of all heads -> all rows of the rank's heads;  (o, lse) = attention(q, K, V);  o -> the rank's rows
    backward   dO -> all rows of the rank's heads;  dq, dK, dV = backward;  dq, dK, dV -> the rank's rows

A rank's part is a plain call of the whole sequence. So the work is equal under every mask, no sum runs over ranks, and everything works
that works on one device. Heads are dealt in the order of key heads. A rank's own are cut into *groups*, so that one group's rows are sent
while another group is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tilewise import expr
from tilewise.derivatives import operator_of
from tilewise.expr import Expr
from tilewise.parallel import gathered
from tilewise.parallel.exchange import Exchange, Gradients, ordered_sum
from tilewise.parallel.gathered import Gathered
from tilewise.parallel.layout import Layout
from tilewise.spec import Spec

_attention_backward = torch.ops.tilewise.attention_backward.default


def head_axes(spec: Spec) -> dict[int, int]:
    """Return the axis of each extra that the query head indexes, by slot. A rank takes its own heads' part of these tensors.

    Raises:
        ValueError: a mask or a score uses the head for more than indexing tensors.
    """
    roots = [*spec.whole_region.parts, *(() if spec.whole_score is None else (spec.whole_score,))]
    nodes = expr.nodes(*roots)
    if any(_is_head(e) for e in roots) or any(
        _is_head(x) for e in nodes if e.op not in expr.READS for x in expr.children(e)
    ):
        raise ValueError("the mask or score computes with the head's number")
    found: dict[int, tuple[int, ...]] = {} if spec.sink_slot is None else {spec.sink_slot: (0,)}
    for e in expr.lookups(*roots):
        axes = tuple(n for n, x in enumerate(e.args[1:]) if _is_head(x))
        if len(axes) > 1 or found.setdefault(e.args[0][1], axes) != axes:
            raise ValueError("a tensor of the mask or score is indexed by the head in several ways")
    return {slot: axes[0] for slot, axes in found.items() if axes}


def _is_head(e: Expr) -> bool:
    return e.op == "symbol" and e.args[0] == "h"


def reasons(spec: Spec, heads_k: int, ranks: int) -> list[str]:
    """Return the reasons why the heads of a call cannot be dealt to so many ranks, or nothing if they can."""
    found = [f"{heads_k} key heads are no multiple of {ranks} ranks"] if heads_k % ranks else []
    found += ["dropout counts the heads of the whole attention; use scheme='gather'"] if spec.dropout_p else []
    found += ["a prepared mask has lists for all heads"] if spec.whole_region.prepared else []
    try:
        head_axes(spec)
    except ValueError as error:
        found.append(str(error))
    return found


@dataclass(frozen=True)
class Heads:
    """One attention over ranks.

    Attributes:
        queries, keys: the layouts of the rows.
        spec: the call as the operator takes it: that of the whole, with fewer heads.
        shapes: those of q, k and v with this rank's rows and all heads.
        groups: the number of groups of a rank's key heads.
        axes: :func:`head_axes`.
        grad_slots: the extras that want a gradient.
        sum_leaves: gradients of sinks and of the score's leaves are summed over ranks.
        with_lse: lse, and the largest scores if the spec asks for them, go back to their ranks; otherwise they are not returned.
        everyone: all ranks, if ``exchange`` has only neighbours.
        across: how the rank and those with its place in other groups of neighbours compute the group's rows of its heads together.
    """

    exchange: Exchange
    queries: Layout
    keys: Layout
    spec: str
    shapes: tuple[tuple[int, ...], ...]
    groups: int
    axes: dict[int, int]
    grad_slots: tuple[int, ...]
    sum_leaves: bool
    with_lse: bool
    everyone: Exchange
    across: Gathered | None = None

    @property
    def digest(self) -> int:
        """A number that differs if the keys between groups differ."""
        return 0 if self.across is None else self.across.digest

    @property
    def packed(self) -> bool:
        return len(self.shapes[0]) == 3

    @property
    def layouts(self) -> list[Layout]:
        """Return the layout of each of :meth:`bundles`."""
        return [self.keys] if self.queries == self.keys else [self.queries, self.keys]

    def bundles(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[str, Layout, list[Tensor]]]:
        """Return the tensors that are sent together, with a name: all three, or q alone if queries and keys have different layouts."""
        if self.queries == self.keys:
            return [("qkv", self.keys, [q, k, v])]
        return [("q", self.queries, [q]), ("kv", self.keys, [k, v])]

    def to_heads(self, name: str, layout: Layout, tensors: list[Tensor], group: int) -> Callable[[], Tensor]:
        """Send one group's heads of the rank's rows ``(batch, rows, heads, dim)``.

        The result waits for the rows of all ranks ``(seqlen, batch, columns)``, with the tensors side by side."""
        ranks, name = self.exchange.size, f"in {name} {group}"
        parts = [x.unflatten(2, (ranks, self.groups, -1))[:, :, :, group].permute(2, 1, 0, 3, 4) for x in tensors]
        shape = (*parts[0].shape[:3], sum(x.shape[3] * x.shape[4] for x in parts))
        sent = self._filled(name, shape, max(layout.lengths) * ranks, parts)
        return self.exchange.to_heads(name, sent, layout)

    def local(self, arrived: Sequence[Tensor]) -> list[Tensor]:
        """Return q, k and v of one group, as the operator takes them, from the received rows of :meth:`bundles`."""
        parts = self.exchange.size * self.groups
        shapes = [(shape[-2] // parts, shape[-1]) for shape in self.shapes]
        bundled = [shapes] if len(arrived) == 1 else [shapes[:1], shapes[1:]]
        found = [x for rows, like in zip(arrived, bundled, strict=True) for x in _columns(rows, like)]
        return _unbatched(self.packed, *[x.transpose(0, 1) for x in found])

    def to_rows(self, name: str, layout: Layout, tensors: list[Tensor], group: int) -> Callable[[list[Tensor]], None]:
        """Send one group's heads ``(batch, seqlen, heads of the group, dim)`` of all rows.

        The result waits, and writes them to their places in tensors ``(batch, rows, heads, dim)``."""
        ranks, name = self.exchange.size, f"out {name} {group}"
        parts = [x.transpose(0, 1) for x in tensors]
        shape = (*parts[0].shape[:2], sum(x.shape[2] * x.shape[3] for x in parts))
        sent = self._filled(name, shape, layout.seqlen, parts)
        finish = self.exchange.to_rows(name, sent, layout)

        def write(targets: list[Tensor]) -> None:
            for target, found in zip(targets, _columns(finish(), _last_axes(parts)), strict=True):
                _copy(target.unflatten(2, (ranks, self.groups, -1))[:, :, :, group], found.permute(2, 1, 0, 3, 4))

        return write

    def _filled(self, name: str, shape: Sequence[int], rows: int, parts: list[Tensor]) -> Tensor:
        """Return a room with the parts side by side in its columns. No rank's room has more than ``rows`` rows."""
        room = self.exchange.room(name, shape, parts[0], rows * shape[-2] * shape[-1])
        for columns, part in zip(_columns(room, _last_axes(parts)), parts, strict=True):
            _copy(columns, part)
        return room

    def own(self, extras: Sequence[Tensor], group: int) -> list[Tensor]:
        """Return the extras with one group's heads alone."""
        return [self._heads_of(x, slot, group) for slot, x in enumerate(extras)]

    def _heads_of(self, x: Tensor, slot: int, group: int) -> Tensor:
        count = self.shapes[0][-2] // self.exchange.size // self.groups
        first = (self.exchange.rank * self.groups + group) * count
        return x.narrow(self.axes[slot], first, count) if slot in self.axes else x

    def leaf_gradients(self, extras: Sequence[Tensor], by_group: list[list[Tensor]]) -> list[Tensor | None]:
        """Return the gradient of each extra, from those that each group gives for ``grad_slots``."""
        found: list[Tensor | None] = [None] * len(extras)
        for n, slot in enumerate(self.grad_slots):
            x = extras[slot]
            total = torch.zeros_like(x, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
            for group, grads in enumerate(by_group):
                self._heads_of(total, slot, group).add_(grads[n])
            found[slot] = (ordered_sum(self.everyone.gather(total)) if self.sum_leaves else total).to(x.dtype)
        return found


def _last_axes(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Return the heads and dim of each tensor."""
    return [(x.shape[-2], x.shape[-1]) for x in tensors]


def _columns(x: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Split the columns of ``x`` ``(..., columns)`` among several tensors, as their last two axes (heads, dim)."""
    widths = [heads * dim for heads, dim in shapes]
    return [piece.unflatten(-1, shape) for piece, shape in zip(x.split(widths, -1), shapes, strict=True)]


def _copy(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source)``, 16 bytes at a time if both allow it, because strided copies cost a GPU an address for each element."""
    if _in_sixteens(target) and _in_sixteens(source):
        target, source = target.view(torch.complex128), source.view(torch.complex128)
    target.copy_(source)


def _in_sixteens(x: Tensor) -> bool:
    """Return whether a tensor can be viewed as elements of 16 bytes. A tensor without memory, in a graph's trace, cannot."""
    if isinstance(x, FakeTensor):
        return False
    strides, n = x.stride(), 16 // x.element_size()
    whole = strides[-1] == 1 and x.shape[-1] % n == 0 and all(stride % n == 0 for stride in strides[:-1])
    return whole and bool(x.storage_offset() % n == 0) and x.data_ptr() % 16 == 0


def forward(
    call: Heads, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``[o]`` of the rank's queries, with lse and max_logit if wanted, and all that the backward reads.

    q, k and v are ``(batch, rows, heads, dim)``, or packed ``(rows, heads, dim)``. All ranks must call this and the backward alike.
    """
    bundles = call.bundles(*_batched(call.packed, q, k, v))
    coming = [[call.to_heads(*bundle, group) for bundle in bundles] for group in range(call.groups)]
    saved: list[Tensor] = []
    statistics: list[Tensor] = []
    going = []
    for group, waits in enumerate(coming):
        arrived = [wait() for wait in waits]
        (o, *statistics), kept = _computed(call, call.local(arrived), call.own(extras, group), seed)
        saved += [*arrived, o, statistics[0], *kept]
        going.append([call.to_rows("o", call.queries, _batched(call.packed, o), group)])
        if call.with_lse:
            rows = _as_rows(_batched(call.packed, *statistics))
            going[-1].append(call.to_rows("statistics", call.queries, rows, group))
    out = [q.new_empty((*q.shape[:-1], v.shape[-1]))]
    if call.with_lse:
        out += [x.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3])) for x in statistics]
    o, *lses = _batched(call.packed, *out)
    for writes in going:
        for write, target in zip(writes, [[o], _as_rows(lses)], strict=False):
            write(target)
    return out, saved


def _computed(
    call: Heads, local: list[Tensor], extras: list[Tensor], seed: Tensor | None
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Return o, lse and, if wanted, max_logit of some heads, and what the backward reads of other groups' keys."""
    if call.across is None:
        return operator_of(call.spec)(*local, extras, seed, call.spec), []
    q, k, v = local
    return gathered.forward(call.across, q, k, v, extras, seed)


def backward(
    call: Heads, of: Gradients, saved: Sequence[Tensor], extras: Sequence[Tensor], seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Return dq, dk and dv of the rank's rows, and the gradient of each extra."""
    do, dlse = of
    given = {} if do is None else {"do": _batched(call.packed, do)}
    given |= {} if dlse is None else {"dlse": _as_rows(_batched(call.packed, dlse))}
    coming = [
        {name: call.to_heads(name, call.queries, x, group) for name, x in given.items()} for group in range(call.groups)
    ]
    count, going, dextras = len(saved) // call.groups, [], []
    for group, waits in enumerate(coming):
        held = saved[count * group : count * (group + 1)]
        arrived, (o, lse, *kept) = held[: len(call.layouts)], held[len(call.layouts) :]
        do, dlse = torch.zeros_like(o), torch.zeros_like(lse)
        if "do" in waits:
            (do,) = _unbatched(call.packed, waits["do"]().unflatten(-1, o.shape[-2:]).transpose(0, 1))
        if "dlse" in waits:
            (dlse,) = _unbatched(call.packed, waits["dlse"]().permute(1, 2, 0).contiguous())
        own = call.own(extras, group)
        if call.across is None:
            *grads, leaves = _attention_backward(do, dlse, *call.local(arrived), o, lse, own, seed, call.spec)
        else:
            rows = [*call.local(arrived), o, lse, *kept]
            *grads, every = gathered.backward(call.across, (do, dlse), rows, own, seed)
            leaves = [every[slot] for slot in call.grad_slots]
        bundles = call.bundles(*_batched(call.packed, *grads))
        going.append([call.to_rows(f"d{name}", layout, tensors, group) for name, layout, tensors in bundles])
        dextras.append(leaves)
    dq, dk, dv = (o.new_empty(shape) for shape in call.shapes)
    targets = call.bundles(*_batched(call.packed, dq, dk, dv))
    for writes in going:
        for write, (_, _, target) in zip(writes, targets, strict=True):
            write(target)
    return dq, dk, dv, call.leaf_gradients(extras, dextras)


def _batched(packed: bool, *tensors: Tensor) -> list[Tensor]:
    """Return packed tensors as a batch of one."""
    return [x.unsqueeze(0) for x in tensors] if packed else list(tensors)


def _unbatched(packed: bool, *tensors: Tensor) -> list[Tensor]:
    return [x.squeeze(0) for x in tensors] if packed else list(tensors)


def _as_rows(lses: Sequence[Tensor]) -> list[Tensor]:
    """Return statistics ``(batch, heads, rows)`` as ``(batch, rows, heads, 1)``."""
    return [x.mT.unsqueeze(-1) for x in lses]
