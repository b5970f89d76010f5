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
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import torch

BYTES = {"i1": 1, "u1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4}
FORMATS = {1: "b", 2: "h", 4: "i", 8: "q"}
POINTER, MAP = "pointer", "map"
MAP_BYTES = 128
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID
KEPT_MAPS = 256  # addresses of a descriptor whose maps are kept
# Triton's numbers of element types, where the driver's differ
ELEMENTS = {8: 10, 9: 8, 10: 9}


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_int * 16))


class Configuration(ctypes.Structure):
    """CUlaunchConfig."""

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
    """The driver's functions, or None where there is none or it is older than 12.4. They let go of the interpreter's lock: a launch
    may wait for room in its stream's queue, and that for what another thread has yet to launch."""
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


def parameters(kind: object, value: object, metas: list[dict]) -> list[tuple[str, int, object]]:
    """``(kind, bytes, value)`` of each parameter that an argument becomes, in order: a pointer, a tensor map, or a number's type.

    Args:
        kind: Triton's type, a tuple for a tuple. metas: of the descriptors, taken from the front.
    """
    if isinstance(kind, tuple):
        return [x for pair in zip(kind, value, strict=True) for x in parameters(*pair, metas)]
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [(POINTER, 8, address(value))]
    if kind.startswith("tensordesc"):
        lengths = [("i32", 4, n) for n in value.shape]
        return [(MAP, MAP_BYTES, (value, metas.pop(0))), *lengths, *[("i64", 8, n) for n in value.strides]]
    return [(kind, BYTES[kind], value)]


