"""Expressions as a program for native/program.h: operations on registers, sorted by how often they run.

Operations on b and h alone run once a head, on i once a row, on j once a tile, and only the rest for every pair. Registers of the last
kind are reused after their last reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tilewise import expr
from tilewise.backends.cpu.library import DIMS
from tilewise.expr import Expr
from tilewise.spec import Spec

F32, F64, I64 = 0, 1, 4
UNIFORM, COLUMN, VARYING = 0, 1, 2
PER_HEAD, PER_ROW, PER_COLUMN, PER_PAIR = range(4)
PREDICATE, SCORE, SLOPES = range(3)
_RUN_ORDER = (SCORE, PREDICATE, SLOPES)  # of a row: what SLOPES reads of SCORE stays in its registers
_IDENTITIES = {"floor", "ceil", "round", "trunc", "int", "abs", "relu"}  # of integers or truth values


@dataclass
class Value:
    """A virtual register: its type, and the symbols on which it depends."""

    type: int
    symbols: frozenset[str]
    register: int = -1

    @property
    def level(self) -> int:
        if "s" in self.symbols or {"i", "j"} <= self.symbols:
            return PER_PAIR
        return PER_ROW if "i" in self.symbols else PER_COLUMN if "j" in self.symbols else PER_HEAD


@dataclass
class Step:
    """One operation before registers are assigned."""

    op: str
    type: int
    out: Value
    args: tuple[Value, ...] = ()
    part: int = SCORE
    number: float = 0.0
    integer: int = 0
    leaf: int = 0
    modes: tuple[int, ...] = ()


@dataclass
class Read:
    """One lookup whose leaf wants a gradient: the score's slope in it, and its place."""

    slot: int
    slope: Value
    index: tuple[Value, ...]
    modes: tuple[int, ...]


@dataclass
class Code:
    """A compiled call: the steps in order, and the values that they exchange with the kernels.

    ``raw``: the scaled products of q and k; ``moved``: their tangents; ``slope``: dz/ds or, in forward mode, z's tangent.
    """

    steps: list[Step] = field(default_factory=list)
    raw: Value | None = None
    moved: Value | None = None
    score: Value | None = None
    keep: Value | None = None
    slope: Value | None = None
    reads: list[Read] = field(default_factory=list)
    registers: int = 0
    instructions: object = None  # the steps as the library takes them, once a call has them


def compile_spec(
    spec: Spec, dtypes: tuple[torch.dtype, torch.dtype], backward: bool, moving: Mapping[int, int] | None = None
) -> Code:
    """Return the program of one pass.

    Args:
        dtypes: of the scores and of the mask, fp32 or fp64. Indices are always fp32.
        moving: of forward mode: the place of each leaf's tangent, by the leaf's slot.
    """
    c = _Compiler(*[F64 if dtype == torch.float64 else F32 for dtype in dtypes])
    code = Code(steps=c.steps)
    if spec.score is not None:
        code.raw = c.raw = Value(c.float_type, frozenset("s"))
        code.score = c.as_float(c.value(spec.score))
    if spec.region.predicate is not None:
        of_score, c.made = c.made, {}  # it shares no value with the score: it runs before that, and also alone
        c.part = PREDICATE
        code.keep = c.value(spec.region.predicate, "mask")
        c.made = of_score
    if spec.score is not None and moving is not None:
        c.part = SLOPES
        code.moved = c.moved = Value(c.float_type, frozenset("s"))
        code.slope = c.as_float(c.value(expr.tangent(spec.score, moving)))
    if spec.score is not None and backward:
        c.part = SLOPES
        slope, *leaf_slopes = spec.score_slopes
        code.slope = None if expr.is_number(slope, 1) else c.as_float(c.value(slope))
        code.reads = [c.read(e, x) for e, x in zip(spec.lookups, leaf_slopes, strict=True)]
    _give_registers(code)
    return code


