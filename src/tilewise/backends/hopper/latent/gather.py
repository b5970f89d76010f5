"""The copy of a key tile whose keys a query selected: a score group gathers their rows.

A tile has 64 places of the query's list of keys, which is in order. Eight threads copy a row, 16 bytes each of every chunk of 64 columns
(cp.async), and bring four rows. Their barrier counts a thread once its copies have come. Places outside what the query sees become zeros.
A key that stands twice in a list is kept at its first place: a tile has a bit for each place, the same in all warps.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.bits import is_set
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.instructions import both, choose
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.softmax import INF
from tilewise.backends.hopper.latent.config import BOXES, CHUNK, CHUNKS, KEYS
from tilewise.backends.hopper.latent.convert import Source, place_of_row
from tilewise.backends.hopper.latent.params import LatentParams
from tilewise.backends.hopper.latent.storage import ELEMENTS, LatentStorage, part_of, stage_of
from tilewise.backends.hopper.latent.tiles import WARP, LatentTile, QueryList, entry_at, key_at

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
                    copy_piece(smem, stage, chunk, source)
            arrive_with_copies(smem.full + part_of(stage, part))  # both score and value


def sources_of(n, kept: cute.Tensor, tile: LatentTile, params: LatentParams) -> list[Source]:
    """The rows of tile n that a thread brings; ``kept`` gets the tile's bits.

    Each lane looks up two places, for all threads of its warp.
    """
    thread, found = cute.arch.thread_idx()[0] % 128, []
    for word in range(KEYS // WARP):
        row, seen, first = look_up(n * KEYS + word * WARP + thread % WARP, tile, params)
        kept[word] = I32(cute.arch.vote_ballot_sync(both(seen, first)))
        found.append(cutlass.select_(seen, row, I32(-1)))
    sources = []
    for start in range(0, ROWS, APART):
        row = I32(cute.arch.shuffle_sync(found[start // WARP], start % WARP + thread // LANES))
        # Row 0 stands for one that is not there, so that every address is inside the pool.
        place = place_of_row(params, PICK.larger(row, 0), 0, tile.key_head) + CHUNK // LANES * ELEMENT_BYTES * (
            thread % LANES
        )
        sources.append(Source(start + thread // LANES, thread % LANES, place, row >= 0))
    return sources


def look_up(place, tile: LatentTile, params: LatentParams) -> tuple:
    """``(row, seen, first)`` of a place of the list: the row of the pool, whether the query sees it, and that no earlier place has it."""
    line = QueryList(*(params.tokens[tile.sequence, x] for x in range(2)), tile.lo, tile.hi)
    key, there = key_at(place, line, params)
    number = place // params.block
    entry, before = (entry_at(x, line, params) for x in (number, number - 1))
    seen = both(there, both(key >= line.lo, key < line.hi))
    return I32(line.origin + key), seen, cutlass.select_(entry != before, number >= 0, number == 0)


def copy_piece(smem: LatentStorage, stage, chunk: int, source: Source) -> None:
    """Starts the copy of 16 bytes of a row, or of zeros: those of a row of 128 change places as the row's last three bits say."""
    start = smem.k.iterator.toint() + ELEMENT_BYTES * (ELEMENTS * (CHUNKS * stage + chunk) + CHUNK * source.row)
    at = I32(start + 16 * (source.lane ^ (source.row % 8)))
    code = "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};"
    size = cutlass.select_(source.inside, I32(16), I32(0))
    cute.arch.inline_ptx(code, read_only_args=[at, source.place + ELEMENT_BYTES * CHUNK * chunk, size])


def arrive_with_copies(barrier: cute.Pointer) -> None:
    """A thread arrives at a barrier once all copies have come that it has started so far."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", read_only_args=[barrier.toint()])


@cute.jit
def hide_others(s: cute.Tensor, kept: cute.Tensor):
    """Sets the scores of keys whose bit is not set to -inf; ``s`` is the view (2, 16) of the accumulator of a tile."""
    if (kept[0] & kept[1]) != -1:
        shift = cute.arch.thread_idx()[0] % 4 * 2  # the thread's first column
        words = [kept[n] >> shift for n in range(KEYS // WARP)]
        for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
            for r in cutlass.range_constexpr(2):
                s[r, c] = choose(is_set(words, 8 * (c // 2) + c % 2), s[r, c], -INF)
