"""The way from a Python function to an expression: what torch's functions and tensors' methods make of traced values."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilewise.expr.compiled import ask_instances_of
from tilewise.expr.narrow import wrapped
from tilewise.expr.operations import (
    ONE,
    OPERATIONS,
    UNREAD,
    Expr,
    Fitted,
    apply,
    as_expr,
    kind,
    lookup,
    number,
    power,
    shift,
    symbol,
    untraceable,
)
from tilewise.expr.walk import children, depends_on, nodes

# fmt: off
# What torch and Python call them.
ALIASES = {
    "absolute": "abs", "negative": "neg", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
    "truediv": "div", "floor_divide": "floordiv", "remainder": "mod", "max": "maximum", "min": "minimum",
    "logical_and": "and", "logical_or": "or", "logical_not": "not", "logical_xor": "xor", "invert": "not",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_not": "not", "bitwise_xor": "xor", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "long": "int", "double": "float", "half": "float",
    "bfloat16": "float", "expit": "sigmoid", "sgn": "sign", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arctan2": "atan2",
}
# fmt: on

# torch.compile calls the second, which has no name, and torch.export(strict=True) the third.
_GETITEM = (torch.Tensor.__getitem__, torch._C.TensorBase.__getitem__, operator.getitem)
_ALLOWED = "allowed are elementwise arithmetic, comparisons, & | ~, torch.where and " + ", ".join(
    sorted(name for name, operation in OPERATIONS.items() if operation.infix is None and name != "not")
)


def method(value: Expr, name: str) -> Callable[..., Any]:
    """Return the method ``name`` of a traced value.

    Raises:
        NotImplementedError: there is none.
    """
    if name == "where":  # the method is value.where(condition, other)
        return lambda condition, other: call("where", (condition, value, other), {})
    if ALIASES.get(name, name) not in {*OPERATIONS, *_COMPOSED}:
        raise untraceable(f"`{name}`", _ALLOWED)
    return lambda *args, **kwargs: call(name, (value, *args), kwargs)


def torch_function(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Trace a torch function with a traced argument."""
    if func in _GETITEM:
        return _index(*args)
    if func is torch.Tensor.where:
        args = (args[1], args[0], *args[2:])
    name = _NAMES.get(func, func.__name__)
    # Tensor's operators that Python defines are decorated, and Dynamo of PyTorch 2.15 knows the decorator's name for them alone.
    return call(func.__wrapped__.__name__ if name == "wrapped" else name, args, kwargs)


