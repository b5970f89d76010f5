"""Tile sizes of Hopper's forward kernels: what they take of registers, barriers and shared memory, and TABLE, the one table of them.

It imports no DSL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewise.backends.hopper.config import ALIGNMENT, ELEMENT_BYTES, ORDERED_KEYS, PLAIN, ROWS, Traced

# -- Sizes of a kernel ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedMemory:
    """The bytes of a CTA's shared memory, in the order in which they lie.

    ``barriers`` and a word that nobody reads come first. Then, each at a multiple of ALIGNMENT, the tiles of Q, whose place O
    takes later, the ring of K and V, and the rings of a bias by pair.
    """

    barriers: int
    q: int
    ring: int
    pairs: int = 0

    @property
    def total(self) -> int:
        """The size of all, with the gaps between."""
        return sum(-(-part // ALIGNMENT) * ALIGNMENT for part in (self.barriers, self.q)) + self.ring + self.pairs


@dataclass(frozen=True)
class Tiles:
    """The sizes of a forward kernel: ``warpgroups`` of ``ROWS`` queries each by ``tile_n`` keys.

    Attributes:
        width, width_v: head dims that the kernel is compiled for; smaller ones are filled with zeros as they are loaded.
        stages: of the ring; each holds a block of K or of V, or one of its parts.
        q_stages: how many tiles of Q a warpgroup has. With two, the next Q is loaded while O of one tile leaves through the other's
            place. With one, O leaves from registers, and the next Q is loaded as soon as the last scores are there
            (docs/decisions.md#hopper-o-from-registers).
        registers, registers_load: of a thread that computes, and of one that loads or stores.
        lazy: O is rescaled only where a row's maximum has grown by more than ``softmax.lazy_of`` (docs/decisions.md#hopper-lazy-rescale).
        pingpong: the warpgroups begin their products one after the other, so that one's softmax runs under another's products
            (docs/decisions.md#hopper-ping-pong).
        steady: whole blocks but the first are computed with the row maxima of the blocks before, and once more with their own where their
            sums say that the maxima fell behind (docs/decisions.md#hopper-steady-maxima).
        bias_stages: of a warpgroup's ring of tiles of a bias by pair, 64 × tile_n.
        pieces: into how many pieces O's columns are cut where they do not fit registers; a tile computes one, and its scores anew
            (docs/decisions.md#hopper-wide-heads).
        k_stages, v_stages: stages that a block takes: of K so many columns each, of V so many keys.
        element_bytes: of an element of q, k, v and o, and of such a bias.
        segment: blocks of a segment of keys (:mod:`tilewise.backends.hopper.forward.segments`); 0: all keys are one.
    """

    width: int
    width_v: int
    warpgroups: int
    tile_n: int
    stages: int
    q_stages: int
    registers: int
    registers_load: int = 24
    lazy: bool = True
    pingpong: bool = False
    steady: bool = False
    bias_stages: int = 0
    pieces: int = 1
    k_stages: int = 1
    v_stages: int = 1
    element_bytes: int = ELEMENT_BYTES
    segment: int = 0

    @property
    def name(self) -> str:
        """The part of a kernel's name that tells these sizes."""
        flags = "_eager" * (not self.lazy) + "_turns" * self.pingpong + "_steady" * self.steady
        flags += f"_segments{self.segment}" * bool(self.segment) + f"_b{self.bias_stages}" * bool(self.bias_stages)
        flags += f"_k{self.k_stages}v{self.v_stages}" if self.staged else ""
        return f"{self.tile_m}x{self.tile_n}_s{self.stages}q{self.q_stages}{flags}"

    @property
    def tile_m(self) -> int:
        """Rows of a CTA's tile."""
        return ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA: one warpgroup loads and stores, the others compute."""
        return 128 * (self.warpgroups + 1)

    @property
    def width_o(self) -> int:
        """Columns of V and O that a tile computes."""
        return self.width_v // self.pieces

    @property
    def staged(self) -> bool:
        """Whether a block of K or V takes several stages."""
        return self.k_stages > 1 or self.v_stages > 1

    @property
    def k_box(self) -> tuple[int, int]:
        """Keys and columns of K that one stage holds."""
        return self.tile_n, self.width // self.k_stages

    @property
    def v_box(self) -> tuple[int, int]:
        """Columns and keys of V that one stage holds."""
        return self.width_o, self.tile_n // self.v_stages

    @property
    def q_tiles(self) -> int:
        """Tiles of Q that a CTA has room for."""
        return self.warpgroups * self.q_stages

    @property
    def q_elements(self) -> int:
        """Elements of one warpgroup's tile of Q or O."""
        return ROWS * max(self.width, self.width_o)

    @property
    def stage_elements(self) -> int:
        """Elements of one stage of the ring."""
        return max(math.prod(self.k_box), math.prod(self.v_box))

    @property
    def bias_tiles(self) -> int:
        """Tiles of a bias by pair that a CTA has room for."""
        return self.warpgroups * self.bias_stages

    @property
    def barriers(self) -> int:
        """How many mbarriers there are: full and empty of every stage; full and empty of every tile of Q, and full of its O; full and empty
        of every tile of a bias."""
        return 2 * self.stages + 3 * self.q_tiles + 2 * self.bias_tiles

    @property
    def shared(self) -> SharedMemory:
        """The shared memory that the kernel allocates."""
        q, stage = (self.element_bytes * n for n in (self.q_elements, self.stage_elements))
        pairs = self.element_bytes * self.bias_tiles * ROWS * self.tile_n
        return SharedMemory(8 * (self.barriers + 1), self.q_tiles * q, self.stages * stage, pairs)

    def describe(self) -> str:
        """The sizes in a sentence, as ``explain`` shows it."""
        blocks = "stages of blocks" if self.staged else "blocks"
        return (
            f"{self.tile_m} x {self.tile_n}, {self.warpgroups} warpgroups compute and one loads, "
            f"{self.stages} {blocks} of K or V in flight, {self.shared.total >> 10} KiB shared"
            + (f", O in {self.pieces} pieces of its columns" if self.pieces > 1 else "")
        )


# -- The table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileRow:
    """The tiles for one pair of head dims; docs/decisions.md#hopper-forward-tiles.

    Attributes:
        full: for rows that see all keys.
        ends: for rows that begin or end at some key.
        traced: where a thread has more to remember beside its scores.
        reading: where a pair reads more than one tensor element.
        short: one warpgroup for few queries; None: the tiles of the next row that has some, if any.
        fewer: tiles beside ``full`` that short sequences may get.
        fewer_ends: tiles beside ``ends`` that short sequences may get.
        bits: for bits of tiles of 128 x 128; None: the tiles of the next row that has some.
        narrow_bits: beside ``bits``, for patterns of blocks of 64 keys, of which tiles of 128 would hold several.
        dropout: with dropout and no score; None: the tiles of a next row that has some, else ``traced``.
        alibi: with ALiBi whose bias is linear, or a line of biases; None: the tiles of a next row that has some, else none does.
        bias: with a bias by pair; None: the tiles of a next row that has some, else none does.
        softcap: whether these head dims are shipped with a softcap, and with split keys; others take the next row that is.
        candidates: what else is worth a measurement, for "full" and "upper" in bf16.
    """

    full: Tiles
    ends: Tiles
    traced: Tiles
    reading: Tiles
    short: Tiles | None = None
    fewer: tuple[Tiles, ...] = ()
    fewer_ends: tuple[Tiles, ...] = ()
    bits: Tiles | None = None
    narrow_bits: Tiles | None = None
    dropout: Tiles | None = None
    alibi: Tiles | None = None
    bias: Tiles | None = None
    softcap: bool = False
    candidates: tuple[Tiles, ...] = ()

    @property
    def columns(self) -> tuple[Tiles, ...]:
        """Every tile of the row that a call may get."""
        more = (*self.of_bits, self.dropout, self.alibi, self.bias, self.short)
        given = (tiles for tiles in more if tiles is not None)
        return (self.full, self.ends, self.traced, self.reading, *given, *self.fewer, *self.fewer_ends)

    @property
    def of_bits(self) -> tuple[Tiles, ...]:
        """The tiles whose pairs have bits."""
        return tuple(tiles for tiles in (self.bits, self.narrow_bits) if tiles is not None)

    def biased(self, score: str) -> Tiles | None:
        """The tiles with a score of SCORES that reads a bias."""
        return self.bias if score == "bias" else self.alibi

    def of_form(self, form: str, softcap: bool = False, traced: Traced = PLAIN, dropout: bool = False) -> Tiles:
        """The tiles of a kernel of this form."""
        # A softcap beside two ends of a row is too much for the registers that three warpgroups leave (docs/decisions.md#hopper-softcap).
        tight = softcap and form in ("band", "rows") and self.ends.warpgroups > 2
        # So is dropout, which has tiles of its own; beside anything that is traced its words take the registers of fewer keys.
        if traced == PLAIN and self.dropout and ((dropout and not softcap) or (tight and not dropout)):
            return self.dropout
        more = traced.reads + dropout
        # What a pair reads waits for memory: more keys in a tile would only hold more registers meanwhile.
        if more > 1:
            return self.reading
        if traced != PLAIN or tight or dropout:
            return self.traced
        return self.full if form == "full" else self.ends


# Two tiles of Q where they fit: the next tile's Q comes while this one is computed, and O leaves through the one that is done with.
_D64_192 = Tiles(64, 64, warpgroups=3, tile_n=128, stages=8, q_stages=2, registers=160, pingpong=True, steady=True)
_D64_128 = Tiles(64, 64, warpgroups=2, tile_n=128, stages=8, q_stages=2, registers=240, pingpong=True, steady=True)
_D96 = Tiles(96, 96, warpgroups=2, tile_n=128, stages=7, q_stages=2, registers=240, steady=True)
_D128 = Tiles(128, 128, warpgroups=2, tile_n=128, stages=5, q_stages=2, registers=240, pingpong=True, steady=True)
# Beyond 128 columns accumulators leave no registers for keys of 128 in S, nor shared memory for a second Q.
_D192V128 = Tiles(192, 128, warpgroups=2, tile_n=112, stages=4, q_stages=1, registers=240)
_D192 = Tiles(192, 192, warpgroups=2, tile_n=112, stages=4, q_stages=1, registers=240)
# A tile of Q takes half of shared memory; K and V come past it in parts of 16 KiB.
_D512 = Tiles(512, 512, warpgroups=2, tile_n=64, stages=6, q_stages=1, registers=240, pieces=2, k_stages=4, v_stages=2)
_D256_80 = Tiles(256, 256, warpgroups=2, tile_n=80, stages=4, q_stages=1, registers=240, pingpong=True)
_D256_64 = Tiles(256, 256, warpgroups=2, tile_n=64, stages=5, q_stages=1, registers=240, pingpong=True)

# Keys that queries selected, by head dim and by the heads that a tile holds: a warpgroup gathers rows, and needs registers for their
# addresses. O leaves from registers.
SELECTED_TILES = {
    (width, ROWS * n): Tiles(
        width, width, n, 128, stages=6, q_stages=1, registers=registers, registers_load=72, pingpong=n > 1
    )
    for width in (64, 128)
    for n, registers in ((1, 240), (2, 216))
}
# (head dim of q and k, of v) -> tiles; a call takes the first row that holds both of its head dims.
TABLE = {
    (64, 64): TileRow(
        full=_D64_192,
        ends=_D64_192,
        traced=Tiles(64, 64, warpgroups=2, tile_n=96, stages=10, q_stages=2, registers=240),
        reading=Tiles(64, 64, warpgroups=2, tile_n=64, stages=12, q_stages=2, registers=240),
        # One computing warpgroup may have all that a thread can name.
        short=Tiles(64, 64, warpgroups=1, tile_n=128, stages=8, q_stages=2, registers=256),
        fewer=(_D64_128,),
        fewer_ends=(_D64_128,),
        bits=_D64_128,
        dropout=_D64_128,
        alibi=_D64_192,
        # A block's bias is as large as its K and V: three of each in flight, of two warpgroups, fill shared memory.
        bias=replace(_D64_128, stages=6, bias_stages=3),
        softcap=True,
        candidates=(replace(_D64_192, pingpong=False), _D64_128, replace(_D64_128, pingpong=False)),
    ),
    (96, 96): TileRow(
        full=_D96,
        ends=_D96,
        traced=Tiles(96, 96, warpgroups=2, tile_n=96, stages=8, q_stages=2, registers=240),
        reading=Tiles(96, 96, warpgroups=2, tile_n=64, stages=12, q_stages=2, registers=240),
        candidates=(replace(_D96, pingpong=True),),
    ),
    (128, 128): TileRow(
        full=_D128,
        ends=_D128,
        traced=Tiles(128, 128, warpgroups=2, tile_n=80, stages=8, q_stages=2, registers=240),
        reading=Tiles(128, 128, warpgroups=2, tile_n=64, stages=9, q_stages=2, registers=240),
        short=Tiles(128, 128, warpgroups=1, tile_n=128, stages=5, q_stages=2, registers=256),
        bits=_D128,
        narrow_bits=replace(_D128, tile_n=64, stages=10),
        dropout=_D128,
        alibi=_D128,
        # With a second Q there would be room for one bias in flight.
        bias=replace(_D128, stages=4, q_stages=1, bias_stages=2),
        softcap=True,
        candidates=(
            replace(_D128, pingpong=False),
            Tiles(128, 128, warpgroups=2, tile_n=64, stages=9, q_stages=2, registers=240, steady=True),
        ),
    ),
    # Head dims of latent attention's prompts.
    (192, 128): TileRow(
        full=_D192V128,
        ends=_D192V128,
        traced=Tiles(192, 128, warpgroups=2, tile_n=80, stages=5, q_stages=1, registers=240),
        reading=Tiles(192, 128, warpgroups=2, tile_n=64, stages=7, q_stages=1, registers=240),
        short=Tiles(192, 128, warpgroups=1, tile_n=128, stages=4, q_stages=1, registers=256),
    ),
    (192, 192): TileRow(
        full=_D192,
        ends=replace(_D192, tile_n=96),
        traced=Tiles(192, 192, warpgroups=2, tile_n=64, stages=7, q_stages=1, registers=240),
        reading=Tiles(192, 192, warpgroups=2, tile_n=32, stages=12, q_stages=1, registers=240),
        candidates=(replace(_D192, tile_n=96, pingpong=True),),
    ),
    (256, 256): TileRow(
        full=_D256_80,
        ends=_D256_64,
        traced=Tiles(256, 256, warpgroups=2, tile_n=48, stages=6, q_stages=1, registers=240),
        reading=Tiles(256, 256, warpgroups=2, tile_n=32, stages=10, q_stages=1, registers=240),
        short=Tiles(256, 256, warpgroups=1, tile_n=80, stages=4, q_stages=1, registers=256),
        fewer=(_D256_64,),
        softcap=True,
        candidates=tuple(replace(t, pingpong=pingpong) for t in (_D256_80, _D256_64) for pingpong in (True, False)),
    ),
    (512, 512): TileRow(
        full=_D512,
        ends=_D512,
        traced=_D512,
        reading=_D512,
        candidates=(replace(_D512, pingpong=True),),
    ),
}  # fmt: skip
MAX_HEAD_DIM = max(max(dims) for dims in TABLE)
# (head dim, rows that one box brings) -> tiles over pages: few rows, since chunks of a prompt are short, and for small pages
# registers for a loading warp that has many boxes (docs/decisions.md#hopper-pages).
PAGED_TILES = {(t.width, 64): t for t in (_D64_128, _D128, _D256_64)}
PAGED_TILES |= {(d, 16): replace(t, registers=232, registers_load=40) for (d, _), t in PAGED_TILES.items()}
# Of dense and packed calls that are deterministic everywhere.
ONE_ORDER_TILES = (_D64_192, _D128, _D256_64)
WIDEST_JOINED = 128  # head dim of calls that are deterministic everywhere whose keys are segments (docs/decisions.md#hopper-one-order)
PAGE_ROWS = (64, 16)  # of a page that one box brings; a call gets the first that divides the size of its pages


def one_order(tiles: Tiles, form: str = "upper") -> Tiles:
    """The same sizes where a row's numbers follow from its own scores alone (docs/algorithm.md#one-order): a lazy maximum is the row's own,
    and a steady block has the bits of one with maxima of its own. Keys are joined segment by segment, as decoding has them: beside ends
    of rows three warpgroups have no registers for that, and beside O of 256 columns two have none."""
    tiles = _D64_128 if form == "rows" and tiles.warpgroups > 2 else tiles
    return replace(tiles, segment=ORDERED_KEYS // tiles.tile_n) if tiles.width <= WIDEST_JOINED else tiles


def tiles_of_one_order(head_dim: int, head_dim_v: int) -> Tiles | None:
    """The first of ONE_ORDER_TILES that hold both head dims."""
    return next((x for x in ONE_ORDER_TILES if max(head_dim, head_dim_v) <= x.width), None)


def rows_for(head_dim: int, head_dim_v: int) -> Iterator[TileRow]:
    """The rows of TABLE that hold both head dims, the first one first."""
    return (row for dims, row in TABLE.items() if head_dim <= dims[0] and head_dim_v <= dims[1])


def row_of(tiles: Tiles) -> TileRow:
    """The row of TABLE that tiles belong to."""
    return TABLE[tiles.width, tiles.width_v]


def short(tiles: Tiles) -> Tiles | None:
    """The tiles of one warpgroup for the same head dims, if there are some."""
    return next((row.short for row in rows_for(tiles.width, tiles.width_v) if row.short is not None), None)
