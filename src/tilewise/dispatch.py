"""The choice of a problem's backend: an ordered table, a pure choice, and its explanation."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import pages, settings, words
from tilewise.amounts import in_bytes, in_flop
from tilewise.backends.base import (
    Appender,
    Backend,
    DirectBackward,
    DirectCall,
    ForwardCall,
    Inputs,
    Output,
    OutputGrads,
    Pages,
    Saved,
    everywhere_reasons,
)  # fmt: skip
from tilewise.caching import cached_property
from tilewise.masks.facts import kept_pairs
from tilewise.planning import planner
from tilewise.problem import Problem, Signature, check, check_values
from tilewise.sizes import MISSED, ByStructure
from tilewise.spec import Options, Spec, assemble, parse_spec, result_reasons

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """A backend: where its class is, the device types it is tried on (None: all), why it runs only when named, and the module of its
    kernels that plan masks there for all backends (:mod:`tilewise.planning.planner`)."""

    name: str
    path: str
    device_types: tuple[str, ...] | None
    only_named: str = ""
    planner: str = ""


# In order of preference; the others run only when named.
BACKENDS = (
    Row("cpu", "tilewise.backends.cpu:Cpu", ("cpu",)),
    Row("hopper", "tilewise.backends.hopper:Hopper", ("cuda",)),
    Row("triton", "tilewise.backends.triton:Triton", ("cuda",), planner="tilewise.backends.triton.host.tile_map"),
    Row("portable", "tilewise.backends.portable:Portable", None),  # last: it refuses nothing
)
NAMED_ONLY = (Row("reference", "tilewise.reference:Reference", None, "runs only when named"),)
for _row in BACKENDS:
    for _type in _row.device_types or ():
        if _row.planner:
            planner.register(_type, partial(importlib.import_module, _row.planner))


def every() -> tuple[Row, ...]:
    return (*BACKENDS, *NAMED_ONLY)


@lru_cache(maxsize=16)
def backend(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        ValueError: there is none.
    """
    row = next((row for row in every() if row.name == name), None)
    if row is None:
        known = [row.name for row in every()]
        raise ValueError(
            f"backend={name!r} does not exist; there are {', '.join(known)}{words.resembles(name.lower(), known)}"
        )
    module, _, attribute = row.path.partition(":")
    return getattr(importlib.import_module(module), attribute)()


def candidates(p: Problem) -> list[str]:
    """Return the names to try for a problem, in order: the table's, those last that would be slow."""
    if p.spec.backend is not None:
        return [p.spec.backend]
    names = [row.name for row in BACKENDS if row.device_types is None or p.device.type in row.device_types]
    if p.spec.everywhere:
        # One backend for all calls with such rows: neither sizes nor another way may choose the order of sums.
        return [name for name in names if not backend(name).no_order(p)][:1] or names
    return sorted(names, key=lambda name: bool(backend(name).slow(p)))


What = Literal["attention", "forward mode", "second derivatives"]


def _reasons(name: str, p: Problem, what: What) -> list[str]:
    """Return the reasons why a backend cannot run a problem, or derivatives of it beyond the first backward."""
    reasons = _refused(name, p)
    if what == "attention":
        return reasons
    return reasons + backend(name).without_tangents(p, what == "second derivatives")


def _refused(name: str, p: Problem) -> list[str]:
    """Return the reasons why a backend cannot run a problem, each once, also those against the one order of sums that it may ask for."""
    reasons = backend(name).unsupported(p)
    if p.spec.everywhere:
        reasons = [*reasons, *everywhere_reasons(p), *backend(name).no_order(p)]
    return list(dict.fromkeys(reasons))


def select(p: Problem, what: What = "attention") -> Backend:
    """Return the backend that runs a problem, or derivatives of it beyond the first backward.

    Raises:
        ValueError: the backend asked for does not exist.
        NotImplementedError: none can; every reason of each.
    """
    refused: dict[str, list[str]] = {}
    for name in candidates(p):
        reasons = _reasons(name, p, what)
        if not reasons:
            return backend(name)
        refused[name] = reasons
    raise NotImplementedError(_refusal(p, refused, what))


