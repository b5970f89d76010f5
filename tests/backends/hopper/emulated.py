"""The Hopper forward on a CPU: the kernel's own source, run with a stand-in for the DSL.

Every role is a thread; a warpgroup's 128 threads are one NumPy axis. Barriers count arrivals and bytes as mbarriers do, a wgmma
is done when it is waited for and no sooner, rooms hold what was last copied there. What is stood in for is where a wgmma
accumulator's numbers lie (``tiles.row_of``, ``tiles.column_of``, held against the DSL's layout elsewhere), TMA's boxes and
descriptors, and instructions; all else is the files of ``forward/`` and ``kit/`` as they are compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import types
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tilewise.backends.hopper.config import LONG, ROWS, Traced
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.kit.params import optional_params

HOPPER = "tilewise.backends.hopper"
THREADS = np.arange(128)
ELEMENTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
LIMIT = 60.0  # seconds that a role may wait: then it is a deadlock
role = threading.local()
Traced.trees = cache(Traced.trees)  # a kernel asks for them at each pair


def product_of(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A product in fp32 whose bits do not depend on the place of a row or column, as a BLAS's do on some processors."""
    with np.errstate(over="ignore"):
        return (left.astype(np.float64) @ right).astype(np.float32)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(ELEMENTS[dtype]).float().numpy()


# -- Barriers ------------------------------------------------------------------------------------------------------


class Barrier:
    def __init__(self, count: int):
        self.count, self.arrived, self.bytes, self.phase = count, 0, 0, 0
        self.changed = threading.Condition(threading.RLock())

    def change(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.arrived, self.bytes = self.arrived + arrivals, self.bytes + size
            if self.arrived > self.count:
                raise RuntimeError("more arrivals than the barrier expects")
            if self.arrived == self.count and self.bytes == 0:
                self.phase, self.arrived = self.phase + 1, 0
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, LIMIT):
                raise RuntimeError("a role waits for ever")


class Pointer:
    """To one of a row of barriers, or of numbers."""

    def __init__(self, barriers: list[Barrier], at: int = 0):
        self.barriers, self.at = barriers, at

    def __add__(self, n: int) -> Pointer:
        return Pointer(self.barriers, self.at + n)

    @property
    def barrier(self) -> Barrier:
        return self.barriers[self.at]


@contextmanager
def elect_one():
    role.elected = True
    yield
    role.elected = False


def arrive(pointer: Pointer) -> None:
    elected = getattr(role, "elected", False)
    pointer.barrier.change((4 if elected else 128) if role.computes else 1, 0)


def meet(barrier_id: int, number_of_threads: int, waits: bool = True) -> None:
    """Warpgroups, or warps, arrive, and may wait until as many have as the barrier takes; a warpgroup's threads go together anyway."""
    mine = 128 if role.computes else 32
    if number_of_threads == mine:
        return
    barrier = role.named.setdefault(barrier_id, Barrier(number_of_threads))
    with barrier.changed:
        parity = barrier.phase % 2
        barrier.change(mine, 0)
    if waits:
        barrier.wait(parity)


def cluster_arrive() -> None:
    """A warpgroup of a cluster, which ``role.cluster`` counts, arrives."""
    with role.cluster.changed:
        role.parity = role.cluster.phase % 2
        role.cluster.change(1, 0)


# -- Memory --------------------------------------------------------------------------------------------------------


