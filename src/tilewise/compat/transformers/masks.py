"""transformers' masks as tilewise masks: read by their meaning, O(N) in memory, made once per forward of a model.

transformers describes a mask by a function of ``(b, h, q, kv)``, composed of a few that it knows by name, and by a 2-D
padding mask. Query row ``i`` stands at position ``i + q_offset``, key column ``j`` at ``j + kv_offset``; with
``first = q_offset - kv_offset``, query ``i`` therefore sits at key index ``i + first``, whatever the number of keys::

    causal                  j <= i + first
    sliding_window W        j >= i + first - (W - 1)         W keys, the query's own among them
    bidirectional window W  |j - (i + first)| <= W           2 W + 1 keys
    chunks of C, packed     j in the document of i + first
    padding                 kept[b, j + kv_offset]

Keys behind the last that any query sees (a static cache's unused end) are cut off, after which ``first`` is tilewise's
``off``. A function with no row in :data:`TERMS` is traced (:func:`tilewise.keep`): the same pairs, asked one by one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_

import torch
from torch import Tensor
from transformers import masking_utils

from tilewise.api import attention
from tilewise.caching import cached_property
from tilewise.compat.padding import padding
from tilewise.expr import Expr, lookup
from tilewise.masks import region
from tilewise.masks.catalogue import Mask, causal, documents, keep, key_range, window
from tilewise.planning.tiles import Grid

# What says how a dense mask is made, or when it may be left out: nothing that changes which pairs are kept.
WITHOUT_MEANING = {
    "allow_is_bidirectional_skip",
    "allow_is_causal_skip",
    "allow_torch_fix",
    "config",
    "dtype",
    "local_size",
    "use_vmap",
}


@dataclass(frozen=True)
class MaskCall:
    """One call of transformers' mask interface; the names and defaults are transformers'.

    Attributes:
        q_offset: position of the first query; a static cache's is a tensor of one element.
        attention_mask: bool ``(batch, n)``, by positions from 0; what lies behind n is padding. None: no padding.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor = 0
    kv_offset: int = 0
    mask_function: Callable = masking_utils.causal_mask_function
    attention_mask: Tensor | None = None
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, given: dict) -> MaskCall:
        """Raise NotImplementedError: a keyword that this module does not know, and so cannot honour."""
        unknown = sorted(set(given) - set(cls.__dataclass_fields__) - WITHOUT_MEANING)
        if unknown:
            raise NotImplementedError(
                f"transformers asks for a mask with {', '.join(unknown)}, which tilewise does not know; "
                'load the model with attn_implementation="sdpa"'
            )
        call = cls(**{name: value for name, value in given.items() if name in cls.__dataclass_fields__})
        if isinstance(call.q_offset, Tensor) and call.q_length > 1:  # one key is asked for without reading it
            call = replace(call, q_offset=int(call.q_offset))
        return call

    @property
    def first(self) -> int | Tensor:
        """The key index at which query 0 sits."""
        return self.q_offset - self.kv_offset


@dataclass(frozen=True)
class HandedMask:
    """The ``attention_mask`` of every layer. It is no tensor, and its size does not grow with N².

    Attributes:
        mask: over the first ``keys`` of the ``shape[-1]`` keys; no query sees the others.
        shape: ``(batch, 1, seqlen_q, seqlen_k)``, that of the matrix which is never built.
        band: the part that holds in every sequence alike, where documents are all the rest, else None.
        device: of the layers.
    """

    mask: Mask
    keys: int
    shape: tuple[int, int, int, int]
    band: Mask | None
    device: torch.device | str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def hides_nothing(self) -> bool:
        """Whether every query sees every key."""
        return not self.mask.text and self.keys == self.shape[-1]

    def contiguous(self) -> HandedMask:
        return self

    def to(self, device: torch.device | str | torch.dtype, *_, **__) -> HandedMask:
        """Return the mask on another device, as the layers of a model that is spread over several need it."""
        if isinstance(device, torch.dtype):
            raise NotImplementedError(_COMPUTED.format(what=f"attention_mask.to({device})"))
        band = None if self.band is None else _moved(self.band, device)
        return replace(self, mask=_moved(self.mask, device), band=band, device=device)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attended(*args, **(kwargs or {}))
        raise NotImplementedError(_COMPUTED.format(what=f"torch.{func.__name__}"))

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_COMPUTED.format(what=f"attention_mask.{name}"))

    def __getitem__(self, index):
        """Return :attr:`pairs` of ``attention_mask[:, 0]``."""
        told = index if type(index) is tuple and all(type(x) in (int, slice) for x in index) else ()
        whole = slice(None)
        if type(self) is HandedMask and told in ((whole, 0), (whole, 0, whole, whole)):
            return self.pairs
        raise NotImplementedError(_COMPUTED.format(what="attention_mask[...]"))

    @cached_property
    def pairs(self) -> Tensor:
        """The pairs that are kept, bool ``(batch, seqlen_q, seqlen_k)``, for indexers, which score all of them."""
        batch, _, queries, keys = self.shape
        seen = _pairs([*self.mask.leaves], self.mask.text, [batch, queries, self.keys], torch.device(self.device))
        return torch.nn.functional.pad(seen, (0, keys - self.keys))


