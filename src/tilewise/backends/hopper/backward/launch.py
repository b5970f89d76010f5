"""The launch of a whole backward on Hopper (sm_90a): one function that the host traces and calls; docs/algorithm.md#6-backward.

========== =========================================== ====== ============================================================
kernel     makes                                       eq.    file
========== =========================================== ====== ============================================================
rows       lse2 and delta of every query               (13)   :mod:`tilewise.backends.hopper.backward.preprocess`
keys       dK and dV over key tiles                    (16)   :mod:`tilewise.backends.hopper.backward.keys`
           and dQ's sums, or dS to keep
queries    dQ over query tiles                         (15)   :mod:`tilewise.backends.hopper.backward.queries`
           or, of dS that was kept                            :mod:`tilewise.backends.hopper.backward.sheet`
sum        dQ out of its sums                                 :mod:`tilewise.backends.hopper.backward.postprocess`
========== =========================================== ====== ============================================================

The order of launches is decided in :func:`launch`::

    two passes, dS kept or computed again       rows, keys, queries
    two passes, where queries make statistics   queries, keys
    one pass                                    rows, keys, sum

Each kernel lets the next one's launch begin (docs/decisions.md#hopper-overlapped-launch).
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.backward import keys, packed_plan, postprocess, preprocess, queries
from tilewise.backends.hopper.backward import sheet as sheet_pass
from tilewise.backends.hopper.backward.keys_storage import RowBuffers
from tilewise.backends.hopper.backward.params import BackwardParams, PackedParams, optional_params
from tilewise.backends.hopper.backward.tiles import SHEET_MARGIN


@cute.jit
def launch(given: tuple, made: tuple, numbers: tuple, stream: cuda.CUstream, config: cutlass.Constexpr):
    """Launches every kernel of a backward.

    Args:
        given: q, k, v, o, do (batch, seqlen, heads, head_dim); lse, dlse (batch, heads_q, seqlen_q); the tensors of
            :func:`optional_params`. Packed sequences are one batch element; they end with cu_q, cu_k (sequence + 1,) and two zeros (1,)
            that count the tiles of each pass.
        made: dq, dk, dv, and lse2, delta (batch, heads_q, at least seqlen_q and a whole number of blocks). Where dQ is accumulated,
            its sums (batch, heads_q, block, 2, part), and in order its semaphores (batch, heads_q, block x 2). Where dS is kept, its
            sheet (batch x heads_q, key block, query block, element), and where a launch may have some of the keys, dQ's sums (batch x
            heads_q, tile, part, element), fp32; the sheet of packed sequences is (block, element). Where these are planned, their
            plan (PlanRow, sequence + 2), int32. Where CTAs may share key tiles, dK and dV of their parts (part, 2, element), fp32.
            Where key tiles of equal sequences come from a queue, (1,) that counts them. Of a bias that is summed, its parts: of slopes
            (batch, heads_q, warp), of a line zeros (slot, heads_q, distance). Of a bias by pair, its gradient (batch or 1, heads_q or 1,
            row, key).
        numbers: lo and hi of the band; heads of a section and CTAs of the pass over keys, then of the pass over queries; scale, scale2,
            cap2; the numbers of :func:`optional_params`; of packed sequences the first and the end of the keys that each may see, and where
            dS is kept the number of the launch among those that share the heads.
    """
    # Tensors come in the order in which host/backward_call.py gives them.
    q, k, v, o, do, lse, dlse, *more = given
    dq, dk, dv, *buffers = made
    dbias = buffers.pop() if config.sums_bias or config.dbias else None
    queue = buffers.pop() if config.makes_queue else None
    parts = buffers.pop() if config.parted else None
    sums = buffers.pop() if config.continues else None
    plan = buffers.pop() if config.planned else None
    sheet = buffers.pop() if config.keys.keeps_ds else None
    buffers = RowBuffers(*buffers, sheet=sheet, parts=parts)
    lo, hi, section_k, ctas_k, section_q, ctas_q, scale, scale2, cap2, *ends = numbers
    group, queue_q, starts = q.shape[2] // k.shape[2], None, None
    if cutlass.const_expr(config.packed):
        # Each pass takes its tiles from a queue of its own, since both may be at work at a time.
        *more, cu_q, cu_k, queue_k, queue_q = more
        portion = ends.pop() if config.packs_sheet else None
        *ends, first, last = ends
        starts = PackedParams(cu_q, cu_k, queue_k, first, last, plan, portion)
    extra_k, extra_q = optional_params(more, ends, config)
    extra_k = extra_k._replace(queue=queue, dbias=dbias)
    # heads are key heads here: a key tile serves the whole group.
    params_k = BackwardParams(
        q.shape[1], k.shape[1], k.shape[2], group, q.shape[0], section_k, lo, hi, scale, scale2, cap2, starts, extra_k
    )
    cu = starts.cu_q if config.packed else None
    rows = preprocess.StatisticsTensors(
        o, do, lse, dlse, buffers.lse2, buffers.delta, cu, buffers.dq_sums, buffers.semaphores, queue,
        scale2 if config.subtracts else None,
    )  # fmt: skip
    if cutlass.const_expr(config.planned):
        room = sheet.shape[0] - SHEET_MARGIN if config.packs_sheet else None
        rows = rows._replace(plan=packed_plan.PackedPlan(params_k, room))
    keys_tensors = keys.KeysTensors(q, k, v, do, dk, dv, buffers)
    starts = starts._replace(queue=queue_q) if config.packed else None
    queries_tensors = queries.QueriesTensors(q, k, v, do, dq)
    # The passes differ in their order of tiles and in the queue that they take tiles from.
    params_q = params_k._replace(section=section_q, packed=starts, extra=extra_q)
    if cutlass.const_expr(config.queries_first):
        queries.launch(queries_tensors, rows, params_q, ctas_q, stream, config)
        keys.launch(keys_tensors, params_k, ctas_k, stream, config)
    else:
        preprocess.launch(rows, stream, config)
        keys.launch(keys_tensors, params_k, ctas_k, stream, config)
        if cutlass.const_expr(config.queries is None):
            tiles = cute.ceil_div(k.shape[1], config.keys.tile_n)
            if cutlass.const_expr(config.parted):
                tiles = tiles << params_k.extra.block_bits
            counts = (buffers.delta, tiles) if config.keys.counts else ()
            sums = postprocess.DqSums(buffers.dq_sums, cu, params_k.seqlen_q, buffers.semaphores, *counts)
            postprocess.launch(sums, dq, scale, stream, config)
        elif cutlass.const_expr(config.keys.keeps_ds):
            sheet_pass.launch(sheet, k, sheet_pass.DqTensors(dq, sums), params_q, ctas_q, stream, config)
        else:
            # The statistics are there: this pass only reads lse2 and delta.
            made = rows._replace(o=None, do=None, lse=None, dlse=None, cu=None)
            queries.launch(queries_tensors, made, params_q, ctas_q, stream, config)
