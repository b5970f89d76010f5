"""From a problem and its tensors to one launch. What depends on the problem alone is decided once and kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise.backends.base import Inputs, Output, PerTensors, empty_output, without_memory
from tilewise.backends.hopper.config import MULTIPLE, PLAIN, Band, Expressions, cap_of, keys_of
from tilewise.backends.hopper.forward.config import Config, Grid, spread
from tilewise.backends.hopper.host import library, masks
from tilewise.backends.hopper.host.driver import Bound, PerStrides
from tilewise.caching import cached_property
from tilewise.dropout import keep_scale, threshold
from tilewise.problem import Problem, TensorFacts

LOG2_E = math.log2(math.e)
FAR = 1 << 30  # an end that no key reaches
ALIGNED = 16  # bytes, of an address
APART = 1 << 34  # elements between two rows, more than tensor maps of packed sequences can say


@dataclass(eq=False)
class Plan:
    """One problem's decisions. ``made``: of a mask's tensors. ``bound``: once known, the launch that needs nothing but addresses;
    ``outputs``: tensors like the output's for it, and ``states``, like those of chunks of keys."""

    p: Problem
    config: Config
    made: PerTensors = field(default_factory=PerTensors)
    bound: Bound | None = None
    outputs: Output | None = None
    states: list[Tensor] = field(default_factory=list)

    @cached_property
    def band(self) -> Band:
        return keys_of(self.p)[1]

    @cached_property
    def addressable(self) -> tuple[bool, bool, bool]:
        """Of q, k, v: whether the copy engine can address such strides."""
        return tuple(addressable(x) for x in (self.p.q, self.p.k, self.p.v))

    @cached_property
    def cut(self) -> bool:
        """Whether some keys at either end are seen by no query: they stay outside. Packed, the kernel sees to that."""
        return not self.p.packed and (self.band.start, self.band.stop) != (0, self.p.seqlen_k)

    @cached_property
    def direct(self) -> bool:
        """Whether the kernel takes the caller's tensors as they are, and no others but what it writes."""
        more = len(self.config.extra) > 2 * self.config.split or self.config.traced != PLAIN
        more = more or self.p.spec.sink_slot is not None
        return all(self.addressable) and not (self.cut or more)

    @cached_property
    def grid(self) -> Grid:
        return spread(self.p, self.config, self.band.stop - self.band.start, devices.of(self.p.device).cores)

    @cached_property
    def numbers(self) -> tuple[int, int, int, int, int, float, float]:
        """As :func:`tilewise.backends.hopper.forward.kernel.launch` takes them; the band's ends count from the first key that it gets."""
        p, band, cap = self.p, self.band, cap_of(self.p)
        start = band.start if self.cut else 0
        lo, hi = (far if end is None else end - start for end, far in ((band.lo, -FAR), (band.hi, FAR)))
        grid = self.grid
        if self.config.traced.score:
            scale2, cap2 = LOG2_E, p.softmax_scale
        else:
            scale2 = LOG2_E * (p.softmax_scale if cap is None else cap)
            cap2 = 0.0 if cap is None else 2 * LOG2_E * p.softmax_scale / cap
        return lo, hi, grid.section, grid.ctas, int(p.spec.sink_slot is not None), scale2, cap2

    def extra(self, t: Inputs) -> tuple[Tensor | int | float, ...]:
        """What ``config.extra`` names, and what expressions read: as :func:`tilewise.backends.hopper.forward.kernel.extra_of` takes it."""
        if not self.config.extra and self.config.traced == PLAIN:
            return ()
        found = {}
        if self.config.split:
            states = self.grid.chunks, self.p.batch, self.p.heads_q, self.p.seqlen_q
            new = lambda *columns: t.q.new_empty((*states, *columns), dtype=torch.float32)  # noqa: E731
            found |= {"part_o": new(self.config.tiles.width_v), "part_lse": new()}
        made = lambda key, make, *args: self.made.of(key, self.mask_leaves(t), lambda: make(self.p, t, *args))  # noqa: E731
        if self.config.by_rows:
            found |= dict(zip(("lo", "hi"), made("ends", masks.row_ends), strict=True))
        if self.config.form == "lists":
            found |= dict(zip(("blocks", "counts"), made("lists", masks.visits, self.config.tiles), strict=True))
        if self.config.packed:
            found |= {"cu_q": t.cu_seqlens_q.int().contiguous(), "cu_k": t.cu_seqlens_k.int().contiguous()}
            queue = torch.zeros(1, dtype=torch.int32, device=t.q.device)
            found |= {"first": self.band.start, "last": self.band.stop, "queue": queue}
        if self.config.dropout:
            p_drop = self.p.spec.dropout_p
            found |= {"seed": t.seed, "threshold": threshold(p_drop), "keep": keep_scale(p_drop)}
        traced = self.expressions
        return (
            *(found[name] for name in self.config.extra),
            *(leaf(t.leaves[n]) for n in traced.slots),
            *traced.numbers,
        )

    @cached_property
    def expressions(self) -> Expressions:
        return Expressions.of(self.p)

    def values(self, t: Inputs) -> Tensor:
        """v, or a copy with zeros for the keys that no query sees, where kernels are not kept from these otherwise.

        They may be NaN, and in P V even a P of zero would let them through.
        """
        if not self.config.by_rows:
            return t.v
        seen = self.made.of("seen", self.mask_leaves(t), lambda: masks.seen(self.p, t))
        return t.v if seen is None else torch.where(seen, t.v, 0)

    def mask_leaves(self, t: Inputs) -> list[Tensor]:
        return [t.leaves[n] for n in self.p.spec.mask_slots]

    @cached_property
    def launch(self) -> PerStrides:
        return PerStrides(lambda: library.function(self.config), fixed=6)

    def forward(self, t: Inputs) -> Output:
        if self.bound is not None:
            q, k, v = t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr()
            if not (q | k | v) % ALIGNED:
                o, lse = torch.empty_like(self.outputs.o), torch.empty_like(self.outputs.lse)
                states = [torch.empty_like(x) for x in self.states]
                at = lse.data_ptr()
                self.bound.at(q, k, v, o.data_ptr(), at, at, *[x.data_ptr() for x in states])
                return Output(o, lse)
        return forward(self, t)

    def keep(self, bound: Bound, out: Output, states: list[Tensor]) -> None:
        """For later calls: the launch, and the sizes of what it writes."""
        like = lambda x: without_memory(torch.empty_like(x))  # noqa: E731
        self.outputs, self.states = Output(like(out.o), like(out.lse)), [like(x) for x in states]
        self.bound = bound


