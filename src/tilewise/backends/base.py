"""The interface of a backend, and what every backend shares."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise import expr
from tilewise.caching import edition, is_tracked
from tilewise.device import Ready, is_captured, is_warming_up, lasting, read_by_graphs, tensors_in
from tilewise.expr import Expr
from tilewise.problem import Problem
from tilewise.sizes import MISSED, ByStructure, Size


def contiguous(x: Tensor | None) -> Tensor | None:
    """``x``, or a copy of it that is contiguous; of no tensor none."""
    return None if x is None else x.contiguous()


def unit_last(x: Tensor) -> Tensor:
    """``x``, or a copy whose last stride is 1; a single number has none."""
    return x if x.ndim == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


@dataclass
class Inputs:
    """The tensors of a call, named. Shapes as in :class:`Problem`, strides as :class:`Backend` says; ``leaves`` are all extras, by slot.

    ``joint``: v lies in k's memory, and its gradient goes to k. A backward may add it to dk's first columns, and give None for dv.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    seed: Tensor | None = None
    leaves: Sequence[Tensor] = ()
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None
    seqlens_k: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    joint: bool = False

    @classmethod
    def of(cls, p: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None) -> Inputs:
        seed = seed if seed is None or seed.ndim == 1 else seed.reshape(1)
        if not extras:
            return cls(q, k, v, seed)
        spec = p.spec
        sink = None if spec.sink_slot is None else extras[spec.sink_slot].contiguous()
        cu_q, cu_k = (*[extras[n].contiguous() for n in spec.cu_slots], None, None)[:2]
        table, lengths = [extras[n] for n in spec.page_slots] or (None, None)
        scales = [extras[n] for n in spec.scale_slots]
        return cls(q, k, v, seed, extras, sink, cu_q, cu_k, table, lengths, *scales)


Pages = tuple[Tensor, ...]
"""A cache: k_pages, v_pages ``(num_pages, page_size, heads, head_dim)``, block_table ``(batch, max_pages)``, seqlens_k ``(batch,)``; of
a quantised one also k_scale and v_scale."""


@dataclass
class Output:
    """``o`` (batch, seqlen_q, heads_q, head_dim_v), ``lse`` (batch, heads_q, seqlen_q); packed without batch.

    ``max_logit``, in lse's shape and dtype, where the problem asks for it: the largest score of each row before the sink, -inf
    for a row that sees no key, NaN for a row one of whose scores is NaN.
    """

    o: Tensor
    lse: Tensor
    max_logit: Tensor | None = None

    @classmethod
    def of(cls, o: Tensor, lse: Tensor) -> Output:
        """The outputs of an earlier forward, or their tangents, as backends read them."""
        return cls(o.contiguous(), lse.contiguous())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The operator's results: o and lse, and max_logit where there is one."""
        return (self.o, self.lse) if self.max_logit is None else (self.o, self.lse, self.max_logit)

    @property
    def named(self) -> dict[str, Tensor]:
        """:attr:`tensors` by name."""
        return dict(zip(("o", "lse", "max_logit"), self.tensors, strict=False))


