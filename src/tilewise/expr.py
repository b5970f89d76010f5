"""Scalar expressions over the indices of attention: the one language of masks, scores and their derivatives.

An expression is a tree over the symbols ``s`` (the score), ``b h i j`` (batch, query head, query, key; within the
sequence), ``off`` (``seqlen_k - seqlen_q``), ``seqlen_q`` and ``seqlen_k``, over numbers, and over *leaves*: tensors
read at an index. It can

- be traced from a Python function (:func:`trace`),
- print itself as text and be read back (:func:`to_text`, :func:`parse`), so that an operator can carry it as a string,
- be evaluated on tensors of indices (:func:`evaluate`),
- be differentiated with respect to the score or to one leaf (:func:`derivative`), and
- give up its numbers (:func:`abstract`), so that one kernel serves every value of them.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SYMBOLS = {
    "s": "float",
    "b": "int",
    "h": "int",
    "i": "int",
    "j": "int",
    "off": "int",
    "seqlen_q": "int",
    "seqlen_k": "int",
}


class Expr:
    """One node: an operation of :data:`OPERATIONS` on ``args``, or one of four terminals.

    Terminals: ``number (value,)``, ``symbol (name,)``, ``param (slot, kind)`` and ``lookup (leaf, *indices)``. A leaf
    is a tensor while a function is being traced and ``(kind, number)`` once the expression was printed and parsed.
    """

    __slots__ = ("args", "op")

    def __init__(self, op: str, args: tuple):
        self.op = op
        self.args = args

    def __repr__(self) -> str:
        return to_text(self)[0]

    # Python calls these on `if`, `int()`, `for`: what a traced scalar cannot answer.
    def __bool__(self):
        raise untraceable("`if`, `and`, `or`, `not` on a traced value", "use torch.where, &, | and ~")

    def __int__(self):
        raise untraceable("`int()` of a traced value", "use .int() or //")

    def __float__(self):
        raise untraceable("`float()` of a traced value", "use .float()")

    def __index__(self):
        raise untraceable("a traced value as a Python index", "index a tensor with it: tensor[h, i, j]")

    def __iter__(self):
        raise untraceable("iteration over a traced value", "each of s, b, h, i, j is one scalar")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":  # the method is value.where(condition, other)
            return lambda condition, other: _call("where", (condition, self, other), {})
        if ALIASES.get(name, name) not in {*OPERATIONS, *_COMPOSED}:
            raise untraceable(f"`{name}`", _ALLOWED)
        return lambda *args, **kwargs: _call(name, (self, *args), kwargs)

    @property
    def dtype(self) -> torch.dtype:
        """What ``s.dtype`` asks for while tracing; the call computes floating values in its own precision."""
        return {"float": torch.float32, "int": torch.int64, "bool": torch.bool}[kind(self)]

    @property
    def device(self) -> None:
        """Not known while tracing: ``None``, which torch's factory functions take for their default."""
        return None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.where:
            args = (args[1], args[0], *args[2:])
        return _call(func.__name__, args, kwargs or {})

    def __hash__(self):
        return id(self)

    # fmt: off
    def __add__(self, x): return apply("add", self, x)
    def __radd__(self, x): return apply("add", x, self)
    def __sub__(self, x): return apply("sub", self, x)
    def __rsub__(self, x): return apply("sub", x, self)
    def __mul__(self, x): return apply("mul", self, x)
    def __rmul__(self, x): return apply("mul", x, self)
    def __truediv__(self, x): return apply("div", self, x)
    def __rtruediv__(self, x): return apply("div", x, self)
    def __floordiv__(self, x): return apply("floordiv", self, x)
    def __rfloordiv__(self, x): return apply("floordiv", x, self)
    def __mod__(self, x): return apply("mod", self, x)
    def __rmod__(self, x): return apply("mod", x, self)
    def __pow__(self, x): return apply("pow", self, x)
    def __rpow__(self, x): return apply("pow", x, self)
    def __and__(self, x): return apply("and", self, x)
    def __rand__(self, x): return apply("and", x, self)
    def __or__(self, x): return apply("or", self, x)
    def __ror__(self, x): return apply("or", x, self)
    def __xor__(self, x): return apply("xor", self, x)
    def __rxor__(self, x): return apply("xor", x, self)
    def __lt__(self, x): return apply("lt", self, x)
    def __le__(self, x): return apply("le", self, x)
    def __gt__(self, x): return apply("gt", self, x)
    def __ge__(self, x): return apply("ge", self, x)
    def __eq__(self, x): return apply("eq", self, x)
    def __ne__(self, x): return apply("ne", self, x)
    def __neg__(self): return apply("neg", self)
    def __abs__(self): return apply("abs", self)
    def __invert__(self): return apply("not", self)
    def __pos__(self): return self
    def __round__(self): return apply("round", self)
    def __floor__(self): return apply("floor", self)
    def __ceil__(self): return apply("ceil", self)
    def __trunc__(self): return apply("trunc", self)
    def __lshift__(self, x): return _shift("mul", self, x)
    def __rlshift__(self, x): return _shift("mul", x, self)
    def __rshift__(self, x): return _shift("floordiv", self, x)
    def __rrshift__(self, x): return _shift("floordiv", x, self)
    # fmt: on


