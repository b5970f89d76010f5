"""The Hopper backward on a CPU: the passes' own source, run as :mod:`tests.backends.hopper.emulated` runs the forward.

What is stood in for is the same: where an accumulator's numbers lie, boxes, instructions, and operands' descriptors. The
kernel of the rows' statistics, which has neither barriers nor products, is NumPy's here.
"""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np

from tests.backends.hopper.emulated import (
    LIMIT,
    THREADS,
    Barrier,
    Global,
    Places,
    Pointer,
    Registers,
    Rooms,
    _at_once,
    _together,
    cut,
    imported,
    role,
    rounded,
    stand_in_for_queues,
)
from tilewise.backends.hopper.backward.config import HALF, KEY_GROUPS, PAIR, Backward, KeyTiles
from tilewise.backends.hopper.config import ROWS

LOG2_E = np.float32(np.log2(np.e))


class Turned:
    """Rooms whose tiles are seen transposed, and of that ``rows`` or ``columns`` alone."""

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


OTHERS = (
    "backward.dq_sum", "backward.walk", "kit.packed", "forward.kernel", "forward.combine", "kit.expression", "kit.dropout",
    "backward.rows",
)  # fmt: skip


def load(name: str):
    """A pass's module with everything stood in for."""
    more = ("backward.keys",) if name == "cluster" else ()
    kernel, part, tile, sums, _, packed, *_ = imported(f"backward.{name}", "backward.tile", "kit.tile", *OTHERS, *more)
    places = Places(tile)

    def products(mma, acc, pairs, overwrite: bool) -> None:
        def product() -> None:
            for n, (a, b) in enumerate(pairs):
                left = places.matrix(a.values) if isinstance(a, Registers) else seen(a)
                values = places.registers(left @ seen(b).T)
                acc.values[:] = values if overwrite and n == 0 else acc.values + values

        role.products.append(product)

    def of_columns(statistics: Rooms, slot: int):
        mine = statistics.tiles[slot].copy()
        return lambda r, c: mine[tile.column_of(THREADS, c)]

    def to_operand(operand, acc, dtype) -> None:
        operand.values[:] = rounded(acc.values, dtype)

    def put(acc, mma, room, dtype) -> None:
        room[0].tiles[room[1]] = rounded(places.matrix(acc.values), dtype)

    def scaled(acc, factor) -> None:
        acc.values *= factor

    def bring(line, m, statistics, slot, full) -> None:
        statistics.tiles[slot] = line.rows.values[m * line.columns : (m + 1) * line.columns].copy()
        full.barrier.change(0, -4 * line.columns)

    def put_line(rows, place, lse2, delta, mine) -> None:
        lines, mine = place[2], np.broadcast_to(mine, place[2].shape)
        for target, value in ((rows.lse2, lse2), (rows.delta, delta)):
            target[(*place[:2], lines[mine])] = np.broadcast_to(value, lines.shape)[mine]

    def hand_over(operand, handed) -> None:
        handed.values = operand.values.copy()

    def take_over(operand, handed) -> None:
        operand.values[:] = handed.values

    def put_fragment(fragment, mma, room, dtype) -> None:
        room[0].tiles[room[1]] = places.matrix(fragment.values)

    def write_part(dq, part, w) -> None:
        part[w] = places.matrix(dq.values)

    def begin(operation, target, part, w) -> None:
        before = target.values if operation == sums.ADD else 0.0
        target.values[:] = before + part[w].ravel()

    turned = threading.Condition()

    def asked(turns, n) -> int:
        return turns[min(n, turns.shape[0] - 1)]

    def wait_for_turn(turns, n, rank, found) -> None:
        with turned:
            if found != rank and not turned.wait_for(lambda: turns[n] == rank, LIMIT):
                raise RuntimeError("a tile waits for its turn for ever")

    def pass_turn(turns, n, rank) -> None:
        with turned:
            assert turns[n] == rank - 1
            turns[n] = rank
            turned.notify_all()

    def hand_strip(operand, m, handed, n) -> None:
        handed.rooms.tiles[n] = None  # P lies there
        handed.strips[n, m] = np.array(strip(operand, m))

    def take_strip(operand, m, handed, n) -> None:
        strip(operand, m)[:] = handed.strips.pop((n, m))

    def of_strip(statistics: Rooms, slot: int, n: int):
        mine, first = statistics.tiles[slot].copy(), n * kernel.STRIP
        return lambda r, c: mine[first + tile.column_of(THREADS, c)]

    def strip(operand, m: int) -> Strip:
        each = kernel.STRIP // 4
        return operand.values[:, each * m : each * (m + 1)].view(Strip)

    def add_half(dq, target, h, room, x) -> None:
        target.values.reshape(ROWS, -1)[:, ROWS * h : ROWS * (h + 1)] += places.matrix(dq.values)

    stands_in = {
        "hand_strip": hand_strip, "take_strip": take_strip, "of_strip": of_strip, "strip": strip, "strip_of_operand": strip,
        "add_half": add_half, "send_scores": send_scores, "release_scores": release_scores, "meet": lambda: None,
        "sum_operands": _sum_operands, "products": products, "of_columns": of_columns, "to_operand": to_operand, "put": put,
        "scaled": scaled, "bring": bring, "hand_over": hand_over, "take_over": take_over, "hold": lambda word, values: None,
        "as_accumulator": lambda operand, acc: operand, "put_fragment": put_fragment, "write_part": write_part, "begin": begin,
        "asked": asked, "wait_for_turn": wait_for_turn, "pass_turn": pass_turn,
        "put_line": put_line, "inner": lambda one, other: (one * other).sum(0, dtype=np.float32),
        "piece_of": lambda room, i, n, slot, x: room.tiles[slot][i, 8 * n + np.arange(8)[:, None]],
        "as_rows_columns": lambda operand, acc: operand.values, "operands": OPERANDS[name], "cut": cut,
    }  # fmt: skip
    for where in (kernel, part, sums):
        for key, value in stands_in.items():
            if hasattr(where, key) and (key != "operands" or where is kernel):
                setattr(where, key, value)
    stand_in_for_queues(tile, packed)
    tile.count_up, tile.await_count = count_up, await_count
    part.words, kernel.Starts, kernel.Extra = Words, part.Starts, part.Extra
    tile.pack = lambda low, high, dtype: (rounded(low, dtype), rounded(high, dtype))
    tile.rows_columns = lambda acc: acc.values
    return kernel


