"""Decisions that are made once for a structure, and computed with the sizes of each call.

A decision about a call (which backend, which kernel, how many CTAs) compares its sizes and computes with them. :class:`ByStructure`
runs it once with symbols in place of the sizes and records what it did: every comparison becomes a guard, every number that it returns
an expression. Python code is written from that record. A later call of the same structure evaluates the guards with its own sizes; where
all hold, the decision would have taken the same way, and what it returns is computed. Where one fails, it is recorded anew.

Nothing has to be known of a decision: it is plain Python. What cannot be recorded (a size that indexes or becomes text, ``int(size)``) is
a guard that the size is that very number. A size cannot be hashed, so that no cache keeps one, and one that outlives its record raises an
error.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

Number = int | float

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "truediv": operator.truediv,
    "mod": operator.mod, "rshift": operator.rshift, "lshift": operator.lshift, "and_": operator.and_, "or_": operator.or_,
    "neg": operator.neg, "abs": abs, "ceil": math.ceil, "floor": math.floor, "trunc": math.trunc, "round": round,
    "bit_length": int.bit_length, "min": min, "max": max, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%", "rshift": ">>", "lshift": "<<", "and_": "&",
    "or_": "|", "neg": "-", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
}  # fmt: skip
_ORDERS = {"min": "<", "max": ">"}
# By operation on whole numbers: the right operand, and the left one, with which the other is the result.
_NEUTRAL = {"mul": (1, 1), "add": (0, 0), "sub": (0, None), "floordiv": (1, None)}


class Size:
    """A number that follows from a call's sizes. It knows its value in the recorded call."""

    __slots__ = ("_at", "_record", "_value")

    def __init__(self, record: Record, at: int, value: Number):
        self._record, self._at, self._value = record, at, value

    def _known(self) -> Any:
        """Return the number itself: from here on the record holds for it alone."""
        self._record.guard("eq", self, self._value)
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NUMBERS) and self._record.guard("eq", self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Number | Size) -> bool:
        return self._record.guard("lt", self, other)

    def __le__(self, other: Number | Size) -> bool:
        return self._record.guard("le", self, other)

    def __gt__(self, other: Number | Size) -> bool:
        return self._record.guard("lt", other, self)

    def __ge__(self, other: Number | Size) -> bool:
        return self._record.guard("le", other, self)

    def __bool__(self) -> bool:
        return self._record.guard("ne", self, 0)

    __hash__ = None  # type: ignore[assignment]  # a cache would keep it beyond the decision: it is asked for int(size)

    def __index__(self) -> int:
        return operator.index(self._known())

    def __int__(self) -> int:
        return int(self._known())

    def __float__(self) -> float:
        return float(self._known())

    def __repr__(self) -> str:
        return repr(self._known())

    def __format__(self, how: str) -> str:
        return format(self._known(), how)

    def __pow__(self, power: int) -> Any:
        return self._known() ** power

    def __rpow__(self, base: Number) -> Any:
        return base ** self._known()

    def __neg__(self) -> Any:
        return self._record.computed("neg", self)

    def __abs__(self) -> Any:
        return self._record.computed("abs", self)

    def __ceil__(self) -> Any:
        return self._record.computed("ceil", self)

    def __floor__(self) -> Any:
        return self._record.computed("floor", self)

    def __trunc__(self) -> Any:
        return self._record.computed("trunc", self)

    def __round__(self, digits: int | None = None) -> Any:
        return self._record.computed("round", self) if digits is None else round(self._known(), digits)

    def bit_length(self) -> Any:
        return self._record.computed("bit_length", self)


_NUMBERS = (int, float, Size)


def _arithmetic(name: str) -> None:
    def left(self: Size, other: Number | Size) -> Any:
        return self._record.computed(name, self, other) if isinstance(other, _NUMBERS) else NotImplemented

    def right(self: Size, other: Number | Size) -> Any:
        return self._record.computed(name, other, self) if isinstance(other, _NUMBERS) else NotImplemented

    plain = name.rstrip("_")
    setattr(Size, f"__{plain}__", left)
    setattr(Size, f"__r{plain}__", right)


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "rshift", "lshift", "and_", "or_"):
    _arithmetic(_name)


def smaller(a: Number | Size, b: Number | Size) -> Any:
    """Return the smaller of two numbers; ``min`` would record which one it is."""
    return _either("min", a, b)


def larger(a: Number | Size, b: Number | Size) -> Any:
    """Return the larger of two numbers, as :func:`smaller`."""
    return _either("max", a, b)


