"""Masks and scores as Triton source: the expressions of a problem become one small module of JIT functions.

A module has ``lo hi first last keep score`` and, for the backward, ``again`` (the score as gradients need it), ``slope``,
``rows``, ``leaves`` and ``columns``; kernels get them as fields of their compile-time facts. The ``s`` that they take is what q and
k multiply to: the softmax scale is one of their factors. Numbers are run-time arguments (``at.numbers``), so 30 and 50 share
a module; modules are made once per source. What the gradient of a leaf costs follows from where it is read (docs/algorithm.md,
section 7), which :func:`tilewise.leaf_gradients.classify` says.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import types
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from tilewise import expr
from tilewise.expr import Expr
from tilewise.leaf_gradients import COLUMNS, ROWS, STORE, TILES, Read, classify
from tilewise.masks.facts import constant_on_blocks, granularity
from tilewise.problem import Problem

_FLOAT_CALLS = {name: f"tl.{name}" for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "erf", "sin", "cos")}
_CALLS = {
    **_FLOAT_CALLS,
    "tanh": "maths.tanh",
    "expm1": "maths.expm1",
    "log1p": "maths.log1p",
    "sigmoid": "tl.sigmoid",
    "floordiv": "maths.floordiv",
    "mod": "maths.mod",
    "pow": "maths.power",
    "sign": "maths.sign",
    "abs": "tl.abs",
    "maximum": "tl.maximum",
    "minimum": "tl.minimum",
    "clamp_min": "tl.maximum",
    "clamp_max": "tl.minimum",
}
_INFIXES = ("add", "sub", "mul", "div", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne")
_INFIX = {name: expr.OPERATIONS[name].infix for name in _INFIXES}
_ROUNDING = {"floor": "tl.floor", "ceil": "tl.ceil", "round": "maths.round_even", "trunc": "maths.trunc"}
_OF_POSITIONS = {"symbol": "", "add": "", "sub": "", "mul": "", "neg": "-", "abs": "tl.abs"}
LOG2E = math.log2(math.e)
SMALL = 1 << 20  # eight positions below it add up to less than 2**24, which fp32 holds exactly
_OF_BOOLS = {"add": "|", "mul": "&"}  # torch's sums and products of truth values
_TYPES = {"float": "tl.float32", "int": "tl.int32", "bool": "tl.int1"}
OPERATIONS = frozenset({*_CALLS, *_INFIX, *_ROUNDING, *_TYPES, "where", "relu", "neg", "not"})
"""The operations that this module can write; the last four have branches of their own in ``_Writer._operation``."""


def seen_lookup(p: Problem) -> Expr | None:
    """The one read of the score at ``[.., i, j]``, at most two axes before, each b, h or a number, of a tensor at least as large as
    that: a tensor descriptor can bring its tiles. None where there is none, or others read the same tensor."""
    if p.spec.score is None:
        return None
    reads = expr.lookups(p.spec.score)
    at_pairs = [e for e in reads if {"i", "j"} <= expr.depends_on(*e.args[1:])]
    if len(at_pairs) != 1 or sum(e.args[0][1] == at_pairs[0].args[0][1] for e in reads) > 1:
        return None
    e = at_pairs[0]
    facts, index = p.extras[e.args[0][1]], e.args[1:]
    sizes = {"b": p.batch, "h": p.heads_q, "i": p.seqlen_q, "j": p.seqlen_k}
    names = [x.args[0] for x in index if x.op in ("symbol", "number")]
    if len(names) != len(index) or not 2 <= len(index) <= 4 or names[-2:] != ["i", "j"] or "i" in names[:-2]:
        return None
    fits = all(
        size > n if isinstance(n, int) else size >= sizes.get(n, math.inf)
        for n, size in zip(names, facts.shape, strict=True)
    )
    unit = 16 // facts.dtype.itemsize
    strided = facts.stride[-1] == 1 and all(x and x % unit == 0 for x in facts.stride[:-1])
    return e if fits and strided and facts.dtype.is_floating_point else None


@dataclass(frozen=True)
class Pairs:
    """The tensors of which a predicate or a score reads a number for every i and j; a pattern of blocks gives all pairs of one the same.

    Attributes:
        bytes: of all of them, a pair; shared: "b" and "h" where none of them is read at that.
    """

    bytes: int = 0
    shared: frozenset[str] = frozenset()

    @classmethod
    def of(cls, p: Problem) -> Pairs:
        roots = [e for e in (p.spec.region.predicate, p.spec.score) if e is not None]
        at_pairs = [e for e in expr.lookups(*roots) if {"i", "j"} <= expr.depends_on(*e.args[1:])]
        reads = [e for e in at_pairs if not constant_on_blocks(e)]
        if not reads:
            return cls()
        at = expr.depends_on(*[index for e in reads for index in e.args[1:]])
        return cls(sum(p.extras[e.args[0][1]].dtype.itemsize for e in reads), frozenset("bh") - at)


def blocks(p: Problem) -> tuple[int, int]:
    """Rows and keys of the blocks on which p's predicate is constant, for the lists of tiles that lie in them; 0: it does not depend on
    them, or there are no lists."""
    predicate = p.spec.region.predicate
    if predicate is None or p.packed:
        return 0, 0
    return tuple(granularity(predicate, index) or 0 for index in ("i", "j"))


# -- One expression as lines of source -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """What is known of a leaf's layout.

    Attributes:
        whole: i and j, where they index a dimension at least as long as their sequence: they need no clamp.
        unit: elements of which every stride but the last, which is 1, and the last size are multiples; 1 where there are none.
    """

    whole: tuple[str, ...] = ()
    unit: int = 1

    def holds(self, index: Expr) -> bool:
        return index.op == "symbol" and index.args[0] in self.whole


def spans(p: Problem, slots: tuple[int, ...], reads: list[Expr]) -> dict[int, Span]:
    """Of every leaf, from all its ``reads``."""
    found = {}
    for slot in slots:
        facts, unit = p.extras[slot], 16 // p.extras[slot].dtype.itemsize
        indices = [pair for e in reads if e.args[0][1] == slot for pair in enumerate(e.args[1:])]
        axes = [(axis, x.args[0]) for axis, x in indices if x.op == "symbol"]
        whole = [
            name
            for name, length in (("i", p.seqlen_q), ("j", p.seqlen_k))
            if all(facts.shape[axis] >= length for axis, index in axes if index == name)
        ]
        multiples = (*facts.stride[:-1], *facts.shape[-1:])
        units = bool(facts.shape) and facts.stride[-1] == 1 and all(x % unit == 0 for x in multiples)
        found[slot] = Span(tuple(whole), unit if units else 1)
    return found


class _Writer:
    """Lines that compute expressions, each shared node once.

    Args:
        leaf: position of a slot among ``at.leaves``.
        spans: of the slots, where i and j are a tile's; empty where they are ends of intervals.
        wide: slots whose elements need 64-bit offsets.
        small: every position is below SMALL.
        rough: a tanh of s may err as much as the rounding of s to 16 bits makes it err.
        seen: the slot whose tile ``at.pair`` is.
    """

    def __init__(
        self,
        leaf: dict[int, int],
        spans: dict[int, Span],
        wide: frozenset[int],
        small: bool,
        *,
        rough: bool = False,
        seen: int | None = None,
    ):
        self.leaf, self.spans, self.wide, self.small, self.rough, self.seen = leaf, spans, wide, small, rough, seen
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        self.floats: dict[int, str] = {}

    def value(self, root: Expr) -> str:
        for e in expr.nodes(root):
            if id(e) not in self.names:
                self.names[id(e)] = self._name(e)
        return self.names[id(root)]

    def _name(self, e: Expr) -> str:
        if e.op == "symbol":
            name = e.args[0]
            return {"off": "(at.seqlen_k - at.seqlen_q)"}.get(name, f"at.{name}" if name.startswith("seqlen") else name)
        text = self._text(e)  # which may add lines of its own
        self.lines.append(f"v{len(self.lines)} = {text}")
        return f"v{len(self.lines) - 1}"

    def _text(self, e: Expr) -> str:
        if e.op == "number":
            return f"tl.full((), {e.args[0]}, {_TYPES[expr.kind(e)]})"
        if e.op == "param":
            number = f"at.numbers[{e.args[0]}]"
            return f"tl.full((), {number if e.args[1] == 'float' else f'maths.plain({number})'}, {_TYPES[e.args[1]]})"
        if e.op == "lookup" and e.args[0][1] == self.seen:
            return "at.pair.to(tl.float32)"
        if e.op == "lookup":
            position = self.leaf[e.args[0][1]]
            inside = self.inside(e, "extents")
            masked = f", mask={inside}, other=0" if inside else ""
            text = f"tl.load(at.leaves[{position}] + ({self.offset(e, 'extents')}){masked})"
            return f"{text}.to(tl.float32)" if expr.kind(e) == "float" else text
        return self._operation(e, [self.names[id(a)] for a in e.args], [expr.kind(a) for a in e.args])

    def offset(self, e: Expr, extents: str) -> str:
        """Where a lookup reads, in elements: each index clamped into its dimension, or left as it is where :meth:`inside`
        bounds it: of consecutive elements that are known as such, a thread reads several at once."""
        slot = e.args[0][1]
        of, span = f"at.{extents}[{self.leaf[slot]}]", self.spans.get(slot, Span())
        terms = []
        for axis, index in enumerate(e.args[1:]):
            value, stride = self.value(index), f"maths.plain({of}[{2 * axis + 1}])"
            if not span.holds(index):
                value = f"tl.minimum(tl.maximum({value}, 0), maths.plain({of}[{2 * axis}]) - 1)"
            if span.unit > 1:
                stride = "1" if axis == len(e.args) - 2 else f"maths.multiple({stride}, {span.unit})"
            value = f"({value}).to(tl.int64)" if slot in self.wide else value
            terms.append(value if stride == "1" else f"{value} * {stride}")
        return " + ".join(terms) or "0"

    def inside(self, e: Expr, extents: str) -> str:
        """Whether a tile's i and j, which are never negative, lie within the dimensions that they index alone."""
        slot = e.args[0][1]
        span, terms = self.spans.get(slot, Span()), []
        for axis, index in enumerate(e.args[1:]):
            if span.holds(index):
                size = f"maths.plain(at.{extents}[{self.leaf[slot]}][{2 * axis}])"
                last = axis == len(e.args) - 2 and span.unit > 1
                terms.append(f"({self.value(index)} < {f'maths.multiple({size}, {span.unit})' if last else size})")
        return " & ".join(terms)

    def floating(self, e: Expr) -> str:
        """``e``, which has a name, as fp32. Sums of a few positions are added as fp32, which is exact, so that lines of them are
        converted and not a tile: a conversion of each element takes as long as four additions."""
        if expr.kind(e) == "float":
            return self.names[id(e)]
        if id(e) not in self.floats:
            few = [x for x in expr.nodes(e) if not expr.is_number(x, -1)]
            exact = self.small and all(x.op in _OF_POSITIONS for x in few) and len(few) < 9
            if exact and e.op == "number":
                text = "-1.0"
            elif exact and e.op != "symbol":
                args = [self.floating(a) for a in e.args]
                infix = expr.OPERATIONS[e.op].infix
                text = f" {infix} ".join(args) if len(args) == 2 else f"{_OF_POSITIONS[e.op]}({args[0]})"
            else:
                text = f"{self.names[id(e)]}.to(tl.float32)"
            self.lines.append(f"f{len(self.lines)} = {text}")
            self.floats[id(e)] = f"f{len(self.lines) - 1}"
        return self.floats[id(e)]

    def _operation(self, e: Expr, args: list[str], kinds: list[str]) -> str:
        operation, result = expr.OPERATIONS[e.op], expr.kind(e)
        if operation.float_args or (result == "float" and (e.op == "pow" or operation.infix)):
            args = [self.floating(a) for a in e.args]
        elif e.op != "where" and result != "bool" and e.op not in ("int", "bool"):
            args = [f"{a}.to(tl.int32)" if k == "bool" else a for a, k in zip(args, kinds, strict=True)]
        if e.op in ("float", "int", "bool"):
            return f"({args[0]} != 0)" if e.op == "bool" and kinds[0] != "bool" else f"{args[0]}.to({_TYPES[e.op]})"
        if e.op == "where":
            if result == "float":
                args[1:] = [
                    a if k == "float" else f"{a}.to(tl.float32)" for a, k in zip(args[1:], kinds[1:], strict=True)
                ]
            return f"tl.where({', '.join(args)})"
        if e.op in _ROUNDING:
            return f"{_ROUNDING[e.op]}({args[0]})" if kinds[0] == "float" else args[0]
        if e.op == "relu":
            return f"tl.maximum({args[0]}, 0)"
        if e.op == "neg":
            return f"-{args[0]}"
        if e.op == "not":
            return f"{args[0]} == 0" if result == "bool" else f"{args[0]} ^ -1"
        if e.op in _CALLS:
            rough = self.rough and e.op == "tanh" and "s" in expr.depends_on(e)
            call = f"{'maths.rough_tanh' if rough else _CALLS[e.op]}({', '.join(args)})"
            return f"{call}.to(tl.int32)" if e.op == "pow" and result != "float" else call
        if _is_scaled_tanh(e) and not self.rough:
            return f"maths.scaled_tanh({self.floating(e.args[0].args[0])}, {args[1]})"
        infix = _OF_BOOLS.get(e.op, _INFIX[e.op]) if result == "bool" else _INFIX[e.op]
        return f"{args[0]} {infix} {args[1]}"


