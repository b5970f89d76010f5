"""A call of a group of ranks, from the agreement to this rank's part. The group keeps the plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tilewise import device
from tilewise.autograd import has_tangent
from tilewise.backends.base import PerTensors
from tilewise.masks import Mask
from tilewise.parallel import cost, gathered, heads, plan
from tilewise.parallel.agreement import Agreement, Assembled, agree_on_tensors, agreed_lengths
from tilewise.parallel.exchange import Exchange, Silent
from tilewise.parallel.layout import Layout
from tilewise.spec import parse_spec

if TYPE_CHECKING:
    from tilewise.parallel.context import ContextParallel

Call = heads.Heads | gathered.Gathered
"""A rank's part of an attention, by scheme."""
Sizes = tuple[tuple[tuple[int, int], ...], int]
"""The queries and keys on each rank, and the memory of the rank with the least."""


def _mark(digest: int, sizes: Sizes) -> int:
    """Return the mark of a plan by the hash of its route: never 0, and equal in all processes, because only numbers are hashed."""
    return hash((digest, *sizes)) >> 1 or 1


class Plans(PerTensors):
    """The plans of a group's calls. Each lives while its mask's tensors are unchanged; plans of prepared masks serve captures too."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = {}  # docs/parallel.md asks callers to keep the group while they replay
        # By the hash of a call: the key of its last plan, and its sizes.
        self._agreed: dict[int, tuple[object, Sizes]] = {}
        self._prepared: dict[int, Tensor] = {}  # by id, which is no other's while the tensor lies here

    def prepare(self, mask: Mask) -> None:
        """Promise that a mask's tensors do not change: :meth:`tilewise.parallel.ContextParallel.prepare`."""
        if mask.text.startswith("prepared("):
            raise ValueError("the mask was prepared for one device; pass the mask as it was before prepare")
        if any(t.is_inference() for t in (*mask.sources, *mask.leaves)):
            raise ValueError(
                "the mask has tensors of inference mode, which do not tell when they change; make it outside"
            )
        mask.hold()
        self._prepared |= {id(leaf): leaf for leaf in mask.leaves}

    def mark(self, digest: int, extras: list[Tensor], text: str) -> int:
        """Return the mark of this rank's plan for a call with this hash, or 0 if it has none or must make another.

        Ranks with plans of one route have the same mark, if their tensors are unchanged."""
        if digest not in self._agreed or device.is_captured() or device.is_warming_up():
            return 0
        key, sizes = self._agreed[digest]
        call = self.kept(key, [extras[n] for n in parse_spec(text).mask_slots])
        return 0 if call is None else _mark(call.digest, sizes)

    def agree(self, digest: int, key: object, sizes: Sizes) -> None:
        """Note that all ranks have plans of one route for a call with this hash."""
        if len(self._agreed) >= self.LIMIT:
            self._agreed.clear()
        self._agreed[digest] = key, sizes

    def prepared(self, key: object, leaves: list[Tensor]) -> Call | None:
        """Return an earlier call's plan for a prepared mask with unchanged tensors, or None."""
        return self.kept(key, leaves) if all(id(leaf) in self._prepared for leaf in leaves) else None


def agreed_call(
    parallel: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    assembled: Callable[[], Assembled],
    with_lse: bool,
    compiled: bool = False,
) -> tuple[plan.Agreed, Call]:
    """Agree on a call with all ranks, and return it with this rank's part.

    Raises:
        NotImplementedError: on every rank, inside a transform of torch.func or with a tangent.
    """

    def once() -> Assembled:
        made = assembled()
        _refuse_transforms([q, k, v, *made[0]])
        return made

    also = {"lse": str(with_lse), "compiled": str(compiled), "captured in a CUDA graph": str(plan.is_captured())}
    found, agreement = agreed(parallel, q, k, v, once, also)
    if compiled:
        for layout in found.layouts:
            _even(parallel, layout)
    key = _key(parallel, found, agreement.call[2], with_lse, compiled)
    call = _call(parallel, found, key, with_lse, compiled)
    sizes = tuple(agreement.lengths), agreement.memory
    # Ranks with plans of one route, as all have said, need not agree on it again.
    if call.digest and agreement.mark != _mark(call.digest, sizes):
        neighbours = call.exchange.size if isinstance(call, heads.Heads) else 1
        agree_on_tensors(parallel.exchange, call.digest, neighbours)
        if neighbours == 1:  # ranks with other heads may have other routes
            parallel.plans.agree(agreement.digest, key, sizes)
    return found, call


def _refuse_transforms(tensors: list[Tensor]) -> None:
    """Raise NotImplementedError before an autograd.Function fails with names of PyTorch's that no user has written."""
    if torch._C._are_functorch_transforms_active() or has_tangent(tensors):
        raise NotImplementedError(
            "transforms of torch.func (grad, jvp, vmap) and forward mode of an attention over ranks are not built\n"
            "  For a gradient write o.backward(do) or torch.autograd.grad(o, (q, k, v), do); without parallel= tilewise takes them all"
        )


