"""A call without its tensors: a :class:`Problem` has its sizes, dtypes and strides beside its Spec.

Only :func:`check` makes one. It holds every input check of the package, and raises with all reasons at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise import dropout, expr, pages, selections
from tilewise.caching import cached_property
from tilewise.masks import NAMED, Region, readers
from tilewise.scores import THEN
from tilewise.signature import Shaped, Structured, TensorFacts, tensors_with_sizes
from tilewise.spec import Spec
from tilewise.words import raise_wrong

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Problem(Structured):
    """A call that passed every check. In a packed call, ``batch`` counts sequences and the lengths are the totals of all.

    In a paged call, q alone may be packed, k and v are pools of pages, and ``seqlen_k`` is the capacity of a sequence: the keys that
    its row of the block table has room for. The actual lengths are on the device.

    Attributes:
        q, k, v: facts of the inputs: ``(batch, seqlen, heads, head_dim)``, packed ``(total, heads, head_dim)``. k and v of a paged call
            are ``(num_pages, page_size, heads_k, head_dim)``.
        latent: whether v of a call over pages or with selected keys is the first columns of k in memory, so that it need not be read again.
        extras: facts of sink, cu_seqlens, block_table, seqlens_k, k_scale, v_scale and leaves, by slot.
    """

    q: TensorFacts
    k: TensorFacts
    v: TensorFacts
    extras: tuple[TensorFacts, ...]
    device: torch.device
    spec: Spec
    latent: bool = False

    @property
    def tensors(self) -> tuple[TensorFacts, ...]:
        return self.q, self.k, self.v, *self.extras

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return (self.device,)

    def with_sizes(self, sizes: Sequence[Any]) -> Problem:
        """Return the problem of the same structure with other :attr:`sizes`."""
        q, k, v, *extras = tensors_with_sizes(self.tensors, sizes)
        return Problem(q, k, v, tuple(extras), self.device, self.spec, self.latent)

    @property
    def page_size(self) -> int:
        """Keys of a page, of a paged call."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """The most keys that a sequence of a paged call may have: ``max_pages * page_size``."""
        return self.extras[self.spec.page_slots[0]].shape[1] * self.page_size

    @cached_property
    def batch(self) -> int:
        return self.extras[self.spec.cu_slots[0]].shape[0] - 1 if self.packed else self.q.shape[0]

    @cached_property
    def position_ends(self) -> tuple[tuple[str, int], ...]:
        return _position_ends(self.spec, [x.shape for x in self.extras])

    @property
    def batch_dim(self) -> int:
        """The size of the batch dimension. Packed sequences have none and count as one element."""
        return 1 if self.packed else self.batch

    @cached_property
    def seqlen_q(self) -> int:
        return self.q.shape[-3]

    @cached_property
    def seqlen_k(self) -> int:
        return self.capacity if self.paged else self.k.shape[-3]

    @cached_property
    def heads_q(self) -> int:
        return self.q.shape[-2]

    @property
    def heads_k(self) -> int:
        return self.k.shape[-2]

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // self.heads_k if self.heads_k else 1

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of scores, statistics and accumulators: fp32, and fp64 for fp64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def output_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of o and lse. Nothing else decides them."""
        *lengths, heads, _ = self.q.shape
        return (*lengths, heads, self.head_dim_v), (*lengths[:-1], heads, lengths[-1])

    @property
    def starts(self) -> tuple[int, int]:
        """The first query and the first key, counted in the whole attention if this call is a piece of one."""
        piece = self.spec.piece
        return (0, 0) if piece is None else (piece.q_start, piece.k_start)

    @property
    def totals(self) -> tuple[int, int]:
        """The queries and keys of the whole attention. Packed sequences count together."""
        piece = self.spec.piece
        return (self.seqlen_q, self.seqlen_k) if piece is None else (piece.total_q, piece.total_k)

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(max(self.head_dim, 1)) if self.spec.softmax_scale is None else self.spec.softmax_scale

    def describe(self) -> str:
        """Return the call in one or two lines, as error messages and ``explain`` show it."""
        return "    ".join(_described(self))


