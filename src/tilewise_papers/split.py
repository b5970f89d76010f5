"""Split keys: the keys of one query tile are shared among several work items, and their results merged.

With one long head or one query (decode) the tiles of queries alone leave most cores idle. Each split of the keys gives a partial
(o, lse) by FlashAttention-2's Algorithm 1; lse = log Σ exp(lse_c) and o = Σ exp(lse_c − lse) o_c put them together.
"""

from __future__ import annotations

from itertools import product

from tilewise_papers.flash2 import Forward, finish_state, forward_tile, start_state
from tilewise_papers.head import Blocks, Head, tiles
from tilewise_papers.machine import Machine, Tile


def forward(machine: Machine, head: Head, blocks: Blocks, split_keys: int) -> Forward:
    """split_keys: keys of one work item. Returns o and lse, as flash2.forward does."""
    qkv = head.place(machine)
    seqlen_q, seqlen_k = head.sizes
    splits = list(tiles(seqlen_k, split_keys))
    o_parts = [machine.empty(f"O part {c}", (seqlen_q, qkv[2].shape[1])) for c in range(len(splits))]
    lse_parts = [machine.empty(f"lse part {c}", (seqlen_q, 1)) for c in range(len(splits))]
    pairs = product(list(tiles(seqlen_q, blocks.rows)), enumerate(splits))
    for rows, (c, keys) in machine.launch("split", pairs, alike=not head.causal):
        out = o_parts[c][rows], lse_parts[c][rows]
        forward_tile(machine, head, (rows, tiles_of(keys, blocks.cols)), qkv, out)
    return merge(machine, o_parts, lse_parts, blocks)


def merge(machine: Machine, o_parts: list[Tile], lse_parts: list[Tile], blocks: Blocks) -> Forward:
    """Merge partial results in one pass, with the running maximum and sum of the online softmax."""
    seqlen_q, head_dim_v = o_parts[0].shape
    o, lse = machine.empty("O", (seqlen_q, head_dim_v)), machine.empty("lse", (seqlen_q, 1))
    for rows in machine.launch("merge", tiles(seqlen_q, blocks.rows), alike=True):
        state = o_i, l_i, m_i = start_state(machine, rows.stop - rows.start, head_dim_v)
        for o_part, lse_part in machine.loop(zip(o_parts, lse_parts, strict=True), alike=True):
            o_c, lse_c = machine.load(o_part[rows]), machine.load(lse_part[rows])
            m_new = machine.hold("m new", m_i.maximum(lse_c))
            rescale = machine.hold("rescale", m_i.exp_minus(m_new))
            weight = machine.hold("weight", lse_c.exp_minus(m_new))
            l_i.put(rescale * l_i + weight)
            m_i.put(m_new)
            o_i.put(o_i * rescale + o_c * weight)
        finish_state(machine, (o[rows], lse[rows]), state)
    return Forward(o.read(), lse.read())


def tiles_of(keys: slice, size: int) -> list[slice]:
    """The tiles of one split of the keys."""
    return [slice(keys.start + t.start, keys.start + t.stop) for t in tiles(keys.stop - keys.start, size)]
