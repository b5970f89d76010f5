"""The nodes of expressions, and the operations that they may be: one row of :data:`OPERATIONS` each.

:class:`Expr` is what a traced function computes with, so Python's operators and torch's functions on one make another. What
torch's functions mean is in :mod:`tilewise.expr.tracing`, which is imported when the first of them is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import index
from threading import Thread
from typing import Any, TypeGuard

import torch

from tilewise.expr.compiled import ask_instances_of

SYMBOLS = {
    "s": "float",
    "ds": "float",
    "b": "int",
    "h": "int",
    "i": "int",
    "j": "int",
    "off": "int",
    "seqlen_q": "int",
    "seqlen_k": "int",
}


class Expr:
    """One node: an operation of :data:`OPERATIONS` on ``args``, a number, symbol or parameter, or a read of a leaf.

    Terminals: ``number (value,)``, ``symbol (name,)``, ``param (slot, kind)``. Reads: ``lookup (leaf, *indices)``, an element, and
    ``selected (leaf, *indices, key)``, whether an integer is in a row of a leaf, of which ``indices`` name all dimensions but the last.
    The elements of a row never decrease. A leaf is a tensor (or :class:`Fitted`) while a function is being traced, and ``(kind, number)``
    or ``(kind, number, "fitted")`` once the expression was printed and parsed.
    """

    __slots__ = ("_kind", "_order", "_symbols", "args", "op")

    def __init__(self, op: str, args: tuple):
        self.op = op
        self.args = args
        # Facts of a whole tree, kept at its root: a walk for each of them would be as deep as the tree.
        self._kind = _kind_of(op, args)
        self._symbols: frozenset[str] | None = None  # until tilewise.expr.walk.depends_on is asked
        self._order: Any = None  # until it is evaluated

    def __repr__(self) -> str:
        from tilewise.expr.text import to_text

        return to_text(self)[0]

    # Python calls these on `if`, `int()`, `for`: what a traced scalar cannot answer.
    def __bool__(self):
        raise untraceable(
            "`if`, `and`, `or`, `not`, `in`, `min`, `max` or a chained comparison on a traced value",
            "use torch.where, &, |, ~, torch.minimum and torch.maximum",
        )

    def __int__(self):
        raise untraceable("`int()` of a traced value", "use .int() or //")

    def __float__(self):
        raise untraceable("`float()` of a traced value, as functions of math do", "use torch's functions, or .float()")

    def __index__(self):
        raise untraceable("a traced value as a Python index", "index a tensor with it: tensor[h, i, j]")

    def __getitem__(self, index):
        raise untraceable("an index of a traced value", "it is one number: read a tensor at it, tensor[h, i, j]")

    def __iter__(self):
        raise untraceable("iteration over a traced value", "each of s, b, h, i, j is one scalar")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        from tilewise.expr.tracing import method

        return method(self, name)

    @property
    def dtype(self) -> torch.dtype:
        """The answer to ``s.dtype`` while tracing; the call computes floating values in its own precision."""
        return {"float": torch.float32, "int": torch.int64, "bool": torch.bool}[kind(self)]

    @property
    def device(self) -> None:
        """``None``, since the device is not known while tracing; torch's factory functions take it for their default."""
        return None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        from tilewise.expr.tracing import torch_function

        return torch_function(func, args, kwargs or {})

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
    def __pow__(self, x): return power(self, x)
    def __rpow__(self, x): return power(x, self)
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
    def __lshift__(self, x): return shift("lshift", self, x)
    def __rlshift__(self, x): return shift("lshift", x, self)
    def __rshift__(self, x): return shift("rshift", self, x)
    def __rrshift__(self, x): return shift("rshift", x, self)
    # fmt: on


def untraceable(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"a traced mask or score function used {what}; {instead}")


def kind(e: Expr) -> str:
    """Return ``"float"``, ``"int"`` or ``"bool"``."""
    return e._kind


def _kind_of(op: str, args: tuple) -> str:
    """Return the kind of an operation on arguments whose kinds are known, or of a terminal."""
    if op == "number":
        return type(args[0]).__name__
    if op == "symbol":
        return SYMBOLS[args[0]]
    if op == "param":
        return args[1]
    if op == "selected":
        return "bool"
    if op == "lookup":
        leaf = args[0]
        return leaf[0] if isinstance(leaf, tuple) else tensor_kind(leaf.tensor if isinstance(leaf, Fitted) else leaf)
    result = OPERATIONS[op].kind
    if result != "same":
        return result
    kinds = [a._kind for a in (args[1:] if op == "where" else args)]
    return "float" if "float" in kinds else "int" if "int" in kinds else "bool"


def number(value: bool | int | float) -> Expr:
    return Expr("number", (value,))


