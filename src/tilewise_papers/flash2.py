"""FlashAttention-2 (Dao 2023): the outer loop of the forward runs over queries, and each pass is its own work item.

Forward: Algorithm 1. O stays on chip, unscaled, and is divided by l once at the end; of the statistics only
lse = m + log l is kept. Backward: Algorithm 2, parallel over key blocks. Causal tiles without a visible pair are left out,
and only tiles on the diagonal pay for the mask. Line numbers in the margins are those of the two algorithms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tilewise_papers.head import Blocks, Gradients, Head, tiles
from tilewise_papers.machine import Machine, Tile


@dataclass(frozen=True)
class Forward:
    """o (seqlen_q, head_dim_v); lse (seqlen_q, 1), natural logarithm, -inf for a row that sees no key."""

    o: np.ndarray
    lse: np.ndarray


def visible_tiles(head: Head, rows: slice, key_tiles: Iterable[slice]) -> list[slice]:
    """The key tiles in which at least one of these query rows sees a key."""
    last_seen = rows.stop - 1 + len(head.k) - len(head.q)
    return [cols for cols in key_tiles if not head.causal or cols.start <= last_seen]


def masked_tile(head: Head, s: Tile, rows: slice, cols: slice) -> Tile:
    """MASK(S), skipped where the whole tile is visible: its first query sees its last key."""
    full = not head.causal or cols.stop - 1 <= rows.start + len(head.k) - len(head.q)
    return s if full else head.masked(s, rows, cols)


def start_state(machine: Machine, rows: int, head_dim_v: int) -> tuple[Tile, Tile, Tile]:
    """Line 5: o = 0, l = 0, m = -inf on chip."""
    o_i = machine.hold("O", 0.0, (rows, head_dim_v))
    return o_i, machine.hold("l", 0.0, (rows, 1)), machine.hold("m", -np.inf, (rows, 1))


def update_state(machine: Machine, head: Head, where: tuple[slice, slice], qkv: tuple[Tile, ...], state: tuple) -> None:
    """Lines 8 to 10: bring the key tile k_j, v_j into the state o_i, l_i, m_i; all of them on chip."""
    (rows, cols), (q_i, k_j, v_j), (o_i, l_i, m_i) = where, qkv, state
    s = machine.hold("S", (q_i @ k_j.T) * head.scale)  # line 8
    s = masked_tile(head, s, rows, cols)
    m_new = machine.hold("m new", m_i.maximum(s.rowmax()))  # line 9
    p = s.put(s.exp_minus(m_new))
    rescale = machine.hold("rescale", m_i.exp_minus(m_new))
    l_i.put(rescale * l_i + p.rowsum())
    m_i.put(m_new)
    p = head.dropped(p, rows, cols)
    o_i.put(o_i * rescale)  # line 10
    o_i.add_product(p, v_j)


def finish_state(machine: Machine, out: tuple[Tile, Tile], state: tuple[Tile, Tile, Tile]) -> None:
    """Lines 12 to 15: out = (o, lse) of the slower level gets o_i / l_i and m_i + log l_i."""
    (o, lse), (o_i, l_i, m_i) = out, state
    o_i.put(o_i / l_i)  # line 12
    m_i.put(m_i + l_i.log())  # line 13
    machine.store(o, o_i)  # line 14
    machine.store(lse, m_i)  # line 15


def forward_tile(
    machine: Machine, head: Head, where: tuple[slice, Iterable[slice]], qkv: tuple[Tile, ...], out: tuple[Tile, Tile]
) -> None:
    """Lines 4 to 15: one tile of queries over some tiles of keys. qkv in slow memory; out: the rows of o and lse."""
    (rows, key_tiles), (q, k, v) = where, qkv
    q_i = machine.load(q[rows])  # line 4
    state = start_state(machine, q_i.shape[0], v.shape[1])  # line 5
    for cols in machine.loop(visible_tiles(head, rows, key_tiles), alike=not head.causal):  # line 6
        k_j, v_j = machine.load(k[cols]), machine.load(v[cols])  # line 7
        update_state(machine, head, (rows, cols), (q_i, k_j, v_j), state)
    finish_state(machine, out, state)


def forward(machine: Machine, head: Head, blocks: Blocks) -> Forward:
    """Algorithm 1. Returns o and lse."""
    qkv = head.place(machine)
    seqlen_q, seqlen_k = head.sizes
    o, lse = machine.empty("O", (seqlen_q, qkv[2].shape[1])), machine.empty("lse", (seqlen_q, 1))
    for rows in machine.launch("flash2 forward", tiles(seqlen_q, blocks.rows), alike=not head.causal):  # line 3
        forward_tile(machine, head, (rows, tiles(seqlen_k, blocks.cols)), qkv, (o[rows], lse[rows]))
    return Forward(o.read(), lse.read())


def backward(machine: Machine, head: Head, out: Forward, do: np.ndarray, blocks: Blocks) -> Gradients:
    """Algorithm 2. Work items of different key blocks add to the same dQ: on a GPU these adds are atomic.

    Line 9 of the paper also lists O; with delta at hand the tile does not need it, and it is not loaded here.
    """
    q, k, v = head.place(machine)
    do, lse = machine.place("dO", do), machine.place("lse", out.lse)
    dq = machine.fill("dQ", q.shape, 0.0)  # line 3
    dk, dv = machine.empty("dK", k.shape), machine.empty("dV", v.shape)
    delta = row_delta(machine, do, machine.place("O", out.o), blocks)  # line 4
    seqlen_q, seqlen_k = head.sizes
    for cols in machine.launch("flash2 backward", tiles(seqlen_k, blocks.cols), alike=not head.causal):  # line 5
        k_j, v_j = machine.load(k[cols]), machine.load(v[cols])  # line 6
        dk_j, dv_j = (machine.hold(n, 0.0, x.shape) for n, x in (("dK", k_j), ("dV", v_j)))  # line 7
        for rows in machine.loop(tiles(seqlen_q, blocks.rows), alike=not head.causal):  # line 8
            if visible_tiles(head, rows, [cols]):
                backward_tile(machine, head, (rows, cols), (q, do, lse, delta, dq), (k_j, v_j, dk_j, dv_j))
        machine.store(dk[cols], dk_j)  # line 18
        machine.store(dv[cols], dv_j)
    return Gradients(dq.read(), dk.read(), dv.read())


def row_delta(machine: Machine, do: Tile, o: Tile, blocks: Blocks) -> Tile:
    """Line 4: delta = rowsum(dO ∘ O), once for all key blocks."""
    delta = machine.empty("delta", (do.shape[0], 1))
    for rows in machine.launch("flash2 delta", tiles(do.shape[0], blocks.rows), alike=True):
        machine.store(delta[rows], (machine.load(do[rows]) * machine.load(o[rows])).rowsum())
    return delta


def backward_tile(
    machine: Machine, head: Head, where: tuple[slice, slice], slow: tuple, chip: tuple[Tile, ...]
) -> None:
    """Lines 9 to 16 of Algorithm 2. slow: q, do, lse, delta, dq in slow memory. chip: k_j, v_j, dk_j, dv_j."""
    (rows, cols), (k_j, v_j, dk_j, dv_j) = where, chip
    q_i, do_i, lse_i, delta_i = (machine.load(x[rows]) for x in slow[:-1])  # line 9
    s = masked_tile(head, machine.hold("S", (q_i @ k_j.T) * head.scale), rows, cols)  # line 10
    p = s.put(s.exp_minus(lse_i))  # line 11
    dp = head.dropped(machine.hold("dP", do_i @ v_j.T), rows, cols)  # line 13
    ds = dp.put(p * (dp - delta_i))  # line 14
    p = head.dropped(p, rows, cols)
    dv_j.add_product(p.T, do_i)  # line 12, after line 14 so that P needs no second tile under dropout
    ds.put(ds * head.scale)
    dq_i = machine.load(slow[-1][rows])  # line 15
    dq_i.add_product(ds, k_j)
    machine.store(slow[-1][rows], dq_i)
    dk_j.add_product(ds.T, q_i)  # line 16
