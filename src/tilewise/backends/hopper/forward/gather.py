"""The warpgroup that gathers: Q of a query's heads by the copy engine, and the rows of K and V that the query selected by cp.async.

A warp brings 32 rows of a block, of which each lane looks one up. Neighbouring lanes copy a row, 16 bytes each. A stage is full when the
copies of all threads have come, and every warp has said which of its keys are kept.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ELEMENT_BYTES
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.load import fetch_queries
from tilewise.backends.hopper.forward.params import ForwardParams, TensorMaps
from tilewise.backends.hopper.forward.query_tiles import block_at, query_rows, rounds_of, tile_of
from tilewise.backends.hopper.forward.storage import WORDS, ForwardStorage
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.instructions import both, put_words
from tilewise.backends.hopper.kit.lists import PIECE, WARP, arrive_with_copies, copy_piece, list_of, look_up
from tilewise.backends.hopper.kit.ring import PipelineState, new_writer
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import QueryTile

CHUNK = 64  # columns that lie side by side in shared memory: the 128 bytes of the swizzle


@cute.jit
def gather(maps: TensorMaps, smem: ForwardStorage, params: ForwardParams, config: cutlass.Constexpr):
    """Four warps bring the Q of every tile, and its key blocks."""
    state, q_state = new_writer(), new_writer()  # in the ring of K and V, and in the tiles of Q
    for round_ in cutlass.range(rounds_of(params, config), unroll=1):
        query_tile = tile_of(round_, params, config)
        state = gather_tile(maps, smem, query_tile, state, q_state, params, config)
        q_state = q_state.advance(config.tiles.q_stages)


@cute.jit
def gather_tile(
    maps: TensorMaps, smem: ForwardStorage, query_tile: QueryTile, state: PipelineState, q_state: PipelineState,
    params: ForwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Brings a tile's Q and its key blocks in the order of :func:`schedule.loads`: K0 Q K1 V0 K2 V1 .. Vn. Returns the next state."""
    k, v = params.extra.rows_k, params.extra.rows_v
    row, word = rows_of(0, query_tile, params, config)
    state = bring_rows(k, row, word, smem, state, config)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        gQ, sQ = query_rows(maps.q, config.tiles.width, query_tile, smem.q)
        fetch_queries(maps, gQ, sQ, query_tile, q_state, smem, config)
    for step in cutlass.range(query_tile.stop - query_tile.start - 1, unroll=1):
        before = row
        row, word = rows_of(step + 1, query_tile, params, config)
        # K of the next block before V of this one: S of the next block is begun first (compute.both_products).
        state = bring_rows(k, row, word, smem, state, config)
        state = bring_rows(v, before, word, smem, state, config)
    return bring_rows(v, row, word, smem, state, config)


def rows_of(step, query_tile: QueryTile, params: ForwardParams, config: Config) -> tuple[I32, I32]:
    """``(row, word)`` of :func:`lists.look_up`, for a thread's place in the block of a step."""
    place = block_at(query_tile, step, params, config) * config.tiles.tile_n + cute.arch.thread_idx()[0] % 128
    row, word = (cute.make_rmem_tensor((1,), I32) for _ in range(2))
    look_up([place], list_of(query_tile.batch, params.extra), row, word, params.extra)
    return row[0], word[0]


def bring_rows(
    tensor: cute.Tensor, row, word, smem: ForwardStorage, state: PipelineState, config: Config
) -> PipelineState:
    """Starts the copies of a block's rows into the state's stage; ``word``: of K, the warp's keys that are kept. Returns the next state."""
    thread, tiles = cute.arch.thread_idx()[0] % 128, config.tiles
    warp, lane, pieces = thread // WARP, thread % WARP, ELEMENT_BYTES * tiles.width // PIECE
    cute.arch.mbarrier_wait(smem.empty + state.index, state.phase)  # every computing warp
    piece = lane % pieces
    for n in range(pieces):  # so many lanes have a row
        within = n * (WARP // pieces) + lane // pieces
        source = I32(cute.arch.shuffle_sync(row, within))
        copy_columns(tensor, source, smem, state.index, warp * WARP + within, piece, config)
    with cute.arch.elect_one():
        put_word(smem, state.index, warp, word)
        cute.arch.mbarrier_arrive(smem.full + state.index)  # the computing warps
    arrive_with_copies(smem.full + state.index)  # the same
    return state.advance(tiles.stages)


def put_word(smem: ForwardStorage, stage, warp, word) -> None:
    """Writes the bits of a warp's keys beside a stage."""
    put_words(cute.recast_ptr(smem.words + WORDS * stage, dtype=cutlass.Int32) + warp, [word])


def copy_columns(tensor: cute.Tensor, source, smem: ForwardStorage, stage, row, piece, config: Config) -> None:
    """Starts the copy of 16 bytes of a row of the tensor; those of a row of 128 change places as the row's last three bits say.

    Zeros stand for rows that are not there and for columns past the head dim.
    """
    tiles, each = config.tiles, PIECE // ELEMENT_BYTES
    inside = both(source >= 0, piece * each < cute.size(tensor, mode=[3]))
    # Row 0 and column 0 stand for what is not there, so that every address is inside the tensor.
    column = I32(cutlass.select_(inside, piece * each, I32(0)))
    place = tensor[0, PICK.larger(source, 0), 0, None].iterator.toint() + ELEMENT_BYTES * column
    chunk, within = piece * each // CHUNK, piece % (CHUNK // each)
    start = smem.k.iterator.toint() + ELEMENT_BYTES * (
        tiles.stage_elements * stage + tiles.tile_n * CHUNK * chunk + CHUNK * row
    )
    copy_piece(I32(start + PIECE * (within ^ (row % 8))), place, inside)