def _is_scaled_tanh(e: Expr) -> bool:
    return e.op == "mul" and e.args[0].op == "tanh" and e.args[1].op == "param" and expr.kind(e) == "float"


# -- A problem's module --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emitted:
    """The functions of a problem, ``None`` where it has no such part, and what their arguments are.

    Attributes:
        numbers: values of ``at.numbers``; slots: the extras that ``at.leaves`` holds, in order.
        hides: the score may be -inf, or its slope not finite, where s is finite.
        binary: the score is in units of log2; bounded: and at most BOUND of them, of inputs in bf16.
        digest: of the source, so that compiled kernels are told apart.
    """

    functions: dict[str, object]
    numbers: tuple[float, ...]
    slots: tuple[int, ...]
    reads: tuple[Read, ...]
    hides: bool
    binary: bool
    bounded: bool
    digest: str


BOUND = 80.0  # up to it bf16 holds every power of 2, and fp32 the sums of a million of them times values up to 2**27
_ENDS = (("lo", "i"), ("hi", "i"), ("first", "j"), ("last", "j"))


def emit(p: Problem, wide: frozenset[int], seen: int | None = None) -> Emitted:
    """Source from the trees, functions from the source.

    Args:
        wide: slots whose elements need 64-bit offsets.
        seen: the slot whose tile the score finds in ``at.pair``, of :func:`seen_lookup`.
    """
    spec, region, numbers = p.spec, p.spec.region, []
    slots = tuple(dict.fromkeys((*spec.mask_slots, *spec.score_slots)))
    prepared = () if region.prepared is None else (region.prepared.status_slot, region.prepared.seen_slot)
    slots = tuple(n for n in slots if n not in prepared)
    leaf = {slot: n for n, slot in enumerate(slots)}
    abstract = lambda e: None if e is None else expr.abstract(e, numbers)  # noqa: E731
    of_tiles = spans(p, slots, expr.lookups(*(e for e in (region.predicate, spec.score) if e is not None)))
    small = max(p.seqlen_q, p.seqlen_k) < SMALL
    writer = lambda: _Writer(leaf, of_tiles, wide, small)  # noqa: E731
    source = []
    for (name, index), e in zip(_ENDS, region.ends, strict=True):
        if e is not None:
            ends = _Writer(leaf, {}, wide, small)
            source.append(_returning(ends, name, f"b, h, {index}, at", abstract(e)))
    if region.predicate is not None:
        source.append(_returning(writer(), "keep", "b, h, i, j, at", abstract(region.predicate)))
    reads, binary, bounded, half = classify(p), False, False, p.dtype.itemsize == 2
    if spec.score is not None:
        score = abstract(spec.score)
        products = _Products(numbers, p.softmax_scale)
        root = products.of(score)
        binary = half and products.binary(root) is not None
        bounded = binary and p.dtype == torch.bfloat16 and LOG2E * _bound(spec.score) <= BOUND
        root = products.binary(root) if binary else root
        made = lambda rough: _Writer(leaf, of_tiles, wide, small, rough=rough, seen=seen)  # noqa: E731
        source.append(_returning(made(False), "score", "s, b, h, i, j, at", root))
        if bounded and _is_scaled_tanh(root):
            source.append(_weights(made(False), root))
        rough = partial(made, half)
        source.append(_returning(rough(), "again", "s, b, h, i, j, at", root))
        source += _gradients(rough, score, reads, leaf, products)
    functions, digest = _module("\n\n".join(source)) if source else ({}, "plain")
    hides = spec.score is not None and _hides(spec.score)
    return Emitted(functions, tuple(numbers), slots, reads, hides, binary, bounded, digest)


