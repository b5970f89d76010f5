"""The Hopper backward on a CPU: the passes' own source, run as :mod:`tests.backends.hopper.emulated` runs the forward.

The same is stood in for: where an accumulator's numbers lie, boxes, instructions, and operands' descriptors. Other modules of the
kernels are reached through ``modules``, by their names in the backend ("backward.fragments").
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np

from tests.backends.hopper.emulated import (
    HOPPER,
    LIMIT,
    THREADS,
    Barrier,
    Global,
    Places,
    Pointer,
    RegisterRow,
    Registers,
    Rooms,
    _at_once,
    _together,
    cut,
    imported,
    product_of,
    role,
    rounded,
    stand_in,
    stand_in_for_queues,
)
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS, KeyTiles, PlanRow, QueryTiles
from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS

LOG2_E = np.float32(np.log2(np.e))


class Turned:
    """Tiles that are seen transposed, and of these ``rows`` or ``columns`` alone."""

    def __init__(self, rooms: Rooms, rows: slice = slice(None), columns: slice = slice(None)):
        self.rooms, self.part = rooms, (rows, columns)

    def __getitem__(self, index: tuple):
        return self, index[-1]


def seen(operand: tuple) -> np.ndarray:
    """The matrix that a product's operand is, (rows, depth) or (columns, depth)."""
    rooms, n = operand
    return rooms.rooms.tiles[n].T[rooms.part] if isinstance(rooms, Turned) else rooms.tiles[n]


class Words:
    """An operand's words: word c + r holds columns c and c + 1 of row r."""

    def __init__(self, registers: Registers):
        self.values = registers.values

    def __setitem__(self, n: int, pair: tuple) -> None:
        for m in range(2):
            self.values[n % 2, n - n % 2 + m] = pair[m]


def modules(kernel: ModuleType) -> dict[str, ModuleType]:
    """The modules that were imported with a kernel, by their names in the backend."""
    return {module.__name__.removeprefix(f"{HOPPER}."): module for module in kernel.emulated}


def load(name: str) -> ModuleType:
    """A pass's module with everything stood in for."""
    (kernel,) = imported(f"backward.{name}")
    found = modules(kernel)
    places = Places(found["kit.tiles"])
    stand_in_for_queues(found["kit.instructions"], found["kit.packed"])
    stand_in(found["kit.tiles"], tma_tiles=cut, rows_columns=lambda acc: acc.values)
    pair = lambda low, high, dtype: (rounded(low, dtype), rounded(high, dtype))  # noqa: E731
    stand_in(found["kit.instructions"], pack=pair, count_up=count_up, await_count=await_count, add_where=add_where)
    stand_in(found["kit.operands"], as_accumulator=lambda operand, acc: operand, words=Words)
    stand_in_for_fragments(found["backward.fragments"], found["kit.tiles"], places)
    if name == "queries":
        stand_in_for_queries(found["backward.queries_compute"])
    elif name == "keys":
        stand_in_for_keys(found, places)
    if name == "sheet":
        stand_in_for_sheet(kernel, places)
    stand_in_for_halves(found["backward.halves"])
    return kernel


def stand_in_for_fragments(fragments: ModuleType, tiles: ModuleType, places: Places) -> None:
    """Products, and what goes between registers and shared memory."""

    def begin_products(mma, acc, factors, overwrite: bool, registers=None, first=None) -> None:
        def product() -> None:
            if first:
                acc.values[:] = places.registers(np.broadcast_to(-first(), (ROWS, len(first()))))
            for n, (a, b) in enumerate(factors):
                left, right = places.matrix(a.values) if isinstance(a, Registers) else seen(a), seen(b)
                if (len(left), len(right)) != (ROWS, 4 * acc.values.shape[1]):
                    acc.values[:] = (
                        np.nan
                    )  # a tile's first part of dQ, of the dK that lies where dS will: it is dropped
                    return
                values = places.registers(product_of(left, right.T))
                acc.values[:] = values if overwrite and n == 0 and not first else acc.values + values

        role.products.append(product)

    def column_statistic(statistics: Rooms, stage: int):
        mine = statistics.tiles[stage].copy()
        return lambda r, c: mine[tiles.column_of(THREADS, c)]

    def round_to_operand(operand, acc, dtype) -> None:
        operand.values[:] = rounded(acc.values, dtype)

    def held_statistic(statistics: Rooms, stage: int, acc):
        return column_statistic(statistics, stage)

    def store_accumulator(acc, mma, tile, dtype, held=False) -> None:
        tile[0].tiles[tile[1]] = rounded(places.matrix(acc.values), dtype)

    def store_fragment(fragment, mma, tile, dtype, transpose=False) -> None:
        rooms, n, found = *tile, places.matrix(fragment.values)
        if transpose:
            rooms.rooms.tiles[n] = found.T
        else:
            rooms.tiles[n] = found

    def scale(acc, factor) -> None:
        acc.values *= factor

    stand_in(
        fragments,
        begin_products=begin_products,
        column_statistic=column_statistic,
        HeldStatistic=held_statistic,
        round_to_operand=round_to_operand,
        store_accumulator=store_accumulator,
        store_fragment=store_fragment,
        scale=scale,
        hold_above_wait=lambda word, values: None,
    )


