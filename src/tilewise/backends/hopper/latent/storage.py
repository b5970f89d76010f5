"""The shared memory of a CTA of latent attention: Q, two key tiles in chunks of 64 columns, barriers, and the statistics of rows."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from tilewise.backends.hopper.config import ALIGNMENT, ELEMENT_BYTES, ROWS
from tilewise.backends.hopper.kit.dtypes import ELEMENT, F32, I32
from tilewise.backends.hopper.kit.tiles import row_of
from tilewise.backends.hopper.latent.config import (
    BOXES,
    CHUNK,
    CHUNKS,
    COLUMNS,
    P_CHUNK,
    STAGES,
    VALUE_GROUPS,
    WIDTH_V,
    LatentConfig,
)

ELEMENTS = ROWS * CHUNK  # of a chunk of 64 rows or keys: 8 KiB


class LatentStorage(NamedTuple):
    """The tiles and barriers of a CTA in shared memory.

    Attributes:
        q: (64, 64, chunk). k: (64, 64, chunk of both stages).
        v: (128, 64, (part, stage)): the first eight chunks of k, columns first, in the widths of one product.
        p: four words of a thread side by side, then the threads; a tile's P takes the place of its last chunk.
        full, empty: barriers of each part of each stage: the copy engine -> scores and values; values -> scores.
        q_full: values -> scores. p_full: of each stage, scores -> values. end: scores -> values.
        m_full: of each stage, from its score group to the other one.
        factor: (stage, row of the thread, thread), fp32: what O is multiplied by before a tile's product.
        m, l: (stage, row of the thread, thread), fp32: the maximum so far in base 2, and the thread's part of the sum.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    q_full: cute.Pointer
    p_full: cute.Pointer
    m_full: cute.Pointer
    end: cute.Pointer
    factor: cute.Pointer
    m: cute.Pointer
    l: cute.Pointer


def chunked(pointer: cute.Pointer, count: int) -> cute.Tensor:
    """(64, 64, chunk): rows of 128 bytes, swizzled in groups of eight."""
    layout = cute.make_layout(((8, 8), CHUNK, count), stride=((CHUNK, 8 * CHUNK), 1, ELEMENTS))
    return cute.make_tensor(pointer, layout)


def swizzle_of(element):
    """The swizzle of 128 bytes that TMA writes and wgmma reads."""
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element).inner