def _described(p: Problem) -> list[str]:
    spec = p.spec
    parts = [f"{p.q.shown('q')} {p.device}", p.k.shown("k"), p.v.shown("v")]
    parts += [f"mask {_readable(spec.mask_text, p, spec.mask_slots, NAMED)}"] if spec.mask_text else []
    parts += [f"score {_readable(spec.score_text, p, spec.score_slots, THEN)}"] if spec.score_text else []
    parts += [f"dropout_p {spec.dropout_p}"] if spec.dropout_p else []
    parts += ["sink"] if spec.sink_slot is not None else []
    parts += [f"packed, {p.batch} sequences"] if p.packed else []
    parts += [f"paged, {p.batch} sequences of at most {p.capacity} keys"] if p.paged else []
    parts += ["v in k"] if p.latent else []
    parts += [f"scales {_shapes(p.extras, spec.scale_slots)}"] if p.quantised else []
    parts += [f"{spec.piece}"] if spec.piece else []
    parts += ["deterministic" + " everywhere" * spec.everywhere] * spec.deterministic + [
        "with the largest scores"
    ] * spec.max_logit
    return parts


def _readable(text: str, p: Problem, slots: Sequence[int], begins: str) -> str:
    """Return a mask's or score's text for people, with the shapes of its tensors; ``slots`` are theirs.

    ``begins`` is a pattern of what a part of the text begins with, which numbers its tensors from 0.
    """
    text = expr.numbered_through(text, begins).replace("fitted_", "")
    leaves = dict.fromkeys(re.findall(r"\b((?:float|int|bool)(\d+))\b", text))
    shapes = [f"{name} {p.extras[slots[int(number)]].shape}" for name, number in leaves]
    return text + (f" with {', '.join(shapes)}" if shapes else "")


def _shapes(extras: Sequence[TensorFacts], slots: Sequence[int]) -> str:
    return ", ".join(str(extras[n].shape) for n in slots)


# -- The checks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signature(Structured):
    """A call before its checks: everything that decides about it, as its tensors tell.

    Attributes:
        tensors: facts of q, k, v and the extras.
        devices: the device of each.
        latent: as in a Problem.
    """

    tensors: tuple[TensorFacts, ...]
    devices: tuple[torch.device, ...]
    spec: Spec
    latent: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spec: Spec) -> Signature:
        given = (q, k, v, *extras)
        facts = tuple([TensorFacts.of(t) for t in given])
        return cls(facts, tuple([t.device for t in given]), spec, pages.is_latent(v, k, spec))

    def problem(self) -> Problem:
        """Return the Problem of such a call, which has passed the checks."""
        q, k, v, *extras = self.tensors
        found = Problem(q, k, v, tuple(extras), self.devices[0], self.spec, self.latent)
        found.__dict__.update(structure=self.structure, sizes=self.sizes)
        return found

    def checked(self, seed: Tensor | None, sizes: Sequence[Any]) -> Problem:
        """Return the Problem of such a call with these sizes.

        Raises:
            ValueError: for a wrong call, with every reason.
        """
        facts = tensors_with_sizes(self.tensors, sizes)
        q, k, v, *extras = [Shaped(*x, device) for x, device in zip(facts, self.devices, strict=True)]
        return check(q, k, v, extras, seed, self.spec, self.latent)