@torch.library.custom_op("tilewise::mask_pairs", mutates_args=())
def _pairs(leaves: list[Tensor], text: str, shape: list[int], device: torch.device) -> Tensor:
    """Return the pairs that a mask keeps, bool ``(batch, seqlen_q, seqlen_k)``; an operator, since Dynamo reads no text of a mask."""
    batch, queries, keys = shape
    grid = Grid.whole(region(text, tuple(range(len(leaves)))), leaves, (batch, 1, queries, keys), device)
    return grid.pairs()[:, 0].contiguous()


@_pairs.register_fake
def _(leaves, text, shape, device):
    return torch.empty(shape, dtype=torch.bool, device=device)


def _moved(mask: Mask, device: torch.device | str) -> Mask:
    return Mask(mask.text, tuple(t.to(device) for t in mask.leaves))


def _attended(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """torch's scaled_dot_product_attention where a model hands it the description as ``attn_mask``."""
    if is_causal or attn_mask.shape[-2:] != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"the mask was made for (Nq, Nk) = {attn_mask.shape[-2:]}, scaled_dot_product_attention was called with "
            f"{(query.shape[-2], key.shape[-2])} and is_causal={is_causal}"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, : attn_mask.keys], value[:, :, : attn_mask.keys]))
    return attention(q, k, v, mask=attn_mask.mask, softmax_scale=scale, dropout_p=dropout_p).transpose(1, 2)


_COMPUTED = (
    "this model computes with its attention mask ({what}), of which tilewise hands over a description and no tensor; "
    'load it with attn_implementation="sdpa"'
)


def read(call: MaskCall) -> HandedMask:
    """Return the mask of a call. An accelerator is waited for: one truth value where documents are packed, two where there is padding."""
    terms = read_terms(call.mask_function)
    bands = [term for term in terms if isinstance(term, Band)]
    band = Band(_least([b.left for b in bands]), _least([b.right for b in bands]))
    keys = call.kv_length
    if band.right is not None and isinstance(call.first, int):
        keys = max(1, min(keys, call.first + call.q_length + band.right))
    there = keys  # the keys that are not behind the padding mask
    if call.attention_mask is not None and band.right is not None and isinstance(call.first, Tensor):
        there = min(keys, call.attention_mask.shape[1] - call.kv_offset)
    parts = [band.mask(call, there)]
    parts += [term.mask(call, keys) for term in terms if not isinstance(term, Band)]
    padded = None if call.attention_mask is None else padding(call.attention_mask, call.kv_offset, there, keys)
    only_documents = padded is None and all(isinstance(term, Band) or _is_packing(term) for term in terms)
    shape = (call.batch_size, 1, call.q_length, call.kv_length)
    alike = joined(parts[:1]) if only_documents else None
    return HandedMask(joined([*parts, padded]).once(), keys, shape, alike, call.device)


def _is_packing(term: object) -> bool:
    """Return whether a term tells packed sequences apart, as cu_seq_lens does; chunks of attention do not."""
    return isinstance(term, Documents) and made_by(term.function)[0] == "packed_sequence_mask_function"


def joined(parts: list[Mask | None]) -> Mask:
    """Return the pairs that all parts keep; None keeps all."""
    parts = [part for part in parts if part is not None]
    return reduce(and_, parts) if parts else Mask("")


