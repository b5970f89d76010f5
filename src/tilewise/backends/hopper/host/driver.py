"""The native launcher (native/launcher.h): how it is found, loaded and checked, its structs as ctypes sees them, and its calls."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_void_p
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NoReturn

import torch

from tilewise import settings
from tilewise.backends.base import why_not_built
from tilewise.backends.hopper.host.recipe import (
    LEAVES,
    OPERATIONS,
    Argument,
    Launch,
    Recipe,
    Row,
    TensorArgument,
    offsets,
    signed,
)
from tilewise.device import stream_of
from tilewise.problem import Shaped

VERSION = 5  # of the launcher
UNFIT, BEYOND = (
    -2,
    -3,
)  # what it returns where kernels were not compiled for a call, and where a grid is larger than a GPU's
_FILE = Path(__file__).parents[1] / "libtilewise_launcher.so"


class PatchStruct(Structure):
    """The launcher's TwPatch."""

    _fields_ = [(name, c_uint32) for name in ("offset", "tensor", "align")]


class RowStruct(Structure):
    """The launcher's TwRow."""

    _fields_ = [
        *[(name, c_uint8) for name in ("operation", "bits", "width", "padding")],
        *[(name, c_int32) for name in "abc"],
    ]


class FieldStruct(Structure):
    """The launcher's TwField."""

    _fields_ = [(name, c_uint32) for name in ("offset", "bytes", "row")]


class CheckStruct(Structure):
    """The launcher's TwCheck."""

    _fields_ = [*[(name, c_int32) for name in ("place", "free", "symbol", "padding")], ("number", c_int64)]


class LaunchStruct(Structure):
    """The launcher's TwLaunch."""

    _fields_ = [
        *[(name, c_void_p) for name in ("image", "offsets", "patch", "field", "attribute", "attribute_field")],
        ("kernel", c_uint32),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        *[(name, c_uint32) for name in ("shared", "bytes", "count", "patches", "fields", "attributes")],
    ]


class RecipeStruct(Structure):
    """The launcher's TwRecipe."""

    _fields_ = [
        *[(name, c_void_p) for name in ("row", "constant", "check", "launch")],
        *[(name, c_uint32) for name in ("rows", "checks", "symbols", "launches", "given")],
    ]


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | str:
    """The launcher, or why there is none."""
    path = Path(settings.launcher_library() or _FILE)
    if not path.exists():
        return f"its launcher is not there ({path.name}): {why_not_built()}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"its launcher does not load: {error}"
    if not hasattr(library, "tw_launch_size"):
        return f"{path} is no launcher of tilewise's"
    library.tw_launch_size.restype = c_int64
    if library.tw_launcher_version() != VERSION or library.tw_launch_size() != ctypes.sizeof(LaunchStruct):
        return f"{path.name} was built from other sources; install tilewise again"
    library.tw_launcher_error.restype = c_char_p
    library.tw_image.restype = c_void_p
    library.tw_image.argtypes = (c_char_p, c_int64, POINTER(c_char_p), POINTER(c_int32), c_int32)
    library.tw_run.argtypes = (c_void_p, c_char_p, c_char_p, c_int32, c_void_p)
    return library


class Kernels:
    """A cubin and the recipe of the function that launches its kernels."""

    def __init__(self, cubin: bytes, recipe: Recipe):
        self.recipe = recipe
        self.tensors = [n for n, kind in enumerate(recipe.arguments) if isinstance(kind, TensorArgument)]
        self.names = sorted({launch.kernel for launch in recipe.launches})
        self.library = load()
        if isinstance(self.library, str):
            raise RuntimeError(self.library)
        shared = [max(launch.shared for launch in recipe.launches if launch.kernel == name) for name in self.names]
        names, count = [name.encode() for name in self.names], len(self.names)
        self.image = self.library.tw_image(
            cubin, len(cubin), (c_char_p * count)(*names), (c_int32 * count)(*shared), count
        )
        self.native = NativeRecipe(self)
        self._words, self._run = self.native.given, self.library.tw_run
        self._kinds = tuple(
            None if isinstance(kind, str) else (getattr(torch, kind.dtype), len(kind.shape))
            for kind in recipe.arguments
        )
        self._seen: object = None  # kinds that were equal to these: of one structure they are one object

    def pack(self, kinds: tuple, words: Sequence[int | float], device: torch.device) -> bytes:
        """The words of a launch as the launcher takes them.

        Args:
            kinds: dtype and rank of each argument that is a tensor, None of each number.
            words: the numbers, and the sizes and strides of tensors, in order; then of each tensor the number of its memory, and its first
                byte there.

        Raises:
            ValueError: the kernels were not compiled for these arguments.
        """
        if kinds is not self._seen:
            if kinds != self._kinds:
                self._refuse(kinds, words, device)
            self._seen = kinds
        try:
            return self._words.pack(*words)
        except struct.error:
            self._refuse(kinds, words, device)

    def run(self, words: bytes, memories: bytes, device: torch.device) -> None:
        """Launches the kernels on the device's stream of the moment.

        Args:
            words: packed. memories: their addresses, 64 bits each.

        Raises:
            ValueError: the kernels were not compiled for these arguments. NotImplementedError: they would have more blocks than a GPU.
        """
        index = device.index or 0
        code = self._run(self.native.at, words, memories, index, stream_of(index))
        if code == UNFIT:
            self._refuse(self._kinds, self._words.unpack(words), device)
        elif code:
            why = self.library.tw_launcher_error().decode()
            raise NotImplementedError(why) if code == BEYOND else RuntimeError(f"the hopper backend failed: {why}")

    def _refuse(self, kinds: tuple, words: Sequence[int | float], device: torch.device) -> NoReturn:
        rest, given = iter(words), []
        for kind in kinds:
            rank = 0 if kind is None else kind[1]
            sides = tuple(islice(rest, rank)), tuple(islice(rest, rank))
            given.append(next(rest) if kind is None else Shaped(*sides, kind[0], device))
        self.recipe.check(given)
        raise ValueError("a launch has sizes for which its kernel was not compiled")


