"""Launches of compiled kernels on NVIDIA's driver, their arguments laid out once.

Triton's launcher asks each tensor and each of some hundred numbers what it is, and makes each tensor map anew, at every launch
(docs/decisions.md#triton-relaunch). Here the arguments of a first launch are kept as the bytes that the driver reads; a later one
writes the addresses that changed and goes. What is laid out is checked against what the driver says of the kernel's parameters; where
the two differ, on other GPUs and while somebody listens to Triton's launches, its own launcher is used.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch

BYTES = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4}
FORMATS = {1: "b", 2: "h", 4: "i", 8: "q"}
POINTER, MAP = "pointer", "map"
MAP_BYTES = 128
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID
KEPT_MAPS = 256  # addresses of a descriptor whose maps are kept
SCRATCH_POINTERS = (8, 8)  # bytes of the two that Triton adds to a kernel's parameters, which nothing uses here
# Triton's numbers of element types, where the driver's differ
ELEMENTS = {8: 10, 9: 8, 10: 9}


class Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_int * 16))


class Configuration(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def library():
    """The driver's functions, or None where there is no driver or it is older than 12.4.

    They release Python's lock: a launch may wait for space in its stream's queue, and that for what another thread has yet to launch.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuFuncGetParamInfo, cuda.cuTensorMapEncodeTiled  # noqa: B018 - is it there?
    except (OSError, AttributeError):
        return None
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    cuda.cuLaunchKernelEx.argtypes = [ctypes.POINTER(Configuration), pointer, pointer, pointer]
    cuda.cuTensorMapEncodeTiled.argtypes = [pointer, ctypes.c_int, number, *[pointer] * 5, *[ctypes.c_int] * 4]
    cuda.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    return cuda


class Parameter(NamedTuple):
    """A parameter of a compiled kernel.

    Attributes:
        kind: POINTER, MAP, or Triton's type of a number.
        size: in bytes.
        value: the number; a tensor map's descriptor and Triton's facts about it; a pointer has none, it comes with each call.
        name: the key of a pointer's or a tensor map's address among those that a call gives.
    """

    kind: str
    size: int
    value: object = None
    name: str = ""


def parameters(name: str, kind: object, value: object, metas: list[dict]) -> list[Parameter]:
    """The parameters that an argument becomes, in order.

    A bundle's elements are named as its fields, an element of a plain tuple as ``name[n]``.

    Args:
        name: the argument's.
        kind: Triton's type of it, a tuple for a tuple.
        metas: Triton's facts about the descriptors, taken from the front.
    """
    if isinstance(kind, tuple):
        names = getattr(value, "_fields", None) or [f"{name}[{n}]" for n in range(len(kind))]
        return [x for each in zip(names, kind, value, strict=True) for x in parameters(*each, metas)]
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [Parameter(POINTER, 8, name=name)]
    if kind.startswith("tensordesc"):
        lengths = [Parameter("i32", 4, n) for n in value.shape]
        strides = [Parameter("i64", 8, n) for n in value.strides]
        return [Parameter(MAP, MAP_BYTES, (value, metas.pop(0)), name), *lengths, *strides]
    return [Parameter(kind, BYTES[kind], value)]


def picking(names: Sequence[str]) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    """A function that picks these of the addresses that a call gives, as a tuple also of one or none."""
    if len(names) > 1:
        return itemgetter(*names)

    def at_most_one(addresses: Mapping[str, int]) -> tuple[int, ...]:
        return (addresses[names[0]],) if names else ()

    return at_most_one


