"""The shared memory of the forward kernel: tiles, the ring, and barriers."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ALIGNMENT
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.params import TensorMaps
from tilewise.backends.hopper.kit.dtypes import ELEMENT
from tilewise.backends.hopper.kit.scheduler import MAILBOX_WORDS

WORDS = 2  # of 64 bits, which hold the bits of a stage's keys


class ForwardStorage(NamedTuple):
    """The tiles and barriers of a CTA in shared memory.

    Attributes:
        q, o: (64, width), (64, width_o) and the tile: a tile of O takes the place of the Q that it came from.
        k, v: ``Tiles.k_box``, ``Tiles.v_box`` and the stage: a stage holds a block of K or of V, or a part of one.
        full, empty: barriers of each stage of the ring: load -> compute, and back.
        q_full, q_empty: barriers of each tile of Q: load -> compute, and store (or compute) -> load.
        o_full: barriers of each tile of O: compute -> store.
        unread: a word that nobody reads, written to hold instructions in place.
        mailboxes: where tiles come from a queue: which tile each tile of Q belongs to.
        bias: (64, tile_n, stage): the tiles of a bias by pair, one ring after the other.
        words: of each stage of the ring a bit for each key of a list that is kept, as four words.
        bias_full, bias_empty: barriers of each of them: load -> compute, and back.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer
    o_full: cute.Pointer
    unread: cute.Pointer
    mailboxes: cute.Pointer
    bias: cute.Tensor | None = None
    bias_full: cute.Pointer | None = None
    bias_empty: cute.Pointer | None = None
    words: cute.Pointer | None = None


def allocate(maps: TensorMaps, config: Config) -> ForwardStorage:
    """The storage in the order of :class:`SharedMemory`; V's stages are K's, and O's tiles are Q's, with other layouts."""
    allocator, tiles = cutlass.utils.SmemAllocator(), config.tiles
    mailbox_words = MAILBOX_WORDS * tiles.q_tiles if config.queued else 0
    mailbox_words += WORDS * tiles.stages if config.selected else 0
    full = allocator.allocate_array(cutlass.Int64, tiles.barriers + 1 + mailbox_words)
    q, k = (
        allocator.allocate_tensor(ELEMENT[config.dtype], layout.outer, ALIGNMENT, layout.inner)
        for layout in (maps.q.smem_layout, maps.k.smem_layout)
    )

    def seen_as(tensor: cute.Tensor, layout) -> cute.Tensor:
        return cute.make_tensor(cute.recast_ptr(tensor.iterator, layout.inner), layout.outer)

    empty, q_full = full + tiles.stages, full + 2 * tiles.stages
    q_empty, o_full = q_full + tiles.q_tiles, q_full + 2 * tiles.q_tiles
    v, o = seen_as(k, maps.v.smem_layout), seen_as(q, maps.o.smem_layout)
    unread, mailboxes = full + tiles.barriers, full + tiles.barriers + 1
    storage = ForwardStorage(q, k, v, o, full, empty, q_full, q_empty, o_full, unread, mailboxes)
    if config.selected:
        return storage._replace(words=mailboxes)
    if config.score != "bias":
        return storage
    layout, bias_full = maps.bias.smem_layout, q_full + 3 * tiles.q_tiles
    bias = allocator.allocate_tensor(ELEMENT[config.dtype], layout.outer, ALIGNMENT, layout.inner)
    return storage._replace(bias=bias, bias_full=bias_full, bias_empty=bias_full + tiles.bias_tiles)


@cute.jit
def init_barriers(smem: ForwardStorage, config: cutlass.Constexpr):
    """One thread sets how many arrivals turn each barrier; then every thread sees them."""
    tiles = config.tiles
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for n in cutlass.range_constexpr(tiles.stages):
                # The loading warp, and the bytes of a block; or every thread that gathers, and each of its warps.
                cute.arch.mbarrier_init(smem.full + n, 128 + 4 if config.selected else 1)
                cute.arch.mbarrier_init(smem.empty + n, 4 * tiles.warpgroups)  # every computing warp
            for n in cutlass.range_constexpr(tiles.q_tiles):
                cute.arch.mbarrier_init(smem.q_full + n, 1)  # the loading warp, and the bytes of Q
                cute.arch.mbarrier_init(
                    smem.q_empty + n, 1 if config.stores else 4
                )  # a storing warp, or four computing
                cute.arch.mbarrier_init(smem.o_full + n, 128)  # every thread of the warpgroup that wrote O
            for n in cutlass.range_constexpr(tiles.bias_tiles):
                cute.arch.mbarrier_init(smem.bias_full + n, 1)  # the loading warp, and the bytes of a tile
                cute.arch.mbarrier_init(smem.bias_empty + n, 4)  # every warp of the warpgroup that reads it
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