class NativeRecipe:
    """A recipe as the launcher evaluates it, of the sizes, the strides and the numbers of a call: one 64-bit word each, in this order for
    each argument, and behind them two words of each tensor, the number of its memory and its first byte there."""

    def __init__(self, kernels: Kernels):
        recipe = kernels.recipe
        self.given = struct.Struct("".join(map(_packed_as, recipe.arguments)) + "2q" * len(kernels.tensors))
        places, place = [], 0
        for kind in recipe.arguments:
            places.append(place)
            place += 1 if isinstance(kind, str) else 2 * len(kind.shape)
        constants: list[int] = []
        rows = [_row(row, recipe, places, constants) for row in recipe.rows]
        checks = [
            check for n, place in zip(kernels.tensors, map(places.__getitem__, kernels.tensors), strict=True)
            for check in _checks(recipe.arguments[n], place)
        ]  # fmt: skip
        launches = [_launch(kernels, launch) for launch in recipe.launches]
        # What structs point to stays as long as they do.
        self._kept = [_array(RowStruct, rows), (c_int64 * len(constants))(*constants), _array(CheckStruct, checks)]
        self._kept += [
            (LaunchStruct * len(launches))(*[struct for struct, _ in launches]),
            [kept for _, kept in launches],
        ]
        symbols = 1 + max((check[2] for check in checks), default=-1)
        counts = len(rows), len(checks), symbols, len(launches), place
        self._struct = RecipeStruct(*[addressof(x) for x in self._kept[:4]], *counts)
        self.at = addressof(self._struct)


def _array(kind: type[Structure], rows: Sequence[tuple]) -> ctypes.Array:
    """An array of structs."""
    return (kind * len(rows))(*[kind(*row) for row in rows])


def _packed_as(kind: Argument) -> str:
    """The format of an argument's words."""
    if isinstance(kind, str):
        return "f4x" if kind == "f32" else "q"
    return "q" * 2 * len(kind.shape)


_NUMBERS = {name: n for n, name in enumerate((*LEAVES, *OPERATIONS))}


def _row(row: Row, recipe: Recipe, places: Sequence[int], constants: list[int]) -> tuple[int, ...]:
    """The fields of a TwRow."""
    of = row.operands
    if max(row.bits, row.width) > 64:
        raise ValueError(f"a recipe computes with {max(row.bits, row.width)} bits")
    if row.operation == "constant":
        constants.append(signed(of[0] & (1 << 64) - 1, 64))
        of = (len(constants) - 1,)
    elif row.operation == "number":
        of = places[of[0]], int(recipe.arguments[of[0]] == "f32")
    elif row.operation in ("size", "stride"):
        rank = len(recipe.arguments[of[0]].shape)
        of = places[of[0]] + (rank if row.operation == "stride" else 0) + of[1], 0
    elif row.operation == "address":
        of = ()
    return _NUMBERS[row.operation], row.bits, row.width, 0, *(*of, -1, -1, -1)[:3]


def _checks(argument: TensorArgument, place: int) -> list[tuple[int, ...]]:
    """The fields of a TwCheck for each size and stride of a tensor, whose first size is at ``place``."""
    rank, found = len(argument.shape), []
    for n, want in enumerate((*argument.shape, *argument.stride)):
        free = place + n - rank if n >= rank else -1
        symbol, number = (-1, want) if isinstance(want, int) else want
        found.append((place + n, free, symbol, 0, number))
    return found


def _launch(kernels: Kernels, launch: Launch) -> tuple[LaunchStruct, list]:
    """A kernel's launch as the launcher takes it, and what that points to; its patches count the tensors of a call alone."""
    number = {argument: n for n, argument in enumerate(kernels.tensors)}
    align = {argument: kernels.recipe.arguments[argument].align for argument in kernels.tensors}
    starts = offsets(launch.sizes)
    patches = [(offset, number[argument], align[argument]) for offset, argument in launch.patches]
    attributes = [n for key, fields in launch.attributes for n in (key, len(fields))]
    kept = [
        (c_uint32 * len(starts))(*starts), _array(PatchStruct, patches), _array(FieldStruct, launch.fields),
        (c_uint32 * len(attributes))(*attributes), _array(FieldStruct, [x for _, fields in launch.attributes for x in fields]),
    ]  # fmt: skip
    counts = launch.shared, starts[-1], len(starts) - 1, len(patches), len(launch.fields), len(launch.attributes)
    pointers = [addressof(x) for x in kept]
    return LaunchStruct(
        kernels.image, *pointers, kernels.names.index(launch.kernel), launch.grid, launch.block, *counts
    ), kept