def places(sizes: Sequence[int]) -> list[int]:
    """Where values of these sizes begin in a buffer: each at a multiple of its size, a tensor map of 64."""
    found, end = [], 0
    for size in sizes:
        start = -(-end // min(size, 64)) * min(size, 64)
        found.append(start)
        end = start + size
    return found


def address(x: object) -> int:
    return x if isinstance(x, int) else 0 if x is None else x.data_ptr()


def encoded(base: int, shape: Sequence[int], strides: Sequence[int], meta: dict) -> bytes:
    """A tensor map of a tensor at ``base``, which reads zeros outside; empty where the driver refuses it."""
    rank, size = len(shape), meta["elem_size"]
    whole, step, box = (ctypes.c_uint64 * rank)(), (ctypes.c_uint64 * rank)(), (ctypes.c_uint32 * rank)()
    whole[:], box[:] = list(shape)[::-1], list(meta["block_size"])[::-1]
    step[: rank - 1] = [size * s for s in strides[-2::-1]]
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    room = (ctypes.c_uint64 * 32)()  # of which a part begins at a multiple of 64 bytes
    start = -(-ctypes.addressof(room) // 64) * 64
    element = ELEMENTS.get(meta["elem_type"], meta["elem_type"])
    promotion = 2  # of L2, to 128 bytes, as Triton has it
    code = library().cuTensorMapEncodeTiled(
        start, element, rank, base, whole, step, box, ones, 0, meta["swizzle"], promotion, 0
    )
    return b"" if code else ctypes.string_at(start, MAP_BYTES)


class Prepared:
    """A launch: a kernel, its grid, and the bytes of its arguments.

    Args:
        found: what :func:`parameters` made of the arguments; used: of the pointers that a call gives, those that are parameters.
    """

    def __init__(self, compiled, grid: tuple[int, int, int], found: list[tuple[str, int, object]], used: list[int]):
        sizes = [size for _, size, _ in found] + [8, 8]  # Triton's two scratch buffers, unused
        starts = places(sizes)
        self.buffer = (ctypes.c_uint64 * ((starts[-1] + 8) // 8 + 16))()
        offset = -ctypes.addressof(self.buffer) % 64
        self.maps, pointers = [], []
        self.values = (ctypes.c_void_p * len(starts))(*[ctypes.addressof(self.buffer) + offset + x for x in starts])
        self.bytes = memoryview(self.buffer).cast("B")
        for (kind, size, value), start in zip(found, starts, strict=False):
            if kind == MAP:
                where = slice(offset + start, offset + start + MAP_BYTES)
                self.maps.append((where, value[0].shape, value[0].strides, value[1], {}))
            elif kind == POINTER:
                pointers.append(offset + start)
            else:
                struct.pack_into("f" if kind == "fp32" else FORMATS[size], self.buffer, offset + start, value)
        self.runs = []  # of pointers side by side: what packs them, where, and which they are
        for _, run in groupby(enumerate(pointers), lambda x: x[1] - 8 * x[0]):
            (first, start), *more = run
            chosen = used[first : first + len(more) + 1]
            choose = itemgetter(*chosen) if more else itemgetter(slice(chosen[0], chosen[0] + 1))
            self.runs.append((struct.Struct(f"{len(chosen)}Q").pack_into, start, choose))
        self.bases, self.lock = [], threading.Lock()
        self.device, self.arguments = torch._C._cuda_getDevice(), ctypes.addressof(self.values)
        metadata = compiled.metadata
        early = Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,))
        self.configuration = Configuration(
            grid,
            (32 * metadata.num_warps, 1, 1),
            metadata.shared,
            None,
            ctypes.pointer(early),
            int(metadata.launch_pdl),
        )
        self.function, self.launch = compiled.function, library().cuLaunchKernelEx

    @classmethod
    def of(cls, compiled, grid: tuple[int, int, int], args: tuple) -> Prepared | None:
        """From a launch's arguments, its pointers in the first of them and in later ones; None where it has to go another way."""
        metadata = compiled.metadata
        scratch = metadata.global_scratch_size or metadata.profile_scratch_size
        if torch.version.hip or library() is None or metadata.num_ctas != 1 or scratch:
            return None
        metas = list(getattr(metadata, "tensordesc_meta", None) or ())
        kinds = list(compiled.src.signature.values())
        try:
            found = [x for pair in zip(kinds, args, strict=True) for x in parameters(*pair, metas)]
        except (
            KeyError,
            IndexError,
        ):  # a type of which nothing is known here, or a descriptor that is none on this GPU
            return None
        first = [n for n, kind in enumerate(_flat(kinds[0])) if kind != "constexpr"]
        later = sum(kind == POINTER for kind, _, _ in found) - len(first)
        whole = len(_flat(kinds[0]))
        sizes = [size for _, size, _ in found] + [8, 8]
        if not agrees(compiled, sizes):
            return None
        return cls(compiled, grid, found, [*first, *range(whole, whole + later)])

    def __call__(self, pointers: tuple[int, ...], bases: list[int]) -> bool:
        """Launches on the current stream of the first launch's device; False, and nothing launched, where the driver refuses.

        Args:
            pointers: addresses of the first argument's tensors, one for each, used or not, and then those of later arguments.
            bases: addresses of the tensors that descriptors see.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self.lock:
            for pack, start, choose in self.runs:
                pack(self.buffer, start, *choose(pointers))
            if bases != self.bases and not self._see(bases):
                return False
            self.configuration.stream = stream
            return self.launch(self.configuration, self.function, self.arguments, None) == 0

    def _see(self, bases: list[int]) -> bool:
        """Writes the tensor maps; False where the driver refuses one."""
        self.bases = []
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


def _flat(kind: object) -> list[str]:
    return [x for each in kind for x in _flat(each)] if isinstance(kind, tuple) else [kind]


def declared(ptx: str) -> int:
    """How many parameters a kernel has."""
    found = re.search(r"\.entry\s+\w+\(([^)]*)\)", ptx)
    return found[1].count(".param ") if found else 0


def agrees(compiled, sizes: list[int]) -> bool:
    """Whether a kernel has as many parameters, and the driver knows them as of these sizes."""
    if declared(compiled.asm["ptx"]) != len(sizes):
        return False
    start, size, function = ctypes.c_size_t(), ctypes.c_size_t(), compiled.function
    for n, expected in enumerate(sizes):
        if library().cuFuncGetParamInfo(function, n, ctypes.byref(start), ctypes.byref(size)) or size.value != expected:
            return False
    return True