def untraceable(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"a traced mask or score function used {what}; {instead}")


def number(value: bool | int | float) -> Expr:
    return Expr("number", (value,))


def symbol(name: str) -> Expr:
    return Expr("symbol", (name,))


ZERO, ONE = number(0), number(1)


def is_number(e: Expr, value: float) -> bool:
    return e.op == "number" and not isinstance(e.args[0], bool) and e.args[0] == value


def as_expr(x: Any) -> Expr:
    """A Python number, a 0-dim tensor or an expression, as an expression."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, torch.Tensor):
        if x.ndim:
            raise NotImplementedError(
                f"a traced mask or score function used a tensor of shape {tuple(x.shape)} as a value; "
                "read one element of it: tensor[h, i, j], or tw.lookup(tensor, h, i, j)"
            )
        return lookup(x)
    if isinstance(x, _PartialIndex):
        x.refuse()
    if isinstance(x, bool):
        return number(x)
    if isinstance(x, (int, float)):  # int() and float(): of a symbol of torch.compile they make a number
        return number(int(x) if isinstance(x, int) else float(x))
    raise NotImplementedError(f"a traced mask or score function used a {type(x).__name__} as a value")


def lookup(tensor: torch.Tensor, *index: Any) -> Expr:
    """``tensor[index]`` as an expression; an index out of range is clamped. What traced functions write as
    ``tensor[h, i, j]``; inside ``torch.compile`` this call is needed.

    Args:
        tensor: any floating, integer or bool tensor. Floating leaves of a score get gradients.
        index: one integer expression (``b, h, i, j`` or arithmetic on them) or int per dimension of ``tensor``.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"lookup reads a tensor, got {type(tensor).__name__}: torch.tensor(...) makes one")
    if len(index) != tensor.ndim:
        raise ValueError(
            f"lookup in a tensor of shape {tuple(tensor.shape)} needs {tensor.ndim} indices, got {len(index)}"
        )
    return Expr("lookup", (tensor, *[_index_expr(x, size) for x, size in zip(index, tensor.shape, strict=True)]))


def _index_expr(x: Any, size: int) -> Expr:
    """An index as an expression; a literal one counts from the end where it is negative, as in torch."""
    e = as_expr(x)
    if kind(e) != "int":
        raise untraceable(f"a {kind(e)} as an index ({e})", "indices are integers: use // or .int()")
    if e.op != "number":
        return e
    n = e.args[0]
    if not -size <= n < size:
        raise ValueError(f"index {n} is out of range for a dimension of size {size}")
    return number(n + size) if n < 0 else e


