"""Decoding on a CPU: the kernel's own source on the machine of :mod:`tests.backends.hopper.emulated`.

The warpgroup goes as one: what a single warp does, its first 32 threads do here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace

import numpy as np

from tests.backends.hopper import emulated
from tests.backends.hopper.emulated import THREADS, Barrier, Global, Pointer, Registers, Rooms, role, rounded, stand_in
from tilewise.backends.hopper.decoding.config import DecodingConfig


class Words:
    """A left operand in registers by words of two neighbouring columns, of one row and the other in turn."""

    def __init__(self, operand: Registers):
        self.values, self.shape = operand.values, (operand.values.shape[1],)

    def __setitem__(self, n: int, two: object) -> None:
        self.values[n % 2, 2 * (n // 2) : 2 * (n // 2) + 2] = two


def load_kernel() -> SimpleNamespace:
    """The modules by name, imported with the stand-in."""
    names = ("load", "compute", "merge", "shares", "storage", "params")
    forward = ("compute", "epilogue", "load", "params", "storage", "combine", "pages")
    kit = ("kit.tiles", "kit.instructions", "kit.softmax", "kit.packed", "kit.states")
    found = emulated.imported(*(f"decoding.{n}" for n in names), *(f"forward.{n}" for n in forward), *kit, "kit.params")
    decoding = SimpleNamespace(**dict(zip(names, found[: len(names)], strict=True)))
    base = SimpleNamespace(**dict(zip(forward, found[len(names) : -len(kit) - 1], strict=True)))
    emulated._stand_in(base, *found[-len(kit) - 1 : -1])
    decoding.optional = found[-1].OptionalParams
    _stand_in(decoding, base, found[-4])
    return decoding


def _stand_in(decoding, base, softmax) -> None:
    def new_operands(qk, pv, smem, config):
        t = config.tiles
        q, p, s, o = (Registers(n) for n in (t.width, t.tile_n, t.tile_n, t.width))
        return decoding.compute.DecodingOperands("qk", "pv", smem.k, smem.v, q, p, s, o, softmax.new_state())

    def round_p(operands, config) -> None:
        operands.p.values[:] = rounded(operands.s.values, config.dtype)

    def take_word(q, place, column, inside) -> np.ndarray:
        query, sequence, head = place
        at = np.minimum(column, q.shape[-1] - 2)  # where nothing is inside, nothing is read
        return np.stack([np.where(inside, q.values[query, sequence, head, at + n], 0) for n in range(2)])

    def count_up(counts, at) -> int:
        counts.values[at] += 1
        return int(counts.values[at]) - 1

    def put(rows, columns, part, *others) -> None:
        warps = others[-1].tiles.row_warps
        if isinstance(part, int) and warps == 1:
            role.threads = 32
            rows = softmax.SoftmaxState(*(x[:, :32] for x in rows))
            columns = [[x[:32] for x in own] for own in columns]
        whole(rows, columns, part, *others)
        role.threads = 128

    def put_word(o, place, column, word, inside) -> None:
        query, sequence, head = place
        for n, values in enumerate((word.real, word.imag)):
            o.values[query[inside], sequence, head[inside], column[inside] + n] = values[inside]

    def put_lse(lse, place, value, inside) -> None:
        mine = inside & (THREADS[: len(inside)] % 4 == 0)
        query, head, sequence = place
        lse.values[query[mine], head[mine], sequence] = value[mine]

    whole = decoding.merge.put
    stand_in(
        decoding.compute, new_operands=new_operands, round_p=round_p, take_word=take_word, words_of=lambda q: Words(q)
    )
    stand_in(
        decoding.merge,
        count_up=count_up,
        put_word=put_word,
        put=put,
    )
    stand_in(base.epilogue, put_lse=put_lse)


def states_of(config: DecodingConfig, batch: int, k, numbers: tuple) -> int:
    """How many states a launch has room for: two of a share, or one of each segment that sequences may have."""
    (shares, segment, cached), heads_k = numbers[:3], k.shape[2]
    if segment == 1:
        return 2 * shares * heads_k
    keys = k.shape[1] * (numbers[9].shape[1] if cached else 1)
    return batch * max(1, -(-keys // (segment * config.tiles.tile_n))) * heads_k


def run(
    config: DecodingConfig, q, k, v, sink, numbers: tuple, order: Iterable[int] | None = None, apart: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """``(o, lse)`` of q (query, sequence, head, column) over pools (page, row, head, column), one CTA after the other in an order.

    Args:
        numbers: shares, segment, cached, sinks, scale2, cap2, lo and hi as the kernel takes them; then the lengths, the table, pages and
            rows of a page.
        apart: rows of memory between those of two pages of k, if not as many as between two numbers of the table.
    """
    decoding = load_kernel()
    shares, segment, cached, sinks, scale2, cap2, lo, hi, seqlens_k, block_table, num_pages, page_rows = numbers
    (queries, batch, heads, _), heads_k = q.shape, k.shape[2]
    o, lse = np.full(q.shape, np.nan, np.float32), np.full((queries, heads, batch), np.nan, np.float32)
    lanes, counts = 32 * config.tiles.row_warps, np.zeros(batch * heads_k, np.int64)
    states = states_of(config, batch, k, numbers)
    optional = decoding.optional(
        seqlens_k=Global(seqlens_k), block_table=Global(block_table), num_pages=num_pages, page_rows=page_rows, counts=Global(counts),
        part_o=Global(np.full((states, config.tiles.fours, lanes, 4), np.nan, np.float32)),
        part_lse=Global(np.full((states, lanes, 2 * config.tiles.own_rows), np.nan, np.float32)),
    )  # fmt: skip
    params = decoding.params.DecodingParams(
        k.shape[1],
        heads_k,
        heads // heads_k,
        queries,
        shares,
        segment,
        cached,
        np.float32(scale2),
        np.float32(cap2),
        lo,
        hi,
        Global(q),
        Global(o),
        Global(lse),
        sinks,
        sink,
        optional,
    )
    k, v = (
        np.pad(x, [(0, 0)] * 3 + [(0, config.tiles.width - x.shape[-1])]) for x in (k, v)
    )  # as the copy engine fills
    info = (SimpleNamespace(values=x, atom=None, page_rows=apart or page_rows) for x in (k, v))
    maps = decoding.params.PoolMaps(*info)
    for cta in range(shares * heads_k) if order is None else order:
        _run_cta(decoding, maps, params, config, (cta, shares * heads_k))
    assert not counts.any(), "counts are left"
    return o, lse


def _run_cta(decoding, maps, params, config: DecodingConfig, cta: tuple[int, int]) -> None:
    stages = config.tiles.stages
    barriers = ([Barrier(n) for _ in range(stages)] for n in (1, 1, 4))
    smem = decoding.storage.DecodingStorage(
        Rooms(stages), Rooms(stages), *map(Pointer, barriers), Pointer([None, None])
    )

    def begin(warp: int, body) -> None:
        role.warp = warp
        body()

    load = partial(decoding.load.load, maps, smem, params, config)
    compute = partial(decoding.compute.compute, smem, "qk", "pv", params, config)
    emulated._together([(False, partial(begin, 4, load)), (True, partial(begin, 0, compute))], *cta)
