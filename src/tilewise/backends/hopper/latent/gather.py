"""The copy of a key tile whose keys a query selected: a score group gathers their rows.

A tile has 64 places of the query's list of keys (kit/lists.py). Eight threads copy a row, 16 bytes each of every chunk of 64 columns
(cp.async), and bring four rows. Their barrier counts a thread once its copies have come. Places outside what the query sees become zeros.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.lists import PIECE, WARP, QueryList, arrive_with_copies, copy_piece, look_up
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.latent.config import BOXES, CHUNK, CHUNKS, KEYS
from tilewise.backends.hopper.latent.convert import Source, place_of_row
from tilewise.backends.hopper.latent.params import LatentParams
from tilewise.backends.hopper.latent.storage import ELEMENTS, LatentStorage, part_of, stage_of
from tilewise.backends.hopper.latent.tiles import LatentTile

LANES = 8  # threads that share a row: 16 bytes each of a chunk
APART = 128 // LANES  # rows between those of a thread


@cute.jit
def gather_tile(smem: LatentStorage, n, kept: cute.Tensor, tile: LatentTile, params: LatentParams):
    """A score group brings the n-th 64 places of a list, if there are such, in the parts that become free one by one."""
    if n < tile.last:
        stage, phase = stage_of(n - tile.first)
        sources = sources_of(n, kept, tile, params)
        for part in cutlass.range_constexpr(len(BOXES)):
            # The warps of the values, which read V and P of the tile before in this stage.
            cute.arch.mbarrier_wait(smem.empty + part_of(stage, part), 1 - phase)
            for chunk in BOXES[part]:
                for source in sources:
                    copy_columns(smem, stage, chunk, source)
            arrive_with_copies(smem.full + part_of(stage, part))  # both score and value


def sources_of(n, kept: cute.Tensor, tile: LatentTile, params: LatentParams) -> list[Source]:
    """The rows of tile n that a thread brings; ``kept`` gets the tile's bits.

    Each lane looks up two places, for all threads of its warp.
    """
    thread, found = cute.arch.thread_idx()[0] % 128, cute.make_rmem_tensor((KEYS // WARP,), I32)
    line = QueryList(*(params.extra.tokens[tile.sequence, x] for x in range(2)), tile.lo, tile.hi)
    places = [n * KEYS + word * WARP + thread % WARP for word in range(KEYS // WARP)]
    look_up(places, line, found, kept, params.extra)
    sources = []
    for start in range(0, ROWS, APART):
        row = I32(cute.arch.shuffle_sync(found[start // WARP], start % WARP + thread // LANES))
        # Row 0 stands for one that is not there, so that every address is inside the pool.
        place = place_of_row(params, PICK.larger(row, 0), 0, tile.key_head) + PIECE * (thread % LANES)
        sources.append(Source(start + thread // LANES, thread % LANES, place, row >= 0))
    return sources


def copy_columns(smem: LatentStorage, stage, chunk: int, source: Source) -> None:
    """Starts the copy of 16 bytes of a row of a chunk: those of a row of 128 change places as the row's last three bits say."""
    start = smem.k.iterator.toint() + ELEMENT_BYTES * (ELEMENTS * (CHUNKS * stage + chunk) + CHUNK * source.row)
    at = I32(start + PIECE * (source.lane ^ (source.row % 8)))
    copy_piece(at, source.place + ELEMENT_BYTES * CHUNK * chunk, source.inside)
