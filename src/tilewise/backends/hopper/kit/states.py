"""States of segments or shares of keys, in global memory: O, not normalised, and the maxima and sums of its rows, as threads hold them.

Kernels whose rows have the same bits join two states by the same operations, in the same order (docs/decisions.md#hopper-one-order).
"""

from __future__ import annotations

import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import F32
from tilewise.backends.hopper.kit.instructions import choose, put_four, put_pair
from tilewise.backends.hopper.kit.softmax import INF


def put_numbers(states: cute.Tensor, place: tuple, values: list) -> None:
    """Writes two or four neighbouring fp32 numbers."""
    pointer = states[(*place, None)].iterator
    if len(values) == 4:
        put_four(pointer, values)
    else:
        put_pair(pointer, *values)


def take_numbers(states: cute.Tensor, place: tuple) -> list:
    """Two or four neighbouring fp32 numbers that another CTA may have written: not from this multiprocessor's cache."""
    count, pointer = states.shape[-1], states[(*place, None)].iterator
    names = ",".join(f"{{$w{n}}}" for n in range(count))
    code = f"ld.relaxed.gpu.global.v{count}.f32 {{{names}}}, [{{$r0}}];"
    return list(cute.arch.inline_ptx(code, write_only_types=[F32] * count, read_only_args=[pointer.toint()]))


def joined(m2, l, other_m2, other_l) -> tuple:
    """A row's maximum and sum, of a state and of another one with earlier keys, and the factors of both O (docs/algorithm.md, (8)).

    Every operation is spelled out, down to multiply-adds, so that all kernels round alike.
    """
    top = cute.arch.fmax(m2, other_m2)
    # No key so far: -inf - -inf would be NaN.
    base = choose(top == -INF, 0.0, top)
    factor, other = (cute.math.exp2(x - base, fastmath=True) for x in (m2, other_m2))
    return top, joined_number(l, factor, other_l, other), factor, other


def joined_number(x, factor, other_x, other):
    """A number of O, or a sum, of both states."""
    return cute.math.fma(x, factor, other_x * other)
