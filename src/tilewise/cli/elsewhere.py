"""Commands whose code is no part of this package: it is in ``bench/``, which only a clone has, or in ``tilewise_papers``."""

import inspect
from importlib import import_module
from importlib.util import find_spec

import typer

from tilewise.cli import checkout
from tilewise.cli.options import from_dataclass

COMMANDS = {
    "demo": (
        "bench.demo",
        "Try it: errors against float64, time and memory over N, a small GPT trained twice; inside a clone.",
    ),
    "bench": ("bench.bench", "Measure attention beside its peers, and judge speed claims; inside a clone."),
    "tune": (
        "bench.tune",
        "Measure the tiles of the Triton kernels and keep the fastest for this machine; inside a clone.",
    ),
    "io": (
        "tilewise_papers.command",
        "Count the memory traffic of each attention algorithm of the papers, and predict its time.",
    ),
}
EVERY_OPTION = {"allow_extra_args": True, "ignore_unknown_options": True}  # the command itself reads them


def run(context: typer.Context) -> int:
    """Run the command of that name: the function ``name`` of its module, which knows its options.

    Raises:
        ValueError: its module is not here; the message says how to get it.
    """
    name = context.command.name
    path, _ = COMMANDS[name]
    if path.startswith("bench."):
        checkout.use_bench()
    elif not find_spec("tilewise_papers"):
        raise ValueError(
            f"the papers' algorithms are in the package tilewise_papers, which is not installed here: {checkout.URL_HINT}"
        )
    command = getattr(import_module(path), name)
    found = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    one_record = len(inspect.signature(command).parameters) == 1
    found.command()(from_dataclass(command) if one_record else command)
    return found(context.args, prog_name=f"tilewise {name}", standalone_mode=False)
