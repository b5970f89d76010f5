"""The native launcher (native/launcher.h): how it is found, loaded and checked, its structs as ctypes sees them, and its calls."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, addressof, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

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
    flat,
    offsets,
    signed,
)
from tilewise.device import beyond_grid, stream_of

VERSION, BEYOND = 2, -3  # of the launcher; what it returns where a grid is larger than a GPU's
_FILE = Path(__file__).parents[1] / "libtilewise_launcher.so"


class PatchStruct(Structure):
    """The launcher's TwPatch."""

    _fields_ = [(name, c_uint32) for name in ("offset", "tensor", "align")]


class LaunchStruct(Structure):
    """The launcher's TwLaunch."""

    _fields_ = [
        *[(name, c_void_p) for name in ("image", "parameters", "offsets", "patch", "attribute")],
        ("kernel", c_uint32),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        *[(name, c_uint32) for name in ("shared", "bytes", "count", "patches", "attributes")],
    ]


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


class TemplateStruct(Structure):
    """The launcher's TwTemplate."""

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
        *[(name, c_uint32) for name in ("rows", "checks", "symbols", "launches")],
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
    library.tw_launch_size.restype = c_int64
    if library.tw_launcher_version() != VERSION or library.tw_launch_size() != ctypes.sizeof(LaunchStruct):
        return f"{path.name} was built from other sources; install tilewise again"
    library.tw_launcher_error.restype = c_char_p
    library.tw_image.restype = c_void_p
    library.tw_image.argtypes = (c_char_p, c_int64, POINTER(c_char_p), POINTER(c_int32), c_int32)
    library.tw_load.argtypes = (c_void_p, c_int32)
    library.tw_prepare.argtypes = (c_void_p, c_char_p, c_void_p, c_void_p)
    library.tw_launch.argtypes = (c_void_p, c_int32, c_char_p, c_int32, c_void_p)
    return library


def failed(library: ctypes.CDLL) -> RuntimeError:
    """The error that says why this thread's last call of the launcher failed."""
    return RuntimeError(f"the hopper backend failed: {library.tw_launcher_error().decode()}")


class Kernels:
    """A cubin and the recipe of the function that launches its kernels; called with that function's arguments."""

    def __init__(self, cubin: bytes, recipe: Recipe):
        self.recipe = recipe
        self.tensors = [n for n, kind in enumerate(recipe.arguments) if isinstance(kind, TensorArgument)]
        self.dtypes = [getattr(torch, recipe.arguments[n].dtype) for n in self.tensors]
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

    def __call__(self, *arguments: Any) -> None:
        given = flat(arguments)
        self.bound(*given)(*[given[n] for n in self.tensors])

    def bound(self, *arguments: Any) -> Bound:
        """A launch for the sizes, strides and numbers of these arguments, on the device that they are on, loaded there."""
        given = flat(arguments)
        if len(given) != len(self.recipe.arguments):
            self.recipe.check(given)
        device = given[self.tensors[0]].device.index or 0
        if self.library.tw_load(self.image, device):
            raise failed(self.library)
        return Bound(self, given, device)


class NativeRecipe:
    """A recipe as the launcher evaluates it, of the sizes, the strides and the numbers of a call: one 64-bit word each, in this order for
    each argument."""

    def __init__(self, kernels: Kernels):
        recipe = kernels.recipe
        self.given = struct.Struct("".join(map(_packed_as, recipe.arguments)))
        self.count, size = len(recipe.launches), sum(_bytes_of(launch) for launch in recipe.launches)
        self.launches, self.memory = LaunchStruct * self.count, ctypes.c_char * size
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
        templates = [_template(kernels, launch) for launch in recipe.launches]
        # What structs point to stays as long as they do.
        self._kept = [_array(RowStruct, rows), (c_int64 * len(constants))(*constants), _array(CheckStruct, checks)]
        self._kept += [
            (TemplateStruct * len(templates))(*[struct for struct, _ in templates]),
            [kept for _, kept in templates],
        ]
        symbols = 1 + max((check[2] for check in checks), default=-1)
        counts = len(rows), len(checks), symbols, len(templates)
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


def _bytes_of(launch: Launch) -> int:
    """The bytes of a launch's parameters and attributes."""
    return offsets(launch.sizes)[-1] + 72 * len(launch.attributes)


def _template(kernels: Kernels, launch: Launch) -> tuple[TemplateStruct, list]:
    """A launch as the launcher takes it, and what that points to; its patches name tensors by their number among the tensors of a call."""
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
    return TemplateStruct(
        kernels.image, *pointers, kernels.names.index(launch.kernel), launch.grid, launch.block, *counts
    ), kept


class Bound:
    """A launch that is prepared but for addresses and the stream. Called with the tensors, in the arguments' order.

    Raises:
        ValueError: the kernel was not compiled for these arguments. NotImplementedError: it would have more blocks than a GPU.
    """

    def __init__(self, kernels: Kernels, given: Sequence[Any], device: int):
        self._library, self._device, self._kernels = kernels.library, device, kernels
        native, tensors = kernels.native, [given[n] for n in kernels.tensors]
        self._count, self._addresses = native.count, _addresses(len(tensors))
        self._launches, self._memory = native.launches(), native.memory()
        self._at, self._call = addressof(self._launches), kernels.library.tw_launch
        if [x.dtype for x in tensors] != kernels.dtypes or len({x.device for x in tensors}) > 1:
            self._refuse(given)
        words = []
        for x in given:
            words += (*x.shape, *x.stride()) if hasattr(x, "stride") else (x,)
        try:
            packed = native.given.pack(*words)
        except struct.error:
            self._refuse(given)
        code = kernels.library.tw_prepare(native.at, packed, self._at, addressof(self._memory))
        if code == BEYOND:  # all is prepared nevertheless
            launches = zip(kernels.recipe.launches, self._launches, strict=True)
            too_many = beyond_grid({x.kernel: tuple(launch.grid) for x, launch in launches})
            if too_many:
                raise NotImplementedError("; ".join(too_many))
        elif code:
            self._refuse(given)

    def _refuse(self, given: Sequence[Any]) -> NoReturn:
        self._kernels.recipe.check(given)
        raise ValueError("a launch has sizes for which its kernel was not compiled")

    def __call__(self, *tensors: torch.Tensor) -> None:
        self.at(*[tensor.data_ptr() for tensor in tensors])

    def at(self, *addresses: int) -> None:
        """Launches with the tensors that lie at these addresses, in the arguments' order."""
        packed = self._addresses.pack(*addresses)
        if self._call(self._at, self._count, packed, self._device, stream_of(self._device)):
            raise failed(self._library)


class PerStrides:
    """A function's launches for one problem. The problem fixes its numbers and the sizes of the first ``fixed`` tensors; addresses,
    the strides of copies and the lengths of lists may change from call to call.

    Called with the tensors, in the arguments' order, and a function that gives all arguments and is called only for a new launch; and
    with the numbers, where not all launches have the same. Returns the launch that it called.
    """

    def __init__(self, function: Callable[[], Kernels], fixed: int):
        self._function, self._fixed = function, fixed
        self._bound: dict[tuple, Bound] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], arguments: Callable[[], tuple], numbers: tuple = ()) -> Bound:
        key = tuple([x.stride() for x in tensors] + [x.shape for x in tensors[self._fixed :]] + [numbers])
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._function().bound(*arguments())
        bound(*tensors)
        return bound


@lru_cache(maxsize=64)
def _addresses(count: int) -> struct.Struct:
    """So many addresses, packed."""
    return struct.Struct(f"{count}Q")
