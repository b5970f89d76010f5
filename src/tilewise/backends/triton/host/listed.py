"""Calls over the keys that each query selected, whose kernels read these alone (``kernels.listed``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewise import state
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
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.listed import MULTIPLE, pieces_of, tiles_of
from tilewise.backends.triton.tiles import Tiles
from tilewise.problem import Problem


@dataclass(eq=False)
class ListedCall:
    """The call of a problem with lists. ``record``: what takes its launches in place of a GPU."""

    problem: Problem
    record: Callable[..., object] | None = None
    direct: ClassVar[bool] = False

    def decided(self) -> tuple:
        """The ``(make, values)`` of :class:`tilewise.backends.base.PerProblem`."""
        return lambda p, _: ListedCall(p), None

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
            natural=False,
            ordered=False,
            terms=1,
            products=((0, 0),),
            precision="ieee",
            upcast=p.dtype == torch.bfloat16 and p.device.type == "cpu",
            overlap=None,
            **more,
        )

    def forward(self, inputs: Inputs) -> Output:
        p = self.problem
        if has_no_pair(p):
            return output_of_no_pair(p, inputs)
        out = empty_output(p, inputs.q, inputs.v)
        self._launch("listed_forward", inputs, {"o": out.o, "lse": out.lse, "sink": inputs.sink})
        return out

    def backward(self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        p = self.problem
        if has_no_pair(p):
            return gradients_of_no_pair(p, inputs, dlse)
        dq, delta = inputs.q.new_empty(inputs.q.shape), torch.empty_like(out.lse)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (inputs.k, inputs.v))
        given = {"o": out.o, "lse": out.lse, "do": do.contiguous(), "dlse": dlse.contiguous()}
        self._launch("listed_backward", inputs, given | {"delta": delta, "dq": dq, "dk": dk, "dv": dv})
        dsink = None
        if inputs.sink is not None:
            dsink = state.sink_gradient(inputs.sink.float().view(-1, 1), out.lse, delta)
            dsink = dsink.sum(-1 if p.packed else (0, 2)).to(inputs.sink.dtype)
        return Grads(dq, dk.to(p.dtype), dv.to(p.dtype), dsink, {})

    def _launch(self, name: str, inputs: Inputs, named: dict[str, Tensor | None]) -> None:
        p, kernels = self.problem, runtime.kernels()
        tiles = tiles_of(p, name)
        row_tiles = -(-p.group // tiles.tile_m)
        q, k = self._rows(inputs.q), self._rows(inputs.k)
        v = k[..., : p.head_dim_v] if p.latent else self._rows(inputs.v)
        entries, lines = listed.entries_of(p, inputs), listed.lines(p, inputs)
        sizes = kernels.ListedSizes(
            heads_k=p.heads_k,
            group=p.group,
            tiles=row_tiles,
            queries=p.q.shape[0] if p.packed else p.seqlen_q,
            entries=entries.shape[-1],
            block=listed.places_of(p)[1],
            **{name: tuple(n // MULTIPLE for n in x.stride()[:2]) for name, x in (("q", q), ("k", k), ("v", v))},
        )
        facts = self.facts(tiles, **({"sink": inputs.sink is not None} if name == "listed_forward" else {}))
        tensors = kernels.ListedTensors(q, k, v, entries, lines, **named)
        grid = (listed.rows_of(p) * p.heads_k * row_tiles, 1, 1)
        given = tensors, runtime.opaque(sizes), float(p.softmax_scale), facts
        # Memory of ours begins at multiples of 16 bytes, but what a caller gives may not.
        start = self.record or (runtime.start if runtime.aligned(tensors) else runtime.run)
        start(getattr(kernels, name), grid, tiles, *given)

    def _rows(self, x: Tensor) -> Tensor:
        """A tensor with the rows of all batch elements one after the other, which begin at multiples of 16 bytes."""
        x = x if self.problem.packed else x.flatten(0, 1)
        served = x.stride(-1) == 1 and not any(n % MULTIPLE for n in x.stride()[:2]) and x.data_ptr() % 16 == 0
        return x if served else x.contiguous()
