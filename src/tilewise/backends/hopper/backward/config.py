"""Tile sizes, registers and shared memory of Hopper's backward kernels, and which of them a problem gets.

This module imports no DSL and runs on any machine. Every kernel of the backward is described by a :class:`Backward`, whose tiles are those
of a row of :data:`tilewise.backends.hopper.backward.table.TABLE`.

There are three ways to compute the three gradients (docs/algorithm.md#6-backward):

* two passes: dK and dV over key tiles, dQ over query tiles. Seven products for each pair of tiles, and every run gives the same bits.
* one pass: the pass over key tiles also makes dQ and accumulates it in fp32 in global memory. Five products for each pair of
  tiles. The order of the additions is whatever the CTAs happen to take, or, where a launch says so, that of the key tiles.
* dS kept: the pass over key tiles writes dS to memory, for some heads and keys at a time, and a pass over query tiles makes dQ of it. Five
  products, and every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tilewise import device as devices
from tilewise.backends.hopper.backward.parameters import parameters
from tilewise.backends.hopper.backward.table import TABLE, BackwardRow, Passes
from tilewise.backends.hopper.backward.tiles import (
    SHEET_BLOCK,
    STATISTICS_ALIGNMENT,
    KeyTiles,
    QueryTiles,
    SheetTiles,
    StatisticSlots,
    shared_of,
)
from tilewise.backends.hopper.config import (
    DROPPED,
    DTYPES,
    ELEMENT_BYTES,
    PLAIN,
    SHIPPED,
    Expressions,
    Formed,
    Traced,
    band_of,
    bits_serve,
    dtypes_of,
    ends_at_least,
    keys_before,
    keys_of,
    mean_keys_per_query,
    reasons_of_slopes,
    served_form,
)
from tilewise.backends.hopper.expected import Expected
from tilewise.backends.hopper.pair_bias import pair_bias_of, score_of
from tilewise.backends.hopper.parameters import SCORES, Parameters
from tilewise.backends.hopper.tables import line_of
from tilewise.problem import Problem


@dataclass(frozen=True)
class Backward(Formed):
    """The record that the kernels of one backward are compiled for.

    Attributes:
        queries: None where the pass over key tiles accumulates dQ.
        trained: whether the tensor that the score reads wants a gradient; a table's is always summed.
        Other fields are those of :class:`tilewise.backends.hopper.forward.config.Config`.
    """

    keys: KeyTiles
    queries: QueryTiles | SheetTiles | None
    dtype: str
    form: str
    score: str = ""
    packed: bool = False
    traced: Traced = PLAIN
    dropout: bool = False
    trained: bool = False

    @property
    def subtracts(self) -> bool:
        """Whether products subtract lse and delta (:mod:`tilewise.backends.hopper.backward.subtrahends`); untried with dropout or ALiBi."""
        return self.dtype == "bf16" and self.keys.subtracts and not (self.dropout or self.biased)

    @property
    def stores_first(self) -> bool:
        """:attr:`KeyTiles.stores_first`, and of packed sequences where products subtract (docs/decisions.md#hopper-ordered-dq)."""
        return self.keys.stores_first or (self.packed and self.subtracts)

    @property
    def orders(self) -> bool:
        """Whether a launch may have dQ added up in the order of the key tiles: :func:`adds_in_order`."""
        return adds_in_order(self)

    @property
    def statistics(self) -> StatisticSlots:
        """The place of the statistics in the pass over keys."""
        return StatisticSlots(self.keys.stages, self.subtracts)

    @property
    def pairs(self) -> bool:
        """Whether the kernel asks something about every pair of a query and a key: an expression or dropout."""
        return self.dropout or self.traced != PLAIN

    @property
    def separate_ds(self) -> bool:
        """Whether dS is made of other numbers than the P that enters dV: of slope · P, or of P without dropout."""
        return self.score == "softcap" or self.dropout or self.traced.sloped

    @property
    def name(self) -> str:
        """How its kernels' symbols begin, which end in ``_rows``, ``_keys``, ``_queries`` or ``_sum``: among the bits of what ships."""
        return name_of(self)

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The facts that the compiled kernels of the passes over keys and over queries are held to; the others have no roles."""
        return expected_of(self)

    @property
    def parameters(self) -> Parameters:
        """The tensors and numbers of a launch, in order."""
        return parameters(self)

    @property
    def tile_m(self) -> int:
        """Queries of a tile of the pass over queries, or of a block of the accumulated dQ."""
        return self.queries.tile_m if self.queries else self.keys.tile_m

    @property
    def continues(self) -> bool:
        """Whether a launch may have some of the keys only: rows' ends are numbers, which may count from any key."""
        return self.keys.keeps_ds and self.of_numbers and not self.packed

    @property
    def planned(self) -> bool:
        """Whether the first kernel plans packed sequences (:mod:`tilewise.backends.hopper.backward.packed_plan`)."""
        return self.packed and (self.keys.sums_dq or self.keys.keeps_ds)

    @property
    def packs_sheet(self) -> bool:
        """Whether dS of packed sequences is kept: the plan says where, and how many heads a launch has."""
        return self.packed and self.keys.keeps_ds

    @property
    def statistics_gap(self) -> int:
        """The rows by which the statistics of packed sequences lie further apart than their own rows: see :func:`packed.spaced`. Whole
        query blocks of each pass fit, and the next multiple of STATISTICS_ALIGNMENT is not past the next sequence's."""
        return STATISTICS_ALIGNMENT + max(self.keys.tile_m, self.tile_m)

    @property
    def queries_first(self) -> bool:
        """Whether the pass over queries comes first and makes the statistics that both passes need."""
        return self.queries is not None and self.queries.makes_statistics

    @property
    def makes_queue(self) -> bool:
        """Whether a launch makes the queue of key tiles, and its first kernel sets it to zero; packed sequences bring theirs."""
        return self.keys.queued and not self.packed

    @property
    def parted(self) -> bool:
        """Whether CTAs may share a key tile: :func:`shares_tiles`."""
        return shares_tiles(self)

    @property
    def flagged(self) -> bool:
        """Whether the pass over keys begins under that over queries and awaits its statistics (docs/decisions.md#hopper-queries-first)."""
        return self.queries_first and self.form == "full"

    def statistics_rows(self, p: Problem, counts: int = 0) -> int:
        """The number of elements of a head in the buffers of lse2 and delta: :func:`statistics_rows_of`."""
        return statistics_rows_of(self, p, counts)

    def blocks(self, p: Problem) -> int:
        """The number of query blocks of a head whose dQ is accumulated."""
        return p.seqlen_q // self.keys.tile_m + p.batch + 1 if self.packed else -(-p.seqlen_q // self.keys.tile_m)


def adds_in_order(config: Backward) -> bool:
    """Whether a launch may have dQ added up in the order of the key tiles, as :attr:`Backward.orders` says
    (docs/decisions.md#hopper-ordered-dq): tiles come from a queue, the query blocks of each are an interval, and no other gradient is
    summed as CTAs come."""
    return config.keys.sums_dq and config.keys.queued and config.form != "bits" and not config.trained


def shares_tiles(config: Backward) -> bool:
    """Whether CTAs share key tiles, as :attr:`Backward.parted` says (:mod:`tilewise.backends.hopper.backward.parts`).

    Disabled for packed tiles dealt through mailboxes, for clusters, for tiles that write numbers of their own, and where registers run
    out (a table, the gradient of a bias, a softcap).
    """
    keys = config.keys
    if config.packed and not keys.queued:
        return False
    alone = config.trained or keys.halved or (keys.keeps_ds and keys.reads_late)
    return (keys.overlaps or keys.keeps_ds) and not alone


def statistics_rows_of(config: Backward, p: Problem, counts: int) -> int:
    """:meth:`Backward.statistics_rows`: whole query blocks of each pass, for each sequence; then the flags of the query tiles, a whole
    number of blocks too. ``counts``: of warpgroups that have left parts of shared tiles, before the last element of all."""
    counts += counts > 0
    if config.packed:  # the rows past the last sequence count as one more
        rows = p.seqlen_q + (p.batch + 1) * config.statistics_gap + counts
        return -(-rows // STATISTICS_ALIGNMENT) * STATISTICS_ALIGNMENT
    flags = -(-p.seqlen_q // (16 * config.tile_m)) * 16 if config.flagged else 16 if config.keys.counts else 0
    return flags + -(-counts // 16) * 16 + max(-(-p.seqlen_q // m) * m for m in (config.keys.tile_m, config.tile_m))


def name_of(config: Backward) -> str:
    """:attr:`Backward.name`."""
    k, (width, width_v) = config.keys, config.keys.dims
    dims = f"d{width}" + (f"v{width_v}" if width_v != width else "")
    second = config.queries.name if config.queries else "queue" if k.queued else "sum"
    flags = config.words + "_packed" * config.packed
    flags += "" if config.traced == PLAIN else f"_{config.traced.digest}"
    return f"backward_{config.dtype}_{dims}_{config.form}{flags}_{k.name}_{second}{'_counted' * k.counts}"


def expected_of(config: Backward) -> tuple[Expected, ...]:
    """:attr:`Backward.expected`."""
    keys, queries = config.keys, config.queries
    hidden = None if keys.split or keys.dp_late else keys.tile_m // 2
    roles = keys.registers, keys.registers_load
    shared = shared_of(keys, config.statistics)
    found = [Expected(f"{config.name}_keys", roles, shared, hidden, idle_loops=True, gathers=config.parted)]
    if queries:
        roles, kept = (queries.registers, queries.registers_load), keys.keeps_ds
        hidden = None if kept else queries.tile_n // 2
        more = Expected(f"{config.name}_queries", roles, queries.shared, hidden, stores=not kept, idle_loops=True)
        found.append(more)
    return tuple(found)


# -- What ships ---------------------------------------------------------------------------------------------------

# Bytes of a sheet of dS: of as many tiles of keys as fit into the first, of as many heads of packed sequences as fit into the second; or
# of one tile for every CTA, or one head, if those fit into the third.
SHEET_ROOM, PACKED_ROOM, SHEET_LIMIT = 1 << 30, 2 << 30, 4 << 30
LEAST_SCALE = 1e-12  # products subtract lse / softmax_scale

CANDIDATES = (
    Passes(KeyTiles(128, 128, tile_m=64, stages=6), QueryTiles(128, 128, warpgroups=2, tile_n=112, stages=5)),
    Passes(KeyTiles(128, 128, tile_m=64, stages=6, sums_dq=True, dq_first=True)),
)


def candidates() -> list[Backward]:
    """Backwards that are built to be measured and are not shipped: tiles that are worth it, full and causal, in bf16."""
    return [Backward(*passes, "bf16", form) for passes in CANDIDATES for form in ("full", "upper")]


def shipped() -> list[Backward]:
    """Every backward that is compiled ahead of time."""
    rows = TABLE.values()
    kinds = [(form, False) for form in SHIPPED] + [(form, True) for form in SHIPPED if form in ("upper", "band")]
    # Tiles and the fields of Backward that differ from its defaults.
    found = [
        (passes, {"form": form, "score": "softcap" * softcap, "packed": packed})
        for softcap in (False, True)
        for form, packed in kinds
        for row in rows
        for passes in (row.two_passes_of(form, packed, softcap), row.keeping(form, packed, softcap))
    ]
    found += [
        (Passes(keys), {"form": form, "packed": packed, "score": "softcap" * softcap})
        for softcap in (False, True)
        for form, packed in kinds
        for row in rows
        if row.form_in(form, packed, softcap) == form and (keys := row.summed(form, packed, softcap=softcap))
    ]
    found += [(Passes(row.bits), {"form": "bits"}) for row in rows if row.bits]
    dropped = [(form, False) for form in DROPPED] + [("upper", True)]
    found += [
        (Passes(row.summed(form, packed, dropout=True)), {"form": form, "packed": packed, "dropout": True})
        for row in rows
        if row.dropout
        for form, packed in dropped
    ]
    found += [
        (Passes(keys), {"form": form, "packed": packed, "score": score, "trained": trained})
        for score, x in SCORES.items()
        for form in x.forms
        for packed, trained in x.ways
        for row in rows
        if (keys := row.biased(score, form, packed))
    ]
    found = [(x, more) for x, more in found if x and exists(x.keys, more["form"], more.get("packed", False))]
    every = [Backward(*passes, dtype=dtype, **options) for passes, options in found for dtype in DTYPES.values()]
    return [x for x in every if ships(x)]


def ships(config: Backward) -> bool:
    """Whether a kernel's dtype ships, and its form: rows that see all keys have none with a softcap."""
    dims, form = config.keys.dims, config.form
    rare = bool(config.score) or config.dropout or (form != "full" and dims[0] in (96, 192))
    return config.dtype in dtypes_of(*dims, rare) and not (form == "full" and config.score == "softcap")


# -- The choice ----------------------------------------------------------------------------------------------------


def exists(keys: KeyTiles, form: str, packed: bool) -> bool:
    """Whether there is a kernel with these tiles: dS that is kept needs rows with two ends at most; counts, equal sequences. Two CTAs
    share a tile of packed sequences where dS is kept; elsewhere none has been tried."""
    if keys.keeps_ds:
        return form in SHIPPED
    return not (packed and (keys.counts or keys.halved))


def reasons(p: Problem) -> list[str]:
    """Every reason why these kernels cannot run the backward of a problem whose forward they can. Another backend then runs both."""
    found = _reasons_of_leaves(p) if p.spec.lookups else []
    # Of all launches here one has more than a number of CTAs along y, and what has 2**31 of them along x exceeds any memory.
    found += devices.beyond_grid({"its statistics of rows": (1, p.heads_q)})
    if str(p.dtype) not in DTYPES:  # which the forward refuses by name
        return found
    # Two passes first: what a sheet may take depends on the device, which need not be here.
    if not any(two_passes(row, p) for row in rows_for(p)) and chosen_row(p) is None:
        packed = "packed sequences with " * p.packed
        found.append(f"its backward has no tiles for {packed}head dims {p.head_dim} and {p.head_dim_v}")
    return found


def _reasons_of_leaves(p: Problem) -> list[str]:
    """Every reason why no kernel has the gradient of a tensor that the score reads: there are kernels for ALiBi's slopes, for a table by
    distance and for a bias by pair."""
    if with_bias(p) is not None:
        return []
    lined = line_of(p) is not None
    why = [] if lined else reasons_of_slopes(p)
    if why is None:
        return [
            "the gradient of a tensor that the score reads, other than causal ALiBi's slopes, a table that is read by distance, and a "
            "bias by pair in q's dtype that heads and sequences do not share; detach the tensor if it needs none"
        ]
    wide, widest = max(p.head_dim, p.head_dim_v), max(max(dims) for dims, row in TABLE.items() if row.alibi)
    # The kernels that sum slopes are of dense calls, which know a band that is cut by its rows' ends.
    cut = p.packed and (band := band_of(p)) is not None and (band.start, band.stop) != (0, p.seqlen_k)
    why += ["a mask other than causal"] if cut else []
    why += ["packed sequences"] if p.packed else []
    why += ["dropout"] if p.spec.dropout_p else []
    why += ["deterministic=True"] if p.spec.deterministic else []
    why += [f"head_dim {wide}, above {widest}"] if wide > widest else []
    what = "a table by distance" if lined else "ALiBi's slopes"
    return [f"the gradient of {what} with {reason}" for reason in why]


def rows_for(p: Problem) -> Iterator[BackwardRow]:
    """The rows of TABLE that hold both head dims, the first one first."""
    return (row for dims, row in TABLE.items() if p.head_dim <= dims[0] and p.head_dim_v <= dims[1])


class Chosen(NamedTuple):
    """A row of TABLE, passes of it, and the form in which their kernels learn the mask."""

    row: BackwardRow
    passes: Passes
    form: str


def chosen_row(p: Problem) -> Chosen | None:
    """The passes of the first row of TABLE that holds both head dims and has some for a problem; None where no row has."""
    return next(filter(None, (one_pass(row, p) or kept_ds(row, p) or two_passes(row, p) for row in rows_for(p))), None)


def one_order_of_rows(p: Problem) -> list[Backward]:
    """The kernels of the backwards of all ways that rows like a problem's may come, dense, padded and packed, deterministic everywhere."""
    row = next(row for row in rows_for(p) if row.one_pass or row.two_passes)
    keys = row.summed("band", packed=False)
    two = keys is None or p.softmax_scale < LEAST_SCALE or keys_before(p) < row.least_keys(keys, packed=False)
    found = {}
    for form, packed in (("upper", False), ("band", False), ("rows", False), ("upper", True), ("band", True)):
        form = row.form_of_two_passes(form, packed) if two else row.form_in(form, packed)
        passes = row.two_passes if two else Passes(row.summed(form, packed))
        found[Backward(*passes, DTYPES[str(p.dtype)], form, packed=packed)] = None
    return list(found)


def two_passes(row: BackwardRow, p: Problem) -> Chosen | None:
    """The passes of a row that each make all scores, if it has any for a problem."""
    form, traced, dropout = form_of(p), Expressions.of(p).traced, p.spec.dropout_p > 0
    form = ends_at_least(form) if p.spec.everywhere else form  # one for dense and packed calls
    if traced == PLAIN and not dropout:
        form = row.form_of_two_passes(form, p.packed)
    passes = row.passes(form, p.spec.score is not None and not traced.score, traced, dropout)
    return Chosen(row, passes, form) if passes and exists(passes.keys, form, p.packed) else None


def choose(p: Problem) -> Backward:
    """The kernels of a problem that has no :func:`reasons` against it."""
    if (biased := with_bias(p)) is not None:
        return biased
    form, traced, dropout = form_of(p), Expressions.of(p).traced, p.spec.dropout_p > 0
    softcap = p.spec.score is not None and not traced.score
    bits = bit_tiles_of(p)
    if form in ("rows", "bits") and bits and bits_serve(p, bits.tile_m, by_columns=True):
        return Backward(bits, None, DTYPES[str(p.dtype)], "bits")
    _, passes, form = chosen_row(p)
    return Backward(*passes, DTYPES[str(p.dtype)], form, "softcap" * softcap, p.packed, traced, dropout)


def with_bias(p: Problem) -> Backward | None:
    """The kernels that read a bias: one pass, however few the keys are. None where dQ must be added up in an order that they have not,
    where bits of a mask would take too much memory, and where no kernel sums the gradient that is wanted: of packed sequences, or of
    elements of a bias by pair that sequences or heads share."""
    score, wanted = score_of(p), bool(p.spec.lookups)
    if not score or str(p.dtype) not in DTYPES:
        return None
    known, form = SCORES[score], keys_of(p)[0]
    form = ends_at_least(form) if p.spec.deterministic else form
    trained = wanted or (False, False) not in known.ways
    form = form if form in known.forms else "bits"
    keys = next(filter(None, (row.biased(score, form, p.packed) for row in rows_for(p))), None)
    if keys is None or (p.packed, trained) not in known.ways:
        return None
    if form == "bits" and not bits_serve(p, keys.tile_m, by_columns=True, scored=True):
        return None
    if score == "bias" and wanted and not pair_bias_of(p).apart(p):
        return None
    config = Backward(keys, None, DTYPES[str(p.dtype)], form, score, p.packed, trained=trained)
    return None if p.spec.deterministic and not config.orders else config


def bit_tiles_of(p: Problem) -> KeyTiles | None:
    """The tiles whose pairs have bits; None where there are none, or where dQ must be added up in one order."""
    return None if p.spec.deterministic else next((row.bits for row in rows_for(p) if row.bits), None)


def kept_ds(row: BackwardRow, p: Problem) -> Chosen | None:
    """The passes of a row that keep dS, if it has any for a problem and the sheet takes no more memory than it may. Of equal sequences the
    lengths and heads of one alone say so: a result does not depend on its batch-mates."""
    form, traced = form_of(p), Expressions.of(p).traced != PLAIN
    form = "band" if form == "upper" else form
    # Everywhere, heads and keys at a time would decide the order of dQ.
    others = traced or p.spec.dropout_p or p.spec.everywhere
    found = None if others else row.keeping(form, p.packed, p.spec.score is not None)
    if found is None or not exists(found.keys, form, p.packed):
        return None
    config = Backward(*found, DTYPES[str(p.dtype)], form, packed=p.packed)
    # Where rows have ends of their own a sheet has room for pairs that none sees: few heads at a time then leave CTAs idle, which at D 512
    # still beats what else there is.
    limit = SHEET_ROOM // 4 if form == "rows" and not found.keys.halved else SHEET_LIMIT
    return Chosen(row, found, form) if least_sheet(config, p) <= limit else None


def least_sheet(config: Backward, p: Problem) -> int:
    """Bytes of the smallest sheet of a problem; of packed sequences one in which a key head's pairs are all of one sequence."""
    if p.packed:
        return ELEMENT_BYTES * SHEET_BLOCK * most_blocks(config.queries, p)
    return least_tiles(config, p, lambda: devices.of(p.device).cores) * sheet_bytes(config.queries, p)


def least_tiles(config: Backward, p: Problem, cores: Callable[[], int]) -> int:
    """How many tiles of keys a sheet has at least: one for every CTA, or all of a head. ``cores``: of the device, if need be."""
    return cores() // config.keys.ctas if config.continues else sheet_blocks(config.queries, p, p.seqlen_k)[0]


def sheet_blocks(queries: SheetTiles, p: Problem, seqlen_k: int) -> tuple[int, int]:
    """How many blocks of so many keys, and of queries, a head's sheet has."""
    return queries.blocks(p.seqlen_q, seqlen_k)


def most_blocks(queries: SheetTiles, p: Problem) -> int:
    """How many blocks the sheet of a key head of packed sequences has at most: of all query heads of its group."""
    return queries.most_blocks(p.seqlen_q, p.seqlen_k, p.batch) * (p.heads_q // p.heads_k)


def sheet_bytes(queries: SheetTiles, p: Problem) -> int:
    """Bytes of a sheet for SHEET_KEYS keys of one key head: blocks of all queries of its group."""
    return ELEMENT_BYTES * SHEET_BLOCK * sheet_blocks(queries, p, p.seqlen_k)[1] * (p.heads_q // p.heads_k)


def one_pass(row: BackwardRow, p: Problem) -> Chosen | None:
    """The tiles of a single pass, if this head dim has any and they pay. Where bits must repeat, dQ is added up in order, from a queue."""
    in_order, dropout, softcap = p.spec.deterministic, p.spec.dropout_p > 0, p.spec.score is not None
    if Expressions.of(p).traced != PLAIN:
        return None
    form = ends_at_least(form_of(p)) if in_order else form_of(p)
    form = form if dropout else row.form_in(form, p.packed, softcap)
    keys = row.summed(form, p.packed, dropout, softcap and not dropout)
    if keys is None or not exists(keys, form, p.packed) or (keys.subtracts and p.softmax_scale < LEAST_SCALE):
        return None
    if dropout or softcap:
        return Chosen(row, Passes(keys), form)
    if p.spec.everywhere:  # no length decides, nor whether sequences are packed
        return None if keys_before(p) < row.least_keys(keys, packed=False) else Chosen(row, Passes(keys), form)
    few, short = few_tiles(keys, p), mean_keys_per_query(p) < row.least_keys(keys, p.packed)
    if in_order:
        two = (few or short) and not p.packed  # the lengths of others must not decide
    else:
        two = short and not few
    return None if two else Chosen(row, Passes(keys), form)


def few_tiles(keys: KeyTiles, p: Problem) -> bool:
    """Whether key tiles are so few that they would keep no more than half of the multiprocessors at work. If they may be shared, two
    passes, whose tiles may not, are slower then, however few the keys are. Where bits must repeat, one sequence alone decides."""
    tiles = (1 if p.spec.deterministic else p.batch_dim) * p.heads_k * -(-p.seqlen_k // keys.tile_n)
    return keys.overlaps and 2 * tiles <= devices.of(p.device).cores


def form_of(p: Problem) -> str:
    """The form of FORMS by which a kernel learns the keys of a row. A band keeps the form that the mask has before its ends are cut
    to the keys that are seen."""
    form, band = keys_of(p)[0], band_of(p)
    return form if band is None or p.packed or form in ("rows", "bits") else served_form(band.form, p)
