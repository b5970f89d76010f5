"""The native launcher: found, loaded, checked, and its structs as ctypes sees them (native/launcher.h)."""

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
from tilewise.backends.hopper.host.recipe import Made, Recipe, TensorArgument, flat

VERSION = 1
_FILE = Path(__file__).parents[1] / "libtilewise_launcher.so"


class Patch(Structure):
    _fields_ = [(name, c_uint32) for name in ("offset", "tensor", "align")]


class Launch(Structure):
    _fields_ = [
        ("image", c_void_p),
        ("parameters", c_char_p),
        ("offsets", POINTER(c_uint32)),
        ("patch", POINTER(Patch)),
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
    if library.tw_launcher_version() != VERSION or library.tw_launch_size() != ctypes.sizeof(Launch):
        return f"{path.name} was built from other sources; install tilewise again"
    library.tw_launcher_error.restype = c_char_p
    library.tw_image.restype = c_void_p
    library.tw_image.argtypes = (c_char_p, c_int64, POINTER(c_char_p), POINTER(c_int32), c_int32)
    library.tw_load.argtypes = (c_void_p, c_int32)
    library.tw_launch.argtypes = (c_void_p, c_int32, c_char_p, c_int32, c_void_p)
    return library


def failed(library: ctypes.CDLL) -> RuntimeError:
    return RuntimeError(f"the hopper backend failed: {library.tw_launcher_error().decode()}")


# The stream that torch would use on a device, by number: what torch itself generates code with, and 10 times as fast as
# torch.cuda.current_stream. Builds of torch without CUDA have none.
stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


class Kernels:
    """A cubin, and the recipe of the function that launches its kernels; called with that function's arguments.

    What depends on sizes, strides and numbers is made once for each of them (:func:`bound`).
    """

    LIMIT = 4096

    def __init__(self, cubin: bytes, recipe: Recipe):
        self.recipe = recipe
        self.tensors = [n for n, x in enumerate(recipe.arguments) if isinstance(x, TensorArgument)]
        self.names = sorted({x.kernel for x in recipe.launches})
        self.library = load()
        if isinstance(self.library, str):
            raise RuntimeError(self.library)
        shared = [max(x.shared for x in recipe.launches if x.kernel == name) for name in self.names]
        names, count = [name.encode() for name in self.names], len(self.names)
        self.image = self.library.tw_image(
            cubin, len(cubin), (c_char_p * count)(*names), (c_int32 * count)(*shared), count
        )
        self._bound: dict[tuple, Bound] = {}

    def __call__(self, *arguments: Any) -> None:
        given = flat(arguments)
        key = tuple([(x.shape, x.stride(), x.dtype, x.device) if hasattr(x, "stride") else x for x in given])
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= self.LIMIT:
                self._bound.clear()
            found = self._bound[key] = self.bound(*given)
        found(*[given[n] for n in self.tensors])

    def bound(self, *arguments: Any) -> Bound:
        """A launch for the sizes, strides and numbers of these arguments, on the device that they are on, loaded there."""
        given = flat(arguments)
        made = self.recipe.made(given)
        device = given[self.tensors[0]].device.index or 0
        if self.library.tw_load(self.image, device):
            raise failed(self.library)
        return Bound(self, made, device)


class Bound:
    """A launch of which all is known but addresses and the stream. Called with the tensors, in the arguments' order."""

    def __init__(self, kernels: Kernels, made: Sequence[Made], device: int):
        self._library, self._device, self._count = kernels.library, device, len(made)
        self._addresses = struct.Struct(f"{len(kernels.tensors)}Q")
        self._launches = (Launch * len(made))(*(_launch(kernels, x) for x in made))
        self._at = ctypes.addressof(self._launches)
        self._call = kernels.library.tw_launch

    def __call__(self, *tensors: torch.Tensor) -> None:
        self.at(*[x.data_ptr() for x in tensors])

    def at(self, *addresses: int) -> None:
        """With where the tensors lie."""
        packed = self._addresses.pack(*addresses)
        if self._call(self._at, self._count, packed, self._device, stream_of(self._device)):
            raise failed(self._library)


class PerStrides:
    """A function's launches for one problem, which fixes its numbers and the sizes of the first ``fixed`` tensors; where
    tensors lie, the strides of copies and the lengths of lists may be others at every call.

    Called with the tensors, in the arguments' order, and what gives all arguments, which is asked only when it must be; returns
    the launch that it found.
    """

    def __init__(self, function: Callable[[], Kernels], fixed: int):
        self._function, self._fixed = function, fixed
        self._bound: dict[tuple, Bound] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], arguments: Callable[[], tuple]) -> Bound:
        key = tuple([x.stride() for x in tensors] + [x.shape for x in tensors[self._fixed :]])
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._function().bound(*arguments())
        bound(*tensors)
        return bound


def _launch(kernels: Kernels, made: Made) -> Launch:
    number = {n: at for at, n in enumerate(kernels.tensors)}
    align = [kernels.recipe.arguments[n].align for n in kernels.tensors]
    patches = [Patch(x.offset, number[x.tensor], align[number[x.tensor]]) for x in made.patches]
    attributes = b"".join(struct.pack("<I4x64s", *x) for x in made.attributes)
    return Launch(
        kernels.image,
        made.parameters,
        (c_uint32 * len(made.offsets))(*made.offsets),
        (Patch * len(patches))(*patches),
        (c_char * len(attributes))(*attributes),
        kernels.names.index(made.kernel),
        made.grid,
        made.block,
        made.shared,
        len(made.parameters),
        len(made.offsets),
        len(patches),
        len(made.attributes),
    )
