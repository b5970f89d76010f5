"""Tile sizes, registers and shared memory of the Hopper kernels: a table by head dim; no DSL, it runs on any machine."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tilewise import device as devices
from tilewise import expr
from tilewise.backends.hopper.expected import Expected
from tilewise.expr import Expr
from tilewise.masks.facts import Band, as_band
from tilewise.problem import Problem

SHARED_LIMIT = 232_448  # bytes that one CTA may have
REGISTERS = 512  # of one thread in each of a CTA's warpgroups together: 65,536 / 128
ROWS = 64  # of one warpgroup: the height of a wgmma
ALIGNMENT = 1024  # bytes: after so many the 128-byte swizzle repeats
MULTIPLE = 8  # of a head dim: the copy engine wants rows that begin at multiples of 16 bytes
DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
LONG = 1 << 30  # rows that packed tensors have less than
# Of the kept keys of a row: all; up to an end that moves with it; between two such ends; between two that tensors hold; and
# those of them that a predicate keeps, by lists of key blocks.
FORMS = ("full", "upper", "band", "rows", "lists")
SHIPPED = FORMS[:4]


@dataclass(frozen=True)
class Shared:
    """Bytes of shared memory from its start: ``barriers`` and a word that nobody reads, then, each at a multiple of
    ALIGNMENT, the tiles of Q (and, later, O) and the ring of K and V."""

    barriers: int
    q: int
    ring: int

    @property
    def total(self) -> int:
        return sum(-(-part // ALIGNMENT) * ALIGNMENT for part in (self.barriers, self.q)) + self.ring


@dataclass(frozen=True)
class Tiles:
    """A forward kernel's sizes: ``warpgroups`` of ``ROWS`` queries each by ``tile_n`` keys.

    Attributes:
        width, width_v: head dims that it is compiled for; smaller ones are filled with zeros as they are loaded.
        slots: of the ring; one holds a block of K or of V.
        q_stages: tiles of Q that a warpgroup has; with two the next is loaded while O of one leaves by the other's room, with
            one O leaves from registers and the next is loaded as soon as the last scores are there
            (docs/decisions.md#hopper-o-from-registers).
        registers, registers_load: of a thread that computes, and of one that loads or stores.
        lazy: O is rescaled only where a row's maximum has grown by more than ``tile.LAZY`` (docs/decisions.md#hopper-lazy-rescale).
        turns: the warpgroups begin their products one after the other, so that one's softmax runs under another's
            (docs/decisions.md#hopper-ping-pong).
        steady: whole blocks but the first take a row's maximum as it is, and their own where their sums say that it fell behind
            (docs/decisions.md#hopper-steady-maxima).
    """

    width: int
    width_v: int
    warpgroups: int
    tile_n: int
    slots: int
    q_stages: int
    registers: int
    registers_load: int = 24
    lazy: bool = True
    turns: bool = False
    steady: bool = False

    @property
    def name(self) -> str:
        flags = ("" if self.lazy else "_eager") + ("_turns" if self.turns else "") + ("_steady" if self.steady else "")
        return f"{self.tile_m}x{self.tile_n}_s{self.slots}q{self.q_stages}{flags}"

    @property
    def tile_m(self) -> int:
        return ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def q_tiles(self) -> int:
        return self.warpgroups * self.q_stages

    @property
    def q_elements(self) -> int:
        """Of one warpgroup's tile of Q or O."""
        return ROWS * max(self.width, self.width_v)

    @property
    def slot_elements(self) -> int:
        return self.tile_n * max(self.width, self.width_v)

    @property
    def barriers(self) -> int:
        """mbarriers: full and empty of every slot; of every tile of Q full and empty, and full of O."""
        return 2 * self.slots + 3 * self.q_tiles

    @property
    def shared(self) -> Shared:
        """What the kernel allocates, for elements of two bytes."""
        return Shared(8 * (self.barriers + 1), 2 * self.q_tiles * self.q_elements, 2 * self.slots * self.slot_elements)


@dataclass(frozen=True)
class Traced:
    """Expressions that are compiled into a kernel, as :func:`tilewise.expr.to_text` prints them; "" where there is none.

    Attributes:
        keep: the mask's predicate. score: what becomes of scores.
        leaves: of the tensors that they read, in order: dtype and number of dimensions, "float32:2 bool:4".
        numbers: kinds of theirs, in order: "f" and "i". reads: how many elements of tensors a pair has of its own.
    """

    keep: str = ""
    score: str = ""
    leaves: str = ""
    numbers: str = ""
    reads: int = 0

    @property
    def tensors(self) -> list[tuple[str, int]]:
        return [(dtype, int(rank)) for dtype, _, rank in (leaf.partition(":") for leaf in self.leaves.split())]

    def trees(self) -> tuple[Expr, Expr]:
        """The score, s itself where there is none, and its slope in s; nodes that both use are the same."""
        score = expr.parse(self.score) if self.score else expr.symbol("s")
        slope = expr.derivative(score, expr.symbol("s"))
        return score, expr.number(0.0) if slope is None else slope

    @property
    def sloped(self) -> bool:
        """Whether the slope is other than 1."""
        return not expr.is_number(self.trees()[1], 1)

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]


PLAIN = Traced()


class Formed:
    """What follows from the ``form`` of a kernel, of FORMS."""

    form: str

    @property
    def by_rows(self) -> bool:
        """Whether the ends of rows are tensors."""
        return self.form in ("rows", "lists")

    @property
    def of_numbers(self) -> bool:
        """Whether the ends of rows are numbers, the same for all heads."""
        return self.form in ("full", "upper", "band")

    @property
    def has_lower(self) -> bool:
        """Whether a row may begin after the first key."""
        return self.form not in ("full", "upper")

    @property
    def has_upper(self) -> bool:
        """Whether a row may end before the last key."""
        return self.form != "full"


@dataclass(frozen=True)
class Config(Formed):
    """What one forward kernel is compiled for.

    Attributes:
        dtype: of DTYPES. form: of FORMS.
        traced: what is no more than this kernel's: such a kernel is compiled where it is called.
        split: the keys of a query tile are cut into chunks, whose states a second kernel merges.
        heads: query heads of a group that a tile holds side by side, so that its keys serve them all; divides ROWS.
        packed: sequences are packed; neither split, nor are heads side by side.
        dropout: some pairs are dropped; such a kernel too is compiled where it is called.
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

    @property
    def queries(self) -> int:
        """Of one warpgroup."""
        return ROWS // self.heads

    @property
    def tile_queries(self) -> int:
        return self.queries * self.tiles.warpgroups

    @property
    def extra(self) -> tuple[str, ...]:
        """What a launch gets beside tensors and numbers: fields of :class:`tilewise.backends.hopper.forward.kernel.Extra`."""
        found = ("part_o", "part_lse") if self.split else ()
        found += ("lo", "hi") if self.by_rows else ()
        found += ("blocks", "counts") if self.form == "lists" else ()
        found += ("seed", "threshold", "keep") if self.dropout else ()
        return found + (("cu_q", "cu_k", "first", "last", "queue") if self.packed else ())

    @property
    def expected(self) -> tuple[Expected, ...]:
        """What the kernel must be once it is compiled; the one that merges chunks has no roles."""
        registers = self.tiles.registers, self.tiles.registers_load
        return (Expected(self.name, registers, self.tiles.shared.total, self.tiles.tile_n // 2, self.stores),)

    @property
    def stores(self) -> bool:
        """Whether O goes through shared memory, from where the copy engine stores it."""
        return self.tiles.q_stages > 1 and not self.split

    @property
    def steady(self) -> bool:
        """Whether whole blocks do without their maxima; a traced score may hide what no mask does."""
        return self.tiles.steady and self.traced == PLAIN and not self.dropout

    @property
    def skips(self) -> bool:
        """Whether some warpgroup of a tile may see nothing of blocks that another sees: rows end one after the other
        (docs/decisions.md#hopper-skipped-blocks)."""
        ends = self.has_upper and self.form != "lists"
        return ends and self.tiles.warpgroups > 1 and self.tile_queries > self.tiles.tile_n

    @property
    def name(self) -> str:
        t = self.tiles
        dims = f"d{t.width}" + (f"v{t.width_v}" if t.width_v != t.width else "")
        flags = "".join(f"_{name}" for name in ("softcap", "dropout", "split", "packed") if getattr(self, name))
        flags += f"_heads{self.heads}" if self.heads > 1 else ""
        traced = "" if self.traced == PLAIN else f"_{self.traced.digest}"
        return f"forward_{self.dtype}_{dims}_{self.form}{flags}{traced}_{t.name}"

    def describe(self) -> str:
        t = self.tiles
        extra = f", {self.heads} heads of a group in a tile" if self.heads > 1 else ""
        extra += ", keys split" if self.split else ""
        return (
            f"{t.tile_m} x {t.tile_n}, {t.warpgroups} warpgroups compute and one loads, {t.slots} blocks of K or V in flight, "
            f"{t.shared.total >> 10} KiB shared{extra}"
        )

    def traffic(self, p: Problem) -> int:
        """Bytes of the forward: Q and O once, K and V once per query tile (an upper bound under a mask)."""
        keys = p.heads_k * -(-p.group // self.heads) * -(-p.seqlen_q // self.tile_queries) * p.seqlen_k
        return p.dtype.itemsize * p.batch * (p.heads_q * p.seqlen_q + keys) * (p.head_dim + p.head_dim_v)


# (head dim of q and k, of v) -> tiles for "full"; for the forms with an end; where a thread has more to remember beside its
# scores; where it reads more than one tensor for each of them, or goes by lists of key blocks: a pattern's blocks of 64 or 128
# are whole ones then, where wider ones would cover two and be visited for either. The first row that holds both dims is taken.
# docs/decisions.md#hopper-forward-tiles, #hopper-list-tiles
TABLE = {
    (64, 64): (
        Tiles(64, 64, 3, 128, 8, 2, 160, turns=True, steady=True),
        Tiles(64, 64, 3, 128, 8, 2, 160, turns=True, steady=True),
        Tiles(64, 64, 2, 96, 10, 2, 240),
        Tiles(64, 64, 2, 64, 12, 2, 240),
    ),
    (96, 96): (
        Tiles(96, 96, 2, 128, 7, 2, 240, steady=True),
        Tiles(96, 96, 2, 128, 7, 2, 240, steady=True),
        Tiles(96, 96, 2, 96, 8, 2, 240),
        Tiles(96, 96, 2, 64, 12, 2, 240),
    ),
    (128, 128): (
        Tiles(128, 128, 2, 128, 5, 2, 240, turns=True, steady=True),
        Tiles(128, 128, 2, 128, 5, 2, 240, turns=True, steady=True),
        Tiles(128, 128, 2, 80, 8, 2, 240),
        Tiles(128, 128, 2, 64, 9, 2, 240),
    ),
    (192, 128): (
        Tiles(192, 128, 2, 112, 4, 1, 240),
        Tiles(192, 128, 2, 112, 4, 1, 240),
        Tiles(192, 128, 2, 80, 5, 1, 240),
        Tiles(192, 128, 2, 64, 7, 1, 240),
    ),
    (192, 192): (
        Tiles(192, 192, 2, 112, 4, 1, 240),
        Tiles(192, 192, 2, 96, 4, 1, 240),
        Tiles(192, 192, 2, 64, 7, 1, 240),
        Tiles(192, 192, 2, 32, 12, 1, 240),
    ),
    (256, 256): (
        Tiles(256, 256, 2, 80, 4, 1, 240, turns=True),
        Tiles(256, 256, 2, 64, 5, 1, 240, turns=True),
        Tiles(256, 256, 2, 48, 6, 1, 240),
        Tiles(256, 256, 2, 32, 10, 1, 240),
    ),
}
# Rows that are shipped with a softcap too; smaller head dims take the next.
SOFTCAP = ((64, 64), (128, 128), (256, 256))
# How many heads of a group a tile may hold where queries are few (docs/decisions.md#hopper-shared-tiles), and the tiles that
# then do, by head dims: the first row that holds both.
HEADS = (8, 64)
SHORT = {
    (64, 64): Tiles(64, 64, 1, 128, 8, 2, 256),
    (128, 128): Tiles(128, 128, 1, 128, 5, 2, 256),
    (192, 128): Tiles(192, 128, 1, 128, 4, 1, 256),
    (256, 256): Tiles(256, 256, 1, 80, 4, 1, 256),
}
# Tiles beside those of TABLE, by head dims and whether the form has an end; SHORT's are others.
SMALLER = {
    (64, 64, False): (Tiles(64, 64, 2, 128, 8, 2, 240, turns=True, steady=True),),
    (64, 64, True): (Tiles(64, 64, 2, 128, 8, 2, 240, turns=True, steady=True),),
    (256, 256, False): (Tiles(256, 256, 2, 64, 5, 1, 240, turns=True),),
}
# What else is worth a measurement, for "full" and "upper" in bf16.
CANDIDATES = (
    Tiles(64, 64, 3, 128, 8, 2, 160, steady=True),
    Tiles(64, 64, 2, 128, 8, 2, 240, turns=True, steady=True),
    Tiles(64, 64, 2, 128, 8, 2, 240, steady=True),
    Tiles(96, 96, 2, 128, 7, 2, 240, turns=True, steady=True),
    Tiles(128, 128, 2, 128, 5, 2, 240, steady=True),
    Tiles(128, 128, 2, 64, 9, 2, 240, steady=True),
    Tiles(192, 192, 2, 96, 4, 1, 240, turns=True),
    Tiles(256, 256, 2, 80, 4, 1, 240, turns=True),
    Tiles(256, 256, 2, 80, 4, 1, 240),
    Tiles(256, 256, 2, 64, 5, 1, 240, turns=True),
    Tiles(256, 256, 2, 64, 5, 1, 240),
)


def tiles_of(
    dims: tuple[int, int], form: str, softcap: bool = False, traced: Traced = PLAIN, dropout: bool = False
) -> Tiles:
    """Of a row of TABLE."""
    # A softcap beside two ends of a row is too much for the registers that three warpgroups leave each other.
    tight = softcap and form in ("band", "rows") and TABLE[dims][1].warpgroups > 2
    more = traced.reads + dropout
    column = 3 if more > 1 or form == "lists" else 2 if traced != PLAIN or tight or dropout else int(form != "full")
    return TABLE[dims][column]


def shipped() -> list[Config]:
    """Every kernel that is compiled ahead of time."""
    plain = [
        Config(tiles_of(dims, form), dtype, form) for dims in TABLE for dtype in DTYPES.values() for form in SHIPPED
    ]
    capped = [
        Config(tiles_of(dims, form, softcap=True), dtype, form, softcap=True)
        for dims in SOFTCAP
        for dtype in DTYPES.values()
        for form in SHIPPED
    ]
    whole = plain + capped
    ends = [c for c in whole if c.of_numbers]
    split = [replace(c, split=True) for c in ends if (c.tiles.width, c.tiles.width_v) in SOFTCAP and not c.softcap]
    packed = [replace(c, packed=True) for c in ends]
    few = [x for c in ends if c.form != "band" for x in (*smaller(c), *grouped(c))]
    both = [replace(c, split=split) for c in few if not c.softcap or c.heads == HEADS[0] for split in (False, True)]
    return list(dict.fromkeys((*whole, *split, *packed, *both)))


@lru_cache(maxsize=1)
def _shipped() -> frozenset[Config]:
    return frozenset(shipped())


def candidates() -> list[Config]:
    """Kernels that are built to be measured."""
    known = {c.name for c in shipped()}
    found = [Config(tiles, "bf16", form) for tiles in CANDIDATES for form in ("full", "upper")]
    return [c for c in found if c.name not in known]


def band_of(p: Problem) -> Band | None:
    """The mask of a problem as a band, that of packed sequences without the offset of each; None where it is none."""
    return as_band(p.spec.region, None if p.packed else p.seqlen_k - p.seqlen_q, p.seqlen_k)


def keys_of(p: Problem) -> tuple[str, Band]:
    """``(form, band)``: how a kernel learns which keys a row has, and the band, cut, where that says it; a packed sequence's is
    cut by the kernel.

    Otherwise the ends of rows are tensors, and the band is of all keys; so it is too where an expression or dropout has
    to know a key's place among all.
    """
    band, every = band_of(p), Band(None, None, 0, p.seqlen_k)
    if band is None:
        return ("rows" if p.spec.region.predicate is None else "lists"), every
    if p.packed:
        return band.form, band
    band = band.cut(p.seqlen_q)
    whole = (band.start, band.stop) == (0, p.seqlen_k)
    return (band.form, band) if whole or not (is_traced(p) or p.spec.dropout_p) else ("rows", every)


def cap_of(p: Problem) -> float | None:
    """The cap of a score that is a softcap alone; NaN where it is anything else; None: there is no score."""
    score = p.spec.score
    if score is None:
        return None
    numbers = [e.args[0] for e in (score.args[0], *score.args[1].args[0].args[1:])] if _is_softcap(score) else []
    return float(numbers[0]) if len(numbers) == 2 and 0 < numbers[0] == numbers[1] < math.inf else math.nan


def _is_softcap(e) -> bool:
    """Whether an expression is a number times tanh(s / number)."""
    if e.op != "mul" or e.args[0].op != "number" or getattr(e.args[1], "op", "") != "tanh":
        return False
    inner = e.args[1].args[0]
    return inner.op == "div" and str(inner.args[0]) == "s" and inner.args[1].op == "number"


def is_traced(p: Problem) -> bool:
    """Whether a score is none that there are kernels of."""
    return p.spec.score is not None and math.isnan(cap_of(p))


@dataclass(frozen=True)
class Expressions:
    """What a problem has traced: the kernel's part, the slots of its leaves, and the values of its numbers."""

    traced: Traced
    slots: tuple[int, ...]
    numbers: tuple[int | float, ...]

    @classmethod
    def of(cls, p: Problem) -> Expressions:
        trees = p.spec.region.predicate, (p.spec.score if is_traced(p) else None)
        reads = expr.lookups(*(e for e in trees if e is not None))
        slots, numbers = list(dict.fromkeys(e.args[0][1] for e in reads)), []
        text = lambda e: "" if e is None else str(expr.parse(str(expr.abstract(e, numbers)), slots.index))  # noqa: E731
        keep, score = map(text, trees)
        facts = [p.extras[n] for n in slots]
        leaves = " ".join(f"{str(t.dtype).removeprefix('torch.')}:{len(t.shape)}" for t in facts)
        kinds = "".join("f" if isinstance(n, float) else "i" for n in numbers)
        own = sum({"i", "j"} <= expr.depends_on(*e.args[1:]) for e in reads)
        return cls(Traced(keep, score, leaves, kinds, own), tuple(slots), tuple(numbers))


def choose(p: Problem) -> Config:
    """Of a problem that has no :func:`reasons` against it: what :func:`clocks` predicts to be fastest of what is shipped.

    Keys are split where tiles fill less than half of the machine, if that saves a third of the time.
    """
    (form, band), traced, cores = keys_of(p), Expressions.of(p).traced, devices.of(p.device).cores
    capped = p.spec.score is not None and not traced.score
    rows = (dims for dims in TABLE if not capped or dims in SOFTCAP)
    dims = next(d for d in rows if p.head_dim <= d[0] and p.head_dim_v <= d[1])
    dropout = p.spec.dropout_p > 0
    tiles = tiles_of(dims, form, capped, traced, dropout)
    config = Config(tiles, DTYPES[str(p.dtype)], form, capped, packed=p.packed, traced=traced, dropout=dropout)
    if not config.of_numbers:
        return config
    time = lambda c: clocks(c, p, band.stop - band.start, cores)  # noqa: E731
    others = (*smaller(config), *(grouped(config) if p.group > 1 else ()))
    options = [config, *(c for c in others if c in _shipped())]
    halves = (replace(c, split=True) for c in options if 2 * tile_count(c, p) < cores and not p.packed)
    whole = min(options, key=time)
    split = min((c for c in halves if c in _shipped() or traced != PLAIN or dropout), key=time, default=whole)
    return split if split.split and 3 * time(split) <= 2 * time(whole) else whole


def smaller(config: Config) -> list[Config]:
    """The config with fewer rows or keys in a tile, which short sequences want."""
    if not config.of_numbers or config.softcap or config.packed or config.dropout or config.traced != PLAIN:
        return []
    tiles = *SMALLER.get((config.tiles.width, config.tiles.width_v, config.form != "full"), ()), short(config.tiles)
    return [replace(config, tiles=t) for t in tiles]


def short(t: Tiles) -> Tiles:
    return next(tiles for dims, tiles in SHORT.items() if t.width <= dims[0] and t.width_v <= dims[1])


def grouped(config: Config) -> list[Config]:
    """The config with several heads of a group in a tile."""
    # Expressions and dropout know one head.
    if not config.of_numbers or config.packed or config.dropout or config.traced != PLAIN:
        return []
    most = HEADS if config.form == "full" else HEADS[:1]  # with the most heads a tile has a single query
    return [replace(config, tiles=short(config.tiles), heads=heads) for heads in most]


def tile_count(config: Config, p: Problem) -> int:
    """How many query tiles there are, before keys are split; of packed sequences, as if all were equally long.

    Deterministic results do not depend on batch-mates: the count is then of one sequence.
    """
    heads = p.heads_k * -(-p.group // config.heads) * (1 if p.spec.deterministic else p.batch)
    return heads * -(-rows_of(p) // config.tile_queries)


def rows_of(p: Problem) -> int:
    return -(-p.seqlen_q // max(p.batch, 1)) if p.packed else p.seqlen_q


# Chunks of a sequence's keys at most: where its queries fill several tiles, and where one tile holds them
# (docs/decisions.md#hopper-split-keys).
PARTS = (4, 32)
CHUNK = 256  # keys, at least


def chunks(config: Config, seqlen_q: int, seqlen_k: int) -> int:
    """Into how many parts the keys of a query tile are cut where they are: of nearly equal numbers of key blocks, which
    depend on the lengths of one sequence alone."""
    blocks = -(-seqlen_k // config.tiles.tile_n)
    size = max(-(-blocks // PARTS[seqlen_q <= config.tile_queries]), -(-CHUNK // config.tiles.tile_n))
    return -(-blocks // size)


# Clocks, of a resource model that was fitted to published kernels on this chip: docs/decisions.md#hopper-tile-model.
HIDDEN = 0.71  # of a key block's products and instructions: the share that stays visible
SYNC = 633  # of a key block, whatever its size
OPEN = 3584  # of a tile's beginning and end; half of it where the next tile's Q is loaded meanwhile
MERGE = 6000  # of a second kernel
INSTRUCTIONS = 4.6  # of a thread for each score
LOADED = 38  # bytes a clock that the copy engine brings


def block_clocks(t: Tiles) -> float:
    """Of one key block of a tile."""
    products = 2 * t.tile_m * t.tile_n * (t.width + t.width_v) / 4096
    issue = INSTRUCTIONS * t.tile_m * t.tile_n / 128
    return max(HIDDEN * (products + issue) + SYNC, 2 * t.tile_n * (t.width + t.width_v) / LOADED)


def clocks(config: Config, p: Problem, seqlen_k: int, cores: int) -> float:
    """Of the busiest core. Where rows end before the last key, tiles are as long as their last row's, on average."""
    t, seqlen_q = config.tiles, rows_of(p)
    seqlen_k = -(-seqlen_k // max(p.batch, 1)) if p.packed else seqlen_k
    parts = chunks(config, seqlen_q, max(seqlen_k, 1)) if config.split else 1
    tile = lambda blocks: OPEN / t.q_stages + blocks / parts * block_clocks(t)  # noqa: E731
    most, count = -(-seqlen_k // t.tile_n // parts) * parts, tile_count(config, p) * parts
    if config.form == "full":
        return -(-count // cores) * tile(most) + MERGE * config.split
    shorter = max(0, min(seqlen_q, seqlen_k) - config.tile_queries) / 2
    mean = (seqlen_k - shorter) / t.tile_n + (config.tile_queries % t.tile_n > 0) / 2
    return max(tile(most), count / cores * tile(min(mean, most))) + MERGE * config.split


def _has_wide_number(p: Problem) -> bool:
    return any(isinstance(n, int) and not -(1 << 31) <= n < 1 << 31 for n in Expressions.of(p).numbers)


def reasons(p: Problem) -> list[str]:
    """Why a problem is none for the forward's kernels, whatever is installed."""
    found = [] if str(p.dtype) in DTYPES else [f"{p.dtype}: its kernels take float16 and bfloat16"]
    if max(p.head_dim, p.head_dim_v) > 256:
        found.append(f"head_dim {max(p.head_dim, p.head_dim_v)} is above 256")
    if p.head_dim % MULTIPLE or p.head_dim_v % MULTIPLE:
        found.append(f"head dims {p.head_dim} and {p.head_dim_v} must be multiples of {MULTIPLE}")
    if p.packed and band_of(p) is None:
        found.append("packed sequences with a mask other than causal, window and a key_range of numbers")
    if p.packed and max(p.seqlen_q, p.seqlen_k) >= LONG:
        found.append(f"{max(p.seqlen_q, p.seqlen_k)} packed rows, {LONG} or more")
    if p.packed and is_traced(p):
        found.append("packed sequences with a score other than one softcap")
    found += ["a number beyond 32 bits in a mask or a score"] if _has_wide_number(p) else []
    found += ["packed sequences with dropout"] if p.packed and p.spec.dropout_p else []
    found += [] if p.softmax_scale > 0 or is_traced(p) else [f"softmax_scale {p.softmax_scale} is not above 0"]
    return found


@dataclass(frozen=True)
class Grid:
    """How a launch is spread: over ``tiles``, ``ctas`` that stay, ``section`` as in
    :class:`tilewise.backends.hopper.kit.schedule.Order`, and ``chunks`` of keys."""

    tiles: int
    ctas: int
    section: int
    chunks: int = 1


SHARING = 4  # CTAs that read one head's keys at a time, so that K and V come from L2: docs/decisions.md#hopper-sharing


def spread(p: Problem, config: Config, seqlen_k: int, cores: int) -> Grid:
    """Where tiles are equally long, one head after the other. Where not, as many heads at once as fill a round with SHARING
    tiles of each: rows of tiles are then nearly equal in a round, and to-and-fro evens out the rest.

    A chunk of a head counts as a head here, and heads that share a tile as one.
    """
    parts = chunks(config, p.seqlen_q, seqlen_k) if config.split else 1
    heads = p.batch * p.heads_k * -(-p.group // config.heads) * parts
    tiles = heads * -(-p.seqlen_q // config.tile_queries)
    if p.packed:  # at most, as only the device knows the lengths
        tiles = p.heads_q * (p.seqlen_q // config.tile_queries + p.batch + 1)
    return Grid(tiles, min(tiles, cores), 1 if config.form == "full" else min(heads, max(1, cores // SHARING)), parts)