def symbol(name: str) -> Expr:
    return Expr("symbol", (name,))


ZERO, ONE = number(0), number(1)
NO_ENTRY, WRONG_ENTRY = (1 << 31) - 1, (1 << 31) - 2
"""In the sorted rows of a selection, what is no key: an entry that the caller left out, and one that is refused where it is checked."""
READS = ("lookup", "selected")
"""The nodes that read a leaf, which is their first argument."""


def is_number(e: Expr, value: float) -> bool:
    return e.op == "number" and not isinstance(e.args[0], bool) and e.args[0] == value


def as_expr(x: Any) -> Expr:
    """Return a Python number, a 0-dim tensor or an expression, as an expression."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, torch.Tensor):
        if x.ndim:
            raise NotImplementedError(
                f"a traced mask or score function used a tensor of shape {tuple(x.shape)} as a value; "
                "read one element of it: tensor[h, i, j], or tw.lookup(tensor, h, i, j)"
            )
        return lookup(x)
    if hasattr(type(x), "refuse"):  # a tensor that was read with too few indices says so itself
        x.refuse()
    if isinstance(x, bool):
        # Where Dynamo does not ask Expr, False may be its own answer to `j == n`.
        if torch.compiler.is_dynamo_compiling() and not ask_instances_of(Expr):
            raise untraceable(
                f"the constant {x} inside torch.compile", "write j - n == 0, or choose between two functions"
            )
        return number(True) if x else number(False)  # `x` itself may be a symbol
    if is_symbol(x):
        return lookup(torch.full((), x))  # an argument of the graph, which serves all its values
    if isinstance(x, (int, float, torch.SymInt, torch.SymFloat)):
        return number(concrete(x))
    if is_numpys(x):
        return number(x.item())
    raise NotImplementedError(f"a traced mask or score function used a {type(x).__name__} as a value")


def is_symbol(x: Any) -> TypeGuard[int]:
    """Return whether a whole number is a symbol of a trace. Dynamo shows its own as ints."""
    if isinstance(x, torch.SymInt):
        if not x.node.is_symbolic():  # a nested tensor's length
            return False
    elif not torch.compiler.is_dynamo_compiling() or not isinstance(x, int):
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(x)


def is_numpys(x: Any) -> bool:
    """Return whether a value is one of NumPy's scalars, which are no numbers of Python's."""
    return (
        type(x).__module__ == "numpy" and getattr(x, "shape", None) == () and isinstance(x.item(), (bool, int, float))
    )


def concrete(x: Any) -> int | float:
    """Return a Python number. A symbol of torch.compile or export becomes the value that the graph is made for.

    int() and float() would keep the symbol, and so would the text of a symbol alone, hence the product.
    """
    if isinstance(x, (int, torch.SymInt)):
        return index(x)
    return float(f"{x * 1.0}") if torch.compiler.is_dynamo_compiling() else float(x)


UNREAD = (torch.uint16, torch.uint32, torch.uint64)  # torch itself computes with none of them


def refuse_unread(x: object) -> None:
    """Raise where a tensor has no elements that a mask or score could read: a sparse or a nested one, or a
    ``torch.nn.attention.bias.CausalBias``, whose elements were never written.

    Raises:
        ValueError: it is one, with what to write instead.
    """
    if isinstance(x, torch.Tensor) and (x.is_nested or x.layout != torch.strided):
        found, way = ("a nested tensor", "to_padded_tensor(0)") if x.is_nested else (x.layout, "to_dense()")
        raise ValueError(f"a mask or score cannot read {found}; make it dense: t.{way}")
    if type(x).__name__ == "CausalBias":  # importing it to ask takes 2 s
        variant = repr(getattr(x, "variant", None))  # a slice of one has none
        lower, upper = "mask=tw.causal(), or causal=True", 'mask=tw.causal(align="first")'
        instead = (
            lower if "LOWER" in variant else upper if "UPPER" in variant else f"{lower}; of an upper left one {upper}"
        )
        raise ValueError(
            f"a CausalBias of torch.nn.attention.bias is not read: its elements were never written; write {instead}"
        )


def lookup(tensor: torch.Tensor, *index: Any) -> Expr:
    """Return ``tensor[index]`` as an expression; an index out of range is clamped. What traced functions write as
    ``tensor[h, i, j]``.

    Args:
        tensor: floating, integer or bool. Whole numbers are computed as such: those of 8 and 16 bits do not wrap. GPUs compute with an
            int32 tensor's in 32 bits: give int64 where their sums or products need more. Floating leaves of a score get gradients; of
            float64 in a mask they are compared in float64, in a score computed in its precision.
        index: one integer expression (``b, h, i, j`` or arithmetic on them) or int per dimension of ``tensor``.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"lookup reads a tensor, got {type(tensor).__name__}: torch.tensor(...) makes one")
    refuse_unread(tensor)
    if tensor.dtype in UNREAD or tensor.is_complex():
        raise ValueError(f"a mask or score cannot read a tensor of {tensor.dtype}; convert it: t.long(), or t.real")
    if len(index) != tensor.ndim:
        indices = "1 index" if tensor.ndim == 1 else f"{tensor.ndim} indices"
        raise ValueError(f"lookup in a tensor of shape {tuple(tensor.shape)} needs {indices}, got {len(index)}")
    return Expr("lookup", (tensor, *[_index_expr(x, size) for x, size in zip(index, tensor.shape, strict=True)]))