@dataclass
class Grads:
    """Gradients in the shapes and dtypes of what they belong to.

    ``leaves`` holds one per slot of ``spec.grad_slots`` that a score reads, by slot; ``sink`` where it is wanted; ``dv`` is None where dk
    has it (:attr:`Inputs.joint`).
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor | None
    sink: Tensor | None
    leaves: dict[int, Tensor]

    def extras(self, p: Problem, extras: Sequence[Tensor]) -> list[Tensor]:
        """One gradient for each of ``spec.grad_slots``; zeros where the score does not read the tensor after all."""
        found = []
        for slot in p.spec.grad_slots:
            total = self.leaves.get(slot)
            if slot == p.spec.sink_slot:  # one tensor may be both sink and leaf
                total = self.sink if total is None else total + self.sink
            found.append(torch.zeros(extras[slot].shape).to(extras[slot]) if total is None else total)
        return found


@dataclass
class Directions:
    """A tangent for each tensor of :class:`Inputs`, in its shape and dtype; None: zero. ``leaves`` holds one per slot."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    sink: Tensor | None
    leaves: Sequence[Tensor | None]

    @classmethod
    def of(cls, p: Problem, tangents: Sequence[Tensor | None]) -> Directions:
        """The tangents of q, k, v and all extras, in this order."""
        q, k, v, *extras = map(contiguous, tangents)
        return cls(q, k, v, None if p.spec.sink_slot is None else extras[p.spec.sink_slot], extras)

    @property
    def slots(self) -> dict[int, int]:
        """The slots of the leaves' tangents in :meth:`with_leaves`, by the leaf's slot."""
        return {n: len(self.leaves) + n for n, x in enumerate(self.leaves) if x is not None}

    def with_leaves(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The leaves, and behind them their tangents."""
        return [*leaves, *(leaf if x is None else x for leaf, x in zip(leaves, self.leaves, strict=True))]


@dataclass
class OutputGrads:
    """The gradients of o and lse, and their tangents (None: zero)."""

    do: Tensor
    dlse: Tensor
    do_tangent: Tensor | None = None
    dlse_tangent: Tensor | None = None

    @classmethod
    def of(
        cls, do: Tensor, dlse: Tensor, do_tangent: Tensor | None = None, dlse_tangent: Tensor | None = None
    ) -> OutputGrads:
        """Gradients of any strides, as backends read them."""
        return cls(unit_last(do), dlse.contiguous(), contiguous(do_tangent), contiguous(dlse_tangent))


class Config(Protocol):
    """A backend's choices for one problem: frozen, and able to describe themselves."""

    def describe(self) -> str: ...

    def traffic(self, p: Problem) -> int:
        """Bytes that the forward moves to and from slow memory, as predicted."""
        ...


ForwardCall = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Tensor | None], tuple[Tensor, ...]]
"""The forward of one problem: of q, k, v, the extras and the seed the operator's results."""

DirectCall = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], bool], tuple[Tensor, Tensor | None] | None]
"""The forward of one problem: of q, k and v, whatever the order of their dimensions, of the extras, and of whether lse is read, o and lse.
None: it takes more than to read the tensors where they lie."""

Appender = Callable[[Pages, Tensor, Tensor | None, Tensor | None], None]
"""What writes new rows k and v of sequences, or packed with cu_seqlens_q, into a cache."""

Saved = Sequence[Any]
"""A forward's tensors that its backward reads: q, k, v, the extras, the seed or None, o and lse."""

DirectBackward = Callable[[Tensor, Tensor | None, Saved], tuple[Tensor, Tensor, Tensor] | None]
"""The backward of one problem: of dO, of dlse (None: zeros) and of what its forward saved, dq, dk and dv; None as above."""


