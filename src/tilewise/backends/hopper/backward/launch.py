"""dQ, dK, dV on Hopper (sm_90a): one launch of a kernel for every pass; docs/algorithm.md, section 6.

rows      lse2 and delta of every query     (13)  :mod:`tilewise.backends.hopper.backward.rows`
keys      dK and dV over key tiles          (16)  :mod:`tilewise.backends.hopper.backward.keys`
          or dQ's sums too, two CTAs a tile       :mod:`tilewise.backends.hopper.backward.cluster`
queries   dQ over query tiles               (15)  :mod:`tilewise.backends.hopper.backward.queries`

Some tiles of the pass over queries make the rows' statistics themselves: then it is the first, the one over keys the second, and all.
Each kernel lets the next one's launch begin (docs/decisions.md#hopper-overlapped-launch).
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward import cluster as backward_cluster
from tilewise.backends.hopper.backward import dq_sum as backward_sum
from tilewise.backends.hopper.backward import keys as backward_keys
from tilewise.backends.hopper.backward import queries as backward_queries
from tilewise.backends.hopper.backward import rows as backward_rows
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.tile import Starts, Work
from tilewise.backends.hopper.config import PLAIN
from tilewise.backends.hopper.kit.params import OptionalParams as Extra


def extras_of(tensors: list, numbers: list, x: Backward) -> tuple[Extra, Extra]:
    """Of the pass over keys and of that over queries: what is each one's own, and what both have, of the tensors that follow and
    of the numbers that do."""
    if x.packed:
        return Extra(), Extra()
    tensors, both, leaves = iter(tensors), {}, len(x.traced.tensors)
    each = [{name: next(tensors) for name in names} for names in x.extra]
    if x.dropout:
        both = {"seed": next(tensors), "threshold": numbers[0], "keep": numbers[1]}
    if x.traced != PLAIN:
        both |= {"leaves": tuple(next(tensors) for _ in range(leaves)), "numbers": tuple(numbers[2 * x.dropout :])}
    return tuple(Extra(**own, **both) for own in each)


@cute.jit
def launch(
    given: tuple, made: tuple, numbers: tuple, stream: cuda.CUstream, x: cutlass.Constexpr
):  # fmt: skip
    """Of q, k, v, o, do (batch, seqlen, heads, D), lse, dlse (batch, heads_q, seqlen_q), makes dq, dk, dv, and lse2, delta
    (batch, heads_q, at least seqlen_q and a whole number of blocks); where dQ is summed, in sums (batch, heads_q,
    block, 2, part), and if that is in order, turns (batch, heads_q, block x 2). Packed sequences are one batch element; where
    they begin, cu_q and cu_k (sequence + 1,), is given too, and zeros that count the tiles of each pass, (1,); of other sequences
    the tensors that :func:`extras_of` takes.

    ``numbers``: lo and hi of the band; of the pass over keys, then of that over queries, heads of a section and CTAs; scale,
    scale2, cap2; of packed sequences, which no other keys of each count; of others what :func:`extras_of` takes.
    """
    q, k, v, o, do, lse, dlse, *more = given
    dq, dk, dv, *lines = made
    lines = backward_keys.Lines(*lines)
    lo, hi, section_k, ctas_k, section_q, ctas_q, scale, scale2, cap2, *ends = numbers
    group, queue_q = q.shape[2] // k.shape[2], more.pop() if x.packed else None
    starts = Starts(*more, *ends) if x.packed else None
    extra_k, extra_q = extras_of(more, ends, x)
    work = Work(
        q.shape[1], k.shape[1], k.shape[2], group, q.shape[0], section_k, lo, hi, scale, scale2, cap2, starts, extra_k
    )  # fmt: skip
    cu = starts.cu_q if x.packed else None
    rows = backward_rows.Tensors(o, do, lse, dlse, lines.lse2, lines.delta, cu, lines.sums, lines.turns)
    keys = backward_keys.Tensors(q, k, v, do, dk, dv, lines)
    starts = starts._replace(queue=queue_q) if x.packed else None
    queries = backward_queries.Tensors(q, k, v, do, dq)
    own = work._replace(section=section_q, starts=starts, extra=extra_q)
    if cutlass.const_expr(x.queries_first):
        backward_queries.launch(queries, rows, own, ctas_q, stream, x)
        backward_keys.launch(keys, work, ctas_k, stream, x)
    else:
        backward_rows.launch(rows, stream, x)
        over_keys = backward_cluster if x.keys.paired else backward_keys
        over_keys.launch(keys, work, ctas_k, stream, x)
        if cutlass.const_expr(x.queries is None):
            backward_sum.launch(backward_sum.Sums(lines.sums, cu, work.seqlen_q, lines.turns), dq, scale, stream, x)
        else:
            made = rows._replace(o=None, do=None, lse=None, dlse=None, cu=None)
            backward_queries.launch(queries, made, own, ctas_q, stream, x)
