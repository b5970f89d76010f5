"""Latent attention on a CPU: the kernel's own source on the machine of :mod:`tests.backends.hopper.emulated`.

A stage of keys is one matrix of 64 x 576; P of a tile takes the place of its last columns, which are NaN from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np

from tests.backends.hopper import emulated
from tests.backends.hopper.emulated import THREADS, Barrier, Global, Pointer, Registers, role, rounded, stand_in
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.latent.config import (
    BOXES,
    CHUNK,
    COLUMNS,
    KEYS,
    P_CHUNK,
    PAIR,
    PRODUCTS,
    STAGES,
    VALUE_GROUPS,
    WIDTH,
    LatentConfig,
)

ROTARY = slice(P_CHUNK * CHUNK, WIDTH)


def columns_of(part: int) -> slice:
    return slice(BOXES[part][0] * CHUNK, (BOXES[part][-1] + 1) * CHUNK)


class Place(tuple):
    """A row of the pool and a column of it, which numbers move on."""

    def __add__(self, columns: np.ndarray) -> Place:
        *row, at = self
        return Place((*row, at + columns))


class Values:
    """V: 128 columns of the keys of a stage."""

    def __init__(self, keys: list):
        self.keys, self.tiles = keys, self

    def __getitem__(self, index: tuple):
        if index[:3] == (None, None, None):
            return self, index[-1]
        part, stage = index
        return self.keys[stage][:, part * COLUMNS : (part + 1) * COLUMNS]


def load_kernel(pool: np.ndarray) -> SimpleNamespace:
    """The modules by name, imported with the stand-in."""
    names = ("load", "scores", "values", "storage", "tiles", "params", "pair", "convert", "gather")
    forward = ("compute", "epilogue", "load", "params", "storage", "combine", "pages")
    kit = ("kit.tiles", "kit.instructions", "kit.softmax", "kit.packed", "kit.states")
    rooms = [*(f"latent.{name}" for name in names), *(f"forward.{name}" for name in forward)]
    found = emulated.imported(*rooms, *kit)
    latent = SimpleNamespace(**dict(zip(names, found[: len(names)], strict=True)))
    base = SimpleNamespace(**dict(zip(forward, found[len(names) : -len(kit)], strict=True)))
    emulated._stand_in(base, *found[-len(kit) :])
    latent.combine = base.combine
    _stand_in(latent, found[-len(kit)], found[-3], pool)
    return latent


def _stand_in(latent, tiles, softmax, pool: np.ndarray) -> None:
    places = emulated.Places(tiles)

    def copy_box(maps, smem, place, part, stage) -> None:
        row, head, page = place
        for i in range(ROWS):
            inside = 0 <= row + i < pool.shape[1]
            smem.k[stage][i, columns_of(part)] = pool[page, row + i, head, columns_of(part)] if inside else 0
        (smem.full + latent.storage.part_of(stage, part)).barrier.change(0, -2 * ROWS * CHUNK * len(BOXES[part]))

    def take_piece(q, place, inside, piece) -> np.ndarray:
        _, head, i = (np.broadcast_to(x, THREADS.shape) for x in place)
        found = np.zeros((128, 8), np.float32)
        for n in range(8):
            found[inside, n] = q.values[0, i[inside], head[inside], (8 * piece + n)[inside]]
        return found

    def put_piece(q, row, piece, words) -> None:
        for n in range(8):
            q[row, 8 * piece + n] = words[:, n]

    def begin_scores(operands, part: int, stage) -> None:
        def product() -> None:
            q = operands.rotary if part == 0 else operands.q[:, columns_of(part)]
            found = places.registers(q @ operands.k[stage][:, columns_of(part)].T)
            operands.s.values[:] = found if part == 0 else operands.s.values + found

        role.products.append(product)

    def put_p(smem, stage, words) -> None:
        smem.k[stage][:, ROTARY] = np.nan
        smem.p[stage] = words

    def take_p(operands, smem, stage) -> None:
        operands.p.values[:] = smem.p[stage]

    def put_state(values, part_o, place, first, inside) -> None:
        *place, inside = (np.broadcast_to(x, THREADS.shape) for x in (*place, inside))
        for c in range(values.shape[1]):
            at = first + tiles.column_of(THREADS, c)
            part_o[(*(x[inside] for x in place), at[inside])] = values[0, c, inside]

    def take_numbers(source, chunk) -> np.ndarray:
        (page, row, head, at), inside = source.place, source.inside
        columns = CHUNK * chunk + at[:, None] + np.arange(16)
        return np.where(inside[:, None], pool[page, row[:, None], head, columns], 0)

    def put_numbers(smem, stage, chunk, source, numbers, config) -> None:
        smem.k[stage][source.row[:, None], CHUNK * chunk + (source.lane * 16)[:, None] + np.arange(16)] = numbers

    def prefetch_row(place, inside) -> None:
        page, row, head, _ = (np.broadcast_to(x, THREADS.shape)[inside] for x in place)
        pool[page, row, head]  # an IndexError where it would ask for what is outside the pool

    def copy_columns(smem, stage, chunk, source) -> None:
        row, inside, columns = source.place[0], source.inside, CHUNK * chunk + 8 * source.lane[:, None] + np.arange(8)
        found = pool[row[:, None], 0, 0, columns]
        smem.k[stage][source.row[:, None], columns] = np.where(inside[:, None], found, 0)

    def hold_rotary(operands, smem, config) -> None:
        operands.rotary[:] = smem.q[:, ROTARY]

    def send_four(place, n, values) -> None:
        place["peer", n] = [np.array(x) for x in values]

    def score_operands(qk, smem, config):
        rotary = np.full((ROWS, CHUNK), np.nan, np.float32)
        return latent.scores.ScoreOperands(
            "qk", "held", smem.q, rotary, [0, 0], smem.k, Registers(ROWS), softmax.new_state()
        )

    def value_operands(pv, smem, config):
        o = tuple(Registers(COLUMNS) for _ in range(PRODUCTS))
        return latent.values.ValueOperands("pv", smem.v, Registers(ROWS), o, softmax.new_state())

    stand_in(latent.load, copy_box=copy_box, take_piece=take_piece, put_piece=put_piece)
    stand_in(
        latent.storage,
        put_pair_of=lambda pairs, n, values: pairs.__setitem__(n, [np.array(x) for x in values]),
        get_pair_of=lambda pairs, n: pairs[n],
        put_p=put_p,
    )
    stand_in(
        latent.convert,
        place_of_row=lambda params, page, row, head: Place((page, row, head, 0)),
        anew=lambda value: value,
        take_numbers=take_numbers,
        put_numbers=put_numbers,
        prefetch_row=prefetch_row,
    )
    stand_in(latent.gather, copy_columns=copy_columns, arrive_with_copies=emulated.arrive)
    stand_in(
        latent.pair,
        own_place=lambda smem: smem.p,
        peer_place=lambda smem, peer: role.peer.p,
        send_four=send_four,
        take_four=lambda place, n: place["peer", n],
    )
    stand_in(latent.scores, new_operands=score_operands, begin_scores=begin_scores, hold_rotary=hold_rotary)
    stand_in(latent.scores, round_p=lambda operands, config: rounded(operands.s.values, config.dtype))
    stand_in(latent.values, new_operands=value_operands, take_p=take_p, put_state=put_state)


def run(
    config: LatentConfig, q, pool, sink, extra: tuple, numbers: tuple, scales: tuple
) -> tuple[np.ndarray, np.ndarray]:
    """``(o, lse)`` of q (1, rows, heads, 576) over a pool (page, row, head, 576), one CTA after the other.

    ``extra`` and ``numbers`` are those of the launch, without states and scales; ``scales`` those of a cache of e4m3 numbers, or empty.
    """
    latent = load_kernel(pool)
    lo, hi, tiles, splits, least, sinks, even, scale2, num_pages, *of_lists = numbers
    (_, rows, heads, _), heads_k = q.shape, pool.shape[2]
    o, lse = np.full((1, rows, heads, 512), np.nan, np.float32), np.full((1, heads, rows), np.nan, np.float32)
    names = ("entries", "tokens", "block_table") if config.selected else ("cu_q", "seqlens_k", "block_table")
    named = dict(zip(names, map(Global, extra), strict=True))
    named |= dict(zip(("block", "page_rows"), of_lists, strict=False))
    if config.split:
        states = (splits // PAIR, 1, heads, rows)
        named |= {
            "part_o": Global(np.full((*states, 512), np.nan, np.float32)),
            "part_lse": Global(np.full(states, np.nan, np.float32)),
        }
    optional = emulated_params(latent)(**named, num_pages=num_pages)
    params = latent.params.LatentParams(
        rows, -(-pool.shape[1] // KEYS) * KEYS, heads_k, heads // heads_k, lo, hi, least, sinks, even, np.float32(scale2),
        Global(q), Global(o), Global(lse), sink, optional, *map(Global, (pool, *scales) if config.by_threads else ()),
    )  # fmt: skip
    size = PAIR if config.pair else 1
    for cta in range(tiles):
        for split in range(0, splits, size):
            _run_cluster(latent, params, config, (cta, tiles), (range(split, split + size), splits))
    if config.split:
        emulated._combine(latent.combine, optional, (o, lse, sink, 0), config)
    return o, lse


def emulated_params(latent) -> Callable:
    return next(m for m in latent.params.emulated if m.__name__.endswith("kit.params")).OptionalParams


def _run_cluster(latent, params, config, cta: tuple[int, int], split: tuple[range, int]) -> None:
    """The CTAs of a cluster, at once: those of the tile ``cta`` and the splits of the range."""
    storages = [_storage(latent, config) for _ in split[0]]
    together = Barrier(len(storages) * (STAGES + VALUE_GROUPS))

    def begin(n: int, body: Callable, *arguments: object) -> None:
        role.warp, role.split, role.splits, role.cluster, role.peer = (
            0,
            split[0][n],
            split[1],
            together,
            storages[-1 - n],
        )
        body(*arguments, latent.tiles.tile_of(params, config), params, config)

    bodies = []
    for n, smem in enumerate(storages):
        bodies += [partial(begin, n, latent.scores.compute_scores, None, smem, g, "qk") for g in range(STAGES)]
        bodies += [partial(begin, n, latent.values.compute_values, smem, w, "pv") for w in range(VALUE_GROUPS)]
    emulated._together([(True, body) for body in bodies], *cta)


def _storage(latent, config):
    keys = [np.full((ROWS, WIDTH), np.nan, np.float32) for _ in range(STAGES)]
    parts = STAGES * len(BOXES)
    counts = [
        [128 if config.by_threads else 1] * parts,
        [8, 4, 4, 4, 4] * STAGES,
        [256],
        [128] * STAGES,
        [128] * STAGES,
        [256],
    ]
    full, empty, q_full, p_full, m_full, end = (Pointer([Barrier(n) for n in of]) for of in counts)
    return latent.storage.LatentStorage(
        np.full((ROWS, WIDTH), np.nan, np.float32), keys, Values(keys), {}, full, empty, q_full, p_full, m_full, end, {}, {}, {}
    )  # fmt: skip
