"""The arguments of a call other than tensors, as a record and as text.

An operator's schema carries tensors and strings. :func:`assemble` turns the keywords of a public function into tensors
(*extras*) and the text of a :class:`Spec`. :func:`parse_spec` reads the text back, once per text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import expr, masks
from tilewise.caching import cached_property
from tilewise.dropout import new_seed, seed_tensor
from tilewise.expr import is_numpys
from tilewise.mapped import Mapped
from tilewise.masks import Mask, Region
from tilewise.piece import Piece
from tilewise.scores import Score, as_score, expression

EVERYWHERE = "everywhere"
DOCUMENTS = "documents("  # in the text of a mask
Deterministic = bool | Literal["everywhere"] | None
"""What the keyword ``deterministic`` takes; None follows PyTorch's setting."""


_FLAGS = {"deterministic": "d", "everywhere": "e", "needs_grad": "g", "max_logit": "m", "traced": "t", "dual": "f"}


@dataclass
class Spec:
    """The arguments of a call other than tensors. ``slots`` are positions among the operator's ``extras``.

    Attributes:
        mask_text, score_text: the two expression trees, with leaves numbered in order (:mod:`tilewise.masks`, :mod:`tilewise.scores`).
        softmax_scale: ``None`` means ``1 / sqrt(head_dim)``.
        dropout_p: probability of dropping a pair.
        deterministic: results repeat bit for bit and do not depend on the rest of the batch.
        everywhere: nor on how the call has its rows and keys (docs/algorithm.md#one-order).
        needs_grad: a backward may follow, so a backend without one is refused.
        max_logit: the largest score of each row is an output too.
        traced: the mask's tensors are copies that a compiled graph made (``Mask.copied``). Other tensors get their memory later, so
            nothing that is made of them is kept.
        dual: a dual level is open in a trace, whose graph opens it without PyTorch's count of levels (:func:`autograd.has_tangent`).
        grad_slots: the extras that want a gradient.
        sink_slot, cu_slots, mask_slots, score_slots: the slots of sink, of cu_seqlens (q and k; q alone over pages) and of the leaves.
        page_slots, scale_slots: the slots of block_table and seqlens_k of a paged cache, k_scale and v_scale of a quantised one, or empty.
        backend: the one that the user asked for, or ``None``.
        piece: the place of the call in a larger attention, or ``None``. Mask and score use the larger one's indices.
        mapped: the dimensions of ``torch.vmap`` that were folded into the batch, the innermost first.
    """

    mask_text: str = ""
    score_text: str = ""
    softmax_scale: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    everywhere: bool = False
    needs_grad: bool = False
    max_logit: bool = False
    traced: bool = False
    dual: bool = False
    grad_slots: tuple[int, ...] = ()
    sink_slot: int | None = None
    cu_slots: tuple[int, ...] = ()
    mask_slots: tuple[int, ...] = ()
    score_slots: tuple[int, ...] = ()
    backend: str | None = None
    piece: Piece | None = None
    page_slots: tuple[int, ...] = ()
    scale_slots: tuple[int, ...] = ()
    mapped: tuple[Mapped, ...] = ()

    def text(self) -> str:
        """Return the canonical text, which :func:`parse_spec` reads. It has no newline, because generated code carries it in a literal."""
        scale = "" if self.softmax_scale is None else float(self.softmax_scale)
        sink = "" if self.sink_slot is None else self.sink_slot
        flags = "".join([letter for name, letter in _FLAGS.items() if getattr(self, name)])
        backend = "" if self.backend is None else f"={self.backend}"
        at = self.piece
        piece = "" if at is None else _ints([at.q_start, at.k_start, at.total_q, at.total_k])
        mapped = "/".join([_ints([x.batch, *x.slots]) for x in self.mapped])
        return (
            f"{self.mask_text};{self.score_text};{scale};{float(self.dropout_p)};{flags};{_ints(self.grad_slots)};{sink};"
            f"{_ints(self.cu_slots)};{_ints(self.mask_slots)};{_ints(self.score_slots)};{piece};{_ints(self.page_slots)};"
            f"{_ints(self.scale_slots)};{mapped};{backend}"
        )

    @cached_property
    def source(self) -> str:
        """:meth:`text`, once."""
        return self.text()

    @property
    def packed(self) -> bool:
        return bool(self.cu_slots)

    @property
    def paged(self) -> bool:
        return bool(self.page_slots)

    @property
    def quantised(self) -> bool:
        return bool(self.scale_slots)

    @property
    def call(self) -> str:
        """The public function of such a call, as errors name it."""
        return _called(self.paged, self.packed)

    @cached_property
    def whole_region(self) -> Region:
        """The mask in the indices of the whole attention."""
        region = masks.region(self.mask_text, self.mask_slots)
        for dimension in self.mapped:
            region = dimension.region(region)
        return region

    @cached_property
    def whole_score(self) -> expr.Expr | None:
        """The score in the indices of the whole attention."""
        score = expression(self.score_text, self.score_slots)
        for dimension in self.mapped:
            score = None if score is None else dimension.expression(score)
        return score

    @cached_property
    def region(self) -> Region:
        """The mask in the call's own indices."""
        return self.whole_region if self.piece is None else self.piece.region(self.whole_region)

    @cached_property
    def score(self) -> expr.Expr | None:
        """The score in the call's own indices."""
        whole = self.whole_score
        return whole if self.piece is None or whole is None else self.piece.score(whole)

    @cached_property
    def lookups(self) -> tuple[expr.Expr, ...]:
        """The score's reads of leaves with a gradient, in the order of the tree."""
        if self.score is None:
            return ()
        return tuple(e for e in expr.lookups(self.score) if e.args[0][1] in self.grad_slots)

    @cached_property
    def score_slopes(self) -> tuple[expr.Expr, ...]:
        """``d score / d s``, then ``d score / d leaf`` for each of :attr:`lookups`; zeros as numbers."""
        wrt = (expr.symbol("s"), *self.lookups)
        slopes = [expr.derivative(self.score, x) for x in wrt]
        return tuple(expr.number(0.0) if slope is None else slope for slope in slopes)


