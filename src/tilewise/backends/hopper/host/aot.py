"""Compiles the kernels ahead of time, on a machine with or without a GPU: ``python -m tilewise.backends.hopper.host.aot``.

    aot [--only TEXT] [--sample] [--jobs N] [--table FILE] [--candidates] [--programs]

Each is compiled for sm_90a, held against what it must be (registers, spills, shared memory, wgmma in flight), written down
with the recipe of its launch, and listed in ``index.json``. What was made from the same sources is kept, and so is what was made from
others that give the compiler the same program. Exit code 1 if one is not as it must be. Those whose program no GPU has run are named
(:mod:`tilewise.backends.hopper.host.proven`). ``--sample`` compiles a few that stand for all; ``--table`` writes the figures of all as
text; ``--programs`` fails where a program of any is not the one in that text. Alone, it compiles nothing, and names these sources in the
text if all are; beside a sample, it traces those that are not in the sample only where the text names other sources.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import SHARED_LIMIT
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.expected import Expected
from tilewise.backends.hopper.forward import config as forward_config
from tilewise.backends.hopper.host import hostcode, kernel_files, proven, sass
from tilewise.backends.hopper.host.kernel_files import file_name
from tilewise.backends.hopper.host.recipe import Recipe
from tilewise.backends.hopper.host.traits import sources, traits
from tilewise.backends.hopper.kernels import AnyConfig, shipped
from tilewise.backends.hopper.latent.config import LatentConfig
from tilewise.backends.hopper.latent.gradients_config import GradientsConfig
from tilewise.backends.sample import sample

OPTIONS = "--gpu-arch sm_90a --keep-cubin --keep-ptx"
# What makes a kernel's file of its program, and says whether it is as it must be.
HOST = (
    "expected.py", "kit/fake.py", "parameters.py", "*/parameters.py",
    "host/aot.py", "host/hostcode.py", "host/llvm_types.py", "host/cubin.py", "host/recipe.py", "host/sass.py",
)  # fmt: skip


def compiled(
    config: AnyConfig, scratch: Path, options: str = OPTIONS, hear: Callable[[str], None] = lambda program: None
) -> tuple[Any, tuple]:
    """The compiled launch of a kernel, and the arguments without memory that it was compiled for.

    ``hear`` is told the hash of the kernel's program before it is compiled.
    """
    import cutlass.cute as cute
    from cutlass.cutlass_dsl import CuTeDSL

    from tilewise.backends.hopper.kit import fake

    if isinstance(config, Backward):
        from tilewise.backends.hopper.backward.launch import launch
    elif isinstance(config, LatentConfig):
        from tilewise.backends.hopper.latent.kernel import launch
    elif isinstance(config, GradientsConfig):
        if config.queries:
            from tilewise.backends.hopper.latent.gradients_dq import launch
        else:
            from tilewise.backends.hopper.latent.gradients import launch
    elif isinstance(config, DecodingConfig):
        from tilewise.backends.hopper.decoding.kernel import launch
    else:
        from tilewise.backends.hopper.forward.kernel import launch
    arguments = fake.arguments(config)
    with CuTeDSL._get_dsl().trace_finalize_hooks(lambda dsl, module, name: hear(hash_of(module))):
        return cute.compile(launch, *arguments, config, options=f"{options} --dump-dir {scratch}"), arguments


def hash_of(module: Any) -> str:
    """The hash of a traced module, without the places in files from which its operations come, and of the compiler that takes it."""
    compiler = f"{importlib.metadata.version('nvidia-cutlass-dsl')} {OPTIONS}"
    text = module.operation.get_asm(enable_debug_info=False)
    return hashlib.sha256(f"{compiler}\n{text}".encode()).hexdigest()[:16]


class ProgramFound(BaseException):
    """The end of a build of which only the program is wanted. No Exception: the DSL would take it for a fault of the trace."""


def program(config: AnyConfig) -> str:
    """The hash of a kernel's program, in a sixth of the time of a build."""
    found: list[str] = []

    def stop(traced: str) -> None:
        found.append(traced)
        raise ProgramFound

    with contextlib.suppress(ProgramFound), tempfile.TemporaryDirectory() as scratch:
        compiled(config, Path(scratch), hear=stop)
    return found[0]


def build(config: AnyConfig, folder: Path) -> dict:
    """Writes one kernel's file into ``folder``, and returns its row of the index.

    In the row, ``faults`` says what is not as it must be, and ``wrong`` which of that keeps the kernel from being launched: the
    rest makes it slower than it should be. A kernel that ships has no faults.
    """
    started, found = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as scratch:
        made, arguments = compiled(config, Path(scratch), hear=found.append)
    recipe = hostcode.read(made.ir_module, made.function_name, arguments, made.__cubin__)
    row = judged(config, sass.disassemble(made.__cubin__), recipe)
    file = kernel_files.write(folder / file_name(config.name), made.__cubin__, recipe)
    seconds = round(time.perf_counter() - started, 1)
    sizes = {"cubin": len(made.__cubin__), "file": file.stat().st_size, "seconds": seconds}
    return {**described(config), "program": found[0], **row, **sizes}