def best(options: Iterable[Any], cost: Callable[[Any], Number | Size]) -> Any:
    """Return the first of the cheapest options, as ``min`` does, but without recording the order of the others."""
    options = list(options)
    costs = [cost(x) for x in options]
    values = [x._value if isinstance(x, Size) else x for x in costs]
    n = values.index(min(values))
    for k, other in enumerate(costs):
        if k != n:  # these hold, and are recorded
            assert costs[n] < other if k < n else costs[n] <= other
    return options[n]


def _either(name: str, a: Number | Size, b: Number | Size) -> Any:
    size = a if isinstance(a, Size) else b
    return size._record.computed(name, a, b) if isinstance(size, Size) else _FUNCTIONS[name](a, b)


class Record:
    """The steps of a decision, in order: numbers that were computed, and comparisons with their outcomes."""

    def __init__(self, sizes: Sequence[int]):
        self.closed = False
        self.count = len(sizes)
        self.symbols = [Size(self, n, size) for n, size in enumerate(sizes)]
        self._steps: list[tuple[str, tuple[Any, ...]]] = []  # of the values behind the sizes
        self._known: dict[tuple, Size] = {}
        self._guards: dict[tuple, tuple[int, bool]] = {}  # by comparison: the steps before it, and its outcome

    def _check(self) -> None:
        if self.closed:
            raise RuntimeError(
                "a size of a decision that is over was used: what a decision returns must be made of numbers alone"
            )

    def computed(self, name: str, *operands: Number | Size) -> Any:
        """Return the value of an operation."""
        self._check()
        for x, other, neutral in zip(operands, operands[::-1], _NEUTRAL.get(name, ()), strict=False):
            if type(other) is int and other == neutral and isinstance(x, Size) and type(x._value) is int:
                return x
        key = name, *[_place(x) for x in operands]
        found = self._known.get(key)
        if found is None:
            value = _FUNCTIONS[name](*[x._value if isinstance(x, Size) else x for x in operands])
            found = self._known[key] = Size(self, self.count + len(self._steps), value)
            self._steps.append((name, key[1:]))
        return found

    def guard(self, name: str, *operands: Number | Size) -> bool:
        """Return the outcome of a comparison in the call that is recorded."""
        self._check()
        key = name, *[_place(x) for x in operands]
        outcome = _FUNCTIONS[name](*[x._value if isinstance(x, Size) else x for x in operands])
        self._guards.setdefault(key, (len(self._steps), outcome))
        return outcome

    def function(self, returned: Any) -> Callable[..., Any]:
        """Return the recorded decision as a function of sizes: what it returns, or :data:`MISSED` where a guard fails."""
        self.closed = True
        constants: dict[str, Any] = {
            "MISSED": MISSED,
            **{f"_{name}": f for name, f in _FUNCTIONS.items() if name not in _SIGNS},
        }
        names = (f"c{n}" for n in count())
        last = _written(returned, constants, names)
        lines = [*self._lines(self._used(returned), constants, names), f" return {last}"]
        exec(f"def decided({', '.join(f'v{n}' for n in range(self.count))}):\n" + "\n".join(lines), constants)
        return constants["decided"]

    def _used(self, returned: Any) -> set[int]:
        """Return the values that guards and results need."""
        used = {size._at for size in _sizes_in(returned)}
        used |= {x.at for _, *operands in self._guards for x in operands if isinstance(x, _Place)}
        for n in reversed(range(len(self._steps))):
            if self.count + n in used:
                used |= {x.at for x in self._steps[n][1] if isinstance(x, _Place)}
        return used

    def _lines(self, used: set[int], constants: dict[str, Any], names: Iterator[str]) -> list[str]:
        """Return the steps and guards as code, in the order in which they were recorded: a guard may protect what comes after it."""

        def text(x: Any) -> str:
            return f"v{x.at}" if isinstance(x, _Place) else _constant(x, constants, names)

        def expression(name: str, operands: Sequence[Any]) -> str:
            written = [text(x) for x in operands]
            sign = _SIGNS.get(name)
            if name in _ORDERS:  # in half the time of a call
                a, b = written
                return f"{b} if {b} {_ORDERS[name]} {a} else {a}"
            return (
                f"_{name}({', '.join(written)})"
                if sign is None
                else sign.join(written)
                if len(written) > 1
                else sign + written[0]
            )

        by_step: dict[int, list[str]] = {}
        for (name, *operands), (step, outcome) in self._guards.items():
            test = expression(name, operands)
            by_step.setdefault(step, []).append(f" if {f'not ({test})' if outcome else test}: return MISSED")
        lines = []
        for n, (name, operands) in enumerate(self._steps):
            lines += by_step.get(n, [])
            if self.count + n in used:
                lines.append(f" v{self.count + n} = {expression(name, operands)}")
        return lines + by_step.get(len(self._steps), [])


