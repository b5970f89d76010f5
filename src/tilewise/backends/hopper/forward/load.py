"""The warps that copy: one loads Q and the blocks of K and V, the others store O, each for one computing warpgroup."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.pages import boxes_of, fetch_parts, key_blocks
from tilewise.backends.hopper.forward.params import ForwardParams, TensorMaps
from tilewise.backends.hopper.forward.query_tiles import (
    block_at,
    packed_tile,
    place_packed,
    query_rows,
    rounds_of,
    tile_of,
)
from tilewise.backends.hopper.forward.storage import ForwardStorage
from tilewise.backends.hopper.kit import packed
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.instructions import put_words
from tilewise.backends.hopper.kit.pair_bias import new_place, put_place
from tilewise.backends.hopper.kit.ring import PipelineState, fetch, new_reader, new_writer
from tilewise.backends.hopper.kit.scheduler import MAILBOX_WORDS, PICK, read_tile
from tilewise.backends.hopper.kit.tiles import QueryTile, tma_tiles

# -- Load ----------------------------------------------------------------------------------------------------------


@cute.jit
def load(maps: TensorMaps, smem: ForwardStorage, params: ForwardParams, config: cutlass.Constexpr):
    """One warp loads the Q of every tile, and its key blocks.

    Tiles of packed sequences, and of masks with bits, differ too much to be dealt out: after its first one, a CTA takes what comes
    next of all. The tile is published with its Q, so that the other roles need not look for it. A tile of no sequence ends them.
    """
    # A loop of its own, and no scheduler.take_tiles: docs/decisions.md#hopper-forward-loops.
    state, q_state = new_writer(), new_writer()  # in the ring of K and V, and in the tiles of Q
    bias_place = new_place(phase=1) if config.score == "bias" else None
    if cutlass.const_expr(config.queued):
        taken, since = packed_tile(I32(cute.arch.block_idx()[0]), packed.at_first(), params, config)
        late = config.form == "bits"
        while taken.sequence >= 0:
            following = I32(0) if cutlass.const_expr(late) else packed.take(params.queue)
            query_tile = place_packed(taken, params, config)
            if cutlass.const_expr(config.tiles.staged):
                state = load_staged_tile(maps, smem, query_tile, state, q_state, params, config)
            elif cutlass.const_expr(config.paged):
                state = load_paged_tile(maps, smem, query_tile, state, q_state, params, config)
            else:
                state = load_tile(maps, smem, query_tile, state, q_state, bias_place, params, config)
            if cutlass.const_expr(late):
                # The ring is full and its blocks take longer than the queue, so that nobody waits; and the fewer tiles a CTA
                # holds, the more evenly all end.
                following = packed.take(params.queue)
            q_state = q_state.advance(config.tiles.q_stages)
            taken, since = packed_tile(following, since, params, config)
        publish(taken, smem, q_state, config)
        for w in cutlass.range_constexpr(config.tiles.warpgroups):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(smem.q_full + w * config.tiles.q_stages + q_state.index)
    else:
        for round_ in cutlass.range(rounds_of(params, config), unroll=1):
            query_tile = tile_of(round_, params, config)
            if cutlass.const_expr(config.tiles.staged):
                state = load_staged_tile(maps, smem, query_tile, state, q_state, params, config)
            else:
                state = load_tile(maps, smem, query_tile, state, q_state, bias_place, params, config)
            q_state = q_state.advance(config.tiles.q_stages)


def publish(tile: packed.PackedTile, smem: ForwardStorage, q_state: PipelineState, config: Config) -> None:
    """Writes a packed tile into every warpgroup's mailbox, as soon as the Q before has been read."""
    for w in range(config.tiles.warpgroups):
        n_q = w * config.tiles.q_stages + q_state.index
        cute.arch.mbarrier_wait(smem.q_empty + n_q, q_state.phase)  # whoever read the tile of Q that was here
        with cute.arch.elect_one():
            put_words(smem.mailboxes + MAILBOX_WORDS * n_q, tile)
    cute.arch.sync_warp()  # the thread elected to arrive next may be another one


def receive(smem: ForwardStorage, n_q, full: cute.Pointer, phase) -> packed.PackedTile:
    """The packed tile that a tile of Q or O belongs to, once ``full`` (q_full or o_full) says that this is there."""
    cute.arch.mbarrier_wait(full + n_q, phase)
    return read_tile(smem.mailboxes + MAILBOX_WORDS * n_q)