def stand_in_for_queries(compute: ModuleType) -> None:
    """The pass over queries."""

    def put_statistics(rows, place, lse2, delta, mine) -> None:
        at, mine = place[2], np.broadcast_to(mine, place[2].shape)
        for target, value in ((rows.lse2, lse2), (rows.delta, delta)):
            target[(*place[:2], at[mine])] = np.broadcast_to(value, at.shape)[mine]

    stand_in(
        compute,
        put_statistics=put_statistics,
        inner_product=lambda one, other: (one * other).sum(0, dtype=np.float32),
        read_vector=lambda rooms, i, n, stage, config: rooms.tiles[stage][i, 8 * n + np.arange(8)[:, None]],
        make_operands=_query_operands,
    )


def stand_in_for_keys(found: dict[str, ModuleType], places: Places) -> None:
    """The pass over keys, and the additions of its dQ."""

    def fetch_statistic(statistic, m, statistics, stage, full) -> None:
        rows = statistic.block_rows
        statistics.tiles[stage] = statistic.rows.values[m * rows : (m + 1) * rows].copy()
        full.barrier.change(0, -4 * rows)

    def hand_over(operand, handover) -> None:
        handover.values = operand.values.copy()

    def take_over(operand, handover) -> None:
        operand.values[:] = handover.values

    def tile_values(tile, mma, acc, dtype) -> np.ndarray:
        return places.registers(seen(tile))

    def write_part(dq, part, w) -> None:
        part[w] = places.matrix(dq.values)

    def begin_copy(operation, target, part, w) -> None:
        before = target.values if operation == found["backward.dq_accumulate"].ADD else 0.0
        target.values[:] = before + part[w].ravel()

    def put(sums, place, lane, total) -> None:
        # The emulated threads are all four warps, whose places follow the first one's.
        sums.values[*place[:2], place[2] : place[2] + 4] = total[::32]

    def copy_ds(ds, mma, kept, count, sheet, tile, m, params, config, rows=slice(None)) -> None:
        found = places.matrix(ds.values)
        found[params.seqlen_k - tile.column :] = 0.0  # none, if the tile ends before the keys do
        # (key, query)
        block = place_of(sheet, tile, tile.column // ROWS, m, params)[0]
        block[rows] = found[rows]

    def put_ds(ds, sheet, tile, m, half, params) -> None:
        copy_ds(ds, None, None, 0, sheet, tile, m, params, None, np.arange(ROWS) // 8 % 2 == half)

    place_of = found["backward.sheet"].place_of
    stand_in(found["backward.sheet"], copy_ds=copy_ds, put_ds=put_ds, await_copies=lambda: None)
    stand_in(found["backward.keys"], fetch_statistic=fetch_statistic)
    stand_in(found["backward.dslopes"], put=put)
    vars(found["backward.dslopes"].cute.arch).update(warp_idx=lambda: 0, lane_idx=lambda: THREADS % 32)
    stand_in(found["backward.keys_split"], hand_over=hand_over, take_over=take_over)
    stand_in(
        found["backward.keys_compute"],
        make_operands=_key_operands,
        as_rows_columns=lambda operand, acc: operand.values,
        OperandValues=lambda operand, acc, dtype, held: operand.values,
        load_register_steps=lambda operand, mma, smem: None,  # products take all columns from shared memory
    )
    stand_in(
        found["backward.pair_bias"],
        new_place=lambda phase: [0, phase],
        TileValues=tile_values,
    )
    stand_in(found["kit.instructions"], unseen_zero=lambda: 0, zero_after=lambda score, zero: 0)
    stand_in_for_parts(found["backward.parts"])
    stand_in(found["backward.dq_accumulate"], write_part=write_part, begin_copy=begin_copy, **semaphores())


def stand_in_for_sheet(kernel: ModuleType, places: Places) -> None:
    """The pass over queries where dS was kept."""

    def fetch_blocks(blocks: np.ndarray, place: tuple, full, config: Backward) -> None:
        rooms, at = place
        rooms.tiles[at // config.queries.ds_elements] = np.hstack(blocks)
        full.barrier.change(0, -ELEMENT_BYTES * config.queries.ds_elements)

    def sums_of(tile, w: int, sums, params, config: Backward) -> np.ndarray:
        tiles = config.queries
        part = tile.row // tiles.tile_m, tile.piece * tiles.warpgroups + w
        return sums.values[tile.batch * params.heads_q + tile.head, *part]

    def add_sums(acc, sums: np.ndarray, resumes: int) -> None:
        if resumes:
            acc.values[:] = acc.values + places.registers(sums)

    def store(acc, dq, sums: np.ndarray, tile, row: int, params, config: Backward) -> None:
        if params.extra.suspends:
            sums[:] = places.matrix(acc.values)
        else:
            put_rows(acc, dq, tile, row, params, config)

    def put_rows(acc, dq, tile, row: int, params, config: Backward) -> None:
        found, first = places.matrix(acc.values), config.queries.width * tile.piece
        batch, start, stop = tile.batch, row, min(row + ROWS, params.seqlen_q)
        if config.packed:
            batch, start, stop = 0, tile.rows.start + row, tile.rows.start + stop
        part = dq.values[batch, start : max(start, stop), tile.head, first : first + config.queries.width]
        part[:] = rounded(found * params.scale, config.dtype)[: part.shape[0], : part.shape[1]]

    stand_in(
        kernel,
        fetch_blocks=fetch_blocks,
        sums_of=sums_of,
        add_sums=add_sums,
        store=store,
        put_rows=put_rows,
        make_operands=_sheet_operands,
    )


def semaphores() -> dict:
    """The semaphores of dQ's additions, in order or of those that store first."""
    changed, claims = threading.Condition(), Counter()

    def semaphore(semaphores, n) -> int:
        return semaphores[n]

    def await_semaphore(semaphores, n, wanted) -> None:
        with changed:
            if not changed.wait_for(lambda: semaphores[n] == wanted, LIMIT):
                raise RuntimeError("a tile waits for its turn for ever")

    def signal_semaphore(semaphores, n, value) -> None:
        with changed:
            if claims[n]:
                claims[n] -= 1
                assert (semaphores[n], value) == (1, 2)
            else:  # the next key tile has been added, or there is none
                assert semaphores[n] in (0, value + 1)
            semaphores[n] = value
            changed.notify_all()

    def claim(semaphores, n) -> int:
        with changed:
            found = int(semaphores[n])
            claims[n] += found == 0
            semaphores[n] = max(found, 1)
            return found

    return {
        "semaphore": semaphore,
        "await_semaphore": await_semaphore,
        "signal_semaphore": signal_semaphore,
        "claim": claim,
    }


counting = threading.Lock()


def count_up(t: Global, place: tuple, number=1) -> None:
    with counting:
        t[place] = t[place] + number


def stand_in_for_parts(parts: ModuleType) -> None:
    """What the parts of shared tiles leave: nobody adds up one that is not there."""
    left = {}

    def put(accumulators, sums, part, w) -> None:
        left[part, w] = [acc.values.copy() for acc in accumulators]

    def add(accumulators, sums, part, w) -> None:
        for acc, values in zip(accumulators, left[part, w], strict=True):
            acc.values[:] = acc.values + values

    def tell(told, counts, place, each) -> None:
        with counting:
            last = counts[place] == each - 1
            counts[place] = 0 if last else counts[place] + 1
        told.barriers[told.at] = [int(last)]

    stand_in(parts, put=put, add=add, tell=tell)


def add_where(condition, sums: Global, n, number) -> None:
    with counting:
        condition, n, number = (np.broadcast_to(x, THREADS.shape) for x in (condition, n, number))
        np.add.at(sums.values, n[condition], number[condition])


def await_count(t: Global, place: tuple, count: int) -> None:
    assert (t[place] == count).all(), "the pass before has not written all"


class Subtrahends:
    """The statistics as an operand: a slot holds lse, 0, delta, 0 of each row, and a product reads them as late as its other operands."""

    def __init__(self, statistics: Rooms):
        self.statistics = statistics

    def of_s(self, slot: int):
        return lambda: self.statistics.tiles[slot].reshape(-1, 4)[:, 0]

    def of_dp(self, slot: int):
        return lambda: self.statistics.tiles[slot].reshape(-1, 4)[:, 2]


def _key_operands(mmas, smem, w: int, config: Backward):
    tiles, total = config.keys, None
    if tiles.sums_dq:
        part = slice(ROWS * w, ROWS * (w + 1))
        ds, k = Turned(smem.dq.ds), Turned(smem.k)
        pair = (Turned(smem.k, part), ds) if tiles.dq_transposed else (Turned(smem.dq.ds, part), k)
        total = mmas.make_dq(None, *pair, Registers(tiles.part_elements // ROWS))
    s = [Registers(tiles.tile_m) for _ in range(4)]
    rooms = smem.k, smem.v, smem.q, smem.do, Turned(smem.q), Turned(smem.do)
    subtrahends = Subtrahends(smem.statistics) if config.subtracts else None
    dbias = RegisterRow(1) if config.sums_bias else None
    grads = Registers(tiles.width), Registers(tiles.width_v)
    bias = None
    if config.score == "bias":
        stored, first = smem.bias, w * tiles.bias_stages
        bias = mmas.make_ring(None, [0, 0], Turned(stored.tiles), first, stored.full, stored.empty)
    return mmas.make(mmas.names, *rooms, *s, *grads, total, None, subtrahends, dbias, bias)


def _sheet_operands(mma, smem, w: int, config: Backward):
    ds = Turned(smem.ds.rooms, slice(ROWS * w, ROWS * (w + 1)))
    return mma.make(None, ds, Turned(smem.k), Registers(config.queries.width))


def _query_operands(mmas, smem, config: Backward):
    tiles = config.queries
    s = [Registers(tiles.tile_n) for _ in range(3)]
    rows = [np.zeros((2, 128), np.float32) for _ in range(2)]
    return mmas.make(mmas.names, smem.q, smem.do, smem.k, smem.v, Turned(smem.k), *s, Registers(tiles.width), *rows)


def stand_in_for_halves(halves: ModuleType) -> None:
    """What two CTAs exchange. A place holds the sender's numbers until it is released: nobody may send there before."""

    def send(acc, places, n: int) -> None:
        peer = role.peer.halves
        assert peer.parts[n] is None, "a place that has not been read"
        peer.parts[n] = acc.values.copy()
        (peer.full + n).barrier.change(1, 0)

    def read_into(acc, places, n: int) -> int:
        acc.values[:] = acc.values + places.parts[n]
        return n

    def release_place(places, n: int, found) -> None:
        places.parts[n] = None
        (role.peer.halves.empty + n).barrier.change(1, 0)

    stand_in(halves, expect=lambda acc, places, n: None, send=send, read_into=read_into, release_place=release_place)


def _halves(kernel, tiles: KeyTiles | QueryTiles, rank: int):
    """The places of two warpgroups, where two CTAs share a tile."""
    if not tiles.halved:
        return None
    return modules(kernel)["backward.halves"].Halves([None] * KEY_GROUPS, *bars(*[(KEY_GROUPS, 1)] * 2), rank)


def _run(roles_of: dict[int, list], shared_of: dict[int, object], ctas: int, together: int) -> None:
    """CTAs one after the other, or those that share a tile at once; ``shared_of``: each one's shared memory."""

    def body_of(cta: int, body) -> None:
        role.peer = shared_of[cta // together * together + together - 1 - cta % together]
        body()

    for first in range(0, len(roles_of), together):
        of_tile = range(first, first + together)
        _at_once({n: [(computes, partial(body_of, n, body)) for computes, body in roles_of[n]] for n in of_tile}, ctas)


def statistics(o, do, lse, dlse, lines: int) -> tuple[np.ndarray, np.ndarray]:
    """``(lse2, delta)`` as the preprocessing kernel writes them."""
    delta = np.einsum("bihd,bihd->bhi", o, do) - dlse
    lse2, room = np.full((*lse.shape[:2], lines), np.inf, np.float32), np.zeros((*lse.shape[:2], lines), np.float32)
    empty, n = lse == -np.inf, lse.shape[2]
    lse2[..., :n], room[..., :n] = np.where(empty, np.inf, lse * LOG2_E), np.where(empty, 0.0, delta)
    return lse2, room


def subtrahend_rows(t: dict, scale2) -> np.ndarray:
    """Four words a row, where products subtract the statistics: lse in units of q · k, and delta."""
    rows = np.zeros((*t["lse2"].shape, 4), np.float32)
    rows[..., 0], rows[..., 2] = np.minimum(t["lse2"], 1e20) / scale2, t["delta"]
    return rows.reshape(*t["lse2"].shape[:2], -1)


def info(values) -> SimpleNamespace:
    return SimpleNamespace(values=values, atom=None)


def planes(values) -> SimpleNamespace:
    return SimpleNamespace(values=values, atom=None, tma_tensor=values.T)


def bars(*counts: tuple[int, int]) -> list[Pointer]:
    """Rows of barriers: (how many, arrivals)."""
    return [Pointer([Barrier(arrivals) for _ in range(n)]) for n, arrivals in counts]


class Part(np.ndarray):
    """The numbers that each thread of a CTA has read, (n, thread)."""

    def load(self) -> Part:
        return self

    def to(self, kind) -> Part:
        return self

    def reduce(self, op, start, profile) -> np.ndarray:
        return np.asarray(self).sum(0, dtype=np.float32)


def run_preprocess(config: Backward, o, do, lse, dlse, lines: int, cu=None) -> tuple[np.ndarray, np.ndarray]:
    """``(lse2, delta)`` by the preprocessing kernel, one CTA after the other; a CTA's threads are one NumPy axis. ``cu``: where packed
    sequences begin."""
    (kernel,) = imported("backward.preprocess")
    threads, at = np.arange(kernel.THREADS), [0, 0, 0]
    kernel.cute.ReductionOp = SimpleNamespace(ADD=None)
    kernel.cute.ceil_div = lambda a, b: -(-a // b)
    vars(kernel.cute.arch).update(
        thread_idx=lambda: (threads, 0, 0),
        block_idx=lambda: at,
        shuffle_sync_bfly=lambda values, offset: values[threads ^ offset],
    )

    def row_part(t, i, lane, element):
        columns = kernel.VECTOR * lane + np.arange(kernel.VECTOR)[:, None]
        inside = (i < t.shape[0]) & (columns < t.shape[1])
        found = t.values[np.minimum(i, t.shape[0] - 1), np.minimum(columns, t.shape[1] - 1)]
        return np.where(inside, found, 0.0).view(Part)

    def put(t, batch, head, line, lane, *values) -> None:
        mine = (lane < kernel.ROWS_EACH) & (line < lines)
        for target, value in zip((t.lse2, t.delta), values, strict=True):
            target[batch, head, line[mine]] = value[mine]

    def put_zeros(block, config) -> None:
        block.values[:] = 0.0

    def clear_semaphores(semaphores, n) -> None:
        semaphores[n[n < semaphores.shape[0]]] = 0

    def put_terms(t, batch, head, line, lane, lse2, delta, config) -> None:
        # As numbers: run_keys makes the words of an operand.
        put(t, batch, head, line, lane, lse2, delta)

    stand_in(kernel, put_terms=put_terms, clear_queue=lambda queue, n: None, write_plan=lambda plan, n, config: None)
    stand_in(kernel, row_part=row_part, put=put, put_zeros=put_zeros, clear_semaphores=clear_semaphores)
    made = [np.full((*lse.shape[:2], lines), np.nan, np.float32) for _ in range(2)]
    sums = Global(np.full((*lse.shape[:2], 3, 1, config.keys.part_elements), np.nan, np.float32))
    visits = np.full((*lse.shape[:2], lines), -1, np.int32)
    cu = None if cu is None else Global(cu)
    t = kernel.StatisticsTensors(*map(Global, (o, do, lse, dlse, *made)), cu, sums, Global(visits))
    blocks = -(-lines // kernel.rows_of(config.keys.dims[1]))
    for at[:2] in np.ndindex(blocks * lse.shape[0], lse.shape[1]):
        kernel.kernel(t, config)
    assert not config.stores_first or (visits == 0).all()
    return tuple(made)


def planned(config: Backward, sizes: tuple, starts: np.ndarray, room: int) -> np.ndarray:
    """The plan of sequences that have as many queries as keys; ``sizes``: the numbers of a launch but for those of packed sequences."""
    plan = np.full((len(PlanRow), len(starts) + 1), -1, np.int32)
    run_plan(config, (*sizes, starts, starts, None, 0, 1 << 30, plan, 0), room)
    return plan


def run_plan(config: Backward, numbers: tuple, room: int | None) -> None:
    """Writes the plan of packed sequences whose sheet, if there is one, has room for so many blocks."""
    (kernel,) = imported("backward.packed_plan")
    plan = kernel.PackedPlan(_params(kernel, numbers), room)

    def put(found, row: int, n, number, mine) -> None:
        n, number, mine = np.broadcast_arrays(n, number, mine)
        found.values[row, n[mine]] = number[mine]

    stand_in(kernel, put=put)
    role.threads = 128
    kernel.rank(plan.params, 128)
    kernel.add_up(plan, config)  # four warps, which write the same


def run_keys(config: Backward, t: dict, numbers: tuple, ctas: int) -> tuple:
    """``(dk, dv)``, and dq or None, of arrays (batch, seqlen, heads, head_dim), one CTA after the other; packed sequences are one
    batch element. ``t`` may have dk and dv, of which only some heads are written."""
    kernel, tiles = load("keys"), config.keys
    dk, dv = (t.get(f"d{name}", np.full_like(t[name], np.nan)) for name in ("k", "v"))
    params = _params(kernel, numbers)
    biases = [
        planes(x.values) if x is not None and config.score == "bias" else None
        for x in (params.extra.bias, params.extra.dbias)
    ]
    tmas = kernel.KeysTmas(*map(info, (t["q"], t["do"], t["k"], t["v"], dk, dv)), *biases)
    heads, roles_of = t["lse2"].shape[:2], {}
    sums = np.full(
        (*heads, t["blocks"], KEY_GROUPS, tiles.part_elements), np.nan if config.stores_first else 0.0, np.float32
    )
    visits = np.zeros((*heads, t["blocks"] * KEY_GROUPS), np.int32)
    lse2 = subtrahend_rows(t, params.scale2) if config.subtracts else t["lse2"]
    sheet = Blocks(t["sheet"], 1) if tiles.keeps_ds else None
    buffers = kernel.RowBuffers(*map(Global, (lse2, t["delta"], sums, visits)), sheet)
    names = SimpleNamespace(score=None, dk=None, dv=None)
    make, make_dq = modules(kernel)["backward.keys_compute"].DkDvOperands, kernel.dq_accumulate.SumOperands
    mmas = SimpleNamespace(
        make=make, make_dq=make_dq, make_ring=kernel.pair_bias.BiasRing, names=names, dk=None, dv=None
    )
    ctas, shared_of = max(tiles.ctas, ctas // tiles.ctas * tiles.ctas), {}
    for cta in range(ctas):
        smem = shared_of[cta] = _keys_storage(kernel, config, cta % tiles.ctas)
        stores = [partial(kernel.store, tmas, buffers, smem, w, params, config) for w in range(2)]
        loads = [
            partial(kernel.load_keys, tmas, smem, params, config),
            partial(kernel.load_queries, tmas, buffers, smem, params, config),
        ]
        groups = [partial(kernel.compute, smem, w, mmas, params, config) for w in range(2)]
        if tiles.sums_dq:
            groups = [partial(kernel.compute_and_sum, smem, buffers, w, mmas, params, config) for w in range(2)]
        if tiles.split:
            groups = [
                partial(kernel.make_values, smem, buffers, mmas, params, config),
                partial(kernel.make_keys, smem, buffers, mmas, params, config),
            ]
        roles_of[cta] = [(False, body) for body in loads + stores] + [(True, body) for body in groups]
    if params.extra.ordered:  # CTAs wait for each other
        _at_once(roles_of, ctas)
    else:
        _run(roles_of, shared_of, ctas, tiles.ctas)
    if tiles.counts:
        # What postprocess waits for: every head's count says that all of its tiles have been added.
        whole = KEY_GROUPS * -(-t["k"].shape[1] // tiles.tile_n) << (params.extra.block_bits or 0)
        assert (t["delta"][..., -1] == whole).all()
    if config.stores_first:
        sums[(visits == 0).reshape(sums.shape[:4])] = 0.0
    return dk, dv, _placed(kernel, sums, t["q"].shape, params, config) if tiles.sums_dq else None


def _keys_storage(kernel, config: Backward, rank: int):
    tiles = config.keys
    k, v, ring = Rooms(tiles.key_tiles), Rooms(tiles.key_tiles), Rooms(tiles.stages)
    held, storage = 2 * tiles.key_tiles, modules(kernel)["backward.keys_storage"]
    stages = bars((tiles.stages, 1), (tiles.stages, 4 * KEY_GROUPS), (held, 1))
    emptied = Pointer([Barrier(storage.held_arrivals(config)) for _ in range(held)])
    handover, dq = SimpleNamespace(values=None), _sum_storage(kernel, tiles)
    out = (v, k) if tiles.split else (k, v)
    if tiles.overlaps:  # in the very memory of parts and of dS
        out = Rooms(0), Rooms(0)
        out[0].tiles, out[1].tiles = dq.part, dq.ds.tiles
    boxes = _mailboxes(kernel, KEY_GROUPS)
    if tiles.queued:
        boxes = storage.QueueSlots(Pointer([None] * 4), *bars((2, 1), (2, storage.TILE_READERS)))
    return kernel.KeysStorage(
        k, v, *out, ring, ring, Rooms(config.statistics.count), handover, *stages, emptied, *bars((held, 128), (1, 128), (1, 128)),
        None, boxes, dq, *bars((1, KEY_GROUPS)), None, _bias_storage(kernel, config) if config.score == "bias" else None,
        _halves(kernel, tiles, rank), None, Pointer([None] * 2 * KEY_GROUPS),
    )  # fmt: skip


def _bias_storage(kernel, config: Backward):
    count = config.keys.bias_tiles
    barriers = bars((count, 1), (count, 1 if config.stores_bias else 4), (count, 128))
    return kernel.pair_bias.BiasStorage(Rooms(count), *barriers)


def _params(kernel, numbers: tuple):
    """``numbers``: of a launch; then fields of OptionalParams, where there are any; then, of packed sequences, as PackedParams has them."""
    found = modules(kernel)
    optional, params = found["kit.params"].OptionalParams, found["backward.params"]
    size = len(params.BackwardParams._fields) - 2
    wrapped = lambda n: Global(n) if isinstance(n, np.ndarray) else n  # noqa: E731
    more, extra = [wrapped(n) for n in numbers[size:]], {}
    if more and isinstance(more[0], dict):
        extra = {name: wrapped(n) for name, n in more.pop(0).items()}
        extra["leaves"] = tuple(map(Global, extra.get("leaves", ())))
    starts = params.PackedParams(*more) if more else None
    return params.BackwardParams(*numbers[:size], starts, optional(**extra))


def _mailboxes(kernel, groups: int):
    scheduler = modules(kernel)["kit.scheduler"]
    return scheduler.Mailboxes(Pointer([None] * scheduler.MAILBOX_WORDS * (groups + 1)), *bars((1, 1), (1, 1)))


def _sum_storage(kernel, tiles: KeyTiles):
    barriers, ds = bars((2, 128 * KEY_GROUPS), (2, 128 * KEY_GROUPS), (2, 128), (2, 1)), Rooms(2 * KEY_GROUPS)
    ds.tiles = [np.full((ROWS, tiles.tile_m), np.nan, np.float32) for _ in ds.tiles]
    return kernel.dq_accumulate.SumStorage(ds, [None] * KEY_GROUPS, *barriers)


def _placed(kernel, sums: np.ndarray, shape: tuple, params, config: Backward) -> np.ndarray:
    """dQ of its parts, as the postprocessing kernel puts them in place."""
    (batch, heads, blocks), tile_m = sums.shape[:3], config.keys.tile_m
    parts = sums.reshape(batch, heads, blocks, KEY_GROUPS, ROWS, -1)
    if config.keys.dq_transposed:
        parts = np.swapaxes(parts, 4, 5)
    rows = parts if tile_m == KEY_GROUPS * ROWS else np.swapaxes(parts, 3, 4)  # one after the other, or side by side
    whole = np.swapaxes(rows.reshape(batch, heads, blocks * tile_m, -1), 1, 2)[..., : shape[3]] * params.scale
    if not config.packed:
        return whole[:, : shape[1]]
    (module,) = imported("backward.postprocess")
    dq, role.threads = np.full(shape, np.nan, np.float32), 32
    dq_sums = module.DqSums(None, params.packed.cu_q, params.seqlen_q)
    for block in range(blocks):
        span, n = module.place_of(block, 0, dq_sums, config)
        part = dq[0, span.start : span.end][n * tile_m : (n + 1) * tile_m]
        part[:] = whole[0, block * tile_m :][: len(part)]
    return dq


def run_queries(config: Backward, t: dict, numbers: tuple, ctas: int) -> np.ndarray:
    """dq of arrays (batch, seqlen, heads, head_dim), one CTA after the other; ``t["lse2"]`` and ``t["delta"]`` are written."""
    kernel, w = load("queries"), config.queries.warpgroups
    rows = kernel.StatisticsTensors(*(Global(t[n]) for n in ("o", "do", "lse", "dlse", "lse2", "delta")))
    dq, params = np.full_like(t["q"], np.nan), _params(kernel, numbers)
    tmas = kernel.QueriesTmas(*map(info, (t["q"], t["do"], t["k"], t["v"], dq, t["o"])))
    names = SimpleNamespace(score=None, dq=None)
    mmas = SimpleNamespace(make=modules(kernel)["backward.queries_compute"].QueryOperands, names=names, dq=None)
    stages, together = config.queries.stages, config.queries.ctas
    ctas, roles_of, shared_of = max(together, ctas // together * together), {}, {}
    for cta in range(ctas):
        q, do, ring = Rooms(w), Rooms(w), Rooms(stages)
        barriers = bars((stages, 1), (stages, 4 * w), (w, 1), (w, 1), (w, 128))
        places = _halves(kernel, config.queries, cta % together)
        smem = kernel.QueriesStorage(q, do, q, ring, ring, *barriers, None, _mailboxes(kernel, w), ring, places)
        shared_of[cta] = smem
        others = [partial(load, tmas, smem, params, config) for load in (kernel.load_rows, kernel.load_keys)]
        others += [partial(kernel.store, tmas, rows.lse2, smem, n, params, config) for n in range(w)]
        groups = [partial(kernel.compute, smem, n, rows, mmas, params, config) for n in range(w)]
        roles_of[cta] = [(False, body) for body in others] + [(True, body) for body in groups]
    _run(roles_of, shared_of, ctas, together)
    return dq


class Blocks:
    """The sheet as the pass over queries reads it: the blocks of a tile of so many warpgroups; the pass over keys writes one at a time."""

    def __init__(self, sheet: np.ndarray, warpgroups: int):
        self.sheet, self.warpgroups, self.shape = sheet, warpgroups, sheet.shape

    def __getitem__(self, index: tuple) -> SimpleNamespace:
        *place, first, _ = index
        return SimpleNamespace(iterator=self.sheet[*place, first : first + self.warpgroups])


class Place:
    """The memory of a ring's blocks of dS; an offset makes a (rooms, elements) of a stage."""

    def __init__(self, stages: int):
        self.rooms = Rooms(stages)

    def __add__(self, elements: int) -> tuple:
        return self.rooms, elements


def run_sheet(config: Backward, t: dict, numbers: tuple, ctas: int) -> None:
    """Makes ``t["dq"]`` of ``t["sheet"]``, or adds to ``t["sums"]``, one CTA after the other."""
    kernel, tiles = load("sheet"), config.queries
    params, made = _params(kernel, numbers), kernel.DqTensors(Global(t["dq"]), Global(t["sums"]))
    mma, sheet = SimpleNamespace(make=kernel.SheetOperands), Blocks(t["sheet"], tiles.warpgroups)
    for cta in range(ctas):
        barriers = bars((tiles.stages, 1), (tiles.stages, 4 * tiles.warpgroups))
        slots = kernel.QueueSlots(Pointer([None] * 4), *bars((2, 1), (2, 4 * tiles.warpgroups)))
        smem = kernel.SheetStorage(Place(tiles.stages), Rooms(tiles.stages), *barriers, slots)
        groups = [(True, partial(kernel.compute, smem, w, made, mma, params, config)) for w in range(tiles.warpgroups)]
        _together([(False, partial(kernel.load, info(t["k"]), sheet, smem, params, config)), *groups], cta, ctas)
