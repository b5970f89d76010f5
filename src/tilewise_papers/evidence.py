"""docs/evidence.md: the claims of the papers beside what was counted and measured here. ``python -m tilewise_papers.evidence --write``.

claims.toml has what the papers say, bench/results what was measured; what was counted does not depend on the machine. A function of
this file reads each claim's figure and judges it. tests/papers/test_evidence.py holds the page equal to all of them.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path

from bench import page
from bench.cases import tagged
from bench.measure import ROOT
from bench.tables import RESULTS, load, number, section, table, wrapped
from tilewise_papers import flash1, flash2, report, traffic
from tilewise_papers.devices import DEVICES
from tilewise_papers.evidence_training import (
    SMALL,
    context_table,
    contexts,
    ladder_table,
    longer_section,
    parts_section,
    rungs,
    step,
    training_rows,
    training_section,
    users_section,
)
from tilewise_papers.head import Blocks, Head
from tilewise_papers.machine import Counts
from tilewise_papers.tables import PAPER_FIGURES, PAPER_SETTING

PAGE = ROOT / "docs" / "evidence.md"
QUOTING = ROOT / "docs" / "training.md"
QUOTED = {"context-gpu": context_table, "ladder": ladder_table}
"""The page that quotes tables, each between ``<!-- name -->`` and ``<!-- /name -->``, and the tables."""
DECODING = "h200-decode"
"""The run of one query over a dense cache."""
CLAIMS = Path(__file__).with_name("claims.toml")
HOLDS, FAILS = "holds", "does not hold"
EAGER, SPARSE, SHARES = "be2142459054", "bf64f25f9387", "96f15ace073d"
"""Runs of a CPU: beside standard attention, and a block pattern beside the whole; of an H200: patterns of many shares."""
LEAST_SHARE = 0.06  # of the blocks, down to which a pattern's time is judged
NEWCOMER = "python -m bench.newcomer"
TRAFFIC = "90ece5c3a062"
RANKS = {2: "6f41e8220b30", 4: "031e580f267a"}
"""The runs of tilewise_papers.traffic and, by GPUs, tilewise_papers.gpt_ranks that are shown: name a newer one here."""
INTRO = (
    "This page compares the claims of the FlashAttention papers with our measurements. Each row has a command to repeat it; `tilewise "
    "bench --tag paper` runs those that your machine can. Speeds beside other libraries are in [performance.md](performance.md). "
    "`python -m tilewise_papers.evidence --write` writes this page from `src/tilewise_papers/claims.toml` (the papers' figures, and our "
    "criteria), `bench/results` (measurements) and the counted machine ([io.md](io.md))."
)


@dataclass(frozen=True)
class Found:
    """Our figure for a claim, and whether the claim holds."""

    ours: str
    holds: bool

    @property
    def verdict(self) -> str:
        return HOLDS if self.holds else FAILS


# ---- counted ----------------------------------------------------------------------------------------------------------


def setting() -> report.Setting:
    """GPT-2 medium's attention on an A100, as the FlashAttention paper has it."""
    return report.Setting(**PAPER_SETTING, device=DEVICES["a100"])


@cache
def counted(program: Callable, rows: int, cols: int) -> Counts:
    """The counts of a forward of one head of :func:`setting` counts with such blocks."""
    machine = setting().machine(roomy=True)
    program(machine, Head.blank(setting().seqlen, setting().head_dim), Blocks(rows, cols))
    return machine.counts


def fewer_bytes() -> Found:
    """Bytes of standard attention, with mask and dropout, over FlashAttention's with the paper's blocks."""
    eager, ours = report.best(report.SEPARATE, setting()), report.flash_with_paper_blocks(setting())
    gb = [row.both.of_heads(setting().all_heads).slow.bytes / 1e9 for row in (eager, ours)]
    theirs = PAPER_FIGURES["HBM, GB"]
    ratio, paper = gb[0] / gb[1], theirs[0] / theirs[1]
    text = f"{gb[0]:.1f} GB and {gb[1]:.2f} GB counted: {ratio:.1f} times fewer, the paper's {paper:.1f}"
    return Found(text, abs(ratio / paper - 1) <= 0.1)


