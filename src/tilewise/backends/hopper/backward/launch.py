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
from tilewise.backends.hopper.backward.params import BackwardParams, PackedParams
from tilewise.backends.hopper.backward.tiles import SHEET_MARGIN
from tilewise.backends.hopper.kit.params import by_name, optional_params


@cute.jit
def launch(given: tuple, made: tuple, numbers: tuple, stream: cuda.CUstream, config: cutlass.Constexpr):
    """Launches every kernel of a backward with the values of :func:`tilewise.backends.hopper.backward.parameters.parameters`. Packed
    sequences are one batch element."""
    reads, writes, scalars = config.parameters
    given = by_name((*reads, *writes, *scalars), (*given, *made, *numbers))
    q, k, v, o, do, lse, dlse, dq, dk, dv = (
        given[name] for name in ("q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv")
    )
    sheet, scale, scale2 = given.get("sheet"), given["scale"], given["scale2"]
    buffers = RowBuffers(**{name: given.get(name) for name in RowBuffers._fields})
    starts, queue_q = None, None
    if cutlass.const_expr(config.packed):
        queue, queue_q = given.pop("counts_k"), given.pop("counts_q")
        starts = PackedParams(queue=queue, **{name: given.pop(name) for name in PackedParams._fields if name in given})
    # heads are key heads here: a key tile serves the whole group.
    params_k = BackwardParams(
        q.shape[1], k.shape[1], k.shape[2], q.shape[2] // k.shape[2], q.shape[0], given["section_k"], given["band_lo"], given["band_hi"],
        scale, scale2, given["cap2"], starts, optional_params(given, "keys_"),
    )  # fmt: skip
    cu = starts.cu_q if config.packed else None
    rows = preprocess.StatisticsTensors(
        o, do, lse, dlse, buffers.lse2, buffers.delta, cu, buffers.dq_sums, buffers.semaphores, params_k.extra.queue,
        scale2 if config.subtracts else None,
    )  # fmt: skip
    if cutlass.const_expr(config.planned):
        room = sheet.shape[0] - SHEET_MARGIN if config.packs_sheet else None
        rows = rows._replace(plan=packed_plan.PackedPlan(params_k, room))
    keys_tensors = keys.KeysTensors(q, k, v, do, dk, dv, buffers)
    starts = starts._replace(queue=queue_q) if config.packed else None
    queries_tensors = queries.QueriesTensors(q, k, v, do, dq)
    ctas_k, ctas_q = given["ctas_k"], given["ctas_q"]
    # The passes differ in their order of tiles and in the queue that they take tiles from.
    params_q = params_k._replace(section=given["section_q"], packed=starts, extra=optional_params(given, "queries_"))
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
            sheet_pass.launch(
                sheet, k, sheet_pass.DqTensors(dq, given.get("kept_sums")), params_q, ctas_q, stream, config
            )
        else:
            # The statistics are there: this pass only reads lse2 and delta.
            made = rows._replace(o=None, do=None, lse=None, dlse=None, cu=None)
            queries.launch(queries_tensors, made, params_q, ctas_q, stream, config)
