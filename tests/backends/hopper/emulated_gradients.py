"""The gradients of latent attention over lists on a CPU: the kernels' own source on the machine of :mod:`tests.backends.hopper.emulated`.

The two CTAs of a cluster run at once, two warpgroups each. Stood in for are the places of numbers in shared memory and what moves them;
order, barriers, lists, masks and rounding are the kernels'. Parts of dP spoil P, in whose place they lie.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from tests.backends.hopper import emulated
from tests.backends.hopper.emulated import THREADS, Barrier, Global, Pointer, Registers, role, rounded, stand_in
from tilewise.backends.hopper.config import ROWS
from tilewise.backends.hopper.host.selected_gradients import SelectedGradients
from tilewise.backends.hopper.latent.config import KEYS, PAIR
from tilewise.backends.hopper.latent.gradients_config import GROUPS, HEADS, STAGES, GradientsConfig
from tilewise.backends.listed import places_of

HALF, VALUES, NARROW = KEYS // PAIR, 256, 32  # keys, and columns of V and rotary ones, of a CTA
PARTS, TILE = 4 * HEADS * HALF, 2 * 2 * HEADS * HALF  # bytes


class Accumulator(tuple):
    """The shape of one."""


class Product:
    """An atom whose accumulator has so many columns."""

    def __init__(self, columns: int):
        self.columns = columns

    def partition_shape_C(self, shape: tuple) -> Accumulator:
        return Accumulator(shape)


@dataclass
class Storage:
    """The shared memory of a CTA, by columns of its own: values, then rotary ones."""

    q: np.ndarray = field(default_factory=lambda: np.full((HEADS, VALUES + NARROW), np.nan, np.float32))
    do: np.ndarray = field(default_factory=lambda: np.full((HEADS, VALUES), np.nan, np.float32))
    k: np.ndarray = field(default_factory=lambda: np.full((KEYS, VALUES + NARROW), np.nan, np.float32))
    p: np.ndarray = field(default_factory=lambda: np.full((HEADS, KEYS), np.nan, np.float32))
    ds: np.ndarray = field(default_factory=lambda: np.full((HEADS, KEYS), np.nan, np.float32))
    early: dict = field(default_factory=dict)
    late: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {"early_full": 1, "parts_full": 1, "tile_full": 1, "p_free": 4 * GROUPS, "tile_free": 4 * GROUPS}
        self.__dict__ |= {name: Pointer([Barrier(n)]) for name, n in counts.items()}
        self.columns_q, self.columns_do, self.columns_rotary = self.q, self.do, self.q[:, VALUES:]
        self.rotary_q = None


def peers(x: object) -> object:
    """What the peer has in the place of a thing of this CTA."""
    own, peer = role.storages
    return next(getattr(peer, name) for name, thing in vars(own).items() if thing is x)


def own_columns(x: np.ndarray, rank: int) -> np.ndarray:
    """The columns of a CTA, of rows of 512 or 576."""
    values = x[..., VALUES * rank : VALUES * (rank + 1)]
    rest = x[..., 512 + NARROW * rank : 512 + NARROW * (rank + 1)]
    return np.concatenate([values, rest], axis=-1)


def load_kernels() -> SimpleNamespace:
    """The modules by name, imported with the stand-in."""
    names = "gradients", "gradients_dq", "gradients_keys", "gradients_work"
    kit = "kit.tiles", "kit.instructions", "kit.lists", "kit.params"
    found = emulated.imported(*(f"latent.{name}" for name in names), *kit)
    modules = SimpleNamespace(**dict(zip((*names, "tiles", "instructions", "lists", "params"), found, strict=True)))
    cute = modules.gradients.cute
    make = cute.make_rmem_tensor
    cute.make_rmem_tensor = lambda shape, kind: Registers(shape[1]) if type(shape) is Accumulator else make(shape, kind)
    cute.arch.thread_idx = lambda: (THREADS + 128 * role.warpgroup, 0, 0)
    cute.arch.make_warp_uniform = lambda x: int(x[0])
    cute.arch.sync_threads = lambda: role.together()
    cute.arch.cp_async_wait_group = lambda n: None
    cute.arch.cp_async_commit_group = lambda: None
    stand_in(modules.tiles, rows_columns=lambda acc: acc.values)
    stand_in(modules.instructions, pack=lambda low, high, dtype: rounded(low, dtype) + 1j * rounded(high, dtype))
    _stand_in(modules)
    _stand_in_for_dq(modules)
    return modules


def _heads(work) -> np.ndarray:
    """The query heads of a tile; past the group, its last one."""
    return work.head * work.group + np.minimum(work.start + np.arange(HEADS), work.group - 1)


def _rows_of_tile(rows) -> np.ndarray:
    """The rows of k of a tile, of what lanes have looked up."""
    return np.concatenate([rows[n][:32] for n in range(KEYS // 32)])


def _keys(k: Global, rows: np.ndarray, work) -> np.ndarray:
    return np.where(rows[:, None] >= 0, k.values[np.maximum(rows, 0), 0, work.head], 0)


def _stand_in(modules) -> None:
    gradients, keys, tiles = modules.gradients, modules.gradients_keys, modules.tiles
    places = emulated.Places(tiles)

    def copy_heads(smem, x, work) -> None:
        if role.warpgroup == 0:
            there = (work.start + np.arange(HEADS) < work.group)[:, None]
            smem[:, :VALUES] = np.where(there, x.values[0, work.row, _heads(work)], 0)[:, VALUES * work.rank :][
                :, :VALUES
            ]

    def copy_rotary_heads(smem, q, work) -> None:
        if role.warpgroup == 0:
            there = (work.start + np.arange(HEADS) < work.group)[:, None]
            found = np.where(there, q.values[0, work.row, _heads(work)], 0)
            role.storages[0].q[:, VALUES:] = own_columns(found, work.rank)[:, VALUES:]

    def gathering(smem, looked_up, work, params) -> list:
        def copy() -> None:
            if role.warpgroup == 0:
                smem.k[:] = own_columns(_keys(params.k, _rows_of_tile(looked_up.rows), work), work.rank)

        return [copy]

    def statistics_of(smem, w, work, params) -> tuple[list, list]:
        gradients.cute.arch.cluster_wait()
        modules.instructions.meet()
        queries, lse2, delta = params.lse.shape[2], [], []
        for r in range(2):
            row = ROWS * w + tiles.row_of(THREADS, r)
            head, inside = _heads(work)[row], work.start + row < work.group
            at = work.row // queries, head, work.row % queries
            total = (params.o.values[0, work.row, head] * params.do.values[0, work.row, head]).sum(-1)
            found = (total - params.dlse.values[at]).astype(np.float32)
            if work.rank == 0:
                params.delta.values[at[0], head[inside], at[2]] = found[inside]
            empty = ~inside | (params.lse.values[at] <= gradients.LOWEST)
            lse2.append(np.where(empty, np.inf, params.lse.values[at] * gradients.LOG2_E).astype(np.float32))
            delta.append(np.where(empty, 0, found).astype(np.float32))
        return lse2, delta

    def begin_scores(mma, s, dp, smem, w, between) -> None:
        mine = slice(ROWS * w, ROWS * (w + 1))

        def product(acc, left, columns) -> None:
            acc.values[:] = places.registers(left[mine] @ smem.k[:, :columns].T)

        role.products.append(partial(product, s, smem.q, VALUES + NARROW))
        role.products.append(partial(product, dp, smem.do, VALUES))
        for do in between:
            do()

    def send_parts(place, barrier, x, rank) -> None:
        peer = peers(place)
        if place is role.storages[0].late:
            role.storages[1].p[:] = np.nan
        peer[role.warpgroup] = x[:, HALF // 4 :].copy()
        peers(barrier).barrier.change(0, -PARTS // GROUPS)

    def whole_half(place, x) -> list:
        found = x[:, : HALF // 4] + place.pop(role.warpgroup)
        return [[found[r, c] for c in range(HALF // 4)] for r in range(2)]

    def await_bytes(barrier, count, phase) -> None:
        if role.warpgroup == 0:
            barrier.barrier.change(0, count)
            barrier.barrier.change(1, 0)
        barrier.barrier.wait(phase)

    def leave(smem, n, w, words, work, params) -> slice:
        for r in range(2):
            row, lane = tiles.row_of(THREADS, r), THREADS % 4
            for x, part in zip((smem.p, smem.ds), words[r], strict=True):
                for m, word in enumerate(part):
                    x[ROWS * w + row, 8 * lane + 2 * m], x[ROWS * w + row, 8 * lane + 2 * m + 1] = word.real, word.imag
        mine, first = slice(ROWS * w, ROWS * (w + 1)), KEYS * n + HALF * work.rank
        there = work.start + np.arange(ROWS * w, ROWS * (w + 1))
        inside = there < work.group
        params.ds.values[work.number, there[inside], first : first + HALF] = smem.ds[mine, :HALF][inside]
        return mine

    def send_tile(smem, left, rank) -> None:
        own, peer = role.storages
        peer.p[left, HALF:], peer.ds[left, HALF:] = own.p[left, :HALF], own.ds[left, :HALF]
        peer.tile_full.barrier.change(0, -TILE // GROUPS)

    def issue_sums(mma, acc, left, right, part, overwrite, between) -> None:
        def product() -> None:
            found = places.registers(left.T @ right[:, mma.columns * part : mma.columns * (part + 1)])
            acc.values[:] = found if overwrite else acc.values + found

        role.products.append(product)
        for do in between:
            do()
        between.clear()

    def adding(total, acc, first, found, n, work) -> list:
        def add() -> None:
            matrix, key = places.matrix(acc), tiles.row_of(THREADS, np.arange(2)[:, None])
            rows = np.full(KEYS, -2)
            rows[key] = found.rows
            assert (rows[key] == found.rows).all(), "threads of a key know other rows"
            for at, line in zip(rows, matrix, strict=True):
                if at >= 0:
                    with role.lock:
                        total.values[at, work.head, first : first + matrix.shape[1]] += line

        return [add]

    stand_in(modules.gradients_work, copy_heads=copy_heads)
    stand_in(keys, copy_rotary_heads=copy_rotary_heads, gathering=gathering)
    stand_in(
        gradients,
        allocate=lambda config: role.storages[0],
        init_barriers=lambda smem: None,
        statistics_of=statistics_of,
        begin_scores=begin_scores,
        place_of_p=lambda smem: smem.late,
        send_parts=send_parts,
        whole_half=whole_half,
        await_bytes=await_bytes,
        tell_peer=lambda barrier, rank: peers(barrier).barrier.change(4, 0),
        leave=leave,
        send_tile=send_tile,
        issue_sums=issue_sums,
        adding=adding,
    )


def _stand_in_for_dq(modules) -> None:
    module, tiles = modules.gradients_dq, modules.tiles
    places = emulated.Places(tiles)

    def bring(smem, stage, n, last, rows, work, params) -> None:
        if n >= last:
            return
        w = role.warpgroup
        for m in range(KEYS // 32):  # eight threads have a row
            mine = slice(32 * m + 16 * w, 32 * m + 16 * (w + 1))
            found = _keys(params.k, rows[m][::8], work)
            smem["k", stage][mine, :VALUES] = found[:, VALUES * work.rank :][:, :VALUES]
            smem["k", stage][mine, VALUES:] = found[:, 512:]
        heads = work.start + np.arange(ROWS * w, ROWS * (w + 1))
        found = params.ds.values[work.number, np.minimum(heads, work.group - 1), KEYS * n : KEYS * (n + 1)]
        smem["ds", stage][ROWS * w : ROWS * (w + 1)] = np.where((heads < work.group)[:, None], found, 0)

    def begin(wide, narrow, sums, rotary, smem, stage, w, rank) -> None:
        def product() -> None:
            found = smem["ds", stage][ROWS * w : ROWS * (w + 1)] @ smem["k", stage]
            for acc, first in zip((*sums, *[rotary][rank:]), (0, 128, VALUES), strict=False):
                acc.values[:] += places.registers(found[:, first : first + acc.values.shape[1] * 4])

        role.products.append(product)

    def put_columns(acc, first, w, work, params, config) -> None:
        matrix = places.matrix(acc)
        for row, line in enumerate(matrix):
            head = work.start + ROWS * w + row
            if head < work.group:
                params.dq.values[0, work.row, work.head * work.group + head, 64 * first :][: len(line)] = line

    stand_in(module, allocate=lambda config: role.storages[0], bring=bring, begin=begin, put_columns=put_columns)


# -- A launch ------------------------------------------------------------------------------------------------------


class EmulatedGradients(SelectedGradients):
    """The launches on the emulated machine."""

    def _launch(self, given, named, numbers, queries: bool) -> None:
        config = GradientsConfig("bf16" if self.problem.dtype == torch.bfloat16 else "fp16", queries)
        modules = load_kernels()
        arrays = {name: Global(x.detach().float().numpy().copy()) for name, x in named.items()}
        p, written = self.problem, ("dq",) if queries else ("delta", "ds", "dk", "dv")
        optional = modules.params.OptionalParams(
            entries=Global(given["entries"].numpy()), tokens=Global(given["lines"].view(-1, 4).numpy()),
            block=places_of(p)[1], page_rows=0,
        )  # fmt: skip
        rest = {"first": numbers["first"], "extra": optional, "k": Global(given["k"].unsqueeze(1).float().numpy())}
        if queries:
            params = modules.gradients_dq.QueryParams(arrays["ds"], dq=arrays["dq"], **rest)
            kernel = modules.gradients_dq.kernel
            atoms = Product(128), Product(64)
        else:
            if numbers["joint"]:
                arrays["dv"] = None
            names = "q", "o", "do", "lse", "dlse", "delta", "ds", "dk", "dv"
            scales = {name: np.float32(numbers[name]) for name in ("scale", "scale2")}
            params = modules.gradients.GradientParams(
                **{name: arrays[name] for name in names}, joint=numbers["joint"], **scales, **rest
            )
            kernel, atoms = modules.gradients.kernel, (Product(KEYS), Product(128), Product(NARROW))
        lines, group, _ = arrays["ds"].shape
        for cta in range(lines * -(-group // HEADS)):
            _run_cluster(partial(kernel, *atoms, params, config), cta, queries)
        for name in written:
            if arrays[name] is not None:
                named[name].copy_(torch.from_numpy(arrays[name].values))


def _stages() -> dict[tuple[str, int], np.ndarray]:
    """The shared memory of a CTA that makes dQ: values and all rotary columns of keys, and dS."""
    shapes = {"k": (KEYS, VALUES + 2 * NARROW), "ds": (HEADS, KEYS)}
    return {(name, n): np.full(shape, np.nan, np.float32) for name, shape in shapes.items() for n in range(STAGES)}


def _run_cluster(body, cta: int, queries: bool) -> None:
    """The two CTAs of a cluster at once, or of those that make dQ one after the other."""
    lock = threading.Lock()
    storages, clusters = [_stages() if queries else Storage() for _ in range(PAIR)], Barrier(PAIR * GROUPS)
    barriers = [Barrier(GROUPS) for _ in range(PAIR)]

    def begin(rank: int, w: int) -> None:
        def together() -> None:
            with barriers[rank].changed:
                parity = barriers[rank].phase % 2
                barriers[rank].change(1, 0)
            barriers[rank].wait(parity)

        role.split, role.splits, role.warpgroup = rank, PAIR, w
        role.storages, role.cluster, role.lock, role.together = (
            (storages[rank], storages[1 - rank]),
            clusters,
            lock,
            together,
        )
        body()

    for ranks in ((0,), (1,)) if queries else ((0, 1),):
        emulated._together([(True, partial(begin, rank, w)) for rank in ranks for w in range(GROUPS)], cta, 1)