def _ints(values: Sequence[int]) -> str:
    return ",".join([str(v) for v in values])


def _numbers(line: str) -> tuple[int, ...]:
    """Return the numbers of :func:`_ints`."""
    return tuple(int(x) for x in line.split(",")) if line else ()


@lru_cache(maxsize=4096)
def parse_spec(text: str) -> Spec:
    """Return the record of :meth:`Spec.text`."""
    m, s, scale, p, flags, grad, sink, cu, m_slots, s_slots, piece, pages, scales, mapped, backend = text.split(";", 14)
    return Spec(
        mask_text=m,
        score_text=s,
        softmax_scale=float(scale) if scale else None,
        dropout_p=float(p),
        **{name: letter in flags for name, letter in _FLAGS.items()},
        grad_slots=_numbers(grad),
        sink_slot=int(sink) if sink else None,
        cu_slots=_numbers(cu),
        mask_slots=_numbers(m_slots),
        score_slots=_numbers(s_slots),
        backend=backend[1:] if backend else None,
        piece=Piece(*_numbers(piece)) if piece else None,
        page_slots=_numbers(pages),
        scale_slots=_numbers(scales),
        mapped=tuple(Mapped(batch, tuple(slots)) for batch, *slots in map(_numbers, mapped.split("/")))
        if mapped
        else (),
    )


