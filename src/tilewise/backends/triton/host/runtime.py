"""Triton as the host uses it: its kernels by name, how they are assembled, and their launches, which are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from threading import RLock
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from tilewise import device as devices
from tilewise.backends.triton.host import machine_code
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.tiles import Tiles
from tilewise.settings import triton_ptxas, triton_ptxas_blackwell

# 12.8 makes wrong kernels of narrow values: some read a tile at an address that comes from a register which nothing has written.
RIGHT_PTXAS = (12, 9)
# Before 13.0, a register is now and then overwritten that is still to be read (machine_code.overwritten).
SOUND_PTXAS = (13, 0)
PTXAS = "ptxas", "ptxas_blackwell"  # Triton's settings of one
_ASSEMBLING = RLock()  # the setting of an assembler is the process's


@lru_cache(maxsize=1)
def kernels() -> SimpleNamespace:
    """The kernels, ``forward`` for ``forward_kernel``, the bundles of their arguments, and constants. Triton is imported here, at the first
    launch."""
    import triton
    from tilewise.backends.triton.kernels import (
        append,
        arguments,
        backward,
        diagonals,
        forward,
        group_parts,
        kept_pairs,
        listed,
        merge_rows,
        paged,
        pair_bias,
        sum_rows,
        tangent,
        tangent_tiles,
        terms,
        tile_bits,
        tile_lists,
        tile_map,
    )
    from triton.tools.tensor_descriptor import TensorDescriptor

    found: dict[str, object] = {}
    for module in (
        *(append, arguments, backward, diagonals, forward, group_parts, kept_pairs, listed, merge_rows),
        *(paged, pair_bias, sum_rows, tangent, tangent_tiles, terms, tile_bits, tile_lists, tile_map),
    ):
        found |= {n.removesuffix("_kernel"): x for n, x in vars(module).items() if n.endswith("_kernel")}
        found |= {n: x for n, x in vars(module).items() if n.isupper() or getattr(x, "_fields", None)}
    return SimpleNamespace(triton=triton, TensorDescriptor=TensorDescriptor, **found)


_RECORDING: list[Callable[..., None]] = []


@contextmanager
def recorded(record: Callable[..., None]) -> Iterator[None]:
    """A context in which no kernel is launched: ``record(kernel, grid, tiles, *arguments)`` is called instead."""
    _RECORDING.append(record)
    try:
        yield
    finally:
        _RECORDING.pop()


def run(kernel, grid: tuple[int, ...], tiles: Tiles, *arguments: object) -> object:
    """Launches a kernel, and compiles it where it must.

    Returns:
        The compiled kernel; None where the grid is empty or the interpreter runs.
    """
    if _RECORDING:
        return _RECORDING[-1](kernel, grid, tiles, *arguments)
    if not all(grid):
        return None
    too_many = devices.beyond_grid({kernel.fn.__name__: grid})
    if too_many:
        raise NotImplementedError("; ".join(too_many))
    early = {"launch_pdl": True} if getattr(arguments[-1], "overlap", None) in ("reads", "joins") else {}
    with assembling() as read:
        return kernel[grid](*arguments, **tiles.options, **early, **read)


@contextmanager
def assembling() -> Iterator[dict[str, str]]:
    """A context in which Triton may compile kernels; yields options for it. Hopper's are assembled by the newer ptxas, and read where that
    one makes faults."""
    if not on_hopper():
        yield {}
        return
    with assembled_by(newer_ptxas()), read_where_faulty() as read:
        yield read


_HERE = nullcontext()
current = getattr(torch._C, "_cuda_getDevice", lambda: None)  # the number of the current GPU


def on_device(x: torch.Tensor):
    """A context with x's GPU as the current one, where Triton launches. It costs nothing if that is so already."""
    if x.device.type != "cuda" or x.device.index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(x.device)


def on_hopper(device: torch.device | None = None) -> bool:
    """Whether a CUDA device, the current one where none is named, is a Hopper; AMD's have the same numbers."""
    there = torch.cuda.is_available() and not torch.version.hip
    return there and torch.cuda.get_device_capability(device) == (9, 0)