def other_operations() -> Found:
    """Operations other than products of both orders of the loops, with the same blocks."""
    first, second = (counted(program, 64, 128).other_flops for program in (flash1.forward, flash2.forward))
    text = f"{second / first:.2f} of FlashAttention's, counted, forward, blocks of 64 × 128"
    return Found(text, second < first)


def warps() -> Found:
    """Bytes between shared memory and registers, and barriers, of warps that split keys or queries."""
    blocks, rows = report.inner_table(setting())
    keys, queries = (row.forward.of_heads(setting().all_heads) for row in rows[:2])
    gb = [counts.boundaries[1].bytes / 1e9 for counts in (keys, queries)]
    text = (
        f"{gb[1]:.2f} GB and {queries.barriers:,} barriers with queries split, {gb[0]:.2f} GB and {keys.barriers:,} with keys split; "
        f"counted, tiles of {blocks.rows} × {blocks.cols}"
    )
    return Found(text, gb[1] < gb[0] and queries.barriers == 0)


def nested() -> Found:
    """Bytes of each boundary by nested tiles."""
    _, rows = report.inner_table(setting())
    keys, _, mine = (row.forward.of_heads(setting().all_heads) for row in rows)
    gb = [[b.bytes / 1e9 for b in counts.boundaries] for counts in (keys, mine)]
    text = (
        f"{gb[1][0]:.2f} GB of slow memory, {gb[1][1]:.2f} of shared memory; split keys move {gb[0][0]:.2f} and "
        f"{gb[0][1]:.2f}; the CPU's kernels nest tiles for L2, L1 and registers"
    )
    return Found(text, gb[1][0] <= gb[0][0] and gb[1][1] < gb[0][1])


# ---- measured on a CPU and an H200 ---------------------------------------------------------------------------------------


def ratios(file: str, run: str, one: str, other: str, direction: str) -> list[float]:
    """How many times as long ``other`` took as ``one``, over the cases of a run that timed both."""
    found = load(file)
    times = [[found.value(run, case, who, direction, "time") for who in (other, one)] for case in found.cases(run)]
    return sorted(a / b for a, b in times if a and b)