class _Products:
    """Expressions of s as expressions of what q and k multiply to, the factors of each product made one number: a tile would
    multiply by them in turn, and round each time.

    Args:
        numbers: values of the parameters; those of new factors are appended, so that the source depends on no value but 1.
    """

    def __init__(self, numbers: list[float], softmax_scale: float):
        self.numbers, self.made = numbers, {}
        self.powers: dict[int, dict[int, int]] = {}  # of a new factor: how often, 1 or -1 times, others are in it
        self.s = expr.symbol("s") * self._new(float(softmax_scale))
        self.log2e = {self._new(LOG2E).args[0]: 1}

    def _new(self, value: float) -> Expr:
        self.numbers.append(value)
        return Expr("param", (len(self.numbers) - 1, "float"))

    def of(self, root: Expr) -> Expr:
        """``root`` with s replaced by the scaled product; a node that two roots share is one again."""
        for e in expr.nodes(root):
            if id(e) in self.made:
                continue
            new = e
            if e.op == "symbol":
                new = self.s if e.args == ("s",) else e
            elif "s" in expr.depends_on(e):
                head = e.args[:1] if e.op == "lookup" else ()
                new = self._folded(Expr(e.op, (*head, *[self.made[id(a)][1] for a in expr.children(e)])))
            self.made[id(e)] = e, new  # the node too, so that nothing else gets its id
        return self.made[id(root)][1]

    def binary(self, root: Expr) -> Expr | None:
        """``root log2 e`` where that costs nothing, as root has a factor already."""
        return self._times(root, self.log2e) if self._split(root) else None

    def _folded(self, e: Expr) -> Expr:
        found = self._split(e)
        if found is None or (e.op == "mul" and self._split(found[0]) is None):
            return e
        return self._times(*found)

    def _times(self, x: Expr, powers: dict[int, int]) -> Expr:
        """x alone where they cancel, as those of a softcap's slope do, whatever they are."""
        inner = self._split(x)
        if inner is not None:
            x, powers = inner[0], _added(inner[1], powers)
        value = math.prod(self._power(n, k) for n, k in powers.items())
        if abs(value - 1) < 2**-25:
            return x
        factor = self._new(value)
        self.powers[factor.args[0]] = powers
        return x * factor

    def _power(self, n: int, k: int) -> float:
        x = float(self.numbers[n])
        return x**k if x or k > 0 else math.copysign(math.inf, x)

    def _split(self, e: Expr) -> tuple[Expr, dict[int, int]] | None:
        """``(x, powers)`` where e is an x that depends on s, times or by a number."""
        if e.op not in ("mul", "div") or "s" not in expr.depends_on(e):
            return None
        x, c = e.args if e.op == "div" or "s" in expr.depends_on(e.args[0]) else e.args[::-1]
        inverse = e.op == "div"
        if c.op == "div" and expr.is_number(c.args[0], 1):
            c, inverse = c.args[1], not inverse
        if c.op != "param":
            return None
        powers = self.powers.get(c.args[0], {c.args[0]: 1})
        return x, {n: -k for n, k in powers.items()} if inverse else powers