@contextmanager
def assembled_by(ptxas: str) -> Iterator[None]:
    """A context in which Triton assembles Hopper's kernels by the ptxas at this path, unless somebody has chosen another.

    Triton has two: up to 3.8 it takes ``ptxas`` for Hopper, from 3.9 on ``ptxas_blackwell``. A choice of the first alone is one for Hopper
    with each version; where both are chosen, Triton takes the one that it takes.
    """
    settings = vars(kernels().triton.knobs.nvidia)
    with _ASSEMBLING:
        before = {name: settings[name] for name in PTXAS if name in settings}
        chosen = before.get("ptxas") or triton_ptxas()
        if not chosen or not (before.get("ptxas_blackwell") or triton_ptxas_blackwell()):
            settings |= dict.fromkeys(PTXAS, chosen or ptxas)
        try:
            yield
        finally:
            for name in PTXAS:
                settings.pop(name, None)
            settings |= before


@contextmanager
def read_where_faulty() -> Iterator[dict[str, str]]:
    """A context in which the machine code of an assembler before :data:`SOUND_PTXAS` is read for its faults when it is made.

    Yields options for Triton that change no code, but part such kernels from those of a cache that nobody has read.
    """
    if hopper_ptxas() >= SOUND_PTXAS:
        yield {}
        return
    knobs = kernels().triton.knobs
    hooks, nvdisasm = knobs.runtime, knobs.nvidia.nvdisasm.path
    before = hooks.add_stages_inspection_hook

    def hook(*arguments) -> None:
        if before is not None:
            before(*arguments)
        machine_code.read_in_stages(nvdisasm, *arguments[:3])

    with _ASSEMBLING:
        hooks.add_stages_inspection_hook = hook
        try:
            yield {"ptx_options": "-O3"}  # the level that ptxas takes anyway
        finally:
            hooks.add_stages_inspection_hook = before


def hopper_ptxas() -> tuple[int, ...]:
    """The version of the ptxas that Hopper's kernels get now, as ``(12, 9)``."""
    from triton.backends.nvidia.compiler import get_ptxas

    return tuple(map(int, get_ptxas(90).version.split(".")[:2]))


@lru_cache(maxsize=1)
def newer_ptxas() -> str:
    """The path of the newer of the two ptxas that Triton brings; of the other where the driver is too old for the newer one's code."""
    nvidia = kernels().triton.knobs.nvidia
    newer = nvidia.ptxas_blackwell
    return (newer if int(newer.version.partition(".")[0]) <= devices.cuda_version() else nvidia.ptxas).path


def wrong_ptxas() -> str:
    """The version of the ptxas that Hopper's kernels get, where that one makes wrong ones (:data:`RIGHT_PTXAS`); else ""."""
    with assembled_by(newer_ptxas()):
        version = hopper_ptxas()
    return "" if version >= RIGHT_PTXAS else ".".join(map(str, version))


def listening() -> bool:
    """Whether somebody, such as a profiler, wants to hear of Triton's launches."""
    hooks = kernels().triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


_COMPILED: dict[tuple, Any] = {}
"""Kernels by all that Triton would compile another one for, beside alignments: see :func:`kind_of`."""


def start(kernel, grid: tuple[int, ...], tiles: Tiles, *arguments: object) -> object:
    """Launches a kernel with :func:`aligned` tensors, straight where a like launch has compiled it.

    Triton's own way there looks at each of some hundred numbers (docs/decisions.md#triton-relaunch).

    Returns:
        The compiled kernel, for :func:`run_compiled` with arguments of the same kinds; None where there is none.
    """
    key = kernel, tiles, *map(kind_of, arguments)
    compiled = _COMPILED.get(key)
    if compiled is not None:
        run_compiled(compiled, grid, *arguments)
        return compiled
    compiled = run(kernel, grid, tiles, *arguments)
    if compiled is not None:
        _COMPILED[key] = compiled
    return compiled


@dataclass(eq=False)
class Launch:
    """A launch that is kept: everything of it but its arguments. ``compiled``: its kernel, once it is known."""

    kernel: Any
    grid: tuple[int, ...]
    tiles: Tiles
    compiled: Any = field(default=None, init=False)

    def start(self, aligned: bool, *arguments: object) -> None:
        """Launches the kernel with arguments of the same kinds each time; ``aligned``: whether their tensors are (:func:`aligned`)."""
        if not aligned:
            run(self.kernel, self.grid, self.tiles, *arguments)
        elif self.compiled is None:
            self.compiled = start(self.kernel, self.grid, self.tiles, *arguments)
        else:
            run_compiled(self.compiled, self.grid, *arguments)


