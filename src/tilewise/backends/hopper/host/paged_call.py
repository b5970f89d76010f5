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
        # The kernel takes packed rows; those of a batch lie one sequence after the other.
        rows = q if problem.packed else q.flatten(0, 1)
        rows = addressed(rows, strides_addressable(rows.shape, rows.stride()))
        direct = problem.packed or problem.batch == 1
        lse = out.lse if direct else q.new_empty((problem.heads_q, len(rows)), dtype=torch.float32)
        lse = lse.view(problem.heads_q, -1)
        if sink is None:
            sink = lse.view(-1)[: problem.heads_q]  # any memory will do: it is not read
        # Copied is only a pool that begins between two multiples of 16 bytes.
        k, v = (addressed(x, True) for x in (inputs.k, inputs.v))
        tensors = rows[None], k, v, out.o.view(1, len(rows), *out.o.shape[-2:]), lse[None], sink
        extra = self.extra(inputs)
        named = [x for x in extra if isinstance(x, Tensor)]
        self.launch((*tensors, *named), lambda: (*tensors, (*self.numbers, *extra)))
        if not direct:
            out.lse.copy_(statistic_in_layout_of(problem, lse))
        return out

    def extra(self, inputs: Inputs) -> tuple[Tensor | int | float, ...]:
        problem = self.problem
        found = {
            "cu_q": self._starts(inputs),
            "queue": torch.zeros(1, dtype=torch.int32, device=inputs.q.device),
            "seqlens_k": inputs.seqlens_k,
            "block_table": inputs.block_table,
            "num_pages": problem.k.shape[0],
            "page_rows": page_rows(problem.k),
        }
        return tuple(found[name] for name in self.config.extra)

    def _starts(self, inputs: Inputs) -> Tensor:
        """The first row of each sequence, and behind the last; made once where all have as many."""
        problem = self.problem
        if problem.packed:
            return inputs.cu_seqlens_q.int().contiguous()

        def even() -> Tensor:
            last = problem.batch * problem.seqlen_q
            return torch.arange(0, last + 1, problem.seqlen_q, dtype=torch.int32, device=inputs.q.device)

        return self.made.of("starts", [], even)