@cute.jit
def load_tile(
    maps: TensorMaps, smem: ForwardStorage, query_tile: QueryTile, state: PipelineState, q_state: PipelineState,
    bias_place: cute.Tensor | None, params: ForwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """Loads a tile's Q and its key blocks in the order of :func:`schedule.loads`: K0 Q K1 V0 K2 V1 .. Vn; a bias by pair after each V but
    the last, and after Q.

    ``state`` is the place in the ring of K and V, ``q_state`` that in the tiles of Q, ``bias_place`` that in the rings of the bias; returns
    the next one of K and V.
    """
    tiles = config.tiles
    k_bytes = tiles.element_bytes * tiles.tile_n * tiles.width
    v_bytes = tiles.element_bytes * tiles.tile_n * tiles.width_v
    head_k = query_tile.head // params.group
    # (box, tile) in global memory and (box, stage) in shared memory.
    gQ, sQ = query_rows(maps.q, tiles.width, query_tile, smem.q)
    gK, sK = tma_tiles(maps.k, (tiles.tile_n, tiles.width), (None, 0), head_k, query_tile.keys, smem.k)
    gV, sV = tma_tiles(maps.v, (tiles.width_v, tiles.tile_n), (0, None), head_k, query_tile.keys, smem.v)

    n = block_at(query_tile, 0, params, config)
    state = fetch_block(maps.k, gK[None, n], sK, k_bytes, state, smem, config)
    if cutlass.const_expr(config.queued):
        publish(packed.PackedTile(query_tile.batch, query_tile.row, query_tile.head), smem, q_state, config)
    fetch_queries(maps, gQ, sQ, query_tile, q_state, smem, config)
    fetch_bias(maps, query_tile, n, bias_place, smem, config)
    for step in cutlass.range(query_tile.stop - query_tile.start - 1, unroll=1):
        n, before = block_at(query_tile, step + 1, params, config), block_at(query_tile, step, params, config)
        # K of the next block before V of this one: S of the next block is begun first (compute.both_products).
        state = fetch_block(maps.k, gK[None, n], sK, k_bytes, state, smem, config)
        state = fetch_block(maps.v, gV[None, before], sV, v_bytes, state, smem, config)
        fetch_bias(maps, query_tile, n, bias_place, smem, config)
    n = block_at(query_tile, query_tile.stop - query_tile.start - 1, params, config)
    return fetch_block(maps.v, gV[None, n], sV, v_bytes, state, smem, config)


@cute.jit
def load_paged_tile(
    maps: TensorMaps, smem: ForwardStorage, query_tile: QueryTile, state: PipelineState, q_state: PipelineState,
    params: ForwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """:func:`load_tile` where keys lie in pages: the boxes of a block are found once, for its K and for its V."""
    gQ, sQ = query_rows(maps.q, config.tiles.width, query_tile, smem.q)
    blocks = key_blocks(maps, smem, query_tile, params, config)

    boxes = boxes_of(block_at(query_tile, 0, params, config), query_tile, params, config)
    state = fetch_parts(blocks.k, boxes, state, smem, config)
    publish(packed.PackedTile(query_tile.batch, query_tile.row, query_tile.head), smem, q_state, config)
    fetch_queries(maps, gQ, sQ, query_tile, q_state, smem, config)
    for step in cutlass.range(query_tile.stop - query_tile.start - 1, unroll=1):
        before, n = boxes, block_at(query_tile, step + 1, params, config)
        boxes = boxes_of(n, query_tile, params, config)
        state = fetch_parts(blocks.k, boxes, state, smem, config)
        state = fetch_parts(blocks.v, before, state, smem, config)
    return fetch_parts(blocks.v, boxes, state, smem, config)


@cute.jit
def load_staged_tile(
    maps: TensorMaps, smem: ForwardStorage, query_tile: QueryTile, state: PipelineState, q_state: PipelineState,
    params: ForwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """:func:`load_tile` where a block takes several stages: of K so many columns each, of the tile's columns of V so many keys."""
    tiles, head_k = config.tiles, query_tile.head // params.group
    gQ, sQ = query_rows(maps.q, tiles.width, query_tile, smem.q)
    # (box, key block, part), and for V, whose parts are neighbours as blocks are, (box, part of any block).
    gK, sK = tma_tiles(maps.k, tiles.k_box, (None, None), head_k, query_tile.keys, smem.k)
    gV, sV = tma_tiles(maps.v, tiles.v_box, (query_tile.piece, None), head_k, query_tile.keys, smem.v)

    n = block_at(query_tile, 0, params, config)
    state = fetch_k_stages(maps, gK, sK, n, state, smem, config)
    if cutlass.const_expr(config.queued):
        head = query_tile.head * tiles.pieces + query_tile.piece
        publish(packed.PackedTile(query_tile.batch, query_tile.row, head), smem, q_state, config)
    fetch_queries(maps, gQ, sQ, query_tile, q_state, smem, config)
    for step in cutlass.range(query_tile.stop - query_tile.start - 1, unroll=1):
        n, before = block_at(query_tile, step + 1, params, config), block_at(query_tile, step, params, config)
        state = fetch_k_stages(maps, gK, sK, n, state, smem, config)
        state = fetch_v_stages(maps, gV, sV, before, state, smem, config)
    n = block_at(query_tile, query_tile.stop - query_tile.start - 1, params, config)
    return fetch_v_stages(maps, gV, sV, n, state, smem, config)


def fetch_k_stages(
    maps: TensorMaps, g, s, n, state: PipelineState, smem: ForwardStorage, config: Config
) -> PipelineState:
    """Fetches K of block n, some columns of it into each stage. Returns the next state."""
    tiles = config.tiles
    for part in range(tiles.k_stages):
        size = tiles.element_bytes * math.prod(tiles.k_box)
        state = fetch_block(maps.k, g[None, n, part], s, size, state, smem, config)
    return state


def fetch_v_stages(
    maps: TensorMaps, g, s, n, state: PipelineState, smem: ForwardStorage, config: Config
) -> PipelineState:
    """Fetches V of block n, some keys of it into each stage. Returns the next state."""
    tiles = config.tiles
    for part in range(tiles.v_stages):
        size = tiles.element_bytes * math.prod(tiles.v_box)
        state = fetch_block(maps.v, g[None, n * tiles.v_stages + part], s, size, state, smem, config)
    return state


def fetch_queries(
    maps: TensorMaps, gQ, sQ, query_tile: QueryTile, q_state: PipelineState, smem: ForwardStorage, config: Config
) -> None:
    """Fetches a tile's Q: each warpgroup waits for its own 64 rows, so that the first may begin while the others' come."""
    tiles, size = config.tiles, config.tiles.element_bytes * ROWS * config.tiles.width
    for w in range(tiles.warpgroups):
        n_q = w * tiles.q_stages + q_state.index
        g, s = gQ[None, query_tile.row // ROWS + w], sQ[None, n_q]
        fetch(maps.q, g, s, size, smem.q_full + n_q, smem.q_empty + n_q, q_state.phase)


def fetch_bias(
    maps: TensorMaps, query_tile: QueryTile, n, place: cute.Tensor | None, smem: ForwardStorage, config: Config
) -> None:
    """Fetches the tiles of a bias by pair that the warpgroups add to their scores of key block n; nothing without such a bias."""
    if config.score != "bias":
        return
    tiles, state = config.tiles, PipelineState(place[0], place[1])
    # What all heads or the whole batch share has one of them, which every tile then reads; the second level cache serves it.
    batches, heads = (cute.size(maps.bias.tma_tensor, mode=[mode]) for mode in (3, 2))
    head, batch = PICK.smaller(query_tile.head, heads - 1), PICK.smaller(query_tile.batch, batches - 1)
    # (box, tile of rows, key block) in global memory and (box, stage) in shared memory.
    g, s = tma_tiles(maps.bias, (ROWS, tiles.tile_n), (None, None), head, batch, smem.bias)
    for w in range(tiles.warpgroups):
        stage = w * tiles.bias_stages + state.index
        size = tiles.element_bytes * ROWS * tiles.tile_n
        # A ring for each warpgroup: whoever is ahead in ping-pong never waits for the other to have read its half of a stage. Keys last:
        # tiles of neighbouring query tiles lie apart in memory, those of a row's blocks side by side.
        at = g[None, query_tile.row // ROWS + w, n]
        fetch(maps.bias, at, s[None, stage], size, smem.bias_full + stage, smem.bias_empty + stage, state.phase)
    put_place(place, state.advance(tiles.bias_stages))


def fetch_block(info, g, s, size: int, state: PipelineState, smem: ForwardStorage, config: Config) -> PipelineState:
    """Fetches a block of K or V into the state's stage of the ring. Returns the next state."""
    # `full` turns for the computing warpgroups, which arrive at `empty`.
    fetch(info, g, s[None, state.index], size, smem.full + state.index, smem.empty + state.index, state.phase)
    return state.advance(config.tiles.stages)


# -- Store ---------------------------------------------------------------------------------------------------------


@cute.jit
def store(maps: TensorMaps, smem: ForwardStorage, w, params: ForwardParams, config: cutlass.Constexpr):
    """One warp stores the tiles of O that computing warpgroup w leaves in shared memory; rows past the last are dropped."""
    q_stages = config.tiles.q_stages
    state = new_reader()  # in the warpgroup's tiles of Q, where O is left
    if cutlass.const_expr(config.queued):
        taken = receive(smem, w * q_stages, smem.o_full, state.phase)
        while taken.sequence >= 0:
            store_tile(maps, smem, place_packed(taken, params, config), w, state, params, config)
            state = state.advance(q_stages)
            taken = receive(smem, w * q_stages + state.index, smem.o_full, state.phase)
    else:
        for round_ in cutlass.range(rounds_of(params, config), unroll=1):
            store_tile(maps, smem, tile_of(round_, params, config), w, state, params, config)
            state = state.advance(q_stages)


def store_tile(
    maps: TensorMaps, smem: ForwardStorage, query_tile: QueryTile, w, state: PipelineState, params: ForwardParams,
    config: Config,
) -> None:  # fmt: skip
    """Copies a tile of O, (64, width_o), to global memory, and gives its place back for the next Q."""
    gO, sO = query_rows(maps.o, config.tiles.width_o, query_tile, smem.o)
    n = w * config.tiles.q_stages + state.index
    cute.arch.mbarrier_wait(smem.o_full + n, state.phase)  # the 128 threads that wrote O
    cute.copy(maps.o.atom, sO[None, n], gO[None, query_tile.row // ROWS + w])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory has been read; the writing may still be under way
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(smem.q_empty + n)  # the loading warp
