"""The tile that a CTA takes next, and how the role that takes it tells the others.

Tiles of equal sequences are dealt out by number: every role counts the rounds for itself (:func:`each_tile`). Or the warp that loads
ahead takes them, of packed sequences too, from a queue in global memory and tells every role by two slots in shared memory
(:func:`take_queued`).

Tiles of packed sequences differ too much to be dealt out by number. Elsewhere the loading warp of a CTA takes the next tile of all from a
queue in global memory and publishes it in mailboxes in shared memory: one for each stage that a computing warpgroup waits for, and
one for the warp that loads ahead. A mailbox is written before its stage is filled, so that the stage's ``full`` barrier also says
that the mailbox can be read. A tile of no sequence (``sequence`` -1) ends every role.

mbarriers (arrivals in brackets): ``held_full[stage]``, ``held_empty[stage]`` belong to the kernel; ``next_full`` (1) goes from
the warp that takes tiles to the warp that loads ahead, ``next_empty`` (1) goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from tilewise.backends.hopper.kit import packed, schedule
from tilewise.backends.hopper.kit.dtypes import I32
from tilewise.backends.hopper.kit.instructions import get_words, put_words

PICK = schedule.Pick(cutlass.min, cutlass.max)
"""The smaller and the larger of two numbers, as :mod:`tilewise.backends.hopper.kit.schedule` takes them in a kernel."""

SHORT = 16  # blocks: for a longer tile the start-up cost is small, and L2 would hold its first blocks too long
MAILBOX_WORDS = 2  # of 8 bytes each


class TileScheduler(NamedTuple):
    """The tiles of one kernel, as four functions of the kernel's parameters and config.

    Attributes:
        rounds_of: ``(params, config)``: how many tiles this CTA has.
        tile_of: ``(round, params, config)``: this CTA's tile in a round.
        packed_tile: ``(n, since, params, config)``: the n-th tile of packed sequences, a :class:`packed.PackedTile`, and where the lookup
            of a later one begins (:class:`packed.Since`).
        place_packed: ``(tile, params, config)``: that tile as ``tile_of`` has it, and the numbers of its sequence.
        sharing: ``(config)``: how many CTAs of a cluster share a packed tile. More than one take none from a queue: each counts for itself.
        kind: ``(config)``: the class of a tile from a queue, :class:`packed.PackedTile` or one with more numbers.
    """

    rounds_of: Callable
    tile_of: Callable
    packed_tile: Callable
    place_packed: Callable
    sharing: Callable = lambda config: 1
    kind: Callable = lambda config: packed.PackedTile


class QueueSlots(NamedTuple):
    """Two slots, in turn for a CTA's tiles from a queue: the words of a tile, and barriers of each slot."""

    words: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


QUEUE_WORDS = 2 * (2 + MAILBOX_WORDS)  # of 8 bytes: two barriers and a tile for each slot


def queue_slots(start: cute.Pointer) -> QueueSlots:
    """The barriers, then the words."""
    return QueueSlots(start + 4, start, start + 2)


def init_queue_slots(slots: QueueSlots, readers: int) -> None:
    """One thread sets the counts of the barriers; ``readers`` warps read each tile."""
    for n in range(2):
        cute.arch.mbarrier_init(slots.full + n, 1)  # take_queued -> each_queued
        cute.arch.mbarrier_init(slots.empty + n, readers)  # each_queued -> take_queued


