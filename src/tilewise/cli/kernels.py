"""`tilewise kernels`: list the Hopper backend's kernels on this machine, and build missing ones."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.cli.page import console, heading, note, progress, table

if TYPE_CHECKING:
    from tilewise.backends.hopper.backward.config import Backward
    from tilewise.backends.hopper.forward.config import Config


@dataclass(frozen=True)
class KernelsOptions:
    """Options: which kernels to build; none of them: only list."""

    wanted: Annotated[
        list[str] | None,
        typer.Option("--for", help="Build those for such calls, e.g. 'bf16 d128 causal'. May be given several times."),
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="Build all that ship, the most used first.")] = False
    jobs: Annotated[int, typer.Option(min=1, help="Compilers that run at once.")] = os.cpu_count() or 1
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


def kernels(options: KernelsOptions) -> int:
    """List the kernels for Hopper GPUs and their files on this machine. --for and --all build missing ones, without a GPU.
    Exit code 1: a kernel could not be built."""
    from tilewise.backends.hopper.host import selection

    if options.everything:
        configs = selection.in_order_of_use()
    else:
        configs = list(dict.fromkeys(c for words in options.wanted or () for c in selection.selected(words)))
    failed = build(configs, options.jobs, told=not options.as_json)
    if options.as_json:
        print(json.dumps(_as_dict()))
    elif not configs:
        _print()
    return 1 if failed else 0


# -- Building ------------------------------------------------------------------------------------------------------


def build(configs: "Sequence[Config | Backward]", jobs: int, told: bool = True) -> int:
    """Build the missing ones of these kernels, with a progress bar, and return how many could not be built.

    Raises:
        ValueError: some are not here, and there is no compiler for them.
    """
    from tilewise.backends.hopper.host import compiler, kernel_files, library

    absent, failed, seconds = [c for c in configs if library.here(c) is None], 0, 0.0
    if absent and (why := compiler.unusable()):
        raise ValueError(f"{len(absent)} kernels are not built, and {why}; pip install 'tilewise[kernels]'")
    with progress(bar=True) as bar:
        task = bar.add_task("compiling kernels for Hopper", total=len(absent))
        for made in library.build_before_use(absent, min(jobs, len(absent))) if absent else ():
            failed += bool(made.error)
            seconds += made.seconds
            bar.advance(task)
            if told:
                said = " ".join(filter(None, (made.error, *made.warnings)))
                note(f"{'FAIL' if made.error else 'built'} {made.kernel} {made.seconds:.1f} s {said}".rstrip())
    if told and configs:
        here = f"{len(configs) - failed} of {len(configs)} kernels are here"
        note(f"{here}, {len(absent) - failed} of them built now in {kernel_files.cache()}")
    return failed


# -- The list ------------------------------------------------------------------------------------------------------


def _print() -> None:
    """The kernels that ship, by head dims and kind: how many are here of how many; then folders and the compiler."""
    from tilewise.backends.hopper.host import library, selection

    kinds = (*selection.FORMS, *selection.FEATURES)
    counts: dict[tuple[str, str], list[int]] = {}
    for config in selection.in_order_of_use():
        dtype, dims, *words = selection.words_of(config).split()
        of_kind = counts.setdefault(
            (f"{dtype} {dims}", next((w for w in words if w in selection.FEATURES), words[0])), [0, 0]
        )
        of_kind[0] += library.here(config) is not None
        of_kind[1] += 1
    page = table(("calls", *kinds), left=("calls",))
    for row in sorted({row for row, _ in counts}, key=_sizes):
        cells = (counts.get((row, kind)) for kind in kinds)
        page.add_row(row, *("{}/{}".format(*cell) if cell else "–" for cell in cells))
    found = _as_dict()
    heading("Kernels for Hopper GPUs", "here / all; a row and a column are words for --for")
    console().print(page)
    for name in ("shipped", "built here", "compiler"):
        console().print(f"{name:11}{found[name]}", highlight=False, soft_wrap=True)


def _sizes(row: str) -> tuple[str, list[int]]:
    """Return a row's place in the list: by dtype, then by head dims as numbers."""
    dtype, dims = row.split()
    return dtype, [int(size) for size in dims.removeprefix("d").split("v")]


def _as_dict() -> dict[str, object]:
    """Return the folders, the compiler, and the file of each kernel that ships, or None."""
    from tilewise.backends.hopper.host import compiler, kernel_files, library, selection

    files = {config.name: library.here(config) for config in selection.in_order_of_use()}
    folder, cache = kernel_files.folder(), kernel_files.cache()
    shipped = sum(file is not None and file.parent == folder for file in files.values())
    return {
        "shipped": f"{shipped} of {len(files)} in {folder}",
        "built here": f"{kernel_files.built_here()} in {cache}",
        "compiler": compiler.unusable() or f"{compiler.PACKAGE} {compiler.version()}",
        "kernels": {name: file and str(file) for name, file in files.items()},
    }
