"""The launch of a forward over pages: its queries as packed ones, the pools of keys and values as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, Output, empty_output
from tilewise.backends.hopper.forward.paged_config import page_rows
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.plan import addressed, strides_addressable
from tilewise.gather import statistic_in_layout_of


class PagedPlan(ForwardPlan):
    """The decisions for one problem whose keys lie in pages."""

    def forward(self, inputs: Inputs) -> Output:
        problem, q = self.problem, inputs.q
        out = empty_output(problem, q, inputs.v)
        if not out.o.numel():
            return out
        sink = None if inputs.sink is None else inputs.sink.detach().float().contiguous()
        rows = self.by_rows(q)
        rows = addressed(rows, strides_addressable(rows.shape, rows.stride()))
        lse = self.lse_by_rows(out)
        if sink is None:
            sink = out.lse.view(-1)[: problem.heads_q]  # any memory will do: it is not read
        # Copied is only a pool that begins between two multiples of 16 bytes.
        k, v = (addressed(x, True) for x in (inputs.k, inputs.v))
        self.run(inputs, (rows, k, v, self.by_rows(out.o), lse, sink))
        if lse.data_ptr() != out.lse.data_ptr():
            out.lse.copy_(statistic_in_layout_of(problem, lse[0]))
        return out

    def by_rows(self, x: Tensor) -> Tensor:
        """q or o as the kernel takes it, packed: the rows of a batch lie one sequence after the other."""
        return x[None] if self.problem.packed else x.flatten(0, 1)[None]

    def lse_by_rows(self, out: Output) -> Tensor:
        """The output's lse as (1, heads_q, row of q), or memory from which it is to be copied."""
        heads = self.problem.heads_q
        if self.problem.packed or self.problem.batch == 1:
            return out.lse.view(1, heads, -1)
        return out.lse.new_empty((1, heads, self.problem.batch * self.problem.seqlen_q))

    def run(self, inputs: Inputs, tensors: tuple[Tensor, ...]) -> None:
        """Launches with q, k, v, o, lse and sink as the kernel takes them."""
        extra = self.extra(inputs)
        named = [x for x in extra if isinstance(x, Tensor)]
        self.launch((*tensors, *named), lambda: (*tensors, (*self.numbers, *extra)))

    def extra(self, inputs: Inputs) -> tuple[Tensor | int | float, ...]:
        problem = self.problem
        found = {
            "cu_q": self.starts(inputs),
            "queue": torch.zeros(1, dtype=torch.int32, device=inputs.q.device),
            "seqlens_k": inputs.seqlens_k,
            "block_table": inputs.block_table,
            "num_pages": problem.k.shape[0],
            "page_rows": page_rows(problem.k),
        }
        return tuple(found[name] for name in self.config.extra)

    def starts(self, inputs: Inputs) -> Tensor:
        """The first row of each sequence, and behind the last; made once where all have as many."""
        problem = self.problem
        if problem.packed:
            return inputs.cu_seqlens_q.int().contiguous()

        def even() -> Tensor:
            last = problem.batch * problem.seqlen_q
            return torch.arange(0, last + 1, problem.seqlen_q, dtype=torch.int32, device=inputs.q.device)

        return self.made.of("starts", [], even)