def judged(config: AnyConfig, listing: str, recipe: Recipe) -> dict[str, Any]:
    """The figures of a config's kernels, their faults, and which of these are wrong."""
    sections = {part.split(",")[0].strip(): part for part in listing.split(".section\t.text.")[1:]}
    shared = {launch.kernel: launch.shared for launch in recipe.launches}
    reports, slow = [], []
    wrong = [f"argument {n}: strides that must be equal" for n in recipe.tied]
    for expected in config.expected:
        name = next(name for name in sections if re.fullmatch(rf"{expected.kernel}_\d+", name))
        report = sass.read(sections.pop(name), expected.beside)
        if expected.idle_loops:
            report = replace(report, hidden=tuple(n for n in report.hidden if n))
        reports.append(report)
        wrong += [f"{name}: {fault}" for fault in (*report.wrong(), *unlike(expected, report, shared[name]))]
        wanted = expected.exponentials, expected.loads, expected.stores, expected.gathers
        slow += [f"{name}: {fault}" for fault in report.slow(*wanted)]
    others = [sass.read(section).local for section in sections.values()]
    slow += [f"{n} loads or stores of spills" for n in others if n]
    return {
        "registers": used_registers(config, reports),
        "spills": sum(report.local for report in reports) + sum(others),
        "shared": max(shared.values()),
        "wgmma": sum(report.wgmma for report in reports),
        "hidden": [n for report in reports for n in report.hidden],
        "wrong": wrong,
        "faults": wrong + slow,
    }


def unlike(expected: Expected, report: sass.Report, shared: int) -> list[str]:
    """The respects in which a kernel is not as its config says."""
    limits = set(expected.registers)
    found = [] if set(report.registers) == limits else [f"setmaxnreg of {sorted(report.registers)}, not {limits}"]
    fits = shared == expected.shared <= SHARED_LIMIT
    return found + ([] if fits else [f"{shared} bytes shared, not {expected.shared}"])


def used_registers(config: AnyConfig, reports: list[sass.Report]) -> list[int]:
    """The registers that the computing and the loading role of a forward use; of a backward, the most that each pass uses."""
    if isinstance(config, Backward):
        return [max(report.registers.values(), default=0) for report in reports]
    return [reports[0].registers.get(n, 0) for n in config.expected[0].registers]


def table(rows: dict[str, dict]) -> str:
    """The figures as text that differs only where a kernel differs."""
    head = f"{titled()}  {'program':16}{'registers':>12}{'spills':>8}{'shared':>9}{'wgmma':>7}{'cubin':>8}"
    lines = [f"{head}  exponentials under P V"]
    for name, row in sorted(rows.items()):
        registers = "/".join(str(n) for n in row["registers"])
        hidden = " ".join(str(n) for n in row["hidden"])
        lines.append(
            f"{name:48}  {row['program']:16}{registers:>12}{row['spills']:>8}{row['shared']:>9}{row['wgmma']:>7}"
            f"{row['cubin']:>8}  {hidden}"
        )
    return "\n".join(lines) + "\n"


def titled() -> str:
    """The title of the kernels' column, which says of which sources their programs are."""
    return f"{f'kernel, of sources {kernel_files.source_hash()}':48}"


def described(config: AnyConfig) -> dict[str, Any]:
    """The part of a kernel's row that is known before it is built."""
    return {"config": asdict(config), "expected": repr(config.expected)}


def build_all(configs: list[AnyConfig], folder: Path, jobs: int) -> dict[str, dict]:
    """Builds kernels, and returns the rows of the index by name; kernels that exist and are the same are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs) as pool:
        rows = kept_rows(configs, folder, pool)
        for known in {*folder.glob(file_name("*"))} - {folder / file_name(name) for name in rows}:
            known.unlink()  # of other sources: not to be shipped
        wanted = [config for config in configs if not is_of(rows, config)]
        for config, row in zip(wanted, pool.map(build, wanted, [folder] * len(wanted)), strict=True):
            rows[config.name] = row
            state, faults = "FAIL" if row["faults"] else "ok  ", "; ".join(row["faults"])
            print(f"{state} {config.name:48} {row['seconds']:5} s  {faults}", flush=True)
            write_index(folder, rows)
    return rows


def is_of(rows: dict[str, dict], config: AnyConfig) -> bool:
    """Whether there is a row of this kernel."""
    return described(config).items() <= rows.get(config.name, {}).items()


def kept_rows(configs: list[AnyConfig], folder: Path, pool: Executor) -> dict[str, dict]:
    """The rows of a folder's index that still hold: all that were made from these sources, and of others those of ``configs`` whose
    programs are still the same."""
    file = folder / "index.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    rows = {name: row for name, row in content.get("kernels", {}).items() if (folder / file_name(name)).exists()}
    if content.get("sources") == kernel_files.source_hash():
        return rows
    if content.get("host") != kernel_files.source_hash(HOST):
        return {}
    known = [config for config in configs if is_of(rows, config)]
    programs = zip(known, pool.map(program, known), strict=True)
    kept = {config.name: rows[config.name] for config, found in programs if found == rows[config.name]["program"]}
    print(f"{len(kept)} of {len(configs)} kernels have the programs that they had and are kept", flush=True)
    write_index(folder, kept)
    return kept


def write_index(folder: Path, rows: dict[str, dict]) -> None:
    """Writes a folder's index, which appears whole or not at all."""
    content = {"sources": kernel_files.source_hash(), "host": kernel_files.source_hash(HOST), "kernels": rows}
    part = folder / f"index.{os.getpid()}"
    part.write_text(json.dumps(content, indent=1))
    part.replace(folder / "index.json")