def places(sizes: Sequence[int]) -> list[int]:
    """The offsets of values of these sizes in a buffer: each at a multiple of its size, a tensor map at one of 64."""
    found, end = [], 0
    for size in sizes:
        start = -(-end // min(size, 64)) * min(size, 64)
        found.append(start)
        end = start + size
    return found


def address(tensor: torch.Tensor | None) -> int:
    """The address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def encoded(base: int, shape: Sequence[int], strides: Sequence[int], meta: dict) -> bytes:
    """The bytes of a tensor map of a tensor at ``base``, which reads zeros outside; empty where the driver refuses it."""
    rank, size = len(shape), meta["elem_size"]
    whole, step, box = (ctypes.c_uint64 * rank)(), (ctypes.c_uint64 * rank)(), (ctypes.c_uint32 * rank)()
    whole[:], box[:] = list(shape)[::-1], list(meta["block_size"])[::-1]
    step[: rank - 1] = [size * s for s in strides[-2::-1]]
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    memory = (ctypes.c_uint64 * 32)()  # the map's 128 bytes, from the first multiple of 64 on
    start = -(-ctypes.addressof(memory) // 64) * 64
    element = ELEMENTS.get(meta["elem_type"], meta["elem_type"])
    promotion = 2  # of L2, to 128 bytes, as Triton has it
    code = library().cuTensorMapEncodeTiled(
        start, element, rank, base, whole, step, box, ones, 0, meta["swizzle"], promotion, 0
    )
    return b"" if code else ctypes.string_at(start, MAP_BYTES)


class Prepared:
    """A launch: a kernel, its grid, and the bytes of its arguments."""

    def __init__(self, compiled, grid: tuple[int, int, int], found: Sequence[Parameter]):
        starts = places([*[x.size for x in found], *SCRATCH_POINTERS])
        self.buffer = (ctypes.c_uint64 * ((starts[-1] + 8) // 8 + 16))()
        offset = -ctypes.addressof(self.buffer) % 64
        self.values = (ctypes.c_void_p * len(starts))(*[ctypes.addressof(self.buffer) + offset + x for x in starts])
        self.bytes = memoryview(self.buffer).cast("B")
        self.maps, pointers = [], []
        for parameter, start in zip(found, starts, strict=False):
            where = offset + start
            if parameter.kind == MAP:
                descriptor, meta = parameter.value
                self.maps.append((slice(where, where + MAP_BYTES), descriptor.shape, descriptor.strides, meta, {}))
            elif parameter.kind == POINTER:
                pointers.append((where, parameter.name))
            else:
                format_ = "f" if parameter.kind == "fp32" else FORMATS[parameter.size]
                struct.pack_into(format_, self.buffer, where, parameter.value)
        self.runs = []  # of pointers side by side: what packs them, where, and what picks their addresses
        for _, run in groupby(enumerate(pointers), lambda x: x[1][0] - 8 * x[0]):
            side_by_side = [pointer for _, pointer in run]
            names = [name for _, name in side_by_side]
            self.runs.append((struct.Struct(f"{len(names)}Q").pack_into, side_by_side[0][0], picking(names)))
        self.pick_bases = picking([x.name for x in found if x.kind == MAP])
        self.bases, self.lock = (), threading.Lock()
        self.device, self.arguments = torch._C._cuda_getDevice(), ctypes.addressof(self.values)
        metadata = compiled.metadata
        block = (32 * metadata.num_warps, 1, 1)
        early = ctypes.pointer(Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,)))
        self.configuration = Configuration(grid, block, metadata.shared, None, early, int(metadata.launch_pdl))
        self.function, self.launch = compiled.function, library().cuLaunchKernelEx

    @classmethod
    def of(cls, compiled, grid: tuple[int, int, int], arguments: tuple, names: Sequence[str]) -> Prepared | None:
        """The launch with these arguments; None where it has to go another way.

        Args:
            names: of the arguments. Those of pointers and of descriptors are the keys of their addresses; a bundle's go by its fields.
        """
        metadata = compiled.metadata
        scratch = metadata.global_scratch_size or metadata.profile_scratch_size
        if torch.version.hip or library() is None or metadata.num_ctas != 1 or scratch:
            return None
        metas = list(getattr(metadata, "tensordesc_meta", None) or ())
        kinds = compiled.src.signature.values()
        try:
            found = [x for each in zip(names, kinds, arguments, strict=True) for x in parameters(*each, metas)]
        except (KeyError, IndexError):
            return None  # a type of which nothing is known here, or a descriptor that is none on this GPU
        return cls(compiled, grid, found) if agrees(compiled, [*[x.size for x in found], *SCRATCH_POINTERS]) else None

    def __call__(self, addresses: Mapping[str, int]) -> bool:
        """Launches on the current stream of the first launch's device.

        Args:
            addresses: where the tensors begin that pointers and descriptors see, by name; others may be among them.

        Returns:
            False, and nothing is launched, where the driver refuses.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self.lock:
            for pack, start, pick in self.runs:
                pack(self.buffer, start, *pick(addresses))
            bases = self.pick_bases(addresses)
            if bases != self.bases and not self._see(bases):
                return False
            self.configuration.stream = stream
            return self.launch(self.configuration, self.function, self.arguments, None) == 0

    def _see(self, bases: tuple[int, ...]) -> bool:
        """Writes the tensor maps of tensors at ``bases``; False where the driver refuses one."""
        self.bases = ()
        for (where, shape, strides, meta, made), base in zip(self.maps, bases, strict=True):
            code = made.get(base)
            if code is None:
                if len(made) >= KEPT_MAPS:
                    made.clear()
                code = made[base] = encoded(base, shape, strides, meta)
            if not code:
                return False
            self.bytes[where] = code
        self.bases = bases
        return True


def declared(ptx: str) -> int:
    """The number of a kernel's parameters."""
    found = re.search(r"\.entry\s+\w+\(([^)]*)\)", ptx)
    return found[1].count(".param ") if found else 0


def agrees(compiled, sizes: list[int]) -> bool:
    """Whether a kernel has as many parameters as ``sizes``, and the driver says that they have these sizes."""
    if declared(compiled.asm["ptx"]) != len(sizes):
        return False
    start, size, function = ctypes.c_size_t(), ctypes.c_size_t(), compiled.function
    for n, expected in enumerate(sizes):
        if library().cuFuncGetParamInfo(function, n, ctypes.byref(start), ctypes.byref(size)) or size.value != expected:
            return False
    return True
