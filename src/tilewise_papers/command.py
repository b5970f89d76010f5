"""`tilewise io`: every attention algorithm of the papers on a counted memory hierarchy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tilewise_papers import devices, plots, tables
from tilewise_papers.report import Setting, table


def io(
    seqlen: Annotated[int, typer.Option(help="Queries and keys of a head.")] = 1024,
    head_dim: Annotated[int, typer.Option(help="Numbers in a query, key or value.")] = 64,
    heads: Annotated[int, typer.Option(help="Heads of one batch element.")] = 16,
    batch: Annotated[int, typer.Option(help="Batch elements.")] = 64,
    device: Annotated[str, typer.Option(help="Device whose memories and rates are taken: a100, h200 or cpu.")] = "a100",
    sram: Annotated[str | None, typer.Option(help="Another size of fast memory, like 192KiB.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Save a plot over block, sparsity, seqlen or sram instead.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the plot.")] = Path(),
) -> None:
    """Count the memory traffic and the operations of each attention algorithm of the papers, and predict its time.

    Defaults: GPT-2 medium's attention, the setting of the FlashAttention paper's Figure 2.
    """
    machine = devices.device(device)
    if sram is not None:
        machine = machine.with_sram(devices.parse_bytes(sram))
    setting = Setting(seqlen, head_dim, heads, batch, machine)
    counting = Console(stderr=True).status(f"counting each tile of {seqlen:,} × {seqlen:,} scores; Ctrl-C stops")
    if sweep is not None:
        with counting:
            saved = plots.save(sweep, setting, output)
        typer.echo(f"saved {saved}")
        return
    with counting:
        found = tables.tables(setting, table(setting))
    show(setting, found)


def show(setting, found) -> None:
    """Print the tables, as wide as they need where the output is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    levels = ", ".join(f"{level.name} {_in_bytes(level.bytes)}" for level in setting.device.levels)
    sizes = f"N {setting.seqlen:,}, d {setting.head_dim}, {setting.heads} heads, batch {setting.batch}"
    console.print(f"{sizes} on {setting.device.name} ({levels}; {setting.device.source})", highlight=False)
    for one in found:
        grid = Table(title=one.title, title_justify="left", caption=one.note or None, caption_justify="left")
        for i, column in enumerate(one.columns):
            grid.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
        for row in one.rows:
            grid.add_row(*row)
        console.print(grid)


def _in_bytes(size: int) -> str:
    """Return a size with a binary unit: ``1536`` is ``1.5 KiB``."""
    power = (size.bit_length() - 1) // 10
    return f"{size / 2 ** (10 * power):,.4g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