def listed_programs() -> dict[str, str]:
    """The hashes of the shipped kernels' programs, as ``kernels.txt`` lists them."""
    return dict(line.split()[:2] for line in kernel_files.TABLE.read_text().splitlines()[1:])


def listed_of_these_sources() -> dict[str, str]:
    """What ``kernels.txt`` lists if it names these sources, of which it is then known: the same sources give the same programs."""
    return listed_programs() if kernel_files.TABLE.read_text().startswith(titled()) else {}


def name_sources() -> None:
    """Has ``kernels.txt`` name these sources as those of its programs."""
    text = kernel_files.TABLE.read_text()
    kernel_files.TABLE.write_text(titled() + text[len(titled()) :])


def other_programs(configs: list[AnyConfig], known: dict[str, str], jobs: int) -> list[str]:
    """The names of kernels whose programs are not those that ``kernels.txt`` lists; those that are known are not traced."""
    listed, unknown = listed_programs(), [config for config in configs if config.name not in known]
    with ProcessPoolExecutor(jobs) as pool:
        traced = dict(zip((config.name for config in unknown), pool.map(program, unknown), strict=True))
    return [config.name for config in configs if (known | traced)[config.name] != listed.get(config.name)]


def reported(configs: list[AnyConfig], rows: dict[str, dict], started: float) -> int:
    """The number of kernels that are not as they must be, which it prints, and which have programs that no GPU has run."""
    failed = sum(bool(rows[c.name]["faults"]) for c in configs)
    size = sum(rows[c.name]["file"] for c in configs)
    seconds = time.perf_counter() - started
    print(f"{len(configs)} kernels, {failed} not as they must be, {size / 2**20:.1f} MiB, {seconds:.0f} s", flush=True)
    kept = shipped()
    if waiting := proven.waiting({c.name: rows[c.name]["program"] for c in configs if c in kept}):
        print(
            f"{len(waiting)} have programs that no GPU has run, as `make release` does: {', '.join(waiting)}",
            flush=True,
        )
    return failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="compiles the Hopper kernels")
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--sample", action="store_true", help="a few kernels that stand for all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--candidates", action="store_true", help="also the kernels that are there to be measured")
    parser.add_argument("--programs", action="store_true", help="hold the programs of all against kernels.txt")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("cutlass") is None:
        print(
            "hopper: skipped, the extra 'kernels' (nvidia-cutlass-dsl) is not installed; make kernels-hopper installs it"
        )
        return 0
    kept, started, rows, failed = shipped(), time.perf_counter(), {}, 0
    # Of these no program and no figure can be another, unless the compiler is.
    known = listed_of_these_sources() if options.sample and options.programs else {}
    if options.sample or not options.programs:
        every = sample(kept, sources if known else traits) if options.sample else kept
        every += forward_config.candidates() + backward_config.candidates() if options.candidates else []
        configs = [c for c in every if options.only in c.name]
        rows = build_all(configs, kernel_files.folder(), options.jobs)
        failed = reported(configs, rows, started)
        if options.table:
            options.table.write_text(table({c.name: rows[c.name] for c in configs if c in kept}))
    if options.programs:
        configs, started = [c for c in kept if options.only in c.name], time.perf_counter()
        known |= {name: row["program"] for name, row in rows.items()}
        others = other_programs(configs, known, options.jobs)
        print("".join(f"FAIL {name}: not the program that kernels.txt lists\n" for name in others), end="")
        traced = sum(c.name not in known for c in configs)
        seconds = time.perf_counter() - started
        print(f"{len(configs)} programs, {len(others)} not as listed, {traced} of them traced, {seconds:.0f} s")
        if traced == len(kept) and not others:
            name_sources()
        failed += len(others)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