class Backend(Protocol):
    """The members that dispatch asks of a backend; the backends derive from it.

    What a backend may take for granted of the strides of what it reads:

    - q, k, v and pages, leaves, block_table, seqlens_k, k_scale and v_scale have any strides, also 0 and a last one that is not 1. The
      Problem has them (``p.q.stride``, ``p.extras``): a backend strides over them, makes a copy, or refuses them in :meth:`unsupported`.
    - dO has any strides, also 0, and a last one of 1 (:func:`unit_last`). No Problem has them.
    - o, lse, dlse, sink, seed and cu_seqlens are contiguous; so is every tangent, of leaves and of o, lse, dO and dlse too.

    :meth:`Inputs.of`, :meth:`Output.of`, :meth:`OutputGrads.of` and :meth:`Directions.of` copy what comes otherwise, and whoever calls a
    backend, above all the operators, makes these of them. They align nothing: a tensor may begin at any of its elements. What a
    backend returns is contiguous.
    """

    name: str

    def unsupported(self, p: Problem) -> list[str]:
        """Every reason why this problem cannot run here; empty: its forward runs and, if it needs one, its backward."""
        ...

    def slow(self, p: Problem) -> str:
        """What makes its kernels slower at a problem than at most others; empty: nothing does. Backends with a reason are tried last, each
        of which knows itself alone."""
        return ""

    def pieces(self, p: Problem) -> str:
        """How a problem runs as several calls, and why; empty: it is one."""
        return ""

    def no_order(self, p: Problem) -> list[str]:
        """Every reason why a row's sums would not have the one order of ``deterministic="everywhere"`` here; asked of such calls alone."""
        return ['deterministic="everywhere": its kernels have no one order of summation']

    def config(self, p: Problem) -> Config: ...

    def tile(self, p: Problem) -> tuple[int, int] | None:
        """Queries and keys of a tile of the forward; None: it has no tiles of one size."""
        return None

    def forward(self, p: Problem, t: Inputs) -> Output: ...

    def planned(self, p: Problem) -> Any:
        """What the backend decides of a forward, for :meth:`keep`, as :class:`tilewise.sizes.ByStructure` records it with the choice of the
        backend; None: nothing before the first call."""
        return None

    def keep(self, p: Problem, planned: Any) -> None:
        """Keeps what :meth:`planned` returned for a problem of these sizes."""

    def caller(self, p: Problem) -> ForwardCall:
        """The forward of a problem as a function, which is kept with the problem and called for each call of its sizes."""

        def call(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None) -> tuple[Tensor, ...]:
            return self.forward(p, Inputs.of(p, q, k, v, extras, seed)).tensors

        return call

    def direct(self, p: Problem) -> DirectCall | None:
        """The forward of a problem that looks at nothing of its tensors but where they lie; None: there is none such."""
        return None

    def direct_of(self, planned: Any) -> DirectCall | None:
        """:meth:`direct` of what :meth:`planned` gave for a problem, from that alone; None also where it keeps something of a mask."""
        return None

    def direct_backward(self, p: Problem) -> DirectBackward | None:
        """As :meth:`direct`, the backward of a problem where no extra wants a gradient."""
        return None

    def direct_backward_of(self, structure: Hashable, sizes: Sequence[int]) -> DirectBackward | None:
        """:meth:`direct_backward` of a problem, from its structure and sizes alone; None also where it is not known yet, or keeps something
        of a mask."""
        return None

    def backward(self, p: Problem, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads: ...

    def appender(self, cache: Pages, k: Tensor, v: Tensor | None, cu_seqlens_q: Tensor | None) -> Appender | None:
        """What writes checked new rows behind the keys of each sequence, as :func:`tilewise.append` says, of tensors of these shapes,
        strides and dtypes, whatever their values; None: it has no kernel for that."""
        return None

    def without_tangents(self, p: Problem, second: bool) -> list[str]:
        """Every reason why :meth:`jvp` cannot run this problem here or, if ``second``, :meth:`backward_jvp`."""
        return ["second derivatives are not built" if second else "forward mode is not built"]

    def jvp(self, p: Problem, t: Inputs, out: Output, along: Directions) -> Output:
        """The tangents of o and lse where the inputs move ``along``; ``out`` is the forward's result."""
        raise NotImplementedError

    def backward_jvp(
        self, p: Problem, t: Inputs, out: Output, grad: OutputGrads, along: Directions, moved: Output
    ) -> Grads:
        """The tangents of the backward's results where the inputs move ``along``; ``moved`` is what :meth:`jvp` returned."""
        raise NotImplementedError


class PerProblem:
    """Memory of what a backend decides once for each Problem object, of which dispatch makes one a signature: it lies with the problem.

    Args:
        decide: of a problem.
        by_structure: how it is decided for a problem of known structure: a function of the problem that gives ``(make, values)``, which is
            recorded (:mod:`tilewise.sizes`), and ``make(problem, values)`` is what ``decide`` would return. None: anew for each problem.
    """

    def __init__(
        self,
        decide: Callable[[Problem], Any],
        by_structure: Callable[[Problem], tuple[Callable[[Problem, Any], Any], Any]] | None = None,
    ):
        self._decide, self._by_structure, self._ways = decide, by_structure, ByStructure()

    def of(self, p: Problem) -> Any:
        decided = p.decided
        found = decided.get(self, _NOTHING)
        if found is _NOTHING:
            found = decided[self] = self._decided(p)
        return found

    def known(self, structure: Hashable, sizes: Sequence[int]) -> tuple[Callable[[Problem, Any], Any], Any] | None:
        """The ``(make, values)`` of a problem of a structure and sizes if they were recorded."""
        found = self._ways.known(structure, sizes)
        return None if found is MISSED else found

    def recorded(self, p: Problem) -> tuple[Callable[[Problem, Any], Any], Any] | None:
        """The ``(make, values)`` of a problem, for :meth:`keep`."""
        return None if self._by_structure is None else self._by_structure(p)

    def keep(self, p: Problem, recorded: tuple[Callable[[Problem, Any], Any], Any]) -> None:
        """Keeps the answer that :meth:`recorded` tells how to make."""
        make, values = recorded
        p.decided[self] = make(p, values)

    def _decided(self, p: Problem) -> Any:
        by_structure = self._by_structure
        if by_structure is None or isinstance(p.sizes[0], Size):  # a part of a larger decision is recorded with it
            return self._decide(p)
        make, values = self._ways.of(p.structure, p.sizes, lambda sizes: by_structure(p.with_sizes(sizes)))
        return make(p, values)


_NOTHING = object()  # what was made may be None
_NEVER = _NOTHING, (), None  # of tensors of which nothing was made


def _owner(t: Tensor) -> Tensor:
    """Return the tensor of which t is a view; t itself where another object may show other numbers of the same place."""
    base = t._base
    return t if base is None or type(t) is not Tensor or t.is_neg() or t.is_conj() else base


def _place(key: Any, tensors: Sequence[Tensor]) -> tuple:
    found = [key]
    for t in tensors:
        owner = _owner(t)
        view = () if owner is t else (t.storage_offset(), t.shape, t.stride(), t.dtype)
        found.append((id(owner), *view))
    return tuple(found)


class PerTensors:
    """Memory of what was made of some tensors, while they are the same ones, unchanged; forgotten when one of them is gone.

    A view counts as the same where it shows the same of one tensor, since callers make it anew at each call (``mask[:, None, None]``); what
    was made of it stays as long as that tensor does (docs/decisions.md#repeated-calls).

    Nothing is kept of inference tensors, which count no versions, and of those that a compiled graph makes itself
    (:func:`tilewise.caching.keep_track`). Another CUDA stream waits for what one has made. While a CUDA graph
    is captured, nothing is kept, its memory being the graph's, and what was made of tensors is made anew, since a replay has to see
    what they hold by then; so while torch.compile warms one up, which has to launch what it will capture.

    Attributes:
        captured: :data:`tilewise.device.read_by_graphs`, since dispatch forgets plans that have such memory.
    """

    LIMIT = 4096  # entries: what was made of no tensor outlives all tensors, and every length of a call makes another

    def __init__(self):
        # By key and what tells the tensors apart, so that masks of one text take turns.
        self._found: dict[Hashable, tuple[Any, list, Ready]] = {}
        self.captured = read_by_graphs

    def of(self, key: Any, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        capturing, warming, place = is_captured(), is_warming_up(), _place(key, tensors)
        anew = bool(tensors) and (capturing or warming)
        found = _NOTHING if anew else self._kept(place, tensors)
        if found is not _NOTHING:
            if capturing:
                self.captured[id(found)] = found
            return found
        made = lasting(make) if warming and not anew else make()
        if not (capturing or anew):
            self._keep(place, tensors, made)
        return made

    def kept(self, key: Any, tensors: Sequence[Tensor]) -> Any:
        """The thing that was made of these tensors, unchanged since; None: nothing is kept."""
        found = self._kept(_place(key, tensors), tensors)
        return None if found is _NOTHING else found

    def _kept(self, place: Hashable, tensors: Sequence[Tensor]) -> Any:
        """The thing that was made of these tensors, unchanged since, or _NOTHING."""
        made, known, ready = self._found.get(place, _NEVER)
        for t, (x, then) in zip(tensors, known, strict=False):
            if x() is not _owner(t) or edition(t) != then:
                self._found.pop(place, None)  # memory that comes back (``t.data = x``) may hold other numbers
                return _NOTHING
        if ready is not None:
            ready.await_here()
        return made

    def _keep(self, place: Hashable, tensors: Sequence[Tensor], made: Any) -> None:
        """Keeps what was made of tensors, if editions tell when these change."""
        known, found = [], self._found
        for t in tensors:
            now = edition(t)
            if now is None or not is_tracked(t):
                return
            known.append((weakref.ref(_owner(t), lambda _: found.pop(place, None)), now))
        if len(found) >= self.LIMIT:
            found.clear()
        found[place] = made, known, Ready(tensors_in(made))


def piece_reasons(problem: Problem, dropout: int = 0) -> list[str]:
    """Reasons against a piece of a larger attention.

    Args:
        dropout: it draws from the whole's counters where the piece begins at a multiple of this; 0: it cannot.
    """
    piece = problem.spec.piece
    if piece is None:
        return []
    reasons = ["a piece of packed sequences"] if problem.packed else []
    if problem.spec.dropout_p and not dropout:
        reasons.append("dropout in a piece of an attention")
    elif problem.spec.dropout_p and (piece.q_start % dropout or piece.k_start % dropout):
        reasons.append(f"dropout in a piece that does not begin at multiples of {dropout}")
    return reasons


def everywhere_reasons(problem: Problem) -> list[str]:
    """Reasons against ``deterministic="everywhere"`` that hold for every backend: a row's sums would depend on more than the row."""
    spec, text = problem.spec, problem.spec.mask_text
    has = {
        "dropout, which counts the batch and its heads": spec.dropout_p != 0,
        "a part of an attention over ranks, which sums keys part by part": spec.piece is not None,
        "a cache in 8 bits, whose numbers are not those of other calls": problem.quantised,
        "documents that are not packed: pass cu_seqlens": "documents(" in text,
        "padding before the keys, which moves them to other tiles: pad behind them or pack": bool(
            _PADDED_BEFORE.search(text)
        ),
    }
    return [f'deterministic="everywhere" with {what}' for what, applies in has.items() if applies]


_PADDED_BEFORE = re.compile(r"key_range\((?!0,)")


def unknown_operations(problem: Problem, known: Container[str], of_mask: bool = True) -> list[str]:
    """The reason to refuse a problem whose mask, score or derivatives use operations other than the ``known`` ones; else empty.
    ``of_mask``: whether kernels compute the mask."""
    unknown = sorted(name for name in expr.operations_of(*_computed(problem, of_mask)) if name not in known)
    return [f"a mask or score uses {', '.join(unknown)}, which its kernels do not have"] if unknown else []


def _computed(problem: Problem, of_mask: bool) -> list[Expr]:
    """The expressions that kernels compute: a score, its derivatives, and with ``of_mask`` the mask."""
    spec = problem.spec
    return [*(spec.region.parts if of_mask else ()), *(() if spec.score is None else (spec.score, *spec.score_slopes))]


def pair_lookups(problem: Problem) -> list[Expr]:
    """The score's reads of a tensor whose last two axes are i and j: a number of its own for every pair."""
    reads = [] if problem.spec.score is None else expr.lookups(problem.spec.score)
    return [x for x in reads if [index.args for index in x.args[1:][-2:] if index.op == "symbol"] == [("i",), ("j",)]]


def large_numbers(problem: Problem, of_mask: bool = True) -> list[str]:
    """The reason to refuse a mask or score whose whole numbers may not fit the 32 bits that kernels compute them in; else empty.
    ``of_mask``: whether kernels compute the mask."""
    sizes = {"b": problem.batch, "h": problem.heads_q, "i": problem.seqlen_q, "j": problem.seqlen_k}
    found = expr.beyond_32_bits(_computed(problem, of_mask), sizes)
    return [f"{found} in a mask or score may need more than 32 bits, in which its kernels compute"] if found else []


MOST_BYTES = 1 << 14  # of numbers and tensors' places among a launch's arguments, which CUDA limits to 32,764 bytes


def argument_bytes(roots: Iterable[Expr]) -> int:
    """The bytes of a kernel's arguments that the numbers and tensors of expressions take; of a tensor, its place, sizes and strides."""
    every = expr.nodes(*roots)
    numbers = sum(e.op == "number" and expr.kind(e) != "bool" for e in every)
    leaves = {e.args[0][1]: len(e.args) - 1 for e in every if e.op == "lookup"}
    return 4 * numbers + sum(16 + 16 * axes for axes in leaves.values())


def long_expressions(problem: Problem, of_mask: bool = True) -> list[str]:
    """The reason to refuse a mask and a score whose numbers and tensors are more than a launch's arguments hold; else empty.
    ``of_mask``: whether kernels compute the mask."""
    spec = problem.spec
    found = argument_bytes([*(spec.region.parts if of_mask else ()), *(() if spec.score is None else (spec.score,))])
    if found <= MOST_BYTES:
        return []
    return [
        f"the numbers and tensors of its mask and score take {found:,} bytes of a kernel's arguments, of at most {MOST_BYTES:,}; put "
        "the numbers into a tensor and read it: table[i]"
    ]


def wide_mask(problem: Problem) -> list[str]:
    """The reason to refuse a mask that reads numbers in float64, of kernels that compare in float32; else empty."""
    if problem.spec.region.compared_in(problem.extras) == torch.float32:
        return []
    return [
        "a mask reads float64, but its kernels compare in float32; pass t.float() if float32 can represent the values"
    ]


NOT_BUILT = Path(__file__).with_name("not_built.txt")
"""What an installation leaves whose native build failed (pyproject.toml)."""


def why_not_built() -> str:
    """Why a native library is not there, or where to look."""
    if NOT_BUILT.exists():
        return NOT_BUILT.read_text(encoding="utf-8").strip()
    return "nothing built it here; `make setup` does, and build/native.log holds what CMake and the compiler said"


def empty_output(p: Problem, q: Tensor, v: Tensor) -> Output:
    """Contiguous, uninitialised outputs."""
    o, lse = p.output_shapes
    statistics = [q.new_empty(lse, dtype=p.compute_dtype) for _ in range(2 if p.spec.max_logit else 1)]
    return Output(q.new_empty(o), *statistics)


def empty_gradients(p: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor]) -> tuple:
    """Contiguous, uninitialised ``(dq, dk, dv, [dextras])``, the last for each of ``spec.grad_slots``."""
    dq, dk, dv, *dextras = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, *[extras[n] for n in p.spec.grad_slots])
    )
    return dq, dk, dv, dextras


