"""Arguments without memory that kernels are compiled for: any lengths, heads and strides, and smaller head dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from tilewise.backends.hopper.config import MULTIPLE
from tilewise.backends.hopper.kit.dtypes import ELEMENT

I32, F32 = cutlass.Int32(0), cutlass.Float32(0)
NUMBERS = {"i": I32, "f": F32}  # by the letters of :attr:`tilewise.backends.hopper.config.Traced.numbers`


def strides(count: int, divisibility: int = 1) -> tuple:
    """So many 64-bit strides, each a symbol of its own and a multiple of ``divisibility`` elements."""
    # 64 bits, since a stride of heads or batch elements may be above 2³¹.
    return tuple(cute.sym_int64(divisibility=divisibility) for _ in range(count))


def tiled(dtype: str, shape: Sequence[Any]) -> Any:
    """A tensor (batch, row, head, column) in a config's ``dtype`` that the copy engine addresses: its columns lie side by side."""
    # TMA wants strides and the address at multiples of 16 bytes; host/plan.py copies what is not.
    return make_fake_tensor(ELEMENT[dtype], tuple(shape), (*strides(3, MULTIPLE), 1), assumed_align=16)


def strided(element: Any, shape: Sequence[Any]) -> Any:
    """A tensor with any strides."""
    return make_fake_tensor(element, tuple(shape), strides(len(shape)))


def rows(element: Any, shape: Sequence[Any], divisibility: int = 1, align: int | None = None) -> Any:
    """A tensor whose last dimension lies side by side; its other strides are multiples of ``divisibility`` elements."""
    return make_fake_tensor(element, tuple(shape), (*strides(len(shape) - 1, divisibility), 1), assumed_align=align)


def vector(element: Any, size: Any) -> Any:
    """A tensor of one dimension whose elements lie side by side."""
    return make_fake_tensor(element, (size,), (1,))


def packed(element: Any, shape: Sequence[Any]) -> Any:
    """A tensor whose elements lie side by side; all sizes but the first are numbers."""
    stride = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
    return make_fake_tensor(element, tuple(shape), tuple(stride), assumed_align=16)


def leaf(dtype: str, rank: int) -> Any:
    """A tensor that an expression reads, as :func:`tilewise.backends.hopper.host.plan.leaf` hands it over."""
    # torch keeps a truth value in a byte.
    element = getattr(cutlass, {"bool": "Uint8", "bfloat16": "BFloat16"}.get(dtype, dtype.capitalize()))
    return strided(element, [cute.sym_int() for _ in range(max(rank, 1))])