def call(name: str, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function or tensor method on traced values, by its name."""
    if name.endswith("_") and not name.startswith("__"):
        raise untraceable(f"`{name}`, which works in place", "use the form that returns its result")
    name = name.strip("_")
    if kwargs.get("inplace") is False:  # torch.nn.functional passes it along
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
    if name.startswith("r") and name[1:] in _REFLECTED:
        name, args = name[1:], args[::-1]
    if name in _COMPOSED:
        return _COMPOSED[name](*args, **kwargs)
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
    if dtype.is_complex or dtype in UNREAD:
        raise untraceable(f"`.to({dtype})`", "use .to(torch.float32) or .to(torch.int64)")
    if dtype == torch.bool or dtype.is_floating_point:
        return apply("bool" if dtype == torch.bool else "float", x)
    return wrapped(apply("int", x), dtype)


def _constant(value):
    """Factory functions of one scalar like another: ``b.new_ones((), dtype=torch.bool)``, ``torch.zeros_like(s)``."""

    def made(x, size=(), *, dtype=None, device=None):
        if size != () and size != []:
            raise untraceable(f"a constant of shape {size}", "each of s, b, h, i, j is one scalar")
        dtype = x.dtype if dtype is None else dtype
        return number(bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value))

    return made


def _gelu(x, approximate="none"):
    if approximate == "none":
        return 0.5 * x * (1 + apply("erf", x * math.sqrt(0.5)))
    return 0.5 * x * (1 + apply("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _softplus(x, beta=1, threshold=20):
    scaled = x if beta == 1 else x * beta
    # At 0 the maximum has half a slope and the logarithm none: together that of softplus.
    soft = apply("maximum", scaled, 0) + apply("log1p", apply("exp", -apply("abs", scaled)))
    return apply("where", scaled > threshold, x, soft if beta == 1 else soft / beta)


# -- Functions of torch that are made of operations, so that every backend has them ------------------------------------


def _div(x, y, rounding_mode=None):
    if rounding_mode not in (None, "floor", "trunc"):
        raise ValueError(f"div: rounding_mode must be None, 'floor' or 'trunc', got {rounding_mode!r}")
    if rounding_mode == "floor":
        return apply("floordiv", x, y)
    x, y = as_expr(x), as_expr(y)
    if rounding_mode is None or "float" in (kind(x), kind(y)):
        return apply("div", x, y) if rounding_mode is None else apply("trunc", apply("div", x, y))
    up = apply("ne", apply("mod", x, y), 0) & apply("ne", x < 0, y < 0)  # a quotient below 0 that was rounded down
    return apply("floordiv", x, y) + apply("where", up, 1, 0)


def _detach(x):
    """An expression whose tensors get no gradient through it."""
    if "s" in depends_on(x):
        raise untraceable(
            "`detach` of the score", "its gradient cannot be stopped here: compute what is detached before, as a tensor"
        )
    new: dict[int, Expr] = {}
    for e in nodes(x):
        inner = [new[id(a)] for a in children(e)]
        leaf = e.args[0] if e.op == "lookup" else None
        head = () if leaf is None else (Fitted(leaf.tensor.detach()) if isinstance(leaf, Fitted) else leaf.detach(),)
        new[id(e)] = Expr(e.op, (*head, *inner)) if head or inner else e
    return new[id(x)]


def _fmod(x, y):
    """The remainder with the sign of x, where ``mod`` has that of y."""
    x, size = as_expr(x), apply("abs", y)
    return apply("where", x < 0, -(-x % size), x % size)


def _fmax(better):
    """torch.fmax or fmin: a NaN is no candidate, and x is taken at a tie."""
    return lambda x, y: apply("where", apply(better, x, y) | apply("ne", y, y), x, y)


def _logaddexp(x, y):
    larger, difference = apply("maximum", x, y), apply("abs", apply("sub", x, y))
    # Of two infinities of one sign the difference is no number.
    return larger + apply("where", apply("eq", x, y), math.log(2), apply("log1p", apply("exp", -difference)))


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
    "lshift",
    "rshift",
)
_COMPOSED = {
    "div": _div,
    "divide": _div,
    "detach": _detach,
    "getitem": lambda tensor, index: _index(tensor, index),
    "clamp": _clamp,
    "clip": _clamp,
    "square": lambda x: x * x,
    "reciprocal": lambda x: ONE / x,
    "to": _to,
    "type": _to,
    "type_as": lambda x, other: _to(x, other.dtype),
    "rsub": lambda x, other: apply("sub", other, x),
    "pow": power,
    "lshift": lambda x, n: shift("lshift", x, n),
    "rshift": lambda x, n: shift("rshift", x, n),
    "bitwise_left_shift": lambda x, n: shift("lshift", x, n),
    "bitwise_right_shift": lambda x, n: shift("rshift", x, n),
    "masked_fill": lambda x, hidden, value: apply("where", hidden, value, x),
    "ones_like": _constant(1),
    "new_ones": _constant(1),
    "zeros_like": _constant(0),
    "new_zeros": _constant(0),
    "full_like": lambda x, fill_value, *, dtype=None, device=None: _constant(fill_value)(x, dtype=dtype),
    "new_full": lambda x, size, fill_value, *, dtype=None, device=None: _constant(fill_value)(x, size, dtype=dtype),
    "gelu": _gelu,
    "silu": lambda x, inplace=False: x * apply("sigmoid", x),
    "softplus": _softplus,
    "log_sigmoid": lambda x: -_softplus(-x),
    "tan": lambda x: apply("sin", x) / apply("cos", x),
    "sinh": lambda x: 0.5 * (apply("expm1", x) - apply("expm1", -x)),  # near 0 both are near 0 and nothing cancels
    "cosh": lambda x: 0.5 * (apply("exp", x) + apply("exp", -x)),
    "hypot": lambda x, y: apply("sqrt", apply("mul", x, x) + apply("mul", y, y)),
    "fmod": _fmod,
    "fmax": _fmax("ge"),
    "fmin": _fmax("le"),
    "logaddexp": _logaddexp,
    "lerp": lambda start, end, weight: start + as_expr(weight) * (as_expr(end) - start),
    "isfinite": lambda x: apply("abs", x) < math.inf if kind(x) == "float" else number(True),
    "isinf": lambda x: apply("abs", x) == math.inf if kind(x) == "float" else number(False),
    "isnan": lambda x: apply("ne", x, x) if kind(x) == "float" else number(False),
}


def _named() -> dict[Callable, str]:
    """Return torch's functions that traced values know, with their names, since Dynamo of PyTorch 2.13 reads the names of no others than
    Tensor's Python methods."""
    names = {*OPERATIONS, *ALIASES, *_COMPOSED}
    spelt = [form.format(name) for name in names for form in ("{}", "{}_", "__{}__", "__r{}__")]
    owners = (torch, torch.special, torch.nn.functional, torch._C._nn, torch.Tensor)
    found = [getattr(owner, name, None) for owner in owners for name in spelt]
    return {
        f: f.__name__.removeprefix("special_")
        for f in found
        if inspect.isroutine(f) and getattr(f, "__module__", None) != "torch._tensor"
    }


_NAMES = _named()


class PartialIndex:
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
    if not all(isinstance(x, (Expr, int)) or (isinstance(x, torch.Tensor) and x.ndim == 0) for x in index):
        raise untraceable("a slice, `None` or a tensor as an index", "give one integer expression per dimension")
    return PartialIndex(tensor, index) if len(index) < tensor.ndim else lookup(tensor, *index)


class _IndexMode(TorchFunctionMode):
    """While tracing: ``tensor[h, i, j]`` with traced indices becomes a lookup; all else is torch's own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _GETITEM:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, Expr) for x in index):
                return _index(args[0], index)
        return func(*args, **(kwargs or {}))


_OF_NUMPY = "only integers, slices (`:`)", "setting an array element with a sequence"
"""How errors begin that NumPy raises where it is handed a traced value."""


def trace(fn: Callable, names: Sequence[str]) -> Expr:
    """Return the expression that ``fn`` computes of the symbols ``names``; ``fn`` is called once."""
    arguments = [symbol(name) for name in names]
    if not callable(fn):
        raise ValueError(f"a function of ({', '.join(names)}) is needed, got {type(fn).__name__}")
    if torch.compiler.is_dynamo_compiling():  # which cannot look at parameters, and has errors of its own
        ask_instances_of(Expr)
        with _IndexMode():
            result = fn(*arguments)
        return as_expr(result)
    try:
        with _IndexMode():
            result = fn(*arguments)
    except TypeError as wrong:
        _check_parameters(fn, names)
        if "save_for_backward" in str(wrong):  # PyTorch's words where an argument beside the traced ones requires grad
            raise untraceable(
                "an autograd.Function that saves its arguments, one of them a tensor that requires grad",
                "give it a traced read of that tensor: tw.lookup(tensor), tensor[h]; its backward is not needed, since the "
                "derivative of what its forward computes is taken",
            ) from None
        raise
    except (IndexError, ValueError) as wrong:
        if str(wrong).startswith(_OF_NUMPY):
            raise untraceable("NumPy", "use tensors: torch.from_numpy(array)[h, i, j], torch.where") from None
        raise
    if isinstance(result, PartialIndex):
        result.refuse()
    if result is None:
        raise ValueError(f"a function of ({', '.join(names)}) returned None; is its `return` missing?")
    return as_expr(result)


def _check_parameters(fn: Callable, names: Sequence[str]) -> None:
    """Raise ValueError if ``fn`` does not take that many arguments, or is a function of the catalogue that was not called."""
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
