"""Checks that a wgmma's numbers lie where the kernels assume: the DSL's layout against ``row_of`` and ``column_of``.

``python -m tilewise.backends.hopper.kit.layout``. The masks and lse rely on :func:`tilewise.backends.hopper.kit.tiles.row_of` and
``column_of``, and P on being S's registers in order.
"""

from __future__ import annotations

import sys

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.kit import tiles

KEYS, WIDTH = 112, 64  # any
VALUES = ROWS * KEYS // 128  # of a thread


def places() -> tuple[dict, dict]:
    """``row + 64 column`` by thread and register: of S's accumulator, and of P's operand, both as the DSL has them."""
    s_places, p_places = {}, {}

    @cute.jit
    def trace():
        kind, major = cutlass.BFloat16, OperandMajorMode
        qk = sm90.make_trivial_tiled_mma(kind, kind, major.K, major.K, cutlass.Float32, (1, 1, 1), (ROWS, KEYS))
        pv = sm90.make_trivial_tiled_mma(
            kind, kind, major.K, major.MN, cutlass.Float32, (1, 1, 1), (ROWS, WIDTH), warpgroup.OperandSource.RMEM
        )
        s = cute.make_rmem_tensor(qk.partition_shape_C((ROWS, KEYS)), cutlass.Float32)
        p = cute.make_rmem_tensor(pv.partition_shape_A((ROWS, KEYS)), kind)
        for thread in cutlass.range_constexpr(128):
            for n in cutlass.range_constexpr(VALUES):
                s_places[thread, s.layout(n)] = qk.tv_layout_C_tiled((thread, n))
                # A step of P has 16 keys, in 8 values of a thread; its registers follow those of the step before.
                p_places[thread, p.layout(n)] = pv.tv_layout_A_tiled((thread, n % 8)) + ROWS * 16 * (n // 8)

    cute.compile(trace, options="--gpu-arch sm_90a")  # the machine need not have such a chip
    return s_places, p_places


def main() -> int:
    s_places, p_places = places()
    taken = {
        (thread, register): tiles.row_of(thread, register // 2 % 2)
        + ROWS * tiles.column_of(thread, register // 4 * 2 + register % 2)
        for thread in range(128)
        for register in range(VALUES)
    }
    masks, same = s_places == taken, p_places == s_places
    print(f"layout: an accumulator lies {'as' if masks else 'NOT as'} the masks take it to lie")
    print(f"layout: P's registers are {'' if same else 'NOT '}those of S in order")
    return 0 if masks and same else 1


if __name__ == "__main__":
    sys.exit(main())