def check(
    q: Tensor | Shaped, k: Tensor | Shaped, v: Tensor | Shaped, extras: Sequence, seed: Tensor | None, spec: Spec,
    latent: bool | None = None,
) -> Problem:  # fmt: skip
    """Return the Problem of a call. ``latent`` is as in a Problem, for tensors without memory, which cannot tell.

    Raises:
        ValueError: for a wrong call, with every reason.
    """
    reasons = _qkv_reasons(q, k, v, spec)
    reasons += spec.piece.reasons(q.shape[-3], k.shape[-3]) if spec.piece and not reasons else []
    if not reasons:
        reasons = _extras_reasons(q, k, extras, spec) + _option_reasons(q, seed, spec)
    if reasons:
        names = ("q", "k_pages", "v_pages") if spec.paged else ("q", "k", "v")
        shown = "    ".join(
            f"{n} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} {t.device}"
            for n, t in zip(names, (q, k, v), strict=True)
        )
        raise ValueError(f"{spec.call} was called wrongly\n    " + shown + "".join(f"\n  {x}" for x in reasons))
    facts = TensorFacts.of
    if latent is None:
        latent = pages.is_latent(v, k, spec)
    return Problem(facts(q), facts(k), facts(v), tuple(facts(t) for t in extras), q.device, spec, latent)


