"""The arguments without memory that a launch of latent attention is compiled for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from tilewise.backends.hopper.kit import fake
from tilewise.backends.hopper.latent.config import WIDTH, WIDTH_V, LatentConfig


def fake_arguments(config: LatentConfig) -> tuple:
    """The arguments of :func:`tilewise.backends.hopper.latent.kernel.launch`, but for its config."""
    # One kernel serves all lengths and heads: they are symbols, and numbers of run time.
    pages, page_size, heads_q, heads_k, rows, splits = (cute.sym_int() for _ in range(6))
    extra = (
        fake.vector(cutlass.Int32, cute.sym_int()),
        fake.strided(cutlass.Int32, (cute.sym_int(),)),
        fake.strided(cutlass.Int32, (cute.sym_int(), cute.sym_int())),
    )
    scales = (fake.strided(cutlass.Float32, (cute.sym_int(), heads_k)),) * 2
    extra += scales if config.e4m3 else ()
    if config.split:
        # States are stored two numbers at a time (instructions.put_pair), so their rows are at multiples of 8 bytes.
        shape = splits, 1, heads_q, rows
        extra += (fake.rows(cutlass.Float32, (*shape, WIDTH_V), 2, 16), fake.rows(cutlass.Float32, shape, 1, 16))
    shape = pages, page_size, heads_k, WIDTH
    pool = fake.rows(cutlass.Uint8, shape, 16, 16) if config.e4m3 else fake.tiled(config.dtype, shape)
    return (
        fake.tiled(config.dtype, (1, rows, heads_q, WIDTH)),
        pool,
        fake.tiled(config.dtype, (1, rows, heads_q, WIDTH_V)),
        fake.strided(cutlass.Float32, (1, heads_q, rows)),
        fake.vector(cutlass.Float32, heads_q),
        extra,
        # lo, hi, tiles, splits, the least tiles of a split, pages, whether there are sinks; scale2. The host passes them by place.
        (*[fake.I32] * 7, fake.F32),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
