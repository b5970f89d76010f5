"""The turns of the forward's computing warpgroups, and blocks that a warpgroup leaves out (docs/decisions.md#hopper-ping-pong)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.storage import ForwardStorage
from tilewise.backends.hopper.kit import pair_bias
from tilewise.backends.hopper.kit.ring import PipelineState, acquire, release


def pingpong_wait(w, config: Config) -> None:
    """Waits for the warpgroup before this one; the last one gives warpgroup 0 its first turn."""
    if config.tiles.pingpong:
        cute.arch.barrier(barrier_id=1 + config.tiles.warpgroups + w, number_of_threads=256)


def pingpong_signal(w, config: Config) -> None:
    """Lets the next warpgroup begin its products."""
    warpgroups = config.tiles.warpgroups
    if config.tiles.pingpong:
        cute.arch.barrier_arrive(barrier_id=1 + warpgroups + (w + 1) % warpgroups, number_of_threads=256)


@cute.jit
def first_turn(w, config: cutlass.Constexpr):
    """The last warpgroup lets warpgroup 0 begin."""
    if w == config.tiles.warpgroups - 1:
        pingpong_signal(w, config)


@cute.jit
def skip(
    hidden, operands, state: PipelineState, w, smem: ForwardStorage, config: cutlass.Constexpr,
    turn: cutlass.Constexpr,
):  # fmt: skip
    """Leaves out a tile's first block if the warpgroup sees nothing of it: gives back K's stages, that of a bias by pair, and its turn.

    V's stages come after the next K. Returns the state that follows.
    """
    if hidden > 0:
        if cutlass.const_expr(turn):
            pingpong_wait(w, config)
            pingpong_signal(w, config)
            if cutlass.const_expr(config.score == "bias"):
                # A stage that is released before its bytes came would be filled twice at once.
                pair_bias.acquire_tile(operands.bias)
                pair_bias.release_tile(operands.bias, config.tiles.bias_stages)
        for _ in cutlass.range_constexpr(config.tiles.k_stages if turn else config.tiles.v_stages):
            state = give_back(state, smem, config)
    return state


def give_back(state: PipelineState, smem: ForwardStorage, config: Config) -> PipelineState:
    """Releases a stage that is not needed, once it is full. Returns the next state."""
    acquire(smem.full, state)  # a stage that was released before its bytes came would be filled twice at once
    release(smem.empty + state.index)
    return state.advance(config.tiles.stages)