def compiled_call(
    parallel: ContextParallel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: list[Tensor],
    seed: Tensor | None,
    spec: str,
    with_lse: bool,
) -> Call:
    """Return this rank's part of a compiled call without asking the others; with fake tensors, only shapes."""
    # A trace must choose the scheme that will run, and may come before a first call that tells the least memory of all ranks.
    parallel.memory = parallel.memory or device.of(q.device).memory
    queries, keys = _compiled_layout(parallel, q.shape[-3]), _compiled_layout(parallel, k.shape[-3])
    call = plan.Agreed((queries, keys), q, k, v, list(extras), seed, parse_spec(spec))
    if isinstance(q, FakeTensor):
        return plan.planned(wish(parallel, with_lse, True, True), call)
    return _call(parallel, call, _key(parallel, call, spec, with_lse, True), with_lse, True)


def _compiled_layout(parallel: ContextParallel, rows: int) -> Layout:
    """Return the layout in which this rank has so many rows. Without a layout of its own, all ranks have as many."""
    if isinstance(parallel.layout, Layout):
        return parallel.layout
    return _even(parallel, parallel.layout_of(int(rows) * parallel.size))


def _even(parallel: ContextParallel, layout: Layout) -> Layout:
    """Return the layout, or refuse one that follows from its length and has unequal parts: no rank knows the length alone."""
    if not isinstance(parallel.layout, Layout) and len(set(layout.lengths)) > 1:
        raise ValueError(
            f"attention over ranks was compiled, and they hold {list(layout.lengths)} rows: inside torch.compile ranks hold as many "
            "rows each, or layout= is a Layout"
        )
    return layout


def _key(parallel: ContextParallel, call: plan.Agreed, text: str, with_lse: bool, compiled: bool) -> tuple:
    """Return the facts on which a plan depends beside its mask's tensors; ``text`` is the spec's."""
    facts: list[tuple] = [(x.shape[:-3], x.shape[-2:], x.dtype, x.device) for x in (call.q, call.k, call.v)]
    # The checks of another tensor do not hold for this one.
    facts += [(x.shape, x.dtype) for x in call.extras]
    return text, with_lse, compiled, parallel.memory, *call.layouts, *facts


def _call(parallel: ContextParallel, call: plan.Agreed, key: tuple, with_lse: bool, compiled: bool) -> Call:
    leaves = [call.extras[n] for n in call.spec.mask_slots]
    if leaves and not compiled and plan.is_captured():
        found = parallel.plans.prepared(key, leaves)
        # If one rank has no plan, all do without, or the others would wait for its rows.
        everybody = all(has for (has,) in parallel.exchange.numbers([int(found is not None)]))
        if found is not None and everybody:
            parallel.plans.captured[id(found)] = found  # its tables are read by every replay
            return found
    return parallel.plans.of(key, leaves, lambda: plan.planned(wish(parallel, with_lse, compiled), call))


def wish(parallel: ContextParallel, with_lse: bool, compiled: bool = False, silent: bool = False) -> plan.Wish:
    """Return the wishes of a group, besides the attention itself."""
    exchange: Exchange = Silent(parallel.rank, parallel.size) if silent else parallel.exchange
    return plan.Wish(
        exchange, parallel.scheme, parallel.most_groups, parallel.sum_leaf_gradients, with_lse, compiled, silent,
        cost.Machines(parallel.exchange.nodes, parallel.memory), parallel.neighbours, exchange.split if silent else parallel.split,
    )  # fmt: skip


def agreed(
    parallel: ContextParallel, q: Tensor, k: Tensor, v: Tensor, assembled: Callable[[], Assembled], also: dict[str, str]
) -> tuple[plan.Agreed, Agreement]:
    """Return the call and the agreement of all ranks on it; ``also`` is what else must be alike.

    Raises:
        ValueError: on every rank, if the call is wrong or ranks disagree.
        NotImplementedError: the batch is empty.
    """
    layout = parallel.layout.text if isinstance(parallel.layout, Layout) else parallel.layout
    also = also | {"layout": layout, "sum_leaf_gradients": str(parallel.sum_leaf_gradients)}
    memory = device.of(q.device).memory if isinstance(q, Tensor) else 0  # assemble refuses another q, on all ranks
    agreement = agreed_lengths(
        parallel.exchange, q, k, v, assembled, (*also.items(), ("scheme", parallel.scheme)), memory,
        parallel.plans.mark,
    )  # fmt: skip
    parallel.memory, (extras, seed, text) = agreement.memory, agreement.call
    if q.ndim == 4 and not q.shape[0]:
        raise NotImplementedError("attention over ranks has an empty batch; skip the call on every rank")
    queries, keys = (
        checked_layout(parallel, [x[n] for x in agreement.lengths], name) for n, name in enumerate(("queries", "keys"))
    )
    if seed is not None:
        # Every rank takes the first rank's, so that the same pairs are dropped as on one device.
        seed = parallel.exchange.broadcast(seed)
    return plan.Agreed((queries, keys), q, k, v, extras, seed, parse_spec(text)), agreement


def checked_layout(parallel: ContextParallel, lengths: list[int], name: str) -> Layout:
    """Return the layout of as many rows as the ranks hold. All ranks refuse it if it deals them otherwise."""
    layout = parallel.layout_of(sum(lengths))
    if layout.lengths != tuple(lengths):
        raise ValueError(
            f"attention over {parallel.size} ranks was called wrongly\n  the ranks hold {lengths} {name}, the layout of {sum(lengths)} "
            f"is {list(layout.lengths)}; cut tensors by shard()"
        )
    return layout
