"""`tilewise verify`: every backend that can run here, its error against float64 beside eager's."""

import json
from dataclasses import dataclass
from typing import Annotated

import typer

from tilewise.cli import checkout
from tilewise.cli.page import console, heading, note, progress, status_text, table


@dataclass(frozen=True)
class VerifyOptions:
    """Options: where to run, and how to print it."""

    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


def verify(options: VerifyOptions) -> int:
    """Check every backend that runs on this machine against float64. Exit code 1: a result is wrong."""
    device = checkout.choose_device(options.device)
    import tilewise as tw

    with progress() as bar:
        bar.add_task("running every backend, forward and backward", total=None)
        report = tw.verify(device)
    if options.as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print(report)
    return 0 if report.ok else 1


def _print(report) -> None:
    columns = ("backend", "dtype", "feature", "worst", "error", "eager's", "allowed", "verdict")
    page = table(columns, left=("backend", "dtype", "feature", "worst", "verdict"), wrap=("verdict",))
    for row in report.rows:
        if row.ok is None:
            page.add_row(
                row.backend, row.dtype, row.feature, "", "", "", "", f"{status_text('refused')}: {row.refused}"
            )
            continue
        numbers = (f"{row.error:.1e}", f"{row.eager:.1e}", f"{row.allowed:.1e}")
        verdict = status_text("agrees" if row.ok else "red")
        page.add_row(row.backend, row.dtype, row.feature, row.tensor, *numbers, verdict)
    heading("Against float64", f"on {report.device}; relative RMS error of the worst of o, lse and the gradients")
    console().print(page)
    wrong = sum(row.ok is False for row in report.rows)
    note(
        "every result is as exact as eager attention's"
        if not wrong
        else f"{wrong} of {len(report.rows)} rows are wrong"
    )