def _publish(tile: packed.PackedTile, slots: QueueSlots, count) -> None:
    """Tells all roles the tile of that number, as soon as all have read the one before the last."""
    n = count % 2
    cute.arch.mbarrier_wait(slots.empty + n, 1 - count // 2 % 2)
    with cute.arch.elect_one():
        put_words(slots.words + MAILBOX_WORDS * n, tile)
        cute.arch.mbarrier_arrive(slots.full + n)
    cute.arch.sync_warp()


def _receive(slots: QueueSlots, count, kind: type) -> packed.PackedTile:
    """The tile of that number, of a class; its slot is free again at once."""
    n = count % 2
    found = _read_mailbox(slots.full + n, count // 2 % 2, slots.words + MAILBOX_WORDS * n, kind)
    # All lanes have read the words before one of them gives the slot back.
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(slots.empty + n)
    return found


@cute.jit
def take_queued(
    scheduler: cutlass.Constexpr, slots: QueueSlots, params, config: cutlass.Constexpr, body: cutlass.Constexpr, state
):
    """Runs ``state = body(tile, numbers, phase, state)`` in the warp that loads ahead, for every tile of the CTA. It takes the next one
    from the queue when it has loaded all of a tile: the CTA is then a ring of stages away from that tile's end, and tiles are dealt
    out late enough to even out, and early enough that nobody waits for the queue."""
    count, packed_tile, place_packed = I32(0), scheduler.packed_tile, scheduler.place_packed
    taken, since = packed_tile(I32(cute.arch.block_idx()[0]), packed.at_first(), params, config)
    while taken.sequence >= 0:
        _publish(taken, slots, count)
        tile, numbers = place_packed(taken, params, config)
        state = body(tile, numbers, count % 2, state)
        count = count + 1
        taken, since = packed_tile(packed.take(params.queue), since, params, config)
    # The tile of no sequence: every role that reads it ends.
    _publish(taken, slots, count)


@cute.jit
def each_queued(
    scheduler: cutlass.Constexpr, slots: QueueSlots, params, config: cutlass.Constexpr, body: cutlass.Constexpr, state
):
    """Runs ``state = body(tile, numbers, phase, state)`` in every other role for the tiles that :func:`take_queued` takes."""
    count, place_packed, kind = I32(0), scheduler.place_packed, scheduler.kind(config)
    taken = _receive(slots, count, kind)
    while taken.sequence >= 0:
        tile, numbers = place_packed(taken, params, config)
        state = body(tile, numbers, count % 2, state)
        count = count + 1
        taken = _receive(slots, count, kind)


class Mailboxes(NamedTuple):
    """The mailboxes of every stage, and behind them the one of the warp that loads ahead, with its two barriers."""

    words: cute.Pointer
    next_full: cute.Pointer
    next_empty: cute.Pointer


def mailboxes(start: cute.Pointer) -> Mailboxes:
    """Two barriers, then the mailboxes."""
    return Mailboxes(start + 2, start, start + 1)


def mailbox_words(config, stages: int) -> int:
    """The size of :func:`mailboxes` in words of 8 bytes; only packed sequences need them."""
    return 2 + MAILBOX_WORDS * (stages + 1) if config.packed else 0


def init_mailboxes(boxes: Mailboxes, config) -> None:
    """One thread sets the counts of the two barriers."""
    if config.packed:
        cute.arch.mbarrier_init(boxes.next_full, 1)
        cute.arch.mbarrier_init(boxes.next_empty, 1)


def publish_tile(tile: packed.PackedTile | None, words: cute.Pointer, n: int, empty: cute.Pointer, phase) -> None:
    """Writes a packed tile into mailbox n as soon as its stage is empty, before the stage is filled."""
    if tile is None:
        return
    cute.arch.mbarrier_wait(empty + n, phase)
    with cute.arch.elect_one():
        put_words(words + MAILBOX_WORDS * n, tile)
    cute.arch.sync_warp()  # the thread elected to arrive next may be another one


def receive_tile(words: cute.Pointer, n: int, full: cute.Pointer, phase) -> packed.PackedTile:
    """The packed tile in mailbox n, as soon as its stage is full."""
    return _read_mailbox(full + n, phase, words + MAILBOX_WORDS * n)


def publish_ahead(tile: packed.PackedTile, boxes: Mailboxes, stages: int, phase) -> None:
    """Tells the warp that loads ahead a tile."""
    # Partner: the warp that loads ahead, in `receive_ahead`.
    cute.arch.mbarrier_wait(boxes.next_empty, phase)
    with cute.arch.elect_one():
        put_words(boxes.words + MAILBOX_WORDS * stages, tile)
        cute.arch.mbarrier_arrive(boxes.next_full)


def receive_ahead(boxes: Mailboxes, stages: int, phase) -> packed.PackedTile:
    """The tile that the warp that loads ahead works on next; its mailbox is free again at once."""
    found = _read_mailbox(boxes.next_full, phase, boxes.words + MAILBOX_WORDS * stages)
    # All lanes have read the words before one of them gives the mailbox back.
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(boxes.next_empty)
    return found


def _read_mailbox(full, phase, words, kind: type = packed.PackedTile) -> packed.PackedTile:
    cute.arch.mbarrier_wait(full, phase)
    return read_tile(words, kind)


def read_tile(words: cute.Pointer, kind: type = packed.PackedTile) -> packed.PackedTile:
    """The packed tile in a mailbox that can be read, the same for all lanes of the warp."""
    return kind(*(cute.arch.make_warp_uniform(n) for n in get_words(words, len(kind._fields))))


@cute.jit
def take_tiles(
    scheduler: cutlass.Constexpr,
    smem,
    stages: cutlass.Constexpr,
    params,
    config: cutlass.Constexpr,
    body: cutlass.Constexpr,
    upcoming: cutlass.Constexpr,
):
    """Runs ``body(tile, packed_tile, phase)`` in the warp that takes tiles, for every tile of the CTA.

    The phase begins as a new barrier lets it pass. ``upcoming(tile)``, unless it is None, runs beside each tile for the one
    after it, where that one is short: it prefetches into L2.

    Args:
        smem: has ``held_full``, ``held_empty`` and ``boxes``.
        stages: how many mailboxes the computing warpgroups read.
        params: has ``queue`` where sequences are packed.
    """
    # A new barrier lets phase 1 pass: nothing lies in the tiles' memory yet.
    phase, rounds_of, tile_of = I32(1), scheduler.rounds_of, scheduler.tile_of
    packed_tile, place_packed = scheduler.packed_tile, scheduler.place_packed
    if cutlass.const_expr(config.packed):
        sharing = scheduler.sharing(config)
        following = I32(cute.arch.block_idx()[0]) if sharing == 1 else I32(cute.arch.block_idx()[0] // sharing)
        taken, since = packed_tile(following, packed.at_first(), params, config)
        while taken.sequence >= 0:
            if cutlass.const_expr(sharing == 1):
                # The next tile's number is asked for a tile early, so that nobody waits for the atomic addition.
                following = packed.take(params.queue)
            else:
                following = following + cute.arch.grid_dim()[0] // sharing
            publish_ahead(taken, smem.boxes, stages, phase)
            body(place_packed(taken, params, config)[0], taken, phase)
            taken, since = packed_tile(following, since, params, config)
            if cutlass.const_expr(upcoming is not None):
                announce(upcoming, taken.sequence >= 0, lambda taken=taken: place_packed(taken, params, config)[0])
            phase = 1 - phase
        # The tile of no sequence: every role that reads it ends.
        publish_ahead(taken, smem.boxes, stages, phase)
        for n in cutlass.range_constexpr(stages):
            publish_tile(taken, smem.boxes.words, n, smem.held_empty, phase)
            with cute.arch.elect_one():
                # In place of the bytes of K and V, or of Q and dO: the roles wait for this barrier.
                cute.arch.mbarrier_arrive(smem.held_full + n)
    else:
        rounds = rounds_of(params, config)
        for round_ in cutlass.range(rounds, unroll=1):
            body(tile_of(round_, params, config), None, phase)
            if cutlass.const_expr(upcoming is not None):
                announce(upcoming, round_ + 1 < rounds, lambda n=round_ + 1: tile_of(n, params, config))
            phase = 1 - phase


@cute.jit
def announce(upcoming: cutlass.Constexpr, there, tile_of: cutlass.Constexpr):
    """Runs ``upcoming`` for the next tile, if there is one and it is short."""
    if there:
        tile = tile_of()
        if tile.stop - tile.start <= SHORT:
            upcoming(tile)


@cute.jit
def each_tile(
    scheduler: cutlass.Constexpr,
    receive: cutlass.Constexpr,
    params,
    config: cutlass.Constexpr,
    body: cutlass.Constexpr,
    state,
):
    """Runs ``state = body(tile, numbers, phase, state)`` in every role that does not take tiles, for every tile of the CTA.

    ``receive(phase)`` reads the role's mailbox where sequences are packed; ``numbers`` are then the sequence's, else ``params``.
    """
    # Readers wait for phase 0 first: the arrival of the first tile.
    phase, rounds_of, tile_of, place_packed = I32(0), scheduler.rounds_of, scheduler.tile_of, scheduler.place_packed
    if cutlass.const_expr(config.packed):
        taken = receive(phase)
        while taken.sequence >= 0:
            tile, numbers = place_packed(taken, params, config)
            state = body(tile, numbers, phase, state)
            phase = 1 - phase
            taken = receive(phase)
    else:
        for round_ in cutlass.range(rounds_of(params, config), unroll=1):
            state = body(tile_of(round_, params, config), params, phase, state)
            phase = 1 - phase


def nth_packed_tile(
    n, since: packed.Since, heads, tiles_of: Callable, cu: cute.Tensor
) -> tuple[packed.PackedTile, packed.Since]:
    """The n-th tile of packed sequences: all heads of a block, then the next block. Its ``row`` is the block's number in its sequence.

    ``tiles_of(sequence)`` is a sequence's number of tiles. A tile past the last one has ``sequence`` -1.
    """
    sequence, block, since = packed.find(n // heads, tiles_of, cute.size(cu), since)
    return packed.PackedTile(sequence, block, n % heads), since
