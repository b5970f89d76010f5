"""The copies of latent attention: a score group brings the key tiles of its stage, the warpgroups of the values bring Q once."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.latent.config import BOXES, CHUNK, CHUNKS, KEYS, VALUE_GROUPS, LatentConfig
from tilewise.backends.hopper.latent.convert import convert_tile
from tilewise.backends.hopper.latent.gather import gather_tile
from tilewise.backends.hopper.latent.params import KeyMaps, LatentParams
from tilewise.backends.hopper.latent.storage import ELEMENTS, LatentStorage, part_of, stage_of
from tilewise.backends.hopper.latent.tiles import LatentTile, place_of, shift_of

# -- Keys ----------------------------------------------------------------------------------------------------------


def bring_tile(
    maps: KeyMaps, smem: LatentStorage, n, page, kept, tile: LatentTile, params: LatentParams, config: LatentConfig
) -> None:
    """Brings key tile n, which lies in ``page``, if there is such a tile; every thread of its score group calls this.

    ``kept``: the two words that get a bit for each key of a tile of selected ones, and None of others.
    """
    if config.selected:
        gather_tile(smem, n, kept, tile, params)
    elif config.e4m3:
        convert_tile(smem, n, page, tile, params, config)
    else:
        load_tile(maps, smem, n, page, tile, params)


@cute.jit
def load_tile(maps: KeyMaps, smem: LatentStorage, n, page, tile: LatentTile, params: LatentParams):
    """The first warp of a warpgroup brings key tile n, which lies in ``page``, if there is such a tile.

    It comes in the parts whose places become free one by one.
    """
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0 and n < tile.last:
        stage, phase = stage_of(n - tile.first)
        row = n * KEYS % params.seqlen_k + shift_of(n, tile)
        for part in cutlass.range_constexpr(len(BOXES)):
            number = part_of(stage, part)
            # The warps of the values, which read V and P of the tile before in this stage.
            cute.arch.mbarrier_wait(smem.empty + number, 1 - phase)
            with cute.arch.elect_one():
                size = ELEMENT_BYTES * ELEMENTS * len(BOXES[part])
                cute.arch.mbarrier_arrive_and_expect_tx(smem.full + number, size)
            copy_box(maps, smem, (row, tile.key_head, page), part, stage)


def page_of(n, tile: LatentTile, params: LatentParams, config: LatentConfig) -> I32:
    """The page of key tile n; of a tile past the last, of whatever stands there. Selected keys lie in none."""
    if config.selected:
        return I32(0)
    table = params.extra.block_table
    entry = PICK.smaller(n * KEYS // params.seqlen_k, cute.size(table, mode=[1]) - 1)
    sequence = PICK.smaller(tile.sequence, cute.size(table, mode=[0]) - 1)
    # The table is checked by no host: a number outside the pool must not become an address.
    return I32(PICK.larger(PICK.smaller(table[sequence, entry], params.extra.num_pages - 1), 0))


def copy_box(maps: KeyMaps, smem: LatentStorage, place: tuple, part: int, stage) -> None:
    """Starts the copy of some chunks of a key tile into their place in a stage; rows outside the page arrive as zeros."""
    row, head, page = place
    chunks = BOXES[part]
    info, count = maps.latent if len(chunks) > 1 else maps.rotary, len(chunks)
    matrix = cute.domain_offset((row, (0, chunks[0])), info.tma_tensor[None, None, head, page])
    # One box of 64 keys by 64 columns by so many chunks.
    g = cute.local_tile(matrix, (KEYS, (CHUNK, count)), (0, 0))
    layout = cute.make_layout(((8, 8), (CHUNK, count)), stride=((CHUNK, 8 * CHUNK), (1, ELEMENTS)))
    s = cute.make_tensor(smem.k.iterator + ELEMENTS * (CHUNKS * stage + chunks[0]), layout)
    whole = cute.make_layout(1)  # one CTA, no multicast
    s, g = cpasync.tma_partition(info.atom, 0, whole, cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))
    cute.copy(info.atom, g, s, tma_bar_ptr=smem.full + part_of(stage, part))


# -- Queries -------------------------------------------------------------------------------------------------------

PIECES = CHUNK // 8  # of 16 bytes in a chunk's row
LOADERS = 128 * VALUE_GROUPS // ROWS  # threads that share a row of Q


def load_queries(smem: LatentStorage, w, tile: LatentTile, params: LatentParams) -> None:
    """The threads of the values bring the 64 rows of Q; rows that the sequence does not have are zeros.

    By ordinary loads, as the rows of a tile are any heads of any queries, and once for all key tiles.
    """
    thread = w * 128 + cute.arch.thread_idx()[0] % 128
    row = thread // LOADERS
    place, inside = place_of(row, tile, params)
    pieces = [thread % LOADERS + LOADERS * n for n in range(PIECES * CHUNKS // LOADERS)]
    # All are on their way at once: no accumulator has the registers yet.
    found = [take_piece(params.q, place, inside, piece) for piece in pieces]
    for piece, words in zip(pieces, found, strict=True):
        put_piece(smem.q, row, piece, words)
    # wgmma reads shared memory by another path: what threads wrote must be visible there.
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(smem.q_full)  # the score groups


def take_piece(q: cute.Tensor, place: tuple, inside, piece) -> tuple:
    """The eight numbers of a row of Q from column ``8 piece`` on, in four words; zeros where there is no such row."""
    _, head, i = place
    code = (
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@p ld.global.nc.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r1}]; }"
    )
    # Row 0 stands for one that is not there, so that every address is inside the tensor.
    i, flag = cutlass.select_(inside, i, I32(0)), cutlass.select_(inside, I32(1), I32(0))
    pointer = q[0, i, head, None].iterator + 8 * piece
    return cute.arch.inline_ptx(code, write_only_types=[I32] * 4, read_only_args=[flag, pointer.toint()])


def put_piece(q: cute.Tensor, row, piece, words: tuple) -> None:
    """Writes a piece of a row into Q's chunks: the 16 bytes of a row of 128 change places as the row's last three bits say."""
    chunk, within = piece // PIECES, piece % PIECES
    at = q.iterator.toint() + ELEMENT_BYTES * ELEMENTS * chunk + ELEMENT_BYTES * CHUNK * row + 16 * (within ^ (row % 8))
    code = "st.shared.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};"
    cute.arch.inline_ptx(code, read_only_args=[I32(at), *words])
