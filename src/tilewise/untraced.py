"""Functions that Dynamo is not to compile on their own."""

from __future__ import annotations

import inspect
from typing import TypeVar

Called = TypeVar("Called")

try:  # private to PyTorch: where another version has it not, tests/test_operators.py says what is lost
    from torch._C._dynamo import eval_frame

    _SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    _set_strategy = eval_frame.set_code_exec_strategy
except (ImportError, AttributeError):
    _set_strategy = None


def untraced(called: Called) -> Called:
    """Have Dynamo run a function, or the methods of an autograd.Function, and all that they call, as they are.

    PyTorch calls kernels and backwards from C++. Where that happens inside a compiled function that has broken its graph, Dynamo takes
    each for a function to compile: it reads saved tensors twice, which activation checkpoints refuse, and fails at ``id()``. What Dynamo
    meets in a trace it inlines as before. ``torch.compiler.disable`` would import all of Dynamo, and takes longer at each call.
    """
    if _set_strategy is None:
        return called
    methods = vars(called).values() if inspect.isclass(called) else [called]
    for x in methods:
        function = inspect.unwrap(getattr(x, "__func__", x)) if callable(x) or isinstance(x, staticmethod) else x
        if inspect.isfunction(function):
            _set_strategy(function.__code__, _SKIPPED)
    return called