class Extras:
    """The tensor list of an operator, each tensor once."""

    def __init__(self):
        self.tensors: list[Tensor] = []

    def slot(self, tensor: Tensor) -> int:
        for n in range(len(self.tensors)):
            if self.tensors[n] is tensor:
                return n
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def slots(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple([self.slot(t) for t in tensors])


@dataclass
class Options:
    """The keywords of the public functions as the user gave them.

    ``wrt``: the tensors beside q, k and v that get a gradient, for a backward alone. None: those that require one.
    """

    causal: bool = False
    mask: object = None
    score: object = None
    softmax_scale: float | None = None
    sink: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    deterministic: Deterministic = None
    backend: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    piece: Piece | None = None
    block_table: Tensor | None = None
    seqlens_k: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    max_logit: bool = False
    wrt: Sequence[Tensor] | None = None


def assemble(q: Tensor, k: Tensor, v: Tensor, o: Options) -> tuple[list[Tensor], Tensor | None, str]:
    """Return a call as the operator takes it: ``(extras, seed, spec)``. torch.compile traces this function.

    Raises:
        ValueError: the operator cannot take the type of an argument. The operator checks everything else.
    """
    if not torch.compiler.is_compiling() and _is_brief(o):
        found = brief(q, k, v, (o.causal, o.mask, o.score, o.softmax_scale, o.deterministic, o.backend, o.max_logit))
        if found is not None:
            return found[0], None, found[1]
    if not torch.compiler.is_compiling():
        o = _plain(o)
    reasons = [] if _is_plain(q, k, v, o) else _type_reasons(q, k, v, o)
    if reasons:
        name = _called(o.block_table is not None, o.cu_seqlens_q is not None)
        raise ValueError(f"{name} was called wrongly" + "".join([f"\n  {reason}" for reason in reasons]))
    kept: Mask = masks.as_mask(o.mask, o.causal and not _decodes(q, o))
    scored: Score = as_score(o.score)
    extras = Extras()
    sink_slot = None if o.sink is None else extras.slot(o.sink)
    cu_slots = extras.slots(_cu_seqlens(o))
    page_slots = () if o.block_table is None else extras.slots((o.block_table, o.seqlens_k))
    scale_slots = () if o.k_scale is None else extras.slots((o.k_scale, o.v_scale))
    mask_slots = extras.slots(_there(kept.leaves, q))
    score_slots = extras.slots(_in_rows(_there(scored.leaves, q), q, k, o.wrt))
    tensors = extras.tensors
    grad_slots, needs_grad = _wanted(q, k, v, tensors, o.wrt)
    deterministic = torch.are_deterministic_algorithms_enabled() if o.deterministic is None else o.deterministic
    text = _text if torch.compiler.is_compiling() else _kept_text
    spec = text(
        mask_text=masks.grouped(kept.text, q, k),
        score_text=scored.text,
        softmax_scale=o.softmax_scale,
        dropout_p=o.dropout_p,
        deterministic=bool(deterministic),
        everywhere=deterministic == EVERYWHERE,
        needs_grad=needs_grad,
        max_logit=o.max_logit,
        traced=kept.copied,
        dual=torch.compiler.is_compiling() and forward_ad._current_level >= 0,
        grad_slots=grad_slots,
        sink_slot=sink_slot,
        cu_slots=cu_slots,
        mask_slots=mask_slots,
        score_slots=score_slots,
        backend=o.backend,
        piece=o.piece,
        page_slots=page_slots,
        scale_slots=scale_slots,
    )
    return tensors, _seed(q, o), spec


def _there(leaves: Sequence[Tensor], q: Tensor) -> Sequence[Tensor]:
    """Return the leaves with the numbers of a traced function that change on q's device: who made them did not know it."""
    if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()):
        return leaves
    return [x if x.ndim or x.device == q.device else x.to(q.device) for x in leaves]


IN_PLACE = ("cpu", "meta")
"""The types of devices on which a bias is read as it lies; tensors of the second have no memory, as the stand-ins of arrays of JAX."""


def _in_rows(leaves: Sequence[Tensor], q: Tensor, k: Tensor, wrt: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
    """Return a score's leaves, on a GPU those with a number for each pair as copies whose rows its copy engine reads, unless it can read
    them as they lie (docs/decisions.md#biases-in-rows). Beside ``wrt``, whose gradients are found by the tensors, all stay."""
    if wrt or q.device.type in IN_PLACE or q.ndim < 3 or k.ndim < 3:
        return leaves
    pairs = (q.shape[-3], k.shape[-3])
    return [_rows_of_pairs(x) if x.ndim > 1 and tuple(x.shape[-2:]) == pairs else x for x in leaves]


def _rows_of_pairs(x: Tensor) -> Tensor:
    columns, unit = x.shape[-1], 16 // x.element_size()  # rows begin at multiples of 16 bytes
    if type(x) not in _TENSORS or columns < 2:
        return x
    padding, start = -columns % unit, x.storage_offset() % unit
    if not padding and not start and x.is_contiguous():
        return x
    *strides, last = [n for size, n in zip(x.shape, x.stride(), strict=True) if size > 1]
    if not (last and all(strides)):  # a copy of what is expanded would be as large as it says
        return x
    if last == 1 and not start and not any(n % unit for n in strides):
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    return F.pad(x, (0, padding))[..., :columns] if padding else x


def _wanted(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], wrt: Sequence[Tensor] | None
) -> tuple[tuple[int, ...], bool]:
    """Return the slots of the extras that want a gradient, and whether a backward may follow."""
    if wrt is not None:
        return tuple([n for n in range(len(extras)) if any(extras[n] is x for x in wrt)]), True
    grads = torch.is_grad_enabled()
    slots = tuple([n for n in range(len(extras)) if grads and extras[n].requires_grad])
    return slots, grads and (q.requires_grad or k.requires_grad or v.requires_grad or len(slots) > 0)


