"""A bias that each pair has of its own, added to a warpgroup's scores (:mod:`tilewise.backends.hopper.pair_bias`).

The copy engine brings it in tiles of 64 queries by tile_n keys, into a ring that each warpgroup has to itself: every one is read once. Four
8 × 8 matrices an instruction, a tile comes into registers in the order of the accumulator of S.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass.cute as cute

from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import both, choose, clamp
from tilewise.backends.hopper.kit.operands import OperandValues, load_register_steps
from tilewise.backends.hopper.kit.ring import PipelineState, acquire, release

HELD = 16  # columns of a thread whose biases are made fp32 numbers at once
LOG2_E, INF = math.log2(math.e), float("inf")
LARGEST = 3.4028234663852886e38  # of fp32
LEAST = -3.3895313892515355e38  # of bf16


def new_place(phase: int) -> cute.Tensor:
    """The place of a role in a ring, (2,) int32: the first stage, and the phase of its barrier that the role waits for: 0 of one that waits
    for full stages, 1 for empty ones."""
    # Registers, and no value that loops hand on: kernels without a bias are compiled to the same bits as before there was one.
    place = cute.make_rmem_tensor((2,), I32)
    put_place(place, PipelineState(I32(0), I32(phase)))
    return place


def put_place(place: cute.Tensor, state: PipelineState) -> None:
    """Moves a place."""
    place[0] = state.index
    place[1] = state.phase


def advance_place(place: cute.Tensor, stages: int) -> None:
    """Moves a place to the next stage of its ring."""
    put_place(place, PipelineState(place[0], place[1]).advance(stages))


class BiasRing(NamedTuple):
    """A warpgroup's ring of tiles, and its registers of one.

    Attributes:
        values: 64 × tile_n in the element type, in the order of the accumulator of S.
        place: that of the tile that is read next (:func:`new_place`).
        tiles: (64, tile_n, stage) in shared memory, those of all warpgroups.
        first: the first stage of this one.
        full, empty: barriers of the stages: load -> compute, and back.
    """

    values: cute.Tensor
    place: cute.Tensor
    tiles: cute.Tensor
    first: I32
    full: cute.Pointer
    empty: cute.Pointer


def acquire_tile(ring: BiasRing) -> I32:
    """Waits until the next tile is there; returns its stage."""
    stage = ring.first + ring.place[0]
    acquire(ring.full, PipelineState(stage, ring.place[1]))  # the loading warp
    return stage


def read_tile(ring: BiasRing, mma: cute.TiledMma) -> None:
    """Reads the next tile into registers; ``mma``: one whose operand A is 64 × tile_n in registers."""
    load_register_steps(ring.values, mma, ring.tiles[None, None, acquire_tile(ring)])


def release_tile(ring: BiasRing, stages: int) -> None:
    """Gives the tile that was read back, and goes on to the next one."""
    # Loads from shared memory end in no order with an arrival: whoever calls this has used what they brought
    # (docs/decisions.md#hopper-stage-release). One thread arrives for a warp, whose others may be behind it.
    cute.arch.sync_warp()
    release(ring.empty + (ring.first + ring.place[0]))
    advance_place(ring.place, stages)


class BlockBias(NamedTuple):
    """The biases of a thread's pairs in one block; ``values[r, c]``, fp32."""

    values: OperandValues

    # Both of these multiply by log2 e here: the bias comes in q's dtype as the caller has it, and is read once.

    def add(self, s: cute.Tensor, scale2) -> None:
        """Turns products into scores with their bias, in base 2."""
        for c in range(cute.size(s, mode=[1])):
            for r in range(2):
                value = self.values[r, c]
                # A mask may write the least number of a dtype where it means -inf. In base 2 that is beyond fp32, but a row of nothing
                # else sees its keys all the same: finite numbers stay finite.
                bias2 = choose(value == -INF, value, clamp(value * LOG2_E, LARGEST))
                s[r, c] = s[r, c] * scale2 + bias2

    def below(self, m2, r: int, columns: int) -> list:
        """The maximum less the bias, for each column of row r."""
        # Of a bias of -inf this is +inf, and its P 0; a number that leaves fp32 here is as far below any maximum that serves.
        return [m2 - self.values[r, c] * LOG2_E for c in range(columns)]


def block_bias(ring: BiasRing, acc: cute.Tensor, dtype: str) -> BlockBias:
    """The biases that were read last; ``acc``: the accumulator of S."""
    # Held: the tile is there before S is. Made as fp32 at once its numbers would take as many registers again as S.
    return BlockBias(OperandValues(ring.values, acc, dtype, held=HELD))


def natural(lse):
    """A row's lse, that of a row whose every bias is the least number among them."""
    # In base 2 that number was cut to fp32's own, which is another one in base e.
    return choose(both(lse < -0.69 * LARGEST, lse > -INF), F32(LEAST), lse)


def serves(m2):
    """Whether a row's maximum is one that :meth:`BlockBias.below` may be taken from: not -inf, and not the least number, beside which a
    bias is beyond fp32."""
    return F32(m2) > -LARGEST
