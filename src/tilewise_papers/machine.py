"""A machine with levels of memory that counts every number it moves and every operation it does.

    level 0      slow memory (HBM, DRAM): holds the inputs and the results
       |  ^      boundary 0: load() reads downwards, store() writes upwards, both are counted
    level 1      SRAM (shared memory, a cache)
       |  ^      boundary 1
    level 2      registers                  ...any number of levels

The rules that make the counts honest:

* arithmetic happens in the last level only, on tiles that were loaded into it or computed there;
* a tile takes room in its level from `load` or `hold` until its loop pass ends; `DoesNotFit` is raised when there is none;
* the result of an expression is free to flow into one other operation; to be used twice it must be held, and pays room;
* nothing in the fast levels survives from one pass of `launch` to the next: these passes could run on different cores.

A machine made with `dry=True` runs the same program without the arithmetic, for counts at sizes too large to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import prod
from typing import ClassVar

import numpy as np

STATISTIC_BYTES = 4


class DoesNotFit(ValueError):
    """A tile finds no room in its level."""


@dataclass(frozen=True)
class Level:
    """One level of memory.

    bytes: its capacity, per core for the levels that a core has for itself.
    bandwidth: bytes a second, all cores together, over the boundary between this level and the next faster one.
    """

    name: str
    bytes: float
    bandwidth: float = float("inf")


@dataclass
class Traffic:
    """The traffic across one boundary: reads go to the faster level, writes to the slower one."""

    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    write_bytes: int = 0

    @property
    def elements(self) -> int:
        return self.reads + self.writes

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    def __add__(self, other: Traffic) -> Traffic:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Traffic(*(a + b for a, b in pairs))

    def __mul__(self, times: int) -> Traffic:
        return Traffic(*(a * times for a in vars(self).values()))


@dataclass
class Work:
    """The work of one launch. boundaries[b] is the traffic between level b and level b + 1.

    items: passes that could run at the same time; 0 is work outside of any launch, which every core can share.
    matmul_flops: 2·m·n·k for each product. other_flops: one for each elementary operation on one element (add, multiply,
    divide, exp, log, compare, select); a row maximum or row sum costs one for each element that enters it.
    """

    boundaries: list[Traffic]
    items: int = 0
    matmul_flops: int = 0
    other_flops: int = 0
    barriers: int = 0

    def __add__(self, other: Work) -> Work:
        boundaries = [a + b for a, b in zip(self.boundaries, other.boundaries, strict=True)]
        sums = [getattr(self, name) + getattr(other, name) for name in self._numbers]
        return Work(boundaries, *sums)

    def __mul__(self, times: int) -> Work:
        return Work([b * times for b in self.boundaries], *(times * getattr(self, name) for name in self._numbers))

    _numbers: ClassVar = ("items", "matmul_flops", "other_flops", "barriers")


@dataclass
class Counts:
    """Everything a program did: launches by name, and the most bytes it held at once in each level."""

    launches: dict[str, Work]
    peak_bytes: list[int]

    @property
    def boundaries(self) -> list[Traffic]:
        return reduce(Work.__add__, self.launches.values()).boundaries

    @property
    def slow(self) -> Traffic:
        """The traffic of the slow memory, which the papers call HBM accesses."""
        return self.boundaries[0]

    @property
    def matmul_flops(self) -> int:
        return sum(work.matmul_flops for work in self.launches.values())

    @property
    def other_flops(self) -> int:
        return sum(work.other_flops for work in self.launches.values())

    @property
    def barriers(self) -> int:
        return sum(work.barriers for work in self.launches.values())

    def __add__(self, other: Counts) -> Counts:
        """One program after the other."""
        launches = dict(self.launches)
        for name, work in other.launches.items():
            launches[name] = launches[name] + work if name in launches else work
        return Counts(launches, [max(a, b) for a, b in zip(self.peak_bytes, other.peak_bytes, strict=True)])

    def of_heads(self, heads: int) -> Counts:
        """The same program on `heads` independent heads; exact, since heads share no number.

        Slow memory holds all heads at once; the faster levels hold what one work item needs, so their peak stays.
        """
        launches = {name: work * heads for name, work in self.launches.items()}
        return Counts(launches, [self.peak_bytes[0] * heads, *self.peak_bytes[1:]])


class Operand:
    """Numbers in one level. Arithmetic on operands is counted by their machine; the results are Values."""

    def __init__(self, machine: Machine, level: int, data: np.ndarray):
        self.machine, self.level, self._data = machine, level, data

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    def read(self) -> np.ndarray:
        return self._data

    def __matmul__(self, other: Operand) -> Value:
        """A B, 2·m·n·k matmul FLOPs."""
        return self.machine.product(self, other)

    def __add__(self, other):
        return self.machine.elementwise(np.add, self, other)

    def __sub__(self, other):
        return self.machine.elementwise(np.subtract, self, other)

    def __mul__(self, other):
        return self.machine.elementwise(np.multiply, self, other)

    def __truediv__(self, other):
        """a / b, and 0 where b is 0: a row that sees no key has l = 0 and the output 0."""
        return self.machine.elementwise(_divide, self, other)

    def maximum(self, other) -> Value:
        return self.machine.elementwise(np.maximum, self, other)

    def log(self) -> Value:
        """The natural logarithm; log(0) = -inf, the lse of a row that sees no key."""
        return self.machine.elementwise(_log, self)

    def exp_minus(self, shift: Operand) -> Value:
        """exp(self − shift), two operations an element; 0 where self is -inf, also if shift is -inf."""
        return self.machine.elementwise(_exp_minus, self, shift, cost=2)

    def select(self, visible: Callable[[], np.ndarray]) -> Value:
        """self where visible() is true, else -inf: masking selects, it never adds."""
        return self.machine.elementwise(lambda s: np.where(visible(), s, s.dtype.type(-np.inf)), self)

    def times(self, factor: Callable[[], np.ndarray]) -> Value:
        """self · factor(), for a factor made on chip."""
        return self.machine.elementwise(lambda s: s * factor(), self)

    def rowmax(self) -> Value:
        return self.machine.fold(np.max, self)

    def rowsum(self) -> Value:
        return self.machine.fold(np.sum, self)


class Value(Operand):
    """The unnamed result of an expression. It takes no room, and so it can be used once."""

    used = False

    def read(self) -> np.ndarray:
        if self.used:
            raise ValueError("the result of an expression was used twice; keep it with machine.hold(name, value)")
        self.used = True
        return self._data


class Tile(Operand):
    """A named array that takes room in its level. tile[rows] and tile.T are views: no traffic, no room of their own."""

    def __init__(
        self, machine: Machine, level: int, data: np.ndarray, name: str, itemsize: int, owner: Tile | None = None
    ):
        super().__init__(machine, level, data)
        self.name, self.itemsize, self.owner, self.live = name, itemsize, owner or self, True

    def read(self) -> np.ndarray:
        if not self.owner.live:
            raise ValueError(f"tile {self.name} left level {self.machine.levels[self.level].name} with its loop pass")
        return self._data

    @property
    def bytes(self) -> int:
        return self._data.size * self.itemsize

    @property
    def T(self) -> Tile:
        return self._view(self.read().T)

    def __getitem__(self, index) -> Tile:
        return self._view(self.read()[index])

    def _view(self, data: np.ndarray) -> Tile:
        return Tile(self.machine, self.level, data, self.name, self.itemsize, self.owner)

    def put(self, value: Operand) -> Tile:
        """Overwrite the tile with a value of its shape, in place: S becomes P without more room. Returns the tile."""
        self.machine.write(self, value)
        return self

    def add_product(self, a: Operand, b: Operand) -> None:
        """self ← self + A B. The accumulation is part of the 2·m·n·k of a product."""
        self.machine.write(self, self.machine.product(a, b, accumulator=self))


class Machine:
    """Levels from slow to fast, and the counts of what was done on them.

    word: bytes of a stored number. Columns of row statistics (shape (rows, 1): m, l, lse, delta) take 4.
    The numbers themselves are computed in the dtype of the inputs, whatever `word` says: it only counts bytes.
    """

    def __init__(self, levels: Iterable[Level], *, word: int = 2, dry: bool = False):
        self.levels, self.word, self.dry = tuple(levels), word, dry
        if len(self.levels) < 2:
            raise ValueError(f"a machine needs at least 2 levels of memory, got {len(self.levels)}")
        self._setup = self._work = Work([Traffic() for _ in self.levels[1:]])
        self.counts = Counts({"setup": self._setup}, [0] * len(self.levels))
        self._held: list[list[Tile]] = [[] for _ in self.levels]
        self._used_bytes = [0] * len(self.levels)
        self._scopes: list[list[Tile]] = []
        self._dtype = np.dtype(np.float32)
        self._times = 1

    @property
    def last(self) -> int:
        """The index of the fastest level, where arithmetic happens."""
        return len(self.levels) - 1

    # Room

    def place(self, name: str, data: np.ndarray, *, itemsize: int | None = None) -> Tile:
        """An input that already lies in slow memory: takes room, no traffic. Later tiles take its dtype."""
        self._dtype = data.dtype
        return self._allocate(name, data, 0, itemsize)

    def empty(self, name: str, shape: tuple[int, ...], *, level: int = 0, itemsize: int | None = None) -> Tile:
        """Room without contents (NaN, so that a number never written shows)."""
        data = self.blank(shape) if self.dry else np.full(shape, np.nan, self._dtype)
        return self._allocate(name, data, level, itemsize)

    def fill(self, name: str, shape: tuple[int, ...], value: float, *, level: int = 0) -> Tile:
        """An array set to a value from the next faster level: counted as writing each element once."""
        tile = self.empty(name, shape, level=level)
        self._cross(level, tile, write=True)
        if not self.dry:
            tile._data[...] = value
        return tile

    def hold(self, name: str, value: Operand | np.ndarray | float, shape: tuple[int, ...] | None = None) -> Tile:
        """Keep a value, an array made on chip, or a constant of the given shape as a tile in the fastest level."""
        if isinstance(value, Operand):
            (data,) = self._operands(value)
        elif isinstance(value, np.ndarray):
            data = value
        else:
            data = self.blank(shape) if self.dry else np.full(shape, value, self._dtype)
        return self._allocate(name, data if self.dry else np.array(data), self.last)

    def free(self, *tiles: Tile) -> None:
        """Give back the room of tiles whose contents are not needed any more."""
        for tile in tiles:
            if tile.live:
                tile.live = False
                self._held[tile.level].remove(tile)
                self._used_bytes[tile.level] -= tile.bytes

    def _allocate(self, name: str, data: np.ndarray, level: int, itemsize: int | None = None) -> Tile:
        itemsize = itemsize or (STATISTIC_BYTES if data.shape[-1] == 1 else self.word)
        tile = Tile(self, level, data, name, itemsize)
        if self._used_bytes[level] + tile.bytes > self.levels[level].bytes:
            raise DoesNotFit(self._no_room(tile))
        self._held[level].append(tile)
        self._used_bytes[level] += tile.bytes
        self.counts.peak_bytes[level] = max(self.counts.peak_bytes[level], self._used_bytes[level])
        if level > 0 and self._scopes:
            self._scopes[-1].append(tile)
        return tile

    def _no_room(self, tile: Tile) -> str:
        level = self.levels[tile.level]
        shapes = [f"{t.name} {'×'.join(map(str, t.shape))} ({t.bytes:,} B)" for t in self._held[tile.level]]
        free = int(level.bytes - self._used_bytes[tile.level])
        return (
            f"tile {tile.name} {'×'.join(map(str, tile.shape))} needs {tile.bytes:,} bytes, but {level.name} has {free:,} of "
            f"{int(level.bytes):,} left\n  held there: {', '.join(shapes) or 'nothing'}\n  Use smaller blocks or a larger {level.name}."
        )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Tiles loaded or held inside leave the fast levels at the end."""
        self._scopes.append([])
        yield
        self.free(*self._scopes.pop())

    def loop(self, passes: Iterable, *, alike: bool = False) -> Iterator:
        """A sequential loop; what one pass loads or holds leaves with it.

        alike: passes over equally many rows do equal work. A dry machine then runs one of them and counts it for all.
        """
        for one, times in self._counted(passes, alike):
            self._times *= times
            with self.scope():
                yield one
            self._times //= times

    def launch(self, name: str, passes: Iterable, *, alike: bool = False) -> Iterator:
        """A parallel loop: each pass is an independent work item and starts with empty fast levels. alike: as for loop.

        Raises ValueError if something is held on chip, which another core could not see.
        """
        for one, times in self._counted(passes, alike):
            held = [tile.name for level in self._held[1:] for tile in level]
            if held:
                raise ValueError(f"work items of {name!r} are not independent: {', '.join(held)} stayed on chip")
            self._work = self.counts.launches.setdefault(name, Work([Traffic() for _ in self.levels[1:]]))
            self._times = times
            self._work.items += times
            with self.scope():
                yield one
            self._work, self._times = self._setup, 1

    def _counted(self, passes: Iterable, alike: bool) -> Iterable[tuple]:
        """(pass, how often its work counts)."""
        if not (self.dry and alike):
            return ((one, 1) for one in passes)
        groups = {}
        for one in passes:
            groups.setdefault(_extent(one), [one, 0])[1] += 1
        return groups.values()

    # Movement

    def load(self, tile: Tile) -> Tile:
        """Copy a tile to the next faster level; counted as reading each element once."""
        copy = self._allocate(tile.name, tile.read() if self.dry else tile.read().copy(), tile.level + 1, tile.itemsize)
        self._cross(tile.level, tile, write=False)
        return copy

    def store(self, target: Tile, value: Operand) -> None:
        """Write a value to a tile of the next slower level; counted as writing each element once."""
        if target.level != value.level - 1:
            names = [level.name for level in self.levels]
            raise ValueError(f"store goes one level up: from {names[value.level]} to {names[target.level]} is none")
        self._cross(target.level, target, write=True)
        self.write(target, value)

    def write(self, target: Tile, value: Operand) -> None:
        data = value.read()
        target.read()
        if data.shape != target.shape:
            raise ValueError(f"tile {target.name} is {target.shape}, the value is {data.shape}")
        if not self.dry:
            target._data[...] = data

    def barrier(self) -> None:
        """The warps of a work item wait for each other."""
        self._work.barriers += self._times

    def _cross(self, boundary: int, tile: Tile, *, write: bool) -> None:
        traffic, size = self._work.boundaries[boundary], self._times * prod(tile.shape)
        if write:
            traffic.writes += size
            traffic.write_bytes += size * tile.itemsize
        else:
            traffic.reads += size
            traffic.read_bytes += size * tile.itemsize

    # Arithmetic

    def product(self, a: Operand, b: Operand, accumulator: Tile | None = None) -> Value:
        x, y = self._operands(a, b)
        if x.shape[1] != y.shape[0]:
            raise ValueError(f"cannot multiply {x.shape} by {y.shape}")
        self._work.matmul_flops += self._times * 2 * x.shape[0] * x.shape[1] * y.shape[1]
        if self.dry:
            return Value(self, self.last, self.blank((x.shape[0], y.shape[1])))
        return Value(self, self.last, x @ y if accumulator is None else accumulator.read() + x @ y)

    def elementwise(self, function: Callable, *operands, cost: int = 1) -> Value:
        data = self._operands(*operands)
        shape = tuple(map(max, zip(*(x.shape for x in data if isinstance(x, np.ndarray)), strict=True)))
        self._work.other_flops += self._times * cost * prod(shape)
        return Value(self, self.last, self.blank(shape) if self.dry else function(*data))

    def fold(self, function: Callable, operand: Operand) -> Value:
        (x,) = self._operands(operand)
        self._work.other_flops += self._times * x.size
        return Value(self, self.last, self.blank((x.shape[0], 1)) if self.dry else function(x, axis=1, keepdims=True))

    def _operands(self, *operands) -> list:
        for operand in operands:
            if isinstance(operand, Operand) and operand.level != self.last:
                level, last = self.levels[operand.level].name, self.levels[self.last].name
                raise ValueError(
                    f"arithmetic happens in {last}; {getattr(operand, 'name', 'an operand')} lies in {level}: load it"
                )
        return [x.read() if isinstance(x, Operand) else x for x in operands]

    @staticmethod
    @lru_cache(maxsize=4096)
    def blank(shape: tuple[int, ...]) -> np.ndarray:
        """A stand-in of a shape that takes no memory, for dry runs."""
        return np.broadcast_to(np.float32(0), shape)


def with_capacity(levels: Iterable[Level], level: int, capacity: float) -> tuple[Level, ...]:
    """The same levels, one of them with another capacity."""
    return tuple(replace(x, bytes=capacity) if i == level else x for i, x in enumerate(levels))


def _extent(one) -> object:
    """How much a loop pass covers: the length of a slice, of each slice of a tuple; any other passes are all the same."""
    if isinstance(one, tuple):
        return tuple(map(_extent, one))
    return one.stop - one.start if isinstance(one, slice) else None


def _divide(a, b):
    return np.divide(
        a, b, out=np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b)), np.result_type(a, b)), where=b != 0
    )


# numpy's float32 exp and log are off by up to a few units in the last place, torch's by less than one: go through float64.
def _log(a):
    return np.log(a, out=np.full(a.shape, -np.inf), where=a > 0, dtype=np.float64).astype(a.dtype)


def _exp_minus(a, shift):
    exponent = np.subtract(a, shift, out=np.full(a.shape, -np.inf, a.dtype), where=a != -np.inf)
    return np.exp(exponent, dtype=np.float64).astype(a.dtype)
