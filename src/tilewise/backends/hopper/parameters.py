"""The tensors and numbers that launches take, a row each.

A config has ``parameters``, in the order of its launch's arguments: a row for each argument, or a tuple of rows. The rows say what a launch
is compiled for (:func:`tilewise.backends.hopper.kit.fake.arguments`), in which order the host passes values
(:meth:`tilewise.backends.hopper.host.draft.Draft.launch`), and by which names the launch finds them, in
:data:`tilewise.backends.hopper.kit.params.OptionalParams` too. Nothing here imports the DSL.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tilewise.planning.bit_tiles import THREADS, words_of

INT32, INT64, FP32 = "int32", "int64", "float32"
ANY = ""  # a size that no other one equals
HEADS = "batch", "heads_q"
MULTIPLE = 8  # of a head dim: TMA wants rows that begin at multiples of 16 bytes
DIVISORS = {"dim": MULTIPLE, "dim_v": MULTIPLE, "statistics": 16, "words": 16}  # of sizes that are multiples


class Parameter(NamedTuple):
    """A tensor or a number of a launch.

    Attributes:
        dtype: as torch names it; "": that of q.
        shape: sizes as numbers or by name, equal names being equal sizes; None: a number.
        step: a multiple, in elements, of all strides but the last, which is 1; 0: all strides are any; None: elements lie side by side.
        align: of the address, in bytes; None: that of an element.
    """

    name: str
    dtype: str = INT32
    shape: tuple[int | str, ...] | None = None
    step: int | None = 1
    align: int | None = None


Parameters = tuple[Parameter | tuple[Parameter, ...], ...]


def numbers(*names: str, dtype: str = INT32) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, dtype) for name in names)


def tiled(name: str, *shape: int | str) -> Parameter:
    """A tensor in q's dtype that the copy engine addresses, which wants strides and addresses at multiples of 16 bytes."""
    return Parameter(name, "", shape, MULTIPLE, 16)


def names_of(rows: Iterable[Parameter]) -> tuple[str, ...]:
    return tuple(row.name for row in rows)


# -- What is read of a score ---------------------------------------------------------------------------------------


class Score(NamedTuple):
    """What kernels know about a score.

    Attributes:
        reads: the parameters of both passes. Their loaders: ``kit.slopes``, ``kit.lines``, ``kit.pair_bias``.
        gradient: what the pass over keys writes where the tensor that the score reads wants a gradient.
        word: of the names of kernels that write it; empty where all do.
        forms: of the masks beside which kernels ship.
        ways: (packed, trained) of the backwards that ship; of packed sequences forwards ship too.
    """

    reads: tuple[Parameter, ...] = ()
    gradient: Parameter | None = None
    word: str = ""
    forms: tuple[str, ...] = ()
    ways: tuple[tuple[bool, bool], ...] = ()


SCORES = {
    "": Score(),
    "softcap": Score(),
    # ALiBi; of the gradient a part for each warp of a key tile.
    "alibi": Score(
        (Parameter("slopes", FP32, ("heads_q",)),), Parameter("keys_dbias", FP32, (*HEADS, "warps")), "dslopes",
        ("upper",), ((False, False), (False, True), (True, False)),
    ),
    # Biases by distance i - j from `start` on, in base 2, of each head or of all; sums of the gradient in several places.
    "table": Score(
        (Parameter("line", FP32, (ANY, ANY)), Parameter("start")), Parameter("keys_dbias", FP32, ("slots", "heads_q", "distances")), "",
        ("upper", "full"), ((False, True),),
    ),
    # By pair, (batch or 1, heads_q or 1, row, key), as the tensor lies; its gradient lies as it does. Bits tell every other mask.
    "bias": Score(
        (tiled("bias", *[ANY] * 4),), tiled("keys_dbias", *[ANY] * 4), "dbias",
        ("full", "upper", "bits"), ((False, False), (False, True)),
    ),
}  # fmt: skip
"""The scores that kernels know, by the words of their names; others are traced into a kernel."""
# A pair is kept where its 16-bit value is below `threshold`; `keep` is the factor of a kept pair. The seed is read on the device, so
# that a captured graph draws anew.
DROPOUT = Parameter("seed", INT64, (1,)), Parameter("threshold"), Parameter("keep", FP32)


# -- What is read of a mask ----------------------------------------------------------------------------------------

# The fields by which a kernel learns a mask of a form; of other forms, the numbers of every launch tell it.
MASK_FIELDS = {
    "rows": ("lo", "hi"),
    "bits": ("blocks", "work", "bits", "section"),
}


def of_mask(form: str, rows: str, crossing: int, prefix: str = "") -> list[Parameter]:
    """The tensors that hold a mask of so many ``rows``, or columns where it is read by these; ``crossing``: the keys of a tile of rows."""
    tiles, steps = f"{prefix}tiles", f"{prefix}steps"
    found = {
        "lo": Parameter("lo", INT32, (*HEADS, rows), 0),  # the key interval of every row
        "hi": Parameter("hi", INT32, (*HEADS, rows), 0),
        "blocks": Parameter("blocks", INT32, (*HEADS, tiles, steps), 0),  # to visit, partial ones first
        # The lines of tiles, the order in which they are taken, and the bits of partial tiles (tilewise.planning.bit_tiles.BitTiles).
        "work": Parameter("work", INT32, (*HEADS, tiles, 4), 4, 16),
        "bits": Parameter("bits", INT32, (f"{prefix}partial", THREADS, words_of(crossing)), None, 16),
        "section": Parameter("section", INT32, (1,)),  # the heads of a section, where the tiles' lengths decide it
    }
    return [found[name]._replace(name=prefix + name) for name in MASK_FIELDS.get(form, ())]


# -- The places of sequences ---------------------------------------------------------------------------------------

STARTS = tuple(Parameter(name, INT32, ("starts",)) for name in ("cu_q", "cu_k"))  # where packed sequences begin
SEEN = numbers("first", "last")  # keys before `first` or from `last` on are masked in every packed sequence
QUEUE = Parameter("queue", INT32, (1,))  # how many tiles were taken after each CTA's first
COUNTS = Parameter(
    "counts", INT32, ("counts",)
)  # of each sequence and key head, states that a decoding step has written
LENGTHS = Parameter("seqlens_k", INT32, (ANY,), 0)  # keys of each sequence in pages
PAGES = Parameter("block_table", INT32, (ANY, ANY), 0)  # (sequence, page of the sequence): pages of the pool
# Pages of the pool, and rows from the beginning of a page to that of the next, in K and in V.
POOL = numbers("num_pages", "page_rows")
# Of lists of selected keys: (list, entry), the blocks of keys in order; (row of q, 4), a kit.lists.QueryList each; keys of a block. Keys
# that lie in no pages have 0 rows of a page.
LISTS = Parameter("entries", INT32, (ANY, ANY)), Parameter("tokens", INT32, (ANY, 4)), PAGES, Parameter("block"), *POOL
# Of a launch that has some of the keys: not 0 where earlier keys have left sums of dQ, and where later ones follow.
PORTION = numbers("resumes", "suspends")
# How CTAs share key tiles (tilewise.backends.hopper.backward.parts.Division).
DIVISION = numbers("whole", "parts", "part_heads", "block_bits")
ORDERED = numbers("ordered")  # not 0 where dQ is added up in the order of the key tiles