def tensor_kind(tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    return "float" if tensor.dtype.is_floating_point else "int"


def kind(e: Expr) -> str:
    """``"float"``, ``"int"`` or ``"bool"``."""
    if e.op == "number":
        return type(e.args[0]).__name__
    if e.op == "symbol":
        return SYMBOLS[e.args[0]]
    if e.op == "param":
        return e.args[1]
    if e.op == "lookup":
        leaf = e.args[0]
        return leaf[0] if isinstance(leaf, tuple) else tensor_kind(leaf)
    result = OPERATIONS[e.op].kind
    if result != "same":
        return result
    kinds = [kind(a) for a in (e.args[1:] if e.op == "where" else e.args)]
    return "float" if "float" in kinds else "int" if "int" in kinds else "bool"


# -- The operations: one row each ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """What an operation is in torch, how it prints, and its partial derivatives as functions of (args, result)."""

    torch: Callable[..., torch.Tensor]
    kind: str = "same"  # of the result; "same": promoted from the arguments
    infix: str | None = None
    partials: tuple[Callable[..., Expr] | None, ...] = ()  # one per argument; None, or missing: zero everywhere
    float_args: bool = False  # integer arguments are converted first
    arity: int = 0  # 0: two where there is an infix, else one

    @property
    def arguments(self) -> int:
        return self.arity or (2 if self.infix else 1)


def _select(condition: Expr, value: Expr | float) -> Expr:
    return apply("where", condition, value, ZERO)


def _tie(chosen: str) -> tuple:
    """Partials of maximum and minimum: at a tie each argument gets half, as in torch."""

    def partial(mine: int):
        def rule(x, y, r):
            a, b = (x, y) if mine == 0 else (y, x)
            return apply("where", apply("eq", a, b), number(0.5), apply("where", apply(chosen, a, b), ONE, ZERO))

        return rule

    return partial(0), partial(1)


def _pow_base(x, c, r):
    return apply("where", apply("eq", c, ZERO), ZERO, c * apply("pow", x, c - ONE))


def _pow_exponent(x, c, r):
    return apply("where", (apply("eq", x, ZERO)) & (apply("ge", c, ZERO)), ZERO, r * apply("log", x))


_one = lambda *_: ONE  # noqa: E731
_minus_one = lambda *_: number(-1)  # noqa: E731
_LN2 = math.log(2.0)

# fmt: off
OPERATIONS: dict[str, Operation] = {
    "add": Operation(torch.add, infix="+", partials=(_one, _one)),
    "sub": Operation(torch.sub, infix="-", partials=(_one, _minus_one)),
    "mul": Operation(torch.mul, infix="*", partials=(lambda x, y, r: y, lambda x, y, r: x)),
    "div": Operation(torch.true_divide, "float", "/", (lambda x, y, r: ONE / y, lambda x, y, r: -(r / y)), float_args=True),
    "floordiv": Operation(torch.floor_divide, infix="//"),
    "mod": Operation(torch.remainder, infix="%", partials=(_one, lambda x, y, r: -apply("floor", x / y))),
    "pow": Operation(torch.pow, infix="**", partials=(_pow_base, _pow_exponent)),
    "and": Operation(torch.bitwise_and, infix="&"),
    "or": Operation(torch.bitwise_or, infix="|"),
    "xor": Operation(torch.bitwise_xor, infix="^"),
    "lt": Operation(torch.lt, "bool", "<"),
    "le": Operation(torch.le, "bool", "<="),
    "gt": Operation(torch.gt, "bool", ">"),
    "ge": Operation(torch.ge, "bool", ">="),
    "eq": Operation(torch.eq, "bool", "=="),
    "ne": Operation(torch.ne, "bool", "!="),
    "not": Operation(torch.bitwise_not, partials=()),
    "neg": Operation(torch.neg, partials=(_minus_one,)),
    "abs": Operation(torch.abs, partials=(lambda x, r: apply("sign", x),)),
    "sign": Operation(torch.sign, partials=()),
    "floor": Operation(torch.floor, partials=()),
    "ceil": Operation(torch.ceil, partials=()),
    "round": Operation(torch.round, partials=()),
    "trunc": Operation(torch.trunc, partials=()),
    "maximum": Operation(torch.maximum, arity=2, partials=_tie("gt")),
    "minimum": Operation(torch.minimum, arity=2, partials=_tie("lt")),
    "clamp_min": Operation(torch.maximum, arity=2, partials=(lambda x, c, r: _select(x >= c, ONE), lambda x, c, r: _select(x < c, ONE))),
    "clamp_max": Operation(torch.minimum, arity=2, partials=(lambda x, c, r: _select(x <= c, ONE), lambda x, c, r: _select(x > c, ONE))),
    "where": Operation(torch.where, arity=3),
    "exp": Operation(torch.exp, "float", None, (lambda x, r: r,), float_args=True),
    "exp2": Operation(torch.exp2, "float", None, (lambda x, r: r * number(_LN2),), float_args=True),
    "expm1": Operation(torch.expm1, "float", None, (lambda x, r: r + ONE,), float_args=True),
    "log": Operation(torch.log, "float", None, (lambda x, r: ONE / x,), float_args=True),
    "log2": Operation(torch.log2, "float", None, (lambda x, r: ONE / (x * number(_LN2)),), float_args=True),
    "log1p": Operation(torch.log1p, "float", None, (lambda x, r: ONE / (x + ONE),), float_args=True),
    "sqrt": Operation(torch.sqrt, "float", None, (lambda x, r: number(0.5) / r,), float_args=True),
    "rsqrt": Operation(torch.rsqrt, "float", None, (lambda x, r: number(-0.5) * r / x,), float_args=True),
    "tanh": Operation(torch.tanh, "float", None, (lambda x, r: ONE - r * r,), float_args=True),
    "sigmoid": Operation(torch.sigmoid, "float", None, (lambda x, r: r * (ONE - r),), float_args=True),
    "erf": Operation(torch.erf, "float", None, (lambda x, r: number(2 / math.sqrt(math.pi)) * apply("exp", -(x * x)),), float_args=True),
    "sin": Operation(torch.sin, "float", None, (lambda x, r: apply("cos", x),), float_args=True),
    "cos": Operation(torch.cos, "float", None, (lambda x, r: -apply("sin", x),), float_args=True),
    "relu": Operation(torch.relu, "same", None, (lambda x, r: _select(x > ZERO, ONE),)),
    "float": Operation(lambda x: x, "float", None, (_one,), float_args=True),
    "int": Operation(lambda x: x.to(torch.int64), "int"),
    "bool": Operation(lambda x: x.to(torch.bool), "bool"),
}
# What torch and Python call them.
ALIASES = {
    "absolute": "abs", "negative": "neg", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "truediv": "div", "floor_divide": "floordiv", "remainder": "mod", "max": "maximum", "min": "minimum", "fmax": "maximum",
    "fmin": "minimum", "logical_and": "and", "logical_or": "or", "logical_not": "not", "logical_xor": "xor", "invert": "not",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_not": "not", "bitwise_xor": "xor", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "long": "int", "double": "float", "half": "float",
    "bfloat16": "float", "expit": "sigmoid", "sgn": "sign",
}
# fmt: on


def apply(op: str, *args: Any) -> Expr:
    """The node of one operation; Python numbers and 0-dim tensors among ``args`` are wrapped."""
    return Expr(op, tuple(as_expr(x) for x in args))


_ALLOWED = "allowed are elementwise arithmetic, comparisons, & | ~, torch.where and " + ", ".join(
    sorted(name for name, operation in OPERATIONS.items() if operation.infix is None and name != "not")
)


def _call(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """A torch function or tensor method, by its name, called on traced values."""
    if name.endswith("_") and not name.startswith("__"):
        raise untraceable(f"`{name}`, which works in place", "use the form that returns its result")
    name = name.strip("_")
    if kwargs.get("inplace") is False:  # torch.nn.functional passes it along
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
    if name in _COMPOSED:
        return _COMPOSED[name](*args, **kwargs)
    if name.startswith("r") and name[1:] in _REFLECTED:
        name, args = name[1:], args[::-1]
    reduces = name in ("max", "min") and not all(isinstance(x, (Expr, torch.Tensor)) for x in args)
    logical = name.startswith("logical_")
    op = ALIASES.get(name, name)
    if op not in OPERATIONS or kwargs or reduces or len(args) != OPERATIONS[op].arguments:
        given = f" with {', '.join(kwargs)}=" if kwargs else f" of {len(args)} arguments" if op in OPERATIONS else ""
        raise untraceable(f"`{name}`{given}", _ALLOWED)
    if op == "where" and kind(as_expr(args[0])) != "bool":
        raise untraceable("`where` with a condition that is no truth value", "compare it: x != 0")
    return apply(op, *[_truth(x) for x in args] if logical else args)


def _truth(x: Any) -> Expr:
    x = as_expr(x)
    return x if kind(x) == "bool" else apply("bool", x)


def _clamp(x, min=None, max=None):
    if min is not None:
        x = apply("clamp_min", x, min)
    return x if max is None else apply("clamp_max", x, max)


def _to(x, dtype=None, **kwargs):
    if not isinstance(dtype, torch.dtype) or kwargs:
        raise untraceable("`.to` with something that is no dtype", "use .to(torch.float32)")
    return apply("bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int", x)


def _shift(op, x, n):
    """``x << n`` and ``x >> n`` of integers, as ``x * 2**n`` and ``x // 2**n``."""
    x, n = as_expr(x), as_expr(n)
    if "float" in (kind(x), kind(n)):
        raise untraceable("a shift of a float", "multiply by a power of two")
    return apply(op, x, number(2 ** n.args[0]) if n.op == "number" else apply("pow", 2, n))


def _constant(value):
    """Factory functions of one scalar like another: ``b.new_ones((), dtype=torch.bool)``, ``torch.zeros_like(s)``."""

    def made(x, size=(), *, dtype=None, device=None):
        if size != () and size != []:
            raise untraceable(f"a constant of shape {size}", "each of s, b, h, i, j is one scalar")
        dtype = x.dtype if dtype is None else dtype
        return number(bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value))

    return made


def _new_full(x, size, fill_value, *, dtype=None, device=None):
    return _constant(fill_value)(x, size, dtype=dtype)


def _full_like(x, fill_value, *, dtype=None, device=None):
    return _constant(fill_value)(x, dtype=dtype)


def _gelu(x, approximate="none"):
    if approximate == "none":
        return 0.5 * x * (1 + apply("erf", x * math.sqrt(0.5)))
    return 0.5 * x * (1 + apply("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _softplus(x, beta=1, threshold=20):
    scaled = x if beta == 1 else x * beta
    soft = apply("relu", scaled) + apply("log1p", apply("exp", -apply("abs", scaled)))
    return apply("where", scaled > threshold, x, soft if beta == 1 else soft / beta)


_REFLECTED = (
    "add",
    "sub",
    "mul",
    "div",
    "truediv",
    "floordiv",
    "floor_divide",
    "mod",
    "remainder",
    "pow",
    "and",
    "or",
    "xor",
)
_COMPOSED = {
    "getitem": lambda tensor, index: _index(tensor, index),
    "clamp": _clamp,
    "clip": _clamp,
    "square": lambda x: x * x,
    "reciprocal": lambda x: ONE / x,
    "to": _to,
    "type": _to,
    "type_as": lambda x, other: _to(x, other.dtype),
    "lshift": lambda x, n: _shift("mul", x, n),
    "rshift": lambda x, n: _shift("floordiv", x, n),
    "bitwise_left_shift": lambda x, n: _shift("mul", x, n),
    "bitwise_right_shift": lambda x, n: _shift("floordiv", x, n),
    "masked_fill": lambda x, hidden, value: apply("where", hidden, value, x),
    "ones_like": _constant(1),
    "new_ones": _constant(1),
    "zeros_like": _constant(0),
    "new_zeros": _constant(0),
    "full_like": _full_like,
    "new_full": _new_full,
    "gelu": _gelu,
    "silu": lambda x, inplace=False: x * apply("sigmoid", x),
    "softplus": _softplus,
    "log_sigmoid": lambda x: -_softplus(-x),
}


class _PartialIndex:
    """``tensor[b]`` while further indices follow: ``tensor[b][i, j]``."""

    def __init__(self, tensor, index):
        self.tensor, self.index = tensor, index

    def __getitem__(self, index):
        return _index(self.tensor, (*self.index, *(index if isinstance(index, tuple) else (index,))))

    def refuse(self, *_):
        raise NotImplementedError(
            f"a tensor of shape {tuple(self.tensor.shape)} was read with {len(self.index)} of {self.tensor.ndim} indices; "
            "give one per dimension. A product of two rows belongs into head_dim: append them to q and k"
        )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)).refuse()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __bool__ = __neg__ = __pos__ = __abs__ = __invert__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __eq__ = __ne__ = __and__ = __or__ = __pow__ = __floordiv__ = __mod__ = __float__ = __int__ = refuse
    __hash__ = object.__hash__


def _index(tensor: torch.Tensor, index: Any):
    index = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(x, (Expr, int)) for x in index):
        raise untraceable("a slice, `None` or a tensor as an index", "give one integer expression per dimension")
    return _PartialIndex(tensor, index) if len(index) < tensor.ndim else lookup(tensor, *index)


