"""Arguments without memory that kernels are compiled for: any lengths, heads and strides, and smaller head dims."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from tilewise.backends.hopper.kit.dtypes import ELEMENT
from tilewise.backends.hopper.parameters import ANY, DIVISORS, FP32, INT32, Parameter

NUMBERS = {INT32: cutlass.Int32(0), FP32: cutlass.Float32(0)}


def arguments(config: Any) -> tuple:
    """The arguments of a config's launch, but for the config: those of its ``parameters``, and the stream."""
    # One kernel serves all lengths and heads: they are symbols, and numbers of run time.
    sizes: dict[str, Any] = {}

    def size(n: int | str) -> Any:
        if n == ANY or isinstance(n, int):
            return cute.sym_int() if n == ANY else n
        return sizes.setdefault(n, cute.sym_int(divisibility=DIVISORS.get(n, 1)))

    def argument(x: Parameter) -> Any:
        if x.shape is None:
            return NUMBERS[x.dtype]
        shape = tuple(map(size, x.shape))
        element = element_of(x.dtype) if x.dtype else ELEMENT[config.dtype]
        return make_fake_tensor(element, shape, strides(shape, x.step), assumed_align=x.align)

    found = (tuple(map(argument, x)) if type(x) is tuple else argument(x) for x in config.parameters)
    return *found, make_fake_stream(use_tvm_ffi_env_stream=True)


def strides(shape: tuple, step: int | None) -> tuple:
    """The strides of a tensor, as :class:`Parameter` has them."""
    if step is None:
        return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
    # 64 bits, since a stride of heads or batch elements may be above 2³¹.
    outer = tuple(cute.sym_int64(divisibility=step or 1) for _ in shape[: len(shape) - (step > 0)])
    return outer if step == 0 else (*outer, 1)


def element_of(dtype: str) -> Any:
    """The element of a tensor of torch's ``dtype``; a truth value is a byte."""
    return getattr(cutlass, {"bool": "Uint8", "bfloat16": "BFloat16"}.get(dtype, dtype.capitalize()))
