"""The merge of split keys within the launch that attends: the program of a tile of rows that comes last reads the states of all.

Every program of a tile stores the state of its rows over its split and then adds 1 to the tile's counter. Whoever finds that all others
have come merges the states, in the order of the splits whoever that is, and sets the counter back to 0 for the next launch.

The mathematics is :mod:`merge_rows`'s, with the same names.
"""

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.forward import with_sink
from tilewise.backends.triton.kernels.maths import exp, log


@triton.jit
def merge_when_last(head_k, tensors, sizes, work, FACTS: tl.constexpr):
    """Counts this program in, and merges the states of its tile's rows where it is the last of them.

    ``tensors.arrivals`` is int32, a counter for each tile, 0 before the launch and after it.
    """
    # Partner: the threads of this program. All of their states come before the arrival, which releases them to the whole GPU.
    tl.debug_barrier()
    counter = tensors.arrivals + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        tl.store(counter, 0)
        merge_states(head_k, tensors, sizes, work, FACTS)


@triton.jit
def merge_states(head_k, tensors, sizes, work, FACTS: tl.constexpr):
    """The merge (8) of the partial states of a tile's rows and the sink. States whose lse is -inf count for nothing.

    ``tensors.states_o`` is fp32 (num_splits, tokens, heads_q, head_dim_v), ``tensors.states_lse`` fp32 (num_splits, batch, heads_q,
    seqlen_q), packed (num_splits, heads_q, tokens). ``FACTS.merged`` is the number of rows of the tile that may count.
    """
    ROWS: tl.constexpr = FACTS.merged
    SPLITS: tl.constexpr = FACTS.splits
    WIDTH: tl.constexpr = FACTS.merged_width  # of head_dim_v, padded
    CHUNK: tl.constexpr = min(
        SPLITS, max(8192 // (ROWS * WIDTH), 1)
    )  # states that are read at once: 64 registers of a thread
    row = work.block * FACTS.tile_m + tl.arange(0, ROWS)
    i, head = row // FACTS.group, head_k * FACTS.group + row % FACTS.group
    valid = i < work.seqlen_q
    token = tl.cast(work.start_q, tl.int64) + i
    line = tl.cast(head, tl.int64) * sizes.seqlen_q + token
    tokens = tl.cast(sizes.seqlen_q, tl.int64)
    if not FACTS.packed:
        token += tl.cast(work.b, tl.int64) * sizes.seqlen_q
        line += tl.cast(work.b, tl.int64) * sizes.heads_q * sizes.seqlen_q
        tokens *= sizes.batch
    lines = tokens * sizes.heads_q  # of a split
    # Other programs wrote the states: they are read past the L1, which may hold what was there before.
    every = tl.arange(0, SPLITS).to(tl.int64)[:, None] * lines + line[None, :]
    parts = tl.load(tensors.states_lse + every, mask=valid[None, :], other=float("-inf"), cache_modifier=".cg")
    top = tl.max(parts, 0)  # fp32 (ROWS,)
    shift = tl.where(top == float("-inf"), 0.0, top)
    l = tl.sum(exp(parts - shift[None, :]), 0)  # 0 where no split saw a key
    lse = tl.where(l == 0, float("-inf"), shift + log(l))
    weight = tl.where(l == 0, 0.0, 1.0 / tl.where(l == 0, 1.0, l))
    if FACTS.sink:
        sink = tl.load(tensors.sink + head, mask=valid, other=0.0).to(tl.float32)
        if FACTS.packed:
            sink = tl.where(work.b == sizes.batch, float("-inf"), sink)  # rows past the last sequence have none
        weight, lse = with_sink(weight, lse, l, sink)
    columns = tl.arange(0, WIDTH)
    within = columns < FACTS.head_dim_v
    place = (token * sizes.heads_q + head)[:, None] * FACTS.head_dim_v + columns[None, :]
    acc = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    for first in range(0, SPLITS, CHUNK):
        part = (first + tl.arange(0, CHUNK)).to(tl.int64)
        # The states of some splits: lse fp32 (CHUNK, ROWS), o fp32 (CHUNK, ROWS, WIDTH).
        pointers = tensors.states_lse + part[:, None] * lines + line[None, :]
        part_lse = tl.load(pointers, mask=valid[None, :], other=float("-inf"), cache_modifier=".cg")
        # Read whether there is a state or not: a load that waited for lse to know would take twice as long.
        pointers = tensors.states_o + part[:, None, None] * (lines * FACTS.head_dim_v) + place[None, :, :]
        o = tl.load(pointers, mask=valid[None, :, None] & within[None, None, :], other=0.0, cache_modifier=".cg")
        seen = part_lse != float("-inf")
        acc += tl.sum(tl.where(seen[:, :, None], o, 0.0) * exp(part_lse - shift[None, :])[:, :, None], 0)
    # O: (ROWS, WIDTH) in o's dtype; lse: fp32 (ROWS,).
    stored = (acc * weight[:, None]).to(tensors.o.dtype.element_ty)
    tl.store(tensors.o + place, stored, mask=valid[:, None] & within[None, :])
    tl.store(tensors.lse + line, lse, mask=valid)
