"""The command `tilewise`: one module a command, each importing what is heavy only when it runs.

A user's mistake is one line on stderr and exit code 2, never a traceback; what a command judges and finds wanting (a goal
that falls short, a check that is red) is exit code 1.

Commands: ``doctor``, ``explain``, ``kernels``, ``show``, ``verify``. What they share: ``options``, ``page`` (tables and progress) and
``checkout``, which finds ``bench/``. ``elsewhere`` runs the commands of ``bench/`` and of ``tilewise_papers``.
"""

import sys
from typing import Annotated

import typer

from tilewise.cli import doctor, elsewhere, explain, kernels, show, verify
from tilewise.cli.options import from_dataclass

app = typer.Typer(
    name="tilewise",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        import torch

        import tilewise

        print(f"tilewise {tilewise.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and stop.")
    ] = False,
) -> None:
    """Exact attention for PyTorch: try it, ask which backend runs a call, check this machine, measure it."""


for command in (explain.explain, show.show, verify.verify, doctor.doctor, kernels.kernels):
    app.command()(from_dataclass(command))
for name, (_, said) in elsewhere.COMMANDS.items():
    app.command(name, help=said, add_help_option=False, context_settings=elsewhere.EVERY_OPTION)(elsewhere.run)

# typer's own usage errors, under whichever name the installed version of typer carries them.
UsageError = typer.BadParameter.__base__


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code; the console script `tilewise`."""
    try:
        return app(arguments, prog_name="tilewise", standalone_mode=False) or 0
    except UsageError as error:
        # Without a command typer has printed the help and has nothing to say.
        asked = error.ctx.command_path if error.ctx else "tilewise"
        return _fail(f"{error.format_message()} (see {asked} --help)") if error.format_message() else 0
    except (ValueError, NotImplementedError, OSError) as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped", code=130)


def _fail(message: str, code: int = 2) -> int:
    """Return one line, whatever the message's shape: reasons on lines of their own are joined."""
    print("tilewise:", "; ".join(line.strip() for line in message.splitlines() if line.strip()), file=sys.stderr)
    return code
