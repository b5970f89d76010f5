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
from tilewise.parallel import agreement, gathered, heads, plan
from tilewise.parallel.agreement import Agreed, Assembled
from tilewise.parallel.layout import Layout
from tilewise.spec import parse_spec

if TYPE_CHECKING:
    from tilewise.parallel.context import ContextParallel

Call = heads.Heads | gathered.Gathered
"""A rank's part of an attention, by scheme."""
Sizes = tuple[tuple[int, ...], tuple[int, ...], int]
"""The queries and the keys on each rank, and the memory of the rank with the least."""


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
) -> tuple[Agreed, Call]:
    """Agree on a call with all ranks, and return it with this rank's part.

    Raises:
        NotImplementedError: on every rank, inside a transform of torch.func or with a tangent.
    """

    def once() -> Assembled:
        made = assembled()
        _refuse_transforms([q, k, v, *made[0]])
        return made

    also = {"lse": str(with_lse), "compiled": str(compiled), "captured in a CUDA graph": str(plan.is_captured())}
    agreed = agreement.agreed(parallel, q, k, v, once, also)
    if compiled:
        for layout in agreed.layouts:
            _even(parallel, layout)
    key = _key(parallel, agreed, with_lse, compiled)
    call = _call(parallel, agreed, key, with_lse, compiled)
    sizes = *(layout.lengths for layout in agreed.layouts), parallel.memory
    # Ranks with plans of one route, as all have said, need not agree on it again.
    if call.digest and agreed.mark != _mark(call.digest, sizes):
        neighbours = call.exchange.size if isinstance(call, heads.Heads) else 1
        agreement.agree_on_tensors(parallel.exchange, call.digest, neighbours)
        if neighbours == 1:  # ranks with other heads may have other routes
            parallel.plans.agree(agreed.digest, key, sizes)
    return agreed, call


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
    call = Agreed((queries, keys), q, k, v, list(extras), seed, spec)
    if isinstance(q, FakeTensor):
        return plan.planned(parallel, call, with_lse, True)
    return _call(parallel, call, _key(parallel, call, with_lse, True), with_lse, True)


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


def _key(parallel: ContextParallel, call: Agreed, with_lse: bool, compiled: bool) -> tuple:
    """Return the facts on which a plan depends beside its mask's tensors."""
    facts: list[tuple] = [(x.shape[:-3], x.shape[-2:], x.dtype, x.device) for x in (call.q, call.k, call.v)]
    # The checks of another tensor do not hold for this one.
    facts += [(x.shape, x.dtype) for x in call.extras]
    return call.text, with_lse, compiled, parallel.memory, *call.layouts, *facts


def _call(parallel: ContextParallel, call: Agreed, key: tuple, with_lse: bool, compiled: bool) -> Call:
    leaves = [call.extras[n] for n in call.spec.mask_slots]
    if leaves and not compiled and plan.is_captured():
        found = parallel.plans.prepared(key, leaves)
        # If one rank has no plan, all do without, or the others would wait for its rows.
        everybody = all(has for (has,) in parallel.exchange.numbers([int(found is not None)]))
        if found is not None and everybody:
            parallel.plans.captured[id(found)] = found  # its tables are read by every replay
            return found
    return parallel.plans.of(key, leaves, lambda: plan.planned(parallel, call, with_lse, compiled))
