"""The forward kernels on Hopper: their tiles, registers and shared memory, which ones are shipped, and which one a call gets.

Nothing here imports the DSL: it runs on any machine. TABLE is the one table of tile sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from tilewise import device as devices
from tilewise.backends.hopper.config import (
    ALIGNMENT,
    DROPPED,
    DTYPES,
    ELEMENT_BYTES,
    PLAIN,
    ROWS,
    SHIPPED,
    Expressions,
    Formed,
    Traced,
    keys_of,
    slopes_of,
    why_no_bits,
)
from tilewise.backends.hopper.expected import Expected
from tilewise.backends.hopper.tables import FORMS as LINED
from tilewise.backends.hopper.tables import line_of
from tilewise.problem import Problem

# -- Sizes of a kernel ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedMemory:
    """The bytes of a CTA's shared memory, in the order in which they lie.

    ``barriers`` and a word that nobody reads come first. Then, each at a multiple of ALIGNMENT, the tiles of Q, whose place O
    takes later, and the ring of K and V.
    """

    barriers: int
    q: int
    ring: int

    @property
    def total(self) -> int:
        """The size of all, with the gaps between."""
        return sum(-(-part // ALIGNMENT) * ALIGNMENT for part in (self.barriers, self.q)) + self.ring


@dataclass(frozen=True)
class Tiles:
    """The sizes of a forward kernel: ``warpgroups`` of ``ROWS`` queries each by ``tile_n`` keys.

    Attributes:
        width, width_v: head dims that the kernel is compiled for; smaller ones are filled with zeros as they are loaded.
        stages: of the ring; each holds a block of K or of V.
        q_stages: how many tiles of Q a warpgroup has. With two, the next Q is loaded while O of one tile leaves through the
            other's place. With one, O leaves from registers, and the next Q is loaded as soon as the last scores are there
            (docs/decisions.md#hopper-o-from-registers).
        registers, registers_load: of a thread that computes, and of one that loads or stores.
        lazy: O is rescaled only where a row's maximum has grown by more than ``softmax.LAZY``
            (docs/decisions.md#hopper-lazy-rescale).
        pingpong: the warpgroups begin their products one after the other, so that one's softmax runs under another's products
            (docs/decisions.md#hopper-ping-pong).
        steady: whole blocks but the first are computed with the row maxima of the blocks before, and once more with their own
            where their sums say that the maxima fell behind (docs/decisions.md#hopper-steady-maxima).
        element_bytes: of an element of q, k, v and o.
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
    element_bytes: int = ELEMENT_BYTES

    @property
    def name(self) -> str:
        """The part of a kernel's name that tells these sizes."""
        flags = ("" if self.lazy else "_eager") + ("_turns" if self.pingpong else "")
        flags += "_steady" if self.steady else ""
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
    def q_tiles(self) -> int:
        """Tiles of Q that a CTA has room for."""
        return self.warpgroups * self.q_stages

    @property
    def q_elements(self) -> int:
        """Elements of one warpgroup's tile of Q or O."""
        return ROWS * max(self.width, self.width_v)

    @property
    def stage_elements(self) -> int:
        """Elements of one stage of the ring."""
        return self.tile_n * max(self.width, self.width_v)

    @property
    def barriers(self) -> int:
        """How many mbarriers there are: full and empty of every stage; full and empty of every tile of Q, and full of its O."""
        return 2 * self.stages + 3 * self.q_tiles

    @property
    def shared(self) -> SharedMemory:
        """The shared memory that the kernel allocates."""
        q, stage = (self.element_bytes * n for n in (self.q_elements, self.stage_elements))
        return SharedMemory(8 * (self.barriers + 1), self.q_tiles * q, self.stages * stage)


@dataclass(frozen=True)
class Config(Formed):
    """The compile-time facts of one forward kernel.

    Attributes:
        dtype, form: one of DTYPES, and one of FORMS.
        split: the keys of a query tile are shared out among splits, whose states a second kernel merges.
        heads: how many query heads of a group a tile holds side by side, so that its keys serve them all; divides ROWS.
        packed: sequences are packed; such a kernel neither splits keys nor holds heads side by side.
        paged: how many rows of a page a box of TMA brings, where keys lie in pages (and sequences are packed); 0: they do not.
        traced: the expressions of this call alone: such a kernel is compiled at the first call.
        dropout: some pairs are dropped.
        alibi: ALiBi's bias is added, linear in the key (:mod:`tilewise.backends.hopper.kit.slopes`).
        table: a bias is added that a line has by distance (:mod:`tilewise.backends.hopper.kit.lines`).
    """

    tiles: Tiles
    dtype: str
    form: str
    softcap: bool = False
    split: bool = False
    heads: int = 1
    packed: bool = False
    traced: Traced = PLAIN
    dropout: bool = False
    paged: int = 0
    alibi: bool = False
    table: bool = False

    @property
    def queries(self) -> int:
        """Queries of one warpgroup's tile."""
        return ROWS // self.heads

    @property
    def tile_queries(self) -> int:
        """Queries of a CTA's tile."""
        return self.queries * self.tiles.warpgroups

    @property
    def extra(self) -> tuple[str, ...]:
        """The fields of :class:`tilewise.backends.hopper.kit.params.OptionalParams` that a launch of this kernel gets, in order."""
        found = (("part_o", "part_lse") if self.split else ()) + self.mask_fields
        found += ("seed", "threshold", "keep") if self.dropout else ()
        found += ("slopes",) if self.alibi else ()
        found += ("line", "start") if self.table else ()
        if self.paged:
            return (*found, "cu_q", "queue", "seqlens_k", "block_table", "num_pages", "page_rows")
        found += ("cu_q", "cu_k", "first", "last") if self.packed else ()
        return found + (("queue",) if self.queued else ())

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The facts that the compiled kernel is held to; the kernel that merges splits has no roles."""
        registers = self.tiles.registers, self.tiles.registers_load
        return (Expected(self.name, registers, self.tiles.shared.total, self.tiles.tile_n // 2, stores=self.stores),)

    @property
    def softcap_columns(self) -> int:
        """Columns of a thread that decide together how a softcap's tanh is computed; three warpgroups have registers for few."""
        return 8 if self.tiles.warpgroups == 3 else 16

    @property
    def stores(self) -> bool:
        """Whether O goes through shared memory, from where TMA stores it."""
        return self.tiles.q_stages > 1 and not self.split

    @property
    def queued(self) -> bool:
        """Whether CTAs take tiles from a queue, since these differ too much to be dealt out by number."""
        return self.packed or self.form == "bits"

    @property
    def steady(self) -> bool:
        """Whether whole blocks do without their maxima; a traced score may hide what no mask does."""
        return self.tiles.steady and self.traced == PLAIN

    @property
    def short_tanh(self) -> bool:
        """Whether whole blocks take a softcap's scores to be as small as those before were (docs/decisions.md#hopper-softcap): at a head
        dim of 128 two warps of a scheduler hide less of what a long block waits for."""
        return self.steady and self.softcap and self.tiles.width == 64

    @property
    def skips(self) -> bool:
        """Whether a warpgroup may see nothing of a block that another one of its CTA sees, since rows end one after the other
        (docs/decisions.md#hopper-skipped-blocks)."""
        several = self.tiles.warpgroups > 1 and self.tile_queries > self.tiles.tile_n
        return several and self.has_upper and not self.listed

    @property
    def name(self) -> str:
        """The kernel's name: its symbol in the cubin, and its file."""
        tiles = self.tiles
        dims = f"d{tiles.width}" + (f"v{tiles.width_v}" if tiles.width_v != tiles.width else "")
        flags = "".join(f"_{name}" for name in ("softcap", "dropout", "alibi", "table", "split") if getattr(self, name))
        flags += f"_paged{self.paged}" if self.paged else "_packed" if self.packed else ""
        flags += f"_heads{self.heads}" if self.heads > 1 else ""
        traced = "" if self.traced == PLAIN else f"_{self.traced.digest}"
        return f"forward_{self.dtype}_{dims}_{self.form}{flags}{traced}_{tiles.name}"

    def describe(self) -> str:
        """The kernel in a sentence, as ``explain`` shows it."""
        tiles = self.tiles
        extra = f", {self.heads} heads of a group in a tile" if self.heads > 1 else ""
        extra += ", keys split" if self.split else ""
        extra += {"lists": ", pairs judged one by one", "bits": ", a bit for each pair"}.get(self.form, "")
        return (
            f"{tiles.tile_m} x {tiles.tile_n}, {tiles.warpgroups} warpgroups compute and one loads, "
            f"{tiles.stages} blocks of K or V in flight, {tiles.shared.total >> 10} KiB shared{extra}"
        )

    def traffic(self, problem: Problem) -> int:
        """Bytes of the forward: Q and O once, K and V once per query tile (an upper bound under a mask)."""
        heads = problem.heads_k * -(-problem.group // self.heads)
        keys = heads * -(-problem.seqlen_q // self.tile_queries) * problem.seqlen_k
        rows = problem.batch * (problem.heads_q * problem.seqlen_q + keys)
        return problem.dtype.itemsize * rows * (problem.head_dim + problem.head_dim_v)


# -- The table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileRow:
    """The tiles for one pair of head dims; docs/decisions.md#hopper-forward-tiles.

    Attributes:
        full: for rows that see all keys.
        ends: for rows that begin or end at some key.
        traced: where a thread has more to remember beside its scores.
        listed: where a pair reads more than one tensor element, and for lists of key blocks. The blocks of a pattern, of 64 or
            128 keys, are then whole ones; wider blocks would cover two and be visited for either
            (docs/decisions.md#hopper-list-tiles).
        short: one warpgroup for few queries, alone or with heads side by side; None: the tiles of the next row that has some.
        fewer: tiles beside ``full`` that short sequences may get.
        fewer_ends: tiles beside ``ends`` that short sequences may get.
        bits: for lists and bits of tiles of 128 x 128; None: the tiles of the next row that has some.
        dropout: with dropout and neither a score nor a predicate; None: the tiles of a next row that has some, else ``traced``.
        alibi: with ALiBi whose bias is linear, or a line of biases; None: the tiles of a next row that has some, else none does.
        softcap: whether these head dims are shipped with a softcap, and with split keys; others take the next row that is.
        candidates: what else is worth a measurement, for "full" and "upper" in bf16.
    """

    full: Tiles
    ends: Tiles
    traced: Tiles
    listed: Tiles
    short: Tiles | None = None
    fewer: tuple[Tiles, ...] = ()
    fewer_ends: tuple[Tiles, ...] = ()
    bits: Tiles | None = None
    dropout: Tiles | None = None
    alibi: Tiles | None = None
    softcap: bool = False
    candidates: tuple[Tiles, ...] = ()

    @property
    def columns(self) -> tuple[Tiles, ...]:
        """Every tile of the row that a call may get."""
        more = (tiles for tiles in (self.bits, self.dropout, self.alibi, self.short) if tiles is not None)
        return (self.full, self.ends, self.traced, self.listed, *more, *self.fewer, *self.fewer_ends)

    def of_form(self, form: str, softcap: bool = False, traced: Traced = PLAIN, dropout: bool = False) -> Tiles:
        """The tiles of a kernel of this form."""
        if dropout and self.dropout and not softcap and traced == PLAIN:
            return self.dropout
        more = traced.reads + dropout
        # A softcap beside two ends of a row is too much for the registers that three warpgroups leave each other.
        tight = softcap and form in ("band", "rows") and self.ends.warpgroups > 2
        if more > 1 or form == "lists":
            return self.listed
        if traced != PLAIN or tight or dropout:
            return self.traced
        return self.full if form == "full" else self.ends


_D64_192 = Tiles(64, 64, warpgroups=3, tile_n=128, stages=8, q_stages=2, registers=160, pingpong=True, steady=True)
_D64_128 = Tiles(64, 64, warpgroups=2, tile_n=128, stages=8, q_stages=2, registers=240, pingpong=True, steady=True)
_D96 = Tiles(96, 96, warpgroups=2, tile_n=128, stages=7, q_stages=2, registers=240, steady=True)
_D128 = Tiles(128, 128, warpgroups=2, tile_n=128, stages=5, q_stages=2, registers=240, pingpong=True, steady=True)
_D192V128 = Tiles(192, 128, warpgroups=2, tile_n=112, stages=4, q_stages=1, registers=240)
_D192 = Tiles(192, 192, warpgroups=2, tile_n=112, stages=4, q_stages=1, registers=240)
_D256_80 = Tiles(256, 256, warpgroups=2, tile_n=80, stages=4, q_stages=1, registers=240, pingpong=True)
_D256_64 = Tiles(256, 256, warpgroups=2, tile_n=64, stages=5, q_stages=1, registers=240, pingpong=True)

# (head dim of q and k, of v) -> tiles; a call takes the first row that holds both of its head dims.
TABLE = {
    (64, 64): TileRow(
        full=_D64_192,
        ends=_D64_192,
        traced=Tiles(64, 64, warpgroups=2, tile_n=96, stages=10, q_stages=2, registers=240),
        listed=Tiles(64, 64, warpgroups=2, tile_n=64, stages=12, q_stages=2, registers=240),
        short=Tiles(64, 64, warpgroups=1, tile_n=128, stages=8, q_stages=2, registers=256),
        fewer=(_D64_128,),
        fewer_ends=(_D64_128,),
        bits=_D64_128,
        dropout=_D64_128,
        alibi=_D64_192,
        softcap=True,
        candidates=(replace(_D64_192, pingpong=False), _D64_128, replace(_D64_128, pingpong=False)),
    ),
    (96, 96): TileRow(
        full=_D96,
        ends=_D96,
        traced=Tiles(96, 96, warpgroups=2, tile_n=96, stages=8, q_stages=2, registers=240),
        listed=Tiles(96, 96, warpgroups=2, tile_n=64, stages=12, q_stages=2, registers=240),
        candidates=(replace(_D96, pingpong=True),),
    ),
    (128, 128): TileRow(
        full=_D128,
        ends=_D128,
        traced=Tiles(128, 128, warpgroups=2, tile_n=80, stages=8, q_stages=2, registers=240),
        listed=Tiles(128, 128, warpgroups=2, tile_n=64, stages=9, q_stages=2, registers=240),
        short=Tiles(128, 128, warpgroups=1, tile_n=128, stages=5, q_stages=2, registers=256),
        bits=_D128,
        dropout=_D128,
        alibi=_D128,
        softcap=True,
        candidates=(
            replace(_D128, pingpong=False),
            Tiles(128, 128, warpgroups=2, tile_n=64, stages=9, q_stages=2, registers=240, steady=True),
        ),
    ),
    (192, 128): TileRow(
        full=_D192V128,
        ends=_D192V128,
        traced=Tiles(192, 128, warpgroups=2, tile_n=80, stages=5, q_stages=1, registers=240),
        listed=Tiles(192, 128, warpgroups=2, tile_n=64, stages=7, q_stages=1, registers=240),
        short=Tiles(192, 128, warpgroups=1, tile_n=128, stages=4, q_stages=1, registers=256),
    ),
    (192, 192): TileRow(
        full=_D192,
        ends=replace(_D192, tile_n=96),
        traced=Tiles(192, 192, warpgroups=2, tile_n=64, stages=7, q_stages=1, registers=240),
        listed=Tiles(192, 192, warpgroups=2, tile_n=32, stages=12, q_stages=1, registers=240),
        candidates=(replace(_D192, tile_n=96, pingpong=True),),
    ),
    (256, 256): TileRow(
        full=_D256_80,
        ends=_D256_64,
        traced=Tiles(256, 256, warpgroups=2, tile_n=48, stages=6, q_stages=1, registers=240),
        listed=Tiles(256, 256, warpgroups=2, tile_n=32, stages=10, q_stages=1, registers=240),
        short=Tiles(256, 256, warpgroups=1, tile_n=80, stages=4, q_stages=1, registers=256),
        fewer=(_D256_64,),
        softcap=True,
        candidates=tuple(replace(t, pingpong=pingpong) for t in (_D256_80, _D256_64) for pingpong in (True, False)),
    ),
}  # fmt: skip
MAX_HEAD_DIM = max(max(dims) for dims in TABLE)
# (head dim, rows that one box brings) -> tiles over pages: few rows, since chunks of a prompt are short, and for small pages
# registers for a loading warp that has many boxes (docs/decisions.md#hopper-pages).
PAGED_TILES = {(t.width, 64): t for t in (_D64_128, _D128)}
PAGED_TILES |= {(d, 16): replace(t, registers=232, registers_load=40) for (d, _), t in PAGED_TILES.items()}
PAGE_ROWS = (64, 16)  # of a page that one box brings; a call gets the first that divides the size of its pages
# How many heads of a group a tile may hold where queries are few (docs/decisions.md#hopper-shared-tiles).
HEADS = (8, 64)


def rows_for(head_dim: int, head_dim_v: int) -> Iterator[TileRow]:
    """The rows of TABLE that hold both head dims, the first one first."""
    return (row for dims, row in TABLE.items() if head_dim <= dims[0] and head_dim_v <= dims[1])


# -- What is shipped -----------------------------------------------------------------------------------------------


def shipped() -> list[Config]:
    """Every kernel that is compiled ahead of time."""
    kinds = [(dtype, form) for dtype in DTYPES.values() for form in SHIPPED]
    # Every form of every head dim and dtype; then, of forms whose ends are numbers, what short or packed calls want.
    plain = [Config(row.of_form(form), dtype, form) for row in TABLE.values() for dtype, form in kinds]
    capped = [
        Config(row.of_form(form, softcap=True), dtype, form, softcap=True)
        for row in TABLE.values()
        if row.softcap
        for dtype, form in kinds
    ]
    whole = plain + capped
    ends = [c for c in whole if c.of_numbers]
    split = [replace(c, split=True) for c in ends if row_of(c.tiles).softcap and not c.softcap]
    packed = [replace(c, packed=True) for c in ends]
    ended = [kind for kind in kinds if kind[1] in ("upper", "band")]
    paged = [Config(t, *kind, packed=True, paged=n) for (_, n), t in PAGED_TILES.items() for kind in ended]
    few = [other for c in ends if c.form != "band" for other in (*smaller(c), *grouped(c))]
    both = [replace(c, split=split) for c in few if not c.softcap or c.heads == HEADS[0] for split in (False, True)]
    bits = [Config(row.bits, dtype, "bits") for row in TABLE.values() if row.bits for dtype in DTYPES.values()]
    trained = [(row, *kind) for row in TABLE.values() if row.dropout for kind in kinds]
    dropped = [Config(row.dropout, dtype, form, dropout=True) for row, dtype, form in trained if form in DROPPED]
    packed += [replace(c, packed=True) for c in dropped if c.form == "upper"]
    with_alibi = [row.alibi for row in TABLE.values() if row.alibi]
    sloped = [Config(tiles, dtype, "upper", alibi=True) for tiles in with_alibi for dtype in DTYPES.values()]
    packed += [replace(c, packed=True) for c in sloped]
    lined = [replace(c, form=form, alibi=False, table=True) for c in sloped for form in LINED]
    return list(dict.fromkeys((*whole, *split, *packed, *paged, *both, *bits, *dropped, *sloped, *lined)))


@lru_cache(maxsize=1)
def _shipped() -> frozenset[Config]:
    return frozenset(shipped())


def candidates() -> list[Config]:
    """The kernels that are built only to be measured."""
    known = {c.name for c in shipped()}
    tiles = [tiles for row in TABLE.values() for tiles in row.candidates]
    found = [Config(tiles, "bf16", form) for tiles in tiles for form in ("full", "upper")]
    return [c for c in found if c.name not in known]


def row_of(tiles: Tiles) -> TileRow:
    """The row of TABLE that tiles belong to."""
    return TABLE[tiles.width, tiles.width_v]


def smaller(config: Config) -> list[Config]:
    """The config with fewer rows or keys in a tile, which short sequences want."""
    if not config.of_numbers or config.softcap or config.packed or config.dropout or config.traced != PLAIN:
        return []
    row = row_of(config.tiles)
    fewer = row.fewer if config.form == "full" else row.fewer_ends
    return [replace(config, tiles=tiles) for tiles in (*fewer, short(config.tiles))]


def short(tiles: Tiles) -> Tiles:
    """The tiles of one warpgroup for the same head dims."""
    return next(row.short for row in rows_for(tiles.width, tiles.width_v) if row.short is not None)


def grouped(config: Config) -> list[Config]:
    """The config with several heads of a group in a tile."""
    # Expressions and dropout know one head.
    if not config.of_numbers or config.packed or config.dropout or config.traced != PLAIN:
        return []
    most = HEADS if config.form == "full" else HEADS[:1]  # with the most heads a tile has a single query
    return [replace(config, tiles=short(config.tiles), heads=heads) for heads in most]


# -- What a call gets ----------------------------------------------------------------------------------------------


def choose(problem: Problem) -> Config:
    """The kernel for a problem that has no reasons against it: of those shipped, the one with the fewest estimated clocks.

    Keys are split where tiles fill less than half of the machine, if that saves a third of the estimated time.
    """
    (form, band), traced, cores = keys_of(problem), Expressions.of(problem).traced, devices.of(problem.device).cores
    capped, dropout = problem.spec.score is not None and not traced.score, problem.spec.dropout_p > 0
    bits = next((row.bits for row in rows_for(problem.head_dim, problem.head_dim_v) if row.bits), None)
    # Ends that tensors hold are slower than bits (docs/decisions.md#hopper-list-tiles).
    if form in ("rows", "lists") and bits and not why_no_bits(problem, bits.tile_n):
        return Config(bits, DTYPES[str(problem.dtype)], "bits")
    biased = with_slopes(problem) or with_line(problem)
    if biased is not None:
        return biased
    row = row_for(problem, capped, dropout and traced == PLAIN)
    tiles, dtype = row.of_form(form, capped, traced, dropout), DTYPES[str(problem.dtype)]
    config = Config(tiles, dtype, form, capped, packed=problem.packed, traced=traced, dropout=dropout)
    if not config.of_numbers:
        return config

    def clocks(other: Config) -> float:
        return estimated_clocks(other, problem, band.stop - band.start, cores)

    # Only kernels that ship compete: another would be compiled at a user's first call.
    others = (*smaller(config), *(grouped(config) if problem.group > 1 else ()))
    options = [config, *(c for c in others if c in _shipped())]
    idle = (c for c in options if 2 * tile_count(c, problem) < cores and not problem.packed)
    halves = (replace(c, split=True) for c in idle)
    whole = min(options, key=clocks)
    # Few queries with a traced score are worth a kernel of their own; dropout is for training, whose queries are many.
    split = min((c for c in halves if c in _shipped() or traced != PLAIN), key=clocks, default=whole)
    return split if split.split and 3 * clocks(split) <= 2 * clocks(whole) else whole


def with_slopes(problem: Problem) -> Config | None:
    """The kernel that knows ALiBi's bias to be linear; None where the score is something else, or keys would be split, as those of packed
    sequences never are."""
    tiles = next((row.alibi for row in rows_for(problem.head_dim, problem.head_dim_v) if row.alibi), None)
    if tiles is None or slopes_of(problem) is None or problem.spec.dropout_p:
        return None
    config = Config(tiles, DTYPES[str(problem.dtype)], "upper", packed=problem.packed, alibi=True)
    return config if problem.packed or 2 * tile_count(config, problem) >= devices.of(problem.device).cores else None


def with_line(problem: Problem) -> Config | None:
    """The kernel that reads a bias by distance from a line; None where the score is something else, or keys would be split."""
    tiles = next((row.alibi for row in rows_for(problem.head_dim, problem.head_dim_v) if row.alibi), None)
    if tiles is None or line_of(problem) is None:
        return None
    config = Config(tiles, DTYPES[str(problem.dtype)], keys_of(problem)[0], table=True)
    return config if 2 * tile_count(config, problem) >= devices.of(problem.device).cores else None


def row_for(problem: Problem, capped: bool, dropped: bool) -> TileRow:
    """The row of TABLE for a problem: the first that ships a softcap, or dropout alone, where one does."""
    rows = [row for row in rows_for(problem.head_dim, problem.head_dim_v) if row.softcap or not capped]
    return next((row for row in rows if dropped and not capped and row.dropout), rows[0])


def tile_count(config: Config, problem: Problem) -> int:
    """How many query tiles there are before keys are split; packed sequences count as if all were equally long.

    Deterministic results do not depend on batch-mates: the count is then of one sequence.
    """
    batch = 1 if problem.spec.deterministic else problem.batch
    heads = problem.heads_k * -(-problem.group // config.heads) * batch
    return heads * -(-mean_seqlen_q(problem) // config.tile_queries)


def mean_seqlen_q(problem: Problem) -> int:
    """The number of queries in a sequence; the mean, rounded up, if sequences are packed."""
    return -(-problem.seqlen_q // max(problem.batch, 1)) if problem.packed else problem.seqlen_q


# The most splits of a sequence's keys: where its queries fill several tiles, and where one tile holds them
# (docs/decisions.md#hopper-split-keys).
MAX_SPLITS = (4, 32)
MIN_SPLIT_KEYS = 256  # keys, at least


def num_splits(config: Config, seqlen_q: int, seqlen_k: int) -> int:
    """How many splits a query tile's keys have; all of them have nearly the same number of key blocks.

    The number depends on the lengths of one sequence alone.
    """
    blocks = -(-seqlen_k // config.tiles.tile_n)
    size = max(-(-blocks // MAX_SPLITS[seqlen_q <= config.tile_queries]), -(-MIN_SPLIT_KEYS // config.tiles.tile_n))
    return -(-blocks // size)


# Clocks of the model (docs/decisions.md#hopper-tile-model).
HIDDEN = 0.71  # the share of a key block's products and instructions that nothing else hides
SYNC = 633  # of a key block, whatever its size
OPEN = 3584  # of a tile's beginning and end; half of it where the next tile's Q is loaded meanwhile
MERGE = 6000  # of a second kernel
INSTRUCTIONS = 4.6  # of a thread for each score
LOADED = 38  # bytes a clock that TMA brings


def block_clocks(tiles: Tiles) -> float:
    """The model's clocks of one key block of a tile: its products and its softmax, or its loads where these take longer."""
    # An SM's tensor cores do 4096 floating-point operations a clock in 16 bits, and it issues 128 lanes' instructions.
    products = 2 * tiles.tile_m * tiles.tile_n * (tiles.width + tiles.width_v) / 4096
    issue = INSTRUCTIONS * tiles.tile_m * tiles.tile_n / 128
    loads = tiles.element_bytes * tiles.tile_n * (tiles.width + tiles.width_v) / LOADED
    return max(HIDDEN * (products + issue) + SYNC, loads)


def estimated_clocks(config: Config, problem: Problem, seqlen_k: int, cores: int) -> float:
    """An estimate of the clocks of the busiest core, good for comparing the tiles of one call and for nothing else.

    The constants were fitted to published kernels on this chip, not to these kernels. The estimates are 5 to 35 % too short, and
    the tile with the fewest was the fastest one in all 36 rows of the benchmark (docs/decisions.md#hopper-tile-model). Where rows
    end before the last key, a tile is taken to be as long as its last row, on average.
    """
    tiles, seqlen_q = config.tiles, mean_seqlen_q(problem)
    seqlen_k = -(-seqlen_k // max(problem.batch, 1)) if problem.packed else seqlen_k
    parts = num_splits(config, seqlen_q, max(seqlen_k, 1)) if config.split else 1

    def tile_clocks(blocks: float) -> float:
        return OPEN / tiles.q_stages + blocks / parts * block_clocks(tiles)

    most, count = -(-seqlen_k // tiles.tile_n // parts) * parts, tile_count(config, problem) * parts
    if config.form == "full":
        return -(-count // cores) * tile_clocks(most) + MERGE * config.split
    # Along a diagonal the last rows of tiles end half of the square before the last key, on average.
    shorter = max(0, min(seqlen_q, seqlen_k) - config.tile_queries) / 2
    mean = (seqlen_k - shorter) / tiles.tile_n + (config.tile_queries % tiles.tile_n > 0) / 2
    return max(tile_clocks(most), count / cores * tile_clocks(min(mean, most))) + MERGE * config.split