class View(NamedTuple):
    """A kernel's argument beside the bundles that sees one of a call's tensors, through a descriptor where there is one."""

    name: str
    descriptor: Any = None

    def of(self, named: Mapping[str, Any]) -> Any:
        """The argument of a call with these tensors."""
        tensor = named.get(self.name)
        if self.descriptor is None:
            return tensor
        # Another descriptor of it, unchecked: its checks take as long as its making.
        new = object.__new__(type(self.descriptor))
        new.__dict__.update(self.descriptor.__dict__, base=tensor)
        return new


@dataclass(eq=False)
class KernelLaunch(Launch):
    """A launch that a plan makes once: each call gives it its tensors by name (docs/decisions.md#triton-relaunch).

    Attributes:
        sizes, scales: as kernels take them (:func:`opaque`).
        between: what the kernel takes between its scales and its facts: views and constants.
        lists: the tiles whose lists it walks over, and whether these are by columns; None where there are none.
        reads: the tensors that the kernel takes; empty: all that there are.
    """

    sizes: Any
    scales: Any
    between: tuple[object, ...]
    facts: Facts
    lists: tuple[Tiles, bool] | None = None
    reads: tuple[str, ...] = ()

    def arguments(self, named: Mapping[str, Any]) -> tuple[object, ...]:
        """What the kernel takes in a call with these tensors; they may be more than it reads."""
        bundle = kernels().Tensors
        if self.reads:
            tensors = bundle(**{name: named[name] for name in self.reads})
        else:
            tensors = bundle._make(map(named.get, bundle._fields))
        between = (x.of(named) if isinstance(x, View) else x for x in self.between)
        # The mask's tensors decide how lists are laid out.
        sizes = self.sizes if self.lists is None else self.sizes._replace(list_strides=named["list_strides"])
        return tensors, sizes, self.scales, *between, self.facts

    def __call__(self, named: Mapping[str, Any], aligned: bool) -> None:
        """Launches the kernel with these tensors, which are :func:`aligned` or not."""
        self.start(aligned, *self.arguments(named))


def kind_of(x: object, bundled: bool = False) -> object:
    """What of an argument is known when a kernel is compiled: tensors' and numbers' types, and constants, which lie in no bundle."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.device
    if isinstance(x, tuple):
        return tuple(kind_of(y, bundled=True) for y in x)
    if bundled and isinstance(x, (int, float)):
        return float if isinstance(x, float) else -(1 << 31) <= x < 1 << 31
    if hasattr(x, "block_shape"):
        return kind_of(x.base), tuple(x.block_shape)
    return x


def aligned(tensors: Iterable[object]) -> bool:
    """Whether all of these tensors, those in tuples too, begin at multiples of 16 bytes; others may be None."""
    for x in tensors:  # a plain loop takes half the time of a generator, and every launch asks
        if x is None:
            continue
        if not aligned(x) if isinstance(x, tuple) else x.data_ptr() % 16:
            return False
    return True


def run_compiled(compiled, grid: tuple[int, ...], *arguments: object) -> None:
    """Launches a compiled kernel (:func:`run_each`)."""
    if all(grid):
        run_each([(compiled, (*grid, 1, 1)[:3], arguments)])


def run_each(launches: Iterable[tuple[Any, tuple[int, int, int], tuple]]) -> None:
    """Launches compiled kernels, each with its grid and its arguments. ``compiled[grid](*arguments)`` would go through two chains of hooks
    though nobody listens."""
    if listening():
        for compiled, grid, arguments in launches:
            compiled[grid](*arguments)
        return
    stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    for compiled, grid, arguments in launches:
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def opaque(x: object) -> object:
    """Numbers as kernels take them: each whole number n as the odd 2 n + 3, in tuples too; floats as they are.

    Triton would compile anew for a number that is 1 or a multiple of 16 (docs/decisions.md#triton-opaque-sizes).
    """
    if isinstance(x, tuple):
        return type(x)(*map(opaque, x)) if hasattr(x, "_fields") else tuple(map(opaque, x))
    return 2 * x + 3 if isinstance(x, int) else x
