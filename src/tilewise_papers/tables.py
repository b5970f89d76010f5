"""The report as tables of text: the command line prints them, the documentation shows them as Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise_papers.machine import Counts
from tilewise_papers.report import Row, Setting, forecast, inner_table, intensity

# What Figure 2, left, of FlashAttention (Dao et al. 2022) reports for its setting: GPT-2 medium on an A100.
PAPER_SETTING = {"seqlen": 1024, "head_dim": 64, "heads": 16, "batch": 64}
PAPER_FIGURES = {"GFLOPs": (66.6, 75.2), "HBM, GB": (40.3, 4.4), "time, ms": (41.7, 7.3)}
WIDEST = 8
"""The columns that a page shows side by side on a phone."""


@dataclass(frozen=True)
class Table:
    """A title, one name for each column, rows of text, and what to know when reading it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        """Return the table for a page, cut after each ``WIDEST`` columns; each cut repeats the first column."""
        lines = [f"**{self.title}**"]
        for start in range(1, len(self.columns), WIDEST - 1):
            columns, *rows = ((row[0], *row[start : start + WIDEST - 1]) for row in (self.columns, *self.rows))
            lines += ["", _line(columns), "|" + "|".join([" --- ", *[" ---: "] * (len(columns) - 1)]) + "|"]
            lines += map(_line, rows)
        note = self.note.replace("*", r"\*")  # a line that begins with one would be a list
        return "\n".join([*lines, "", note] if note else lines) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def tables(setting: Setting, rows: list[Row]) -> list[Table]:
    """Forward, backward, both together, inside a core; at the FlashAttention paper's setting also beside its figures.

    rows: of report.table(setting).
    """
    found = [pass_table(setting, rows, backward) for backward in (False, True)]
    found.append(sum_table(setting, rows))
    if all(getattr(setting, name) == value for name, value in PAPER_SETTING.items()):
        found.append(paper_table(setting, rows))
    return [*found, shared_table(setting)]


def pass_table(setting: Setting, rows: list[Row], backward: bool) -> Table:
    """One line for each algorithm: what it computes and moves, and what binds it."""
    slow, cores = setting.device.levels[0].name, "SMs" if setting.device.name != "cpu" else "cores"
    columns = ("algorithm", "Br×Bc", "matmul GFLOP", "other", f"{slow} read GB", "write GB")
    columns += ("× standard", "FLOP/B", "limit", "ms", "items", f"{cores} filled")
    chosen = [(row, row.backward if backward else row.forward) for row in rows]
    chosen = [(row, counts) for row, counts in chosen if counts]
    standard = chosen[0][1].slow.bytes
    lines = [(*label(row, backward), *cells(setting, counts, standard)) for row, counts in chosen]
    sram = setting.device.levels[1]
    needed = [row.both.peak_bytes[1] for row in rows if not row.fits]
    note = f"* {max(needed, default=0):,} bytes: more than the {int(sram.bytes):,} of {sram.name}, counted on a larger one."
    return Table("Backward" if backward else "Forward", columns, lines, note if needed else "")


def label(row: Row, backward: bool) -> tuple[str, str]:
    blocks = row.backward_blocks if backward else row.blocks
    return row.name + ("" if row.fits else " *"), f"{blocks.rows}×{blocks.cols}"


def cells(setting: Setting, one_head: Counts, standard_bytes: int) -> tuple[str, ...]:
    counts = one_head.of_heads(setting.all_heads)
    least = forecast(counts, setting.device)
    return (
        f"{counts.matmul_flops / 1e9:,.1f}",
        f"{counts.other_flops / 1e9:,.1f}",
        f"{counts.slow.read_bytes / 1e9:,.2f}",
        f"{counts.slow.write_bytes / 1e9:,.2f}",
        f"{one_head.slow.bytes / standard_bytes:.3f}",
        f"{intensity(counts):,.0f}",
        least.binding,
        f"{1e3 * least.seconds:,.3g}",
        f"{least.longest.items:,}",
        f"{least.longest.share:.0%}",
    )


def sum_table(setting: Setting, rows: list[Row]) -> Table:
    """Forward and backward together: the cost of training."""
    rows = [row for row in rows if row.backward]
    slow, capacity = setting.device.levels[0].name, setting.device.levels[0].bytes
    lines = []
    for row in rows:
        counts = row.both.of_heads(setting.all_heads)
        lines.append(
            (
                row.name + ("" if row.fits else " *"),
                f"{counts.matmul_flops / 1e9:,.1f}",
                f"{counts.other_flops / 1e9:,.1f}",
                f"{counts.slow.bytes / 1e9:,.2f}",
                f"{counts.slow.bytes / (rows[0].both.slow.bytes * setting.all_heads):.3f}",
                f"{1e3 * seconds(setting, row):,.3g}",
                f"{counts.peak_bytes[0] / 1e9:,.2f}" + (" †" if counts.peak_bytes[0] > capacity else ""),
            )
        )
    columns = ("algorithm", "matmul GFLOP", "other", f"{slow} GB", "× standard", "ms", f"peak {slow} GB")
    note = f"† more than the {capacity / 1e9:,.1f} GB of {slow}." if any("†" in line[-1] for line in lines) else ""
    return Table("Forward + backward", columns, lines, note)


def seconds(setting: Setting, row: Row) -> float:
    """Predicted time of the forward, then the backward."""
    return forecast(row.both.of_heads(setting.all_heads), setting.device).seconds


def paper_table(setting: Setting, rows: list[Row]) -> Table:
    """The paper's figures for standard attention and FlashAttention, beside what is counted here."""
    by_name = {row.name: row for row in rows}
    names = ("standard", "+ mask, dropout", "FlashAttention, paper's Bc", "FlashAttention")
    columns = ("", "paper: standard", *names[:2], "paper: FlashAttention", *names[2:])
    ours = {
        "GFLOPs": lambda c, row: f"{(c.matmul_flops + c.other_flops) / 1e9:,.1f}",
        "HBM, GB": lambda c, row: f"{c.slow.bytes / 1e9:,.2f}",
        "time, ms": lambda c, row: f"{1e3 * seconds(setting, row):,.1f}",
    }
    lines = []
    for quantity, figures in PAPER_FIGURES.items():
        found = [ours[quantity](by_name[n].both.of_heads(setting.all_heads), by_name[n]) for n in names]
        lines.append((quantity, str(figures[0]), *found[:2], str(figures[1]), *found[2:]))
    note = f"Paper: as it reports them, for an A100. Here: counted for {setting.device.name}; the time is a bound."
    return Table("Beside Figure 2 of the FlashAttention paper, forward + backward", columns, lines, note)


def shared_table(setting: Setting) -> Table:
    """Programs with a level below SRAM: what crosses into it, for the same tile of queries."""
    fast, inner = (level.name for level in setting.device.levels[1:3])
    lines = []
    blocks, rows = inner_table(setting)
    for row in rows:
        counts = row.forward.of_heads(setting.all_heads)
        boundary = counts.boundaries[1]
        amounts = (
            f"{b / 1e9:,.2f}" for b in (counts.slow.bytes, boundary.read_bytes, boundary.write_bytes, boundary.bytes)
        )
        lines.append((row.name, *amounts, f"{counts.barriers:,}", forecast(counts, setting.device).binding))
    slow = setting.device.levels[0].name
    columns = ("program", f"{slow} GB", f"{fast}→{inner} GB", f"{inner}→{fast} GB", "sum GB", "barriers", "limit")
    return Table(f"Inside a core, forward, tiles of {blocks.rows} queries × {blocks.cols} keys", columns, lines)