# -- Calls without a pair ------------------------------------------------------------------------------------------


def has_no_pair(p: Problem) -> bool:
    """Whether a call that is not over pages has no batch element, no query or no key. Its tensors, those that its mask and score read
    and lists of its tiles may then have no memory, so that no kernel may begin."""
    if p.paged:
        return False
    return not all((p.q.shape[0], p.k.shape[0]) if p.packed else (p.batch, p.seqlen_q, p.seqlen_k))


def output_of_no_pair(p: Problem, t: Inputs) -> Output:
    """The outputs of a call that :func:`has_no_pair`: rows of a sequence, if there are any, see nothing but a sink."""
    out = empty_output(p, t.q, t.v)
    out.o.zero_()
    for x in out.tensors[1:]:
        x.fill_(-torch.inf)
    if t.sink is not None:
        out.lse.copy_(_lse_of_no_key(p, t, t.sink))
    return out


def _lse_of_no_key(p: Problem, t: Inputs, sink: Tensor) -> Tensor:
    """Return the sink at rows of a sequence and -inf at others, broadcastable to lse."""
    if not p.packed:
        return sink.view(-1, 1)
    rows = torch.arange(t.q.shape[0], device=sink.device)
    return torch.where(rows < t.cu_seqlens_q[-1], sink.view(-1, 1), -torch.inf)


