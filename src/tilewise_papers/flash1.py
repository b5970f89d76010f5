"""FlashAttention (Dao et al. 2022): the outer loop runs over keys, the inner one over queries.

Forward: Algorithm 2, which is Algorithm 1 with softmax scale, mask and dropout. O and its statistics m, l (row maximum and
row sum so far) live in slow memory and are read, rescaled and written once for each key block. Backward: Algorithm 4.
Line numbers in the margins are those of Algorithms 2 and 4. Each head is one work item.

A pattern (⌈seqlen_q / Br⌉, ⌈seqlen_k / Bc⌉), bool, says which blocks take part: Algorithm 5, whose line 8 leaves out the others. Their
pairs count as masked, so a row of blocks that is all zero gives o = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilewise_papers.head import Blocks, Gradients, Head, tiles
from tilewise_papers.machine import Machine, Tile


@dataclass(frozen=True)
class Forward:
    """o (seqlen_q, head_dim_v); l and m (seqlen_q, 1): row sum of exp(s − m), and row maximum."""

    o: np.ndarray
    l: np.ndarray
    m: np.ndarray


def chosen(head: Head, blocks: Blocks, pattern: np.ndarray | None) -> Callable[[slice, slice], bool]:
    """Whether a block of rows and cols takes part. Raises ValueError unless the pattern has one entry for each block."""
    made = tuple(-(-n // size) for n, size in zip(head.sizes, (blocks.rows, blocks.cols), strict=True))
    if pattern is not None and pattern.shape != made:
        raise ValueError(f"the pattern is {pattern.shape}, but blocks of {blocks.rows} × {blocks.cols} make {made}")
    return lambda rows, cols: pattern is None or pattern[rows.start // blocks.rows, cols.start // blocks.cols]


def band_pattern(rows: int, cols: int, density: float) -> np.ndarray:
    """A pattern of about `density`: bands around the diagonal, wide enough, so that each row and column has a block."""
    i, j = np.arange(rows)[:, None] / rows, np.arange(cols) / cols
    distance = np.minimum((i - j) % 1, (j - i) % 1)
    return distance <= np.quantile(distance, density)


def forward(machine: Machine, head: Head, blocks: Blocks, pattern: np.ndarray | None = None) -> Forward:
    """Algorithm 2. Returns o and the statistics l, m that the backward needs."""
    takes_part = chosen(head, blocks, pattern)
    q, k, v = head.place(machine)
    seqlen_q, seqlen_k = head.sizes
    o = machine.fill("O", (seqlen_q, v.shape[1]), 0.0)  # line 3
    l = machine.fill("l", (seqlen_q, 1), 0.0)
    m = machine.fill("m", (seqlen_q, 1), -np.inf)
    for one in machine.launch("flash forward", [head]):
        for cols in machine.loop(tiles(seqlen_k, blocks.cols), alike=pattern is None):  # line 6
            k_j, v_j = machine.load(k[cols]), machine.load(v[cols])  # line 7
            for rows in machine.loop(tiles(seqlen_q, blocks.rows), alike=pattern is None):  # line 8
                if takes_part(rows, cols):
                    update_tile(machine, one, (rows, cols), (q, k_j, v_j), (o, l, m))
    return Forward(o.read(), l.read(), m.read())


def update_tile(machine: Machine, head: Head, where: tuple[slice, slice], qkv: tuple, olm: tuple) -> None:
    """Lines 9 to 16 of Algorithm 2: bring the key block k_j, v_j, on chip, into the rows of o, l, m.

    qkv: q in slow memory, k_j and v_j on chip. olm: o, l, m in slow memory.
    """
    (rows, cols), (q, k_j, v_j), (o, l, m) = where, qkv, olm
    q_i, o_i, l_i, m_i = (machine.load(x[rows]) for x in (q, o, l, m))  # line 9
    s = machine.hold("S", (q_i @ k_j.T) * head.scale)  # line 10
    s = head.masked(s, rows, cols)  # line 11
    m_tile = machine.hold("m~", s.rowmax())  # line 12
    p = s.put(s.exp_minus(m_tile))
    l_tile = machine.hold("l~", p.rowsum())
    m_new = machine.hold("m new", m_i.maximum(m_tile))  # line 13
    old = machine.hold("exp(m - m new)", m_i.exp_minus(m_new))
    new = machine.hold("exp(m~ - m new)", m_tile.exp_minus(m_new))
    l_new = machine.hold("l new", old * l_i + new * l_tile)
    p = head.dropped(p, rows, cols)  # line 14
    machine.store(o[rows], ((l_i * old) * o_i + new * (p @ v_j)) / l_new)  # line 15
    machine.store(l[rows], l_new)  # line 16
    machine.store(m[rows], m_new)


def backward(
    machine: Machine, head: Head, out: Forward, do: np.ndarray, blocks: Blocks, pattern: np.ndarray | None = None
) -> Gradients:
    """Algorithm 4: P is recomputed from l and m; dQ is read and written once for each key block."""
    takes_part = chosen(head, blocks, pattern)
    q, k, v = head.place(machine)
    inputs = (q, *(machine.place(n, x) for n, x in (("O", out.o), ("dO", do), ("l", out.l), ("m", out.m))))
    dq, dk, dv = (machine.fill(n, x.shape, 0.0) for n, x in (("dQ", q), ("dK", k), ("dV", v)))  # line 5
    seqlen_q, seqlen_k = head.sizes
    for one in machine.launch("flash backward", [head]):
        for cols in machine.loop(tiles(seqlen_k, blocks.cols), alike=pattern is None):  # line 6
            k_j, v_j = machine.load(k[cols]), machine.load(v[cols])  # line 7
            dk_j, dv_j = (machine.hold(n, 0.0, x.shape) for n, x in (("dK", k_j), ("dV", v_j)))  # line 8
            for rows in machine.loop(tiles(seqlen_q, blocks.rows), alike=pattern is None):  # line 9
                if takes_part(rows, cols):
                    backward_tile(machine, one, (rows, cols), (*inputs, dq), (k_j, v_j, dk_j, dv_j))
            machine.store(dk[cols], dk_j)  # line 24
            machine.store(dv[cols], dv_j)
    return Gradients(dq.read(), dk.read(), dv.read())


def backward_tile(
    machine: Machine, head: Head, where: tuple[slice, slice], slow: tuple, chip: tuple[Tile, ...]
) -> None:
    """Lines 10 to 22 of Algorithm 4. slow: q, o, do, l, m, dq in slow memory. chip: k_j, v_j, dk_j, dv_j on chip."""
    (rows, cols), (k_j, v_j, dk_j, dv_j) = where, chip
    q_i, o_i, do_i, l_i, m_i, dq_i = (machine.load(x[rows]) for x in slow)  # line 10
    s = head.masked(machine.hold("S", (q_i @ k_j.T) * head.scale), rows, cols)  # lines 11 and 12
    p = s.put(s.exp_minus(m_i) / l_i)  # line 13
    dp = machine.hold("dP", do_i @ v_j.T)  # line 17
    dp = head.dropped(dp, rows, cols)  # line 18
    delta = machine.hold("delta", (do_i * o_i).rowsum())  # line 19
    ds = dp.put(p * (dp - delta))  # line 20
    p = head.dropped(p, rows, cols)  # lines 14 and 15, after line 20 so that P needs no second tile
    dv_j.add_product(p.T, do_i)  # line 16
    ds.put(ds * head.scale)  # the τ of lines 21 and 22
    dq_i.add_product(ds, k_j)  # line 21
    dk_j.add_product(ds.T, q_i)  # line 22
    machine.store(slow[-1][rows], dq_i)
