"""The compile-time part of a launch, as the object that kernels see, and what each of its facts means."""

from __future__ import annotations

import inspect

MEANINGS = {
    # Tiles (plan._tile_facts)
    "tile_m": "queries of a tile",
    "tile_n": "keys of a tile",
    "pieces": "(first column, columns, width) of each piece of the head dim of q and k (tiles.pieces)",
    "pieces_v": "the same of v's head dim",
    "chunk": "columns of a head dim that are read at a time, where they are multiplied; 0: all, before (Tiles.chunk)",
    "column_parts": "programs, along the grid's second axis, that share a tile's sums by columns",
    "align": "elements of which every stride is a multiple: strides come in units of so many",
    "together": "K and V are loaded together, where V's rows are known by then (Tiles.ahead)",
    "tma": "descriptors load the tiles that they may load",
    "whole": "descriptors may load every tile, so that all tiles are one loop, except listed ones",
    # The problem
    "head_dim": "columns of q and k",
    "head_dim_v": "columns of v",
    "packed": "sequences are packed",
    "dropout": "some pairs are dropped",
    "sink": "each head has a sink",
    "natural": "exponents are natural, as fp32 inputs ask; else in units of log2",
    "precision": "how tl.dot computes fp32 products: 'ieee' or 'tf32'",
    "terms": "bf16 numbers that stand for an element of q, k, v and dO",
    "term_unit": "columns of which a term is a multiple (Tiles.term_unit)",
    "products": "the pairs of terms whose products are added up (config.TERM_PRODUCTS)",
    "upcast": "products are of fp32, as Triton's interpreter has none of bf16",
    "max_logit": "the largest score of each row is stored",
    # The mask
    "masked": "some query does not see some key",
    "lists": "tiles to visit come as lists",
    "ordered": "a row's key tiles, and a key's query tiles, come in the order of their positions",
    "partial_stages": "stages of the loop over a list of partial tiles",
    "varies": "the ends of intervals differ between heads or batch elements, or are read from tensors",
    "lo": "function: the first key of a query; None: unbounded, as all ends",
    "hi": "function: one past the last key of a query",
    "first": "function: the first query of a key",
    "last": "function: one past the last query of a key",
    "keep": "function: whether the predicate keeps a pair; None: there is none",
    # The score and its gradients; functions as kernels.emit lists them, None where there is none
    "general": "S is computed before the softmax, not as the product of q and k times a positive number",
    "binary": "scores are in units of log2",
    "bounded": "scores are bounded, so that rows need no maximum",
    "hides": "a score may be -inf, or its slope not finite",
    "corner": "functions count positions from a tile's corner",
    "score": "function: the score of a pair",
    "weights": "function: 2 to the power of a bounded score",
    "slope": "function: the score's derivative in s",
    "exponent": "function: the exponent of P, where there is a short way to it",
    "rows": "function: sums by rows of leaves' gradients",
    "columns": "function: adds sums by columns of leaves' gradients",
    "leaves": "function: stores or scatters leaves' gradients",
    "near": "function: the distances at which a tensor's index changes",
    "heads": "function: the elements that a score reads at b and h alone",
    "row_grads": "places among the gradients' buffers of those that are summed by rows",
    "pair": "place among leaves, and leading indices, of the leaf whose tiles a descriptor brings; None: none does",
    "tile": "function: the slope in the leaf of that read",
    "place": "function: where a pair of that read lies in the leaf",
    "start": "function: the least distance of that read",
    # Passes of the forward and the backward
    "split": "the program's keys are one split of a row's",
    "dk": "the pass over key tiles makes dK",
    "dv": "the pass over key tiles makes dV",
    "in_parts": "its programs have parts of a key head's query heads (Config.group_parts)",
    "sheet": "queries that are read at once of the sheet to which a pass leaves dS, and P if it makes no sum; 0: it leaves none",
    "strips": "queries of a strip, where a descriptor stores dS; else 0",
    "adds": "of a sheet's kernel: earlier sheets had other batch elements of the sums, which stand in the gradient",
    "unit": "a number that divides both head dims; of a sheet's kernel, seqlen_k",
    "overlap": "the kernel's Role beside its neighbours in the stream, or None",
    # Keys in pages (kernels.paged)
    "pages": "where the keys of a tile lie (paging.Addressing); None: not in pages",
    "page_size": "rows of a page; 0 where a sequence has one page",
    "group": "query heads of a key head, which share a tile",
    "split_tiles": "key tiles of a split at least",
    "splits": "states that are merged",
    "latent": "V is the first columns of K, in its memory",
    "k_scale": "the scale of 8-bit keys is 'one' for all or for 'each'; None: there is none",
    "v_scale": "the same of values",
    # Tangents (kernels.tangent)
    "moved": "function: the tangent of the score",
    "moved_slope": "function: the tangent of its slope",
    # Plans of masks (kernels.tile_map, tile_lists, tile_bits)
    "some": "function: whether the predicate may hold somewhere in a tile",
    "every": "function: whether it holds in all of a tile",
    "width": "entries of a row that are put in order, up to a power of two",
    "block_m": "rows of a block of pairs that are judged at once",
    "many": "the same where keys for which the predicate is the same are one",
    "groups": "groups of ``alike`` keys in a tile",
    "crossing": "keys, or queries, of a tile of 128 lines",
    "by_columns": "lines are keys, not queries",
    "same": "bits of a word, side by side, for which the predicate is the same",
    "alike": "keys side by side, or lines of a tile with bits, for which it is",
}
"""The facts by name. Each kernel reads some of them as ``FACTS.name``; a launch gives those that its kernel reads."""

DEFAULTS: dict[str, object] = {
    **{name: None for name, meaning in MEANINGS.items() if meaning.startswith("function")},
    **dict.fromkeys(("pair", "overlap", "pages", "k_scale", "v_scale")),
    **dict.fromkeys(("tma", "whole", "natural", "ordered", "max_logit", "split", "in_parts", "adds", "latent"), False),
    **dict.fromkeys(("dk", "dv"), True),
    **dict.fromkeys(("chunk", "sheet", "strips"), 0),
    **dict.fromkeys(("terms", "column_parts"), 1),
    "row_grads": (),
    "products": ((0, 0),),
    "precision": "ieee",
}
"""The facts that a launch may leave out."""


class Facts:
    """Sizes, flags and emitted functions, those of MEANINGS, read in kernels as ``FACTS.name``.

    Triton keys its caches on ``repr``, so that tells apart all that differs, functions by their source.

    Raises:
        TypeError: a name that is no fact.
    """

    def __init__(self, **fields: object):
        unknown = fields.keys() - MEANINGS.keys()
        if unknown:
            raise TypeError(f"no facts: {', '.join(sorted(unknown))}")
        self.__dict__.update(DEFAULTS | fields)
        fields = {name: x for name, x in fields.items() if name not in DEFAULTS or x != DEFAULTS[name]}
        # The interpreter's functions have no key.
        shown = {
            name: getattr(x, "cache_key", None) or inspect.getsource(x.fn) if callable(x) else x
            for name, x in fields.items()
        }
        self._text = f"Facts({', '.join(f'{name}={x}' for name, x in shown.items())})"

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Facts) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def mangle(self) -> str:
        """The compile-time facts in names of inner functions; a kernel has one Facts, so it need not tell them apart."""
        return "F"