def gradients_of_no_pair(p: Problem, t: Inputs, dlse: Tensor | None) -> Grads:
    """The gradients of a call that :func:`has_no_pair`: lse is the sink. Their tangents come from that of dlse; None: zero."""
    dq, dk, dv = (x.new_zeros(x.shape) for x in (t.q, t.k, t.v))
    leaves = {n: t.leaves[n].new_zeros(t.leaves[n].shape) for n in {e.args[0][1] for e in p.spec.lookups}}
    dsink = None if t.sink is None else torch.zeros_like(t.sink)
    if t.sink is not None and dlse is not None:
        by_row = torch.where(_lse_of_no_key(p, t, t.sink) == -torch.inf, 0, dlse)
        dsink = by_row.movedim(-2, 0).flatten(1).sum(1).to(t.sink.dtype)
    return Grads(dq, dk, dv, dsink, leaves)


def tangents_of_no_pair(out: Output, along: Directions) -> Output:
    """The tangents of o and lse of a call that :func:`has_no_pair`: lse moves with the sink."""
    moved = Output(torch.zeros_like(out.o), torch.zeros_like(out.lse))
    if along.sink is not None:
        moved.lse.copy_(torch.where(out.lse == -torch.inf, 0, along.sink.view(-1, 1)))
    return moved
