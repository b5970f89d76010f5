"""The facts that both passes on Hopper share: limits of the machine, dtypes, forms of a mask, and expressions traced into a kernel.

Nothing here imports the DSL: it runs on any machine.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewise import expr, sizes
from tilewise.backends.hopper.parameters import (
    ANY,
    FP32,
    INT32,
    MASK_FIELDS,
    MULTIPLE,
    SCORES,
    Parameter,
)
from tilewise.expr import Expr
from tilewise.masks import facts
from tilewise.masks.facts import Band, as_band
from tilewise.planning.bit_tiles import BUDGET, bits_bytes
from tilewise.problem import Problem

SHARED_LIMIT = 232_448  # bytes of shared memory that one CTA may have
ROWS = 64  # of a warpgroup's tile: the height of a wgmma
MAX_COLUMNS = 256  # of a wgmma's accumulator: the widest tile of keys, or of O, that one product makes
ALIGNMENT = 1024  # bytes after which the 128-byte swizzle repeats
DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
ELEMENT_BYTES = 2  # of an element of q, k, v and o, whichever of DTYPES
ORDERED_KEYS = 2048  # of a segment, where rows have one order of sums: docs/decisions.md#hopper-one-order
LONG = 1 << 30  # packed tensors have fewer rows than this
APART = 1 << 34  # elements between two rows, more than tensor maps of packed sequences can say
# The kept keys of a row: all; up to an end that moves with the row; between two such ends; between two ends that tensors hold; those of
# any mask, by lists of key blocks and a bit for each pair.
FORMS = ("full", "upper", "band", "rows", "bits")
SHIPPED = FORMS[:4]
DROPPED = ("upper", "rows")  # those with dropout: bands with two ends come as tensors
SHARING = 4  # CTAs that read one head's keys at a time, so that K and V come from L2: docs/decisions.md#hopper-sharing


def dtypes_of(width: int, width_v: int, rare: bool = False) -> tuple[str, ...]:
    """The dtypes in which kernels of these head dims ship. In fp16 those of two head dims, of one above 256, and ``rare`` ones are compiled
    at a first call, or left to Triton: models with these run in bf16. Rare are a score, dropout, selected keys, and a mask at head dims of
    models that generate images, which have none (docs/decisions.md#hopper-shipped-dtypes)."""
    return tuple(DTYPES.values()) if width == width_v <= 256 and not rare else ("bf16",)


# -- Registers -----------------------------------------------------------------------------------------------------


def registers_together(warpgroups: int) -> int:
    """The most registers that one thread of each of a CTA's warpgroups may have, all of these threads together.

    A multiprocessor has 512 for them. A launch gives every thread the same multiple of 8, and setmaxnreg moves registers from
    one warpgroup to another: what the launch left over belongs to nobody. A warpgroup that asks for it waits forever.
    """
    return 512 // warpgroups // 8 * 8 * warpgroups


# -- Masks ---------------------------------------------------------------------------------------------------------


class Formed:
    """The facts that follow from the ``form`` of a kernel, one of FORMS, and from its ``score``, one of SCORES."""

    form: str
    score: str = ""
    dropout: bool = False
    trained: bool = False  # whether the tensor that the score reads wants a gradient
    short_tanh: bool = False  # as the forward's Config has it

    @property
    def words(self) -> str:
        """The part of a name that tells the options."""
        words = self.score, "dropout" * self.dropout, SCORES[self.score].word * self.trained
        return "".join(f"_{word}" for word in words if word)

    @property
    def biased(self) -> bool:
        """Whether a bias is added in base 2."""
        return bool(SCORES[self.score].reads)

    @property
    def sums_bias(self) -> bool:
        """Whether the pass over keys sums the gradient of a bias in registers."""
        return self.trained and self.score != "bias"

    @property
    def stores_bias(self) -> bool:
        """Whether the pass over keys stores the gradient of a bias by pair, tile by tile."""
        return self.trained and self.score == "bias"

    @property
    def by_rows(self) -> bool:
        """Whether the ends of rows are tensors."""
        return self.form == "rows"

    @property
    def of_numbers(self) -> bool:
        """Whether the ends of rows are numbers, the same for all heads."""
        return self.form in ("full", "upper", "band")

    @property
    def mask_fields(self) -> tuple[str, ...]:
        """The optional fields that hold the mask, of MASK_FIELDS."""
        return MASK_FIELDS.get(self.form, ())

    @property
    def has_lower(self) -> bool:
        """Whether a row may begin after the first key."""
        return self.form not in ("full", "upper")

    @property
    def has_upper(self) -> bool:
        """Whether a row may end before the last key."""
        return self.form != "full"


def band_of(problem: Problem) -> Band | None:
    """The mask of a problem as a band, or None if it is none; packed and paged sequences add their own offsets later."""
    off = None if problem.packed or problem.paged else problem.seqlen_k - problem.seqlen_q
    return as_band(problem.spec.region, off, problem.seqlen_k)


def keys_of(problem: Problem) -> tuple[str, Band]:
    """``(form, band)``: how a kernel learns which keys a row has, and the band of these keys.

    Where the form says that ends are numbers, the band is cut to the keys that some row sees; packed sequences are cut by the
    kernel. Otherwise the ends of rows are tensors and the band holds all keys. An expression or dropout has to know a key's
    place among all: a band that would be cut then becomes tensors too, as every band with two ends does beside dropout, so that
    fewer kernels ship.
    """
    band, every = band_of(problem), Band(None, None, 0, problem.seqlen_k)
    if band is None:
        return ("rows" if problem.spec.region.predicate is None else "bits"), every
    dropout = problem.spec.dropout_p > 0
    if problem.packed or problem.paged:
        return served_form(band.form, problem), band
    band = band.cut(problem.seqlen_q)
    whole = (band.start, band.stop) == (0, problem.seqlen_k)
    if (not whole and (is_traced(problem) or dropout)) or (dropout and band.form == "band"):
        return "rows", every
    return served_form(band.form, problem), band


def forward_keys_of(problem: Problem) -> tuple[str, Band]:
    """:func:`keys_of` as a forward has them. Where sums have one order, its blocks lie at fixed keys, and none before the first that some
    row sees is cut off."""
    (form, band), whole = keys_of(problem), band_of(problem)
    if not problem.spec.everywhere or whole is None or problem.packed or problem.paged:
        return form, band
    band = replace(band, lo=band.lo if band.start == whole.start else whole.lo, start=whole.start)
    return band.form, band


def served_form(form: str, problem: Problem) -> str:
    """The form whose kernels serve another one of numbers: rows that see all keys end far away in packed sequences, over pages, and beside
    dropout or a softcap, so that fewer kernels ship (docs/decisions.md#hopper-fewer-forms)."""
    capped = problem.spec.score is not None and not is_traced(problem)
    return ends_at_least(form) if problem.packed or problem.paged or problem.spec.dropout_p > 0 or capped else form


def ends_at_least(form: str) -> str:
    """The form whose kernels serve another one where "full" ships none: rows that see all keys end far away."""
    return "upper" if form == "full" else form


def keys_before(problem: Problem) -> float:
    """How many keys before its own place a row sees at most, as the mask's windows say, whatever the lengths are."""
    return min((int(n) for n in _LEFT.findall(problem.spec.mask_text)), default=math.inf)


_LEFT = re.compile(r"window\((\d+), \w+\)")


def mean_keys_per_query(problem: Problem) -> float:
    """About how many keys a query sees: the mean over 16 queries, of packed sequences as if all were equally long. Half of all keys
    where only the device knows."""
    if band_of(problem) is None:
        return problem.seqlen_k / 2
    band, parts = band_of(problem), max(problem.batch, 1) if problem.packed else 1
    seqlen_q, seqlen_k = problem.seqlen_q / parts, problem.seqlen_k / parts
    off = seqlen_k - seqlen_q if problem.packed else 0

    def seen(i: float) -> float:
        first = band.start if band.lo is None else sizes.larger(band.start, i + off + band.lo)
        stop = sizes.smaller(band.stop, seqlen_k)
        return sizes.larger(0.0, (stop if band.hi is None else sizes.smaller(stop, i + off + band.hi)) - first)

    return sum(seen((n + 0.5) / 16 * (seqlen_q - 1)) for n in range(16)) / 16


def blocks_of(problem: Problem) -> tuple[int, int]:
    """The queries and keys of the blocks on which a mask's predicate is constant (:func:`facts.blocks_of`); (1, 1) where there is none."""
    predicate = problem.spec.region.predicate
    return (1, 1) if predicate is None else facts.blocks_of(predicate)


def lists_fit(problem: Problem, size: int) -> bool:
    """Whether lists of tiles of ``size`` queries and keys take no more memory than the bits of a call may."""
    tiles = -(-problem.seqlen_q // size) * -(-problem.seqlen_k // size)
    return 4 * problem.batch * problem.heads_q * tiles <= BUDGET


def bits_serve(problem: Problem, crossing: int, by_columns: bool = False, scored: bool = False) -> bool:
    """Whether a bit for each pair of a partial tile can say what a mask keeps.

    Args:
        crossing, by_columns: of the kernel's tiles, as :class:`tilewise.planning.bit_tiles.BitTiles` has them.
        scored: whether the kernel computes the problem's score.
    """
    if (problem.spec.score is not None and not scored) or problem.spec.dropout_p:
        return False
    # Without a score the call runs in pieces (:mod:`tilewise.backends.hopper.pieces`).
    return not scored or bytes_of_bits(problem, crossing, by_columns) <= BUDGET


def bytes_of_bits(problem: Problem, crossing: int, by_columns: bool = False) -> int:
    """The most bytes that the bits of a problem's mask take, as :func:`bits_serve` has the arguments."""
    shape = problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k
    return bits_bytes(problem.spec.region, shape, crossing, by_columns, problem.extras)


# -- Tensors -------------------------------------------------------------------------------------------------------


def strides_addressable(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether rows have unit stride and lie at multiples of 16 bytes from each other, no two in one place. The tensor map of a packed
    sequence has a single row's stride too: the start of a sequence is an offset there that wraps around."""
    outer = zip(shape[:-1], stride[:-1], strict=True)
    return (stride[-1] == 1 or shape[-1] == 1) and all(
        n % MULTIPLE == 0 and (size <= 1 or 0 < n < APART) for size, n in outer
    )


# -- Scores --------------------------------------------------------------------------------------------------------


def cap_of(problem: Problem) -> float | None:
    """The cap of a score that is one softcap; NaN if the score is anything else, None if there is no score."""
    score = problem.spec.score
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


def is_traced(problem: Problem) -> bool:
    """Whether the score has to be traced into a kernel: only no score and one softcap are shipped."""
    return problem.spec.score is not None and math.isnan(cap_of(problem))


_ALIBI = re.compile(r"s - \((?:fitted_)?float(\d+)\[(?:\w+, )?h\] \* abs\(\(i \+ off\) - j\)\)")


def slopes_of(problem: Problem) -> int | None:
    """The place among the extras of ALiBi's slopes, where its bias is linear (:mod:`tilewise.backends.hopper.kit.slopes`); None for any
    other score, and where there are :func:`reasons_of_slopes`."""
    found = reasons_of_slopes(problem)
    return None if found is None or found else alibi_of(problem)


def alibi_of(problem: Problem) -> int | None:
    """The place among the extras of the slopes of a score that is ALiBi; None for any other."""
    found = _ALIBI.fullmatch(str(problem.spec.score))
    return int(found[1]) if found else None


def reasons_of_slopes(problem: Problem) -> list[str] | None:
    """Every reason why no kernel takes ALiBi's bias as linear: it is where slopes are one fp32 number for each head and no query sees a
    key past its own place. None where the score is not ALiBi."""
    place = alibi_of(problem)
    if place is None:
        return None
    form, band = keys_of(problem)
    # Packed sequences add their own offsets to the band's end.
    own = band.hi == 1 + (0 if problem.packed else problem.seqlen_k - problem.seqlen_q)
    facts, found = problem.extras[place], ["pages"] if problem.paged else []
    if form != "upper" or not own:
        found.append("a mask other than causal")
    if str(facts.dtype) != "torch.float32" or len(facts.shape) != 1:
        found.append(
            f"slopes {facts.shape} {str(facts.dtype).removeprefix('torch.')} in place of one fp32 number a head"
        )
    if problem.softmax_scale <= 0:
        found.append(f"softmax_scale {problem.softmax_scale}, which is not above 0")
    return found


# -- Expressions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """The score that is compiled into a kernel, as :func:`tilewise.expr.to_text` prints it; "" where there is none.

    Attributes:
        score: the expression that the scores become.
        leaves: the dtype and number of dimensions of each tensor that it reads, in order: "float32:2 bool:4".
        numbers: the kind of each of its numbers, in order: "f" or "i".
        reads: how many tensor elements a pair reads that no other pair shares.
    """

    score: str = ""
    leaves: str = ""
    numbers: str = ""
    reads: int = 0

    @property
    def tensors(self) -> list[tuple[str, int]]:
        """The dtype and the number of dimensions of each leaf."""
        return [(dtype, int(rank)) for dtype, _, rank in (leaf.partition(":") for leaf in self.leaves.split())]

    @property
    def leaf_parameters(self) -> tuple[Parameter, ...]:
        """The tensors that a launch gets; a truth value is a byte, and one dimension the least."""
        return tuple(Parameter(f"leaf{n}", x, (ANY,) * max(rank, 1), 0) for n, (x, rank) in enumerate(self.tensors))

    @property
    def number_parameters(self) -> tuple[Parameter, ...]:
        """The numbers that a launch gets."""
        return tuple(Parameter(f"number{n}", {"i": INT32, "f": FP32}[kind]) for n, kind in enumerate(self.numbers))

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
        """Twelve hexadecimal digits that tell the names of traced kernels apart."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]


PLAIN = Traced()


@dataclass(frozen=True)
class Expressions:
    """The traced score of a problem: the kernel's part, the places of its leaves among the extras, and the values of its numbers."""

    traced: Traced
    slots: tuple[int, ...]
    numbers: tuple[int | float, ...]

    @classmethod
    def of(cls, problem: Problem) -> Expressions:
        """The expressions of a problem's score, unless that is a softcap."""
        if not is_traced(problem):
            return cls(PLAIN, (), ())
        tree, numbers = problem.spec.score, []
        reads = expr.lookups(tree)
        slots = list(dict.fromkeys(e.args[0][1] for e in reads))
        score = str(expr.parse(str(expr.abstract(tree, numbers)), slots.index))
        facts = [problem.extras[n] for n in slots]
        leaves = " ".join(f"{str(t.dtype).removeprefix('torch.')}:{len(t.shape)}" for t in facts)
        kinds = "".join("f" if isinstance(n, float) else "i" for n in numbers)
        own = sum({"i", "j"} <= expr.depends_on(*e.args[1:]) for e in reads)
        return cls(Traced(score, leaves, kinds, own), tuple(slots), tuple(numbers))
