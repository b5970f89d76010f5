"""The arguments without memory that a backward's launch is compiled for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, SHEET_BLOCK, PlanRow, left_elements
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit import fake
from tilewise.backends.hopper.kit.dtypes import ELEMENT
from tilewise.bit_tiles import THREADS, words_of


def fake_arguments(config: Backward) -> tuple:
    """The arguments of :func:`tilewise.backends.hopper.backward.launch.launch`, but for its config."""
    batch, heads_q, heads_k, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(5))
    # The copy engine wants rows at multiples of 16 bytes, so head dims are multiples of 8 elements; lse2 and delta end
    # in whole blocks.
    dim, dim_v, lines = (cute.sym_int(divisibility=n) for n in (8, 8, 16))
    q, o, k, v = (
        (batch, seqlen_q, heads_q, dim),
        (batch, seqlen_q, heads_q, dim_v),
        (batch, seqlen_k, heads_k, dim),
        (batch, seqlen_k, heads_k, dim_v),
    )

    def statistic(size, divisibility=1, align=4):
        return fake.rows(cutlass.Float32, (batch, heads_q, size), divisibility, align)

    # The order is that of :func:`launch.launch`: q, k, v, o, do, lse, dlse. The host passes values by place, not by
    # name.
    given = *(fake.tiled(config.dtype, shape) for shape in (q, k, v, o, o)), statistic(seqlen_q), statistic(seqlen_q)
    # lse2 and delta start at multiples of 16 bytes, since a bulk copy brings their rows with a block of Q or dO.
    words = cute.sym_int(divisibility=16) if config.subtracts else lines
    made = *(fake.tiled(config.dtype, shape) for shape in (q, k, v)), statistic(words, 4, 16), statistic(lines, 4, 16)
    if config.keys.sums_dq:
        # dQ's parts: one for each warpgroup and query block, fp32, in the order of the registers that add to it.
        shape = batch, heads_q, cute.sym_int(), KEY_GROUPS, config.keys.part_elements
        made = *made, fake.rows(cutlass.Float32, shape, 4, 16)
    if config.stores_first:
        made = *made, fake.rows(cutlass.Int32, (batch, heads_q, cute.sym_int()))
    if config.keys.keeps_ds:
        blocks = [cute.sym_int() for _ in range(1 if config.packed else 3)]
        made = *made, fake.rows(ELEMENT[config.dtype], (*blocks, SHEET_BLOCK), SHEET_BLOCK, 128)
    if config.continues:
        sums = [cute.sym_int() for _ in range(3)]
        made = *made, fake.rows(cutlass.Float32, (*sums, ROWS * config.queries.width), SHEET_BLOCK, 128)
    if config.planned:
        made = *made, fake.rows(cutlass.Int32, (len(PlanRow), cute.sym_int()))
    if config.parted:
        made = *made, fake.rows(cutlass.Float32, (cute.sym_int(), KEY_GROUPS, left_elements(config.keys)), 4, 16)
    if config.makes_queue:
        made = *made, fake.vector(cutlass.Int32, 1)
    if config.sums_bias:
        made = *made, fake.rows(cutlass.Float32, (cute.sym_int() if config.table else batch, heads_q, cute.sym_int()))
    if config.dbias:
        made = *made, fake.tiled(config.dtype, [cute.sym_int() for _ in range(4)])
    # lo, hi, a section and a grid for each pass; scale, scale2, cap2.
    numbers = *[fake.I32] * 6, *[fake.F32] * 3
    given = *given, *_optional(config, (batch, heads_q), (seqlen_k, seqlen_q))
    numbers = *numbers, *(fake.F32 if name == "keep" else fake.I32 for name in config.extra.numbers)
    numbers = *numbers, *(fake.NUMBERS[kind] for kind in config.traced.numbers)
    if config.packed:
        starts = cute.sym_int()
        given = *given, *(fake.vector(cutlass.Int32, size) for size in (starts, starts, 1, 1))
        numbers = *numbers, fake.I32, fake.I32, *[fake.I32] * config.packs_sheet
    return given, made, numbers, make_fake_stream(use_tvm_ffi_env_stream=True)


def _optional(config: Backward, heads: tuple, lengths: tuple) -> list:
    """The tensors of :attr:`Backward.extra`, and the leaves of expressions. ``lengths``: how many keys and how many queries there are."""
    fields, found = config.extra, []
    for rows, names in zip(lengths, (fields.keys, fields.queries), strict=True):
        tiles = cute.sym_int()
        shapes = {"lo": (rows,), "hi": (rows,), "blocks": (tiles, cute.sym_int()), "counts": (tiles, 2)}
        made = {name: fake.strided(cutlass.Int32, (*heads, *shape)) for name, shape in shapes.items()}
        made["section"] = fake.vector(cutlass.Int32, 1)
        made["work"] = fake.rows(cutlass.Int32, (*heads, tiles, 4), 4, 16)
        made["bits"] = fake.packed(cutlass.Int32, (cute.sym_int(), THREADS, words_of(config.keys.tile_m)))
        found += [made[name] for name in names]
    of_both = {"seed": fake.vector(cutlass.Int64, 1), "slopes": fake.vector(cutlass.Float32, heads[1])}
    of_both["bias"] = fake.tiled(config.dtype, [cute.sym_int() for _ in range(4)])
    of_both["line"] = fake.rows(cutlass.Float32, (cute.sym_int(), cute.sym_int()))
    found += [of_both[name] for name in fields.both]
    return found + [fake.leaf(dtype, rank) for dtype, rank in config.traced.tensors]
