"""The arguments without memory that a launch of latent attention is compiled for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from tilewise.backends.hopper.kit import fake
from tilewise.backends.hopper.latent.config import SCALES, WIDTH, WIDTH_V, LatentConfig


def fake_arguments(config: LatentConfig) -> tuple:
    """The arguments of :func:`tilewise.backends.hopper.latent.kernel.launch`, but for its config."""
    # One kernel serves all lengths and heads: they are symbols, and numbers of run time.
    pages, page_size, heads_q, heads_k, rows, splits = (cute.sym_int() for _ in range(6))
    extra = {
        "cu_q": fake.vector(cutlass.Int32, cute.sym_int()),
        "seqlens_k": fake.strided(cutlass.Int32, (cute.sym_int(),)),
        "block_table": fake.strided(cutlass.Int32, (cute.sym_int(), cute.sym_int())),
    }
    if config.e4m3:
        extra |= dict.fromkeys(SCALES, fake.strided(cutlass.Float32, (cute.sym_int(), heads_k)))
    if config.split:
        # States are stored two numbers at a time (instructions.put_pair), so their rows are at multiples of 8 bytes.
        shape = splits, 1, heads_q, rows
        extra["part_o"] = fake.rows(cutlass.Float32, (*shape, WIDTH_V), 2, 16)
        extra["part_lse"] = fake.rows(cutlass.Float32, shape, 1, 16)
    shape = pages, page_size, heads_k, WIDTH
    pool = fake.rows(cutlass.Uint8, shape, 16, 16) if config.e4m3 else fake.tiled(config.dtype, shape)
    return (
        fake.tiled(config.dtype, (1, rows, heads_q, WIDTH)),
        pool,
        fake.tiled(config.dtype, (1, rows, heads_q, WIDTH_V)),
        fake.strided(cutlass.Float32, (1, heads_q, rows)),
        fake.vector(cutlass.Float32, heads_q),
        tuple(extra[name] for name in config.extra),
        # lo, hi, tiles, splits, the least tiles of a split, pages, whether there are sinks, rows of each sequence; scale2. The host passes
        # them by place.
        (*[fake.I32] * 8, fake.F32),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