class _IndexMode(TorchFunctionMode):
    """While tracing: ``tensor[h, i, j]`` with traced indices becomes a lookup; all else is torch's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, Expr) for x in index):
                return _index(args[0], index)
        return func(*args, **(kwargs or {}))


def trace(fn: Callable, names: Sequence[str]) -> Expr:
    """The expression that ``fn`` computes of the symbols ``names``; ``fn`` is called once."""
    arguments = [symbol(name) for name in names]
    if not callable(fn):
        raise ValueError(f"a function of ({', '.join(names)}) is needed, got {type(fn).__name__}")
    if torch.compiler.is_dynamo_compiling():  # a function mode cannot be entered there: lookups are spelt tw.lookup
        return as_expr(fn(*arguments))
    try:
        with _IndexMode():
            result = fn(*arguments)
    except TypeError:
        _check_parameters(fn, names)
        raise
    if isinstance(result, _PartialIndex):
        result.refuse()
    if result is None:
        raise ValueError(f"a function of ({', '.join(names)}) returned None; is its `return` missing?")
    return as_expr(result)


def _check_parameters(fn: Callable, names: Sequence[str]) -> None:
    """Raises ValueError if ``fn`` does not take that many arguments: also the catalogue's own, where it was not called."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a builtin
        return
    try:
        signature.bind(*names)
    except TypeError:
        name = getattr(fn, "__name__", type(fn).__name__)
        called = (
            f"; {name} is to be called: tw.{name}(...)"
            if str(getattr(fn, "__module__", "")).startswith("tilewise.")
            else ""
        )
        raise ValueError(f"a function of ({', '.join(names)}) is needed, got {name}{signature}{called}") from None


