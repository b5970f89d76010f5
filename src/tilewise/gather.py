"""A call over pages as the packed call that it equals: every sequence's keys gathered, one sequence after the other.

For backends that read no block table, and for the oracle. It copies the keys that the sequences have, and reads their lengths on the
host. Quantised numbers become what they stand for.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tilewise.backends.base import Inputs, Output
from tilewise.problem import Problem, TensorFacts
from tilewise.spec import parse_spec


def gathered(p: Problem, t: Inputs, dtype: torch.dtype = torch.float64) -> tuple[Problem, Inputs]:
    """Return the packed problem of a paged one, with its tensors: k ``(total_k, heads_k, head_dim)``, q ``(total_q, heads_q, head_dim)``.

    Args:
        dtype: of k and v where the cache is quantised. In float64 they are exactly the cache's numbers times their scales.

    What lies behind a length, or in pages that no sequence uses, is not read. Lengths and page numbers out of range, which only an
    accelerator's unchecked call can have, are brought into it.
    """
    lengths = t.seqlens_k.clamp(0, p.capacity)
    q, cu_q = t.q, t.cu_seqlens_q
    if not p.packed:
        q, cu_q = q.flatten(0, 1), torch.arange(q.shape[0] + 1, device=q.device) * q.shape[1]
    cu_k = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
    places = _places(p, t.block_table, lengths)
    k, v = t.k[places[1:]], t.v[places[1:]]
    if p.quantised:
        k, v = (x.to(dtype) * _scales(s, places).to(dtype) for x, s in ((k, t.k_scale), (v, t.v_scale)))
    extras = [*t.leaves, cu_q, cu_k]
    spec = replace(p.spec, page_slots=(), scale_slots=(), cu_slots=(len(extras) - 2, len(extras) - 1))
    facts = [TensorFacts.of(x) for x in (q, k, v, *extras)]
    packed = Problem(*facts[:3], tuple(facts[3:]), p.device, parse_spec(spec.text()))  # parsed: once for each text
    return packed, replace(t, q=q, k=k, v=v, leaves=extras, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def in_layout_of(p: Problem, out: Output) -> Output:
    """Return the output of :func:`gathered`'s problem, packed, in the layout of the paged problem p."""
    return Output(out.o.view(p.output_shapes[0]), *[statistic_in_layout_of(p, x) for x in out.tensors[1:]])


def statistic_in_layout_of(p: Problem, x: Tensor) -> Tensor:
    """Return a statistic of rows, as lse, ``(heads, total_q)`` of packed queries in the layout of the paged problem p."""
    if p.packed:
        return x
    batch, heads, seqlen = p.output_shapes[1]
    return x.view(heads, batch, seqlen).transpose(0, 1).contiguous()


def _places(p: Problem, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequence of each key, its page, and the row in it: int64 ``(total_k,)``."""
    position = torch.arange(p.capacity, device=table.device)
    page = table.long().clamp(0, max(p.k.shape[0] - 1, 0))[:, position // p.page_size]
    used = position < lengths.unsqueeze(-1)
    sequence = torch.arange(len(table), device=table.device).unsqueeze(-1)
    return tuple(x.expand_as(page)[used] for x in (sequence, page, position % p.page_size))


def _scales(scale: Tensor, places: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the factor of each key and head, ``(total_k|1, heads_k|1, 1)``, of any scale that :func:`pages.scale_reasons` allows."""
    sequence, page, row = places
    by_form = {0: lambda: scale.view(1, 1), 1: lambda: scale.view(1, -1), 2: lambda: scale[sequence]}
    return by_form.get(scale.ndim, lambda: scale[page, row])().unsqueeze(-1)
