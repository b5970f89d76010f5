"""dQ, dK, dV on Hopper (sm_90a): one launch of a kernel for every pass; docs/algorithm.md, section 6.

rows      lse2 and delta of every query     (13)  :mod:`tilewise.backends.hopper.backward_rows`
keys      dK and dV over key tiles          (16)  :mod:`tilewise.backends.hopper.backward_keys`
queries   dQ over query tiles               (15)  :mod:`tilewise.backends.hopper.backward_queries`
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper import backward_keys, backward_queries, backward_rows, backward_sum
from tilewise.backends.hopper.backward_tile import Work
from tilewise.backends.hopper.forward import F32, I32


@cute.jit
def launch(
    given: tuple, made: tuple, numbers: tuple[I32, I32, I32, I32, I32, I32, F32, F32, F32], stream: cuda.CUstream,
    x: cutlass.Constexpr,
):  # fmt: skip
    """Of q, k, v, o, do (batch, seqlen, heads, D), lse, dlse (batch, heads_q, seqlen_q), makes dq, dk, dv, and lse2, delta
    (batch, heads_q, at least seqlen_q and a whole number of blocks); where dQ is summed, in the zeros of sums (batch, heads_q,
    block, 2, PART).

    ``numbers``: lo and hi of the band; of the pass over keys, then of that over queries, heads of a section and CTAs; scale,
    scale2, cap2.
    """
    q, k, v, o, do, lse, dlse = given
    dq, dk, dv, *lines = made
    lines = backward_keys.Lines(*lines)
    lo, hi, section_k, ctas_k, section_q, ctas_q, scale, scale2, cap2 = numbers
    group = q.shape[2] // k.shape[2]
    work = Work(q.shape[1], k.shape[1], k.shape[2], group, q.shape[0], section_k, lo, hi, scale, scale2, cap2)
    backward_rows.launch(backward_rows.Tensors(o, do, lse, dlse, lines.lse2, lines.delta), stream, x)
    backward_keys.launch(backward_keys.Tensors(q, k, v, do, dk, dv, lines), work, ctas_k, stream, x)
    if cutlass.const_expr(x.queries is None):
        backward_sum.launch(lines.sums, dq, scale, stream, x)
    else:
        work = work._replace(section=section_q)
        tensors = backward_queries.Tensors(q, k, v, do, dq, lines.lse2, lines.delta)
        backward_queries.launch(tensors, work, ctas_q, stream, x)