def _refusal(p: Problem, refused: dict[str, list[str]], wanted: What) -> str:
    asked, what = p.spec.backend, "this attention" if wanted == "attention" else f"{wanted} of this attention"
    lines = [f'backend="{asked}" cannot run {what}' if asked else f"no backend can run {what}"]
    lines += [f"    {p.describe()}"]
    lines += [
        f"  {reason}" if asked else f"  {name}: {reason}" for name, reasons in refused.items() for reason in reasons
    ]
    if asked:
        others = [
            name for name in candidates(replace(p, spec=replace(p.spec, backend=None))) if not _reasons(name, p, wanted)
        ]
        lines += [f"  Drop backend= and {others[0]} runs it."] if others else []
    return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """A checked problem and who runs it."""

    problem: Problem
    backend: Backend
    first: tuple[Backend, Any] | None = None  # see _first

    @cached_property
    def spec(self) -> str:
        return self.problem.spec.source

    @cached_property
    def of_forward(self) -> Plan:
        """Return the forward's plan."""
        if self.first is None:
            return self
        backend, planned = self.first
        alone = _without_gradients(self.problem)
        if planned is not None:
            backend.keep(alone, planned)
        return Plan(alone, backend)

    @cached_property
    def forward(self) -> ForwardCall:
        """The forward, of the operator's tensors."""
        plan = self.of_forward
        return plan.backend.caller(plan.problem)

    @cached_property
    def direct(self) -> DirectCall | None:
        """The forward by the tensors' memory alone, or None if there is no such forward."""
        plan = self.of_forward
        return plan.backend.direct(plan.problem)

    @cached_property
    def direct_backward(self) -> DirectBackward | None:
        """The backward by the tensors' memory alone, or None if there is no such backward."""
        return None if self.problem.spec.grad_slots else self.backend.direct_backward(self.problem)

    def backward(
        self, do: Tensor, dlse: Tensor | None, saved: Saved, joint: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Return dq, dk, dv, and the gradients of the extras that want one.

        ``dlse``: None where lse has no gradient. ``joint``: dk may have dv in its first columns (:class:`tilewise.backends.base.Inputs`).
        """
        found = None if self.direct_backward is None else self.direct_backward(do, dlse, saved)
        if found is not None:
            return *found, []
        q, k, v, *extras, seed, o, lse = saved
        grad = OutputGrads.of(do, torch.zeros_like(lse) if dlse is None else dlse)
        given = inputs(self, q, k, v, extras, seed)
        given.joint = joint
        with torch._C._DisableAutocast():  # which is on here if the caller's loss.backward() is inside it
            grads = self.backend.backward(self.problem, given, Output.of(o, lse), grad.do, grad.dlse)
        return grads.dq, grads.dk, grads.dv, grads.extras(self.problem, extras)

    @cached_property
    def latent(self) -> bool:
        """As of a Problem."""
        return self.problem.latent

    @cached_property
    def reads_lengths(self) -> bool:
        """Whether a tensor says which rows, keys or pages there are. Its values, or the places of pages, are then read in each call."""
        spec = self.problem.spec
        return bool(spec.cu_slots or spec.page_slots or spec.region.selections)

    @cached_property
    def forward_mode(self) -> Plan:
        """The plan of forward mode, which may have another backend.

        Raises:
            NotImplementedError: none can; every reason of each.
        """
        return Plan(self.problem, select(self.problem, "forward mode"))

    @cached_property
    def second(self) -> Plan:
        """The plan of second derivatives; as :attr:`forward_mode`."""
        return Plan(self.problem, select(self.problem, "second derivatives"))


@lru_cache(maxsize=512)
def _forward_only(spec: str) -> Spec:
    return parse_spec(replace(parse_spec(spec), needs_grad=False, grad_slots=()).text())


def _without_gradients(p: Problem) -> Problem:
    """Return the same call where no gradient is wanted."""
    return replace(p, spec=_forward_only(p.spec.source))


def _first(p: Problem, backend: Backend) -> tuple[Backend, Any] | None:
    """Return the backend that runs the forward before this one, that of the call without gradients unless it would be slow, and what it
    has planned; None: there is none.

    All backends give o and lse by one rule of error, so that any backward goes on from them.
    """
    if not p.spec.needs_grad or p.spec.backend is not None:
        return None
    alone = _without_gradients(p)
    first = select(alone)
    if first is backend or (first.slow(alone) and not p.spec.everywhere):
        return None
    return first, first.planned(alone)


_plans: dict[tuple, Plan] = {}
of_calls: dict[tuple, Any] = {}  # that the operator does not see: tilewise.repeated
of_structures: dict[tuple, Hashable] = {}  # of the same calls, by what they say without their sizes
of_appends: dict[tuple, Appender] = {}  # by what decides an append: tilewise.cache
_selected = ByStructure()
PLANS_LIMIT = 512  # of calls that repeat; another one of a known structure takes little more


def forget() -> None:
    """Forget what was decided: backends are asked again."""
    for memory in (_plans, _selected, of_calls, of_structures, of_appends):
        memory.clear()


def _signature(t: Tensor) -> tuple:
    return t.shape, t.stride(), t.dtype, t.device


def plan(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None, spec: str) -> Plan:
    """Check and select, once per signature; the values of lengths and tables are checked at every call.

    Raises:
        ValueError: a wrong call. NotImplementedError: a right one that no backend runs.
    """
    # fmt: off
    signature = (spec, q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
                 v.shape, v.stride(), v.dtype, v.device)
    # fmt: on
    if extras or seed is not None:
        signature = (*signature, *[_signature(t) for t in extras], None if seed is None else _signature(seed))
    found = _plans.get(signature)
    if found is not None:
        if not found.reads_lengths:
            return found
        if found.problem.latent != pages.is_latent(v, k, found.problem.spec):
            found = None  # the same sizes as another call's, where v and k lay otherwise
    if found is None:
        found = decide(q, k, v, extras, seed, spec)
        if len(_plans) >= PLANS_LIMIT:
            _plans.clear()
        _plans[signature] = found
    check_lengths(found, extras)
    return found


def check_lengths(found: Plan, extras: Sequence[Tensor]) -> None:
    """Check the values of a call's lengths and tables, where they are checked.

    Raises:
        ValueError: they are wrong.
    """
    if found.reads_lengths and settings.checks_values(found.problem.device):
        check_values(found.problem, extras)


def check_results(p: Problem, **results: Tensor | None) -> None:
    """Refuse an o, do, lse or dlse that the problem's forward does not have: a kernel would read beyond its end.

    Raises:
        ValueError: some are wrong.
    """
    of_o, of_lse = zip(p.output_shapes, (p.q.dtype, p.compute_dtype), strict=True)
    reasons = result_reasons(results, of_o, of_lse, p.device)
    if reasons:
        reasons.append("hooks of saved tensors must give back what the forward saved")
    words.raise_wrong("the backward of attention", reasons)


def decide(q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None, spec: str) -> Plan:
    """Make the :func:`plan` of a new call, without the checks of lengths' and tables' values."""
    call = Signature.of(q, k, v, extras, parse_spec(spec))

    def decided(sizes: Sequence[Any]) -> tuple[Backend, Any, Any]:
        p = call.checked(seed, sizes)
        backend = select(p)
        first = _first(p, backend)
        return backend, first, None if first else backend.planned(p)

    of_seed = None if seed is None else (seed.dtype, seed.shape, seed.device)
    backend, first, planned = _selected.of((call.structure, of_seed), call.sizes, decided)
    problem = call.problem()
    if planned is not None:
        backend.keep(problem, planned)
    return Plan(problem, backend, first)


def direct(structure: Hashable, sizes: Sequence[int], grads: bool) -> tuple[DirectCall, DirectBackward | None] | None:
    """Return the forward by memory of a call without a seed whose structure was decided for other sizes, and with ``grads`` its backward;
    None: decide it."""
    found = _selected.known((structure, None), sizes)
    if found is MISSED:
        return None
    backend, *ahead = found
    first, planned = ahead[0] or (backend, ahead[1])
    forward = None if planned is None else first.direct_of(planned)
    backward = backend.direct_backward_of(structure, sizes) if grads else None
    return None if forward is None or (grads and backward is None) else (forward, backward)


def inputs(found: Plan, q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], seed: Tensor | None) -> Inputs:
    return Inputs.of(found.problem, q, k, v, extras, seed)


def appender(cache: Pages, k: Tensor, v: Tensor | None, cu_seqlens_q: Tensor | None) -> Appender | None:
    """Return what a backend of the device has to write new rows like these into the pages of a cache, or None if none has a kernel."""
    rows = [row for row in BACKENDS if row.device_types is not None and k.device.type in row.device_types]
    each = (backend(row.name).appender(cache, k, v, cu_seqlens_q) for row in rows)
    return next((found for found in each if found is not None), None)


# -- Explaining ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """The backend that would run a call, and the reasons against the others. ``print`` it.

    Attributes:
        chosen, tiles: the backend and its tiles. refused: every reason of each other backend.
        tangents, second: the backends of forward mode and of second derivatives. tangents_refused, second_refused: the reasons against
            the backends before them.
        flops, kept_flops: operations of the forward's products, of all pairs and of those that the mask keeps; the latter is None if a
            tensor or a function decides about pairs. traffic: bytes.
        tile: queries and keys of a tile of the forward, if the backend has such tiles. extras: the call's tensors beside q, k, v.
        pieces: how the backend cuts the call. prefix: how a shared prefix is read.
        forward: the backend of the forward and its tiles, if another one runs the backward.
    """

    problem: Problem
    chosen: str | None
    tiles: str
    flops: int
    traffic: int
    refused: dict[str, list[str]]
    tangents: str | None
    tangents_refused: dict[str, list[str]]
    second: str | None
    second_refused: dict[str, list[str]]
    kept_flops: int | None = field(default=None, kw_only=True)
    tile: tuple[int, int] | None = field(default=None, kw_only=True)
    pieces: str = field(default="", kw_only=True)
    prefix: str = field(default="", kw_only=True)
    forward: tuple[str, str] | None = field(default=None, kw_only=True)
    extras: tuple[Tensor, ...] = field(default=(), kw_only=True, repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join(map(_folded, self._lines()))

    def _lines(self) -> list[str]:
        """Return what is printed, a line for each fact: a word of ten columns and the fact."""
        p, facts = self.problem, devices.of(self.problem.device)
        units = ("SM" if facts.type == "cuda" else "thread") + "s" * (facts.cores != 1)
        lines = [p.describe(), f"on {facts.name}, {facts.cores} {units}"]
        if self.chosen:
            lines += [f"backend   {self.chosen}: {self.tiles}"]
            work = f"{in_flop(self.flops)} before masking"
            work += f", {in_flop(self.kept_flops)} after" if self.kept_flops not in (None, self.flops) else ""
            lines += [f"work      {work}, {in_bytes(self.traffic)} of slow memory predicted"]
        else:
            lines += ["backend   none"]
        lines += [f"forward   {': '.join(self.forward)}"] if self.forward else []
        if self.chosen and p.spec.everywhere:
            lines += [f"order     one for a row's sums: {ORDER_COSTS[self.chosen]} (docs/invariance.md)"]
        lines += [f"pieces    {self.pieces}"] if self.pieces else []
        lines += [f"prefix    {self.prefix}"] if self.prefix else []
        lines += [f"layout    {_HEADS_FIRST}"] if _heads_first(p) else []
        lines += [f"not       {name}: {'; '.join(reasons)}" for name, reasons in self.refused.items()]
        others = (("tangents", self.tangents, self.tangents_refused), ("second", self.second, self.second_refused))
        for what, found, refused in others:
            if self.chosen and self.chosen != found:
                lines += [f"{what:9} {found or 'no backend'}, not {self.chosen}: {'; '.join(refused[self.chosen])}"]
        return lines

    def as_dict(self) -> dict:
        return {
            "problem": self.problem.describe(),
            "device": devices.of(self.problem.device).name,
            "backend": self.chosen,
            "tiles": self.tiles,
            "forward": self.forward,
            "pieces": self.pieces,
            "flops": self.flops,
            "kept_flops": self.kept_flops,
            "traffic_bytes": self.traffic,
            "refused": self.refused,
            "tangents": self.tangents,
            "second": self.second,
        }

    def plot(self, batch: int = 0, head: int = 0) -> Figure:
        """Return a matplotlib figure of the tiles that the forward visits, full, partial and skipped, of the score, and of this text.

        It reads the call's masks and scores back from their device. ``figure.savefig("call.png")`` saves it.

        Args:
            batch: whose tiles: the batch element, or the sequence of a packed call. head: the query head.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there is no such batch element or head.
            NotImplementedError: a part of an attention over ranks.
        """
        from tilewise.pictures import explained  # which nothing that computes needs

        return explained.plot(self.problem, self.extras, self.tile, str(self), (batch, head))


# What one order of a row's sums costs on a backend. The numbers are those of docs/invariance.md#what-it-costs.
ORDER_COSTS = {
    "cpu": "keys are not split; decoding takes 0.99 to 1.38 times as long on one thread",
    "hopper": "keys are split at every 2,048th one up to head dim 128, dQ is added up in order; forward 0.99 to 1.33, backward 1.00 to "
    "1.73, decoding 1.00 to 1.70 times as long, one sequence up to 6.28 (above head dim 128)",
    "triton": "keys are not split, few rows have a tile of 64; head dims above 128: prefill 1.86 to 1.96, decoding 1.23 to 9.36 times as "
    "long as on Hopper",
    "portable": "sums are made term by term instead of by matrix products, many times as slow",
}
_COLUMNS = textwrap.TextWrapper(70, break_long_words=False, break_on_hyphens=False)


def _folded(line: str) -> str:
    """Return a line of ``explain`` in 80 columns: cut between reasons or tensors, else between words, never within a command."""
    text = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), line[10:])
    first, *others = re.split(r"((?<=;) | {4})", text)
    found = _COLUMNS.wrap(first)
    for between, text in zip(others[::2], others[1::2], strict=True):
        if len(found[-1] + between + text) <= _COLUMNS.width:
            found[-1] += between + text
        else:
            found += _COLUMNS.wrap(text)
    return line[:10] + f"\n{'':10}".join(found).replace("\0", " ")


_HEADS_FIRST = "more heads than rows: if your tensors are (batch, heads, seqlen, head_dim), pass x.transpose(1, 2)"


def _heads_first(p: Problem) -> bool:
    """Return whether rows and heads look exchanged: equal heads of q and k, more heads than rows, and rows like heads of a group."""
    rows_q, rows_k, heads = p.seqlen_q, p.seqlen_k, p.heads_k
    grouped = rows_k > 0 and rows_q % rows_k == 0
    return (
        not (p.packed or p.paged) and p.heads_q == heads and heads >= 64 and heads > rows_q and rows_q > 1 and grouped
    )


def _why_not(row: Row, p: Problem, chosen: str | None) -> list[str]:
    """Return the reasons why a backend does not run a problem that another one runs."""
    reasons = _refused(row.name, p)
    if row.device_types is not None and p.device.type not in row.device_types:
        elsewhere = f"runs on {', '.join(row.device_types)}, q is on {p.device.type}"
        reasons = [elsewhere, *(reason for reason in reasons if reason != elsewhere)]
    if reasons:
        return reasons
    if p.spec.backend is not None or chosen is None:
        return [row.only_named or "not asked for"]
    because = backend(row.name).slow(p)
    return [row.only_named or f"comes after {chosen}" + (f": it {because}" if because else "")]


def _other(forward: Plan | None, chosen: str | None) -> tuple[str, str] | None:
    """Return the forward's backend and its tiles, if another one runs the backward."""
    if forward is None or forward.backend.name == chosen:
        return None
    return forward.backend.name, forward.backend.config(forward.problem).describe()


def explain(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Explanation:
    """Return the explanation of a call with these keywords.

    Raises:
        ValueError: a wrong call.
    """
    extras, seed, text = assemble(q, k, v, options)
    return explained(check(q, k, v, extras, seed, parse_spec(text)), extras)


def explained(p: Problem, extras: Sequence[Tensor] = ()) -> Explanation:
    """Explain who would run a problem, and why not the others; ``extras`` are its tensors, for a picture."""
    names = candidates(p)
    everything = get_args(What)
    reasons = {what: {name: _reasons(name, p, what) for name in names} for what in everything}
    chosen, tangents, second = (next((x for x in names if not reasons[what][x]), None) for what in everything)
    refused = {row.name: _why_not(row, p, chosen) for row in every() if row.name != chosen}
    config = backend(chosen).config(p) if chosen else None
    ahead = Plan(p, backend(chosen), _first(p, backend(chosen))).of_forward if chosen else None
    a_pair = 2 * p.heads_q * (p.head_dim + p.head_dim_v) * (1 if p.packed else p.batch)
    kept = None if p.packed or p.paged else kept_pairs(p.spec.region, p.seqlen_q, p.seqlen_k)
    return Explanation(
        p, chosen, config.describe() if config else "", a_pair * p.seqlen_q * p.seqlen_k, config.traffic(p) if config else 0, refused,
        tangents, reasons["forward mode"], second, reasons["second derivatives"],
        kept_flops=None if kept is None else a_pair * kept,
        tile=ahead.backend.tile(ahead.problem) if ahead else None, extras=tuple(extras), forward=_other(ahead, chosen),
        pieces=backend(chosen).pieces(p) if chosen else "",
    )  # fmt: skip