# -- Text ----------------------------------------------------------------------------------------------------------

_INFIX = {operation.infix: name for name, operation in OPERATIONS.items() if operation.infix}


_PARAM = re.compile(r"(float|int|bool)_(\d+)")
_MAX_DEPTH = 40  # Python's parser takes 200 nested parentheses


def to_text(e: Expr, leaves: list[torch.Tensor] | None = None) -> tuple[str, tuple[torch.Tensor, ...]]:
    """``(text, leaves)``: Python syntax with leaves as ``float0[h, i]``, numbered by first appearance.

    A node that is used twice, or is deep, is named before it is used: ``(_0 := s * s, _0 + _0)``. Several expressions
    number their leaves together when they share the list ``leaves``, which then grows.
    """
    leaves = [] if leaves is None else leaves
    uses: dict[int, int] = {}
    for node in nodes(e):
        for child in children(node):
            uses[id(child)] = uses.get(id(child), 0) + 1
    texts: dict[int, tuple[str, int]] = {}  # text and depth
    named: list[str] = []
    for node in nodes(e):
        inner = [texts[id(child)] for child in children(node)]
        text, depth = _node_text(node, [t for t, _ in inner], leaves), 1 + max([d for _, d in inner], default=0)
        operation = node.op not in ("number", "symbol", "param")
        if operation and node is not e and (uses[id(node)] > 1 or depth >= _MAX_DEPTH):
            named.append(f"_{len(named)} := {_strip(text)}")
            text, depth = f"_{len(named) - 1}", 0
        texts[id(node)] = text, depth
    text = _strip(texts[id(e)][0])
    return f"({', '.join([*named, text])})" if named else text, tuple(leaves)