def _plain(o: Options) -> Options:
    """Return the options with NumPy's scalars as Python's."""
    named = {
        name: getattr(o, name) for name in ("causal", "softmax_scale", "dropout_p", "dropout_seed", "deterministic")
    }
    numpys = {name: x.item() for name, x in named.items() if is_numpys(x)}
    return replace(o, **numpys) if numpys else o


def _cu_seqlens(o: Options) -> tuple[Tensor, ...]:
    """Return the cu_seqlens of q and k, or of q alone if the keys lie in pages, which have lengths instead."""
    if o.cu_seqlens_q is None:
        return ()
    if o.block_table is not None:
        return (o.cu_seqlens_q,)
    return (o.cu_seqlens_q, o.cu_seqlens_q if o.cu_seqlens_k is None else o.cu_seqlens_k)


def _decodes(q: Tensor, o: Options) -> bool:
    """Return whether every sequence of a cache has one query, the last, from which causal hides no key."""
    return o.block_table is not None and o.cu_seqlens_q is None and q.ndim == 4 and q.shape[1] == 1


_TENSORS = {Tensor, torch.nn.Parameter}
_SCALES, _TRUTH, _NAMES = {type(None), float}, {type(None), bool}, {type(None), str}


def _is_brief(o: Options) -> bool:
    """Return whether :func:`brief` can express the options: nothing but words beside mask and score."""
    return (
        o.sink is None and o.cu_seqlens_q is None and o.cu_seqlens_k is None
        and o.piece is None and o.block_table is None and o.seqlens_k is None
        and o.dropout_seed is None and type(o.dropout_p) is float and o.dropout_p == 0.0 and o.wrt is None
    )  # fmt: skip


def _are_dense(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        type(q) in _TENSORS and type(k) in _TENSORS and type(v) in _TENSORS
        and q.layout is k.layout is v.layout is torch.strided and not (q.is_nested or k.is_nested or v.is_nested)
    )  # fmt: skip


# Torch.are_deterministic_algorithms_enabled, without a frame of Python.
_deterministic = torch._C._get_deterministic_algorithms
Words = tuple[bool, object, object, float | None, Deterministic, str | None, bool]
"""causal, mask, score, softmax_scale, deterministic, backend and max_logit as the user gave them."""


def texts_of(words: Words) -> tuple | None:
    """Return the words with the texts of mask and score, and with what decides where deterministic is None. None if one has an unexpected
    type."""
    causal, mask, score, softmax_scale, deterministic, backend, max_logit = words
    everywhere = type(deterministic) is str and deterministic == EVERYWHERE
    if not (
        type(causal) is bool and type(softmax_scale) in _SCALES and type(backend) in _NAMES
        and (everywhere or type(deterministic) in _TRUTH)
        and (mask is None or type(mask) is Mask or (isinstance(mask, Mask) and not causal))  # causal drops the preparation
        and (score is None or type(score) is Score)
    ):  # fmt: skip
        return None
    mask_text, score_text = "" if mask is None else mask.text, "" if score is None else score.text
    if everywhere and DOCUMENTS in mask_text:  # they run as packed sequences
        return None
    deterministic = _deterministic() if deterministic is None else deterministic
    return causal, mask_text, score_text, softmax_scale, deterministic, backend, max_logit


