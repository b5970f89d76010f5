"""A bias that each pair has of its own, in the pass over key tiles, and its gradient (docs/algorithm.md, (17)).

Each warpgroup has a ring of tiles of tile_m queries by its 64 keys, as they lie in memory; read transposed, they come into registers in the
order of the accumulator of Sᵀ, some queries at a time. The gradient of a bias is dS itself, which is rounded for its products anyway: it
takes the place of the tile that was read, from where the warpgroup's storing warp sends it.

mbarriers of each tile (arrivals in brackets): ``full`` (1 + bytes) load_queries -> warpgroup; ``empty`` (4 warps) back, or (1) from the
storing warp, which waits for ``done`` (128) of the warpgroup.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.utils import LayoutEnum

from tilewise.backends.hopper.backward import dq_accumulate
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.backward.fragments import store_fragment, transposed
from tilewise.backends.hopper.backward.key_tiles import KeyTile, block_at
from tilewise.backends.hopper.backward.params import BackwardParams
from tilewise.backends.hopper.backward.tiles import KEY_GROUPS
from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.dtypes import ELEMENT, I32
from tilewise.backends.hopper.kit.instructions import unseen_zero, zero_after
from tilewise.backends.hopper.kit.operands import half_of, words
from tilewise.backends.hopper.kit.pair_bias import LOG2_E, BiasRing, advance_place, new_place
from tilewise.backends.hopper.kit.ring import PipelineState, fetch, release
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.kit.tiles import staged_layout, tma_tiles

STEP = 16  # queries that one ldmatrix brings
STEP_COLUMNS = STEP // 4  # of a thread

# -- Memory --------------------------------------------------------------------------------------------------------


class BiasStorage(NamedTuple):
    """The rings of both warpgroups in shared memory, one after the other.

    Attributes:
        tiles: (tile_m, 64 keys, tile), in the element type. full, empty, done: barriers of each tile.
    """

    tiles: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    done: cute.Pointer


def tma(tensor: cute.Tensor, config: Backward, copy) -> cpasync.TmaInfo:
    """The descriptor of a bias or its gradient, (batch or 1, heads or 1, row, key): boxes of a block's queries and a warpgroup's keys."""
    tiles = config.keys
    box = tiles.tile_m, ROWS
    layout = sm90.make_smem_layout_epi(ELEMENT[config.dtype], LayoutEnum.ROW_MAJOR, box, 1)
    layout = staged_layout(layout, tiles.bias_tiles, tiles.tile_m * ROWS)
    view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[2, 3, 1, 0]))
    return cpasync.make_tiled_tma_atom(copy, view, layout, box)


def init_barriers(smem: BiasStorage, config: Backward) -> None:
    """One thread sets every barrier's count of arrivals."""
    for n in range(config.keys.bias_tiles):
        cute.arch.mbarrier_init(smem.full + n, 1)  # load_queries, and bytes -> warpgroup
        cute.arch.mbarrier_init(smem.empty + n, 1 if config.stores_bias else 4)  # store, or the warps that have read it
        cute.arch.mbarrier_init(smem.done + n, 128)  # warpgroup -> store


def tiles_of_head(info: cpasync.TmaInfo, tile: KeyTile, smem: cute.Tensor, config: Backward) -> tuple:
    """A query head's tiles in memory, (box, block of queries, 64 keys), and in shared memory, (box, tile). What all heads or the whole
    batch share has one of them."""
    batches, heads = (cute.size(info.tma_tensor, mode=[mode]) for mode in (3, 2))
    head, batch = PICK.smaller(tile.head, heads - 1), PICK.smaller(tile.batch, batches - 1)
    return tma_tiles(info, (config.keys.tile_m, ROWS), (None, None), head, batch, smem)


