"""How the commands look: one console, one kind of table, one progress bar. rich is imported on use."""

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

STYLES = {
    "meets": "green",
    "green": "green",
    "agrees": "green",
    "loose": "yellow",
    "not measured": "yellow",
    "refused": "yellow",
    "falls short": "bold red",
    "red": "bold red",
    "failed": "bold red",
}


@lru_cache(maxsize=1)
def console() -> "Console":
    """Return a console on standard output; without a terminal it is wide enough for every table."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=140)


def heading(title: str, subtitle: str = "") -> None:
    """A line above a table: what it shows, then under which conditions."""
    console().print(f"[bold]{title}[/]" + (f"   {subtitle}" if subtitle else ""), highlight=False)


def note(line: str) -> None:
    """A line below a table."""
    console().print(line, style="dim", highlight=False, markup=False)


def table(columns: Iterable[str], left: Iterable[str] = (), wrap: Iterable[str] = ()) -> "Table":
    """Return a table whose columns are numbers, to the right, unless named in `left`; those in `wrap` give way on a narrow screen."""
    from rich import box
    from rich.table import Table

    page = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        page.add_column(name, justify="left" if name in left else "right", no_wrap=name not in wrap, overflow="fold")
    return page


def status_text(word: str) -> str:
    """Return a verdict in its colour."""
    return f"[{STYLES[word]}]{word}[/]" if word in STYLES else word


def progress(bar: bool = False) -> "Progress":
    """Return a spinner with what is being done, the time it has taken and, with ``bar``, its share; on stderr, gone when finished,
    silent in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    done = (BarColumn(), MofNCompleteColumn()) if bar else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *done, TimeElapsedColumn())
    screen = Console(stderr=True)
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