def leaf(t: Tensor) -> Tensor:
    """A tensor that an expression reads, as kernels take it: truth values as bytes, and one dimension at least."""
    t = t.detach()
    t = t.view(torch.uint8) if t.dtype == torch.bool else t
    return t if t.ndim else t.view(1)


def addressable(t: TensorFacts) -> bool:
    """Whether the copy engine can address a tensor."""
    return strides_addressable(t.shape, t.stride)


def strides_addressable(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Rows of unit stride that lie at multiples of 16 bytes from each other, and no two in one place."""
    outer = [n for size, n in zip(shape[:-1], stride[:-1], strict=True) if size > 1]
    return (stride[-1] == 1 or shape[-1] == 1) and all(0 < n < APART and n % MULTIPLE == 0 for n in outer)


def addressed(x: Tensor, good: bool) -> Tensor:
    """``x``, or a copy that the copy engine can address; ``good``: its strides are."""
    return x if good and x.data_ptr() % ALIGNED == 0 else x.clone(memory_format=torch.contiguous_format)


def forward(plan: Plan, t: Inputs) -> Output:
    p = plan.p
    out = empty_output(p, t.q, t.v)
    if not out.o.numel():
        return out
    band = plan.band
    # Without sinks any memory will do: it is not read.
    sink = out.lse.as_strided((p.heads_q,), (1,)) if t.sink is None else t.sink.detach().float().contiguous()
    if band.start == band.stop and not p.packed:  # nobody sees a key
        out.o.zero_()
        out.lse.fill_(-math.inf) if t.sink is None else out.lse.copy_(sink.view(1, -1, 1).expand_as(out.lse))
        return out
    q, k, v = (addressed(x, good) for x, good in zip((t.q, t.k, plan.values(t)), plan.addressable, strict=True))
    if plan.cut:
        k, v = (x[:, band.start : band.stop] for x in (k, v))
    o, lse = out.o, out.lse
    if p.packed:
        q, k, v, o, lse = (x.unsqueeze(0) for x in (q, k, v, o, lse))
    tensors, extra = (q, k, v, o, lse, sink), plan.extra(t)
    named = [x for x in extra if isinstance(x, Tensor)]
    bound = plan.launch((*tensors, *named), lambda: (*tensors, (*plan.numbers, *extra)))
    if plan.direct and q is t.q and k is t.k and v is t.v:
        plan.keep(bound, out, named)
    return out
