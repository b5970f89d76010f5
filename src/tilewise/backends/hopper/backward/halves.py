"""Two CTAs of a cluster that share a tile of a wide head on Hopper (sm_90a), each with half of the columns.

A CTA has Q, K, V and dO of its own columns alone, and makes dQ, dK and dV of these. Of the scores, S = Q Kᵀ and dP = dO Vᵀ, each makes
the sum over its columns and gets the other's, its peer's, in fp32: 16 KB of a block of 64 x 64. A thread sends its part of an
accumulator to the thread of the same place, and both add the same two numbers, so that P and dS are the same bits in both CTAs.

mbarriers of a place (arrivals in brackets): ``full`` (4 + bytes) the peer's warpgroup -> warpgroup, ``empty`` (4 warps) warpgroup -> the
peer's warpgroup.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute

from tilewise.backends.hopper.backward.tiles import FP32_BYTES
from tilewise.backends.hopper.config import ALIGNMENT
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import after, exclusive_or, meet

WARPS = 4  # of a warpgroup


class Halves(NamedTuple):
    """The places through which two CTAs exchange accumulators.

    Attributes:
        parts: (4 numbers, thread, n, place), fp32: what the peer has sent.
        full, empty: barriers of a place. rank: which half of the columns this CTA has.
    """

    parts: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    rank: I32


def allocate(allocator, elements: int, count: int, barriers: cute.Pointer) -> Halves:
    """Places for accumulators of so many elements."""
    parts = allocator.allocate_tensor(F32, cute.make_layout((4, 128, elements // 512, count)), ALIGNMENT)
    return Halves(parts, barriers, barriers + count, cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))


def init_barriers(halves: Halves) -> None:
    """One thread sets the counts of all places."""
    for n in range(cute.size(halves.parts, mode=[3])):
        cute.arch.mbarrier_init(halves.full + n, WARPS)  # each warp expects its own bytes
        cute.arch.mbarrier_init(halves.empty + n, WARPS)  # the peer's warps have read them


def publish_barriers(halves: Halves | None) -> None:
    """The barriers are set: the copy engine sees them after the fence, the other threads, those of the peer too, after they have met."""
    cute.arch.mbarrier_init_fence()
    if halves is None:
        cute.arch.sync_threads()
    else:
        meet()


def add_peer(acc: cute.Tensor, halves: Halves, n, phase, releases: bool = True) -> None:
    """Sends an accumulator to the peer, and adds the peer's to it, through place n, where that arrives in ``phase``. The place is then the
    peer's again, unless somebody else ``releases`` it."""
    cute.arch.mbarrier_wait(halves.empty + n, 1 - phase)  # what this warpgroup sent before has been read
    expect(acc, halves, n)
    send(acc, halves, n)
    cute.arch.mbarrier_wait(halves.full + n, phase)  # the peer's numbers are there
    found = read_into(acc, halves, n)
    if releases:
        release_place(halves, n, found)


def expect(acc: cute.Tensor, halves: Halves, n) -> None:
    """Each warp says how many bytes the peer's warp of the same place sends it."""
    with cute.arch.elect_one():
        # Bytes may come before they are expected: the barrier waits for all four warps.
        cute.arch.mbarrier_arrive_and_expect_tx(halves.full + n, FP32_BYTES * 32 * cute.size(acc))


def send(acc: cute.Tensor, halves: Halves, n) -> None:
    """Writes a thread's numbers into place n of the peer's thread, and counts their bytes at the place's barrier there."""
    mine, peer = own_part(halves, n), 1 - halves.rank
    values = cute.make_tensor(acc.iterator, cute.make_layout(mine.shape))
    place, barrier = (peer_address(p, peer) for p in (mine.iterator, halves.full + n))
    # 16 bytes of each thread lie side by side. No fence: the barrier turns when all bytes are there.
    code = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{$r0}], {{$r2},{$r3},{$r4},{$r5}}, [{$r1}];"
    for k in range(cute.size(values, mode=[1])):
        numbers = [F32(values[m, k]) for m in range(4)]
        cute.arch.inline_ptx(code, read_only_args=[place + FP32_BYTES * 4 * 128 * k, barrier, *numbers])


def read_into(acc: cute.Tensor, halves: Halves, n) -> cute.Tensor:
    """Adds what the peer has sent to place n to an accumulator. Returns it."""
    mine = own_part(halves, n)
    found = cute.make_rmem_tensor(mine.shape, F32)
    cute.autovec_copy(mine, found)
    # The peer adds the same two numbers the other way round, which gives the same bits.
    for k in range(cute.size(acc)):
        acc[k] = acc[k] + found[k]
    return found


def release_place(halves: Halves, n, found: cute.Tensor) -> None:
    """A warp gives its part of place n back to the peer: it has read ``found`` there, four words at a time."""
    words = cute.recast_tensor(found, I32)
    # An arrival waits for no load (docs/decisions.md#hopper-stage-release): its address does, for a word of each.
    peer = after(1 - halves.rank, exclusive_or([words[k] for k in range(0, cute.size(words), 4)]))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        # Partner: the peer's add_peer, before it sends the next block there.
        cute.arch.mbarrier_arrive(halves.empty + n, peer)


def own_part(halves: Halves, n) -> cute.Tensor:
    """A thread's numbers of place n, (4, n)."""
    return halves.parts[None, cute.arch.thread_idx()[0] % 128, None, n]


def peer_address(pointer: cute.Pointer, peer) -> I32:
    """The address in the cluster of the same place of the peer's shared memory."""
    code = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};"
    found = cute.arch.inline_ptx(code, write_only_types=[I32], read_only_args=[I32(pointer.toint()), I32(peer)])
    return I32(found)
