"""Tile sizes of Hopper's backward kernels, and what they take of registers, barriers and shared memory. It imports no DSL."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tilewise.backends.hopper.config import ALIGNMENT, ELEMENT_BYTES, ROWS

FP32_BYTES = 4
BARRIER_BYTES = 8
PAST_EVERY_TILE = 1 << 30
KEY_GROUPS = 2  # warpgroups that compute in the pass over key tiles
CLUSTER = 2  # CTAs of a cluster, where two share a tile
SHEET_KEYS = ROWS  # keys of a block of dS, where that is kept
SHEET_BLOCK = ROWS * SHEET_KEYS  # its elements
SHEET_MARGIN = 2  # of blocks at the end of a sheet of packed sequences: a tile has one for each warpgroup
LINE_SLOTS = 8  # places in which the gradient of a table by distance is added up: CTAs share them
CONSTANT_BYTES = 128  # of the constant by which a product subtracts lse
# A packed sequence's statistics begin at a multiple of so many rows, so that a preprocessing CTA has rows of one sequence.
STATISTICS_ALIGNMENT = 128


class PlanRow(IntEnum):
    """The rows of the plan of packed sequences, (row, sequence + 2); the rows past the last sequence count as one more sequence.

    Attributes:
        ORDER: the sequences in the order in which their tiles are taken.
        KEY_TILES, QUERY_TILES: how many tiles of either pass there are before those of each in that order; at the end how many in all.
        BLOCKS: how many blocks of a head's sheet the sequences before each one have; at the end the key heads of a launch or a section.
    """

    ORDER = 0
    KEY_TILES = 1
    QUERY_TILES = 2
    BLOCKS = 3


def aligned(size: int) -> int:
    """The number of bytes, rounded up to the alignment of a swizzled tile."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def statistics_end(barriers: int, stages: int, tile_m: int) -> int:
    """Bytes of barriers, the word that nobody reads, and the statistics (fp32, ``tile_m`` a stage), which begin at a multiple of 128."""
    end = BARRIER_BYTES * (barriers + 1)
    return end + -end % 128 + FP32_BYTES * stages * tile_m


class Sharing:
    """Tiles that one CTA has, or that the two CTAs of a cluster share.

    Attributes:
        halved: each CTA has half of the head's columns (:mod:`tilewise.backends.hopper.backward.halves`).
    """

    width: int
    width_v: int
    halved = False

    @property
    def ctas(self) -> int:
        """How many CTAs share a tile."""
        return CLUSTER if self.halved else 1

    @property
    def dims(self) -> tuple[int, int]:
        """The head dims of q and k, and of v, that the kernel is compiled for."""
        halves = 2 if self.halved else 1
        return halves * self.width, halves * self.width_v