def _node_text(e: Expr, inner: list[str], leaves: list) -> str:
    if e.op in ("number", "symbol", "param"):
        text = f"{e.args[1]}_{e.args[0]}" if e.op == "param" else str(e.args[0])
        return f"({text})" if text.startswith("-") else text
    if e.op == "lookup":
        return f"{_leaf_name(e.args[0], leaves)}[{', '.join([_strip(x) for x in inner]) or '()'}]"
    infix = OPERATIONS[e.op].infix
    if infix:
        return f"({inner[0]} {infix} {inner[1]})"
    return f"(~{inner[0]})" if e.op == "not" else f"{e.op}({', '.join([_strip(x) for x in inner])})"


def _strip(text: str) -> str:
    """Without the outer pair of parentheses, where they are one pair."""
    if not text.startswith("(") or not text.endswith(")"):
        return text
    depth = 0
    for position, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and position < len(text) - 1:
            return text
    return text[1:-1]


def _leaf_name(leaf: Any, leaves: list) -> str:
    if isinstance(leaf, tuple):
        return f"{leaf[0]}{leaf[1]}"
    for slot in range(len(leaves)):
        if leaves[slot] is leaf:
            return f"{tensor_kind(leaf)}{slot}"
    leaves.append(leaf)
    return f"{tensor_kind(leaf)}{len(leaves) - 1}"


