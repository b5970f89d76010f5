"""The custom call that XLA makes: its C structs, and what runs on its buffers.

A handler of XLA's FFI is a C function of one struct, the call frame, which holds the addresses of operands and results and the attributes.
ctypes makes one of a Python function, so nothing is compiled and no jaxlib is needed to build (docs/decisions.md#jax-handler). The
structs are those of xla/ffi/api/c_api.h, version 0, to which XLA only appends.

The attribute ``call`` says what to do, in words: a job, how many dimensions its first operand has, and the job's text. Further
dimensions in front are those of ``jax.vmap``; operands that do not differ there have the size 1.

This runs calls on the CPU; :mod:`tilewise.jax.gpu` those on a GPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import partial

import torch
from torch import Tensor

from tilewise import autograd
from tilewise.masks import catalogue
from tilewise.problem import Problem, check
from tilewise.signature import Shaped
from tilewise.spec import parse_spec

# -- The structs -------------------------------------------------------------------------------------------------------

_MAJOR, _METADATA = 0, 1
_HEAD = [("struct_size", c_size_t), ("extension", c_void_p)]


class Version(Structure):
    _fields_ = [*_HEAD, ("major", c_int), ("minor", c_int)]


class Metadata(Structure):
    _fields_ = [("struct_size", c_size_t), ("version", Version), ("traits", c_uint32), ("state", c_int64)]


class Extension(Structure):
    """The head of an extension, and what follows it in the one that asks for metadata."""

    _fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(Metadata))]


class Buffer(Structure):
    _fields_ = [*_HEAD, ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))]

    def tensor(self, memory: Callable[[int, int], Tensor]) -> Tensor:
        shape, dtype = self.dims[: self.rank], DTYPES[self.dtype]
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device=memory(0, 0).device)
        return memory(self.data, size).view(dtype).view(shape)


class Buffers(Structure):
    _fields_ = [*_HEAD, ("size", c_int64), ("types", c_void_p), ("items", POINTER(POINTER(Buffer)))]

    def tensors(self, memory: Callable[[int, int], Tensor]) -> list[Tensor]:
        """Return the buffers as tensors, without a copy. ``memory``: bytes at an address."""
        return [self.items[n].contents.tensor(memory) for n in range(self.size)]


class Text(Structure):
    _fields_ = [("data", c_void_p), ("size", c_size_t)]


class Attributes(Structure):
    _fields_ = [*_HEAD, ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("items", POINTER(POINTER(Text)))]


class Error(Structure):
    _fields_ = [*_HEAD, ("message", c_char_p), ("code", c_int)]


class Asked(Structure):
    """What functions of XLA are given, and where their answer comes."""

    _fields_ = [*_HEAD, ("context", c_void_p), ("found", c_void_p)]


Answering = ctypes.CFUNCTYPE(c_void_p, POINTER(Asked))


class Api(Structure):
    _fields_ = [
        *_HEAD,
        ("version", Version),
        ("internal", c_void_p),
        ("create_error", ctypes.CFUNCTYPE(c_void_p, POINTER(Error))),
        ("between_1", c_void_p * 3),
        ("stream", Answering),
        ("between_2", c_void_p * 12),
        ("device_ordinal", Answering),
    ]


class Frame(Structure):
    _fields_ = [
        *_HEAD,
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("operands", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
    ]


DTYPES = {
    1: torch.bool, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.uint8, 7: torch.uint16, 8: torch.uint32,
    9: torch.uint64, 10: torch.float16, 11: torch.float32, 12: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
_CODES = ((ValueError, 3), (MemoryError, 8), (NotImplementedError, 12), (BaseException, 13))  # of XLA, by exception


Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(Frame))


def answer(frame: ctypes._Pointer[Frame], work: Callable[[Frame, str], None]) -> int | None:
    """Let ``work`` run a call, or say which version of the interface this is. Return null, or XLA's error."""
    f = frame.contents
    api = f.api.contents
    try:
        if f.extension and (asked := Extension.from_address(f.extension)).type == _METADATA:
            # A minor version appends what is not read here, so that any is ours.
            version = asked.metadata.contents.version
            version.major, version.minor = _MAJOR, api.version.minor
            return None
        text = f.attributes.items[0].contents
        work(f, ctypes.string_at(text.data, text.size).decode())
    except BaseException as error:  # C has no exceptions
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        message = f"{type(error).__name__}: {error}".encode()
        return api.create_error(Error(ctypes.sizeof(Error), None, message, code))
    return None


def _bytes_at(address: int, size: int) -> Tensor:
    return torch.frombuffer((c_char * size).from_address(address), dtype=torch.uint8) if size else torch.empty(0)


@Handler
def handler(frame: ctypes._Pointer[Frame]) -> int | None:
    """Run a call on the CPU."""
    return answer(frame, lambda f, call: run(call, f.operands.tensors(_bytes_at), f.results.tensors(_bytes_at)))


def problem(spec: str, device: torch.device, *arrays: tuple[Sequence[int], torch.dtype]) -> Problem:
    """Check a call on contiguous arrays of these shapes and dtypes: q, k, v, the extras, and the seed if there is dropout.

    Raises:
        ValueError: a wrong call.
    """
    read = parse_spec(spec)
    q, k, v, *extras = [Shaped(tuple(x), torch.empty(x, device="meta").stride(), dtype, device) for x, dtype in arrays]
    seed = None
    if read.dropout_p:  # of any integer dtype
        seed = extras.pop()._replace(shape=(1,), strides=(1,), dtype=torch.int64)
    return check(q, k, v, extras, seed, read, latent=False)


# -- The jobs ----------------------------------------------------------------------------------------------------------


def run(call: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Do what ``call`` says with the operands, and write the results."""
    name, ndim, text = call.split(" ", 2)
    work = partial(_JOBS[name], text)
    mapped = operands[0].ndim - int(ndim)
    for axis in reversed(range(mapped)):
        dims = tuple(0 if x.shape[axis] > 1 else None for x in operands)
        if any(dim is not None for dim in dims):
            work = torch.vmap(work, in_dims=dims)
    with torch.no_grad():
        found = work(*[x.squeeze(tuple(range(mapped))) if mapped else x for x in operands])
    for result, x in zip(results, found, strict=True):
        result.copy_(x.view(result.shape))


def _with_seed(spec: str, extras: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return the extras and dropout's seed, which comes last: one integer, or its lower and its upper 32 bits."""
    if not parse_spec(spec).dropout_p:
        return extras, None
    seed = extras[-1].long().view(-1)
    return extras[:-1], seed if seed.numel() == 1 else seed[:1] + (seed[1:] << 32)


def _forward(spec: str, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor) -> tuple[Tensor, ...]:
    return autograd.attention(q, k, v, *_with_seed(spec, extras), spec)


def _backward(spec: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients, of do, dlse, q, k, v, o, lse and the extras."""
    count = len(parse_spec(spec).grad_slots)
    return autograd.gradients(*tensors[:7], *_with_seed(spec, tensors[7:]), spec, count=count)


def _derived(name: str, source: Tensor) -> tuple[Tensor, ...]:
    """Return what a mask of the catalogue makes of its tensor."""
    return getattr(catalogue, name)(source)


_JOBS = {"forward": _forward, "backward": _backward, "derived": _derived}
