"""The copy of a key tile from a cache of e4m3 numbers: a score group loads them, converts them, and stores what wgmma reads.

A row of a tile is brought by four threads, 64 columns at a time: 16 numbers a thread and load, of two rows each. The numbers of the next
part of a tile are on their way while those of one part are converted. An e4m3 number is a number of either 16-bit type, so that nothing
is rounded; the scales multiply scores and the output.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.config import ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import both
from tilewise.backends.hopper.kit.scheduler import PICK
from tilewise.backends.hopper.latent.config import BOXES, CHUNK, CHUNKS, KEYS, WIDTH, LatentConfig
from tilewise.backends.hopper.latent.params import LatentParams
from tilewise.backends.hopper.latent.storage import ELEMENTS, LatentStorage, part_of, stage_of
from tilewise.backends.hopper.latent.tiles import LatentTile, shift_of

LANES = 4  # threads that share a row
APART = 128 // LANES  # rows between those of a thread
AHEAD = 3  # parts of a tile that are on their way at once


class Source(NamedTuple):
    """A row of a key tile that a thread brings: its number in the tile, which of its threads this is, where the thread's numbers lie,
    and whether there is such a row."""

    row: I32
    lane: I32
    place: cutlass.Int64
    inside: cutlass.Boolean


@cute.jit
def convert_tile(smem: LatentStorage, n, page, tile: LatentTile, params: LatentParams, config: cutlass.Constexpr):
    """A score group brings key tile n, which lies in ``page``, if there is such a tile, in the parts that become free one by one."""
    if n < tile.last:
        stage, phase = stage_of(n - tile.first)
        convert_parts(smem, sources_of(n, page, tile, params), stage, phase, config)


def convert_parts(smem: LatentStorage, sources: list[Source], stage, phase, config: LatentConfig) -> None:
    """Brings the parts of a tile, with the loads of the next ones ahead of the waiting for their places.

    The tile is given on as a whole: a fence waits for every load before it, those of later parts too.
    """
    found = [take_part(sources, part) for part in range(AHEAD)]
    for part in range(len(BOXES)):
        # The warps of the values, which read V and P of the tile before in this stage.
        cute.arch.mbarrier_wait(smem.empty + part_of(stage, part), 1 - phase)
        for source, chunk, words in found[part]:
            put_numbers(smem, stage, chunk, source, words, config)
        if part + AHEAD < len(BOXES):
            found.append(take_part(sources, part + AHEAD))
    # wgmma reads shared memory by another path: what threads wrote must be visible there.
    cute.arch.fence_view_async_shared()
    for part in range(len(BOXES)):
        cute.arch.mbarrier_arrive(smem.full + part_of(stage, part))  # both score and value


def prefetch_tile(n, page, tile: LatentTile, params: LatentParams) -> None:
    """A score group has key tile n brought to L2, if there is such a tile, so that its loads find it there.

    A warp prefetches one row after the other: each of the four takes a quarter of them.
    """
    thread, rows = anew(cute.arch.thread_idx()[0]) % 128, cute.size(params.pool, mode=[1])
    each, lane = KEYS // 4, thread % 32
    at = n * KEYS % params.seqlen_k + shift_of(n, tile) + thread // 32 * each + lane
    inside = both(both(at >= 0, at < rows), both(n < tile.last, lane < each))
    place = place_of_row(params, page, cutlass.select_(inside, at, I32(0)), tile.key_head)
    prefetch_row(place, inside)


def sources_of(n, page, tile: LatentTile, params: LatentParams) -> list[Source]:
    """The rows of key tile n that a thread brings."""
    thread, rows = anew(cute.arch.thread_idx()[0]) % 128, cute.size(params.pool, mode=[1])
    sources = []
    for first in range(0, ROWS, APART):
        row, lane = first + thread // LANES, thread % LANES
        at = n * KEYS % params.seqlen_k + shift_of(n, tile) + row
        inside = both(at >= 0, at < rows)
        # Row 0 stands for one that is not there, so that every address is inside the pool.
        place = place_of_row(params, page, cutlass.select_(inside, at, I32(0)), tile.key_head)
        sources.append(Source(row, lane, place + CHUNK // LANES * lane, inside))
    return sources


def take_part(sources: list[Source], part: int) -> list[tuple]:
    """``(source, chunk, numbers)`` of each load of a part."""
    return [(source, chunk, take_numbers(source, chunk)) for chunk in BOXES[part] for source in sources]


# -- Numbers -------------------------------------------------------------------------------------------------------


def anew(value) -> I32:
    """A number, whose use the compiler cannot move to before this: what follows from it takes no registers until then."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[I32], read_only_args=[value])


def place_of_row(params: LatentParams, page, row, head):
    """The address of a row of the pool."""
    return params.pool[page, row, head, None].iterator.toint()


def take_numbers(source: Source, chunk: int) -> tuple:
    """A thread's 16 numbers of a chunk of 64 columns, in four words; zeros where there is no such row."""
    code = (
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@p ld.volatile.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r1}]; }"
    )
    flag = cutlass.select_(source.inside, I32(1), I32(0))
    return cute.arch.inline_ptx(code, write_only_types=[I32] * 4, read_only_args=[flag, source.place + CHUNK * chunk])


def prefetch_row(place, inside) -> None:
    """Has the 576 numbers of a row brought to L2, if there is such a row."""
    code = f"{{ .reg .pred p; setp.ne.s32 p, {{$r0}}, 0; @p cp.async.bulk.prefetch.L2.global [{{$r1}}], {WIDTH}; }}"
    cute.arch.inline_ptx(code, read_only_args=[cutlass.select_(inside, I32(1), I32(0)), place])


def put_numbers(smem: LatentStorage, stage, chunk: int, source: Source, words: tuple, config: LatentConfig) -> None:
    """Writes 16 numbers into a chunk's row: the 16 bytes of a row of 128 change places as the row's last three bits say."""
    start = smem.k.iterator.toint() + ELEMENT_BYTES * (ELEMENTS * (CHUNKS * stage + chunk) + CHUNK * source.row)
    code = "st.shared.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};"
    for half in range(2):
        numbers = [x for word in words[2 * half : 2 * half + 2] for x in converted(word, config.dtype)]
        at = I32(start + 16 * ((2 * source.lane + half) ^ (source.row % 8)))
        cute.arch.inline_ptx(code, read_only_args=[at, *numbers])


def converted(word, dtype: str) -> tuple:
    """The four e4m3 numbers of a word in two words of 16-bit numbers, exactly."""
    pairs = "mov.b32 {a, b}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, a; cvt.rn.f16x2.e4m3x2 {$w1}, b;"
    code = f"{{ .reg .b16 a, b; {pairs} }}"
    if dtype == "bf16":
        # There is no instruction from e4m3 to bf16: by way of fp16 and fp32.
        one = "mov.b32 {a, b}, {$wN}; cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 {$wN}, y, x;"
        code = f"{{ .reg .b16 a, b; .reg .f32 x, y; {pairs} {one.replace('N', '0')} {one.replace('N', '1')} }}"
    return cute.arch.inline_ptx(code, write_only_types=[I32] * 2, read_only_args=[word])


def scale_of(scales: cute.Tensor, tile: LatentTile) -> F32:
    """The scale of a tile's keys, of (sequence, key head); of rows past the last sequence, which have no keys, any."""
    return F32(scales[PICK.smaller(tile.sequence, cute.size(scales, mode=[0]) - 1), tile.key_head])
