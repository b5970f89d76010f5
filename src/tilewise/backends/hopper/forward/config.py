"""The forward kernels on Hopper: what they are compiled for, which ones are shipped, and which one a call gets.

Nothing here imports the DSL: it runs on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tilewise import device as devices
from tilewise import sizes
from tilewise.backends.hopper.config import (
    DROPPED,
    DTYPES,
    PLAIN,
    ROWS,
    SHIPPED,
    Expressions,
    Formed,
    Traced,
    bits_serve,
    blocks_of,
    dtypes_of,
    ends_at_least,
    forward_keys_of,
    keys_of,
    lists_fit,
)
from tilewise.backends.hopper.expected import Expected
from tilewise.backends.hopper.forward.parameters import parameters
from tilewise.backends.hopper.forward.tiles import (
    ONE_ORDER_TILES,
    PAGED_TILES,
    SELECTED_TILES,
    TABLE,
    TileRow,
    Tiles,
    one_order,
    row_of,
    rows_for,
    short,
    tiles_of_one_order,
)
from tilewise.backends.hopper.pair_bias import score_of
from tilewise.backends.hopper.parameters import SCORES, Parameters
from tilewise.problem import Problem


@dataclass(frozen=True)
class Config(Formed):
    """The compile-time facts of one forward kernel.

    Attributes:
        dtype, form: one of DTYPES, and one of FORMS.
        split: the keys of a query tile are shared out among splits, whose states a second kernel merges.
        packed: sequences are packed; such a kernel splits no keys.
        selected: each query has a list of keys, whose rows are gathered; its heads are the rows of a tile.
        paged: how many rows of a page a box of TMA brings, where keys lie in pages (and sequences are packed); 0: they do not.
        traced: the expressions of this call alone: such a kernel is compiled at the first call.
        dropout: some pairs are dropped.
        score: one of SCORES.
    """

    tiles: Tiles
    dtype: str
    form: str
    score: str = ""
    split: bool = False
    packed: bool = False
    traced: Traced = PLAIN
    dropout: bool = False
    paged: int = 0
    selected: bool = False

    @property
    def tile_queries(self) -> int:
        """Queries of a CTA's tile."""
        return ROWS * self.tiles.warpgroups

    @property
    def parameters(self) -> Parameters:
        """The tensors and numbers of a launch, in order."""
        return parameters(self)

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The facts that the compiled kernel is held to; the kernel that merges splits has no roles."""
        registers = self.tiles.registers, self.tiles.registers_load
        tiles, more = self.tiles, {"stores": self.stores, "beside": self.tiles.v_stages}
        return (Expected(self.name, registers, tiles.shared.total, tiles.tile_n // 2, **more),)

    @property
    def softcap_columns(self) -> int:
        """Columns of a thread that decide together how a softcap's tanh is computed; three warpgroups have registers for few."""
        return 8 if self.tiles.warpgroups == 3 else 16

    @property
    def stores(self) -> bool:
        """Whether O goes through shared memory, from where TMA stores it."""
        return self.tiles.q_stages > 1 and not (self.split or self.selected)

    @property
    def queued(self) -> bool:
        """Whether CTAs take tiles from a queue, since these differ too much to be dealt out by number."""
        return self.packed or self.form == "bits"

    @property
    def steady(self) -> bool:
        """Whether whole blocks do without their maxima; a traced score may hide what no mask does."""
        return self.tiles.steady and self.traced == PLAIN

    @property
    def may_hide(self) -> bool:
        """Whether a score may be -inf where the mask keeps the pair."""
        return self.score == "bias" or bool(self.traced.score)

    @property
    def short_tanh(self) -> bool:
        """Whether whole blocks take a softcap's scores to be as small as those before were (docs/decisions.md#hopper-softcap): at a head
        dim of 128 two warps of a scheduler hide less of what a long block waits for."""
        return self.steady and self.score == "softcap" and self.tiles.width == 64

    @property
    def skips(self) -> bool:
        """Whether a warpgroup may see nothing of a block that another one of its CTA sees, since rows end one after the other
        (docs/decisions.md#hopper-skipped-blocks)."""
        several = self.tiles.warpgroups > 1 and self.tile_queries > self.tiles.tile_n
        return several and self.has_upper and self.form != "bits" and not self.selected

    @property
    def hides_values(self) -> bool:
        """Whether a tile's last block may begin with keys that no row sees, since blocks lie at fixed keys. Over pages the copies leave
        them out, and beside ends of rows a copy of V does."""
        return bool(self.tiles.segment) and self.form == "band" and not self.paged

    @property
    def name(self) -> str:
        """The kernel's name: its symbol in the cubin, and its file."""
        tiles = self.tiles
        dims = f"d{tiles.width}" + (f"v{tiles.width_v}" if tiles.width_v != tiles.width else "")
        flags = self.words + "_split" * self.split + "_selected" * self.selected
        flags += f"_paged{self.paged}" if self.paged else "_packed" if self.packed else ""
        traced = "" if self.traced == PLAIN else f"_{self.traced.digest}"
        return f"forward_{self.dtype}_{dims}_{self.form}{flags}{traced}_{tiles.name}"

    def describe(self) -> str:
        """The kernel in a sentence, as ``explain`` shows it."""
        extra = ", keys split" if self.split else ", selected keys gathered" if self.selected else ""
        extra += ", a bit for each pair" if self.form == "bits" else ""
        return self.tiles.describe() + extra

    def traffic(self, problem: Problem) -> int:
        """Bytes of the forward: Q, for each piece of O's columns, and O once, K and V once per query tile (an upper bound under a mask)."""
        keys = problem.heads_q * -(-problem.seqlen_q // self.tile_queries) * problem.seqlen_k
        keys = problem.seqlen_k if self.selected else keys  # rows that several queries gather come from L2
        rows = problem.batch * (problem.heads_q * problem.seqlen_q + keys)
        return problem.dtype.itemsize * rows * (problem.head_dim * self.tiles.pieces + problem.head_dim_v)


# -- What is shipped -----------------------------------------------------------------------------------------------


def shipped() -> list[Config]:
    """Every kernel that is compiled ahead of time."""
    kinds = [(dtype, form) for dtype in DTYPES.values() for form in SHIPPED]
    # Every form of every head dim and dtype; then, of forms whose ends are numbers, what short or packed calls want.
    plain = [Config(row.of_form(form), dtype, form) for row in TABLE.values() for dtype, form in kinds]
    capped = [
        Config(row.of_form(form, softcap=True), dtype, form, "softcap")
        for row in TABLE.values()
        if row.softcap
        for dtype, form in kinds
    ]
    whole = plain + capped
    ends = [c for c in whole if c.of_numbers]
    packed = [replace(c, packed=True) for c in ends if c.form != "full"]
    boxes = [(tiles, rows, dtype) for (_, rows), tiles in PAGED_TILES.items() for dtype in DTYPES.values()]
    paged = [Config(tiles, dtype, "band", packed=True, paged=rows) for tiles, rows, dtype in boxes]
    few = [other for c in ends if c.form != "band" for other in smaller(c)]
    # Where queries are few enough to split keys, nobody wants tiles of three warpgroups.
    split = [c for c in ends if row_of(c.tiles).softcap and not c.score and c.tiles.warpgroups < 3]
    split = [replace(c, split=True) for c in (*split, *few) if c.form == "upper"]
    bits = [
        Config(tiles, dtype, "bits") for row in TABLE.values() for tiles in row.of_bits for dtype in DTYPES.values()
    ]
    trained = [(row, *kind) for row in TABLE.values() if row.dropout for kind in kinds if kind[1] in DROPPED]
    dropped = [Config(row.dropout, dtype, form, dropout=True) for row, dtype, form in trained]
    packed += [replace(c, packed=True) for c in dropped if c.form == "upper"]
    scored = [(row, score, form) for row in TABLE.values() for score, x in SCORES.items() for form in x.forms]
    scored = [(tiles, form, score) for row, score, form in scored if (tiles := row.biased(score))]
    biased = [Config(tiles, dtype, form, score) for tiles, form, score in scored for dtype in DTYPES.values()]
    packed += [replace(c, packed=True) for c in biased if (True, False) in SCORES[c.score].ways]
    gathers = [Config(t, dtype, "upper", selected=True) for t in SELECTED_TILES.values() for dtype in DTYPES.values()]
    ordered = [
        c
        for c in (*plain, *packed)
        if c.form in ONE_ORDER and c.tiles in ONE_ORDER_TILES and not (c.score or c.dropout)
    ]
    ordered = [replace(c, tiles=one_order(c.tiles, c.form)) for c in (*ordered, *paged)]
    every = dict.fromkeys((*whole, *few, *split, *packed, *paged, *bits, *dropped, *biased, *gathers, *ordered))
    return [c for c in every if ships(c)]


def ships(config: Config) -> bool:
    """Whether a kernel is compiled ahead of time: not in a dtype that is rare for it, and not for rows whose keys a kernel of another form
    computes in the same time (docs/decisions.md#hopper-fewer-forms)."""
    tiles, form = config.tiles, config.form
    capped = form == "full" and config.score == "softcap"
    rare = bool(config.score) or config.dropout or config.selected or (tiles.width == 192 and form != "full")
    dtypes = dtypes_of(tiles.width, tiles.width_v, rare)
    return config.dtype in dtypes and not capped and form == form_in(tiles, form, config.score, config.packed)


def form_in(tiles: Tiles, form: str, score: str, packed: bool) -> str:
    """The form of the kernel that computes rows of a form, with the tiles of these head dims: some causal rows are read as a window."""
    dims = tiles.width, tiles.width_v
    own = dims in ((64, 64), (128, 128)) or (dims not in ((192, 192), (512, 512)) and not (packed or score))
    return "band" if form == "upper" and not own else form


@lru_cache(maxsize=1)
def _shipped() -> frozenset[Config]:
    return frozenset(shipped())


def candidates() -> list[Config]:
    """The kernels that are built only to be measured."""
    known = {c.name for c in shipped()}
    tiles = [tiles for row in TABLE.values() for tiles in row.candidates]
    found = [Config(tiles, "bf16", form) for tiles in tiles for form in ("full", "upper")]
    return [c for c in found if c.name not in known]


def smaller(config: Config) -> list[Config]:
    """The config with fewer rows or keys in a tile, which short sequences want."""
    if not config.of_numbers or config.score or config.packed or config.dropout or config.traced != PLAIN:
        return []
    row = row_of(config.tiles)
    fewer = row.fewer if config.form == "full" else row.fewer_ends
    few = short(config.tiles)
    return [replace(config, tiles=tiles) for tiles in (*fewer, *([few] if few else []))]


# -- What a call gets ----------------------------------------------------------------------------------------------


ONE_ORDER = ("upper", "band", "rows")
"""The forms of dense calls whose rows have one order of sums; packed ones have the first two, or the second, and those over pages that."""


def of_one_order(problem: Problem) -> Config:
    """The kernel of a call that is deterministic everywhere: blocks at fixed keys from the sequence's first one on, in segments up to
    WIDEST_JOINED."""
    form = ends_at_least(forward_keys_of(problem)[0])
    tiles = one_order(tiles_of_one_order(problem.head_dim, problem.head_dim_v), form)
    return Config(tiles, DTYPES[str(problem.dtype)], form_in(tiles, form, "", problem.packed), packed=problem.packed)


def one_order_of_rows(problem: Problem) -> list[Config]:
    """The kernels of all ways that rows like a problem's may come, dense, padded, packed and over pages."""
    tiles, dtype = tiles_of_one_order(problem.head_dim, problem.head_dim_v), DTYPES[str(problem.dtype)]
    ways = [(form, packed) for form in ONE_ORDER for packed in (False, True) if not (packed and form == "rows")]
    found = [Config(one_order(tiles, form), dtype, form, packed=packed) for form, packed in ways]
    found = [c for c in found if c.form == form_in(c.tiles, c.form, "", c.packed)]
    over_pages = [(rows, one_order(x)) for (width, rows), x in PAGED_TILES.items() if width == tiles.width]
    return found + [Config(x, dtype, "band", packed=True, paged=rows) for rows, x in over_pages]


def choose(problem: Problem) -> Config:
    """The kernel for a problem that has no reasons against it: of those shipped, the one with the fewest estimated clocks.

    Keys are split where tiles fill less than half of the machine, if that saves a third of the estimated time.
    """
    if problem.spec.everywhere:
        return of_one_order(problem)
    (form, band), traced, cores = keys_of(problem), Expressions.of(problem).traced, devices.of(problem.device).cores
    capped, dropout = problem.spec.score is not None and not traced.score, problem.spec.dropout_p > 0
    bits = bit_tiles_of(problem)
    # Ends that tensors hold are slower than bits (docs/decisions.md#hopper-list-tiles).
    if form in ("rows", "bits") and bits and bits_serve(problem, bits.tile_n):
        return Config(bits, DTYPES[str(problem.dtype)], "bits")
    biased = with_bias(problem)
    if biased is not None:
        return biased
    row = row_for(problem, capped, dropout and traced == PLAIN)
    dtype, score = DTYPES[str(problem.dtype)], "softcap" * capped

    # Only kernels that ship compete: another would be compiled at a user's first call.
    def options(form: str) -> list[Config]:
        own = form_in(row.ends, form, score, problem.packed)
        tiles = row.of_form(own, capped, traced, dropout)
        config = Config(tiles, dtype, own, score, packed=problem.packed, traced=traced, dropout=dropout)
        return [config, *(c for c in smaller(replace(config, form=form)) if c in _shipped())]

    def clocks(other: Config) -> float:
        return estimated_clocks(other, problem, band.stop - band.start, cores)

    if form == "rows":
        return options(form)[0]
    whole = sizes.best(options(form), clocks)
    halves = (
        replace(c, split=True) for c in options(ends_at_least(form)) if leaves_idle(c, problem) and not problem.packed
    )
    # Few queries with a traced score are worth a kernel of their own; dropout is for training, whose queries are many.
    halves = [c for c in halves if c in _shipped() or traced != PLAIN]
    split = sizes.best(halves, clocks) if halves else whole
    return split if split.split and 3 * clocks(split) <= 2 * clocks(whole) else whole


def bit_tiles_of(problem: Problem) -> Tiles | None:
    """The tiles whose pairs have bits; None where there are none. Narrow ones hold the keys of one block, where a pattern's have 64 keys
    and 64 queries at least (docs/decisions.md#hopper-narrow-tiles)."""
    row = next((row for row in rows_for(problem.head_dim, problem.head_dim_v) if row.bits), None)
    if row is None or row.narrow_bits is None:
        return row and row.bits
    (queries, keys), size = blocks_of(problem), row.narrow_bits.tile_n
    return row.narrow_bits if queries % size == 0 and keys % row.bits.tile_n == size else row.bits


def splits_tiles(problem: Problem) -> bool:
    """Whether blocks of a pattern have 64 queries by 64 keys: Triton's tiles hold one, those with bits two
    (docs/decisions.md#hopper-narrow-tiles). Not where its lists, which are never made in pieces, take much memory."""
    tiles = bit_tiles_of(problem)
    narrow = tiles is not None and tiles.tile_n < tiles.tile_m
    return narrow and blocks_of(problem)[0] % tiles.tile_m == tiles.tile_n and lists_fit(problem, tiles.tile_n)


def with_bias(problem: Problem) -> Config | None:
    """The kernel that knows what a score adds to s; None where the score is something else, or keys would be split, as those of packed
    sequences never are."""
    score = score_of(problem) if str(problem.dtype) in DTYPES else ""
    rows = rows_for(problem.head_dim, problem.head_dim_v) if score else ()
    tiles = next((tiles for row in rows if (tiles := row.biased(score))), None)
    if tiles is None:
        return None
    form = form_of_pairs(problem, tiles) if score == "bias" else keys_of(problem)[0]
    if not form:
        return None
    config = Config(tiles, DTYPES[str(problem.dtype)], form, score, packed=problem.packed)
    return config if problem.packed or not leaves_idle(config, problem) else None


def form_of_pairs(problem: Problem, tiles: Tiles) -> str:
    """The form of the kernel that reads a bias by pair; empty where tiles of 64 keys, which Hopper's kernels have not, take less time
    (docs/decisions.md#hopper-pair-bias), or bits too much memory. With gradients, that of a backward which takes less than Triton's."""
    form, ends_alone = keys_of(problem)[0], problem.spec.region.predicate is None and not problem.spec.needs_grad
    if problem.head_dim <= 32:
        return ""
    if form in SCORES["bias"].forms:
        return form
    return "" if (ends_alone and tiles.width == 64) or not bits_serve(problem, tiles.tile_n, scored=True) else "bits"


def row_for(problem: Problem, capped: bool, dropped: bool) -> TileRow:
    """The row of TABLE for a problem: the first that ships a softcap, or dropout alone, where one does."""
    rows = [row for row in rows_for(problem.head_dim, problem.head_dim_v) if row.softcap or not capped]
    return next((row for row in rows if dropped and not capped and row.dropout), rows[0])


def leaves_idle(config: Config, problem: Problem) -> bool:
    """Whether a problem's tiles fill less than half of the machine."""
    return 2 * tile_count(config, problem) < devices.of(problem.device).cores


def tile_count(config: Config, problem: Problem) -> int:
    """How many query tiles there are before keys are split; packed sequences count as if all were equally long.

    Deterministic results do not depend on batch-mates: the count is then of one sequence.
    """
    batch = 1 if problem.spec.deterministic else problem.batch
    heads = problem.heads_q * batch * config.tiles.pieces
    return heads * -(-mean_seqlen_q(problem) // config.tile_queries)


def mean_seqlen_q(problem: Problem) -> int:
    """The number of queries in a sequence; the mean, rounded up, if sequences are packed."""
    return -(-problem.seqlen_q // max(problem.batch, 1)) if problem.packed else problem.seqlen_q


# The most splits of a sequence's keys that the merge takes, and where bits must repeat and queries fill several tiles
# (docs/decisions.md#hopper-split-keys).
MAX_SPLITS, REPEATED_SPLITS = 32, 4
# Keys of a split at least; twice as many where there are 2,048 or more, since merging a split then takes as long as it saves.
MIN_SPLIT_KEYS = 256


def num_splits(config: Config, problem: Problem, seqlen_k: int) -> int:
    """How many splits a query tile's keys have; all of them have nearly the same number of key blocks.

    At most one split of a tile for every core; where bits must repeat, the lengths of one sequence alone decide.
    """
    blocks = -(-seqlen_k // config.tiles.tile_n)
    if problem.spec.deterministic:
        most = MAX_SPLITS if problem.seqlen_q <= config.tile_queries else REPEATED_SPLITS
    else:
        most = devices.of(problem.device).cores // sizes.larger(tile_count(config, problem), 1)
        most = sizes.larger(sizes.smaller(most, MAX_SPLITS), 1)
    least = sizes.larger(sizes.smaller(seqlen_k // 4, 2 * MIN_SPLIT_KEYS), MIN_SPLIT_KEYS)
    size = sizes.larger(-(-blocks // most), -(-least // config.tiles.tile_n))
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
    products = 2 * tiles.tile_m * tiles.tile_n * (tiles.width + tiles.width_o) / 4096
    issue = INSTRUCTIONS * tiles.tile_m * tiles.tile_n / 128
    loads = tiles.element_bytes * tiles.tile_n * (tiles.width + tiles.width_o) / LOADED
    return max(HIDDEN * (products + issue) + SYNC, loads)


def estimated_clocks(config: Config, problem: Problem, seqlen_k: int, cores: int) -> float:
    """An estimate of the clocks of the busiest core, good for comparing the tiles of one call and for nothing else.

    The constants were fitted to published kernels on this chip, not to these kernels. The estimates are 5 to 35 % too short, and
    the tile with the fewest was the fastest one in all 36 rows of the benchmark (docs/decisions.md#hopper-tile-model). Where rows
    end before the last key, a tile is taken to be as long as its last row, on average.
    """
    tiles, seqlen_q = config.tiles, mean_seqlen_q(problem)
    seqlen_k = -(-seqlen_k // max(problem.batch, 1)) if problem.packed else seqlen_k
    parts = num_splits(config, problem, sizes.larger(seqlen_k, 1)) if config.split else 1

    def tile_clocks(blocks: float) -> float:
        return OPEN / tiles.q_stages + blocks / parts * block_clocks(tiles)

    most, count = -(-seqlen_k // tiles.tile_n // parts) * parts, tile_count(config, problem) * parts
    if config.form == "full":
        return -(-count // cores) * tile_clocks(most) + MERGE * config.split
    # Along a diagonal the last rows of tiles end half of the square before the last key, on average.
    shorter = sizes.larger(0, sizes.smaller(seqlen_q, seqlen_k) - config.tile_queries) / 2
    mean = (seqlen_k - shorter) / tiles.tile_n + (config.tile_queries % tiles.tile_n > 0) / 2
    balanced = count / cores * tile_clocks(sizes.smaller(mean, most))
    return sizes.larger(tile_clocks(most), balanced) + MERGE * config.split