# -- Terms: what a mask function keeps ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """``i + first - left <= j <= i + first + right``; None is unbounded."""

    left: int | None
    right: int | None

    def mask(self, call: MaskCall, keys: int) -> Mask | None:
        if self.left is None and self.right is None:
            return None
        if call.q_length == 1:
            return self._of_one_query(call.first, keys)
        shift = call.first - (keys - call.q_length)  # of the band against tilewise's window
        left = None if self.left is None else self.left - shift
        right = None if self.right is None else self.right + shift
        if min(0 if left is None else left, 0 if right is None else right) < 0:
            lo = -call.q_length if self.left is None else call.first - self.left
            hi = keys if self.right is None else call.first + self.right
            return keep(lambda b, h, i, j: (j >= i + lo) & (j <= i + hi))
        return causal() if (left, right) == (None, 0) else window(left, right)

    def _of_one_query(self, first: int | Tensor, keys: int) -> Mask | None:
        """Return an interval of keys, which may be a tensor: one token after another needs no host and no new kernel."""

        def clamp(x: int | Tensor) -> int | Tensor:
            return x.clamp(0, keys) if isinstance(x, Tensor) else min(max(x, 0), keys)

        start = 0 if self.left is None else clamp(first - self.left)
        end = keys if self.right is None else clamp(first + self.right + 1)
        if isinstance(start, int) and isinstance(end, int) and (start, end) == (0, keys):
            return None
        return key_range(start, end)


@dataclass(frozen=True)
class Predicate:
    """Any function of ``(b, h, q, kv)``, asked for every pair of the tiles that are left."""

    function: Callable

    def mask(self, call: MaskCall, keys: int) -> Mask:
        q_offset = lookup(call.q_offset.clone()) if isinstance(call.q_offset, Tensor) else call.q_offset
        return keep(lambda b, h, i, j: _kept(self.function, b, h, i + q_offset, j + call.kv_offset))


@dataclass(frozen=True)
class Documents:
    """``ids[b, q] == ids[b, kv]``.

    Attributes:
        ids: of a call, ``(batch, kv_length)``. given: they are a caller's, and may come back after others.
    """

    ids: Callable[[MaskCall], Tensor]
    function: Callable
    given: bool = False

    def mask(self, call: MaskCall, keys: int) -> Mask:
        if isinstance(call.first, Tensor) or call.first + call.q_length != keys:  # the last query is not the last key
            return Predicate(self.function).mask(call, keys)
        ids = self.ids(call)[:, :keys]
        if self.given and not _side_by_side(ids):
            return Predicate(self.function).mask(call, keys)
        return documents(ids)


