"""The merge of the states that :mod:`paged` leaves of split keys: a program for each row, which reads all of its states at once."""

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.arguments import begin_overlap, plain_sizes
from tilewise.backends.triton.kernels.forward import with_sink
from tilewise.backends.triton.kernels.maths import exp, log


@triton.jit
def merge_rows_kernel(tensors, sizes, scales, states, states_lse, states_max, FACTS: tl.constexpr):
    """The merge (8) of the partial states of one row, all splits at once, and the sink; numbers are natural.

    Grid: (tokens · heads_q). States whose lse is -inf do not count: nothing was written there but lse.

    Args:
        states: fp32 (num_splits, tokens, heads_q, head_dim_v).
        states_lse: fp32 (num_splits, batch, heads_q, seqlen_q), packed (num_splits, heads_q, tokens). states_max: the same of the
            largest scores, or None.
    """
    begin_overlap(FACTS)
    WIDTH: tl.constexpr = FACTS.pieces_v[0][2]
    SPLITS: tl.constexpr = FACTS.splits
    AT_ONCE: tl.constexpr = FACTS.tile_m  # states whose o is in registers together
    sizes = plain_sizes(sizes)
    token, head = tl.program_id(0) // sizes.heads_q, tl.program_id(0) % sizes.heads_q
    line = tl.cast(head, tl.int64) * sizes.seqlen_q + token
    lines = tl.cast(sizes.seqlen_q, tl.int64) * sizes.heads_q
    if not FACTS.packed:
        b = token // sizes.seqlen_q
        line = (tl.cast(b, tl.int64) * sizes.heads_q + head) * sizes.seqlen_q + token % sizes.seqlen_q
        lines *= sizes.batch
    splits = tl.arange(0, SPLITS)
    parts = tl.load(states_lse + splits.to(tl.int64) * lines + line)  # fp32 (splits,)
    top = tl.max(parts, 0)
    l = tl.sum(exp(parts - tl.where(top == float("-inf"), 0.0, top)), 0)  # 0 where no split saw a key
    lse = tl.where(l == 0, float("-inf"), top + log(l))
    weight = tl.where(l == 0, 0.0, 1.0 / tl.where(l == 0, 1.0, l))
    if FACTS.sink:
        sink = tl.load(tensors.sink + head).to(tl.float32)
        if FACTS.packed:
            past = token >= tl.load(tensors.cu_seqlens_q + sizes.batch).to(tl.int32)
            sink = tl.where(past, float("-inf"), sink)
        weight, lse = with_sink(weight, lse, l, sink)
    columns = tl.arange(0, WIDTH)
    within = columns < FACTS.head_dim_v
    row = tl.cast(tl.program_id(0), tl.int64) * FACTS.head_dim_v + columns
    acc = tl.full([WIDTH], 0.0, tl.float32)
    for first in tl.static_range(0, SPLITS, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        part_lse = tl.load(states_lse + part.to(tl.int64) * lines + line)
        # The states of some splits: lse fp32 (AT_ONCE,), o fp32 (AT_ONCE, WIDTH).
        offsets = part.to(tl.int64)[:, None] * (lines * FACTS.head_dim_v) + row[None, :]
        o = tl.load(states + offsets, mask=within[None, :], other=0.0)  # beside lse, not after it
        o = tl.where((part_lse != float("-inf"))[:, None], o, 0.0)  # nothing was written there
        acc += tl.sum(o * exp(part_lse - tl.where(top == float("-inf"), 0.0, top))[:, None], 0)
    tl.store(tensors.o + row, (acc * weight).to(tensors.o.dtype.element_ty), mask=within)
    tl.store(tensors.lse + line, lse)
    if FACTS.max_logit:
        largest = tl.max(tl.load(states_max + splits.to(tl.int64) * lines + line), 0)
        tl.store(tensors.max_logit + line, tl.where(l != l, l, largest))