@dataclass(frozen=True)
class KeyTiles(Sharing):
    """Sizes of the pass over key tiles: two warpgroups, query blocks of ``tile_m`` rows.

    Attributes:
        width, width_v: head dims that the kernel is compiled for; smaller ones are filled with zeros as they are loaded.
        stages: of the ring; a stage holds a block of Q and its rows' lse2, or a block of dO and its rows' delta.
        split: one warpgroup makes S, P and dV, the other dP, dS and dK, both for the same 64 keys: dK and dV of wide heads fit into
            registers (docs/decisions.md#hopper-d256-roles). Otherwise each warpgroup makes everything for its own 64 keys.
        sums_dq: the pass makes dQ too and accumulates it in global memory.
        stores_first: the tile that comes first to a part of dQ stores it: nobody clears the sums (docs/decisions.md#hopper-ordered-dq).
        dq_first: the product of dQ is issued before that of dK, so that dQ is stored while dK's product runs
            (docs/decisions.md#hopper-d128-queries).
        prefetches: the K and V of the next tile are brought to L2 while a tile is at work (docs/decisions.md#hopper-ahead).
        queued: CTAs take tiles from a queue, as late as they can (docs/decisions.md#hopper-open-heads).
        overlaps: dK and dV leave from where dS and the parts of dQ were, while K and V of the next tile come in
            (docs/decisions.md#hopper-overlapped-tiles).
        counts: tiles that have been added to a head's dQ are counted, so that multiprocessors without a tile round it: the same entry.
        subtracts: in bf16, products subtract the rows' statistics (:mod:`tilewise.backends.hopper.backward.subtrahends`).
        dp_late: dP begins when P is made: S and dP share no registers, dropout is drawn under it (docs/decisions.md#hopper-pair-tiles).
        reads_late: statistics are read, and addresses computed, late: a softcap leaves no registers (docs/decisions.md#hopper-softcap).
        v_register_steps: how many steps of 16 columns of V stay in registers (docs/decisions.md#hopper-shared-memory).
        bias_stages: of a warpgroup's ring of tiles of a bias by pair, tile_m x 64 keys.
        keeps_ds: dS goes to a sheet, of which dQ is made (:mod:`tilewise.backends.hopper.backward.sheet`); split, 64 queries a block.
    """

    width: int
    width_v: int
    tile_m: int
    stages: int
    registers: int = 240
    registers_load: int = 24
    split: bool = False
    sums_dq: bool = False
    stores_first: bool = False
    dq_first: bool = False
    prefetches: bool = False
    queued: bool = False
    overlaps: bool = False
    counts: bool = False
    subtracts: bool = False
    dp_late: bool = False
    v_register_steps: int = 0
    reads_late: bool = False
    bias_stages: int = 0
    halved: bool = False
    keeps_ds: bool = False

    @property
    def name(self) -> str:
        layout = "_split" if self.split else "_overlap" if self.overlaps else ""
        layout += (
            "_halves" * self.halved
            + "_kept" * self.keeps_ds
            + "_queue" * (self.split and self.queued)
            + "_late" * self.reads_late
            + (f"_b{self.bias_stages}" if self.bias_stages else "")
        )
        return f"{self.tile_m}x{self.tile_n}_s{self.stages}{layout}"

    @property
    def dq_transposed(self) -> bool:
        """Whether each warpgroup makes half of the columns of dQ, transposed, so that a block may have any multiple of 16 queries.
        Otherwise a warpgroup makes half of the 128 queries of a block."""
        return self.width == KEY_GROUPS * ROWS

    @property
    def part_elements(self) -> int:
        """The number of elements of a block of dQ that one warpgroup accumulates: a part."""
        return self.tile_m * self.width // KEY_GROUPS

    @property
    def key_tiles(self) -> int:
        """How many tiles of 64 keys a CTA holds."""
        return 1 if self.split else KEY_GROUPS

    @property
    def tile_n(self) -> int:
        return ROWS * self.key_tiles

    @property
    def threads(self) -> int:
        return 128 * (1 + KEY_GROUPS)

    @property
    def tile_elements(self) -> int:
        """Elements of the shared memory of 64 rows of K or V, where 64 rows of dK or dV are put later."""
        return ROWS * max(self.width, self.width_v)

    @property
    def stage_elements(self) -> int:
        return self.tile_m * max(self.width, self.width_v)

    @property
    def barriers(self) -> int:
        """The number of mbarriers: full and empty of every stage; full, empty and done of every tile of K, V and a bias; full and empty
        of the P that is handed over, or of two blocks of dS and of two parts of dQ."""
        handed = 2 + 2 * KEY_GROUPS * self.halved if self.split else 8 if self.sums_dq else 0
        return 2 * self.stages + 6 * self.key_tiles + handed + self.overlaps + 3 * self.bias_tiles

    @property
    def bias_tiles(self) -> int:
        """Tiles of a bias by pair that a CTA has room for."""
        return KEY_GROUPS * self.bias_stages

    @property
    def handover_bytes(self) -> int:
        """Bytes of what one warpgroup hands to another: P; or two blocks of dS of each, and a block of dQ in fp32."""
        # 64 x tile_m of P or dS in the element type, tile_m x width of dQ in fp32.
        p = ELEMENT_BYTES * ROWS * self.tile_m
        dq = FP32_BYTES * self.tile_m * self.width
        if self.split:  # or S and dP in fp32: P takes the place of S; and two blocks of dS on their way to a sheet
            return 4 * p if self.halved else p + 2 * p * self.keeps_ds
        return 2 * KEY_GROUPS * p + dq if self.sums_dq else 0

    @property
    def shared(self) -> int:
        """Bytes of shared memory: barriers, a word that nobody reads, and statistics; K and V; the ring; what is handed over."""
        return shared_with(self, self.stages)


