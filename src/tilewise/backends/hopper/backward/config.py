"""Tile sizes, registers and shared memory of Hopper's backward kernels: a table by head dim; no DSL, it runs on any machine.

Two passes (docs/algorithm.md, section 6): dK and dV over key tiles, dQ over query tiles; 7 products of a pair of tiles, and
the same bits at every run. At the head dims of SUMMED the first pass can do dQ too, adding it up in fp32 in memory, in
whatever order its CTAs come or in that of the key tiles: 5 products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewise import device as devices
from tilewise.backends.hopper import config
from tilewise.backends.hopper.config import (
    ALIGNMENT,
    DTYPES,
    PLAIN,
    ROWS,
    SHIPPED,
    Expressions,
    Formed,
    Traced,
    band_of,
    keys_of,
)
from tilewise.backends.hopper.expected import Expected
from tilewise.problem import Problem

KEY_GROUPS = 2  # warpgroups that compute in the pass over key tiles
PAIR = 2  # CTAs of a cluster, where two share a tile
HALF = 128  # columns of the parts in which these have their tiles
PIECE, PIECES = 1024, 2  # bytes of dQ that one of their warps adds up at a time, and how many it has on their way
LINES = 128  # a packed sequence's statistics begin at a multiple of so many rows: those of a CTA are of one sequence


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class KeyTiles:
    """Sizes of the pass over key tiles: two warpgroups, query blocks of ``tile_m``.

    Attributes:
        width, width_v: head dims that it is compiled for; smaller ones are filled with zeros as they are loaded.
        slots: of the ring; one holds a block of Q or of dO, and its rows' lse or delta.
        split: one warpgroup makes S, P and dV, the other dP, dS and dK, both of the same 64 keys: only so do dK and dV of
            wide heads fit into registers (docs/decisions.md#hopper-d256-roles). Else each makes all of its own 64 keys.
        summed: dQ too, added up in memory.
        ordered: that in the order of the key tiles, so that its bits repeat, and do not depend on what else a launch has.
        part_first: a block's dQ is put while dK's product runs (docs/decisions.md#hopper-d128-queries).
        ahead: a tile's K and V come to L2 while the tile before is at work (docs/decisions.md#hopper-ahead).
    """

    width: int
    width_v: int
    tile_m: int
    slots: int
    registers: int = 240
    registers_load: int = 24
    split: bool = False
    summed: bool = False
    ordered: bool = False
    part_first: bool = False
    ahead: bool = False
    paired = False  # two CTAs share a tile: see PairTiles

    @property
    def name(self) -> str:
        return f"{self.tile_m}x{self.tile_n}_s{self.slots}{'_pair' if self.paired else '_split' if self.split else ''}"

    @property
    def by_role(self) -> tuple[int, ...]:
        """Registers of a thread of each warpgroup."""
        return self.registers_load, *[self.registers] * KEY_GROUPS

    @property
    def by_columns(self) -> bool:
        """Whether each warpgroup makes dQ of half of the columns, transposed, so that blocks have any multiple of 16 queries; else of
        half of 128 queries."""
        return self.width == KEY_GROUPS * ROWS

    @property
    def part(self) -> int:
        """Numbers of a block of dQ that a warpgroup adds up."""
        return self.tile_m * self.width // KEY_GROUPS

    @property
    def key_tiles(self) -> int:
        """Of 64 keys."""
        return 1 if self.split else KEY_GROUPS

    @property
    def tile_n(self) -> int:
        return ROWS * self.key_tiles

    @property
    def threads(self) -> int:
        return 128 * len(self.by_role)

    @property
    def room_elements(self) -> int:
        """Of a room for 64 rows of K or V, where 64 rows of dK or dV come later."""
        return ROWS * max(self.width, self.width_v)

    @property
    def slot_elements(self) -> int:
        return self.tile_m * max(self.width, self.width_v)

    @property
    def barriers(self) -> int:
        """mbarriers: full and empty of every slot; full, empty and done of every room of K and V; of what is handed on:
        full and empty of P, or of two dS and of two parts of dQ."""
        return 2 * self.slots + 6 * self.key_tiles + (2 if self.split else 8 if self.summed else 0)

    @property
    def handed(self) -> int:
        """Bytes of what one warpgroup hands to another: P; or two blocks of dS, and a block of dQ in fp32."""
        p = 2 * ROWS * self.tile_m
        return p if self.split else 2 * KEY_GROUPS * p + 4 * self.tile_m * self.width if self.summed else 0

    @property
    def shared(self) -> int:
        """Bytes that the kernel allocates, for elements of two bytes: barriers, a word that nobody reads and statistics; K and
        V, the ring, what is handed."""
        small = 8 * (self.barriers + 1)
        small += -small % 128 + 4 * self.slots * self.tile_m
        return (
            aligned(small) + 4 * self.key_tiles * self.room_elements + 2 * self.slots * self.slot_elements + self.handed
        )


@dataclass(frozen=True)
class PairTiles(KeyTiles):
    """Sizes where the two CTAs of a cluster share a tile of 128 keys (:mod:`tilewise.backends.hopper.backward.cluster`), each with
    64 of them and half of dQ's columns. ``slots``: of the ring, of which one holds 64 x HALF of Q or dO.

    Attributes:
        registers, registers_values, registers_sum: of the warpgroups that make dK, dV and dQ.
    """

    registers: int = 200
    registers_values: int = 192
    registers_sum: int = 96
    split: bool = True
    summed: bool = True
    paired = True

    @property
    def by_role(self) -> tuple[int, ...]:
        return self.registers_load, self.registers_values, self.registers, self.registers_sum

    @property
    def parts(self) -> int:
        """Of a tile's columns."""
        return self.width // HALF

    @property
    def tile_n(self) -> int:
        return ROWS * PAIR

    @property
    def barriers(self) -> int:
        """mbarriers: full and empty of every slot; full of K, V and the other's part of K, empty and done of K and V, two more of when
        these were read; full of P, full and empty of dS, of two blocks; full of the other's dS."""
        return 2 * self.slots + 3 + 2 * 2 + 2 + 3 * 2 + 1

    @property
    def handed(self) -> int:
        """P or dS of two blocks, dS of the other CTA, and what four warps have of dQ in fp32."""
        return 3 * 2 * ROWS * self.tile_m + 4 * PIECES * PIECE

    @property
    def shared(self) -> int:
        small = 8 * (self.barriers + 1)
        small += -small % 128 + 4 * self.slots * self.tile_m
        return aligned(small) + 2 * ROWS * HALF * (self.slots + 2 * self.parts + 1) + self.handed


@dataclass(frozen=True)
class QueryTiles:
    """Sizes of the pass over query tiles: ``warpgroups`` of 64 queries each by ``tile_n`` keys; else as :class:`KeyTiles`.

    Attributes:
        makes_rows: the rows' statistics too, of blocks of O that come through the ring, and is the first pass then; else a kernel
            makes them before (docs/decisions.md#hopper-queries-first).
        ahead: a tile's Q and dO come to L2 while the tile before is at work.
    """

    width: int
    width_v: int
    warpgroups: int
    tile_n: int
    slots: int
    registers: int = 240
    registers_load: int = 24
    makes_rows: bool = False
    ahead: bool = False

    @property
    def name(self) -> str:
        return f"{self.tile_m}x{self.tile_n}_s{self.slots}"

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def room_elements(self) -> int:
        """Of a warpgroup's room for Q, where dQ comes later, or for dO."""
        return ROWS * max(self.width, self.width_v)

    @property
    def slot_elements(self) -> int:
        return self.tile_n * max(self.width, self.width_v)

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def barriers(self) -> int:
        """mbarriers: full and empty of every slot; of every warpgroup full and empty of Q and dO, and done."""
        return 2 * self.slots + 3 * self.warpgroups

    @property
    def shared(self) -> int:
        return (
            aligned(8 * (self.barriers + 1))
            + 4 * self.warpgroups * self.room_elements
            + 2 * self.slots * self.slot_elements
        )


@dataclass(frozen=True)
class Backward(Formed):
    """What one backward is compiled for. ``queries``: None where the pass over key tiles sums dQ. ``packed``: sequences are.
    ``traced``, ``dropout``: as of :class:`tilewise.backends.hopper.config.Config`."""

    keys: KeyTiles
    queries: QueryTiles | None
    dtype: str
    form: str
    softcap: bool = False
    packed: bool = False
    traced: Traced = PLAIN
    dropout: bool = False

    @property
    def pairs(self) -> bool:
        """Whether something is asked about every pair."""
        return self.dropout or self.traced != PLAIN

    @property
    def apart(self) -> bool:
        """Whether dS is made of other numbers than the P that enters dV."""
        return self.softcap or self.dropout or self.traced.sloped

    @property
    def name(self) -> str:
        k = self.keys
        dims = f"d{k.width}" + (f"v{k.width_v}" if k.width_v != k.width else "")
        second = self.queries.name if self.queries else "ordered" if k.ordered else "sum"
        flags = "".join(f"_{name}" for name in ("softcap", "dropout", "packed") if getattr(self, name))
        flags += "" if self.traced == PLAIN else f"_{self.traced.digest}"
        return f"backward_{self.dtype}_{dims}_{self.form}{flags}_{k.name}_{second}"

    @property
    def expected(self) -> tuple[Expected, ...]:
        """What the kernels of the passes over keys and over queries must be once they are compiled; the others have no roles."""
        keys, queries = self.keys, self.queries
        hidden = None if keys.split else keys.tile_m // 2
        roles = tuple(dict.fromkeys(reversed(keys.by_role)))
        found = [Expected(f"{self.name}_keys", roles, keys.shared, hidden, idle_loops=True)]
        if queries:
            roles = queries.registers, queries.registers_load
            found.append(Expected(f"{self.name}_queries", roles, queries.shared, queries.tile_n // 2, idle_loops=True))
        return tuple(found)

    @property
    def extra(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tensors that the pass over keys and that over queries have of their own: fields of
        :class:`tilewise.backends.hopper.forward.kernel.Extra`."""
        each = (("lo", "hi") if self.by_rows else ()) + (("blocks", "counts") if self.form == "lists" else ())
        return each, each if self.queries else ()

    @property
    def tile_m(self) -> int:
        """Queries of a tile of the pass over queries, or of a block that is summed."""
        return self.queries.tile_m if self.queries else self.keys.tile_m

    @property
    def lines_between(self) -> int:
        """Rows that the statistics of packed sequences are further apart than these: see :func:`packed.spaced`. Whole query
        blocks of each pass fit, and the next multiple of LINES is not past the next sequence's."""
        return LINES + max(self.keys.tile_m, self.tile_m)

    @property
    def queries_first(self) -> bool:
        """Whether the pass over queries makes what both need of the rows."""
        return self.queries is not None and self.queries.makes_rows

    @property
    def flagged(self) -> bool:
        """Whether the pass over keys begins on multiprocessors that the one over queries has left, before all have: its first tiles then
        wait for the statistics of their heads
        (docs/decisions.md#hopper-flags). Tiles of other forms go by length, and all multiprocessors end with them at about the
        same time; packed, only the device knows which tiles there are."""
        return self.queries_first and self.form == "full" and not self.packed

    def lines(self, p: Problem) -> int:
        """Numbers that a head has in the statistics' buffers: whole query blocks of each pass, of each sequence; then flags, a whole
        number of blocks too."""
        if self.packed:  # the rows past the last sequence are one more
            return -(-(p.seqlen_q + (p.batch + 1) * self.lines_between) // LINES) * LINES
        flags = -(-p.seqlen_q // (16 * self.tile_m)) * 16 if self.flagged else 0
        return flags + max(-(-p.seqlen_q // m) * m for m in (self.keys.tile_m, self.tile_m))

    def turns(self, p: Problem) -> int:
        """Of a head: counters of the key tiles that each part of a query block has been added up of."""
        return KEY_GROUPS * self.blocks(p)

    def blocks(self, p: Problem) -> int:
        """Query blocks of a head whose dQ is summed."""
        m = self.keys.tile_m
        return p.seqlen_q // m + p.batch + 1 if self.packed else -(-p.seqlen_q // m)

    def grids(self, p: Problem, seqlen_k: int, cores: int) -> tuple[int, int, int, int]:
        """Heads of a section and CTAs of the pass over ``seqlen_k`` keys, then those of the pass over queries."""
        if (
            self.packed
        ):  # tiles at most, as only the device knows the lengths; seen keys and those on either side are tiles apart
            keys = p.heads_k * (seqlen_k // self.keys.tile_n + 3 * (p.batch + 1))
            rows = p.heads_q * (p.seqlen_q // self.tile_m + p.batch + 1)
            return 1, min(keys, cores), 1, min(rows, cores)
        # docs/decisions.md#hopper-open-heads
        tiles, sharing = -(-seqlen_k // self.keys.tile_n), cores if self.form == "full" else config.SHARING
        keys = spread(p.batch * p.heads_k, tiles, self.waiting(tiles) if self.keys.ordered else sharing, cores)
        if self.keys.paired:
            keys = spread_pairs(p.batch * p.heads_k, tiles, self.form, cores)
        return *keys, *spread(p.batch * p.heads_q, -(-p.seqlen_q // self.tile_m), sharing, cores)

    def waiting(self, tiles: int) -> int:
        """How many of a head's ``tiles`` that add to dQ in order run at once: the last one waits for all others, but of few heads L2
        holds more (docs/decisions.md#hopper-ordered-dq)."""
        return 2 * config.SHARING if self.form == "full" and tiles >= 4 * config.SHARING else config.SHARING


# (head dim of q and k, of v) -> tiles of the two passes. The first row that holds both is taken.
TABLE = {
    (64, 64): (KeyTiles(64, 64, 128, 8, ahead=True), QueryTiles(64, 64, 2, 128, 6, makes_rows=True, ahead=True)),
    (96, 96): (KeyTiles(96, 96, 96, 8), QueryTiles(96, 96, 2, 112, 6, makes_rows=True)),
    (128, 128): (KeyTiles(128, 128, 64, 8, ahead=True), QueryTiles(128, 128, 2, 96, 6, makes_rows=True, ahead=True)),
    (192, 128): (KeyTiles(192, 128, 96, 4, split=True), QueryTiles(192, 128, 2, 80, 4)),
    (192, 192): (KeyTiles(192, 192, 80, 4, split=True), QueryTiles(192, 192, 2, 80, 4)),
    (256, 256): (KeyTiles(256, 256, 64, 4, split=True), QueryTiles(256, 256, 2, 64, 3)),
}


# Where dQ is summed; at 256 by pairs of CTAs (docs/decisions.md#hopper-d256-pairs).
SUMMED = {
    (64, 64): KeyTiles(64, 64, 128, 5, summed=True, ahead=True),
    (128, 128): KeyTiles(128, 128, 80, 4, summed=True, part_first=True),
    (256, 256): PairTiles(256, 256, 64, 7),
}
# And where a run must repeat bit by bit: each tile knows from the band which others add to a block before it. ``ahead`` has not been
# tried there; pairs lost to two passes (docs/decisions.md#hopper-ordered-dq).
ORDERED = {dims: replace(keys, ordered=True, ahead=False) for dims, keys in SUMMED.items() if not keys.paired}
BANDS = ("full", "upper", "band")
# How many keys a query must see on average for that to pay: fp32 sums are zeroed, read and rounded (10 bytes a number of Q)
# for two products a pair (docs/decisions.md#hopper-two-or-one-pass).
SUMMED_FROM = {(64, 64): 1100, (128, 128): 560, (256, 256): 900}
# In order, where tiles are not equally long, as each waits for a longer one; and how many rounds of tiles a sequence alone must
# have, as its first tiles wait for each other.
ORDERED_FROM, ROUNDS = 1500, 1.5
# With a softcap, whose slope needs registers; smaller head dims take the next.
SOFTCAP = {
    (64, 64): (KeyTiles(64, 64, 64, 8), TABLE[64, 64][1]),
    (128, 128): (KeyTiles(128, 128, 48, 8), TABLE[128, 128][1]),
    (256, 256): TABLE[256, 256],
}
# And with two ends of a row beside it.
SOFTCAP_BAND = SOFTCAP | {(256, 256): (KeyTiles(256, 256, 48, 4, split=True), TABLE[256, 256][1])}


# With a traced predicate, and whatever is beside it (docs/decisions.md#hopper-pair-tiles).
HIDING = {
    (64, 64): (KeyTiles(64, 64, 64, 8), QueryTiles(64, 64, 2, 96, 6)),
    (128, 128): (KeyTiles(128, 128, 32, 8), QueryTiles(128, 128, 2, 64, 6)),
    (256, 256): (KeyTiles(256, 256, 48, 4, split=True), QueryTiles(256, 256, 2, 32, 4)),
}
# With a traced score or dropout.
PAIRED = HIDING | {
    (128, 128): (KeyTiles(128, 128, 48, 8), QueryTiles(128, 128, 2, 80, 6)),
    (256, 256): (KeyTiles(256, 256, 48, 4, split=True), QueryTiles(256, 256, 2, 48, 3)),
}


# What else is worth a measurement, for "full" and "upper" in bf16.
CANDIDATES = (
    (KeyTiles(128, 128, 64, 6), QueryTiles(128, 128, 2, 112, 5)),
    (KeyTiles(128, 128, 64, 6, summed=True, part_first=True), None),
)


def candidates() -> list[Backward]:
    """Backwards that are built to be measured."""
    return [Backward(*row, "bf16", form) for row in CANDIDATES for form in ("full", "upper")]


def table_of(form: str, capped: bool, traced: Traced = PLAIN, dropout: bool = False) -> dict:
    """Tiles by head dims, where dQ is not summed."""
    if traced != PLAIN or dropout:
        return HIDING if traced.keep else PAIRED
    return TABLE if not capped else SOFTCAP_BAND if form in ("band", "rows") else SOFTCAP


def shipped() -> list[Backward]:
    """Every backward that is compiled ahead of time."""
    rows = [(row, form, c) for c in (False, True) for form in SHIPPED for row in table_of(form, c).values()]
    rows += [((keys, None), form, False) for keys in SUMMED.values() for form in SHIPPED]
    rows += [((keys, None), form, False) for keys in ORDERED.values() for form in BANDS]
    return [
        Backward(*row, dtype, form, capped, packed)
        for row, form, capped in rows
        for packed in (False, True)
        for dtype in DTYPES.values()
        if not (packed and form == "rows") and built_for(row[0], form, packed)
    ]


def built_for(keys: KeyTiles, form: str, packed: bool) -> bool:
    """Whether there are kernels of these tiles: additions in order, and pairs of CTAs, go by the numbers of one band."""
    return not (keys.ordered or keys.paired) or (not packed and form in BANDS)


def reasons(p: Problem) -> list[str]:
    """Why a problem that the forward runs is none for these kernels: it then goes elsewhere from its forward on."""
    return ["gradients of tensors that a score reads"] if p.spec.lookups else []


def choose(p: Problem) -> Backward:
    """Of a problem that has no :func:`reasons` against it."""
    form, traced, dropout = form_of(p), Expressions.of(p).traced, p.spec.dropout_p > 0
    capped = p.spec.score is not None and not traced.score
    table = table_of(form, capped, traced, dropout)
    dims = next(d for d in table if p.head_dim <= d[0] and p.head_dim_v <= d[1])
    pays = dims in SUMMED and keys_a_query(p) >= SUMMED_FROM[dims] and not (capped or dropout or traced != PLAIN)
    sums = (ORDERED if p.spec.deterministic else SUMMED).get(dims) if pays else None
    if sums and (not built_for(sums, form, p.packed) or (sums.ordered and not pays_in_order(p, form))):
        sums = None
    row = (sums, None) if sums else table[dims]
    return Backward(*row, DTYPES[str(p.dtype)], form, capped, p.packed, traced, dropout)


def pays_in_order(p: Problem, form: str) -> bool:
    """Whether adding dQ up in order is faster than two passes, as one sequence alone tells."""
    even, tiles = form == "full", -(-p.seqlen_k // (KEY_GROUPS * ROWS))
    tiles *= p.heads_q if even else p.heads_k  # a tile that waits for a longer one does so for each query head
    return (even or keys_a_query(p) >= ORDERED_FROM) and tiles >= ROUNDS * devices.of(p.device).cores


def form_of(p: Problem) -> str:
    """How a kernel learns which keys a row has; of numbers, the mask's before it is cut to the keys that are seen."""
    form, band = keys_of(p)[0], band_of(p)
    return form if band is None or form in ("rows", "lists") else band.form


def keys_a_query(p: Problem) -> float:
    """How many keys a query sees, about: the mean over 16 of them; of packed sequences, as if all were equally long. Half of
    all, where only the device knows."""
    if band_of(p) is None:
        return p.seqlen_k / 2
    band, parts = band_of(p), max(p.batch, 1) if p.packed else 1
    seqlen_q, seqlen_k = p.seqlen_q / parts, p.seqlen_k / parts
    off = seqlen_k - seqlen_q if p.packed else 0

    def seen(i: float) -> float:
        first = band.start if band.lo is None else max(band.start, i + off + band.lo)
        stop = min(band.stop, seqlen_k)
        return max(0.0, (stop if band.hi is None else min(stop, i + off + band.hi)) - first)

    return sum(seen((n + 0.5) / 16 * (seqlen_q - 1)) for n in range(16)) / 16


def spread(heads: int, tiles: int, sharing: int, cores: int) -> tuple[int, int]:
    """``(section, ctas)`` of ``tiles`` for each of ``heads``, as :func:`tilewise.backends.hopper.config.spread` has them: ``sharing``
    tiles of a head at once, if there are heads enough."""
    section = min(heads, max(1, cores // sharing))
    return section, min(heads * tiles, cores)


SHARING_PAIRS = 6  # pairs of CTAs that add to one head's sums at a time (docs/decisions.md#hopper-d256-pairs)


def spread_pairs(heads: int, tiles: int, form: str, cores: int) -> tuple[int, int]:
    """As :func:`spread`, where two CTAs share a tile. All heads at once where a second section would be a short one."""
    few = max(1, cores // PAIR // SHARING_PAIRS)
    section = 1 if form == "full" else few if heads >= 2 * few else heads
    return section, PAIR * min(heads * tiles, cores // PAIR)
