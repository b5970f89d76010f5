"""Calls whose launches read a call's own tensors and what is kept of its mask: nothing of a tensor is looked at but its address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tilewise.backends.hopper.host.plan import LaunchPlan
from tilewise.backends.hopper.pair_bias import ALIGNED
from tilewise.caching import cached_property


@dataclass(eq=False)
class PlacedPlan(LaunchPlan):
    """The part of a plan that says whether its launches read the call's own tensors, and where these are."""

    DECIDED = (*LaunchPlan.DECIDED, "direct")

    @cached_property
    def direct(self) -> tuple[int, ...]:
        """The :attr:`places` of what launches read; empty where some of it, or of the results, is made with other operations."""
        places, launches = self.places, self.launches
        made = launches is None or set(self.copied) - set(self.zeroed) or self.result_is_made
        if made or not set(launches.given) <= set(places):
            return ()
        return tuple(places[name] for name in launches.given)

    @property
    def result_is_made(self) -> bool:
        """Whether a result is made of something that the launches write."""
        return False


@dataclass(eq=False)
class DirectPlan(PlacedPlan):
    """The part of a forward's plan that runs such calls, and all others by :meth:`forward`."""

    def of_memory(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], lse: bool, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The forward of a plan that is :attr:`direct`; None of tensors at addresses that the copy engine does not take."""
        kept = self.kept(extras)
        at = [x.data_ptr() for x in (q, k, v, *extras)]
        if (at[0] | at[1] | at[2]) % ALIGNED:
            return None
        at += [0 if seed is None else seed.data_ptr(), *[x.data_ptr() for x in kept]]
        if self.zeroed:
            of_problem = self.problem.v
            v = v.as_strided(of_problem.shape, of_problem.stride)  # a call's may have its heads first
            (v,) = self.of_seen_keys(kept[0], extras, v)
            at[2] = v.data_ptr()
        o, *more = self.launches.run_memory([at[n] for n in self.direct], q, () if lse else ("lse",))
        return o, more[0] if lse else None
