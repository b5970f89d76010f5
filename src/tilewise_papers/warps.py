"""One query tile shared by several warps, with the keys split or the queries split (FlashAttention-2, Figure 3).

Three levels: slow memory, shared memory, registers; the boundary to watch is the second. In `split_keys` each warp takes a
slice of every key tile, so that O is a sum over warps: it goes through shared memory, behind barriers, once for each key
tile (in FlashAttention O leaves the chip at that point). In `split_queries` each warp keeps its own rows to the end: nothing
is written to shared memory but the result, and no warp waits; in exchange each warp reads all of K and V.
"""

from __future__ import annotations

from itertools import pairwise

from tilewise_papers.flash2 import Forward, finish_state, start_state, update_state, visible_tiles
from tilewise_papers.head import Blocks, Head, tiles
from tilewise_papers.machine import Machine, Tile

WARPS = 4


def share(length: int, warps: int) -> list[slice]:
    """Shares rows out among warps: at most `warps` slices, as even as they can be; a warp without rows has none."""
    ends = [length * w // warps for w in range(warps + 1)]
    return [slice(a, b) for a, b in pairwise(ends) if a < b]


def split_queries(machine: Machine, head: Head, blocks: Blocks, warps: int = WARPS) -> Forward:
    """FlashAttention-2's way: each warp owns rows of the query tile. Returns o and lse."""
    q, k, v = head.place(machine)
    seqlen_q, seqlen_k = head.sizes
    o, lse = machine.empty("O", (seqlen_q, v.shape[1])), machine.empty("lse", (seqlen_q, 1))
    for rows in machine.launch("split queries", tiles(seqlen_q, blocks.rows), alike=not head.causal):
        q_i, own_rows = machine.load(q[rows]), share(rows.stop - rows.start, warps)
        q_w = [machine.load(q_i[own]) for own in own_rows]
        states = [start_state(machine, x.shape[0], v.shape[1]) for x in q_w]
        for cols in machine.loop(visible_tiles(head, rows, tiles(seqlen_k, blocks.cols)), alike=not head.causal):
            k_j, v_j = machine.load(k[cols]), machine.load(v[cols])
            for own, q_own, state in machine.loop(zip(own_rows, q_w, states, strict=True)):
                here = slice(rows.start + own.start, rows.start + own.stop)
                update_state(machine, head, (here, cols), (q_own, machine.load(k_j), machine.load(v_j)), state)
        finish_warps(machine, (o[rows], lse[rows]), own_rows, states)
    return Forward(o.read(), lse.read())


def split_keys(machine: Machine, head: Head, blocks: Blocks, warps: int = WARPS) -> Forward:
    """FlashAttention's way: each warp owns keys of every tile. Returns o and lse."""
    q, k, v = head.place(machine)
    seqlen_q, seqlen_k = head.sizes
    o, lse = machine.empty("O", (seqlen_q, v.shape[1])), machine.empty("lse", (seqlen_q, 1))
    for rows in machine.launch("split keys", tiles(seqlen_q, blocks.rows), alike=not head.causal):
        q_i, own_rows = machine.load(q[rows]), share(rows.stop - rows.start, warps)
        q_w = [machine.load(q_i) for _ in range(warps)]
        states = [start_state(machine, own.stop - own.start, v.shape[1]) for own in own_rows]
        for cols in machine.loop(visible_tiles(head, rows, tiles(seqlen_k, blocks.cols)), alike=not head.causal):
            k_j, v_j = machine.load(k[cols]), machine.load(v[cols])
            own_keys = share(cols.stop - cols.start, warps)
            parts = [exchange_room(machine, w, q_i.shape[0], v.shape[1]) for w in range(len(own_keys))]
            for w, keys in machine.loop(enumerate(own_keys)):
                here = slice(cols.start + keys.start, cols.start + keys.stop)
                part = start_state(machine, q_i.shape[0], v.shape[1])
                update_state(
                    machine, head, (rows, here), (q_w[w], machine.load(k_j[keys]), machine.load(v_j[keys])), part
                )
                for room, x in zip(parts[w], part, strict=True):
                    machine.store(room, x)
            machine.barrier()
            for own, state in zip(own_rows, states, strict=True):
                for part in machine.loop(parts):
                    add_part(machine, tuple(machine.load(x[own]) for x in part), state)
            machine.barrier()
        finish_warps(machine, (o[rows], lse[rows]), own_rows, states)
    return Forward(o.read(), lse.read())


def exchange_room(machine: Machine, warp: int, rows: int, head_dim_v: int) -> tuple[Tile, Tile, Tile]:
    """Room in shared memory for a warp's partial (o, l, m)."""
    return tuple(
        machine.empty(f"{n} of warp {warp}", (rows, w), level=1) for n, w in (("O", head_dim_v), ("l", 1), ("m", 1))
    )


def add_part(machine: Machine, part: tuple[Tile, Tile, Tile], state: tuple[Tile, Tile, Tile]) -> None:
    """state ← the merge of two unscaled (o, l, m)."""
    (o_w, l_w, m_w), (o_i, l_i, m_i) = part, state
    m_new = machine.hold("m new", m_i.maximum(m_w))
    rescale = machine.hold("rescale", m_i.exp_minus(m_new))
    weight = machine.hold("weight", m_w.exp_minus(m_new))
    l_i.put(rescale * l_i + weight * l_w)
    m_i.put(m_new)
    o_i.put(o_i * rescale + o_w * weight)


def finish_warps(machine: Machine, out: tuple[Tile, Tile], own_rows: list[slice], states: list) -> None:
    """Each warp writes its rows of o and lse to shared memory; from there the tile goes to slow memory."""
    o, lse = (machine.empty(x.name, x.shape, level=1) for x in out)
    for own, state in zip(own_rows, states, strict=True):
        finish_state(machine, (o[own], lse[own]), state)
    machine.store(out[0], o)
    machine.store(out[1], lse)
