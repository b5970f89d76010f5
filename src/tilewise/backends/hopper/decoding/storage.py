"""The shared memory of a decoding CTA: the blocks of K and of V, and barriers."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ALIGNMENT
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.decoding.params import PoolMaps
from tilewise.backends.hopper.kit.dtypes import ELEMENT


class DecodingStorage(NamedTuple):
    """The tiles and barriers of a CTA in shared memory.

    Attributes:
        k, v: (tile_n, width), (width, tile_n) and the stage.
        full_k, full_v, empty: barriers of each stage: load -> compute, and back.
        told: two words, in turn for what a CTA has of shared sequences: whether it is the last one that has had a part of the sequence.
    """

    k: cute.Tensor
    v: cute.Tensor
    full_k: cute.Pointer
    full_v: cute.Pointer
    empty: cute.Pointer
    told: cute.Pointer


def allocate(maps: PoolMaps, config: DecodingConfig) -> DecodingStorage:
    """The storage, in the order in which :attr:`DecodingTiles.shared` counts it."""
    allocator, stages = cutlass.utils.SmemAllocator(), config.tiles.stages
    full = allocator.allocate_array(cutlass.Int64, config.tiles.barriers + 1)
    k, v = (
        allocator.allocate_tensor(ELEMENT[config.dtype], layout.outer, ALIGNMENT, layout.inner)
        for layout in (maps.k.smem_layout, maps.v.smem_layout)
    )
    return DecodingStorage(k, v, full, full + stages, full + 2 * stages, full + 3 * stages)


@cute.jit
def init_barriers(smem: DecodingStorage, config: cutlass.Constexpr):
    """One thread sets how many arrivals turn each barrier; then every thread sees them."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for n in cutlass.range_constexpr(config.tiles.stages):
                cute.arch.mbarrier_init(smem.full_k + n, 1)  # the loading warp, and the bytes of a block
                cute.arch.mbarrier_init(smem.full_v + n, 1)
                cute.arch.mbarrier_init(smem.empty + n, 4)  # every computing warp
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