def brief(q: Tensor, k: Tensor, v: Tensor, words: Words) -> tuple[list[Tensor], str] | None:
    """Return the extras and the spec of a call of q, k, v, a Mask, a Score and a few words, or None if one is not as expected.

    Such a call skips :func:`assemble` (`python -m bench.calls new_lengths` shows what a known call costs).
    """
    _, mask, score, *_ = words
    if isinstance(mask, Mask) and type(mask) is not Mask:
        mask = mask.current()
    said = texts_of((words[0], mask, *words[2:]))
    if said is None or not (_are_dense(q, k, v) and q.ndim == k.ndim == 4 and q.size(0) == k.size(0)):
        return None
    said = (said[0], masks.grouped(said[1], q, k), *said[2:])
    grads = torch.is_grad_enabled()
    needs_grad = grads and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not ((mask is not None and mask.parts) or (score is not None and score.parts)):
        return [], _brief_text(said, needs_grad)
    extras = Extras()
    mask_slots = extras.slots(mask.leaves) if mask is not None else ()
    score_slots = extras.slots(_in_rows(score.leaves, q, k)) if score is not None else ()
    tensors = extras.tensors
    grad_slots = tuple([n for n in range(len(tensors)) if tensors[n].requires_grad]) if grads else ()
    return tensors, _brief_text(said, needs_grad or bool(grad_slots), (grad_slots, mask_slots, score_slots))


@lru_cache(maxsize=256)
def _brief_text(said: tuple, needs_grad: bool, slots: tuple[tuple[int, ...], ...] = ((), (), ())) -> str:
    """Return the spec of Words whose mask and score are texts.

    Args:
        slots: those of the tensors with a gradient, those of the mask, and those of the score.
    """
    causal, mask_text, score_text, softmax_scale, deterministic, backend, max_logit = said
    grad_slots, mask_slots, score_slots = slots
    kept = masks.as_mask(Mask(mask_text) if mask_text else None, causal).text
    return _text(
        mask_text=kept,
        score_text=score_text,
        softmax_scale=softmax_scale,
        deterministic=bool(deterministic),
        everywhere=deterministic == EVERYWHERE,
        needs_grad=needs_grad,
        max_logit=max_logit,
        grad_slots=grad_slots,
        mask_slots=mask_slots,
        score_slots=score_slots,
        backend=backend,
    )


def _text(**fields: object) -> str:
    return Spec(**fields).text()


_kept_text = lru_cache(maxsize=256)(_text)


def _called(paged: bool, packed: bool) -> str:
    return "attention_paged" if paged else "attention_varlen" if packed else "attention"


def not_tensors(named: Sequence[tuple[str, object]], needed: Sequence[str]) -> list[str]:
    """Return the reasons against arguments that are no tensors. Those not ``needed`` may be None."""
    return [
        f"{name} must be a tensor{'' if name in needed else ' or None'}, got {type(x).__name__}{_as_tensor(name, x, needed)}"
        for name, x in named
        if not isinstance(x, Tensor) and (x is not None or name in needed)
    ]


def _as_tensor(name: str, x: object, needed: Sequence[str]) -> str:
    """Return advice on how to make a tensor of an argument, on the device of a ``needed`` one, or nothing."""
    if isinstance(x, (int, float, list, tuple)) and name not in needed:
        dtype = "float32" if name == "sink" or name.endswith("scale") else "int32"
        return f"; make it one: torch.tensor({name}, dtype=torch.{dtype}, device={needed[0]}.device)"
    if isinstance(x, torch.fx.Proxy):
        return "; torch.fx.symbolic_trace has none to give: trace by make_fx or torch.export"
    return f"; make it one: torch.from_numpy({name})" if type(x).__name__ == "ndarray" else ""


def result_reasons(
    results: Mapping[str, Tensor | None],
    of_o: tuple[tuple[int, ...], torch.dtype],
    of_lse: tuple[tuple[int, ...], torch.dtype],
    device: torch.device,
) -> list[str]:
    """Return the reasons against an o, do, lse or dlse of another shape or dtype, or on another device, than a call's forward gives."""
    reasons = []
    for name, x in results.items():
        shape, dtype = of_lse if name.endswith("lse") else of_o
        if x is not None and (x.shape, x.dtype, x.device) != (shape, dtype, device):
            reasons.append(f"{name} must be {dtype} {shape} on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}")
    return reasons