@dataclass(frozen=True)
class QueryTiles(Sharing):
    """Sizes of the pass over query tiles: ``warpgroups`` of 64 queries each by ``tile_n`` keys; otherwise as :class:`KeyTiles`.

    Attributes:
        makes_statistics: this pass comes first and also makes the rows' lse2 and delta, from blocks of O that pass through the ring.
            Otherwise a preprocessing kernel makes them (docs/decisions.md#hopper-queries-first).
        prefetches: the Q and dO of the next tile are brought to L2 while a tile is at work.
    """

    width: int
    width_v: int
    warpgroups: int
    tile_n: int
    stages: int
    registers: int = 240
    registers_load: int = 24
    makes_statistics: bool = False
    prefetches: bool = False
    halved: bool = False
    parts = 1  # of dQ's columns, of which a tile has one

    @property
    def name(self) -> str:
        return f"{self.tile_m}x{self.tile_n}_s{self.stages}"

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def tile_elements(self) -> int:
        """Elements of the shared memory of a warpgroup's tile of Q, where dQ is put later, or of dO."""
        return ROWS * max(self.width, self.width_v)

    @property
    def stage_elements(self) -> int:
        return self.tile_n * max(self.width, self.width_v)

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def barriers(self) -> int:
        """The number of mbarriers: full and empty of every stage; for every warpgroup full and empty of Q and dO, and done of dQ."""
        return 2 * self.stages + (5 if self.halved else 3) * self.warpgroups

    @property
    def shared(self) -> int:
        tiles = 2 * self.warpgroups * self.tile_elements + self.stages * self.stage_elements
        parts = FP32_BYTES * self.tile_m * self.tile_n if self.halved else 0
        return aligned(BARRIER_BYTES * (self.barriers + 1)) + ELEMENT_BYTES * tiles + parts


@dataclass(frozen=True)
class SheetTiles:
    """Sizes of the pass over query tiles where dS was kept: ``warpgroups`` of 64 queries each, and one of ``parts`` of dQ's columns, of
    ``width`` each. A stage of the ring holds dS and K of SHEET_KEYS keys.
    """

    width: int
    stages: int
    # More than 256 columns are more than one accumulator of a wgmma has.
    parts: int = 1
    # A third one would have 160 registers, and its products two halves: slower (docs/tried.md).
    warpgroups: int = 2
    registers: int = 240
    registers_load: int = 24
    ctas, tile_n, makes_statistics, prefetches, halved = 1, SHEET_KEYS, False, False, False

    @property
    def name(self) -> str:
        return f"{self.tile_m}x{self.width}_s{self.stages}_sheet"

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def ds_elements(self) -> int:
        """Elements of a stage's dS, tile_n keys x tile_m queries."""
        return self.tile_n * self.tile_m

    @property
    def k_elements(self) -> int:
        """Elements of a stage's K, tile_n keys x width."""
        return self.tile_n * self.width

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: full and empty of every stage, the slots of packed tiles where those are rounded up, and the ring."""
        # Blocks of dS and K of a stage come together, and one barrier says so.
        elements = self.stages * (self.ds_elements + self.k_elements)
        return aligned(BARRIER_BYTES * 2 * self.stages) + ELEMENT_BYTES * elements

    def blocks(self, seqlen_q, seqlen_k) -> tuple:
        """How many blocks of keys and of queries the sheet of a head has, or of one packed sequence. Kernels trace this."""
        # One copy brings all blocks of a tile, those past the last query too.
        keys, tiles = (seqlen_k + SHEET_KEYS - 1) // SHEET_KEYS, (seqlen_q + self.tile_m - 1) // self.tile_m
        return keys, tiles * self.warpgroups

    def most_blocks(self, seqlen_q: int, seqlen_k: int, sequences: int) -> int:
        """How many blocks a head's sheet of packed sequences has at most, whatever their lengths."""
        # The sum of (k + 63) (q + 127) over sequences, in blocks: nothing is larger than all pairs in one of them.
        more_k, more_q = SHEET_KEYS - 1, self.tile_m - 1
        pairs = seqlen_q * seqlen_k + more_q * seqlen_k + more_k * seqlen_q + sequences * more_q * more_k
        return pairs // SHEET_BLOCK + 1


