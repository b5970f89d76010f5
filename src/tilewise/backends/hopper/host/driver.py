"""The native launcher (native/launcher.h): how it is found, loaded and checked, its structs as ctypes sees them, and its calls."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char, c_char_p, c_int32, c_int64, c_uint32, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tilewise import settings
from tilewise.backends.base import why_not_built
from tilewise.backends.hopper.host.recipe import PreparedLaunch, Recipe, TensorArgument, flat
from tilewise.device import beyond_grid, stream_of

VERSION = 1
_FILE = Path(__file__).parents[1] / "libtilewise_launcher.so"


class PatchStruct(Structure):
    """The launcher's TwPatch."""

    _fields_ = [(name, c_uint32) for name in ("offset", "tensor", "align")]


class LaunchStruct(Structure):
    """The launcher's TwLaunch."""

    _fields_ = [
        ("image", c_void_p),
        ("parameters", c_char_p),
        ("offsets", POINTER(c_uint32)),
        ("patch", POINTER(PatchStruct)),
        ("attribute", POINTER(c_char)),
        ("kernel", c_uint32),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        *[(name, c_uint32) for name in ("shared", "bytes", "count", "patches", "attributes")],
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
    library.tw_launch.argtypes = (c_void_p, c_int32, c_char_p, c_int32, c_void_p)
    return library


def failed(library: ctypes.CDLL) -> RuntimeError:
    """The error that says why this thread's last call of the launcher failed."""
    return RuntimeError(f"the hopper backend failed: {library.tw_launcher_error().decode()}")


class Kernels:
    """A cubin and the recipe of the function that launches its kernels; called with that function's arguments.

    A launch is prepared once for each set of sizes, strides and numbers (:func:`bound`).
    """

    LIMIT = 4096  # launches that are kept at most

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
        self._bound: dict[tuple, Bound] = {}

    def __call__(self, *arguments: Any) -> None:
        given = flat(arguments)
        facts = [(x.shape, x.stride(), x.dtype, x.device) if hasattr(x, "stride") else x for x in given]
        key = tuple(facts)
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= self.LIMIT:
                self._bound.clear()
            found = self._bound[key] = self.bound(*given)
        found(*[given[n] for n in self.tensors])

    def bound(self, *arguments: Any) -> Bound:
        """A launch for the sizes, strides and numbers of these arguments, on the device that they are on, loaded there."""
        given = flat(arguments)
        prepared = self.recipe.prepared(given)
        too_many = beyond_grid({x.kernel: x.grid for x in prepared})
        if too_many:
            raise NotImplementedError("; ".join(too_many))
        device = given[self.tensors[0]].device.index or 0
        if self.library.tw_load(self.image, device):
            raise failed(self.library)
        return Bound(self, prepared, device)


class Bound:
    """A launch that is prepared but for addresses and the stream. Called with the tensors, in the arguments' order."""

    def __init__(self, kernels: Kernels, prepared: Sequence[PreparedLaunch], device: int):
        self._library, self._device, self._count = kernels.library, device, len(prepared)
        self._addresses = struct.Struct(f"{len(kernels.tensors)}Q")
        self._launches = (LaunchStruct * len(prepared))(*(_struct(kernels, launch) for launch in prepared))
        self._at = ctypes.addressof(self._launches)
        self._call = kernels.library.tw_launch

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


def _struct(kernels: Kernels, launch: PreparedLaunch) -> LaunchStruct:
    """A launch as the launcher takes it; its patches name tensors by their number among the tensors of a call."""
    number = {argument: n for n, argument in enumerate(kernels.tensors)}
    align = {argument: kernels.recipe.arguments[argument].align for argument in kernels.tensors}
    patches = [PatchStruct(offset, number[argument], align[argument]) for offset, argument in launch.patches]
    attributes = b"".join(struct.pack("<I4x64s", *attribute) for attribute in launch.attributes)
    return LaunchStruct(
        kernels.image,
        launch.parameters,
        (c_uint32 * len(launch.offsets))(*launch.offsets),
        (PatchStruct * len(patches))(*patches),
        (c_char * len(attributes))(*attributes),
        kernels.names.index(launch.kernel),
        launch.grid,
        launch.block,
        launch.shared,
        len(launch.parameters),
        len(launch.offsets),
        len(patches),
        len(launch.attributes),
    )