counting = threading.Lock()


def count_up(t: Global, place: tuple) -> None:
    with counting:
        t[place] = t[place] + 1


def await_count(t: Global, place: tuple, count: int) -> None:
    assert (t[place] == count).all(), "the pass before has not written all"


def _key_operands(by, room, w: int, x: Backward):
    c, total = x.keys, None
    if c.summed:
        part = slice(ROWS * w, ROWS * (w + 1))
        ds, k = Turned(room.sum.ds), Turned(room.k)
        pair = (Turned(room.k, part), ds) if c.by_columns else (Turned(room.sum.ds, part), k)
        total = by.make_sum(None, *pair, Registers(c.part // ROWS))
    s = [Registers(c.tile_m) for _ in range(4)]
    rooms = room.k, room.v, room.q, room.do, Turned(room.q), Turned(room.do)
    return by.make(by.names, *rooms, *s, Registers(c.width), Registers(c.width_v), total)


def _query_operands(by, room, x: Backward):
    c = x.queries
    s = [Registers(c.tile_n) for _ in range(3)]
    rows = [np.zeros((2, 128), np.float32) for _ in range(2)]
    return by.make(by.names, room.q, room.do, room.k, room.v, Turned(room.k), *s, Registers(c.width), *rows)


def _pair_operands(by, room, held, x: Backward):
    c = x.keys
    acc, p, ds = (Registers(c.tile_m) for _ in range(3))
    grads = tuple(Registers(HALF) for _ in range(c.parts))
    return by.make(by.names, held, room.ring, Turned(room.ring), acc, p, ds, grads)


def _sum_operands(by, room, x: Backward):
    halves = [slice(ROWS * n, ROWS * (n + 1)) for n in range(2)]
    return by.make_sum(
        None, Turned(room.ds), tuple(Turned(room.k, part) for part in halves), tuple(Registers(ROWS) for _ in halves)
    )


OPERANDS = {"keys": _key_operands, "queries": _query_operands, "cluster": _pair_operands}


class Strip(np.ndarray):
    """Some columns of registers."""

    @property
    def values(self) -> Strip:
        return self


def send_scores(room, n: int, other: int, x: Backward) -> None:
    role.peer.ds.tiles[2] = room.ds.tiles[n].copy()
    role.peer.theirs_full.barrier.change(1, 0)


def release_scores(room, n: int) -> None:
    for where in (room, role.peer):
        (where.ds_empty + n).barrier.change(4, 0)


def statistics(o, do, lse, dlse, lines: int) -> tuple[np.ndarray, np.ndarray]:
    """``(lse2, delta)`` as the kernel of the rows writes them."""
    delta = np.einsum("bihd,bihd->bhi", o, do) - dlse
    lse2, room = np.full((*lse.shape[:2], lines), np.inf, np.float32), np.zeros((*lse.shape[:2], lines), np.float32)
    empty, n = lse == -np.inf, lse.shape[2]
    lse2[..., :n], room[..., :n] = np.where(empty, np.inf, lse * LOG2_E), np.where(empty, 0.0, delta)
    return lse2, room


def info(values) -> SimpleNamespace:
    return SimpleNamespace(values=values, atom=None)


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


def run_rows(x: Backward, o, do, lse, dlse, lines: int, cu=None) -> tuple[np.ndarray, np.ndarray]:
    """``(lse2, delta)`` by the kernel of the rows, one CTA after the other; a CTA's threads are one NumPy axis. ``cu``: where packed
    sequences begin."""
    kernel, *_ = imported("backward.rows", "backward.tile", "kit.tile", *OTHERS)
    threads, at = np.arange(kernel.THREADS), [0, 0, 0]
    kernel.cute.ReductionOp = SimpleNamespace(ADD=None)
    kernel.cute.ceil_div = lambda a, b: -(-a // b)
    vars(kernel.cute.arch).update(
        thread_idx=lambda: (threads, 0, 0),
        block_idx=lambda: at,
        shuffle_sync_bfly=lambda values, offset: values[threads ^ offset],
    )

    def part_of(t, i, lane, element):
        columns = kernel.VECTOR * lane + np.arange(kernel.VECTOR)[:, None]
        inside = (i < t.shape[0]) & (columns < t.shape[1])
        found = t.values[np.minimum(i, t.shape[0] - 1), np.minimum(columns, t.shape[1] - 1)]
        return np.where(inside, found, 0.0).view(Part)

    def put(t, batch, head, line, lane, *values) -> None:
        mine = (lane < kernel.ROWS_EACH) & (line < lines)
        for target, value in zip((t.lse2, t.delta), values, strict=True):
            target[batch, head, line[mine]] = value[mine]

    def put_zeros(block, x) -> None:
        block.values[:] = 0.0

    def start_turns(turns, n) -> None:
        turns[n[n < turns.shape[0]]] = 0

    kernel.part_of, kernel.put, kernel.put_zeros, kernel.start_turns = part_of, put, put_zeros, start_turns
    made = [np.full((*lse.shape[:2], lines), np.nan, np.float32) for _ in range(2)]
    sums = Global(np.full((*lse.shape[:2], 3, 1, x.keys.part), np.nan, np.float32))
    turns = np.full((*lse.shape[:2], lines), -1, np.int32)
    t = kernel.Tensors(*map(Global, (o, do, lse, dlse, *made)), None if cu is None else Global(cu), sums, Global(turns))
    blocks = -(-lines // kernel.rows_of(x.keys.width_v))
    for at[:2] in np.ndindex(blocks * lse.shape[0], lse.shape[1]):
        kernel.kernel(t, x)
    assert not x.keys.ordered or (turns == 0).all()
    return tuple(made)


def run_keys(x: Backward, t: dict, work: tuple, ctas: int) -> tuple:
    """``(dk, dv)``, and dq or None, of arrays (batch, seqlen, heads, head_dim), one CTA after the other; packed sequences are one
    batch element."""
    kernel, c = load("keys"), x.keys
    dk, dv = np.full_like(t["k"], np.nan), np.full_like(t["v"], np.nan)
    work = _work(kernel, work)
    tmas = kernel.Tmas(*map(info, (t["q"], t["do"], t["k"], t["v"], dk, dv)))
    heads, roles_of = t["lse2"].shape[:2], {}
    sums = np.full((*heads, t["blocks"], KEY_GROUPS, c.part), np.nan if c.ordered else 0.0, np.float32)
    turns = np.zeros((*heads, t["blocks"] * KEY_GROUPS), np.int32)
    lines = kernel.Lines(*map(Global, (t["lse2"], t["delta"], sums, turns)))
    names = SimpleNamespace(score=None, dk=None, dv=None)
    by = SimpleNamespace(make=kernel.Operands, make_sum=kernel.backward_sum.Operands, names=names, dk=None, dv=None)
    for cta in range(ctas):
        k, v, ring = Rooms(c.key_tiles), Rooms(c.key_tiles), Rooms(c.slots)
        rooms = 2 * c.key_tiles
        full, empty, held_full, held_empty, done, p_full, p_empty = bars(
            (c.slots, 1), (c.slots, 4 * KEY_GROUPS), (rooms, 1), (rooms, 1), (rooms, 128), (1, 128), (1, 128)
        )
        out = (v, k) if c.split else (k, v)
        handed = SimpleNamespace(values=None)
        room = kernel.Room(k, v, *out, ring, ring, Rooms(c.slots), handed, full, empty, held_full, held_empty, done,
                           p_full, p_empty, None, _boxes(kernel, KEY_GROUPS), _sum_room(kernel, c))  # fmt: skip
        compute = kernel.compute_and_sum if c.summed else kernel.compute
        groups = [lambda w=w, room=room, compute=compute: compute(room, w, by, work, x) for w in range(2)]
        if c.split:
            groups = [
                lambda room=room, make=make: make(room, by, work, x) for make in (kernel.make_values, kernel.make_keys)
            ]
        stores = [lambda w=w, room=room: kernel.store(tmas, lines, room, w, work, x) for w in range(2)]
        loads = [
            lambda room=room: kernel.load_keys(tmas, room, work, x),
            lambda room=room: kernel.load_queries(tmas, lines, room, work, x),
        ]
        roles_of[cta] = [(False, body) for body in loads + stores] + [(True, body) for body in groups]
    if c.ordered:  # CTAs wait for each other
        _at_once(roles_of, ctas)
        sums[(turns == 0).reshape(sums.shape[:4])] = 0.0
    else:
        for cta, roles in roles_of.items():
            _together(roles, cta, ctas)
    return dk, dv, _placed(kernel.backward_sum, sums, t["q"].shape, work, x) if c.summed else None


class Parts:
    """A head's matrix in parts of 64 rows and 128 columns."""

    shape, width = (ROWS,), HALF

    def __init__(self, values: np.ndarray):
        self.values = values

    def __getitem__(self, index: tuple):
        return self, index[1:]

    def _part(self, at: tuple) -> np.ndarray:
        m, n = at
        return self.values[ROWS * m : ROWS * (m + 1), HALF * n : HALF * (n + 1)]

    def read(self, at: tuple) -> np.ndarray:
        found, part = np.zeros((ROWS, HALF), np.float32), self._part(at)
        found[: part.shape[0], : part.shape[1]] = part
        return found

    def write(self, at: tuple, tile: np.ndarray) -> None:
        part = self._part(at)
        part[:] = tile[: part.shape[0], : part.shape[1]]


def run_pairs(x: Backward, t: dict, work: tuple, ctas: int) -> tuple:
    """As :func:`run_keys`, two CTAs at a time."""
    kernel, c, ctas = load("cluster"), x.keys, max(PAIR, ctas // PAIR * PAIR)
    kernel.cut = lambda info, shape, origin, head, batch, room: (Parts(info.values[batch][:, head]), room)
    dk, dv = np.full_like(t["k"], np.nan), np.full_like(t["v"], np.nan)
    work = _work(kernel, work)
    tmas = kernel.Tmas(*map(info, (t["q"], t["do"], t["k"], t["v"], dk, dv)))
    sums = np.zeros((*t["lse2"].shape[:2], t["blocks"], KEY_GROUPS, c.part), np.float32)
    lines = kernel.Lines(Global(t["lse2"]), Global(t["delta"]), Global(sums))
    names = SimpleNamespace(score=None, grad=None, dq=None)
    by = SimpleNamespace(make=kernel.Operands, make_sum=kernel.Sum, names=names)
    for cta in range(0, ctas, PAIR):
        rooms = [_pair_room(kernel, c, n) for n in range(PAIR)]
        roles = []
        for n, room in enumerate(rooms):
            others = [
                partial(load, tmas, *more, room)
                for load, more in ((kernel.load_keys, ()), (kernel.load_queries, (lines,)))
            ]
            others += [partial(kernel.store, tmas, room), partial(kernel.exchange, room)]
            groups = [
                partial(kernel.make_values, room, by),
                partial(kernel.make_keys, room, by),
                partial(kernel.make_queries, lines, room, by),
            ]
            for computes, bodies in ((False, others), (True, groups)):
                roles += [(computes, partial(_of_cta, cta + n, rooms[1 - n], body, work, x)) for body in bodies]
        _together(roles, cta, ctas)
    return dk, dv, _placed(None, sums, t["q"].shape, work, x)


def _of_cta(cta: int, peer, body, work, x: Backward) -> None:
    role.cta, role.peer = cta, peer
    body(work, x)


def _pair_room(kernel, c: KeyTiles, rank: int):
    k, v, ring, ds = Rooms(c.parts + 1), Rooms(c.parts), Rooms(c.slots), Rooms(3)
    slots = (c.slots, 1), (c.slots, 4 * KEY_GROUPS)
    tiles = (3, 1), (2, 1), (2, 128), (1, 128), (1, 4)
    scores = (2, 128), (2, 128), (2, 4 * PAIR), (1, 1)
    handed = SimpleNamespace(rooms=ds, strips={})
    barriers = bars(*slots, *tiles, *scores)
    return kernel.Room(k, v, k, v, ring, Rooms(c.slots), handed, ds, None, *barriers, rank)


def _work(kernel, numbers: tuple):
    """``numbers``: of a launch, and then, of packed sequences, as Starts has them, or fields of Extra."""
    size = len(kernel.Work._fields) - 2
    wrapped = lambda n: Global(n) if isinstance(n, np.ndarray) else n  # noqa: E731
    if numbers[size:] and isinstance(numbers[size], dict):
        extra = {name: wrapped(n) for name, n in numbers[size].items()}
        extra["leaves"] = tuple(map(Global, extra.get("leaves", ())))
        return kernel.Work(*numbers[:size], extra=kernel.Extra(**extra))
    starts = [wrapped(n) for n in numbers[size:]]
    return kernel.Work(*numbers[:size], kernel.Starts(*starts) if starts else None)


def _boxes(kernel, groups: int):
    return kernel.backward_walk.Boxes(
        Pointer([None] * kernel.backward_walk.WORDS * (groups + 1)), *bars((1, 1), (1, 1))
    )


def _sum_room(kernel, c: KeyTiles):
    barriers, ds = bars((2, 128 * KEY_GROUPS), (2, 128 * KEY_GROUPS), (2, 128), (2, 1)), Rooms(2 * KEY_GROUPS)
    ds.tiles = [np.full((ROWS, c.tile_m), np.nan, np.float32) for _ in ds.tiles]
    return kernel.backward_sum.Room(ds, [None] * KEY_GROUPS, *barriers)


def _placed(module, sums: np.ndarray, shape: tuple, work, x: Backward) -> np.ndarray:
    """dQ of its parts, as the kernel that follows puts them in place."""
    (batch, heads, blocks), tile_m = sums.shape[:3], x.keys.tile_m
    parts = sums.reshape(batch, heads, blocks, KEY_GROUPS, ROWS, -1)
    if x.keys.by_columns:
        parts = np.swapaxes(parts, 4, 5)
    rows = parts if tile_m == KEY_GROUPS * ROWS else np.swapaxes(parts, 3, 4)  # one after the other, or side by side
    whole = np.swapaxes(rows.reshape(batch, heads, blocks * tile_m, -1), 1, 2)[..., : shape[3]] * work.scale
    if not x.packed:
        return whole[:, : shape[1]]
    dq, role.threads = np.full(shape, np.nan, np.float32), 32
    for block in range(blocks):
        span, n = module.place_of(block, 0, module.Sums(None, work.starts.cu_q, work.seqlen_q), x)
        part = dq[0, span.start : span.end][n * tile_m : (n + 1) * tile_m]
        part[:] = whole[0, block * tile_m :][: len(part)]
    return dq


def run_queries(x: Backward, t: dict, work: tuple, ctas: int) -> np.ndarray:
    """dq of arrays (batch, seqlen, heads, head_dim), one CTA after the other; ``t["lse2"]`` and ``t["delta"]`` are written."""
    kernel, c = load("queries"), x.queries
    rows = kernel.backward_rows.Tensors(*(Global(t[n]) for n in ("o", "do", "lse", "dlse", "lse2", "delta")))
    dq, work = np.full_like(t["q"], np.nan), _work(kernel, work)
    tmas = kernel.Tmas(*map(info, (t["q"], t["do"], t["k"], t["v"], dq, t["o"])))
    by = SimpleNamespace(make=kernel.Operands, names=SimpleNamespace(score=None, dq=None), dq=None)
    w = c.warpgroups
    for cta in range(ctas):
        q, do, ring = Rooms(w), Rooms(w), Rooms(c.slots)
        barriers = bars((c.slots, 1), (c.slots, 4 * w), (w, 1), (w, 1), (w, 128))
        room = kernel.Room(q, do, q, ring, ring, *barriers, None, _boxes(kernel, w), ring)
        loads = [
            lambda room=room: kernel.load_rows(tmas, room, work, x),
            lambda room=room: kernel.load_keys(tmas, room, work, x),
        ]
        stores = [lambda n=n, room=room: kernel.store(tmas, rows.lse2, room, n, work, x) for n in range(w)]
        groups = [lambda n=n, room=room: kernel.compute(room, n, rows, by, work, x) for n in range(w)]
        _together([(False, body) for body in loads + stores] + [(True, body) for body in groups], cta, ctas)
    return dq
