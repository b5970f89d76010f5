"""Compiles the kernels ahead of time, on a machine with or without a GPU: ``python -m tilewise.backends.hopper.host.aot``.

    aot [--only TEXT] [--sample] [--jobs N] [--table FILE] [--candidates]

Each is compiled for sm_90a, held against what it must be (registers, spills, shared memory, wgmma in flight), written down
with the recipe of its launch, and listed in ``index.json``. What was made from the same sources is kept. Exit code 1 if one
is not as it must be, or is to be shipped with bits that no GPU has proven (:mod:`tilewise.backends.hopper.host.proven`).
``--sample`` compiles a few that stand for all; ``--table`` writes the figures of all as text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import SHARED_LIMIT
from tilewise.backends.hopper.forward.config import Config, candidates, shipped
from tilewise.backends.hopper.host import backward_aot, hostcode, library, proven, sass
from tilewise.backends.hopper.host.recipe import Recipe
from tilewise.backends.hopper.host.sample import sample

OPTIONS = "--gpu-arch sm_90a --keep-cubin --keep-ptx"


def compiled(config: Config, scratch: Path, options: str = OPTIONS) -> tuple[Any, tuple]:
    """The compiled launch of a kernel, and the tensors without memory that it was compiled for: any lengths, heads, strides
    and smaller head dims."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from tilewise.backends.hopper.forward import kernel as forward

    batch, heads_q, heads_k, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(5))
    dim, dim_v = (cute.sym_int(divisibility=8) for _ in range(2))
    stride = lambda divisibility=1: cute.sym_int64(divisibility=divisibility)  # noqa: E731

    def tensor(rows, heads, columns):
        strides = (stride(8), stride(8), stride(8), 1)
        return make_fake_tensor(forward.ELEMENT[config.dtype], (batch, rows, heads, columns), strides, assumed_align=16)

    def whole(*shape):
        return make_fake_tensor(cutlass.Int32, (batch, heads_q, *shape), tuple(stride() for _ in range(2 + len(shape))))

    def state(*columns):
        strides = [stride(2) for _ in range(4)] if columns else [stride() for _ in range(3)]
        shape = cute.sym_int(), batch, heads_q, seqlen_q, *columns
        return make_fake_tensor(cutlass.Float32, shape, (*strides, 1), assumed_align=16)

    i32, f32 = cutlass.Int32(0), cutlass.Float32(0)
    starts, lines = cute.sym_int(), cute.sym_int()
    cu = lambda: make_fake_tensor(cutlass.Int32, (starts,), (1,))  # noqa: E731
    extra = {
        "part_o": lambda: state(config.tiles.width_v), "part_lse": state,
        "lo": lambda: whole(seqlen_q), "hi": lambda: whole(seqlen_q),
        "blocks": lambda: whole(lines, cute.sym_int()), "counts": lambda: whole(lines, 2),
        "cu_q": cu, "cu_k": cu, "first": lambda: i32, "last": lambda: i32,
        "queue": lambda: make_fake_tensor(cutlass.Int32, (1,), (1,)),
        "seed": lambda: make_fake_tensor(cutlass.Int64, (1,), (1,)), "threshold": lambda: i32, "keep": lambda: f32,
    }  # fmt: skip
    traced = [leaf(cute, dtype, rank) for dtype, rank in config.traced.tensors]
    traced += [{"i": i32, "f": f32}[kind] for kind in config.traced.numbers]
    arguments = (
        tensor(seqlen_q, heads_q, dim),
        tensor(seqlen_k, heads_k, dim),
        tensor(seqlen_k, heads_k, dim_v),
        tensor(seqlen_q, heads_q, dim_v),
        make_fake_tensor(cutlass.Float32, (batch, heads_q, seqlen_q), (stride(), stride(), 1)),
        make_fake_tensor(cutlass.Float32, (heads_q,), (1,)),
        (i32, i32, i32, i32, i32, f32, f32, *[extra[name]() for name in config.extra], *traced),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return cute.compile(forward.launch, *arguments, config, options=f"{options} --dump-dir {scratch}"), arguments


def leaf(cute, dtype: str, rank: int):
    """A tensor that an expression reads, as :func:`tilewise.backends.hopper.host.forward_call.leaf` has it."""
    import cutlass

    element = getattr(cutlass, {"bool": "Uint8", "bfloat16": "BFloat16"}.get(dtype, dtype.capitalize()))
    shape = [cute.sym_int() for _ in range(max(rank, 1))]
    return cute.runtime.make_fake_tensor(element, tuple(shape), tuple(cute.sym_int64() for _ in shape))


def build(config: Config | Backward, folder: Path) -> dict:
    """One kernel's file in ``folder``, and its row of the index; ``faults`` says what is not as it must be."""
    started = time.perf_counter()
    make, judge = (backward_aot.compiled, backward_aot.judged) if isinstance(config, Backward) else (compiled, judged)
    with tempfile.TemporaryDirectory() as scratch:
        made, arguments = make(config, Path(scratch), OPTIONS)
    recipe = hostcode.read(made.ir_module, made.function_name, arguments, made.__cubin__)
    figures, faults = judge(config, sass.disassemble(made.__cubin__), recipe)
    faults += [f"argument {n}: strides that must be equal" for n in recipe.tied]
    file = library.write(folder / library.file_name(config.name), made.__cubin__, recipe)
    return {
        "config": asdict(config),
        **figures,
        "cubin": len(made.__cubin__),
        "file": file.stat().st_size,
        "seconds": round(time.perf_counter() - started, 1),
        "faults": faults,
    }


def judged(config: Config, listing: str, recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    """Figures of a forward, and what is not as it must be."""
    report, shared, tiles = sass.read(listing), max(x.shared for x in recipe.launches), config.tiles
    faults = report.faults(exponentials=tiles.tile_n // 2, stores=config.stores)
    limits = {tiles.registers, tiles.registers_load}
    faults += [] if set(report.registers) == limits else [f"setmaxnreg of {sorted(report.registers)}, not {limits}"]
    faults += (
        [] if shared == tiles.shared.total <= SHARED_LIMIT else [f"{shared} bytes shared, not {tiles.shared.total}"]
    )
    figures = {
        "registers": [report.registers.get(n, 0) for n in (tiles.registers, tiles.registers_load)],
        "spills": report.local,
        "shared": shared,
        "wgmma": report.wgmma,
        "hidden": list(report.hidden),
    }
    return figures, faults


def table(rows: dict[str, dict]) -> str:
    """The figures as text that differs only where a kernel differs."""
    head = f"{'kernel':48}{'registers':>12}{'spills':>8}{'shared':>9}{'wgmma':>7}{'cubin':>8}  exponentials under P V"
    lines = [head]
    for name, row in sorted(rows.items()):
        registers = "/".join(str(n) for n in row["registers"])
        hidden = " ".join(str(n) for n in row["hidden"])
        lines.append(
            f"{name:48}{registers:>12}{row['spills']:>8}{row['shared']:>9}{row['wgmma']:>7}{row['cubin']:>8}  {hidden}"
        )
    return "\n".join(lines) + "\n"


def build_all(configs: list[Config | Backward], folder: Path, jobs: int) -> dict[str, dict]:
    """Rows by name; those that exist, from the same sources, are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "index.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    rows = content.get("kernels", {}) if content.get("sources") == library.source_hash() else {}
    for known in folder.glob(library.file_name("*")) if not rows else ():  # of other sources: not to be shipped
        known.unlink()
    kept = lambda c: rows.get(c.name, {}).get("config") == asdict(c) and (folder / library.file_name(c.name)).exists()  # noqa: E731
    wanted = [c for c in configs if not kept(c)]
    with ProcessPoolExecutor(jobs) as pool:
        for config, row in zip(wanted, pool.map(build, wanted, [folder] * len(wanted)), strict=True):
            rows[config.name] = row
            print(
                f"{'FAIL' if row['faults'] else 'ok  '} {config.name:48} {row['seconds']:5} s  {'; '.join(row['faults'])}"
            )
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"sources": library.source_hash(), "kernels": rows}, indent=1))
            part.replace(file)
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="compiles the Hopper kernels")
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--sample", action="store_true", help="a few kernels that stand for all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--candidates", action="store_true", help="also the kernels that are there to be measured")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("cutlass") is None:
        print(
            "hopper: skipped, the extra 'kernels' (nvidia-cutlass-dsl) is not installed; make kernels-hopper installs it"
        )
        return 0
    kept = shipped() + backward_config.shipped()
    every = sample(kept) if options.sample else kept
    every += candidates() + backward_config.candidates() if options.candidates else []
    configs, started = [c for c in every if options.only in c.name], time.perf_counter()
    rows = build_all(configs, library.folder(), options.jobs)
    failed = {c.name for c in configs if rows[c.name]["faults"]}
    for config in (c for c in configs if c in kept):
        for fault in proven.faults(config.name, proven.bits_of(library.folder() / library.file_name(config.name))):
            failed.add(config.name)
            print(f"FAIL {config.name}: {fault}")
    size = sum(rows[c.name]["file"] for c in configs)
    seconds = time.perf_counter() - started
    print(f"{len(configs)} kernels, {len(failed)} not as they must be, {size / 2**20:.1f} MiB, {seconds:.0f} s")
    if options.table:
        options.table.write_text(table({c.name: rows[c.name] for c in configs if c in kept}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