def between(values: list[float]) -> str:
    """The range of some numbers as text."""
    low, high = (f"{x:.1f}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def speed() -> Found:
    """Standard attention's time over ours, on a CPU and on an H200."""
    both = ratios("cpu-calls", EAGER, "cpu", "eager", "both")
    text = f"{between(both)} × forward and backward on a CPU, 2 threads, over {len(both)} shapes"
    eager, ours = traffic_times(128, "standard", "flash2")
    text += f"; {eager / ours:.1f} × by Triton on an H200, forward, N 8192, D 64"
    return Found(text, min(*both, eager / ours) > 1)


def memory() -> Found:
    """Memory beyond inputs and outputs over N, beside standard attention's."""
    found, values = load("triton-goals"), {}
    run = next(r for r in found.runs if found.value(r, "h200-d64-n2048-full", "triton", "both", "memory"))
    for n in (2048, 4096, 16384):
        values[n] = found.value(run, f"h200-d64-n{n}-full", "triton", "both", "memory")
    steps = json.loads((RESULTS / "context-cpu.json").read_text(encoding="utf-8"))["steps"]
    peak = {(s["context"], s["attention"]): s["peak_bytes"] for s in steps if "peak_bytes" in s}
    less = peak[16384, "standard"] / peak[16384, "tilewise"]
    text = (
        f"16,384 tokens take {between(list(values.values()))} MiB beyond inputs and outputs in rows of "
        f"{', '.join(f'{n:,}' for n in values)}, Triton on an H200; a training step of 16,384 bytes on a CPU takes {less:.1f} × less than "
        "with standard attention, weights included"
    )
    return Found(text, values[16384] <= values[2048])


def sparse_time() -> Found:
    """Time of block patterns over the whole's, beside the shares of the blocks that they keep."""
    found, kept = load("cpu-goals"), page.kept_share("cpu-fp32-d64-n16384-sparse90")
    said, over = [], []
    for direction in page.PASSES:
        names = [f"cpu-fp32-d64-n16384-{name}" for name in ("sparse90", "full")]
        mine, whole = (found.value(SPARSE, name, "cpu", direction, "time") for name in names)
        said.append(f"{mine / whole:.1%} {direction}")
        over.append(mine / whole / kept)
    text = f"{kept:.1%} of the blocks take {' and '.join(said)} of the time on a CPU at N 16,384"
    long = _shares(128, 65536)
    text += f"; on an H200 at N 65,536, D 128, {_percents(list(long['hopper', 'forward']))} of the blocks take "
    text += ", ".join(
        f"{_percents(list(taken.values()))} {direction} by {who}" for (who, direction), taken in long.items()
    )
    for d, n in ((64, 65536), (128, 8192)):  # what falls short
        taken = _shares(d, n)
        share = min(x for x in taken["hopper", "forward"] if x > LEAST_SHARE)
        times = [
            f"{' and '.join(f'{taken[who, x][share]:.1%}' for x in page.PASSES)} ({who})"
            for who in ("hopper", "triton")
        ]
        text += f"; with D {d} and N {n:,}, {share:.1%} of the blocks take {', '.join(times)}"
    over += [time / share for taken in long.values() for share, time in taken.items() if share > LEAST_SHARE]
    return Found(text, max(over) <= 1.15)


def _shares(d: int, n: int) -> dict[tuple[str, str], dict[float, float]]:
    """The share of time by that of blocks, for each backend and pass."""
    found, before = load("hopper-calls"), f"shares-d{d}-n{n}-"
    cases = {case: shape["kept"] for case, shape in found.cases(SHARES).items() if case.startswith(before)}
    taken: dict[tuple[str, str], dict[float, float]] = {}
    for who, direction in product(("hopper", "triton"), page.PASSES):
        whole = found.value(SHARES, before + "whole", who, direction, "time")
        times = {kept: found.value(SHARES, case, who, direction, "time") for case, kept in cases.items() if kept < 1}
        taken[who, direction] = {kept: time / whole for kept, time in times.items()}
    return taken


def _percents(shares: list[float]) -> str:
    return ", ".join(f"{100 * share:.1f}" for share in shares) + "%"


def sparse_bytes() -> Found:
    """Bytes of block patterns over the whole's by a GPU's counters, beside the shares of the blocks that they keep."""
    whole, said, over = moved("flash2", "l2"), [], []
    for density in traffic.DENSITIES:
        mine = moved(f"flash2-sparse-{traffic.percent(density)}", "l2")
        kept = traffic.pattern(density).float().mean().item()
        said.append(f"{kept:.1%} of the blocks move {mine / whole:.1%}")
        over.append(mine / whole / kept)
    text = f"{', '.join(said)} of the bytes between multiprocessors and L2, N 8192, D 64, H200"
    return Found(text, max(abs(x - 1) for x in over) <= 0.1)


def share_of_peak() -> Found:
    """The best forward and backward as shares of the data sheet's products."""
    peak, squares = DEVICES["h200"].matmul_flops / 1e12, [case.name for case in tagged("h200")]
    best = [max(page.H200.tflops(case, "tilewise", direction) for case in squares) for direction in page.PASSES]
    text = f"{best[0]:.0f} and {best[1]:.0f} TFLOP/s at best, {best[0] / peak:.0%} and {best[1] / peak:.0%} of an H200's {peak:.0f} in bf16"
    return Found(text, best[0] / peak >= 0.73 and best[1] / peak >= 0.63)


def decoding() -> Found:
    """The pace at which one sequence's keys and values are read, over a copy's."""
    found = load("h200-peers")
    copy = max(found.runs[DECODING]["limits"]["copy_gb_per_s"])
    pace = found.value(DECODING, "h200-decode-b1-n131072-h32-8-d128", "hopper", "forward", "bandwidth")
    times = load("triton-goals").newest("cuda-one-head-n4096", ("unsplit", "triton"), "forward")
    text = (
        f"131,072 keys of one sequence at {pace / 1e3:.2f} TB/s, {pace / copy:.0%} of a copy, on an H200; 4,096 queries of one head "
        f"by Triton {times[0] / times[1]:.1f} × as fast with keys split"
    )
    return Found(text, pace / copy > 0.75)


def path_x() -> Found:
    """How far our Pathfinder went: the rungs of src/tilewise_papers/pathfinder/ladder.py that were tested on new images."""
    tested = [r for r in rungs() if r["tested_images"]]
    said = ", ".join(
        f"{r['value']:.1%} of {r['shape']['side']} × {r['shape']['side']}{' by block-sparse attention' if r['sparse'] else ''} "
        f"after {r['ended_s']:.0f} s"
        for r in tested
    )
    text = f"{said} of training on an H200; new images of our own generator, all pixels read ([training.md](training.md#pathfinder))"
    better = [
        r["value"] > 0.5 + 3 * (0.25 / r["tested_images"]) ** 0.5 for r in tested
    ]  # three standard deviations of guesses
    return Found(text, all(better) and {r["shape"]["side"] for r in tested} >= {128, 256})


def several_gpus() -> Found:
    """Tokens a second of a GPT over GPUs that shard its weights, over those of a GPU alone."""
    found, times = load("h200-peers"), {}
    for gpus, run in RANKS.items():
        rates = [r for key, r in found.found.items() if key[0] == run and r.get("tokens_per_s")]
        rate = {r["contestant"]: r["tokens_per_s"] for r in rates}
        times[gpus] = gpus * rate["fsdp"] / rate["alone"]
    said = " and ".join(f"{x:.2f} × with {gpus} GPUs" for gpus, x in times.items())
    text = f"{said} the tokens a second of one, a GPT of 1.3B, a sequence of 8,192 tokens a GPU, FSDP2, H200 ([parallel.md](parallel.md))"
    return Found(text, times[4] > 3)


# ---- measured by this page's own commands --------------------------------------------------------------------------------


def moved(name: str, who: str) -> float:
    """MB of one head by an order of the loops, as ``who`` saw or counted them."""
    return load("triton-calls").value(TRAFFIC, f"traffic-{name}-h128", who, "forward", "traffic")


def traffic_times(heads: int, *names: str) -> list[float]:
    """Milliseconds of orders of the loops on so many heads."""
    return [load("triton-calls").value(TRAFFIC, f"traffic-{n}-h{heads}", "kernel", "forward", "time") for n in names]


def io_complexity() -> Found:
    """Bytes of FlashAttention's order with key blocks of 64 and 128, by counters."""
    mb = [moved(f"flash1-{cols}", "dram") for cols in traffic.WIDTHS]
    text = (
        f"{', '.join(f'{x:.0f}' for x in mb)} MB of DRAM a head with blocks of 64, 128 and 256 keys, N 8192, D 64, H200"
    )
    return Found(text, all(abs(2 * b / a - 1) <= 0.1 for a, b in pairwise(mb)))


def loop_order() -> Found:
    """Bytes and time of both orders with the same tile."""
    mb, times = [moved(name, "dram") for name in ("flash1-128", "flash2")], traffic_times(128, "flash1-128", "flash2")
    text = (
        f"{mb[0]:.0f} MB of DRAM a head with keys outside, {mb[1]:.1f} with queries outside; {times[0]:.2f} and {times[1]:.2f} ms for "
        "128 heads, N 8192, D 64, H200"
    )
    return Found(text, mb[1] < mb[0] and times[1] < times[0])


def over_the_sequence() -> Found:
    """One head by one program and by many."""
    times = traffic_times(1, "flash1-128", "flash2")
    text = f"one head, N 8192, D 64: {times[0]:.2f} ms by one program, {times[1]:.3f} by a program for each query tile, H200"
    return Found(text, times[1] < times[0])


def training() -> Found:
    """Training steps of large GPTs."""
    rows = training_rows()
    gains = {case: rates["tilewise"] / rates["standard"] for case, rates in rows.items() if rates.get("standard")}
    text = f"{between(list(gains.values()))} × standard attention; the table below"
    holds = min(gains.values()) > 1 and all(gains[c] > gains[c.replace("8192", "2048")] for c in gains if "8192" in c)
    return Found(text, holds)


def quoted(text: str) -> str:
    """The text of docs/training.md with :data:`QUOTED` as the results have it now."""
    for name, made in QUOTED.items():
        lines = "\n".join(made())
        marks = rf"(?s)(<!-- {name} -->\n).*?(\n<!-- /{name} -->)"
        text = re.sub(marks, lambda found, lines=lines: f"{found[1]}{lines}{found[2]}", text)
    return text


def longer_context() -> Found:
    """Held-out losses over the context."""
    losses = {r["shape"]["context"]: r["value"] for r in contexts()}
    text = ", ".join(f"{loss:.3f} at {context:,}" for context, loss in losses.items())
    return Found(
        f"{text}, nats a byte; [training.md](training.md#longer-context-better-model)", losses[4096] < losses[1024]
    )


def longer_and_as_fast() -> Found | None:
    """Steps of a longer context by tilewise beside those of a shorter one by standard attention; None before they are measured."""
    said, gains = [], []
    for title, case in SMALL.items():
        run = load("hopper-calls").last(f"{case}1024")
        ours, eager = (step(run, f"{case}{n}", who) for n, who in ((4096, "tilewise"), (1024, "kept")))
        if not (ours.ms and eager.ms):
            return None
        said.append(f"{ours.tokens_per_s:,.0f} and {eager.tokens_per_s:,.0f} tokens/s {title}")
        gains.append(eager.ms / ours.ms)
    losses = {r["shape"]["context"]: r["value"] for r in contexts()}
    text = (
        f"tilewise at 4,096 and standard attention at 1,024: {', '.join(said)}; held-out losses of a smaller model {losses[4096]:.3f} and "
        f"{losses[1024]:.3f} ([training.md](training.md#longer-context-better-model)); the table below"
    )
    return Found(text, min(gains) >= 1 and losses[4096] < losses[1024])


# ---- the page ---------------------------------------------------------------------------------------------------------


def claims() -> list[dict]:
    """The claims of src/tilewise_papers/claims.toml."""
    return tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claims"]


def judged() -> list[tuple[dict, Found]]:
    """The claims for which there is a figure of ours."""
    every = ((claim, globals()[claim["found"]]()) for claim in claims())
    return [(claim, found) for claim, found in every if found]


def claim_table(judged: list[tuple[dict, Found]]) -> list[str]:
    """Each claim with the paper's figure, ours, the verdict and the command."""
    rows = []
    for claim, found in judged:
        who = f"{claim['claim']} *{claim['paper']}, {claim['where']}*"
        rows.append(
            [
                who,
                claim["theirs"],
                found.ours,
                f"**{found.verdict}**; holds if {claim['holds']}",
                f"`{claim['command']}`",
            ]
        )
    head = ["claim", "the paper's", "here", "verdict", "again"]
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def text() -> str:
    """The whole page."""
    figures = judged()
    verdicts = [found.verdict for _, found in figures]
    fails = verdicts.count(FAILS)
    said = (
        f"There are {len(verdicts)} claims: {verdicts.count(HOLDS)} hold, {fails} {'does' if fails == 1 else 'do'} not."
    )
    lines = ["# Evidence", "", *wrapped(INTRO), "", said, "", *claim_table(figures)]
    for part in (training_section, users_section, longer_section, parts_section, traffic_section, newcomer_section):
        lines += part()
    return "\n".join([*lines, ""])


def traffic_section() -> list[str]:
    """Counted bytes beside a GPU's counters."""
    found, rows = load("triton-calls"), []
    for case, shape in found.cases(TRAFFIC).items():
        values = {
            who: found.value(TRAFFIC, case, who, "forward", "traffic") for who in ("counted", "l2", "dram", "least")
        }
        if values["counted"]:
            share = [f"{values[who] / values['counted']:.2f}" for who in ("l2", "dram")]
            ms = found.value(TRAFFIC, f"traffic-{shape['order']}-h128", "kernel", "forward", "time")
            rows.append([order_title(shape["order"]), *[number(x, 1) for x in values.values()], *share, number(ms, 2)])
    words = (
        "MB of one head, forward, N 8192, D 64, fp16. *Counted* is `tilewise io`'s number, for the fast memory of one multiprocessor. *L2* "
        "and *DRAM* are hardware counters between multiprocessors and L2, and between L2 and memory. *Least* reads Q, K and V and writes O "
        "once. Each key block reads a head's Q and O again if the keys are outside: 128 heads have more of them than L2 holds, so DRAM "
        " moves the counted bytes, until a pattern's band is narrow enough for L2 (the last pattern). The programs of a head read the "
        "same K and V at about the same time if the queries are outside: L2 serves all but the first, and DRAM moves the least possible. "
        "Standard attention uses cuBLAS's products. Their tiles read Q, K, P and V more often than the model's long blocks; S and P go "
        "through DRAM as counted. Its counters are of 16 heads, all others of 128; the last column is the time of 128. "
        f"{found.source(TRAFFIC)} {found.runs[TRAFFIC]['statistic']}"
    )
    head = ["order of the loops", "counted", "L2", "DRAM", "least", "L2 / counted", "DRAM / counted", "ms"]
    return section(
        "Counted beside measured", words, table(head, sorted(rows, key=lambda row: row[0] != order_title("standard")))
    )


def newcomer_section() -> list[str]:
    """The first commands in an empty folder, by the newest run of bench.newcomer."""
    found = load("cpu-calls")
    runs = [name for name, record in found.runs.items() if record["command"] == NEWCOMER]
    run = max(runs, key=lambda name: found.runs[name]["when"])
    rows = [
        [f"`{shape['command']}`", clock(found.value(run, case, "newcomer", "step", "time"))]
        for case, shape in found.cases(run).items()
    ]
    load_then = found.runs[run]["load"]
    words = (
        "Time of the first commands in an empty folder; the first one builds an environment. "
        f"The machine's load before was {load_then}. {found.source(run)}"
    )
    return section("The first commands", words, table(["command", "took"], rows))


def clock(ms: float) -> str:
    """Milliseconds as minutes and seconds."""
    minutes, seconds = divmod(round(ms / 1e3), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{ms / 1e3:.1f} s"


def order_title(order: str) -> str:
    """The title of a row: flash1-sparse-50% is keys outside, half of the blocks."""
    if order == "standard":
        return "standard attention"
    name, *rest = order.split("-")
    outside = "keys outside" if name == "flash1" else "queries outside"
    if rest[:1] == ["sparse"]:
        return f"{outside}, {rest[1].replace('%', ' %')} of the blocks"
    return f"{outside}, blocks of {rest[0]} keys" if rest else f"{outside}, tiles of {traffic.ROWS} × {traffic.COLS}"


def main(arguments: list[str] | None = None) -> int:
    """Prints docs/evidence.md, or writes it and the quotation."""
    parser = argparse.ArgumentParser(description=__doc__.partition(". ")[0])
    parser.add_argument("--write", action="store_true", help="write the page instead of printing it")
    if parser.parse_args(arguments).write:
        PAGE.write_text(text(), encoding="utf-8")
        QUOTING.write_text(quoted(QUOTING.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