class _Place:
    """The place of a value among those of a record."""

    __slots__ = ("at",)

    def __init__(self, at: int):
        self.at = at

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and other.at == self.at

    def __hash__(self) -> int:
        return hash(("place", self.at))


class _Missed:
    """The result of a recorded decision for sizes that would have taken another way."""


MISSED = _Missed()


def _place(x: Any) -> Any:
    return _Place(x._at) if isinstance(x, Size) else (type(x), x)  # 1, 1.0 and True are different operands


def _constant(x: Any, constants: dict[str, Any], names: Iterator[str]) -> str:
    """Return the text of an operand of :func:`_place`, or of a thing without sizes."""
    kind, value = x
    if kind is int or kind is bool:
        return f"({value!r})"
    name = next(names)
    constants[name] = value
    return name


def _parts(x: Any) -> list[Any] | None:
    """Return the parts of a thing that may be sizes; None: it is one thing."""
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, (tuple, list)):
        return list(x)
    if isinstance(x, slice):
        return [x.start, x.stop, x.step]
    if is_dataclass(x) and not isinstance(x, type):
        return [getattr(x, f.name) for f in fields(x) if f.init]
    return None


def _sizes_in(x: Any) -> list[Size]:
    if isinstance(x, Size):
        return [x]
    return [size for part in _parts(x) or () for size in _sizes_in(part)]


def _written(x: Any, constants: dict[str, Any], names: Iterator[str]) -> str:
    """Return the text that makes a thing again, with the sizes of another call."""
    if isinstance(x, Size):
        return f"v{x._at}"
    if not _sizes_in(x):
        return _constant((type(x), x) if type(x) in (int, bool) else (object, x), constants, names)
    if isinstance(x, dict):
        keys = [_constant((object, key), constants, names) for key in x]
        return (
            "{"
            + ", ".join(f"{k}: {_written(v, constants, names)}" for k, v in zip(keys, x.values(), strict=True))
            + "}"
        )
    written = [_written(part, constants, names) for part in _parts(x) or ()]
    if type(x) is list:
        return f"[{', '.join(written)}]"
    if type(x) is tuple:
        return f"({', '.join(written)},)"
    kind = _constant((object, type(x)), constants, names)
    if is_dataclass(x):
        given = [f.name for f in fields(x) if f.init]
        written = [f"{name}={text}" for name, text in zip(given, written, strict=True)]
    return f"{kind}({', '.join(written)})"  # a slice, a named tuple, or a dataclass


class ByStructure:
    """Memory of a decision by structure: recorded at the second call of a structure with other sizes than the first one's
    (docs/decisions.md#decisions-by-structure).

    Attributes:
        unrecorded: structures whose decision a symbol could not take; it is made anew for each call.
    """

    WAYS = 64  # recorded ways of one structure at most: a decision that has more is made anew, which takes less than recording
    STRUCTURES = 4096

    def __init__(self) -> None:
        self._ways: dict[Hashable, list[Callable[..., Any]]] = {}
        self.unrecorded: set[Hashable] = set()

    def clear(self) -> None:
        self._ways.clear()
        self.unrecorded.clear()

    def known(self, structure: Hashable, sizes: Sequence[int]) -> Any:
        """Return the decision for sizes if a way was recorded that they take, else :data:`MISSED`."""
        ways = self._ways.get(structure, ())
        for n, way in enumerate(ways):
            found = way(*sizes)
            if found is not MISSED:
                if n:
                    self._ways[structure] = [way, *ways[:n], *ways[n + 1 :]]
                return found
        return MISSED

    def of(self, structure: Hashable, sizes: Sequence[int], decide: Callable[[Sequence[Any]], Any]) -> Any:
        """Return the decision for sizes. ``decide`` is called with them, or with symbols in their place; its result is made of numbers,
        tuples, lists, dictionaries, dataclasses, and things that know no size."""
        ways = self._ways.get(structure)
        if ways is None:
            if len(self._ways) >= self.STRUCTURES:
                self.clear()
            self._ways[structure] = []
            return decide(sizes)
        if structure in self.unrecorded:
            return decide(sizes)
        found = self.known(structure, sizes)
        if found is not MISSED:
            return found
        if len(ways) >= self.WAYS:
            return decide(sizes)
        record = Record(sizes)
        try:
            way = record.function(decide(record.symbols))
        except Exception:  # a wrong call, which the numbers themselves tell of; or a function that takes no symbol
            decided = decide(sizes)
            self.unrecorded.add(structure)
            return decided
        self._ways[structure] = [way, *ways]
        return way(*sizes)
