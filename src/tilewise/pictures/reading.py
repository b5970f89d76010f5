"""A mask or a score from text such as ``causal() & window(256, 0)``, for a command line.

The text is parsed and walked over, never evaluated by Python: it may name what the two catalogues and :data:`VALUES` hold, write
numbers, lists and their arithmetic, and give ``keep`` and ``score`` a lambda of arithmetic. Anything else is refused by name.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from tilewise import expr
from tilewise.masks import Mask
from tilewise.masks import catalogue as masks
from tilewise.masks.patterns import butterfly, local_global, strided
from tilewise.scores import Score
from tilewise.scores import catalogue as scores
from tilewise.words import resembles

MOST_ELEMENTS = 1 << 22  # of a list or of a tensor that the text makes
LONGEST_TEXT = 10_000

MASKS: dict[str, Callable[..., Mask]] = {
    f.__name__: f
    for f in (
        masks.causal, masks.window, masks.prefix, masks.key_range, masks.key_lengths, masks.documents, masks.keep,
        masks.dense, masks.block_sparse, masks.selected,
    )
}  # fmt: skip
SCORES: dict[str, Callable[..., Score]] = {
    f.__name__: f for f in (scores.softcap, scores.alibi, scores.bias, scores.score)
}
PATTERNS = {f.__name__: f for f in (butterfly, strided, local_global)}


def _arange(stop: int) -> torch.Tensor:
    if not isinstance(stop, int) or not 0 <= stop <= MOST_ELEMENTS:
        raise ValueError(f"arange({stop}): a whole number up to {MOST_ELEMENTS} is needed")
    return torch.arange(stop)


VALUES: dict[str, Callable[..., Any]] = {"arange": _arange, "tensor": torch.as_tensor, **PATTERNS}
# What a list becomes that one of the catalogue's functions is given.
ELEMENTS = {
    "dense": torch.bool,
    "block_sparse": torch.bool,
    "selected": torch.int64,
    "alibi": torch.float32,
    "bias": torch.float32,
}

_BINARY: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.RShift: operator.rshift,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable] = {ast.USub: operator.neg, ast.Invert: operator.invert}


def read_mask(text: str) -> Mask:
    """Return the mask that ``text`` writes in the words of the catalogue; ``tw.`` before a name is allowed.

    Raises:
        ValueError: it is no such mask, with what is allowed.
    """
    return _read(text, "mask", Mask, MASKS)


def read_score(text: str) -> Score:
    """Return the score that ``text`` writes, as :func:`read_mask` reads a mask.

    Raises:
        ValueError: it is no such score, with what is allowed.
    """
    return _read(text, "score", Score, SCORES)


def _read(text: str, what: str, kind: type, functions: Mapping[str, Callable]) -> Any:
    allowed = f"a {what} is made of {', '.join(functions)}"
    try:
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"it has {len(text)} characters, at most {LONGEST_TEXT} are read")
        found = _value(ast.parse(text.strip(), mode="eval").body, {**VALUES, **functions}, {})
    except SyntaxError as wrong:
        raise ValueError(f"the {what} {text!r} is not written as Python: {wrong.msg}; {allowed}") from None
    except (ValueError, TypeError, ArithmeticError, RuntimeError, RecursionError) as wrong:
        raise ValueError(f"the {what} {text[:200]!r} cannot be read: {wrong}; {allowed}") from None
    if not isinstance(found, kind):
        raise ValueError(f"{text!r} is no {what}; {allowed}")
    return found


def _value(node: ast.AST, functions: Mapping[str, Callable], arguments: Mapping[str, expr.Expr]) -> Any:
    """Return the meaning of a part of the text; ``arguments`` are those of the lambda that it stands in."""
    value = partial(_value, functions=functions, arguments=arguments)
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as constant):
            return constant
        case ast.Name(id=name) if name in arguments:
            return arguments[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [value(x) for x in elements]
        case ast.UnaryOp(op=op, operand=x) if type(op) in _UNARY:
            return _UNARY[type(op)](value(x))
        case ast.BinOp(left=x, op=op, right=y) if type(op) in _BINARY:
            return _combined(_BINARY[type(op)], value(x), value(y))
        case ast.Compare(left=x, ops=[op], comparators=[y]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](value(x), value(y))
        case ast.Call(func=ast.Name() | ast.Attribute() as called, args=args, keywords=keywords):
            return _called(
                _name(called), [value(x) for x in args], {x.arg: value(x.value) for x in keywords}, functions
            )
        case ast.Lambda(args=ast.arguments(args=names), body=body) if not arguments:
            return partial(_traced, [x.arg for x in names], body, functions)
    hint = "; write & and | instead of `and` and `or`" if isinstance(node, ast.BoolOp) else ""
    raise ValueError(f"`{ast.unparse(node)}` is not among what it may hold{hint}")


def _traced(names: list[str], body: ast.expr, functions: Mapping[str, Callable], *symbols: expr.Expr) -> Any:
    """Return a lambda's body at the symbols of its parameters."""
    if len(names) != len(symbols):
        raise ValueError(f"its lambda takes {len(names)} arguments, {len(symbols)} are needed")
    return _value(body, functions, dict(zip(names, symbols, strict=True)))


def _name(called: ast.Name | ast.Attribute) -> str:
    """Return the name that is called, without a ``tw.`` or ``torch.`` before it."""
    match called:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="tw" | "torch"), attr=name):
            return name
    raise ValueError(f"`{ast.unparse(called)}` is not among what it may hold")


def _called(name: str, args: list, keywords: dict[str | None, Any], functions: Mapping[str, Callable]) -> Any:
    if name in functions and None not in keywords:
        if name in PATTERNS and any(isinstance(x, int) and x > 2048 for x in (*args, *keywords.values())):
            raise ValueError(f"{name}: at most 2048 blocks are drawn")
        kind = ELEMENTS.get(name)
        return functions[name](*[_tensor(x, kind) for x in args], **{k: _tensor(x, kind) for k, x in keywords.items()})
    if name in expr.OPERATIONS and any(isinstance(x, expr.Expr) for x in args) and not keywords:
        return expr.apply(name, *args)
    raise ValueError(f"there is no `{name}` of this kind{resembles(name, list(functions))}")


def _tensor(value: Any, kind: torch.dtype | None) -> Any:
    return torch.tensor(value, dtype=kind) if isinstance(value, list) else value


def _elements(value: Any) -> int:
    """Return the numbers in lists of lists."""
    return sum(map(_elements, value)) if isinstance(value, list) else 1


def _combined(combine: Callable, x: Any, y: Any) -> Any:
    lists = [z for z in (x, y) if isinstance(z, list)]
    if lists and (combine not in (operator.add, operator.mul) or (combine is operator.mul and len(lists) == 2)):
        raise ValueError("lists are joined by + and repeated by * with a number")
    times = (y if lists[0] is x else x) if combine is operator.mul and lists else 1
    if sum(map(_elements, lists)) * times > MOST_ELEMENTS:
        raise ValueError(f"a list has at most {MOST_ELEMENTS} elements")
    found = combine(x, y)
    if isinstance(found, int) and abs(found) >= 1 << 48:
        raise ValueError(f"{found} is beyond every sequence")
    return found