class Registers:
    """An accumulator, or P, of one warpgroup: (row of the thread, column of the thread, thread)."""

    def __init__(self, columns: int):
        self.values = np.full((2, columns // 4, 128), np.nan, np.float32)

    def fill(self, x: float) -> None:
        self.values[:] = x


class RegisterRow(np.ndarray):
    """A few numbers of each thread."""

    def __new__(cls, count: int, whole: bool = False):
        unwritten = -(1 << 40) if whole else np.nan  # a register holds what was in it before
        return np.full((count, role.threads), unwritten, np.int64 if whole else np.float32).view(cls)

    def load(self) -> np.ndarray:
        return self.copy()

    def store(self, x: np.ndarray) -> None:
        self[:] = x


class Global:
    """A tensor in global memory; None takes all of a mode, as in the DSL."""

    def __init__(self, values: np.ndarray):
        self.values, self.shape = values, values.shape

    def _index(self, index: object) -> tuple:
        return tuple(slice(None) if n is None else n for n in (index if isinstance(index, tuple) else (index,)))

    def __getitem__(self, index: object):
        found = self.values[self._index(index)]
        sliced = isinstance(index, tuple) and any(n is None for n in index)
        return Global(found) if sliced else found

    def __setitem__(self, index: object, x: object) -> None:
        self.values[self._index(index)] = x


class Rooms:
    """Tiles in shared memory; indexing makes a (rooms, n) of a slot."""

    def __init__(self, count: int):
        self.tiles: list = [None] * count

    def __getitem__(self, index: tuple):
        return self, index[-1]


class Matrix:
    """Rows of a head in global memory, (row, column), as tiles of ``shape``: read with zeros past the end, written without them."""

    def __init__(self, values: np.ndarray, shape: tuple[int, int]):
        self.values, self.shape = values, shape

    def __getitem__(self, index: tuple):
        return self, index[-1]

    def _part(self, n: int) -> np.ndarray:
        return self.values[n * self.shape[0] : (n + 1) * self.shape[0]] if n >= 0 else self.values[:0]

    def read(self, at) -> np.ndarray:
        found, part = np.zeros(self.shape, np.float32), self._part(at)
        found[: part.shape[0], : part.shape[1]] = part
        return found

    def write(self, at, tile: np.ndarray) -> None:
        part = self._part(at)
        part[:] = tile[: part.shape[0], : part.shape[1]]


class Plane(Matrix):
    """A head's pairs in global memory, (row, key), as tiles of ``shape``."""

    def __getitem__(self, index: tuple):
        return self, index[1:]

    def _part(self, at: tuple[int, int]) -> np.ndarray:
        return self.values[tuple(slice(n * size, (n + 1) * size) for n, size in zip(at, self.shape, strict=True))]


def copy(atom, source, target, tma_bar_ptr: Pointer | None = None) -> None:
    if tma_bar_ptr is None:
        (rooms, n), (matrix, m) = source, target
        matrix.write(m, rooms.tiles[n])
        return
    (matrix, m), (rooms, n) = source, target
    rooms.tiles[n] = matrix.read(m)
    tma_bar_ptr.barrier.change(0, -2 * prod(matrix.shape))


# -- The stand-in --------------------------------------------------------------------------------------------------


def _float(x):
    return np.asarray(x, np.float32)


UNARY = ("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sin", "cos", "floor")


def _unary(f, x, fastmath: bool = False):
    return f(np.float32(x))


def _whole(x):
    return int(x) if np.ndim(x) == 0 else np.asarray(x).astype(np.int64)


def _word(kind):
    return lambda x: np.asarray(x).astype(kind)


def _either(integer, array):
    return lambda a, b: integer(a, b) if isinstance(a, int) and isinstance(b, int) else array(a, b)


def modules() -> dict[str, types.ModuleType]:
    """``cutlass`` and the like, as far as the kernel's source needs them."""
    plain = lambda f: f  # noqa: E731
    arch = SimpleNamespace(
        fmax=np.fmax,
        shuffle_sync_bfly=lambda x, offset: x[THREADS[: len(x)] ^ offset],
        rcp_approx=lambda x: np.float32(1) / x,
        vote_any_sync=lambda p: bool(np.any(p)),
        elect_one=elect_one,
        mbarrier_wait=lambda pointer, parity: pointer.barrier.wait(parity),
        mbarrier_arrive=arrive,
        mbarrier_arrive_and_expect_tx=lambda pointer, size: (
            pointer.barrier.change(0, size),
            pointer.barrier.change(1, 0),
        ),
        cluster_arrive=cluster_arrive,
        cluster_wait=lambda: role.cluster.wait(role.parity),
        barrier=meet,
        barrier_arrive=partial(meet, waits=False),
        fence_view_async_shared=lambda: None,
        fence_acq_rel_gpu=lambda: None,
        fence_proxy=lambda kind: None,
        sync_warp=lambda: None,
        cp_async_bulk_commit_group=lambda: None,
        cp_async_bulk_wait_group=lambda n, read: None,
        thread_idx=lambda: (THREADS[: role.threads], 0, 0),
        block_idx=lambda: (role.cta, getattr(role, "split", 0), 0),
        grid_dim=lambda: (role.ctas, getattr(role, "splits", 1), 1),
        warp_idx=lambda: role.warp,
        shuffle_sync=shuffle,
        vote_ballot_sync=ballot,
        popc=int.bit_count,
        make_warp_uniform=lambda x: x,
        griddepcontrol_wait=lambda: None,
        griddepcontrol_launch_dependents=lambda: None,
    )
    math = SimpleNamespace(
        **{name: partial(_unary, getattr(np, name)) for name in UNARY},
        rsqrt=lambda x, **_: np.float32(1) / np.sqrt(np.float32(x)),
        erf=lambda x: torch.erf(torch.as_tensor(x)).numpy(),
        roundeven=np.rint,
        pow=np.power,
        fma=lambda a, b, c: np.float32(np.float64(a) * b + c),
    )
    group = SimpleNamespace(fence=lambda: None, commit_group=lambda: None, wait_group=wait_group)
    cute = types.ModuleType("cutlass.cute")
    vars(cute).update(
        jit=plain, kernel=plain, arch=arch, math=math, copy=copy, prefetch=lambda atom, source: None,
        size=lambda s, mode=None: prod(s.shape[:1] if isinstance(s, RegisterRow) else s.shape) if mode is None else s.shape[mode[0]],
        make_rmem_tensor=lambda shape, kind: RegisterRow(shape[0], kind is _whole),
        make_rmem_tensor_like=lambda of: Registers(4 * of.values.shape[1]),
        domain_offset=lambda at, t: Global(t.values[at[0] :]), assume=assume,
    )  # fmt: skip
    cutlass = types.ModuleType("cutlass")
    vars(cutlass).update(
        Float32=_float, Int32=_whole, Int64=_whole, Boolean=np.bool_, Uint32=_word(np.uint32), Uint64=_word(np.uint64),
        BFloat16="bf16", Float16="fp16", cute=cute, Constexpr=None,
        range=lambda *a, unroll=1: range(*a), range_constexpr=range, const_expr=plain,
        min=_either(min, np.minimum), max=_either(max, np.maximum), select_=select,
    )  # fmt: skip
    nvgpu = types.ModuleType("cutlass.cute.nvgpu")
    vars(nvgpu).update(OperandMajorMode=None, cpasync=None, warpgroup=group, warp=None)
    utils, helpers = types.ModuleType("cutlass.utils"), types.ModuleType("cutlass.utils.hopper_helpers")
    utils.LayoutEnum, utils.hopper_helpers = None, helpers
    driver, bindings, cuda = (types.ModuleType(n) for n in ("cuda.bindings.driver", "cuda.bindings", "cuda"))
    bindings.driver, cuda.bindings = driver, bindings
    return {m.__name__: m for m in (cutlass, cute, nvgpu, utils, helpers, driver, bindings, cuda)}


def assume(n: int, divby: int) -> int:
    assert n % divby == 0
    return n


def shuffle(x: np.ndarray, lane):
    """From a lane of each thread's warp; from one for all, where the same number is in every warp, as a number."""
    if np.ndim(x) == 0:  # what all lanes have
        return x
    return x[lane].item() if np.ndim(lane) == 0 else x[THREADS // 32 * 32 + lane % 32]


def ballot(p: np.ndarray):
    """The word of each thread's warp; one number, where it is the same in every warp."""
    words = [sum(1 << n for n, x in enumerate(warp) if x) for warp in p.reshape(-1, 32)]
    return words[0] if len({*words}) == 1 else np.repeat(words, 32)


def select(condition, a, b):
    return (a if condition else b) if np.ndim(condition) == np.ndim(a) == np.ndim(b) == 0 else np.where(condition, a, b)


def reaches_two(values: list) -> np.ndarray:
    """Whether one of a thread's numbers is 2 or more in magnitude, or NaN."""
    return np.any([~(np.abs(x) < 2) for x in values], axis=0)


def common_bits(word, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Of an integer and two fp32 numbers, as far as the sign goes."""
    return np.where((np.asarray(word) < 0) & np.signbit(first) & np.signbit(second), -1, 0)


def spread_signs(low: np.ndarray, high: np.ndarray, halves: tuple[int, int]) -> np.ndarray:
    """Masks of two halves by the top bits of a half of each word."""
    signs = ((word >> (15 + 16 * half)) & 1 for word, half in zip((low, high), halves, strict=True))
    return sum(sign.astype(np.uint32) * np.uint32(0xFFFF << 16 * n) for n, sign in enumerate(signs))


def drop(operand: Registers, masks: list) -> None:
    """Sets an operand's pairs to zero where their half of the mask of their word is zero; word c + r holds columns c and c + 1 of row r."""
    for n, mask in enumerate(masks):
        for half in range(2):
            held = operand.values[n % 2, n - n % 2 + half]
            held[:] = np.where((mask >> 16 * half) & 1, held, 0.0)


def take(queue: Global) -> int:
    queue.values[0] += 1
    return int(queue.values[0]) - 1 + role.ctas


def wait_group(left: int) -> None:
    """The warpgroup's oldest products are done, all but ``left``."""
    while len(role.products) > left:
        role.products.pop(0)()


def kernel_modules() -> list[str]:
    """The modules that are traced into kernels: all of the kit's and both passes' but the configs and parameters, which need no DSL."""
    folder = Path(importlib.util.find_spec(HOPPER).submodule_search_locations[0])
    files = (
        file
        for room in ("kit", "forward", "backward", "latent", "decoding")
        for file in sorted((folder / room).glob("*.py"))
    )
    return [
        f"{HOPPER}.{file.parent.name}.{file.stem}"
        for file in files
        if file.stem not in ("__init__", "config", "choice", "parameters")
    ]


def imported(*kernels: str) -> list[types.ModuleType]:
    """The kernels' modules ("kit.tiles"), imported with ``cutlass`` stood in for; other modules keep what they have.

    They are the same for the same names, without what was put into them since. Every module has ``emulated``, the list of all that
    were imported with it.
    """
    found, loaded, as_imported = _imported(kernels)
    for namespace, names in as_imported:
        namespace.clear()
        namespace.update(names)
    for module in loaded:
        if module.__name__ == f"{HOPPER}.kit.instructions":
            stand_in(module, after=lambda x, score: x, zero_after=lambda score, zero: zero, held=np.float32,
                     clamp=lambda x, limit: np.clip(x, -limit, limit), reaches_two=reaches_two, common_bits=common_bits,
                     rough_tanh=np.tanh, spread_signs=spread_signs, keep_words_above=lambda word, words: None)  # fmt: skip
        if module.__name__ == f"{HOPPER}.kit.dropout":
            stand_in(module, drop=drop)
    return found


@cache
def _imported(kernels: tuple[str, ...]) -> tuple[list, list, list]:
    """The kernels' modules, all that were imported with them, and each namespace with what is in it then."""
    fakes, names = modules(), kernel_modules()
    hidden = {n: sys.modules.pop(n) for n in [*fakes, *names] if n in sys.modules}
    rooms = [(vars(importlib.import_module(room)), name) for room, _, name in (n.rpartition(".") for n in names)]
    known = [(room, name, room.pop(name)) for room, name in rooms if name in room]
    sys.modules.update(fakes)
    try:
        found = [importlib.import_module(f"{HOPPER}.{kernel}") for kernel in kernels]
        loaded = [sys.modules[name] for name in names if name in sys.modules]
    finally:
        for n in [*fakes, *names]:
            sys.modules.pop(n, None)
        for room, name in rooms:
            room.pop(name, None)
        sys.modules.update(hidden)
        for room, name, module in known:
            room[name] = module
    for module in loaded:
        module.emulated = loaded
    spaces = [vars(space) for space in (*fakes.values(), fakes["cutlass.cute"].arch, *loaded)]
    return found, loaded, [(space, dict(space)) for space in spaces]


def stand_in(module: types.ModuleType, **functions: object) -> None:
    """Puts functions in the place of a module's of the same names, in every module that was imported with it."""
    for name, function in functions.items():
        original = getattr(module, name)
        for other in module.emulated:
            for key in [key for key, value in vars(other).items() if value is original]:
                setattr(other, key, function)


def load_kernel() -> SimpleNamespace:
    """The forward's modules by name, imported with the stand-in."""
    names = ("compute", "epilogue", "load", "params", "storage", "combine", "pages", "gather")
    rooms = [f"forward.{name}" for name in names]
    kit = ("kit.tiles", "kit.instructions", "kit.softmax", "kit.packed", "kit.states")
    found = imported(*rooms, *kit)
    forward = SimpleNamespace(**dict(zip(names, found[: len(names)], strict=True)))
    _stand_in(forward, *found[len(names) :])
    stand_in_for_gathers(forward.gather)
    return forward


class Places:
    """Where an accumulator's numbers lie, by the ``tile`` at hand."""

    def __init__(self, tile):
        self.rows = tile.row_of(THREADS, np.arange(2)[:, None])[:, None, :]  # (2, 1, 128)
        self.columns = cache(lambda count: np.stack([tile.column_of(THREADS, c) for c in range(count)])[None])

    def matrix(self, values: np.ndarray) -> np.ndarray:
        """64 rows, of a warpgroup's registers."""
        found = np.full((ROWS, values.shape[1] * 4), np.nan, np.float32)
        found[self.rows, self.columns(values.shape[1])] = values
        return found

    def registers(self, matrix: np.ndarray) -> np.ndarray:
        return matrix[self.rows, self.columns(matrix.shape[1] // 4)]


def cut(info, shape, origin, head, batch, room):
    if hasattr(info, "tma_tensor"):  # a bias by pair
        return Plane(info.values[batch, head], shape), room
    rows, width = shape if origin[0] is None else shape[::-1]
    if isinstance(batch, tuple):  # a Span: the copy engine sees a sequence's rows alone
        values = info.values[0, batch.start : batch.end]
        assert len(values) == batch.size
    else:
        values = info.values[batch]
    if origin == (None, None):  # in parts
        return Plane(values[:, head], shape), room
    first = width * ((origin[1] if origin[0] is None else origin[0]) or 0)
    return Matrix(values[:, head, first : first + width], (rows, width)), room


def copy_box(of, box, m, stage, full, config) -> None:
    """A part of a key block, from the pool (page, row, head, column): rows of the pool outside [0, LONG) of the box are zeros."""
    t, rows, rooms, pool = config.tiles, config.paged, of.smem, of.info.values
    width = t.width if of.rows_mode == 0 else t.width_v
    if m == 0:
        rooms.tiles[stage] = np.full((t.tile_n, width), np.nan, np.float32)
    part = rooms.tiles[stage][m * rows : (m + 1) * rows]
    part[:] = 0
    for i in range(rows):
        at = box.row + i
        if 0 <= at < LONG:
            page, row = divmod(at + box.end - box.wrap, of.info.page_rows)
            assert row < pool.shape[1], "a row between two pages"
            part[i, : pool.shape[3]] = pool[page, row, of.head]
    full.barrier.change(0, -2 * rows * width)


def _stand_in(forward, tiles, instructions, softmax, packed, states) -> None:
    places = Places(tiles)
    matrix_of = places.matrix

    def begin(mma, acc, a, b, overwrite: bool, first: int = 0) -> None:
        def product() -> None:
            left = matrix_of(a.values) if isinstance(a, Registers) else a[0].tiles[a[1]]
            right = b[0].tiles[b[1]]
            depth = None if right is None else right.shape[1 if mma == "qk" else 0]
            left = left if left is None else left[:, 16 * first :][:, :depth]
            if left is None or right is None or left.shape[1] != depth:
                acc.values[:] = np.nan  # of what was there last: nobody uses it
                return
            values = places.registers(product_of(left, right.T if mma == "qk" else right))
            acc.values[:] = values if overwrite else acc.values + values

        role.products.append(product)

    def new_operands(qk, pv, smem, w, params, config):
        t, pairs = config.tiles, forward.compute.pair_bias
        s, o, p = Registers(t.tile_n), Registers(t.width_o), Registers(t.tile_n)
        wait = RegisterRow(1) if config.short_tanh else None
        place, first = pairs.new_place(0), w * t.bias_stages
        bias = pairs.BiasRing(Registers(t.tile_n), place, smem.bias, first, smem.bias_full, smem.bias_empty)
        rest = smem.q, smem.k, smem.v, s, o, p, softmax.new_state(), wait, bias if config.score == "bias" else None
        return forward.compute.ForwardOperands(
            "qk", "pv", *rest, forward.compute.segments.new_segments(w, params, config)
        )

    def load_steps(operand, mma, tile) -> None:
        operand.values[:] = places.registers(tile[0].tiles[tile[1]])

    def round_p(operands, config) -> None:
        operands.p.values[:] = rounded(operands.s.values, config.dtype)

    def put_lse(lse, place, value, inside) -> None:
        mine = (THREADS % 4 == 0) & inside
        *place, value = (np.broadcast_to(x, mine.shape)[mine] for x in (*place, value))
        lse[tuple(place)] = value

    def put_row(values, part_o, place, inside) -> None:
        *place, inside = (np.broadcast_to(x, THREADS.shape) for x in (*place, inside))
        for thread in THREADS[inside]:
            for c, value in enumerate(values[0, :, thread]):
                part_o[(*(x[thread] for x in place), tiles.column_of(thread, c))] = value

    def put_columns(o, place, inside, column, words) -> None:
        batch, head, i = (np.broadcast_to(x, THREADS.shape) for x in place)
        for n, word in enumerate(words):
            for part, at in ((word.real, column + 2 * n), (word.imag, column + 2 * n + 1)):
                there = np.broadcast_to(inside, THREADS.shape) & (at < o.shape[3])
                o[batch[there], i[there], head[there], at[there]] = part[there]

    def put_merged(o, lse, sums, statistic, column) -> None:
        lse[0] = statistic[0]
        step = forward.combine.STEP
        for n, numbers in enumerate(sums):
            at = column + step * n
            inside = at < o.shape[0]
            o[at[inside]] = np.asarray(numbers)[inside]

    def put_tile(operands, smem, n_q, config) -> None:
        smem.o.tiles[n_q] = rounded(matrix_of(operands.o.values), config.dtype)

    stand_in(forward.compute, new_operands=new_operands, round_p=round_p)
    stand_in(
        forward.compute.pair_bias,
        new_place=lambda phase: [0, phase],
        OperandValues=lambda operand, acc, dtype, held: operand.values,
        load_register_steps=load_steps,
    )
    stand_in(forward.epilogue, put_lse=put_lse, put_row=put_row, put_columns=put_columns, put_tile=put_tile)
    stand_in(tiles, begin_product=begin, rows_columns=lambda acc: acc.values, tma_tiles=cut)
    stand_in(forward.combine, put=put_merged)
    stand_in(forward.compute.segments, put_zeros=put_zeros)
    stand_in(states, put_numbers=put_numbers, take_numbers=take_numbers)
    stand_in(forward.pages, by_boxes=lambda rooms, config, rows_mode: rooms, copy_box=copy_box)
    stand_in_for_queues(instructions, packed)
    stand_in(
        instructions,
        pack=lambda low, high, dtype: rounded(low, dtype) + 1j * rounded(high, dtype),  # two numbers as one word
        all_agree=lambda condition, barrier_id: int(np.all(condition)),
        keep_above=lambda word, value: None,
    )


def put_zeros(smem, key, stage, config) -> None:
    smem.v.tiles[stage][key] = 0


def put_numbers(states, place, values) -> None:
    mine = slice(0, states.shape[-2])  # the threads that have rows
    place = tuple(np.broadcast_to(x, THREADS.shape)[mine] for x in place)
    for n, value in enumerate(values):
        states.values[(*place, n)] = np.broadcast_to(value, THREADS.shape)[mine]


def take_numbers(states, place) -> list:
    place = tuple(np.broadcast_to(x, THREADS.shape) for x in place)
    return [states.values[(*place, n)].copy() for n in range(states.shape[-1])]


def stand_in_for_gathers(gather) -> None:
    """What brings rows of keys one by one."""

    def copy_columns(tensor, source, smem, stage, row, piece, config) -> None:
        t, ring = config.tiles, smem.k
        if ring.tiles[stage] is None:
            ring.tiles[stage] = np.full((t.tile_n, t.width), np.nan, np.float32)
        columns = 8 * piece[:, None] + np.arange(8)
        inside = (source >= 0)[:, None] & (columns < tensor.shape[3])
        found = tensor.values[0, np.maximum(source, 0)[:, None], 0, np.minimum(columns, tensor.shape[3] - 1)]
        ring.tiles[stage][row[:, None], columns] = np.where(inside, found, 0)

    def put_word(smem, stage, warp, word) -> None:
        (smem.words + gather.WORDS * stage).barriers[gather.WORDS * stage] = np.broadcast_to(word, (128,))[
            ::32
        ].tolist()

    stand_in(gather, copy_columns=copy_columns, put_word=put_word, arrive_with_copies=arrive)


def stand_in_for_queues(instructions, packed) -> None:
    """What packed sequences' tiles are handed on by."""
    stand_in(
        instructions,
        put_words=lambda pointer, numbers: pointer.barriers.__setitem__(pointer.at, numbers),
        get_words=lambda pointer, count: pointer.barriers[pointer.at],
    )
    packed.take = take


def run(config: Config, q, k, v, sink, given: dict) -> tuple[np.ndarray, np.ndarray]:
    """``(o, lse)`` of arrays (batch, seqlen, heads, head_dim), one CTA after the other; ``given``: what else the launch takes, by name,
    with arrays for tensors."""
    forward = load_kernel()
    t = config.tiles
    lo, hi, section, ctas, sinks, scale2, cap2 = (given[x.name] for x in config.parameters[-1][:7])
    o = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32)
    extra = optional_params({name: Global(x) if isinstance(x, np.ndarray) else x for name, x in given.items()})
    extra = extra._replace(direct_o=Global(o), rows_k=Global(k), rows_v=Global(v))
    if t.segment:  # for so many CTAs
        extra = extra._replace(part_o=Global(np.full((ctas, *extra.part_o.shape[1:]), np.nan, np.float32)))
    params = forward.params.ForwardParams(
        q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2], q.shape[0], section, lo, hi, sinks,
        np.float32(scale2), np.float32(cap2), extra,
    )  # fmt: skip
    info = lambda x: SimpleNamespace(values=x, atom=None, group=params.group, page_rows=extra.page_rows)  # noqa: E731
    bias = (
        SimpleNamespace(values=extra.bias.values, atom=None, tma_tensor=extra.bias.values.T)
        if config.score == "bias"
        else None
    )
    maps = forward.params.TensorMaps(info(q), info(k), info(v), info(o), bias)
    for cta in range(ctas):
        ring, tiles = Rooms(t.stages), Rooms(t.q_tiles)
        full = 132 if config.selected else 1
        bars = [[Barrier(n) for _ in range(count)] for n, count in
                ((full, t.stages), (4 * t.warpgroups, t.stages), (1, t.q_tiles), (1 if config.stores else 4, t.q_tiles),
                 (128, t.q_tiles))]  # fmt: skip
        mailboxes = Pointer([None] * 2 * t.q_tiles)
        pairs = Rooms(t.bias_tiles), *(Pointer([Barrier(n) for _ in range(t.bias_tiles)]) for n in (1, 4))
        smem = forward.storage.ForwardStorage(tiles, ring, ring, tiles, *map(Pointer, bars), None, mailboxes, *pairs)
        smem = smem._replace(words=Pointer([None] * forward.storage.WORDS * t.stages))
        roles = [(False, partial(forward.load.load, maps, smem, params, config))]
        if config.selected:
            roles = [(True, partial(forward.gather.gather, maps, smem, params, config))]
        for w in range(t.warpgroups):
            if config.stores:
                roles.append((False, partial(forward.load.store, maps, smem, w, params, config)))
            roles.append((True, partial(forward.compute.compute, smem, w, lse, sink, "qk", "pv", params, config)))
        _together(roles, cta, ctas)
    if config.split:
        _combine(forward.combine, extra, (o, lse, sink, sinks), config)
    return o, lse


def _combine(combine, extra, rest: tuple, config: Config) -> None:
    """Warp after warp; sums are rounded to the outputs' type by whoever reads them."""
    o, lse, sink, sinks = rest
    merge = combine.Merge(extra.part_o, extra.part_lse, Global(o), Global(lse), sink, sinks)
    role.threads = 32
    with np.errstate(all="ignore"):
        for cta in range(-(-lse.size * combine.warps_of_row(config) // combine.WARPS)):
            for role.warp in range(combine.WARPS):
                role.cta = cta
                combine.kernel(merge, config)


def _together(roles, cta: int, ctas: int) -> None:
    """One CTA's."""
    _at_once({cta: roles}, ctas)


def _at_once(roles_of: dict[int, list], ctas: int) -> None:
    errors: list[BaseException] = []
    named: dict[int, dict[int, Barrier]] = {cta: {} for cta in roles_of}

    def start(cta: int, computes: bool, body) -> None:
        role.named = named[cta]
        role.computes, role.cta, role.ctas, role.products, role.threads = computes, cta, ctas, [], 128
        role.warp = getattr(role, "warp", 0)
        try:
            with np.errstate(all="ignore"):
                body()
            assert not role.products, "a product that nobody waited for"
        except BaseException as error:
            errors.append(error)

    pairs = [(cta, *pair) for cta, roles in roles_of.items() for pair in roles]
    threads = [threading.Thread(target=start, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    while not errors and any(x.is_alive() for x in threads):  # after an error the others wait for what never comes
        for thread in threads:
            thread.join(0.05)
    if errors:
        raise errors[0]
