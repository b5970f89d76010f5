"""Standard attention: every step is a kernel of its own that reads and writes slow memory.

Forward: Algorithm 0 of FlashAttention (Dao et al. 2022). Backward: its Algorithm 3. With a mask or dropout each of them is
one more kernel, as in an eager framework: the mask reads and writes S, dropout reads P, writes P_drop and a byte for each
pair, which the backward reads again. fused=True joins mask, softmax and dropout in one kernel, forward and backward, and
makes the dropout mask again instead of storing it. Even so P has to be written in training, since the backward needs it.

A kernel of the kind A Bᵀ or A B holds one long block of `blocks.rows` on chip and streams pieces of `blocks.cols` past it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewise_papers.head import Blocks, Gradients, Head, tiles
from tilewise_papers.machine import Machine, Tile


@dataclass(frozen=True)
class Forward:
    """o (seqlen_q, head_dim_v), and what training keeps, all (seqlen_q, seqlen_k): p; p_drop = p ∘ z; z if it was stored."""

    o: np.ndarray
    p: np.ndarray | None
    p_drop: np.ndarray
    z: np.ndarray | None


def forward(machine: Machine, head: Head, blocks: Blocks, *, fused: bool = False, training: bool = True) -> Forward:
    """Algorithm 0: S = Q Kᵀ, P = softmax(S), O = P V. training=False keeps nothing for a backward."""
    q, k, v = head.place(machine)
    s = machine.empty("S", head.sizes)
    outer_product(machine, s, q, k, blocks, head.scale)  # line 1
    if fused:
        p, p_drop, z = fused_softmax(machine, head, s, training)
    else:
        p, p_drop, z = separate_softmax(machine, head, s)  # line 2
    machine.free(s)
    o = machine.empty("O", (q.shape[0], v.shape[1]))
    inner_product(machine, o, p_drop, v, blocks)  # line 3
    return Forward(o.read(), p and p.read(), p_drop.read(), z and z.read())


def backward(
    machine: Machine, head: Head, out: Forward, do: np.ndarray, blocks: Blocks, *, fused: bool = False
) -> Gradients:
    """Algorithm 3: dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP − rowsum(P ∘ dP)), dQ = dS K, dK = dSᵀ Q."""
    q, k, v = head.place(machine)
    do, p = machine.place("dO", do), machine.place("P", out.p)
    p_drop = machine.place("P_drop", out.p_drop) if head.dropout else p
    dq, dk, dv = (machine.empty(n, x.shape) for n, x in (("dQ", q), ("dK", k), ("dV", v)))
    inner_product(machine, dv, p_drop.T, do, blocks)  # line 1
    dp = machine.empty("dP", head.sizes)
    outer_product(machine, dp, do, v, blocks, 1.0)  # line 2
    if head.dropout and not fused:
        undo_dropout(machine, dp, machine.place("Z", out.z, itemsize=1))
    for rows in machine.launch("softmax backward", tiles(q.shape[0], 1), alike=True):  # line 3
        p_i, dp_i = machine.load(p[rows]), machine.load(dp[rows])
        if fused:
            dp_i = head.dropped(dp_i, rows, slice(0, k.shape[0]))
        delta = machine.hold("delta", (p_i * dp_i).rowsum())
        ds_i = dp_i.put(p_i * (dp_i - delta))
        machine.store(dp[rows], ds_i.put(ds_i * head.scale))  # dS takes the place of dP
    inner_product(machine, dq, dp, k, blocks)  # line 4
    inner_product(machine, dk, dp.T, q, blocks)  # line 5
    return Gradients(dq.read(), dk.read(), dv.read())


def outer_product(machine: Machine, out: Tile, a: Tile, b: Tile, blocks: Blocks, scale: float) -> None:
    """out = scale · a bᵀ, (m, n) from (m, d) and (n, d): a long block of b stays on chip while a streams past."""
    for cols in machine.launch(f"{out.name} = {a.name} {b.name}ᵀ", tiles(b.shape[0], blocks.rows), alike=True):
        b_j = machine.load(b[cols])
        for rows in machine.loop(tiles(a.shape[0], blocks.cols), alike=True):
            tile = machine.hold(out.name, machine.load(a[rows]) @ b_j.T)
            if scale != 1.0:
                tile.put(tile * scale)
            machine.store(out[rows, cols], tile)


def inner_product(machine: Machine, out: Tile, a: Tile, b: Tile, blocks: Blocks) -> None:
    """out = a b, (m, d) from (m, n) and (n, d): a long block of out stays on chip while a and b stream past."""
    for rows in machine.launch(f"{out.name} = {a.name} {b.name}", tiles(out.shape[0], blocks.rows), alike=True):
        acc = machine.hold(out.name, 0.0, (rows.stop - rows.start, out.shape[1]))
        for part in machine.loop(tiles(a.shape[1], blocks.cols), alike=True):
            acc.add_product(machine.load(a[rows, part]), machine.load(b[part]))
        machine.store(out[rows], acc)


def softmax_row(machine: Machine, s_i: Tile) -> Tile:
    """P in place of a row of S; zero if the row sees no key."""
    m_i = machine.hold("m", s_i.rowmax())
    p_i = s_i.put(s_i.exp_minus(m_i))
    l_i = machine.hold("l", p_i.rowsum())
    return p_i.put(p_i / l_i)


def separate_softmax(machine: Machine, head: Head, s: Tile) -> tuple[Tile, Tile, Tile | None]:
    """(P, P_drop, Z): mask, softmax and dropout, each its own pass over slow memory."""
    all_rows, all_cols = range(s.shape[0]), slice(0, s.shape[1])
    if head.causal:
        for i in machine.launch("mask", all_rows, alike=True):
            rows = slice(i, i + 1)
            machine.store(s[rows], head.masked(machine.load(s[rows]), rows, all_cols))
    p = machine.empty("P", s.shape)
    for i in machine.launch("softmax", all_rows, alike=True):
        rows = slice(i, i + 1)
        machine.store(p[rows], softmax_row(machine, machine.load(s[rows])))
    if not head.dropout:
        return p, p, None
    machine.free(s)
    p_drop, z = machine.empty("P_drop", s.shape), machine.empty("Z", s.shape, itemsize=1)
    for i in machine.launch("dropout", all_rows, alike=True):
        rows = slice(i, i + 1)
        p_i, z_i = machine.load(p[rows]), machine.hold("Z", head.drop_factor(rows, all_cols))
        machine.store(z[rows], z_i)
        machine.store(p_drop[rows], p_i.put(p_i * z_i))
    return p, p_drop, z


def undo_dropout(machine: Machine, dp: Tile, z: Tile) -> None:
    """dP = dP_drop ∘ Z in place, with the stored Z."""
    for rows in machine.launch("dropout backward", tiles(dp.shape[0], 1), alike=True):
        dp_i, z_i = machine.load(dp[rows]), machine.load(z[rows])
        machine.store(dp[rows], dp_i.put(dp_i * z_i))


def fused_softmax(machine: Machine, head: Head, s: Tile, training: bool) -> tuple[Tile | None, Tile, None]:
    """(P, P_drop, no Z): mask, softmax and dropout in one pass; P is written only if a backward will ask for it."""
    p = machine.empty("P", s.shape) if training or not head.dropout else None
    p_drop = machine.empty("P_drop", s.shape) if head.dropout else p
    cols = slice(0, s.shape[1])
    for rows in machine.launch("mask, softmax, dropout", tiles(s.shape[0], 1), alike=True):
        p_i = softmax_row(machine, head.masked(machine.load(s[rows]), rows, cols))
        if p is not None:
            machine.store(p[rows], p_i)
        if head.dropout:
            machine.store(p_drop[rows], head.dropped(p_i, rows, cols))
    return p, p_drop, None