class _Compiler:
    """Emit each node once per context: "value" (the scores' type), "index" (fp32) and "mask" (the mask's type)."""

    def __init__(self, float_type: int, mask_type: int):
        self.float_type, self.mask_type = float_type, mask_type
        self.part = SCORE
        self.steps: list[Step] = []
        self.raw: Value | None = None
        self.moved: Value | None = None
        self.made: dict[tuple[int, str], Value] = {}
        self.alive: list[Expr] = []  # ids stay taken

    def value(self, root: Expr, context: str = "value") -> Value:
        self.alive.append(root)
        if context == "index" and (self.float_type == F32 or "s" in expr.depends_on(root)):
            context = "value"
        for e in expr.nodes(root):
            if (id(e), context) not in self.made:
                self.made[id(e), context] = self._node(e, context)
        return self.made[id(root), context]

    def as_float(self, x: Value) -> Value:
        return self._convert(x, self.float_type)

    def read(self, e: Expr, slope: Expr) -> Read:
        indices = e.args[1:]
        values = tuple(self.value(x, "index") for x in indices)
        return Read(e.args[0][1], self.as_float(self.value(slope)), values, _modes(indices, values))

    def _emit(self, op: str, type_: int, out_type: int, args: Sequence[Value] = (), **more) -> Value:
        symbols = more.pop("symbols", frozenset()).union(*[a.symbols for a in args])
        out = Value(out_type, symbols)
        self.steps.append(Step(op, type_, out, tuple(args), self.part, **more))
        return out

    def _convert(self, x: Value, to: int) -> Value:
        if x.type == to:
            return x
        return self._emit({F32: "to_f32", F64: "to_f64", I64: "to_int"}[to], x.type, to, (x,))

    def _node(self, e: Expr, context: str) -> Value:
        floats = {"value": self.float_type, "index": F32, "mask": self.mask_type}[context]
        if e.op == "number":
            return self._number(e.args[0], floats)
        if e.op == "symbol":
            name = e.args[0]
            if name in ("s", "ds"):
                return self.raw if name == "s" else self.moved
            return self._emit(name, I64, I64, symbols=frozenset({name} & {"i", "j"}))
        if e.op == "lookup":
            inner = "mask" if (context, self.mask_type) == ("mask", F32) else "index"
            values = tuple(self.value(x, inner) for x in e.args[1:])
            type_ = floats if e.args[0][0] == "float" else I64
            return self._emit("lookup", type_, type_, values, leaf=e.args[0][1], modes=_modes(e.args[1:], values))
        if e.op == "selected":
            values = tuple(self.value(x, "index") for x in e.args[1:])
            return self._emit("selected", I64, I64, values, leaf=e.args[0][1], modes=_modes(e.args[1:-1], values[:-1]))
        return self._operation(e, [self.made[id(a), context] for a in e.args], floats)

    def _number(self, x: bool | int | float, floats: int) -> Value:
        if isinstance(x, float):
            return self._emit("constant", floats, floats, number=x)
        return self._emit("constant", I64, I64, integer=int(x))

    def _operation(self, e: Expr, args: list[Value], floats: int) -> Value:
        kinds, op = [expr.kind(a) for a in e.args], e.op
        integral = all(k != "float" for k in kinds)
        op = _CLAMPS.get(op, op)
        if op == "where":
            chosen = self._promoted(args[1:], kinds[1:], floats)
            truth = args[0] if args[0].type == I64 else self._emit("to_bool", args[0].type, I64, args[:1])
            return self._emit("where", chosen[0].type, chosen[0].type, (*chosen, truth))
        if op == "bool":
            return args[0] if kinds[0] == "bool" else self._emit("to_bool", args[0].type, I64, args)
        if op == "float":
            return self._convert(args[0], floats)
        if integral and op in _IDENTITIES and (op not in ("abs", "relu") or kinds[0] == "bool"):
            return args[0]
        if op == "int":
            return self._emit("to_int", args[0].type, I64, args)
        if expr.OPERATIONS[op].float_args:
            args = [self._convert(a, floats) for a in args]
        else:
            args = self._promoted(args, kinds, floats)
        out = I64 if expr.kind(e) != "float" else args[0].type
        return self._emit(_named(op, kinds), args[0].type, out, args)

    def _promoted(self, args: Sequence[Value], kinds: Sequence[str], floats: int) -> list[Value]:
        return [self._convert(a, floats) for a in args] if "float" in kinds else list(args)


_CLAMPS = {"clamp_min": "maximum", "clamp_max": "minimum"}
_RENAMED = {"and": "bit_and", "or": "bit_or", "xor": "bit_xor", "not": "bit_not"}


def _named(op: str, kinds: Sequence[str]) -> str:
    """Return the native name of an operation. As in torch, truth values add by or and multiply by and."""
    if all(k == "bool" for k in kinds) and op in ("add", "mul", "not"):
        return {"add": "bit_or", "mul": "bit_and", "not": "bool_not"}[op]
    return _RENAMED.get(op, op)


def _modes(indices: Sequence[Expr], values: Sequence[Value]) -> tuple[int, ...]:
    """Return how each index moves along a row."""
    moving = lambda v: "j" in v.symbols or "s" in v.symbols  # noqa: E731
    plain = lambda e: e.op == "symbol" and e.args[0] == "j"  # noqa: E731
    return tuple(
        COLUMN if plain(e) else VARYING if moving(v) else UNIFORM for e, v in zip(indices, values, strict=True)
    )


def _give_registers(code: Code) -> None:
    """Sort the steps into running order. Steps for every pair share registers, in the order of their last use."""
    code.steps.sort(key=lambda x: (_RUN_ORDER.index(x.part), x.out.level))
    kept = {id(v) for v in (code.raw, code.score, code.keep, code.slope) if v is not None}
    kept |= {id(v) for r in code.reads for v in (r.slope, *r.index)}
    last: dict[int, int] = {}
    for n, step in enumerate(code.steps):
        for a in step.args:
            last[id(a)] = n
    free: list[int] = []
    given = [v for v in (code.raw, code.moved) if v is not None]
    for code.registers, v in enumerate(given, 1):
        v.register = code.registers - 1
    for n, step in enumerate(code.steps):
        reusable = step.out.level == PER_PAIR and id(step.out) not in kept
        if step.out.level == PER_PAIR and free:
            step.out.register = free.pop()
        else:
            step.out.register = code.registers
            code.registers += 1
        if reusable and id(step.out) not in last:
            free.append(step.out.register)
        done = {id(a): a for a in step.args if last[id(a)] == n and a.level == PER_PAIR and id(a) not in kept}
        free += [a.register for a in done.values() if a not in given]


LOWERED = frozenset({*_RENAMED, *_CLAMPS, "bool", "float", "int"})
"""The operations that become others of the library. With :data:`tilewise.backends.cpu.library.Library.operations`, all it can emit."""


def too_many_dimensions(spec: Spec) -> bool:
    """Return whether some lookup has more indices than an instruction holds."""
    roots = [x for x in (spec.region.predicate, spec.score) if x is not None]
    return any(len(e.args) - 1 > DIMS for e in expr.lookups(*roots))
