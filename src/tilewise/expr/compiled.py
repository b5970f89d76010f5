"""Comparisons of traced values with numbers that Dynamo holds as symbols.

For ``j < n``, n a length of a dynamic shape, PyTorch 2.13 asks neither side: it fails, and takes ``j == n`` for False.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

_REFLECTED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def ask_instances_of(owner: type) -> bool:
    """Have Dynamo ask the instances of a class for their comparisons with symbols; those of others keep Dynamo's answers.

    Returns:
        False: this PyTorch has other insides.
    """
    return _ask(owner)


# torch.compiler.assume_constant_result, which would import Dynamo: it runs this itself when it meets the call.
ask_instances_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _ask(owner: type) -> bool:
    try:
        from torch._dynamo.variables import SymNodeVariable, UserDefinedObjectVariable
        from torch._dynamo.variables.builtin import BuiltinVariable

        handlers, chosen = BuiltinVariable._binop_handlers(), BuiltinVariable.call_function_handler_cache
    except (ImportError, AttributeError):
        return False
    for name, reflected in _REFLECTED.items():
        handlers[getattr(operator, name)][:0] = [
            ((UserDefinedObjectVariable, SymNodeVariable), _answer(owner, f"__{name}__", slice(None))),
            ((SymNodeVariable, UserDefinedObjectVariable), _answer(owner, f"__{reflected}__", slice(None, None, -1))),
        ]
    chosen.clear()
    return True


def _answer(owner: type, method: str, order: slice) -> Callable[[Any, Any, Any], Any]:
    """Return a handler of Dynamo's, None where the next shall answer; ``order`` brings the instance to the front."""

    def answer(tx, *sides):
        instance, symbol = sides[order]
        return instance.call_method(tx, method, [symbol], {}) if instance.python_type() is owner else None

    return answer