def allocate(config: LatentConfig) -> LatentStorage:
    """The storage, in the order in which :attr:`LatentTiles.shared` counts it."""
    allocator, element = cutlass.utils.SmemAllocator(), ELEMENT[config.dtype]
    full = allocator.allocate_array(cutlass.Int64, config.tiles.barriers)
    whole = cute.make_layout(ELEMENTS * CHUNKS * (1 + STAGES))
    q = allocator.allocate_tensor(element, whole, ALIGNMENT, swizzle_of(element)).iterator
    k = q + ELEMENTS * CHUNKS
    # V of one product, 128 columns by 64 keys: (64, 2) columns in chunks, (8, 8) keys in groups of eight rows.
    shape = (CHUNK, 2), (8, 8), (WIDTH_V // COLUMNS, STAGES)
    stride = (1, ELEMENTS), (CHUNK, 8 * CHUNK), (2 * ELEMENTS, CHUNKS * ELEMENTS)
    v = cute.make_tensor(k, cute.make_layout(shape, stride=stride))
    numbers = allocator.allocate_array(F32, config.tiles.statistics)
    parts, each = STAGES * len(BOXES), 2 * 128
    q_full = full + 2 * parts
    m_full = q_full + 1 + STAGES
    m = numbers + each * STAGES
    return LatentStorage(
        chunked(q, CHUNKS), chunked(k, STAGES * CHUNKS), v, k + P_CHUNK * ELEMENTS, full, full + parts, q_full, q_full + 1,
        m_full, m_full + STAGES, numbers, m, m + each * STAGES,
    )  # fmt: skip


@cute.jit
def init_barriers(smem: LatentStorage, config: cutlass.Constexpr):
    """One thread sets how many arrivals turn each barrier; then every thread sees them."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            for n in cutlass.range_constexpr(STAGES * len(BOXES)):
                # The warp that begins the copy, and the bytes of a part; or every thread that converts or copies numbers of it.
                cute.arch.mbarrier_init(smem.full + n, 128 if config.by_threads else 1)
                # The warps of both warpgroups that read P in the first part's place; of one, that read a part of V.
                cute.arch.mbarrier_init(smem.empty + n, 4 if n % len(BOXES) else 4 * VALUE_GROUPS)
            cute.arch.mbarrier_init(smem.q_full, 128 * VALUE_GROUPS)  # every thread that brings rows of Q
            for n in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(smem.p_full + n, 128)  # every thread of the warpgroup that wrote P
                cute.arch.mbarrier_init(smem.m_full + n, 128)  # the same
            cute.arch.mbarrier_init(smem.end, 128 * STAGES)  # every thread that computed scores
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


# -- Statistics of rows --------------------------------------------------------------------------------------------


def put_pair_of(pointer: cute.Pointer, n, values) -> None:
    """Writes the numbers of a thread's two rows into array ``n``; the thread of the same place in any warpgroup reads them."""
    thread = cute.arch.thread_idx()[0] % 128
    for r in range(2):
        code = "st.volatile.shared.f32 [{$r0}], {$r1};"
        cute.arch.inline_ptx(code, read_only_args=[(pointer + (256 * n + 128 * r + thread)).toint(), F32(values[r])])


def get_pair_of(pointer: cute.Pointer, n) -> list:
    """The numbers that :func:`put_pair_of` wrote."""
    thread, code = cute.arch.thread_idx()[0] % 128, "ld.volatile.shared.f32 {$w0}, [{$r0}];"
    places = [(pointer + (256 * n + 128 * r + thread)).toint() for r in range(2)]
    return [cute.arch.inline_ptx(code, write_only_types=[F32], read_only_args=[at]) for at in places]


WORDS = ROWS * CHUNK // 128 // 2  # of a thread's part of P: two numbers each


def put_p(smem: LatentStorage, stage, words: list) -> None:
    """Leaves a thread's part of P, packed in the order of an accumulator, for the thread of the same place in other warpgroups.

    No shuffle and no swizzle: a left operand in registers lies as the accumulator does that it came from.
    """
    for n in range(0, WORDS, 4):
        code = "st.volatile.shared.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};"
        cute.arch.inline_ptx(code, read_only_args=[place_of_p(smem, stage, n), *words[n : n + 4]])


def get_p(smem: LatentStorage, stage) -> list:
    """The words that :func:`put_p` left."""
    code, found = "ld.volatile.shared.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", []
    for n in range(0, WORDS, 4):
        at = place_of_p(smem, stage, n)
        found += cute.arch.inline_ptx(code, write_only_types=[I32] * 4, read_only_args=[at])
    return found


def place_of_p(smem: LatentStorage, stage, n: int) -> I32:
    """The address of a thread's words from the n-th on."""
    thread = cute.arch.thread_idx()[0] % 128
    return I32(smem.p.toint() + ELEMENT_BYTES * ELEMENTS * CHUNKS * stage + 16 * (128 * (n // 4) + thread))


def get_q(smem: LatentStorage) -> list:
    """The words of a thread's part of Q's rotary columns, 64 × 64, in the order of a left operand in registers."""
    thread, code, found = cute.arch.thread_idx()[0] % 128, "ld.volatile.shared.b32 {$w0}, [{$r0}];", []
    for piece in range(CHUNK // 8):  # of 8 columns, 16 bytes
        for r in range(2):
            row = row_of(thread, r)
            at = smem.q.iterator.toint() + ELEMENT_BYTES * (ELEMENTS * P_CHUNK + CHUNK * row) + 16 * (piece ^ row % 8)
            found.append(
                cute.arch.inline_ptx(code, write_only_types=[I32], read_only_args=[I32(at + 4 * (thread % 4))])
            )
    return found


def part_of(stage, part: int):
    """The number of the barriers of a stage's part."""
    return stage * len(BOXES) + part


def stage_of(n) -> tuple[I32, I32]:
    """The stage of a CTA's n-th key tile, and the phase of its barriers."""
    return n % STAGES, n // STAGES % 2