def _is_plain(q: Tensor, k: Tensor, v: Tensor, o: Options) -> bool:
    """Return whether a call of few words has no wrong type, by few looks: Dynamo traces each, in every layer."""
    return (
        _is_brief(o) and type(o.causal) is bool and type(o.softmax_scale) in _SCALES and type(o.backend) in _NAMES
        and type(o.deterministic) in _TRUTH and _are_dense(q, k, v)
    )  # fmt: skip


def _type_reasons(q: Tensor, k: Tensor, v: Tensor, o: Options) -> list[str]:
    others = ("sink", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k", "k_scale", "v_scale")
    named = (("q", q), ("k", k), ("v", v), *((name, getattr(o, name)) for name in others))
    reasons = not_tensors(named, ("q", "k", "v"))
    for name, x in named:
        if isinstance(x, Tensor) and x.is_nested:
            reasons.append(
                f"{name} is nested; this call takes packed rows and cu_seqlens: {name}.values() and {name}.offsets()"
            )
        elif isinstance(x, Tensor) and x.layout != torch.strided:
            reasons.append(f"{name} is {x.layout}; make it dense: {name}.to_dense()")
    if not isinstance(o.causal, bool):
        reasons.append(f"causal must be True or False, got {type(o.causal).__name__}; other masks go to mask=")
    if not (o.deterministic is None or isinstance(o.deterministic, bool) or o.deterministic == EVERYWHERE):
        reasons.append(f'deterministic must be True, False or "everywhere", got {o.deterministic!r}')
    if o.cu_seqlens_k is not None and o.cu_seqlens_q is None:
        reasons.append("cu_seqlens_k comes without cu_seqlens_q; a packed call needs cu_seqlens_q")
    if (o.block_table is None) != (o.seqlens_k is None):
        reasons.append("a cache needs both block_table and seqlens_k")
    if (o.k_scale is None) != (o.v_scale is None):
        reasons.append("a quantised cache needs both k_scale and v_scale")
    if o.cu_seqlens_k is not None and o.block_table is not None:
        reasons.append("cu_seqlens_k comes with a cache, whose seqlens_k are its lengths; leave cu_seqlens_k out")
    if not (o.softmax_scale is None or isinstance(o.softmax_scale, (int, float))) or isinstance(o.softmax_scale, bool):
        instead = "a learned scale is a score: score=lambda s, b, h, i, j: s * scale"
        if isinstance(o.softmax_scale, (torch.SymInt, torch.SymFloat)):
            instead = "a scale that changes with a length goes into q: pass q * scale and softmax_scale=1.0"
        elif not isinstance(o.softmax_scale, Tensor) and hasattr(o.softmax_scale, "__float__"):
            instead = "convert it: float(softmax_scale)"
        reasons.append(f"softmax_scale must be a number, got {type(o.softmax_scale).__name__}; {instead}")
    if not isinstance(o.dropout_p, (int, float)):
        reasons.append(f"dropout_p must be a number, got {type(o.dropout_p).__name__}")
    seed = o.dropout_seed
    if not (seed is None or isinstance(seed, Tensor) or (isinstance(seed, int) and -(2**63) <= seed < 2**64)):
        reasons.append(f"dropout_seed must be one int64 tensor or an int of at most 64 bits, got {seed!r}")
    if not (o.backend is None or isinstance(o.backend, str)):
        reasons.append(f"backend must be a name or None, got {o.backend!r}")
    if not (o.piece is None or isinstance(o.piece, Piece)):
        reasons.append(f"piece must be a Piece or None, got {type(o.piece).__name__}")
    return reasons


def _seed(q: Tensor, o: Options) -> Tensor | None:
    """Return the call's seed of dropout, one int64 on q's device."""
    if o.dropout_p == 0:
        return None
    if o.dropout_seed is None:
        return new_seed(q.device)
    if isinstance(o.dropout_seed, Tensor):
        return o.dropout_seed
    return seed_tensor(o.dropout_seed, q.device)
