"""Rings of stages in shared memory: who fills a stage, who frees it, and the place of a role in the ring.

Each stage has two mbarriers. The loading warp waits for ``empty`` and fills the stage; ``full`` turns when all bytes have come.
The computing warps wait for ``full``, read the stage and arrive at ``empty``.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from tilewise.backends.hopper.kit import schedule
from tilewise.backends.hopper.kit.dtypes import I32


class PipelineState(NamedTuple):
    """The place of a role in a ring: the stage, and the phase of its barrier that the role waits for next."""

    index: I32
    phase: I32

    def advance(self, stages: int, step: int = 1) -> PipelineState:
        """The place ``step`` stages later, at most a round."""
        return PipelineState(*schedule.advance(self.index, self.phase, stages, step))


def new_reader() -> PipelineState:
    """The first place of a role that waits for full stages."""
    return PipelineState(I32(0), I32(0))


def new_writer() -> PipelineState:
    """The first place of a role that waits for empty stages: a new barrier lets phase 1 pass at once."""
    return PipelineState(I32(0), I32(1))


def acquire(barriers: cute.Pointer, state: PipelineState) -> None:
    """Waits until the barrier of the state's stage turns."""
    # Partner: for `full` the bytes that `fetch` expects, for `empty` the `release` of every computing warp.
    cute.arch.mbarrier_wait(barriers + state.index, state.phase)


def release(empty: cute.Pointer) -> None:
    """One thread of a computing warp says that the warp is done with a stage."""
    with cute.arch.elect_one():
        # `empty` counts warps, not threads: the storage's init_barriers gave it four for each warpgroup.
        cute.arch.mbarrier_arrive(empty)


def fetch(info: cpasync.TmaInfo, g, s, size: int, full, empty, phase) -> None:
    """Waits until a stage is empty, then starts a TMA copy of ``size`` bytes into it; ``full`` turns when all have come.

    A box is always whole: elements outside the tensor arrive as zeros, and their bytes count.
    """
    cute.arch.mbarrier_wait(empty, phase)
    with cute.arch.elect_one():
        # Before the copy, so that no bytes come that the barrier does not expect; this is its only arrival.
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    cute.copy(info.atom, g, s, tma_bar_ptr=full)
