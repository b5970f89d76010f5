"""The gradients of latent attention over selected keys by Hopper's own kernels: dK, dV and dS by one, dQ by another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tilewise.backends.hopper.config import DTYPES
from tilewise.backends.hopper.host.draft import Draft, View
from tilewise.backends.hopper.host.plan import LOG2_E
from tilewise.backends.hopper.host.selected_call import LINES
from tilewise.backends.hopper.latent.gradients_config import GradientsConfig
from tilewise.backends.hopper.pair_bias import aligned
from tilewise.backends.listed import places_of, rows_of
from tilewise.piece import Span
from tilewise.problem import Problem


@dataclass(eq=False)
class SelectedGradients:
    """The launches of a problem, of the tensors that :class:`tilewise.backends.triton.kernels.listed.ListedTensors` names."""

    problem: Problem

    def leave_ds(self, given: dict[str, Tensor], lines: Span) -> None:
        p, scale = self.problem, float(self.problem.softmax_scale)
        named = {name: aligned(given[name]).view(rows_of(p), p.heads_q, -1).unsqueeze(0) for name in ("o", "do")}
        named |= {"q": given["q"].unsqueeze(0), "ds": given["ds"]}
        named |= {name: by_rows(given[name]) for name in ("lse", "dlse", "delta", "dk")}
        named["dv"] = named["dk"][..., : p.head_dim_v] if given["dv"] is None else by_rows(given["dv"])
        numbers = {"first": lines[0], "joint": int(given["dv"] is None), "scale": scale, "scale2": LOG2_E * scale}
        self._launch(given, named, numbers, queries=False)

    def make_dq(self, given: dict[str, Tensor], lines: Span) -> None:
        dq = given["dq"].view(rows_of(self.problem), self.problem.heads_q, -1).unsqueeze(0)
        self._launch(given, {"ds": given["ds"], "dq": dq}, {"first": lines[0]}, queries=True)

    def _launch(
        self, given: dict[str, Tensor], named: dict[str, Tensor], numbers: dict[str, int | float], queries: bool
    ) -> None:
        p, draft = self.problem, Draft()
        named |= {"k": given["k"].unsqueeze(1), "entries": given["entries"], LINES: given["lines"].view(-1, 4)}
        named["block_table"] = named[LINES] if given["table"] is None else given["table"]
        views = {name: View(name, x.dtype, tuple(x.shape), x.stride()) for name, x in named.items()}
        pages = {"num_pages": p.k.shape[0], "page_rows": p.page_size if p.paged else 0, "block": places_of(p)[1]}
        draft.launch(GradientsConfig(DTYPES[str(p.dtype)], queries), views | pages | numbers)
        draft.done().run_named(named)


def by_rows(x: Tensor) -> Tensor:
    """A tensor with all leading dimensions but two as one."""
    return x.view(-1, *x.shape[-2:])
