"""Calls over the keys that each query selected, whose kernels read these alone (``kernels.listed``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tilewise.backends import listed
from tilewise.backends.base import (
    Grads,
    Inputs,
    Output,
    empty_output,
    gradients_of_no_pair,
    has_no_pair,
    output_of_no_pair,
)
from tilewise.backends.listed import MULTIPLE
from tilewise.backends.piecewise import room
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.call import sink_gradient
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.listed import is_wide, pieces_of, tiles_of
from tilewise.backends.triton.tiles import Tiles
from tilewise.caching import cached_property
from tilewise.piece import Span, evenly
from tilewise.planning.bit_tiles import LINES
from tilewise.planning.planner import Making
from tilewise.problem import Problem


class GradientKernels(Protocol):
    """The launches of wide heads' gradients for some of all queries and key heads, of the tensors of a launch by their names."""

    def leave_ds(self, given: dict[str, Tensor], lines: Span) -> None:
        """Leaves dS and delta, and adds to dK and dV; without dv, to dK's first columns what belongs there."""

    def make_dq(self, given: dict[str, Tensor], lines: Span) -> None:
        """Makes dQ of dS."""


@dataclass(eq=False)
class ListedCall:
    """The call of a problem with lists. ``own``: a backend's own kernels."""

    problem: Problem
    own: GradientKernels | None = None
    direct: ClassVar[bool] = False

    def decided(self) -> tuple:
        """The ``(make, values)`` of :class:`tilewise.backends.base.PerProblem`."""
        own = self.own and type(self.own)
        return lambda p, _: ListedCall(p, own=own and own(p)), None

    def facts(self, tiles: Tiles, **more: object) -> Facts:
        """The facts of a kernel."""
        p = self.problem
        pieces, pieces_v = pieces_of(p)
        return Facts(
            tile_m=tiles.tile_m,
            tile_n=tiles.tile_n,
            pieces=pieces,
            pieces_v=pieces_v,
            head_dim=p.head_dim,
            head_dim_v=p.head_dim_v,
            align=MULTIPLE,
            latent=p.latent,
            page_size=p.page_size if p.paged else 0,
            upcast=p.dtype == torch.bfloat16 and p.device.type == "cpu",
            **more,
        )

    def forward(self, inputs: Inputs) -> Output:
        p = self.problem
        if has_no_pair(p):
            return output_of_no_pair(p, inputs)
        out = empty_output(p, inputs.q, inputs.v)
        given = {**self._read(inputs), "o": out.o, "lse": out.lse, "sink": inputs.sink}
        self._launch("listed_forward", given, (0, listed.rows_of(p) * p.heads_k), sink=inputs.sink is not None)
        return out

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        p = self.problem
        if has_no_pair(p):
            return gradients_of_no_pair(p, inputs, dlse)
        dq, delta = inputs.q.new_empty(inputs.q.shape), torch.empty_like(out.lse)
        dk = inputs.k.new_zeros(inputs.k.shape, dtype=torch.float32)
        dv = None if inputs.joint else inputs.v.new_zeros(inputs.v.shape, dtype=torch.float32)
        given = self._read(inputs) | {"o": out.o, "lse": out.lse, "do": do.contiguous(), "dlse": dlse.contiguous()}
        given |= {"delta": delta, "dq": dq, "dk": dk, "dv": dv}
        count, kernels = listed.rows_of(p) * p.heads_k, self.own or self
        if not is_wide(p):
            self._launch("listed_backward", given, (0, count), sheet=0)
        bytes_of_ds = p.group * self._places * p.dtype.itemsize  # of one query and key head
        for lines in evenly(count, max(1, room(p) // bytes_of_ds)) if is_wide(p) else ():
            given["ds"] = dq.new_empty((lines[1] - lines[0], p.group, self._places))
            kernels.leave_ds(given, lines)
            kernels.make_dq(given, lines)
        dsink = sink_gradient(inputs, out.lse, delta)
        return Grads(dq, dk.to(p.dtype), dv if dv is None else dv.to(p.dtype), dsink, {})

    def leave_ds(self, given: dict[str, Tensor], lines: Span) -> None:
        self._launch("listed_backward", given, lines, sheet=1)

    def make_dq(self, given: dict[str, Tensor], lines: Span) -> None:
        self._launch("listed_dq", given, lines)

    @property
    def _places(self) -> int:
        """Places of a list, filled up to whole tiles."""
        return -(-listed.places_of(self.problem)[0] // LINES) * LINES

    def _read(self, inputs: Inputs) -> dict[str, Tensor]:
        """The tensors that all kernels read."""
        p, q, k = self.problem, rows(inputs.q), rows(inputs.k)
        v = k[..., : p.head_dim_v] if p.latent else rows(inputs.v)
        found = {"q": q, "k": k, "v": v, "entries": listed.entries_of(p, inputs), "table": inputs.block_table}
        return found | {"lines": self._lines(inputs.leaves, inputs.q.device)}

    @cached_property
    def _lines(self) -> Making:
        return listed.lines(self.problem)

    def _launch(self, name: str, named: dict[str, Tensor | None], lines: Span, **facts: object) -> None:
        """Launches a kernel for some of all queries and key heads."""
        p, kernels, tiles = self.problem, runtime.kernels(), tiles_of(self.problem, name)
        first, last = lines
        sizes = kernels.ListedSizes(
            first=first,
            heads_k=p.heads_k,
            group=p.group,
            tiles=-(-p.group // tiles.tile_m),
            queries=p.q.shape[0] if p.packed else p.seqlen_q,
            entries=named["entries"].shape[-1],
            block=listed.places_of(p)[1],
            places=self._places,
            pages=p.k.shape[0],
            table=p.extras[p.spec.page_slots[0]].stride if p.paged else (0, 0),
            **{x: tuple(n // MULTIPLE for n in named[x].stride()[:2]) for x in "qkv"},
        )
        tensors = kernels.ListedTensors(**named)
        given = tensors, runtime.opaque(sizes), float(p.softmax_scale), self.facts(tiles, **facts)
        launch = runtime.Launch(getattr(kernels, name), ((last - first) * sizes.tiles, 1, 1), tiles)
        with runtime.on_device(named["q"]):  # Hopper's backward comes here too
            # Memory of ours begins at multiples of 16 bytes, but what a caller gives may not.
            launch.start(runtime.aligned(tensors), *given)


def rows(x: Tensor) -> Tensor:
    """A tensor with the rows of all batch elements, or pages, one after the other, which begin at multiples of 16 bytes."""
    x = x if x.ndim == 3 else x.flatten(0, 1)
    served = x.stride(-1) == 1 and not any(n % MULTIPLE for n in x.stride()[:2]) and x.data_ptr() % 16 == 0
    return x if served else x.contiguous()