def _added(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    """Powers of a product, those of 0 left out."""
    return {n: k for n in (*a, *b) if (k := a.get(n, 0) + b.get(n, 0))}


def _function(name: str, arguments: str, lines: list[str]) -> str:
    return "\n".join(["@triton.jit", f"def {name}({arguments}):", *[f"    {line}" for line in lines]])


def _returning(writer: _Writer, name: str, arguments: str, e: Expr) -> str:
    result = writer.value(e)
    return _function(name, arguments, [*writer.lines, f"return {result}"])


def _weights(w: _Writer, root: Expr) -> str:
    """``weights``: 2 to the power of a score of which there is a shorter way there."""
    x, c = root.args[0].args[0], root.args[1]
    w.value(x)
    result = f"maths.power_of_tanh({w.floating(x)}, {w.value(c)})"
    return _function("weights", "s, b, h, i, j, at", [*w.lines, f"return {result}"])


def _gradients(writer, score: Expr, reads: tuple[Read, ...], leaf: dict[int, int], products: _Products) -> list[str]:
    """``slope`` (d score / d s); ``rows``: what a tile adds to the sums by rows; ``leaves``, ``columns``, ``tile_N``: what it
    gives to the other leaves."""
    arguments = "s, b, h, i, j, at"
    slope = products.of(_derivative(score, expr.symbol("s")))
    source = [] if expr.is_number(slope, 1) else [_returning(writer(), "slope", arguments, slope)]
    wanted = {r.slot for r in reads}
    lookups = [e for e in expr.lookups(score) if e.args[0][1] in wanted]
    slopes = [products.of(_derivative(score, e)) for e in lookups]
    rows, columns, others, sums = writer(), writer(), writer(), []
    for n, (read, e, d) in enumerate(zip(reads, lookups, slopes, strict=True)):
        if read.how == TILES:
            if not expr.is_number(d, 1):
                source.append(_returning(writer(), f"tile_{n}", arguments, d))
            w = writer()
            source.append(_function(f"place_{n}", "b, h, i, j, at", [*w.lines, *_place(w, e)]))
            continue
        w = {ROWS: rows, COLUMNS: columns}.get(read.how, others)
        if not expr.is_number(d, 1):
            w.value(d)
        value = "dz" if expr.is_number(d, 1) else f"dz * {w.floating(d)}"
        value = value if _finite(d) else f"tl.where(hit, {value}, 0.0)"
        if read.how == ROWS:
            sums.append(f"tl.sum({value}, 1)")
        elif read.how == COLUMNS:
            w.lines.append(f"tl.atomic_add(at.grads[{n}] + line, tl.sum({value}, 1), mask=valid, sem='relaxed')")
        else:
            offset = w.offset(e, "grad_extents")
            write = f"tl.store(at.grads[{n}] + ({offset}), {value}, mask=inside)"
            scatter = f"tl.atomic_add(at.grads[{n}] + ({offset}), {value}, mask=hit, sem='relaxed')"
            w.lines.append(write if read.how == STORE else scatter)
    if sums:
        source.append(_function("rows", f"dz, hit, {arguments}", [*rows.lines, f"return ({', '.join(sums)},)"]))
    if others.lines:
        source.append(_function("leaves", f"dz, hit, inside, {arguments}", [*others.lines, "return"]))
    if columns.lines:
        source.append(_function("columns", f"dz, hit, line, valid, {arguments}", [*columns.lines, "return"]))
    return source


def _finite(slope: Expr) -> bool:
    """Whether it is finite everywhere, so that dZ, which is 0 where P is, need not be selected again."""
    whole = ("symbol", "number", "param", "add", "sub", "mul", "neg", "abs", "float", "int")
    return all(e.op in whole for e in expr.nodes(slope)) and "s" not in expr.depends_on(slope)


_BOUNDED = ("symbol", "number", "param", "add", "sub", "mul", "neg", "abs", "float", "int", "tanh", "sigmoid", "lookup")


def _hides(score: Expr) -> bool:
    """Whether it may be -inf of a finite s, or its slope not finite: not if its operations are bounded and it reads no tensor
    at i or j, which may hold -inf."""
    for e in expr.nodes(score, _derivative(score, expr.symbol("s"))):
        by_number = e.op == "div" and e.args[1].op in ("number", "param")
        by_head = e.op != "lookup" or not {"i", "j"} & expr.depends_on(*e.args[1:])
        if not by_head or (e.op not in _BOUNDED and not by_number):
            return True
    return False


def _bound(e: Expr) -> float:
    """Of the size of an expression, whatever s and the tensors are; infinite where it cannot tell."""
    if e.op == "number":
        return abs(float(e.args[0]))
    if e.op in ("tanh", "sigmoid", "erf", "sin", "cos"):
        return 1.0
    if e.op in ("neg", "abs"):
        return _bound(e.args[0])
    if e.op in ("add", "sub"):
        return sum(map(_bound, e.args))
    return math.prod(map(_bound, e.args)) if e.op == "mul" else math.inf


def _derivative(root: Expr, wrt: Expr) -> Expr:
    slope = expr.derivative(root, wrt)
    return expr.number(0.0) if slope is None else slope


def _place(w: _Writer, e: Expr) -> list[str]:
    offset = w.offset(e, "grad_extents")
    return [*w.lines, f"return {offset}"]


_HEADER = "import triton\nimport triton.language as tl\n\nfrom tilewise.backends.triton.kernels import maths\n\n\n"


@lru_cache(maxsize=1024)
def _module(source: str) -> tuple[dict[str, object], str]:
    """Triton reads a function's source through ``linecache``, so the module needs no file."""
    from triton.runtime.jit import KernelInterface

    source = f"{_HEADER}{source}\n"
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    filename = f"<tilewise {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    module = types.ModuleType(f"tilewise_emitted_{digest}")
    module.__file__ = filename
    exec(compile(source, filename, "exec"), module.__dict__)
    functions = {name: f for name, f in vars(module).items() if isinstance(f, KernelInterface)}
    return functions, digest
