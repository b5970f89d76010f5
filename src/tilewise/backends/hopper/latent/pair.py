"""Two CTAs of a cluster share the keys of a tile of rows, and merge their O in shared memory (docs/algorithm.md, (8)).

After the last product each has O of all 512 columns, of its own keys. CTA r keeps the columns of warpgroup r of the values; its other
warpgroup sends its columns to the peer, where the warpgroup of the same columns adds them to its own::

    CTA 0   warpgroup 0 keeps columns 0 ... 255     <->   CTA 1   warpgroup 0 sends them
            warpgroup 1 sends columns 256 ... 511   <->           warpgroup 1 keeps them

What is sent lies where the peer's Q was, so that two CTAs need no states in memory and no second kernel that merges them.
"""

from __future__ import annotations

from collections.abc import Iterator

import cutlass.cute as cute

from tilewise.backends.hopper.kit import softmax
from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.instructions import choose, in_peer, meet
from tilewise.backends.hopper.kit.tiles import rows_columns
from tilewise.backends.hopper.latent.storage import LatentStorage


@cute.jit
def merge_with_peer(accumulators: tuple, rows: softmax.SoftmaxState, smem: LatentStorage, keeps, rank):
    """Brings the accumulators and the state of the rows up to the keys of both CTAs, in the warpgroup that ``keeps`` its columns.

    Args:
        accumulators: O of this warpgroup's columns, 64 × 128 each, fp32, with the maxima and sums of ``rows``.
        rank: which CTA of the two this is.
    """
    cute.arch.cluster_wait()  # no score group of either CTA reads Q any more
    if not keeps:
        send(accumulators, rows, peer_place(smem, 1 - rank))
    meet()  # what was sent has come
    if keeps:
        merge(accumulators, rows, own_place(smem))


def fours(accumulators: tuple) -> Iterator[tuple[cute.Tensor, int, int]]:
    """``(o, r, c)``: a thread's numbers of O, four at a time: row r and columns c to c + 3 of its part of an accumulator."""
    for accumulator in accumulators:
        o = rows_columns(accumulator)
        for r in range(2):
            for c in range(0, cute.size(o, mode=[1]), 4):
                yield o, r, c


def send(accumulators: tuple, rows: softmax.SoftmaxState, place) -> None:
    """Writes a thread's part of O, and its rows' maxima and sums, for the thread of the same place in the peer."""
    send_four(place, 0, [*(rows.m2[r] for r in range(2)), *(rows.l[r] for r in range(2))])
    for n, (o, r, c) in enumerate(fours(accumulators)):
        send_four(place, n + 1, [o[r, c + k] for k in range(4)])


def merge(accumulators: tuple, rows: softmax.SoftmaxState, place) -> None:
    """Adds what the peer has sent: ``m = max(m, m')``, ``O = 2**(m_own - m) O + 2**(m' - m) O'``, and the sums likewise."""
    found, own, other = take_four(place, 0), [], []
    for r in range(2):
        m2 = cute.arch.fmax(rows.m2[r], found[r])
        # Neither CTA has a key for this row: -inf - -inf would be NaN.
        base = choose(m2 == -softmax.INF, 0.0, m2)
        own.append(cute.math.exp2(rows.m2[r] - base, fastmath=True))
        other.append(cute.math.exp2(found[r] - base, fastmath=True))
        rows.l[r] = rows.l[r] * own[r] + found[2 + r] * other[r]
        rows.m2[r] = m2
    for n, (o, r, c) in enumerate(fours(accumulators)):
        for k, value in enumerate(take_four(place, n + 1)):
            o[r, c + k] = o[r, c + k] * own[r] + value * other[r]


# -- Shared memory -------------------------------------------------------------------------------------------------


def own_place(smem: LatentStorage) -> I32:
    """The address of what the peer sends to this thread: 16 bytes of each thread lie side by side."""
    return I32(smem.q.iterator.toint() + 16 * (cute.arch.thread_idx()[0] % 128))


def peer_place(smem: LatentStorage, peer) -> I32:
    """The peer's :func:`own_place` for the thread of the same place."""
    return in_peer(own_place(smem), peer)


def send_four(place, n: int, values: list) -> None:
    """Writes the n-th four fp32 numbers of a thread into the peer's shared memory."""
    code = "st.shared::cluster.v4.f32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};"
    cute.arch.inline_ptx(code, read_only_args=[place + 16 * 128 * n, *(F32(x) for x in values)])


def take_four(place, n: int) -> list:
    """The n-th four numbers that the peer has written."""
    code = "ld.volatile.shared.v4.f32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"
    return list(cute.arch.inline_ptx(code, write_only_types=[F32] * 4, read_only_args=[place + 16 * 128 * n]))