def parse(text: str, leaf_slot: Callable[[int], int] = lambda n: n) -> Expr:
    """The expression that :func:`to_text` printed; leaf ``n`` becomes ``(kind, leaf_slot(n))``."""
    return from_ast(ast.parse(text, mode="eval").body, leaf_slot, {})


def from_ast(node: ast.AST, leaf_slot: Callable[[int], int], names: dict[str, Expr]) -> Expr:
    read = lambda x: from_ast(x, leaf_slot, names)  # noqa: E731
    match node:
        case ast.Constant(value=value):
            return number(value)
        case ast.Name(id="inf" | "nan" as name):
            return number(float(name))
        case ast.Name(id=name):
            parameter = _PARAM.fullmatch(name)
            if parameter:
                return Expr("param", (int(parameter[2]), parameter[1]))
            return names[name] if name in names else symbol(name)
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            names[name] = read(value)
            return names[name]
        case ast.Tuple(elts=[*named, last]):
            for x in named:
                read(x)
            return read(last)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return number(-value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return number(-math.inf)
        case ast.UnaryOp(op=ast.Invert(), operand=x):
            return apply("not", read(x))
        case ast.BinOp(left=x, op=op, right=y):
            return apply(_INFIX[_AST_INFIX[type(op)]], read(x), read(y))
        case ast.Compare(left=x, ops=[op], comparators=[y]):
            return apply(_INFIX[_AST_INFIX[type(op)]], read(x), read(y))
        case ast.Call(func=ast.Name(id=name), args=args):
            return apply(name, *[read(x) for x in args])
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            leaf_kind = name.rstrip("0123456789")
            indices = index.elts if isinstance(index, ast.Tuple) else [index]
            return Expr("lookup", ((leaf_kind, leaf_slot(int(name[len(leaf_kind) :]))), *[read(x) for x in indices]))
    raise ValueError(f"not an expression: {ast.dump(node)}")


_AST_INFIX = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip


# -- Walking -------------------------------------------------------------------------------------------------------


def children(e: Expr) -> tuple[Expr, ...]:
    if e.op in ("number", "symbol", "param"):
        return ()
    return e.args[1:] if e.op == "lookup" else e.args


def nodes(*roots: Expr) -> list[Expr]:
    """Every node once, arguments before what uses them."""
    seen: dict[int, Expr] = {}
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        e, arguments_done = stack.pop()
        if arguments_done:
            seen[id(e)] = e
        elif id(e) not in seen:
            stack.append((e, True))
            stack += [(a, False) for a in reversed(children(e)) if id(a) not in seen]
    return list(seen.values())


def lookups(*roots: Expr) -> list[Expr]:
    return [e for e in nodes(*roots) if e.op == "lookup"]


def depends_on(*roots: Expr) -> frozenset[str]:
    """The names of the symbols in the expressions."""
    return frozenset(e.args[0] for e in nodes(*roots) if e.op == "symbol")


def rewrite(root: Expr, terminal: Callable[[Expr], Expr]) -> Expr:
    """The tree with every number and symbol replaced by ``terminal`` of it; shared nodes stay shared."""
    new: dict[int, Expr] = {}
    for e in nodes(root):
        if e.op in ("number", "symbol", "param"):
            new[id(e)] = terminal(e)
        else:
            head = (e.args[0],) if e.op == "lookup" else ()
            new[id(e)] = Expr(e.op, (*head, *[new[id(a)] for a in children(e)]))
    return new[id(root)]


def substitute(root: Expr, values: Mapping[str, Expr]) -> Expr:
    """Symbols replaced by expressions."""
    return rewrite(root, lambda e: values.get(e.args[0], e) if e.op == "symbol" else e)


def abstract(root: Expr, numbers: list[float]) -> Expr:
    """The tree with its numbers moved into ``numbers`` (appended) and parameters in their place.

    Trees that differ in numbers alone become the same text, so they share one kernel. Bools stay where they are.
    """

    def slot(e: Expr) -> Expr:
        if e.op != "number" or isinstance(e.args[0], bool):
            return e
        numbers.append(e.args[0])
        return Expr("param", (len(numbers) - 1, kind(e)))

    return rewrite(root, slot)


# -- Meaning -------------------------------------------------------------------------------------------------------


def evaluate(
    roots: Sequence[Expr],
    env: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    dtype: torch.dtype,
    numbers: Sequence[float] = (),
) -> list[torch.Tensor]:
    """The values of ``roots``, broadcast from the shapes of the symbols that each depends on.

    Args:
        env: a tensor for every symbol used, integer but for ``s``; shapes that broadcast against each other.
        leaves: the tensors that lookups read, by slot.
        dtype: in which floating values are computed; floating leaves are converted element by element. Indices of
            leaves are computed in fp32 always.
        numbers: the values of parameters, by slot.
    """
    device = next((t.device for t in env.values()), torch.device("cpu"))
    values: dict[int, torch.Tensor] = {}
    for e in nodes(*roots):
        if e.op in ("number", "param"):
            value = e.args[0] if e.op == "number" else numbers[e.args[0]]
            values[id(e)] = torch.tensor(value, dtype=dtype if isinstance(value, float) else None, device=device)
        elif e.op == "symbol":
            values[id(e)] = env[e.args[0]]
        elif e.op == "lookup":
            index = [values[id(a)] for a in e.args[1:]]
            if dtype != torch.float32 and any(x.op not in ("symbol", "number") for x in e.args[1:]):
                index = evaluate(e.args[1:], env, leaves, torch.float32, numbers)  # the same element in every dtype
            value = read(leaves[e.args[0][1]], index)
            values[id(e)] = value.to(dtype) if value.is_floating_point() else value
        else:
            operation = OPERATIONS[e.op]
            args = [values[id(a)] for a in e.args]
            if operation.float_args:
                args = [a if a.is_floating_point() else a.to(dtype) for a in args]
            values[id(e)] = operation.torch(*args)
    return [values[id(root)] for root in roots]


def clamp_index(leaf: torch.Tensor, index: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Indices into ``leaf``, each kept within its dimension."""
    return [x.long().clamp(0, size - 1) for x, size in zip(index, leaf.shape, strict=True)]


def read(leaf: torch.Tensor, index: Sequence[torch.Tensor]) -> torch.Tensor:
    if not leaf.numel():  # of a sequence without keys; the checks admit no other
        return leaf.new_zeros(torch.broadcast_shapes(*[x.shape for x in index]))
    return leaf[tuple(clamp_index(leaf, index))] if index else leaf


def derivative(root: Expr, wrt: Expr) -> Expr | None:
    """``d root / d wrt`` for a symbol or one lookup node; ``None`` where it is zero everywhere. Ties as in torch."""
    same = (lambda e: e.op == "symbol" and e.args == wrt.args) if wrt.op == "symbol" else (lambda e: e is wrt)
    slopes: dict[int, Expr | None] = {}
    for e in nodes(root):
        if same(e):
            slopes[id(e)] = ONE
        elif e.op in ("number", "symbol", "param", "lookup"):
            slopes[id(e)] = None
        else:
            slopes[id(e)] = _chain(e, [slopes[id(a)] for a in e.args])
    return slopes[id(root)]


def _chain(e: Expr, inner: list[Expr | None]) -> Expr | None:
    """Sum over the arguments of partial times inner slope, leaving out zeros and ones."""
    if e.op == "where":  # a select, not a product: the branch not taken may be NaN
        if inner[1] is None and inner[2] is None:
            return None
        return apply("where", e.args[0], *[ZERO if slope is None else slope for slope in inner[1:]])
    total = None
    for partial, slope in zip(OPERATIONS[e.op].partials, inner, strict=False):
        if partial is None or slope is None:
            continue
        outer = partial(*e.args, e)
        term = outer if is_number(slope, 1) else slope if is_number(outer, 1) else outer * slope
        total = term if total is None else total + term
    return total
