"""Block-sparse FlashAttention (Dao et al. 2022, Algorithm 5): FlashAttention that leaves out the blocks of a pattern.

pattern (⌈seqlen_q / Br⌉, ⌈seqlen_k / Bc⌉) bool: the blocks that take part. Pairs of the other blocks count as masked, so
a row of blocks that is all zero gives o = 0. Line numbers in the margins are those of Algorithm 5.
"""

from __future__ import annotations

import numpy as np

from tilewise_papers import flash1
from tilewise_papers.head import Blocks, Gradients, Head, tiles
from tilewise_papers.machine import Machine


def check_pattern(head: Head, blocks: Blocks, pattern: np.ndarray) -> None:
    """Raises ValueError unless pattern has one entry for each block."""
    seqlen_q, seqlen_k = head.sizes
    expected = (-(-seqlen_q // blocks.rows), -(-seqlen_k // blocks.cols))
    if pattern.shape != expected:
        raise ValueError(f"the pattern is {pattern.shape}, but blocks of {blocks.rows} × {blocks.cols} make {expected}")


def forward(machine: Machine, head: Head, blocks: Blocks, pattern: np.ndarray) -> flash1.Forward:
    """Algorithm 5. Returns o, l, m."""
    check_pattern(head, blocks, pattern)
    q, k, v = head.place(machine)
    seqlen_q, seqlen_k = head.sizes
    o = machine.fill("O", (seqlen_q, v.shape[1]), 0.0)  # line 2
    l = machine.fill("l", (seqlen_q, 1), 0.0)
    m = machine.fill("m", (seqlen_q, 1), -np.inf)
    for one in machine.launch("block-sparse forward", [head]):
        for j, cols in enumerate(machine.loop(tiles(seqlen_k, blocks.cols))):  # line 5
            k_j, v_j = machine.load(k[cols]), machine.load(v[cols])  # line 6
            for i, rows in enumerate(machine.loop(tiles(seqlen_q, blocks.rows))):  # line 7
                if pattern[i, j]:  # line 8
                    flash1.update_tile(machine, one, (rows, cols), (q, k_j, v_j), (o, l, m))  # lines 9 to 16
    return flash1.Forward(o.read(), l.read(), m.read())


def backward(
    machine: Machine, head: Head, out: flash1.Forward, do: np.ndarray, blocks: Blocks, pattern: np.ndarray
) -> Gradients:
    """Algorithm 4 without the blocks of the pattern that are zero."""
    check_pattern(head, blocks, pattern)
    q, k, v = head.place(machine)
    inputs = (q, *(machine.place(n, x) for n, x in (("O", out.o), ("dO", do), ("l", out.l), ("m", out.m))))
    dq, dk, dv = (machine.fill(n, x.shape, 0.0) for n, x in (("dQ", q), ("dK", k), ("dV", v)))
    seqlen_q, seqlen_k = head.sizes
    for one in machine.launch("block-sparse backward", [head]):
        for j, cols in enumerate(machine.loop(tiles(seqlen_k, blocks.cols))):
            k_j, v_j = machine.load(k[cols]), machine.load(v[cols])
            dk_j, dv_j = (machine.hold(n, 0.0, x.shape) for n, x in (("dK", k_j), ("dV", v_j)))
            for i, rows in enumerate(machine.loop(tiles(seqlen_q, blocks.rows))):
                if pattern[i, j]:
                    flash1.backward_tile(machine, one, (rows, cols), (*inputs, dq), (k_j, v_j, dk_j, dv_j))
            machine.store(dk[cols], dk_j)
            machine.store(dv[cols], dv_j)
    return Gradients(dq.read(), dk.read(), dv.read())


def band_pattern(rows: int, cols: int, density: float) -> np.ndarray:
    """A pattern of about `density`: bands around the diagonal, wide enough, so that each row and column has a block."""
    i, j = np.arange(rows)[:, None] / rows, np.arange(cols) / cols
    distance = np.minimum((i - j) % 1, (j - i) % 1)
    return distance <= np.quantile(distance, density)
