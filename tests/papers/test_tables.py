"""The tables, the command and the page show what was counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tilewise_papers import docs
from tilewise_papers.command import io
from tilewise_papers.devices import device
from tilewise_papers.report import Setting, table
from tilewise_papers.tables import PAPER_SETTING, Table, tables

ROOT = Path(__file__).parents[2]
SMALL = Setting(seqlen=128, head_dim=16, heads=2, batch=3, device=device("h200"))


def run(*arguments: str):
    app = typer.Typer()
    app.command()(io)
    return CliRunner().invoke(app, arguments)


def test_markdown_has_a_rule_and_a_line_for_each_row():
    found = Table("T", ("a", "b"), [("x", "1"), ("y", "2")], "note").markdown()
    assert found == "**T**\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n| y | 2 |\n\nnote\n"


def test_markdown_cuts_a_wide_table_and_repeats_the_first_column():
    found = Table("T", tuple("abcdefghi"), [tuple("012345678")]).markdown()
    assert "| a | b | c | d | e | f | g | h |\n" in found
    assert found.endswith("\n\n| a | i |\n| --- | ---: |\n| 0 | 8 |\n")


def test_cells_are_the_counts_of_all_heads():
    rows = table(SMALL)
    forward = tables(SMALL, rows)[0]
    line = dict(zip(forward.columns, forward.rows[0], strict=True))
    assert line["matmul GFLOP"] == f"{4 * 128 * 128 * 16 * 6 / 1e9:.1f}"
    assert line["HBM read GB"] == f"{6 * rows[0].forward.slow.read_bytes / 1e9:.2f}"
    assert line["× standard"] == "1.000"
    ratios = {row[0]: float(row[forward.columns.index("× standard")]) for row in forward.rows}
    assert ratios["FlashAttention-2"] < ratios["FlashAttention"] < 1 < ratios["+ mask, dropout"]


def test_memory_that_the_device_does_not_have_is_marked():
    rows = table(SMALL)
    found = [tables(replace(SMALL, batch=batch), rows)[2] for batch in (3, 10**6)]
    assert [("†" in one.rows[0][-1], "more than the 141.0 GB of HBM" in one.note) for one in found] == [
        (False,) * 2,
        (True,) * 2,
    ]


def test_the_papers_figures_stand_beside_the_papers_setting_only():
    paper = Setting(**PAPER_SETTING, device=device("h200"))
    rows = table(replace(paper, seqlen=64))  # any rows: what is asked is which tables come
    assert any("Figure 2" in one.title for one in tables(paper, rows))
    for name in PAPER_SETTING:
        other = replace(paper, **{name: getattr(paper, name) // 2})
        assert not any("Figure 2" in one.title for one in tables(other, rows))


def test_io_prints_every_algorithm_and_the_levels():
    found = run("--seqlen", "64", "--head-dim", "16", "--heads", "1", "--batch", "1", "--sram", "8KiB")
    assert found.exit_code == 0
    for text in (
        "SRAM 8 KiB",
        "FlashAttention-2, causal",
        "4 key splits + merge",
        "4 warps, queries split",
        "Backward",
    ):
        assert text in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "unknown device 'tpu'; known are a100, h200, cpu"),
        (("--sram", "lots"), "'lots' is no size"),
        (("--sram", "64B"), "needs 128 bytes, but SRAM has 64 of 64 left"),
        (("--seqlen", "0"), "seqlen 0 is below 1"),
        (("--sweep", "moon"), "unknown sweep 'moon'; known are block, sparsity, seqlen, sram"),
    ],
    ids=lambda x: "" if isinstance(x, str) else " ".join(x),
)
def test_io_refuses_with_one_clear_error(arguments: tuple[str, ...], message: str):
    found = run(*arguments)
    assert isinstance(found.exception, ValueError)
    assert message in str(found.exception)


def test_the_page_is_the_one_that_the_generator_writes():
    """Run `python -m tilewise_papers.docs docs` after a change of the programs or of the text."""
    assert (ROOT / "docs" / "io.md").read_text(encoding="utf-8") == docs.page()


def test_reflow_breaks_prose_and_leaves_tables_alone():
    assert docs.reflow("a  b\nc") == "a b c"
    assert docs.reflow("- one\n  two\n- three") == "- one two\n- three"
    for block in ("| a |\n| b |", "```\na\nb\n```", "![x](y)", "# T"):
        assert docs.reflow(block) == block
