"""The Hopper kernels' schedules, and their barriers on a simulated machine."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.backends.hopper.forward.tiles import TABLE
from tilewise.backends.hopper.kit import schedule
from tilewise.backends.hopper.kit.schedule import Band, Order

BANDS = st.builds(
    lambda lo, width, seqlen_k, ends: Band(lo if ends[0] else None, lo + width if ends[1] else None, seqlen_k),
    st.integers(-300, 300),
    st.integers(0, 200),
    st.integers(1, 300),
    st.tuples(st.booleans(), st.booleans()),
)


def kept(i: int, band: Band) -> set[int]:
    low = 0 if band.lo is None else max(0, i + band.lo)
    high = band.seqlen_k if band.hi is None else min(band.seqlen_k, i + band.hi)
    return set(range(low, high))


# -- Which tiles, and in which order -------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(1, 50))
def test_every_tile_is_done_by_one_cta(m_blocks, heads, section, backwards, ctas):
    order = Order(m_blocks, heads, min(section, heads), backwards)
    ctas = min(ctas, order.tiles)
    done = [
        schedule.tile_at(schedule.nth(cta, ctas, n), order)
        for cta in range(ctas)
        for n in range(schedule.rounds(cta, ctas, order.tiles))
    ]
    assert sorted(done) == [(m, h) for m in range(m_blocks) for h in range(heads)]


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 9))
def test_the_longest_rows_of_a_section_come_first(m_blocks, heads, section):
    order = Order(m_blocks, heads, section, True)
    tiles = [schedule.tile_at(n, order) for n in range(order.tiles)]
    sections = [h // section for _, h in tiles]
    assert sections == sorted(sections)
    assert all(a[0] >= b[0] for a, b in pairwise(tiles) if a[1] // section == b[1] // section)


@pytest.mark.parametrize("dims", TABLE, ids=str)
@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096, 8192, 16384])
def test_causal_work_is_even_over_132_sms(dims, seqlen):
    """Key blocks of the busiest CTA (5 more a tile, for its begin and end) over the mean: at most 1.07 in the benchmark's rows."""
    tiles, heads = TABLE[dims].ends, 2048 // dims[0] * (16384 // seqlen)
    order = Order(-(-seqlen // tiles.tile_m), heads, min(heads, 33), True)

    def cost(n: int) -> int:
        row = schedule.tile_at(n, order)[0] * tiles.tile_m
        start, stop = schedule.key_blocks(row, tiles.tile_m, tiles.tile_n, Band(None, 1, seqlen))
        return stop - start + 5

    work = [
        sum(cost(schedule.nth(cta, 132, n)) for n in range(schedule.rounds(cta, 132, order.tiles)))
        for cta in range(132)
    ]
    assert max(work) <= 1.07 * sum(work) / 132


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_a_queue_keeps_packed_work_even_over_132_sms(dims, causal):
    """Lengths of 2,000 on average, 16,384 rows in all: tiles in the kernel's order, each to who is done first."""
    tiles, heads, worst = TABLE[dims].ends if causal else TABLE[dims].full, 2048 // dims[0], 0.0
    for seed in range(12):
        chance, lengths, busy = random.Random(seed), [], [0] * 132
        while sum(lengths) < 16384:
            lengths.append(min(chance.randrange(200, 3800), 16384 - sum(lengths)))
        for n in lengths:
            rows = range(0, n, tiles.tile_m)
            for row in reversed(rows) if causal else rows:
                start, stop = schedule.key_blocks(row, tiles.tile_m, tiles.tile_n, Band(None, 1 if causal else None, n))
                for _ in range(heads):
                    heapq.heappush(busy, heapq.heappop(busy) + stop - start + 5)
        worst = max(worst, max(busy) * 132 / sum(busy))
    assert worst <= (1.07 if dims[0] < 256 else 1.1)


# -- Which keys ----------------------------------------------------------------------------------------------------


@given(BANDS, st.integers(0, 300), st.sampled_from([64, 128, 192]), st.sampled_from([16, 80, 128]))
def test_the_blocks_of_a_tile_hold_all_keys_of_its_rows(band, row, rows, tile_n):
    start, stop = schedule.key_blocks(row, rows, tile_n, band)
    seen = set().union(*[kept(i, band) for i in range(row, row + rows)])
    assert 0 <= start < stop <= max(1, -(-band.seqlen_k // tile_n))
    assert seen <= set(range(start * tile_n, stop * tile_n))
    if seen:
        assert (start, stop - 1) == (min(seen) // tile_n, max(seen) // tile_n)


@given(BANDS, st.integers(1, 400), st.sampled_from([(64, 64), (64, 128), (128, 64), (16, 48)]))
def test_rows_and_keys_tell_the_same_blocks(band, seqlen_q, tile):
    """What one pass writes of a tile and what the other reads: neither more nor less, for all rows that there are."""
    rows, tile_n = tile
    by_rows = {
        (m, n) for m in range(-(-seqlen_q // rows)) for n in range(*schedule.seen_blocks(m * rows, rows, tile_n, band))
    }
    by_keys = {
        (m, n)
        for n in range(-(-band.seqlen_k // tile_n))
        for m in range(*schedule.query_blocks(n * tile_n, tile_n, rows, seqlen_q, band))
    }
    # Rows past the last one of a tile may see what nobody else does: such a block is visited all the same.
    assert by_rows == by_keys
    seen = {(i // rows, j // tile_n) for i in range(seqlen_q) for j in kept(i, band)}
    assert seen <= by_rows


@given(BANDS, st.integers(0, 300), st.sampled_from([128, 192]), st.sampled_from([16, 80, 128]), st.integers(0, 2))
def test_a_warpgroup_sees_nothing_of_hidden_blocks_and_something_of_the_next(band, row, rows, tile_n, part):
    start, stop = schedule.key_blocks(row, rows, tile_n, band)
    own = row + 64 * min(part, rows // 64 - 1)
    hidden = schedule.hidden_blocks(own, 64, tile_n, band, (start, stop))
    assert 0 <= hidden < stop - start
    ends = [schedule.row_stop(i, band) for i in range(own, own + 64)]
    assert max(ends) <= (stop - hidden) * tile_n
    assert hidden + 1 == stop - start or max(ends) > (stop - hidden - 1) * tile_n


@given(BANDS, st.integers(1, 300), st.integers(0, 100), st.integers(0, 300))
def test_a_cut_band_keeps_the_same_keys_and_no_others(band, rows, first, last):
    start, cut = schedule.cut(band, first, last, rows)
    seen = [{j for j in kept(i, band) if first <= j < last} for i in range(rows)]
    assert [{j + start for j in kept(i, cut)} for i in range(rows)] == seen
    union = set().union(*seen)
    assert not union or (start, start + cut.seqlen_k) == (min(union), max(union) + 1)


@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 40), st.integers(1, 12))
def test_the_splits_of_a_tile_share_its_blocks_out(start, count, blocks, splits):
    start = min(start, blocks - 1)
    stop = min(start + count, blocks)
    size = schedule.split_blocks(blocks, splits)
    parts = [schedule.within_split((start, stop), c, size) for c in range(-(-blocks // size))]
    visited = [n for first, last in parts for n in range(first, last)]
    assert all(first < last for first, last in parts)
    assert set(range(start, stop)) <= set(visited) <= set(range(blocks))
    assert len(visited) == len(set(visited))


@given(BANDS, st.integers(0, 300), st.sampled_from([64, 128]), st.sampled_from([16, 80, 128]), st.integers(0, 1))
def test_whole_blocks_are_those_that_every_row_of_a_warpgroup_sees(band, row, rows, tile_n, part):
    start, stop = schedule.key_blocks(row, rows, tile_n, band)
    own = row + part * 64 if rows == 128 else row
    first, last = schedule.whole_blocks(own, 64, tile_n, band, (start, stop - 1))
    assert start <= first <= last <= stop - 1
    for n in range(start, stop - 1):
        whole = all(set(range(n * tile_n, (n + 1) * tile_n)) <= kept(i, band) for i in range(own, own + 64))
        assert whole == (first <= n < last)


def seeing(j: int, seqlen_q: int, band: Band) -> set[int]:
    """The queries that see key j."""
    low = 0 if band.hi is None else max(0, j - band.hi + 1)
    return set(range(low, seqlen_q if band.lo is None else min(seqlen_q, j - band.lo + 1)))


@given(BANDS, st.integers(1, 40), st.integers(0, 60))
def test_a_key_is_seen_by_the_queries_that_see_it(band, seqlen_q, j):
    j = min(j, band.seqlen_k - 1)
    rows = {i for i in range(seqlen_q) if j in kept(i, band)}
    assert rows == set(range(schedule.query_start(j, band), schedule.query_stop(j, seqlen_q, band)))
    assert rows == seeing(j, seqlen_q, band)


@given(BANDS, st.integers(1, 300), st.integers(0, 299), st.sampled_from([64, 128]), st.sampled_from([16, 96, 128]))
def test_the_query_blocks_of_a_key_tile_hold_all_queries_that_see_it(band, seqlen_q, column, columns, tile_m):
    column = min(column, band.seqlen_k - 1) // columns * columns
    start, stop = schedule.query_blocks(column, columns, tile_m, seqlen_q, band)
    keys = range(column, min(column + columns, band.seqlen_k))
    seen = set().union(*[seeing(j, seqlen_q, band) for j in keys])
    assert 0 <= start <= stop <= -(-seqlen_q // tile_m)
    assert seen <= set(range(start * tile_m, stop * tile_m))
    if seen:
        assert (start, stop - 1) == (min(seen) // tile_m, max(seen) // tile_m)


@given(BANDS, st.integers(1, 300), st.integers(0, 299), st.sampled_from([64, 128]), st.sampled_from([16, 96, 128]))
def test_whole_query_blocks_see_every_key_of_a_tile(band, seqlen_q, column, columns, tile_m):
    column = min(column, band.seqlen_k - 1) // columns * columns
    blocks = schedule.query_blocks(column, columns, tile_m, seqlen_q, band)
    first, last = schedule.whole_query_blocks(column, columns, tile_m, band, blocks)
    assert blocks[0] <= first <= last <= blocks[1]
    endless = Band(band.lo, band.hi, 10**6)  # what lies past the last key or query is zero
    for m in range(*blocks):
        rows = range(m * tile_m, (m + 1) * tile_m)
        ends = [kept_ends(i, endless) for i in rows]
        whole = all(low <= column and column + columns <= high for low, high in ends)
        assert whole == (first <= m < last)


def kept_ends(i: int, band: Band) -> tuple[int, int]:
    """The first key that query i sees, and one past the last."""
    return (0 if band.lo is None else max(0, i + band.lo)), (band.seqlen_k if band.hi is None else i + band.hi)


@given(BANDS, st.integers(1, 300), st.integers(0, 9), st.sampled_from([64, 128]), st.sampled_from([16, 80, 128]))
def test_the_key_tiles_that_visit_a_query_block_follow_one_another(band, seqlen_q, block, columns, tile_m):
    block = min(block, (seqlen_q - 1) // tile_m)
    tiles = range(-(-band.seqlen_k // columns))
    visits = lambda n: schedule.query_blocks(n * columns, columns, tile_m, seqlen_q, band)  # noqa: E731
    visitors = [n for n in tiles if block in range(*visits(n))]
    assert not visitors or visitors == list(range(visitors[0], visitors[-1] + 1))
    assert not visitors or visitors == list(range(*schedule.key_blocks(block * tile_m, tile_m, columns, band)))


@st.composite
def additions(draw) -> list[list[tuple[tuple[int, int], int, bool]]]:
    """Of every tile, as a queue has them, the last tile of keys first: (head, query block), the tile, and whether the next tile of keys
    adds to that block too; tiles of 4 keys, blocks of 3 queries."""
    lo, width, seqlen_k = draw(st.integers(-12, 12)), draw(st.integers(1, 20)), draw(st.integers(1, 40))
    ends, seqlen_q = draw(st.tuples(st.booleans(), st.booleans())), draw(st.integers(1, 30))
    band = Band(lo if ends[0] else None, lo + width if ends[1] else None, seqlen_k)
    heads, tiles = draw(st.integers(1, 12)), -(-seqlen_k // 4)
    order = Order(tiles, heads, draw(st.integers(1, heads)), False)

    def blocks(tile: int) -> range:
        return range(*schedule.query_blocks(4 * tile, 4, 3, seqlen_q, band)) if tile < tiles else range(0)

    def of_tile(n: int, head: int) -> list[tuple[tuple[int, int], int, bool]]:
        tile = tiles - 1 - n
        return [((head, m), tile, m in blocks(tile + 1)) for m in blocks(tile)]

    return [of_tile(*schedule.tile_at(n, order)) for n in range(order.tiles)]


@given(additions(), st.integers(1, 20), st.randoms(use_true_random=False))
def test_additions_from_the_last_key_tile_to_the_first_never_deadlock(queue, ctas, chance):
    """CTAs take tiles one after the other, each before it is done with the last one, and add block by block as soon as it is their turn: in
    any order of events all get through."""
    last, left, waiting = {}, [[] for _ in range(ctas)], list(reversed(queue))
    while waiting or any(left):
        takes = [own for own in left if waiting and len(own) < 2]
        adds = [own for own in left if own and (not own[0][0][2] or last.get(own[0][0][0]) == own[0][0][1] + 1)]
        n = chance.choice(range(len(takes) + len(adds)))
        if n < len(takes):
            takes[n].append(list(waiting.pop()))
        else:
            place, tile, follows = adds[n - len(takes)][0].pop(0)
            assert follows or place not in last
            last[place] = tile
        left = [[steps for steps in own if steps] for own in left]


# -- The ring and its barriers -------------------------------------------------------------------------------------


def test_scores_of_a_block_come_before_the_values_of_the_block_before():
    assert schedule.loads(3) == [("k", 0), ("k", 1), ("v", 0), ("k", 2), ("v", 1), ("v", 2)]
    assert schedule.loads(1) == [("k", 0), ("v", 0)]


@given(st.integers(1, 9), st.integers(0, 60))
def test_a_place_in_the_ring_is_a_count_modulo_its_size(slots, steps):
    place, phase = 0, 0
    for n in range(steps):
        assert (place, phase) == (n % slots, n // slots % 2)
        place, phase = schedule.advance(place, phase, slots)


class Barrier:
    """An mbarrier: a phase ends when ``count`` arrivals and all announced bytes are in."""

    def __init__(self, count: int):
        self.count, self.arrived, self.bytes, self.phase = count, 0, 0, 0

    def passes(self, parity: int) -> bool:
        return self.phase % 2 != parity

    def change(self, arrivals: int, size: int) -> None:
        self.arrived, self.bytes = self.arrived + arrivals, self.bytes + size
        assert self.arrived <= self.count
        if self.arrived == self.count and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0


class Machine:
    """One CTA: roles as generators that yield ``(barrier, parity)`` where they wait, and None where others may run.

    A copy lands at some later time; what it overwrites must not be in use, and what is read must be what was meant.

    ``split``, and with one tile of Q: those that compute store, too. ``queued``: only who loads knows which tile is next, and
    whether there is one.
    """

    def __init__(self, tiles, tile_blocks: list[int], seed: int, split: bool = False, queued: bool = False):
        self.t, self.blocks, self.random = tiles, tile_blocks, random.Random(seed)
        self.stores = tiles.q_stages > 1 and not split
        self.queued, self.number = queued, [None] * tiles.q_tiles
        warps = 4 * tiles.warpgroups
        self.full, self.empty = ([Barrier(n) for _ in range(tiles.stages)] for n in (1, warps))
        counts = 1, 1 if self.stores else 4, 128
        self.q_full, self.q_empty, self.o_full = ([Barrier(n) for _ in range(tiles.q_tiles)] for n in counts)
        self.together = [Barrier(4) for _ in range(tiles.warpgroups)]  # the named barriers of the warpgroups
        self.ring: list = [None] * tiles.stages
        self.q: list = [None] * tiles.q_tiles
        self.users = {("ring", n): 0 for n in range(tiles.stages)} | {("q", n): 0 for n in range(tiles.q_tiles)}
        self.flying: list = []
        self.stored: list = []

    def copy(self, room: str, n: int, what: object, full: Barrier) -> None:
        full.change(0, 1)
        full.change(1, 0)
        self.flying.append((room, n, what, full))

    def land(self) -> None:
        room, n, what, full = self.flying.pop(self.random.randrange(len(self.flying)))
        assert self.users[room, n] == 0, "overwritten while in use"
        getattr(self, room)[n] = what
        full.change(0, -1)

    def load(self) -> Iterator:
        slot, phase, stage, q_phase = 0, 1, 0, 1
        for tile, blocks in enumerate(self.blocks):
            yield from self.hand_on(tile, stage, q_phase)
            for step, what in enumerate(schedule.loads(blocks)):
                yield self.empty[slot], phase
                self.copy("ring", slot, (tile, *what), self.full[slot])
                slot, phase = schedule.advance(slot, phase, self.t.stages)
                if step == 0:
                    for w in range(self.t.warpgroups):
                        n = w * self.t.q_stages + stage
                        yield self.q_empty[n], q_phase
                        self.copy("q", n, ("Q", tile, w), self.q_full[n])
                    stage, q_phase = schedule.advance(stage, q_phase, self.t.q_stages)
        yield from self.hand_on(len(self.blocks), stage, q_phase)
        for w in range(self.t.warpgroups if self.queued else 0):
            self.q_full[w * self.t.q_stages + stage].change(1, 0)

    def hand_on(self, tile: int, stage: int, q_phase: int) -> Iterator:
        for w in range(self.t.warpgroups if self.queued else 0):
            n = w * self.t.q_stages + stage
            yield self.q_empty[n], q_phase
            self.number[n] = tile

    def tiles_of(self, w: int, ready: list[Barrier]) -> Iterator:
        """``(tile, n, phase)`` of each, or what to wait for before it is known; at last with no tile, if that is handed on."""
        stage, phase = 0, 0
        for tile in range(len(self.blocks) + self.queued):
            n = w * self.t.q_stages + stage
            if self.queued:
                yield None, ready[n], phase
                assert self.number[n] == tile
            yield (tile if tile < len(self.blocks) else -1), n, phase
            stage, phase = schedule.advance(stage, phase, self.t.q_stages)

    def compute(self, w: int, warp: int) -> Iterator:
        slot, phase = 0, 0
        for tile, n, q_phase in self.tiles_of(w, self.q_full):
            if tile is None:
                yield n, q_phase
                continue
            if tile < 0:
                self.o_full[n].change(32 if self.stores else 0, 0)
                return
            yield self.q_full[n], q_phase
            blocks = self.blocks[tile]
            assert self.q[n] == ("Q", tile, w)
            self.users["q", n] += 1
            loads = list(schedule.loads(blocks))
            for step, what in enumerate(loads):
                if step == len(loads) - 1:  # all scores are there
                    self.users["q", n] -= 1
                    self.q_empty[n].change(0 if self.stores else 1, 0)
                yield self.full[slot], phase
                assert self.ring[slot] == (tile, *what)
                self.users["ring", slot] += 1
                yield None
                self.users["ring", slot] -= 1
                self.empty[slot].change(1, 0)
                slot, phase = schedule.advance(slot, phase, self.t.stages)
            self.together[w].change(1, 0)
            yield self.together[w], tile % 2
            if not self.stores:
                self.stored += [(tile, w)] if warp == 0 else []
                continue
            self.q[n] = ("O", tile, w)  # all four warps write the same
            self.o_full[n].change(32, 0)

    def store(self, w: int) -> Iterator:
        for tile, n, phase in self.tiles_of(w, self.o_full):
            if tile is None:
                yield n, phase
                continue
            if tile < 0:
                return
            yield self.o_full[n], phase
            self.users["q", n] += 1
            yield None
            assert self.q[n] == ("O", tile, w)
            self.stored.append((tile, w))
            self.users["q", n] -= 1
            self.q_empty[n].change(1, 0)

    def run(self) -> None:
        groups = range(self.t.warpgroups)
        stores = [] if not self.stores else map(self.store, groups)
        roles = [self.load(), *stores, *(self.compute(w, n) for w in groups for n in range(4))]
        waiting = {n: next(role) for n, role in enumerate(roles)}
        pace = [self.random.choice((0.05, 0.5, 1.0)) for _ in roles]  # some roles are slow in this run
        while waiting:
            ready = [n for n, on in waiting.items() if on is None or on[0].passes(on[1])]
            assert ready or self.flying, "deadlock"
            if self.flying and (not ready or self.random.random() < 0.2):
                self.land()
                continue
            n = self.random.choice(ready)
            if self.random.random() > pace[n] and len(ready) > 1:
                continue
            try:
                waiting[n] = next(roles[n])
            except StopIteration:
                del waiting[n]


SHAPES = sorted({tiles for row in TABLE.values() for tiles in row.columns}, key=str)
WAYS = {"dealt-out": {}, "split": {"split": True}, "queued": {"queued": True}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tiles", SHAPES, ids=lambda t: f"{t.tile_m}x{t.tile_n}-{t.stages}-{t.q_stages}-w{t.width}")
def test_no_order_of_events_deadlocks_or_overwrites_what_is_in_use(tiles, way):
    for seed in range(6):
        lengths = random.Random(seed).choices(range(1, 8), k=random.Random(seed + 99).randrange(1, 7))
        machine = Machine(tiles, lengths, seed, **WAYS[way])
        machine.run()
        assert sorted(machine.stored) == [(n, w) for n in range(len(lengths)) for w in range(tiles.warpgroups)]


def test_the_simulation_finds_a_slot_that_is_given_back_too_early():
    tiles = SHAPES[0]
    machine = Machine(tiles, [6, 6], 1)
    for n in range(tiles.stages):
        machine.empty[n].count -= 1  # one warp is not waited for
    with pytest.raises(AssertionError):
        machine.run()