class Fitted:
    """A leaf whose axes must have exactly the sizes of its indices; other leaves may be longer."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def fitted_lookup(tensor: torch.Tensor, *index: Any) -> Expr:
    """Return ``tensor[index]`` of a tensor that is :class:`Fitted`: how the catalogue of masks and scores reads its tensors."""
    return Expr("lookup", (Fitted(tensor), *lookup(tensor, *index).args[1:]))


def selected(row: Expr, key: Expr) -> Expr:
    """Whether ``key`` is in a row of a leaf; ``row`` is a lookup that has an index for each dimension but the last."""
    return Expr("selected", (*row.args, key))


def _index_expr(x: Any, size: int) -> Expr:
    """Return an index as an expression; a literal one counts from the end where it is negative, as in torch."""
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


# -- The operations: one row each ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """An operation: its function in torch, how it prints, and its partial derivatives as functions of (args, result)."""

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
            return apply("where", apply(chosen, b, a), ZERO, apply("where", apply("eq", a, b), number(0.5), ONE))

        return rule

    return partial(0), partial(1)


@cache
def _shares_at_bound(by_tensor: bool) -> tuple[float, float]:
    """Return the gradients of x and of its bound where ``torch.clamp`` finds them equal, as the installed PyTorch has it: versions differ.

    Args:
        by_tensor: the bound is a tensor, not a number.
    """

    def asked() -> tuple[float, float]:
        x, bound = (torch.zeros((), device="cpu", requires_grad=True) for _ in range(2))
        torch.clamp(x, bound if by_tensor else 0.0).backward()
        return x.grad.item(), 0.0 if bound.grad is None else bound.grad.item()

    found: list[tuple[float, float]] = []
    # A thread of its own has none of the caller's modes: no_grad, inference, fake tensors, transforms of torch.func.
    thread = Thread(target=lambda: found.append(asked()))
    thread.start()
    thread.join()
    return found[0]


def _bounded(inside: str, inside_or_at: str, outside: str, outside_or_at: str) -> tuple:
    """Return the partials of x bounded by c. The comparisons say when x passes and when c does."""

    def chosen(x: Expr, c: Expr, mine: int, alone: str, too: str) -> Expr:
        share = _shares_at_bound(c.op not in ("number", "param"))[mine]
        if share in (0.0, 1.0):
            return _select(apply(too if share else alone, x, c), ONE)
        return _select(apply(too, x, c), apply("where", apply("eq", x, c), number(share), ONE))

    return (
        lambda x, c, r: chosen(x, c, 0, inside, inside_or_at),
        lambda x, c, r: chosen(x, c, 1, outside, outside_or_at),
    )


def _pow_base(x, c, r):
    return apply("where", apply("eq", c, ZERO), ZERO, c * apply("pow", x, c + number(-1)))


def _pow_exponent(x, c, r):
    return apply("where", (apply("eq", x, ZERO)) & (apply("ge", c, ZERO)), ZERO, r * apply("log", x))


def _one(*_: Expr) -> Expr:
    return ONE


def _minus_one(*_: Expr) -> Expr:
    return number(-1)


_LN2 = math.log(2.0)

# fmt: off
OPERATIONS: dict[str, Operation] = {
    "add": Operation(torch.add, infix="+", partials=(_one, _one)),
    "sub": Operation(torch.sub, infix="-", partials=(_one, _minus_one)),
    "mul": Operation(torch.mul, infix="*", partials=(lambda x, y, r: y, lambda x, y, r: x)),
    "div": Operation(torch.true_divide, "float", "/", (lambda x, y, r: ONE / y, lambda x, y, r: -(r / y)), float_args=True),
    "floordiv": Operation(torch.floor_divide, infix="//"),
    "mod": Operation(torch.remainder, infix="%", partials=(_one, lambda x, y, r: -apply("floordiv", x, y))),
    "pow": Operation(torch.pow, infix="**", partials=(_pow_base, _pow_exponent)),
    "and": Operation(torch.bitwise_and, infix="&"),
    "or": Operation(torch.bitwise_or, infix="|"),
    "xor": Operation(torch.bitwise_xor, infix="^"),
    "lshift": Operation(torch.bitwise_left_shift, arity=2),
    "rshift": Operation(torch.bitwise_right_shift, arity=2),
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
    "clamp_min": Operation(torch.maximum, arity=2, partials=_bounded("gt", "ge", "lt", "le")),
    "clamp_max": Operation(torch.minimum, arity=2, partials=_bounded("lt", "le", "gt", "ge")),
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
    "erfc": Operation(torch.erfc, "float", None, (lambda x, r: number(-2 / math.sqrt(math.pi)) * apply("exp", -(x * x)),), float_args=True),
    "asin": Operation(torch.asin, "float", None, (lambda x, r: apply("rsqrt", ONE - x * x),), float_args=True),
    "acos": Operation(torch.acos, "float", None, (lambda x, r: -apply("rsqrt", ONE - x * x),), float_args=True),
    "atan": Operation(torch.atan, "float", None, (lambda x, r: ONE / (x * x + ONE),), float_args=True),
    "atan2": Operation(torch.atan2, "float", None, (lambda y, x, r: x / (x * x + y * y), lambda y, x, r: -y / (x * x + y * y)), True, 2),
    "relu": Operation(torch.relu, "same", None, (lambda x, r: _select(x > ZERO, ONE),)),
    "float": Operation(lambda x: x, "float", None, (_one,), float_args=True),
    "int": Operation(lambda x: x.to(torch.int64), "int"),
    "bool": Operation(lambda x: x.to(torch.bool), "bool"),
}
# fmt: on


def apply(op: str, *args: Any) -> Expr:
    """Return the node of one operation; Python numbers and 0-dim tensors among ``args`` are wrapped.

    Raises:
        NotImplementedError: torch does not compute the operation for such arguments.
    """
    e = Expr(op, tuple([as_expr(x) for x in args]))
    if op in _OF_NUMBERS or op in _OF_BITS:
        _refuse_kinds(op, e.args)
    return e


_OF_BITS = frozenset({"and", "or", "xor", "not", "lshift", "rshift"})
_OF_NUMBERS = frozenset(
    {"sub", "neg", "abs", "relu", "floor", "ceil", "round", "trunc", "floordiv", "mod", "pow", "lshift", "rshift"}
)


def _refuse_kinds(op: str, args: tuple[Expr, ...]) -> None:
    """Raise where torch has no such operation: backends would each make another number of it."""
    kinds = [kind(x) for x in args]
    what = "a shift" if op in ("lshift", "rshift") else f"`{OPERATIONS[op].infix or op}`"
    if op in _OF_BITS and "float" in kinds:
        raise untraceable(f"{what} of a float", "use .int(), a comparison, or a product with a power of two")
    if op in _OF_NUMBERS and (all(k == "bool" for k in kinds) or (op == "sub" and "bool" in kinds)):
        raise untraceable(f"{what} of truth values", "make numbers of them: x.int()")
    if op == "pow" and "float" not in kinds and args[1].op == "number" and args[1].args[0] < 0:
        raise untraceable("a negative power of a whole number", "make it a float: x.float() ** -1")


_SHORT = 31
"""Bits of a shift below which it is a product or a quotient, whose facts are known: whether it grows along a row, say."""


def shift(op: str, x: Any, n: Any) -> Expr:
    """Return ``x << n`` (``"lshift"``) or ``x >> n`` (``"rshift"``) of integers; by a small number, ``x * 2**n`` or ``x // 2**n``."""
    e, bits = apply(op, x, n), as_expr(n)
    if bits.op != "number" or not 0 <= bits.args[0] < _SHORT or kind(e.args[0]) == "bool":
        return e
    return apply("mul" if op == "lshift" else "floordiv", x, number(2 ** bits.args[0]))


_POWERS: dict[float, Callable[[Expr], Expr]] = {
    -2.0: lambda x: ONE / (x * x),
    -1.0: lambda x: ONE / x,
    -0.5: lambda x: apply("rsqrt", x),
    0.5: lambda x: apply("sqrt", x),
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
}


def power(x: Any, c: Any) -> Expr:
    """Return ``x ** c``; of a float to a number that torch has a shorter way to, that way, as its values at 0 and infinity differ."""
    e = apply("pow", x, c)
    base, exponent = e.args
    if kind(e) != "float" or exponent.op != "number" or exponent.args[0] not in _POWERS:
        return e
    return _POWERS[exponent.args[0]](apply("float", base) if kind(base) != "float" else base)
