"""Few rows: each warp takes its own part of a tile's keys, and warps exchange nothing until the last tile.

A tile of 16 rows gives each of four warps a quarter of the columns of S and of O, so that maxima and sums of rows, and P, go from warp
to warp in every tile. Instead every row stands once for each part in the state, row r of part p at ``p · tile_m + r``. A part's products
are those of one element of a batch, which Triton gives to one warp, and :func:`merged_parts` merges the parts at the end.
"""

# ruff: noqa: RET505, RUF005 - a compile-time `if` keeps its `else`: without it both returns would be compiled; and Triton's
# tuples are added, not unpacked

import triton
import triton.language as tl
from tilewise.backends.triton.kernels.tile import dot, exponential


@triton.jit
def in_each_part(x, FACTS: tl.constexpr):
    """``x``, (tile_m,), once for each part: (parts · tile_m,)."""
    return tl.broadcast_to(x[None, :], (FACTS.parts, FACTS.tile_m)).reshape(FACTS.parts * FACTS.tile_m)


@triton.jit
def tiles_in_each_part(tiles, FACTS: tl.constexpr):
    """A tile of q once for each part: (parts, tile_m, width) of (tile_m, width)."""
    found = ()
    for n in tl.static_range(len(tiles)):
        # Each warp holds all rows of q in registers: it multiplies them by keys of its own.
        found = found + (tl.broadcast_to(tiles[n][None], (FACTS.parts, FACTS.tile_m, tiles[n].shape[1])),)
    return found


@triton.jit
def key_positions(n0, FACTS: tl.constexpr):
    """The positions of the keys of the tile at ``n0``: int32 (tile_n,); with parts those of each row, (parts · tile_m, tile_n / parts)."""
    j = n0 + tl.arange(0, FACTS.tile_n)
    if FACTS.parts > 1:
        EACH: tl.constexpr = FACTS.tile_n // FACTS.parts
        # Part p has the keys p · EACH and the next ones, one column for each, and its rows stand one below the other.
        of_parts = tl.broadcast_to(j.reshape(FACTS.parts, 1, EACH), (FACTS.parts, FACTS.tile_m, EACH))
        j = of_parts.reshape(FACTS.parts * FACTS.tile_m, EACH)
    return j


@triton.jit
def seen_keys(kept, FACTS: tl.constexpr):
    """Whether some row sees a key, bool (tile_n,)."""
    if FACTS.parts > 1:
        # int8, since Triton takes the maximum of numbers: (parts, tile_m, tile_n / parts).
        of_parts = kept.to(tl.int8).reshape(FACTS.parts, FACTS.tile_m, FACTS.tile_n // FACTS.parts)
        return (tl.max(of_parts, 1) > 0).reshape(FACTS.tile_n)
    else:
        return tl.max(kept.to(tl.int8), 0) > 0


@triton.jit
def dot_parts(q, k, FACTS: tl.constexpr):
    """The products of q with the keys of each part, fp32 (parts · tile_m, tile_n / parts), summed over the head dim."""
    EACH: tl.constexpr = FACTS.tile_n // FACTS.parts
    s = None  # the first product needs no zeros to be added to
    for n in tl.static_range(len(k)):
        # (parts, tile_m, width) · (parts, width, tile_n / parts): a batch of products, one for each warp.
        of_parts = k[n].reshape(FACTS.parts, EACH, k[n].shape[1])
        s = dot(q[n], tl.trans(of_parts, (0, 2, 1)), s, FACTS)
    return s.reshape(FACTS.parts * FACTS.tile_m, EACH)


@triton.jit
def accumulate_parts(p, v, acc, FACTS: tl.constexpr):
    """:func:`tile.accumulate` of each part's P, with its rows of v."""
    # P stays in the registers of its warp: the product S = Q Kᵀ leaves it where P V wants it.
    p = p.to(v[0].dtype).reshape(FACTS.parts, FACTS.tile_m, FACTS.tile_n // FACTS.parts)
    sums = ()
    for n in tl.static_range(len(acc)):
        sums = sums + (_accumulated(p, v[n], acc[n], FACTS),)
    return sums


@triton.jit
def _accumulated(p, v, acc, FACTS: tl.constexpr):
    """``acc + p v`` of one piece of the head dim, p (parts, tile_m, tile_n / parts)."""
    WIDTH: tl.constexpr = acc.shape[1]
    of_parts = v.reshape(FACTS.parts, FACTS.tile_n // FACTS.parts, WIDTH)
    # (parts, tile_m, tile_n / parts) · (parts, tile_n / parts, width)
    total = dot(p, of_parts, acc.reshape(FACTS.parts, FACTS.tile_m, WIDTH), FACTS)
    return total.reshape(FACTS.parts * FACTS.tile_m, WIDTH)


@triton.jit
def merged_parts(m, l, acc, FACTS: tl.constexpr):
    """The state (m, l, acc) of each row, (tile_m,) and (tile_m, width), from those of its parts, by (8)."""
    # m, l: fp32 (parts · tile_m,), row r of part p at p · tile_m + r.
    # (parts, tile_m): the maxima meet through shared memory, once for all tiles. A part without keys has -inf.
    of_parts = m.reshape(FACTS.parts, FACTS.tile_m)
    top = tl.max(of_parts, 0)
    weight = exponential(of_parts - tl.where(top == float("-inf"), 0.0, top)[None, :], FACTS)
    l = tl.sum(l.reshape(FACTS.parts, FACTS.tile_m) * weight, 0)
    weight = weight.reshape(FACTS.parts * FACTS.tile_m)
    sums = ()
    # O of the parts: fp32 (parts · tile_m, width), each on its own maximum until here.
    for n in tl.static_range(len(acc)):
        sums = sums + (_summed(acc[n] * weight[:, None], FACTS),)
    return top, l, sums


@triton.jit
def _summed(x, FACTS: tl.constexpr):
    """The sums over the parts of one piece, (tile_m, width)."""
    WIDTH: tl.constexpr = x.shape[1]
    HALVINGS: tl.constexpr = FACTS.parts.bit_length() - 1
    # The parts become the last axis, which one thread holds: sums of pairs then need no exchange.
    x = tl.permute(x.reshape(FACTS.parts, FACTS.tile_m, WIDTH), (1, 2, 0))
    for _ in tl.static_range(HALVINGS):
        left, right = tl.split(x.reshape(FACTS.tile_m, WIDTH, x.shape[2] // 2, 2))
        x = left + right
    return x.reshape(FACTS.tile_m, WIDTH)
