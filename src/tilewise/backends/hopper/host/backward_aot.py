"""Compiles a backward's kernels at once, and holds each against what it must be; :mod:`tilewise.backends.hopper.host.aot` calls it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward, KeyTiles
from tilewise.backends.hopper.config import SHARED_LIMIT
from tilewise.backends.hopper.host import sass
from tilewise.backends.hopper.host.recipe import Recipe


def compiled(x: Backward, scratch: Path, options: str) -> tuple[Any, tuple]:
    """As :func:`tilewise.backends.hopper.host.aot.compiled`."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from tilewise.backends.hopper.backward import launch as backward
    from tilewise.backends.hopper.host import aot
    from tilewise.backends.hopper.kit.dtypes import ELEMENT

    batch, heads_q, heads_k, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(5))
    dim, dim_v, lines = (cute.sym_int(divisibility=n) for n in (8, 8, 16))
    stride = lambda divisibility=1: cute.sym_int64(divisibility=divisibility)  # noqa: E731

    def tensor(rows, heads, columns):
        strides = (stride(8), stride(8), stride(8), 1)
        return make_fake_tensor(ELEMENT[x.dtype], (batch, rows, heads, columns), strides, assumed_align=16)

    def statistic(rows, divisibility, align):
        strides = (stride(divisibility), stride(divisibility), 1)
        return make_fake_tensor(cutlass.Float32, (batch, heads_q, rows), strides, assumed_align=align)

    q, o, k, v = (
        (seqlen_q, heads_q, dim),
        (seqlen_q, heads_q, dim_v),
        (seqlen_k, heads_k, dim),
        (seqlen_k, heads_k, dim_v),
    )
    given = *(tensor(*sizes) for sizes in (q, k, v, o, o)), statistic(seqlen_q, 1, 4), statistic(seqlen_q, 1, 4)
    made = *(tensor(*sizes) for sizes in (q, k, v)), statistic(lines, 4, 16), statistic(lines, 4, 16)
    if x.keys.summed:
        shape = batch, heads_q, cute.sym_int(), backward_config.KEY_GROUPS, x.keys.part
        made = *made, make_fake_tensor(cutlass.Float32, shape, (*(stride(4) for _ in range(4)), 1), assumed_align=16)
    if x.keys.ordered:
        made = *made, make_fake_tensor(cutlass.Int32, (batch, heads_q, cute.sym_int()), (stride(), stride(), 1))
    i32, f32 = cutlass.Int32(0), cutlass.Float32(0)
    numbers = (i32, i32, i32, i32, i32, i32, f32, f32, f32)
    if x.packed:
        starts, whole = cute.sym_int(), lambda n: make_fake_tensor(cutlass.Int32, (n,), (1,))
        given, numbers = (*given, whole(starts), whole(starts), whole(1), whole(1)), (*numbers, i32, i32)
    else:
        for rows, names in zip((seqlen_k, seqlen_q), x.extra, strict=True):
            tiles = cute.sym_int()
            shapes = {"lo": (rows,), "hi": (rows,), "blocks": (tiles, cute.sym_int()), "counts": (tiles, 2)}
            sized = [(batch, heads_q, *shapes[name]) for name in names]
            given += tuple(make_fake_tensor(cutlass.Int32, n, tuple(stride() for _ in n)) for n in sized)
        given += (make_fake_tensor(cutlass.Int64, (1,), (1,)),) if x.dropout else ()
        given += tuple(aot.leaf(cute, dtype, rank) for dtype, rank in x.traced.tensors)
        numbers += ((i32, f32) if x.dropout else ()) + tuple({"i": i32, "f": f32}[kind] for kind in x.traced.numbers)
    arguments = (given, made, numbers, make_fake_stream(use_tvm_ffi_env_stream=True))
    return cute.compile(backward.launch, *arguments, x, options=f"{options} --dump-dir {scratch}"), arguments


def judged(x: Backward, listing: str, recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    """Figures of the two passes, and what is not as it must be."""
    kernels = {part.split(",")[0].strip(): part for part in listing.split(".section\t.text.")[1:]}
    shared = {launch.kernel: launch.shared for launch in recipe.launches}
    reports, faults = [], []
    for tiles in filter(None, (x.keys, x.queries)):
        name = next(n for n in kernels if f"{x.name}_{'keys' if tiles is x.keys else 'queries'}" in n)
        report = sass.read(kernels[name])
        report = replace(report, hidden=tuple(n for n in report.hidden if n))
        reports.append(report)
        faults += [f"{name}: {fault}" for fault in faults_of(report, tiles, shared[name])]
    others = [sass.read(part).local for part in kernels.values()]
    faults += [f"{n} loads or stores of spills" for n in others if n]
    figures = {
        "registers": [max(r.registers.values(), default=0) for r in reports],
        "spills": sum(r.local for r in reports),
        "shared": max(shared.values()),
        "wgmma": sum(r.wgmma for r in reports),
        "hidden": [n for r in reports for n in r.hidden],
    }
    return figures, faults


def faults_of(report: sass.Report, tiles, shared: int) -> list[str]:
    split = isinstance(tiles, KeyTiles) and tiles.split
    columns = tiles.tile_m if isinstance(tiles, KeyTiles) else tiles.tile_n
    found = report.faults(exponentials=None if split else columns // 2)
    limits = set(tiles.by_role) if isinstance(tiles, KeyTiles) else {tiles.registers, tiles.registers_load}
    found += [] if set(report.registers) == limits else [f"setmaxnreg of {sorted(report.registers)}, not {limits}"]
    return found + ([] if shared == tiles.shared <= SHARED_LIMIT else [f"{shared} bytes shared, not {tiles.shared}"])