def _qkv_reasons(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    rows = "(total, heads, head_dim)" if spec.packed else "(batch, seqlen, heads, head_dim)"
    keys = pages.LAYOUT if spec.paged else rows
    wrong = {
        n: f"{n} has {t.ndim} dimensions, {layout} has {layout.count(',') + 1}"
        for n, t, layout in zip("qkv", (q, k, v), (rows, keys, keys), strict=True)
        if t.ndim != layout.count(",") + 1
    }
    if "q" in wrong:
        wrong["q"] += _rank_hint(q, spec)
    if wrong:
        return list(wrong.values())
    lengths = pages.size_reasons(k, v) if spec.paged else _length_reasons(q, k, v, spec.packed)
    return _dtype_reasons(q, k, v, spec) + lengths + _width_reasons(q, k, v)


def _dtype_reasons(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Return the reasons against dtypes and devices."""
    reasons = []
    if spec.paged and (spec.quantised or pages.FLOAT8 in (k.dtype, v.dtype)):
        reasons += pages.quantised_reasons(k, v, spec)
    elif not (q.dtype == k.dtype == v.dtype):
        reasons.append("q, k and v have different dtypes; convert them to one: k.to(q.dtype)")
    if not reasons and q.dtype not in DTYPES:
        reasons.append(f"dtype {q.dtype} is not float16, bfloat16, float32 or float64; convert: q.to(torch.bfloat16)")
    if not (q.device == k.device == v.device):
        reasons.append("q, k and v are on different devices; move them to one: k.to(q.device)")
    return reasons


def _rank_hint(q: Tensor, spec: Spec) -> str:
    """Return advice on a q with too many or too few dimensions, or nothing if no advice is likely to help."""
    if q.ndim == 4 and spec.packed:
        return "; rows of equal sequences are packed by q.flatten(0, 1)"
    if q.ndim != 3 or spec.packed:
        return ""
    one = "one query a sequence is q.unsqueeze(1)" if spec.paged else "one sequence is q.unsqueeze(0)"
    return f"; {one}, and packed rows come with cu_seqlens_q" + ("" if spec.paged else " to attention_varlen")


def _length_reasons(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> list[str]:
    reasons = []
    if not packed and not (q.shape[0] == k.shape[0] == v.shape[0]):
        reasons.append(f"batch differs: q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}; k and v have q's, or both 1")
    if k.shape[-3] != v.shape[-3]:
        reasons.append(f"seqlen of k ({k.shape[-3]}) and v ({v.shape[-3]}) differ; each key has one row of v")
    return reasons


def _width_reasons(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    reasons = []
    if k.shape[-2] != v.shape[-2]:
        reasons.append(f"heads of k ({k.shape[-2]}) and v ({v.shape[-2]}) differ")
    elif k.shape[-2] == 0 or q.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        layout = "; if your heads come before the rows, pass x.transpose(1, 2)" if q.ndim == 4 else ""
        reasons.append(f"heads of q ({q.shape[-2]}) must be a positive multiple of heads of k ({k.shape[-2]}){layout}")
    if q.shape[-1] != k.shape[-1]:
        reasons.append(f"head_dim of q ({q.shape[-1]}) and k ({k.shape[-1]}) differ; v alone may have another one")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        reasons.append("head_dim is 0")
    return reasons


def _extras_reasons(q: Tensor, k: Tensor, extras: Sequence[Tensor], spec: Spec) -> list[str]:
    named = dict.fromkeys(spec.mask_slots + spec.score_slots, "a mask or score tensor")
    for names, slots in (
        (("k_scale", "v_scale"), spec.scale_slots),
        (("block_table", "seqlens_k"), spec.page_slots),
        (
            ("cu_seqlens_k", "cu_seqlens_q")[-len(spec.cu_slots) :],
            spec.cu_slots[::-1],
        ),  # q's name, if one tensor serves both
    ):
        named |= dict(zip(slots, names, strict=False))
    reasons = [
        f"{name} is on {extras[n].device}, q on {q.device}; move it there: x.to(q.device)"
        for n, name in named.items()
        if extras[n].device != q.device
    ]
    if spec.sink_slot is not None:
        sink = extras[spec.sink_slot]
        if (
            sink.ndim != 1
            or sink.shape[0] != q.shape[-2]
            or not sink.dtype.is_floating_point
            or sink.device != q.device
        ):
            reasons.append(
                f"sink must be a floating tensor ({q.shape[-2]},), one logit per query head, on {q.device}; "
                f"got {tuple(sink.shape)} {sink.dtype} {sink.device}"
            )
    wrong_cu = cu_reasons(q, k, [extras[n] for n in spec.cu_slots])
    if spec.paged and not wrong_cu:
        cu_seqlens_q = extras[spec.cu_slots[0]] if spec.packed else None
        wrong_cu = pages.table_reasons(q, *[extras[n] for n in spec.page_slots], cu_seqlens_q)
    if spec.quantised and not wrong_cu:
        batch = extras[spec.page_slots[0]].shape[0]
        reasons += pages.scale_reasons(k, [extras[n] for n in spec.scale_slots], batch)
    reasons += wrong_cu
    grad_outside = [n for n in spec.grad_slots if n not in spec.score_slots and n != spec.sink_slot]
    if grad_outside:
        of_scales = set(grad_outside) <= set(spec.scale_slots)
        reasons.append(
            "a scale of the cache requires grad, and has no gradient: detach it"
            if of_scales
            else "a tensor of the mask requires grad; a mask has no gradient: detach it, or make it a score"
        )
    return reasons if wrong_cu else reasons + _leaf_reasons(q, k, extras, spec)


def cu_reasons(q: Tensor, k: Tensor, cu: Sequence[Tensor]) -> list[str]:
    """Return the reasons against shapes and dtypes. :func:`check_values` checks values at each call."""
    reasons = [
        f"cu_seqlens_{n} must be int32 or int64 of shape (batch + 1,), got {c.dtype} {tuple(c.shape)}"
        + f"; convert: cu_seqlens_{n}.to(torch.int32)" * (c.ndim == 1 and c.dtype not in (torch.int32, torch.int64))
        for n, c in zip("qk", cu, strict=False)
        if c.ndim != 1 or c.dtype not in (torch.int32, torch.int64) or c.shape[0] < 1
    ]
    if len(cu) < 2:  # the keys lie in pages
        return reasons
    if not reasons and cu[0].shape != cu[1].shape:
        reasons.append(f"cu_seqlens_q has {cu[0].shape[0] - 1} sequences, cu_seqlens_k {cu[1].shape[0] - 1}")
    if q.shape[0] != k.shape[0] and cu[0] is cu[1]:
        reasons.append(f"q has {q.shape[0]} rows and k {k.shape[0]}, but one cu_seqlens for both; give cu_seqlens_k")
    return reasons


def _leaf_reasons(q: Tensor, k: Tensor, extras: Sequence[Tensor], spec: Spec) -> list[str]:
    """Return the reasons against leaves whose sizes do not fit their indices."""
    sizes = {"b": extras[spec.cu_slots[0]].shape[0] - 1 if spec.packed else q.shape[0], "h": q.shape[-2]}
    lengths = (q.shape[-3], k.shape[-3]) if spec.piece is None else (spec.piece.total_q, spec.piece.total_k)
    known = "" if spec.packed else "i" if spec.paged else "ij"  # the lengths that all sequences have in common
    sizes |= dict(zip(known, lengths, strict=False))
    region, score = spec.whole_region, spec.whole_score
    shapes = [tuple(x.shape) for x in extras]
    roots = [*region.parts, *([] if score is None else [score])]
    read = [shapes[e.args[0][1]] for e in expr.lookups(*roots)]
    # A size without a value, in a compiled function, cannot be asked; one that is recorded for other calls has to be.
    empty = [shape for shape in read if any(not isinstance(n, torch.SymInt) and n == 0 for n in shape)]
    reasons = [f"a mask or score tensor {x} is empty and cannot be read" for x in empty if q.numel() and k.numel()]
    reasons = reasons or read_reasons(region, score, shapes, sizes, (spec.mask_text, spec.mask_slots))
    reasons = reasons or (_padding_reasons(region, shapes, sizes["b"], q.shape[0]) if spec.packed else [])
    if region.prepared is not None and (spec.piece is not None or spec.paged):
        part = "keys in pages" if spec.paged else "a piece of one"
        reasons.append(f"a prepared mask serves a whole attention, not {part}; pass the mask as it was before prepare")
    elif region.prepared is not None:
        reasons += _prepared_reasons(q, k, region)
    return list(dict.fromkeys(reasons))


def read_reasons(
    region: Region,
    score: expr.Expr | None,
    shapes: Sequence[tuple[int, ...]],
    sizes: Mapping[str, int],
    mask: tuple[str, tuple[int, ...]] = ("", ()),
    totals: Mapping[str, int] | None = None,
) -> list[str]:
    """Return the reasons against leaves that are too short or too long.

    ``shapes`` are the leaves' by slot; ``sizes`` say how far each of ``b h i j`` runs.

    Args:
        mask: the mask's text and the slots of its leaves, which say who reads one.
        totals: where ``i`` and ``j`` run as far as the longest sequence, the packed rows of all: a leaf may be longer then, as it may have
            been made for longer sequences; but not documents' ids, if they are as many as the rows.
    """
    reasons = []
    for e in expr.lookups(*region.parts, *([] if score is None else [score])):
        leaf = e.args[0]
        shape, fitted = shapes[leaf[1]], "fitted" in leaf
        for axis, (x, size) in enumerate(zip(expr.indices(e), shape, strict=False)):
            name, block = plain_index(x)
            if name not in sizes:
                continue
            needed = -(-sizes[name] // block)
            of_all = totals is not None and leaf[0] == "int" and e.op != "selected" and size == totals.get(name)
            # A tensor that the user's function reads may be longer, as in FlexAttention: cu_seqlens[b], a table for all lengths.
            if size < needed or (fitted and size > needed and (totals is None or of_all)):
                what = _AXES[name] if totals is None else f"the longest {_AXES[name]}"
                what = what if block == 1 else f"ceil({what} / {block})"
                hint = _batch_first(shape) if fitted and axis == 0 and size == sizes.get("b") else ""
                hint = "; positions count from each sequence's first row, not over all packed rows" if of_all else hint
                who = readers(*mask).get(leaf[1], "a mask or score tensor")
                reasons.append(
                    f"{who} {shape} is read at [{', '.join(str(x) for x in expr.indices(e))}]: "
                    f"axis {axis} must be {'' if fitted and totals is None else 'at least '}{what} = {needed}{hint}"
                )
    return reasons


def _padding_reasons(region: Region, shapes: Sequence[tuple[int, ...]], batch: int, total: int) -> list[str]:
    """Return the reasons against a padding mask (batch, longest) of packed sequences, which would be a mask of pairs.

    Lengths may lie on a GPU. But if all rows are used, some sequence has more queries than such a mask has."""
    reads = [e for e in expr.lookups(*region.parts) if "fitted" in e.args[0] and len(e.args) == 3]
    masks = [shapes[e.args[0][1]] for e in reads if plain_index(expr.indices(e)[0]) == ("i", 1)]
    return [
        f"a mask or score tensor {shape} is read at [i, j]: axis 0 has the batch's {batch} elements, too few for {total} packed rows"
        + _batch_first(shape)
        for shape in masks
        if 1 < shape[0] == batch and batch * batch < total
    ]


def _batch_first(shape: tuple[int, ...]) -> str:
    """Return advice on a tensor that seems to begin with the batch, such as a padding mask: axes count from the end."""
    if len(shape) not in (2, 3):
        return ""
    return f"; if it is the batch, axes of size 1 go behind it: x[:, {', '.join(['None'] * (4 - len(shape)))}]"


def show_reasons(
    region: Region, shapes: Sequence[tuple[int, ...]], at: Mapping[str, int], score: expr.Expr | None = None
) -> list[str]:
    """Return why a mask or a score cannot be shown ``at`` this ``seqlen_q, seqlen_k, batch, head``; ``shapes`` are the leaves' by slot."""
    reasons = [
        f"{name} must be a whole number >= 0, got {n!r}"
        for name, n in at.items()
        if not (isinstance(n, int) and n >= 0)
    ]
    if reasons:
        return reasons
    for e in expr.lookups(*region.parts, *([] if score is None else [score])):
        for x, size in zip(expr.indices(e), shapes[e.args[0][1]], strict=False):
            name = {"b": "batch", "h": "head"}.get(plain_index(x)[0])
            if name and at[name] >= size:
                owner = "mask" if score is None else "mask or score"
                reasons.append(f"{name} {at[name]} is out of range: a tensor of the {owner} has {size}")
    return list(
        dict.fromkeys(reasons + read_reasons(region, score, shapes, {"i": at["seqlen_q"], "j": at["seqlen_k"]}))
    )


_AXES = {"b": "batch", "h": "heads_q", "i": "seqlen_q", "j": "seqlen_k"}


def plain_index(index: expr.Expr) -> tuple[str | None, int]:
    """Return ``(symbol, block)`` of an index ``symbol`` or ``symbol // block``; else ``(None, 1)``.

    A query's key position, ``i + off``, runs over the keys and counts as ``j``.
    """
    if str(index) == "i + off":
        return "j", 1
    if index.op == "symbol":
        return index.args[0], 1
    if index.op == "floordiv" and index.args[0].op == "symbol" and index.args[1].op == "number":
        block = index.args[1].args[0]
        return (index.args[0].args[0], block) if isinstance(block, int) and block > 0 else (None, 1)
    return None, 1


def _prepared_reasons(q: Tensor, k: Tensor, region: Region) -> list[str]:
    if q.ndim == 3:
        return ["a prepared mask serves attention, not attention_varlen; pass the mask as it was before prepare"]
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if region.prepared.shape != shape:
        sizes = "(batch, heads_q, seqlen_q, seqlen_k)"
        return [f"the mask was prepared for {sizes} = {region.prepared.shape}, this call has {shape}; prepare it again"]
    return []


def _option_reasons(q: Tensor, seed: Tensor | None, spec: Spec) -> list[str]:
    reasons = []
    if spec.softmax_scale is not None and not math.isfinite(spec.softmax_scale):
        reasons.append(f"softmax_scale is {spec.softmax_scale}, it must be finite")
    if spec.dropout_p != 0 and not dropout.possible(spec.dropout_p):
        reasons.append(
            f"dropout_p {spec.dropout_p} must be 0, or round to between 1/65536 and 65535/65536: the probability of a drop"
        )
    if spec.dropout_p != 0 and seed is None:
        reasons.append("dropout needs a seed")
    if spec.paged:
        reasons += pages.option_reasons(spec)
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device):
        reasons.append(
            f"dropout_seed must be one int64 on {q.device}, got {seed.dtype} {tuple(seed.shape)} {seed.device}"
        )
    return reasons


def check_values(p: Problem, extras: Sequence[Tensor]) -> None:
    """Check the values of cu_seqlens, of a cache's table and lengths, and of selected keys, and tensors that are read at positions.

    Raises:
        ValueError: cu_seqlens that do not start at 0, decrease, or end past the packed tensor; a length, a page or an entry out of range;
            a tensor of the mask or the score that is shorter than the longest sequence.
    """
    reasons = cu_value_reasons([extras[n] for n in p.spec.cu_slots], (p.q.shape[0], p.k.shape[0]))
    if p.paged:
        reasons += pages.value_reasons(*[extras[n] for n in p.spec.page_slots], p.k.shape[0], p.page_size)
    reasons = reasons or selections.value_reasons(p, extras) or _position_reasons(p, extras)
    raise_wrong(p.spec.call, reasons)


def _position_reasons(p: Problem, extras: Sequence[Tensor]) -> list[str]:
    """Return the reasons against leaves that are shorter than the longest sequence, which the values of lengths tell."""
    spec, longest = p.spec, {}
    if not p.position_ends:
        return []
    for name, n in zip("ij", spec.cu_slots, strict=False):
        longest[name] = int(extras[n].diff().max()) if len(extras[n]) > 1 else 0
    if p.paged:
        lengths = extras[spec.page_slots[1]]
        longest["j"] = int(lengths.max()) if len(lengths) else 0
    totals = {name: x.shape[0] for name, x, _ in zip("ij", (p.q, p.k), spec.cu_slots, strict=False)}
    if all(longest.get(name, 0) <= end != totals.get(name) for name, end in p.position_ends):
        return []
    sizes, mask = {"b": p.batch, **longest}, (spec.mask_text, spec.mask_slots)
    shapes = [tuple(x.shape) for x in p.extras]
    return list(dict.fromkeys(read_reasons(spec.whole_region, spec.whole_score, shapes, sizes, mask, totals)))


def _position_ends(spec: Spec, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[str, int], ...]:
    """Return how far queries, ``i``, and keys, ``j``, may run in each tensor of the mask or the score that is read there."""
    roots = *spec.whole_region.parts, *([] if spec.whole_score is None else [spec.whole_score])
    axes = [
        (plain_index(x), n)
        for e in expr.lookups(*roots)
        for x, n in zip(expr.indices(e), shapes[e.args[0][1]], strict=False)
    ]
    return tuple(dict.fromkeys((name, n * block) for (name, block), n in axes if name in ("i", "j")))


def cu_value_reasons(cu_seqlens: Sequence[Tensor], totals: Sequence[int]) -> list[str]:
    """Return the reasons against the values of cu_seqlens_q and, if it is there, cu_seqlens_k."""
    reasons = []
    for which, cu, total in zip("qk", cu_seqlens, totals, strict=False):
        name, values = f"cu_seqlens_{which}", cu.tolist()
        if values[0] != 0:
            reasons.append(f"{name} starts at {values[0]}, it must start at 0")
        drop = next((n for n in range(1, len(values)) if values[n] < values[n - 1]), None)
        if drop is not None:
            reasons.append(f"{name} decreases at position {drop}: {values[drop - 1]} -> {values[drop]}")
        if values[-1] > total:
            reasons.append(f"{name} ends at {values[-1]}, past the {total} rows of the packed tensor")
    return reasons