def _side_by_side(ids: Tensor) -> bool:
    """Return whether equal ids stand side by side, as those do that never fall; the host reads it, and a graph takes it for granted."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return bool((ids[:, 1:] >= ids[:, :-1]).all())


def _least(bounds: list[int | None]) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return min(known) if known else None


def _chunk_ids(size: int, left_padding: Tensor) -> Callable[[MaskCall], Tensor]:
    def ids(call: MaskCall) -> Tensor:
        position = torch.arange(call.kv_length, device=left_padding.device) + call.kv_offset
        return (position - left_padding[:, None]) // size

    return ids


def _remapped(function: Callable, captured: dict) -> list:
    """Keep bands as they are: positions within a packed sequence differ as indices do."""
    inner = read_terms(captured["mask_function"])
    return inner if all(isinstance(term, Band) for term in inner) else [Predicate(function)]


# The functions of transformers.masking_utils, by the name of what makes them: of a function and what it captured, its terms.
TERMS: dict[str, Callable[[Callable, dict], list]] = {
    "causal_mask_function": lambda f, c: [Band(None, 0)],
    "bidirectional_mask_function": lambda f, c: [],
    "sliding_window_overlay": lambda f, c: [Band(c["sliding_window"] - 1, None)],
    "sliding_window_bidirectional_overlay": lambda f, c: [Band(c["sliding_window"], c["sliding_window"])],
    "chunked_overlay": lambda f, c: [Documents(_chunk_ids(c["chunk_size"], c["left_padding"]), f)],
    "packed_sequence_mask_function": lambda f, c: [
        Documents(lambda call: c["packed_sequence_mask"][:, call.kv_offset :], f, given=True)
    ],
    "remap_positions_for_packed_sequence": _remapped,
    "and_masks": lambda f, c: [term for part in c["mask_functions"] for term in read_terms(part)],
}


class Described:
    """A mask function that says what made it, since nobody can look into a function inside torch.compile."""

    def __init__(self, maker: str, captured: dict, function: Callable):
        self.maker, self.captured, self.function = maker, captured, function

    def __call__(self, batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.function(batch_idx, head_idx, q_idx, kv_idx)


def describe() -> None:
    """Have the functions of masking_utils that make mask functions make :class:`Described` ones, which keep the same pairs."""
    for name in TERMS.keys() - PLAIN.keys():
        make = getattr(masking_utils, name, None)  # transformers 5.17 has not all
        if make is not None and not hasattr(make, "describes"):
            setattr(masking_utils, name, _describing(make))


def _describing(make: Callable) -> Callable:
    code, maker = make.__code__, make.__name__
    names, takes_all = code.co_varnames, bool(code.co_flags & inspect.CO_VARARGS)

    @functools.wraps(make)
    def made(*given, **named):
        captured = {names[0]: given} if takes_all else dict(zip(names, given, strict=False))
        return Described(maker, captured | named, make(*given, **named))

    made.describes = True
    return made


PLAIN: dict[str, Callable] = {
    name: getattr(masking_utils, name)
    for name in ("causal_mask_function", "bidirectional_mask_function")
    if hasattr(masking_utils, name)
}
_BANDS = ("sliding_window_overlay", "sliding_window_bidirectional_overlay")
_OF_WHOLE_SEQUENCES = ("packed_sequence_mask_function", "chunked_overlay")


def is_told(call: dict) -> bool:
    """Return whether a call's mask can be read inside torch.compile's graph, without a look into a function or at a number."""
    queries, keys = call["q_length"], call["kv_length"]
    known = queries == 1 or not isinstance(call.get("q_offset", 0), Tensor)
    return known and _is_told(call["mask_function"], whole=1 < queries == keys)


def _is_told(function: Callable, whole: bool) -> bool:
    if any(function is x for x in PLAIN.values()):
        return True
    if not isinstance(function, Described):
        return False
    if function.maker == "and_masks":
        return all(_is_told(part, whole) for part in function.captured["mask_functions"])
    if function.maker == "remap_positions_for_packed_sequence":  # of bands, which _remapped keeps
        return _is_told(function.captured["mask_function"], whole=False)
    return function.maker in _BANDS or (whole and function.maker in _OF_WHOLE_SEQUENCES)


def made_by(function: Callable) -> tuple[str | None, dict]:
    """Return the function of masking_utils that made this one, or is it; and what this one captured."""
    if isinstance(function, Described):
        return function.maker, function.captured
    for name, x in PLAIN.items():
        if function is x:
            return name, {}
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None, {}
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    return function.__qualname__.partition(".")[0], {n: x.cell_contents for n, x in zip(names, cells, strict=True)}


def read_terms(function: Callable) -> list[Band | Documents | Predicate]:
    """Return the pairs that a mask function keeps, as terms joined by and."""
    maker, captured = made_by(function)
    return TERMS[maker](function, captured) if maker in TERMS else [Predicate(function)]


def _kept(function: Callable, b: Expr, h: Expr, q: Expr, kv: Expr) -> Expr | bool:
    """Return a mask function of traced indices; those that combine others do it by tensor methods, and are combined here."""
    maker, captured = made_by(function)
    match maker:
        case "and_masks":
            return reduce(and_, [_kept(part, b, h, q, kv) for part in captured["mask_functions"]])
        case "or_masks":
            return reduce(or_, [_kept(part, b, h, q, kv) for part in captured["mask_functions"]])
        case "remap_positions_for_packed_sequence":
            position = captured["position_ids"]
            return _kept(captured["mask_function"], b, h, lookup(position, b, q), lookup(position, b, kv))
    kept = function(b, h, q, kv)
    return bool(kept) if isinstance(kept, Tensor) else kept  # a constant, which some models make on the CPU