def fetch_tiles(
    info: cpasync.TmaInfo, tile: KeyTile, m, place: cute.Tensor, smem: BiasStorage, config: Backward
) -> None:
    """The loading warp fetches block m of a query head's bias, a tile for each warpgroup."""
    tiles, state = config.keys, PipelineState(place[0], place[1])
    g, s = tiles_of_head(info, tile, smem.tiles, config)
    for w in range(KEY_GROUPS):
        n = w * tiles.bias_stages + state.index
        size = ELEMENT_BYTES * tiles.tile_m * ROWS
        fetch(info, g[None, m, tile.column // ROWS + w], s[None, n], size, smem.full + n, smem.empty + n, state.phase)
    advance_place(place, tiles.bias_stages)


# -- A block of scores ---------------------------------------------------------------------------------------------


def new_ring(smem: BiasStorage, w, config: Backward) -> BiasRing:
    """The ring of warpgroup w, whose tiles are seen as (64 keys, tile_m)."""
    first = w * config.keys.bias_stages
    return BiasRing(None, new_place(phase=0), transposed(smem.tiles), first, smem.full, smem.empty)


class TileValues:
    """A thread's numbers of a tile (64 keys, tile_m) in shared memory, in the order of the accumulator of Sᵀ, as fp32; ``[r, c]`` in the
    order of c. Those of STEP queries are read at a time: all at once take half as many registers as Sᵀ.

    ``mma``: one whose operand A is 64 x tile_m in registers. ``acc``: (2 rows, columns of the thread), whose numbers are replaced column by
    column: a read waits for the number that replaces that of the read before the last.
    """

    def __init__(self, tile: cute.Tensor, mma: cute.TiledMma, acc: cute.Tensor, dtype: str):
        self.dtype, self.mma, self.acc, self.zero, self.read = dtype, mma, acc, unseen_zero(), {}
        # Four 8 x 8 matrices an instruction, each turned: a warp's 16 keys of STEP queries.
        copy = cute.make_tiled_copy_A(cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(True, 4), ELEMENT[dtype]), mma)
        self.copy, self.mine = copy, copy.get_slice(cute.arch.thread_idx()[0] % 128)
        self.source = self.mine.partition_S(tile)

    def __getitem__(self, place: tuple[int, int]):
        r, c = place
        step = c // STEP_COLUMNS
        if step not in self.read:
            # The next one too, under what is made of this one.
            steps = range(step, min(step + 2, cute.size(self.source, mode=[2])))
            self.read = {n: self.read[n] if n in self.read else self._words(n) for n in steps}
        # Word c + r of an even column c holds columns c and c + 1 of row r.
        return half_of(self.read[step][c % STEP_COLUMNS - c % 2 + r], c % 2, self.dtype)

    def _words(self, step: int) -> cute.Tensor:
        awaited = (step - 2) * STEP_COLUMNS
        zero = zero_after(self.acc[1, awaited], self.zero) if awaited >= 0 else I32(0)
        found = cute.make_rmem_tensor(self.mma.partition_shape_A((ROWS, STEP)), ELEMENT[self.dtype])
        part = self.source[None, None, step]
        part = cute.make_tensor(part.iterator + cute.assume(zero, divby=8), part.layout)  # 16 bytes, as ldmatrix wants
        cute.copy(self.copy, part, self.mine.retile(found)[None, None, 0])
        return words(found)


class KeyBias(NamedTuple):
    """The biases of a thread's pairs in one block; ``values[r, c]``, fp32."""

    values: TileValues

    def less(self, statistic, s: cute.Tensor):
        """A statistic of columns, as a function of a thread's row and column, less the bias: P is 2**(s scale2 - it)."""
        # A bias of -inf, or one that is beyond fp32 in base 2, makes this +inf and its P 0.
        return lambda r, c: statistic(r, c) - self.values[r, c] * LOG2_E


def block_bias(ring: BiasRing, stage, mma: cute.TiledMma, s: cute.Tensor, config: Backward) -> KeyBias:
    """The biases of a block, of a tile that was acquired; ``mma``, ``s``: as :class:`TileValues` has them."""
    return KeyBias(TileValues(ring.tiles[None, None, stage], mma, s, config.dtype))


def release_block(ring: BiasRing, p: cute.Tensor, stages: int) -> None:
    """Gives back the tile whose biases are in a block's P, (2 rows, columns of the thread), and goes on to the next one."""
    cute.arch.sync_warp()
    # Behind the last P, which is made of what was read last: the compiler would arrive before a read's numbers are there
    # (docs/decisions.md#hopper-stage-release).
    zero = zero_after(p[1, cute.size(p, mode=[1]) - 1], unseen_zero())
    release(ring.empty + (ring.first + ring.place[0] + zero))
    advance_place(ring.place, stages)


# -- The gradient --------------------------------------------------------------------------------------------------


def put_gradient(ds: cute.Tensor, mma: cute.TiledMma, ring: BiasRing, config: Backward) -> None:
    """Stores a block of dSᵀ, rounded, where the block's biases were. The fence that the storing warp needs comes later, with that of dQ's
    operand."""
    # A warp alone has read the columns of these keys, and writes them.
    stage = ring.first + ring.place[0]
    store_fragment(ds, mma, ring.tiles[None, None, stage], config.dtype, transpose=True)


def hand_gradient(ring: BiasRing, done: cute.Pointer, stages: int) -> None:
    """Hands the tile of :func:`put_gradient` to the storing warp, which gives it back, and goes on to the next one."""
    cute.arch.mbarrier_arrive(done + (ring.first + ring.place[0]))
    advance_place(ring.place, stages)


@cute.jit
def add_and_store(
    info: cpasync.TmaInfo, bias: BiasStorage, place: cute.Tensor, dq: cute.Tensor, smem: dq_accumulate.SumStorage,
    w: cutlass.Constexpr, tile: KeyTile, phase, params: BackwardParams, config: cutlass.Constexpr,
):  # fmt: skip
    """One warp stores the bias' gradient of a tile's query blocks and adds their parts of dQ, as :func:`dq_accumulate.add_all`. Returns
    the phase of the parts."""
    g, s = tiles_of_head(info, tile, bias.tiles, config)
    for step in cutlass.range(tile.stop - tile.start, unroll=1):
        m = block_at(tile, tile.start + step, params, config)
        n = w * config.keys.bias_stages + place[0]
        # Partner: hand_gradient of warpgroup w. A block's gradient is there before its part of dQ.
        cute.arch.mbarrier_wait(bias.done + n, place[1])
        cute.copy(info.atom, s[None, n], g[None, m, tile.column // ROWS + w])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        # Partner: fetch_tiles.
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bias.empty + n)
        advance_place(place, config.keys.bias_stages)
        dq_accumulate.add_part(dq, smem, w, m, phase)
        phase = 1 - phase
    return phase
