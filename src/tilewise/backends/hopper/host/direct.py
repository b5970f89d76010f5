"""Forwards whose launches read a call's own tensors and what is kept of its mask: nothing of a tensor is looked at but its address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tilewise.backends.hopper.host.plan import LaunchPlan
from tilewise.backends.hopper.pair_bias import ALIGNED
from tilewise.caching import cached_property


@dataclass(eq=False)
class DirectPlan(LaunchPlan):
    """The part of a forward's plan that runs such calls, and all others by :meth:`forward`."""

    DECIDED = (*LaunchPlan.DECIDED, "direct")

    @cached_property
    def direct(self) -> tuple[int, ...]:
        """The places of what launches read; empty where some of it is made by :meth:`tensors`, or something of what they write."""
        places, launches = self.places, self.launches
        made = launches is None or self.copied or not set(launches.given) <= set(places) or self.result_is_made
        return () if made else tuple(places[name] for name in launches.given)

    @property
    def result_is_made(self) -> bool:
        """Whether the launches write something from which o or lse is made."""
        return False

    def kept(self, extras: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """What was made of the mask's tensors and lies behind the seed among :attr:`places`; None: it has to be made."""
        return ()

    def of_memory(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], lse: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """The forward of a plan that is :attr:`direct` and has no seed (:data:`tilewise.backends.base.DirectCall`)."""
        kept = self.kept(extras)
        at = [x.data_ptr() for x in (q, k, v, *extras)]
        if kept is None or (at[0] | at[1] | at[2]) % ALIGNED:
            return None
        at += [0, *[x.data_ptr() for x in kept]]
        o, *more = self.launches.run_memory([at[n] for n in self.direct], q, () if lse else ("lse",))
        return o, more[0] if lse else None

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None
    ) -> tuple[Tensor, ...]:
        direct, kept = self.direct, self.kept(extras)
        if not direct or kept is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNED:
            return super().call(q, k, v, extras, seed)
        tensors = q, k, v, *extras, seed, *kept
        o, lse, *_ = self.launches.run([tensors[n] for n in direct])
        return o, lse
