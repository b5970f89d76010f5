"""The operations that ``torch.utils.flop_counter.FlopCounterMode`` counts of the operators.

As for torch's own attention, every pair of a query and a key counts, seen or not (docs/decisions.md#flops-of-every-pair): 2 for each
multiplication of its products. A backward has the scores again, dP, dV, dQ and dK; the tangent of a product is two products.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.spec import parse_spec

# Of each operator, products over head_dim and over head_dim_v, and q, k, v and the extras among its arguments.
_OPERATORS: dict[str, tuple[int, int, Callable[..., tuple]]] = {
    "attention": (1, 1, lambda q, k, v, extras, *_: (q, k, v, extras)),
    "attention_with_stats": (1, 1, lambda q, k, v, extras, *_: (q, k, v, extras)),
    "attention_backward": (3, 2, lambda do, dlse, q, k, v, o, lse, extras, *_: (q, k, v, extras)),
    "attention_jvp": (3, 2, lambda inputs, extras, *_: (*inputs[:3], extras)),
    "attention_backward_jvp": (7, 5, lambda grads, moved, inputs, extras, *_: (*inputs[:3], extras)),
}


def _formula(by_k: int, by_v: int, read: Callable[..., tuple]) -> Callable[..., int]:
    def count(*arguments: Any, out_val: object = None) -> int:
        q, k, v, extras = read(*arguments)
        return 2 * q.shape[-2] * _pairs(q, k, extras, arguments[-1]) * (by_k * q.shape[-1] + by_v * v.shape[-1])

    return count


def _pairs(q: Tensor, k: Tensor, extras: Sequence[Tensor], text: str) -> int:
    """Return pairs of a query and a key in all sequences; where their lengths have no values, in fake tensors, no fewer than these."""
    spec = parse_spec(text)
    cu = [extras[slot] for slot in spec.cu_slots]
    table, seqlens_k = [extras[slot] for slot in spec.page_slots] or (None, None)
    lengths = cu if seqlens_k is None else [*cu, seqlens_k]
    if not lengths or any(type(x) is not Tensor or x.is_meta for x in lengths):
        return math.prod(q.shape[:-2]) * (k.shape[-3] if table is None else table.shape[1] * k.shape[1])
    rows = cu[0].diff() if cu else q.shape[1]
    return int((rows * (cu[1].diff() if seqlens_k is None else seqlens_k).long()).sum())


def _register(counter: Any) -> None:
    for name, row in _OPERATORS.items():
        counter.register_flop_formula(getattr(torch.ops.tilewise, name), get_raw=True)(_formula(*row))


class _WhenImported:
    """A finder that registers the formulas once the counter is imported. The counter imports Triton, which takes half a second."""

    NAME = "torch.utils.flop_counter"

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _register(module)

        spec.loader.exec_module = exec_module
        return spec


def register() -> None:
    """Have ``FlopCounterMode`` count the operators, which must exist, in whichever order it and this library are imported."""
    if _WhenImported.NAME in sys.modules:
        _register(sys.modules[_WhenImported.NAME])
    else:
        sys.meta_path.insert(0, _WhenImported())
