"""The products of a block, whose K and V take a stage of the ring each, or several: K by columns, V by keys (``tiles.Tiles.k_stages``).

Head dims above 256 leave shared memory no whole block beside the tiles of Q. Each part of K is given back as soon as the next one's
product has begun.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.storage import ForwardStorage
from tilewise.backends.hopper.kit.ring import PipelineState, acquire, release
from tilewise.backends.hopper.kit.tiles import begin_product

STEP = 16  # columns of the left operand that one wgmma takes


def begin_scores(operands, n_q, state: PipelineState, smem: ForwardStorage, config: Config) -> PipelineState:
    """Begins S = Q Kᵀ, 64 × tile_n, fp32, of a block whose first part is there. Returns the state at its last part, which is still held."""
    for part in range(config.tiles.k_stages):
        before = state  # held until its product is done
        if part:
            state = state.advance(config.tiles.stages)
            acquire(smem.full, state)  # K: the loading warp
        q, k = operands.q[None, None, None, n_q], operands.k[None, None, None, state.index]
        begin_product(operands.qk, operands.s, q, k, overwrite=part == 0, first=part * config.tiles.k_box[1] // STEP)
        if part:
            warpgroup.wait_group(1)  # the product of the part before; nothing older is under way
            release(smem.empty + before.index)  # K: the loading warp
    return state


def begin_values(operands, state: PipelineState, smem: ForwardStorage, config: Config) -> None:
    """Begins O += P V, 64 × width_o, fp32, of a block: a group of products for each part."""
    for part in range(config.tiles.v_stages):
        state = state.advance(config.tiles.stages) if part else state
        acquire_keys(smem, state, config)  # V: the loading warp
        v, first = operands.v[None, None, None, state.index], part * config.tiles.v_box[1] // STEP
        begin_product(operands.pv, operands.o, operands.p, v, overwrite=False, first=first)


def acquire_keys(smem: ForwardStorage, state: PipelineState, config: Config) -> None:
    """Waits until a stage is full."""
    acquire(smem.full, state)
    if config.selected:
        cute.arch.fence_view_async_shared()  # what threads copied, wgmma reads by another path


def release_values(state: PipelineState, smem: ForwardStorage, config: Config) -> None:
    """Gives back the V of a block."""
    for part in range(config.tiles.v_stages):
        state = state.advance(config.tiles.stages) if part else state
        release(smem.empty + state.index)  # V: the loading warp
