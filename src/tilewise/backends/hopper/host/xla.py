"""Calls of XLA that are launched without Python (native/xla.cpp): which memory each launch reads and writes.

A call is bound where its launches read contiguous operands as they are and write the results themselves, with nothing left to compute
(docs/decisions.md#jax-handler).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, byref, c_char_p, c_int64, c_uint32, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.base import Backend
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host import driver, library
from tilewise.backends.hopper.host.backward_call import BackwardPlan
from tilewise.backends.hopper.host.draft import COUNTS, Launches, with_late
from tilewise.backends.hopper.host.forward_call import ForwardPlan
from tilewise.backends.hopper.host.plan import Plan
from tilewise.problem import Problem

BEFORE_EXTRAS = {ForwardPlan: ("q", "k", "v"), BackwardPlan: ("do", "dlse", "q", "k", "v", "o", "lse")}  # the operands
RESULTS = {ForwardPlan: ("o", "lse"), BackwardPlan: ("dq", "dk", "dv")}


class MemoryStruct(Structure):
    """The launcher's TwMemory."""

    _fields_ = [("buffer", c_int64), ("first", c_int64)]


class BoundLaunchStruct(Structure):
    """The launcher's TwBoundLaunch."""

    _fields_ = [("recipe", c_void_p), ("given", c_char_p)]


class BoundStruct(Structure):
    """The launcher's TwBound."""

    _fields_ = [
        ("memory", POINTER(MemoryStruct)),
        ("launch", POINTER(BoundLaunchStruct)),
        *[(name, c_int64) for name in ("scratch", "zeros")],
        *[(name, c_uint32) for name in ("memories", "launches")],
    ]


class Placed(NamedTuple):
    """The launches of a pass on memory that a call brings.

    Attributes:
        memories: of each memory of the launches its number and first byte: that of an operand, or behind these of a result, or -1 for the
            scratch memory. words: of each launch, for :meth:`Kernels.pack`. scratch: bytes, of which the first ``zeros`` have to be zero.
    """

    launches: Launches
    memories: list[tuple[int, int]]
    words: list[list[int | float]]
    scratch: int
    zeros: int


def placed(plan: Plan) -> Placed | None:
    """Return the launches of a pass, or None where a call takes more than these.

    The operands of a forward are q, k, v and the extras, its results o and lse; those of a backward are do, dlse, q, k, v, o, lse and the
    extras, and its results dq, dk and dv. All are contiguous.
    """
    kind = next((kind for kind in RESULTS if isinstance(plan, kind)), None)
    if kind is None or plan.launches is None or plan.copied or plan.conversions or plan.result_is_made:
        return None
    problem, names, results = plan.problem, BEFORE_EXTRAS[kind], RESULTS[kind]
    extras = len(problem.extras)
    places = {name: (len(names) + n - 3, 0) for name, n in plan.places.items() if 3 <= n < 3 + extras}
    places |= {name: (n, 0) for n, name in enumerate(names)}
    late = _late(plan) if kind is BackwardPlan else {}
    places |= {name: (0, x.storage_offset() * x.itemsize) for name, x in late.items()}
    if not set(plan.launches.given) <= set(places):
        return None
    places |= {name: (len(names) + extras + n, 0) for n, name in enumerate(results)}
    return _placed(plan.launches, places, late)


def _late(plan: BackwardPlan) -> dict[str, Tensor]:
    """Return dO of the whole and of each portion, without memory, by the names that launches have for it."""
    problem = plan.problem
    do = torch.empty(problem.output_shapes[0], dtype=problem.dtype, device="meta")
    whole = {"do": do[None] if problem.packed else do}
    return whole | (plan.portions.late(whole) if plan.portions else {})


def _placed(launches: Launches, places: Mapping[str, tuple[int, int]], late: Mapping[str, Tensor]) -> Placed | None:
    scratch, zeros, own = 0, 0, {}
    for name, made in sorted(launches.made, key=lambda row: row[1].fill is None):
        if made.fill not in (None, 0, COUNTS) or (name in places and made.fill is not None):
            return None
        if name not in places:
            own[name] = -1, scratch
            scratch += made.room
            zeros = zeros if made.fill is None else scratch
    names = *launches.given, *[name for name, _ in launches.made]
    memories = [places[name] if name in places else own[name] for name in names]
    words = [with_late(x, [late.get(name) for name in launches.given]) for x in launches.launches]
    return Placed(launches, [*memories, (-1, scratch)], words, scratch + launches.scratch, zeros)


def plan_of(backend: Hopper, p: Problem, backward: bool) -> Plan:
    """Return the plan of a problem's forward or backward."""
    return (backend._backward_plans if backward else backend._plans).of(p)


def bound(backend: Backend, p: Problem, backward: bool) -> BoundStruct | None:
    """Return :func:`placed` launches of a pass as the launcher takes them; None where another backend runs it."""
    x = placed(plan_of(backend, p, backward)) if isinstance(backend, Hopper) else None
    if x is None:
        return None
    rows = []
    for one, words in zip(x.launches.launches, x.words, strict=True):
        kernels = library.function(one.config)  # which stay as long as the process
        rows.append((kernels.native.at, kernels.pack(one.kinds, words, p.device)))
    # fmt: off
    return BoundStruct((MemoryStruct * len(x.memories))(*x.memories), (BoundLaunchStruct * len(rows))(*rows),
                       x.scratch, x.zeros, len(x.memories), len(rows))
    # fmt: on


_kept: list[object] = []  # what the launcher points to


def target(other: ctypes._CFuncPtr) -> ctypes._CFuncPtr:
    """Return the handler of custom calls: that of bound ones, which calls ``other`` for the rest; without a launcher ``other``."""
    launcher = driver.load()
    if isinstance(launcher, str):
        return other
    launcher.tw_xla_bind.restype = c_void_p
    launcher.tw_xla_bind.argtypes = c_void_p, POINTER(BoundStruct)
    _kept.append(other)
    launcher.tw_xla_else(other)
    return launcher.tw_xla


def bind(frame: int, launches: BoundStruct) -> None:
    """Let calls like that of a call frame be launched so from now on."""
    _kept.append(launches)
    if driver.load().tw_xla_bind(frame, byref(launches)):
        raise RuntimeError("XLA does not say on which device a call runs")