def left_elements(keys: KeyTiles) -> int:
    """The number of elements of dK and dV that one warpgroup leaves of a part of a tile."""
    return ROWS * (max(keys.width, keys.width_v) if keys.split else keys.width + keys.width_v)


# -- Statistics that products subtract -----------------------------------------------------------------------------


@dataclass(frozen=True)
class StatisticSlots:
    """The place of rows' statistics in the shared memory of a pass over keys with so many stages.

    ``subtracted``: both statistics of a row are one operand of four words, which comes with Q; otherwise each is a number, beside Q or dO.
    """

    stages: int
    subtracted: bool

    @property
    def words(self) -> int:
        """Words of 4 bytes of a row, in a slot as in the buffer of lse2."""
        # Eight elements: three terms of each statistic and a zero after them.
        return 4 if self.subtracted else 1

    @property
    def halved(self) -> bool:
        """Whether a slot serves a stage of Q and the stage of dO after it: Q is then always in an even one."""
        return self.subtracted and self.stages % 2 == 0

    @property
    def count(self) -> int:
        """How many slots there are."""
        return self.stages // 2 if self.halved else self.stages

    def slot(self, stage):
        """The slot of the block whose Q is in a stage."""
        return stage // 2 if self.halved else stage


def shared_of(tiles: KeyTiles, statistics: StatisticSlots) -> int:
    """Bytes of shared memory of the pass over keys."""
    if not statistics.subtracted:
        return tiles.shared
    # The rows of B that all slots hold, and the one A that all products of S share.
    return shared_with(tiles, statistics.count * statistics.words, CONSTANT_BYTES)


def shared_with(tiles: KeyTiles, words: int, more: int = 0) -> int:
    """:attr:`KeyTiles.shared` with so many words of statistics for each query of a block, and ``more`` bytes beside them."""
    # K and V, the ring, and those of a bias; tiles are swizzled, so that what lies before them is rounded up.
    elements = 2 * tiles.key_tiles * tiles.tile_elements + tiles.stages * tiles.stage_elements
    elements += tiles.bias_tiles * ROWS * tiles.tile_m
    small = aligned(statistics_end(tiles.barriers, words, tiles.tile_m) + more)
    return small + ELEMENT_BYTES * elements + tiles.handover_bytes


def v_register_steps(tiles: KeyTiles, statistics: StatisticSlots, packed: bool, dbias: bool) -> int:
    """:attr:`KeyTiles.v_register_steps`, as far as registers last: computing warps use 236 to 238 of 240."""
    if statistics.subtracted:
        # The constant that products subtract by takes four, statistics none.
        return 0 if tiles.dq_transposed else tiles.v_register_steps
    # The numbers of a sequence take registers, too, and a thread's part of a bias' gradient takes more.
    return min(tiles.v_register_steps, 2 if dbias else 3 if packed else tiles.v_register_steps)
