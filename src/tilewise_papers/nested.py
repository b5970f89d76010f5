"""Nested tiling: FlashAttention-2's forward at every level of a memory hierarchy of any depth.

    level 0   q, k, v, o                      blocks[0]: the tiles that level 1 holds
    level 1   Q_i, K_j, V_j, state (O, l, m)  blocks[1]: their pieces, that level 2 holds
    level 2   ...                             and so on; arithmetic in the last level

On its way down a key tile meets each query piece of the level; the piece's state comes down with it and goes back up.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise_papers.flash2 import Forward, finish_state, start_state, update_state, visible_tiles
from tilewise_papers.head import Blocks, Head, tiles
from tilewise_papers.machine import Machine, Tile
from tilewise_papers.split import tiles_of


def forward(machine: Machine, head: Head, blocks: Sequence[Blocks]) -> Forward:
    """blocks[b] are the tiles that cross boundary b. Returns o and lse.

    Raises ValueError unless there is one Blocks for each boundary of the machine.
    """
    if len(blocks) != len(machine.levels) - 1:
        raise ValueError(
            f"{len(machine.levels)} levels have {len(machine.levels) - 1} boundaries, got {len(blocks)} blocks"
        )
    q, k, v = head.place(machine)
    seqlen_q, seqlen_k = head.sizes
    out = machine.empty("O", (seqlen_q, v.shape[1])), machine.empty("lse", (seqlen_q, 1))
    for rows in machine.launch("nested forward", tiles(seqlen_q, blocks[0].rows), alike=not head.causal):
        q_i = machine.load(q[rows])
        state = top_state(machine, q_i.shape[0], v.shape[1])
        for cols in machine.loop(visible_tiles(head, rows, tiles(seqlen_k, blocks[0].cols)), alike=not head.causal):
            key_tile = machine.load(k[cols]), machine.load(v[cols])
            update(machine, head, (rows, cols), (q_i, *key_tile), (state, blocks[1:]))
        finish(machine, tuple(x[rows] for x in out), state, blocks[1:])
    return Forward(*(x.read() for x in out))


def top_state(machine: Machine, rows: int, head_dim_v: int) -> tuple[Tile, Tile, Tile]:
    """(o, l, m) in level 1. If that is not the last level, its zeros are written there from the last one, level by level."""
    if machine.last == 1:
        return start_state(machine, rows, head_dim_v)
    names = (("O", head_dim_v, 0.0), ("l", 1, 0.0), ("m", 1, float("-inf")))
    return tuple(machine.fill(name, (rows, width), value, level=1) for name, width, value in names)


def update(machine: Machine, head: Head, where: tuple[slice, slice], qkv: tuple[Tile, ...], below: tuple) -> None:
    """Bring a key tile into the state of a query tile, both in the same level. below: (state, blocks of the lower levels)."""
    (rows, cols), (q, k, v), (state, blocks) = where, qkv, below
    if not blocks:
        update_state(machine, head, where, qkv, state)
        return
    for piece in machine.loop(tiles_of(rows, blocks[0].rows), alike=not head.causal):
        here = inside(piece, rows)
        q_i, state_i = machine.load(q[here]), tuple(machine.load(x[here]) for x in state)
        for keys in machine.loop(visible_tiles(head, piece, tiles_of(cols, blocks[0].cols)), alike=not head.causal):
            there = inside(keys, cols)
            key_tile = machine.load(k[there]), machine.load(v[there])
            update(machine, head, (piece, keys), (q_i, *key_tile), (state_i, blocks[1:]))
        for x, x_i in zip(state, state_i, strict=True):
            machine.store(x[here], x_i)


def finish(machine: Machine, out: tuple[Tile, ...], state: tuple[Tile, ...], blocks: Sequence[Blocks]) -> None:
    """out = (o / l, m + log l), computed in the last level and passed up through the state's own room."""
    if not blocks:
        finish_state(machine, out, state)
        return
    o, l, m = state
    for here in machine.loop(tiles(o.shape[0], blocks[0].rows), alike=True):
        finish(machine, (o[here], m[here]), tuple(machine.load(x[here]) for x in (o, l, m)), blocks[1:])
    machine.store(out[0], o)
    machine.store(out[1], m)


def inside(part: slice, whole: slice) -> slice:
    """A slice of the sequence as a slice of the tile that holds it."""
    return slice(part.start - whole.start, part.stop - whole.start)
