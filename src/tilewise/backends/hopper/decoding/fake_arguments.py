"""The arguments without memory that a launch of decoding is compiled for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.kit import fake


def fake_arguments(config: DecodingConfig) -> tuple:
    """The arguments of :func:`tilewise.backends.hopper.decoding.kernel.launch`, but for its config."""
    # One kernel serves all lengths and heads: they are symbols, and numbers of run time.
    pages, page_size, heads_q, heads_k, batch, queries, states = (cute.sym_int() for _ in range(7))
    width, lanes = config.tiles.width, 32 * config.tiles.row_warps
    extra = {
        "seqlens_k": fake.strided(cutlass.Int32, (cute.sym_int(),)),
        "block_table": fake.strided(cutlass.Int32, (cute.sym_int(), cute.sym_int())),
        "part_o": fake.packed(cutlass.Float32, (states, config.tiles.fours, lanes, 4)),
        "part_lse": fake.packed(cutlass.Float32, (states, lanes, 2 * config.tiles.own_rows)),
        "counts": fake.vector(cutlass.Int32, cute.sym_int()),
        "num_pages": fake.I32,
        "page_rows": fake.I32,
    }
    rows, pool = (queries, batch, heads_q, width), (pages, page_size, heads_k, width)
    return (
        fake.tiled(config.dtype, rows),
        fake.tiled(config.dtype, pool),
        fake.tiled(config.dtype, pool),
        fake.tiled(config.dtype, rows),
        fake.strided(cutlass.Float32, (queries, heads_q, batch)),
        fake.vector(cutlass.Float32, heads_q),
        # shares, whether lengths and a table are there, whether sinks are; scale2; lo, hi. The host passes them by place.
        (*[fake.I32] * 3, fake.F32, *[fake.I32] * 2, *(extra[name] for name in config.extra)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
