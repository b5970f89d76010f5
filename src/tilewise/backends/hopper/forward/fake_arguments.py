"""The arguments without memory that a forward's launch is compiled for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream

from tilewise.backends.hopper import capped
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.kit import fake
from tilewise.bit_tiles import THREADS, words_of


def fake_arguments(config: Config) -> tuple:
    """The arguments of :func:`tilewise.backends.hopper.forward.kernel.launch`, but for its config."""
    # One kernel serves all lengths and heads: they are symbols, and numbers of run time.
    batch, heads_q, heads_k, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(5))
    # Rows of 16 bytes, as the copy engine wants them; a smaller head dim than the tile's is filled with zeros.
    dim, dim_v = (cute.sym_int(divisibility=8) for _ in range(2))

    def whole(*shape):
        return fake.strided(cutlass.Int32, (batch, heads_q, *shape))

    def state(*columns):
        shape = cute.sym_int(), batch, heads_q, seqlen_q, *columns
        # States are stored two numbers at a time (instructions.put_pair), so their rows are at multiples of 8 bytes.
        return fake.rows(cutlass.Float32, shape, 2 if columns else 1, 16)

    # In pages keys lie as (page, row of the page, head, column).
    pool = cute.sym_int() if config.paged else batch
    starts, q_tiles = cute.sym_int(), cute.sym_int()
    optional = {
        "part_o": lambda: state(config.tiles.width_v),
        "part_lse": state,
        "lo": lambda: whole(seqlen_q),
        "hi": lambda: whole(seqlen_q),
        "blocks": lambda: whole(q_tiles, cute.sym_int()),
        "counts": lambda: whole(q_tiles, 2),
        "work": lambda: fake.rows(cutlass.Int32, (batch, heads_q, q_tiles, 4), 4, 16),
        "bits": lambda: fake.packed(cutlass.Int32, (cute.sym_int(), THREADS, words_of(config.tiles.tile_n))),
        "cu_q": lambda: fake.vector(cutlass.Int32, starts),
        "cu_k": lambda: fake.vector(cutlass.Int32, starts),
        "first": lambda: fake.I32,
        "last": lambda: fake.I32,
        "section": lambda: fake.vector(cutlass.Int32, 1),
        "queue": lambda: fake.vector(cutlass.Int32, 1),
        "seqlens_k": lambda: fake.strided(cutlass.Int32, (cute.sym_int(),)),
        "block_table": lambda: fake.strided(cutlass.Int32, (cute.sym_int(), cute.sym_int())),
        "num_pages": lambda: fake.I32,
        "page_rows": lambda: fake.I32,
        "seed": lambda: fake.vector(cutlass.Int64, 1),
        "threshold": lambda: fake.I32,
        "keep": lambda: fake.F32,
        "slopes": lambda: fake.vector(cutlass.Float32, heads_q),
        "line": lambda: fake.rows(cutlass.Float32, (cute.sym_int(), cute.sym_int())),
        "start": lambda: fake.I32,
        # Its batch and heads may be one, its rows and keys more than the call's.
        "bias": lambda: fake.tiled(config.dtype, [cute.sym_int() for _ in range(4)]),
    }
    traced = [fake.leaf(dtype, rank) for dtype, rank in config.traced.tensors]
    traced += [fake.F32] * capped.COUNT if config.short_tanh else [fake.NUMBERS[kind] for kind in config.traced.numbers]
    # lo, hi, section, CTAs, whether there are sinks; scale2, cap2. The host passes them by place.
    numbers = *[fake.I32] * 5, *[fake.F32] * 2
    return (
        fake.tiled(config.dtype, (batch, seqlen_q, heads_q, dim)),
        fake.tiled(config.dtype, (pool, seqlen_k, heads_k, dim)),
        fake.tiled(config.dtype, (pool, seqlen_k, heads_k, dim_v)),
        fake.tiled(config.dtype, (batch, seqlen_q, heads_q, dim_v)),
        fake.rows(cutlass.Float32, (batch, heads_q, seqlen_q)),
        fake.vector(cutlass.Float32, heads_q),
        (*numbers, *[optional[name]() for name in config.extra], *traced),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
