"""How much each algorithm moves and computes, as formulas, without running it.

Two kinds. The orders of growth that FlashAttention (Dao et al. 2022) proves: Theorem 2, Propositions 3 and 4, Theorem 5.
And exact counts, summed from the loop bounds of the papers' algorithms. This module imports nothing of the programs; the
tests hold what the machine counts equal to what is written here.

N = seqlen_q, K = seqlen_k, d = head_dim, e = head_dim_v. A softmax scale other than 1 is assumed (it costs an operation).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


def standard_order(n: int, d: int) -> float:
    """Theorem 2 (forward) and Theorem 5 (backward): standard attention makes Θ(N d + N²) accesses."""
    return n * d + n * n


def flash_order(n: int, d: int, m: int) -> float:
    """Theorem 2 and Theorem 5: FlashAttention makes Θ(N² d² / M) accesses with an SRAM of M numbers, d <= M <= N d."""
    return n * n * d * d / m


def least_traffic(n: int, d: int) -> int:
    """The traffic that no exact algorithm can avoid: reading Q, K, V and writing O once.

    Proposition 3 is built on it. At M = N d the order N² d² / M is N d, this same amount; so no exact algorithm makes
    o(N² d² / M) accesses for every M between d and N d.
    """
    return 4 * n * d


@dataclass(frozen=True)
class Amount:
    """Numbers moved one way, by how they are stored: matrices in words, row statistics in 4 bytes, flags in 1."""

    matrix: int = 0
    statistic: int = 0
    flag: int = 0

    @property
    def elements(self) -> int:
        return self.matrix + self.statistic + self.flag

    def bytes(self, word: int) -> int:
        return word * self.matrix + 4 * self.statistic + self.flag

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.matrix + other.matrix, self.statistic + other.statistic, self.flag + other.flag)


@dataclass(frozen=True)
class Exact:
    """The traffic of a program at one boundary, and its arithmetic (0 where the formula is about traffic alone)."""

    reads: Amount
    writes: Amount
    matmul_flops: int = 0
    other_flops: int = 0

    def __add__(self, other: Exact) -> Exact:
        return Exact(
            self.reads + other.reads,
            self.writes + other.writes,
            self.matmul_flops + other.matmul_flops,
            self.other_flops + other.other_flops,
        )


@dataclass(frozen=True)
class Sizes:
    """The problem of one head, and which options cost operations."""

    n: int
    k: int
    d: int
    e: int
    causal: bool = False
    dropout: bool = False


@dataclass(frozen=True)
class Visits:
    """Sums over the tiles (i, j) that an algorithm enters.

    tiles: how many. rows: Σ rows_i, the query rows fetched. cols: Σ cols_j. pairs: Σ rows_i·cols_j, the scores computed.
    masked: the pairs of tiles that hold a masked pair.
    """

    tiles: int
    rows: int
    cols: int
    pairs: int
    masked: int


def edges(length: int, size: int, start: int = 0) -> list[tuple[int, int]]:
    """(start, stop) of each tile of a range; the last may be shorter."""
    return [(start + a, start + min(a + size, length)) for a in range(0, length, size)]


def visits(row_edges: Iterable, col_edges: Iterable, enters) -> Visits:
    """Sum over the tiles for which enters(row_edge, col_edge) is 0 (no), 1 (fully visible) or 2 (with masked pairs)."""
    found = [
        (r1 - r0, c1 - c0, enters((r0, r1), (c0, c1)))
        for r0, r1 in row_edges
        for c0, c1 in col_edges
        if enters((r0, r1), (c0, c1))
    ]
    return Visits(
        len(found),
        sum(r for r, _, _ in found),
        sum(c for _, c, _ in found),
        sum(r * c for r, c, _ in found),
        sum(r * c for r, c, kind in found if kind == 2),
    )


def causal_rule(sizes: Sizes):
    """FlashAttention-2 skips a tile whose last query sees none of its keys, and masks one whose first query misses some."""
    off = sizes.k - sizes.n

    def enters(row_edge: tuple[int, int], col_edge: tuple[int, int]) -> int:
        if not sizes.causal:
            return 1
        if col_edge[0] > row_edge[1] - 1 + off:
            return 0
        return 2 if col_edge[1] - 1 > row_edge[0] + off else 1

    return enters


def standard_forward(sizes: Sizes, block: int, *, fused: bool = False, training: bool = True) -> Exact:
    """Algorithm 0. block: rows of the long block that the products keep on chip."""
    n, k, d, e, pairs = sizes.n, sizes.k, sizes.d, sizes.e, sizes.n * sizes.k
    reads = Amount(k * d + up(k, block) * n * d)  # S = Q Kᵀ
    writes = Amount(pairs)
    if sizes.causal and not fused:
        reads, writes = reads + Amount(pairs), writes + Amount(pairs)
    reads += Amount(pairs)  # softmax
    p_copies = 1 if not (fused and sizes.dropout and not training) else 0
    writes += Amount(p_copies * pairs)
    if sizes.dropout:
        reads += Amount(0 if fused else pairs)
        writes += Amount(pairs, flag=0 if fused else pairs)
    reads += Amount(pairs + up(n, block) * k * e)  # O = P V
    writes += Amount(n * e)
    other = pairs * (6 + sizes.causal + sizes.dropout)
    return Exact(reads, writes, 2 * pairs * (d + e), other)


def standard_backward(sizes: Sizes, block: int, *, fused: bool = False) -> Exact:
    """Algorithm 3."""
    n, k, d, e, pairs = sizes.n, sizes.k, sizes.d, sizes.e, sizes.n * sizes.k
    reads = Amount(pairs + up(k, block) * n * e)  # dV = Pᵀ dO
    writes = Amount(k * e)
    reads += Amount(k * e + up(k, block) * n * e)  # dP = dO Vᵀ
    writes += Amount(pairs)
    if sizes.dropout and not fused:
        reads, writes = reads + Amount(pairs, flag=pairs), writes + Amount(pairs)
    reads, writes = reads + Amount(2 * pairs), writes + Amount(pairs)  # dS from P and dP
    reads, writes = reads + Amount(pairs + up(n, block) * k * d), writes + Amount(n * d)  # dQ = dS K
    reads, writes = reads + Amount(pairs + up(k, block) * n * d), writes + Amount(k * d)  # dK = dSᵀ Q
    return Exact(reads, writes, 4 * pairs * (d + e), pairs * (5 + sizes.dropout))


def flash1_forward(sizes: Sizes, rows: int, cols: int, pattern=None) -> Exact:
    """Algorithms 1 and 2; with a pattern of blocks, Algorithm 5. Each visit reads Q, O, l, m and writes O, l, m."""
    n, k, d, e = sizes.n, sizes.k, sizes.d, sizes.e
    seen = block_visits(sizes, rows, cols, pattern)
    reads = Amount(k * (d + e) + seen.rows * (d + e), 2 * seen.rows)
    writes = Amount(n * e + seen.rows * e, 2 * n + 2 * seen.rows)
    other = seen.pairs * (5 + sizes.causal + sizes.dropout) + seen.rows * (9 + 4 * e)
    return Exact(reads, writes, 2 * seen.pairs * (d + e), other)


def flash1_backward(sizes: Sizes, rows: int, cols: int, pattern=None) -> Exact:
    """Algorithm 4. Each visit reads Q, O, dO, dQ, l, m and writes dQ; dQ, dK, dV are set to zero first."""
    n, k, d, e = sizes.n, sizes.k, sizes.d, sizes.e
    seen = block_visits(sizes, rows, cols, pattern)
    reads = Amount(k * (d + e) + seen.rows * 2 * (d + e), 2 * seen.rows)
    writes = Amount(n * d + 2 * k * (d + e) + seen.rows * d)
    other = seen.pairs * (7 + sizes.causal + 2 * sizes.dropout) + seen.rows * 2 * e
    return Exact(reads, writes, 2 * seen.pairs * (3 * d + 2 * e), other)


def block_visits(sizes: Sizes, rows: int, cols: int, pattern=None) -> Visits:
    """All blocks, or those of the pattern, in either order of the two loops."""
    return visits(
        edges(sizes.n, rows),
        edges(sizes.k, cols),
        lambda r, c: 1 if pattern is None else int(pattern[r[0] // rows][c[0] // cols]),
    )


def flash2_forward(sizes: Sizes, rows: int, cols: int) -> Exact:
    """Algorithm 1 of FlashAttention-2: Q once, K and V for each query block that sees them, O and lse once."""
    seen = visits(edges(sizes.n, rows), edges(sizes.k, cols), causal_rule(sizes))
    return Exact(
        Amount(sizes.n * sizes.d + seen.cols * (sizes.d + sizes.e)),
        Amount(sizes.n * sizes.e, sizes.n),
        2 * seen.pairs * (sizes.d + sizes.e),
        online_softmax(sizes, seen) + sizes.n * (sizes.e + 2),
    )


def online_softmax(sizes: Sizes, seen: Visits) -> int:
    """Operations of lines 8 to 10: five a score (scale, max, subtract, exp, sum), and the rescaling of each visited row."""
    return seen.pairs * (5 + sizes.dropout) + seen.masked + seen.rows * (5 + sizes.e)


def flash2_backward(sizes: Sizes, rows: int, cols: int) -> Exact:
    """Algorithm 2 of FlashAttention-2: delta once; each visit reads Q, dO, dQ, lse, delta and writes dQ."""
    n, k, d, e = sizes.n, sizes.k, sizes.d, sizes.e
    seen = visits(edges(n, rows), edges(k, cols), causal_rule(sizes))
    reads = Amount(2 * n * e + k * (d + e) + seen.rows * (2 * d + e), 2 * seen.rows)
    writes = Amount(n * d + k * (d + e) + seen.rows * d, n)
    other = 2 * n * e + seen.pairs * (6 + 2 * sizes.dropout) + seen.masked
    return Exact(reads, writes, 2 * seen.pairs * (3 * d + 2 * e), other)


def split_forward(sizes: Sizes, rows: int, cols: int, split_keys: int) -> Exact:
    """Split keys: Q once and a partial O, lse for each split, then all partials read and merged."""
    n, k, d, e = sizes.n, sizes.k, sizes.d, sizes.e
    splits = edges(k, split_keys)
    col_edges = [tile for a, b in splits for tile in edges(b - a, cols, a)]
    seen, c = visits(edges(n, rows), col_edges, causal_rule(sizes)), len(splits)
    part = Exact(
        Amount(c * n * d + seen.cols * (d + e)),
        Amount(c * n * e, c * n),
        2 * seen.pairs * (d + e),
        online_softmax(sizes, seen) + c * n * (e + 2),
    )
    merge = Exact(Amount(c * n * e, c * n), Amount(n * e, n), 0, c * n * (7 + 3 * e) + n * (e + 2))
    return part + merge


def split_queries_shared(sizes: Sizes, rows: int, cols: int, warps: int) -> Exact:
    """Between shared memory and registers, queries split: each warp reads its rows of Q once and all of K and V."""
    n, d, e = sizes.n, sizes.d, sizes.e
    reads = n * d
    for r0, r1 in edges(n, rows):
        seen = visits([(r0, r1)], edges(sizes.k, cols), causal_rule(sizes))
        reads += min(warps, r1 - r0) * seen.cols * (d + e)
    return Exact(Amount(reads), Amount(n * e, n))


def split_keys_shared(sizes: Sizes, rows: int, cols: int, warps: int) -> Exact:
    """Between shared memory and registers, keys split: K and V once, Q once a warp, and each warp's O, l, m out and back."""
    n, d, e = sizes.n, sizes.d, sizes.e
    reads, exchanged = warps * n * d, 0
    for row_edge in edges(n, rows):
        for c0, c1 in edges(sizes.k, cols):
            if causal_rule(sizes)(row_edge, (c0, c1)):
                reads += (c1 - c0) * (d + e)
                exchanged += min(warps, c1 - c0) * (row_edge[1] - row_edge[0])
    return Exact(
        Amount(reads + exchanged * e, 2 * exchanged),
        Amount(exchanged * e + n * e, 2 * exchanged + n),
    )


def nested_inner(sizes: Sizes, outer: tuple[int, int], inner: tuple[int, int]) -> Exact:
    """Three levels, no mask: the traffic between the second and the third. outer and inner: (rows, cols) of the tiles.

    For each outer key tile a query piece and its state come down, and the state goes back; the keys pass once for each piece.
    """
    n, k, d, e = sizes.n, sizes.k, sizes.d, sizes.e
    passes = up(k, outer[1])
    pieces = sum(up(r1 - r0, inner[0]) for r0, r1 in edges(n, outer[0]))
    reads = Amount(passes * n * (d + e) + pieces * k * (d + e) + n * e, passes * 2 * n + 2 * n)
    writes = Amount(n * e + passes * n * e + n * e, 2 * n + passes * 2 * n + n)
    return Exact(reads, writes)


def up(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)
