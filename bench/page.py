"""Writes what bench/results say into the pages, and draws it: ``python -m bench.page --write``.

The pages are docs/performance.md, its quotations, the tables of docs/derivatives.md and docs/huggingface.md, and the catalogue, which
needs no results. tests/bench holds them equal to what would be written; pictures are drawn as matplotlib has them today.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import torch

from bench import kinds, quotations
from bench.cases import named, tagged
from bench.measure import ROOT
from bench.tables import (
    PASSES,
    by_pass,
    geometric_mean,
    grid,
    load,
    machine,
    number,
    pair,
    section,
    spread,
    titled,
    today,
    wrapped,
)

PAGE = ROOT / "docs" / "performance.md"
DIMS, LENGTHS, MASKS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), ("full", "causal")
BY_LENGTH = {f"N {n}": n for n in LENGTHS}
LEVEL = 0.995  # of a peer's speed: below it a contestant counts as behind
OURS = "**tilewise**"
HEAD = """# Performance

This page shows how fast tilewise is beside other libraries, from `bench/results`. These commands measure a case on your machine:

```
tilewise bench --list          # the cases
tilewise bench --case NAME
```

{summary}

- N is the sequence length, D the head dim. *16/4* means 16 query heads on 4 key heads.
- Inputs are bf16 unless a table says otherwise.
- A causal mask counts half of the operations, other masks count the pairs that they keep. A backward counts 2.5 times its forward.
- A contestant with a wrong result is not timed.
- [decisions.md](decisions.md) says why the kernels are as they are, [tried.md](tried.md) what lost.
- `python -m bench.page --write` writes this page: change the results, not the page."""


# ---- squares ----------------------------------------------------------------------------------------------------------

CLOSE = {"cudnn": "cuDNN", "fa4": "FlashAttention-4"}
"""Peers that have a number in each cell of the squares."""


@dataclass(frozen=True)
class Squares:
    """A run of squares: 16,384 tokens of hidden size 2048, by head dim, mask and length; ``peers``: who was timed beside tilewise."""

    run: str
    peers: tuple[str, ...]

    def tflops(self, case: str, who: str, direction: str) -> float | None:
        """TFLOP/s of a contestant on a case."""
        found = load("h200-peers").rate([self.run], case, who, direction)
        return found and found[1]

    def over_cudnn(self, who: str, case: str, direction: str) -> float | None:
        """How many times as fast as cuDNN in the same rounds a contestant is on a case; None where one of them was not timed."""
        found = load("h200-peers").found.get((self.run, case, who, direction, "rate"), {})
        if mean := found.get("over_cudnn"):  # of several processes
            return mean
        mine, cudnn = (self.tflops(case, name, direction) for name in (who, "cudnn"))
        return mine and cudnn and mine / cudnn

    def over(self, peer: str, case: str, direction: str) -> float | None:
        """How many times as fast as a peer tilewise is on a case; None where one of them was not timed."""
        mine, other = (self.over_cudnn(who, case, direction) for who in ("tilewise", peer))
        return mine and other and mine / other

    def over_best(self, case: str, direction: str) -> float:
        """How many times as fast as its best peer tilewise is on a case."""
        return min(self.over(peer, case, direction) for peer in self.peers)

    def tables(self, rows: dict[str, tuple[str, str]]) -> list[list[str]]:
        """TFLOP/s of tilewise, and how many times as fast as each close peer it is."""
        speed = grid(rows, BY_LENGTH, lambda row, n: self.tflops(row[1] % n, "tilewise", row[0]))
        found = [titled("TFLOP/s of tilewise", speed)]
        for peer, name in CLOSE.items():
            ratio = grid(rows, BY_LENGTH, lambda row, n, peer=peer: self.over(peer, row[1] % n, row[0]), 2)
            found.append(titled(f"Times as fast as {name}", ratio))
        return found

    def behind(self) -> str:
        """A clause on the rows in which a peer is faster: how many, and the worst."""
        cells = [(title, *row, n) for (title, row), n in product(ROWS.items(), LENGTHS)]
        ratios = [(self.over_best(cases % n, d), f"{title}, N {n}") for title, d, cases, n in cells]
        behind = sorted(row for row in ratios if row[0] < LEVEL)
        worst = f"; tilewise then has at least {behind[0][0]:.2f} of its speed ({behind[0][1]})" if behind else ""
        return f"the best peer is faster in {len(behind)} of {len(ratios)} shapes{worst}"


def square(head_dim: int, seqlen: int | str, mask: str) -> str:
    """The name of a case of the squares."""
    return f"h200-d{head_dim}-n{seqlen}-{mask}"


# The pass of each row, and its cases but for the length.
ROWS = {f"{way}, D {d}, {mask}": (way, square(d, "%d", mask)) for way, d, mask in product(PASSES, DIMS, MASKS)}
GROUPED = {f"{way}, D 128, 16/4, {mask}": (way, f"h200-gqa4-d128-n%d-{mask}") for way, mask in product(PASSES, MASKS)}
PEERS = ("fa2", "cudnn", "fa4")
H200, H100 = Squares("h200-squares-peers", PEERS), Squares("074d739eee7e", PEERS)
BESIDE_FA3 = Squares("h200-squares", ("fa3",))
"""The run that timed FlashAttention-3, which has no wheel, beside tilewise of that day."""


def cases_of(dims: Iterable[int]) -> list[str]:
    """The squares of some head dims."""
    return [square(*case) for case in product(dims, LENGTHS, MASKS)]


def squares() -> list[str]:
    """Forward and backward beside cuDNN and the FlashAttentions, by head dim, mask and length; grouped queries below them."""
    found = load("h200-peers")
    text = (
        f"16,384 tokens of hidden size 2048, kernels alone, all contestants in the same rounds. Apart from grouped heads, {H200.behind()}. "
        f"{found.source(H200.run)} FA3 has no wheel: tilewise of {found.runs[BESIDE_FA3.run]['when']} was timed beside it; its backward "
        "was slower than today's."
    )
    plot = ["![TFLOP/s against the sequence length, forward and backward](img/h200-hopper.png)"]
    columns = {name: lambda *row, who=who: H200.over_cudnn(who, *row) for name, who in (("FA2", "fa2"), ("FA4", "fa4"))}
    columns |= {"tilewise": partial(H200.over_cudnn, "tilewise")}
    columns |= {"tilewise over its best peer": H200.over_best, "earlier, over FA3": BESIDE_FA3.over_best}
    by_dims = {f"D {d}": (d,) for d in DIMS} | {"all 36 rows": DIMS}
    rows = {f"{way}, {title}": (way, dims) for way, (title, dims) in product(PASSES, by_dims.items())}
    mean = lambda row, over: geometric_mean(over(case, row[0]) for case in cases_of(row[1]))  # noqa: E731
    means = grid(rows, columns, mean, 3, "geometric means over cuDNN")
    smaller = f"The same table on an H100: {H100.behind()}. {found.source(H100.run)}"
    return [
        *section("Forward and backward on an H200", "", plot, wrapped(text), means, *H200.tables(ROWS | GROUPED)),
        *section("Forward and backward on an H100", smaller, *H100.tables(ROWS)),
    ]


# ---- other calls on an H200 -------------------------------------------------------------------------------------------

WIDE, KEPT = "h200-wide-heads", "h200-kept-ds"


def wide() -> list[str]:
    """A head dim above 256 beside PyTorch's memory-efficient attention, the only one of its kernels that takes it; and the backward
    where v has other columns than q and k, beside cuDNN."""
    found = load("hopper-calls")
    cases = {(shape["mask"], shape["seqlen_q"]): name for name, shape in found.cases(WIDE).items()}
    peers = {OURS: "tilewise", "SDPA, memory-efficient": "efficient"}.items()
    rows = {f"{way}, {mask}, {name}": (way, mask, who) for way, mask, (name, who) in product(PASSES, MASKS, peers)}

    def speed(row: tuple[str, str, str], n: int) -> float:
        runs = (KEPT, WIDE) if row[0] == "backward" else (WIDE,)
        return found.rate(runs, cases[row[1], n], row[2], row[0])[1]

    peers = {OURS: "tilewise", "cuDNN": "cudnn"}.items()
    uneven = {
        f"backward, {mask}, {name}": (f"kept-d192v128-n%d-{mask}", who) for mask, (name, who) in product(MASKS, peers)
    }
    uneven_speed = lambda row, n: found.rate((KEPT,), row[0] % n, row[1], "backward")[1]  # noqa: E731
    return section(
        "Large and uneven head dims on an H200",
        f"PyTorch has only its memory-efficient kernels for head dims above 256. {found.source(KEPT)}",
        titled("TFLOP/s, D 512", grid(rows, BY_LENGTH, speed, 0)),
        titled("TFLOP/s, D 192 with a v of 128", grid(uneven, BY_LENGTH, uneven_speed, 0)),
    )


MASKED = ("h200-masks-peers", "h200-masks-table", "h200-masks")
"""The runs that the page shows, newer ones first: a contestant's figures are of the first run that timed it."""
PLANS = "h200-mask-plans-newest"
"""The run that timed tilewise's plans of the masks' cases."""


def masks() -> list[str]:
    """Masks and scores beside cudnn.flex_attention and compiled FlexAttention."""
    found = load("h200-peers")
    planned = {name: shape["what"] for name, shape in found.cases(MASKED[-1]).items()}
    rows: list[tuple[str, str]] = []
    for case in (case for case in tagged("masks") if not case.lengths):
        length = f"N {case.seqlen_q}" + (f", batch {case.batch}" if case.batch > 1 else "")
        rows.append((f"{planned[case.name]}, {length}, D {case.head_dim}, {case.heads_q}/{case.heads_k}", case.name))
        if "documents-causal" in case.name:
            rows.append(("… as a packed call", case.name.replace("documents-causal", "packed-causal")))
    plans = [(title, name) for title, name in rows if name in planned]

    def speed(direction: str, name: str, who: str) -> float | None:
        timed = found.rate(MASKED, name, who, direction)
        return timed and timed[1]

    def plan(name: str, who: str) -> float | None:
        return found.value(PLANS if who == "tilewise" else MASKED[-1], name, who, "forward", "plan")

    def behind(direction: str) -> int:
        rates = [[speed(direction, name, who) or 0 for who in columns.values()] for _, name in plans]
        return sum(mine < LEVEL * max(mine, *others) for mine, *others in rates)

    columns = {"tilewise": "tilewise", "its Triton": "triton", "cudnn.flex": "cudnn-flex", "FlexAttention": "flex"}
    text = (
        f"TFLOP/s of kept pairs. Another library is faster than tilewise in {behind('forward')} of {len(plans)} forwards and "
        f"{behind('backward')} backwards. A dash means that it cannot run the call. FlexAttention's softcap calls torch.tanh, which is "
        f"exact. FlexAttention's backward with ALiBi makes no gradient of the slopes. {found.source(MASKED[0])} An earlier run "
        f"timed this backward, FlexAttention's table and the peers' plans. tilewise's plans: `{today(found.runs[PLANS]['command'])}`."
    )
    planners = {title: who for title, who in columns.items() if who != "triton"}
    made = titled("Planning a new mask, ms", grid(plans, planners, plan, 2))
    return section("Masks and scores on an H200", text, *by_pass(rows, columns, speed), made)


FEW = "h200-few-key-heads"
FEW_CONTESTANTS = {
    OURS: "tilewise",
    "with a CTA for each key tile": "unshared",
    "its Triton": "triton",
    "cuDNN": "cudnn",
}


def few() -> list[str]:
    """Causal backwards with one key head, as each GPU of a tensor-parallel group may have."""
    found = load("hopper-calls")
    rows = {f"D {d}, {name}": (d, who) for d, (name, who) in product(DIMS, FEW_CONTESTANTS.items())}
    columns = {f"N {n}": f"few-d%d-b1-n{n}-8-1-causal" for n in (2048, 4096, 8192)}
    columns |= {"packed, 4 of 2048": "few-packed-d%d-8192-2048-8-1-causal"}
    speed = lambda row, case: found.value(FEW, case % row[0], row[1], "backward", "rate")  # noqa: E731
    text = (
        "TFLOP/s of causal backwards with 8 query heads on 1 key head. cuDNN gets a key head for each query head and need not add up their "
        f"gradients. {found.source(FEW)}"
    )
    return section("One key head on an H200", text, grid(rows, columns, speed))


TRIANGLES, BLOCKS = "fed02842c1d0", "5a1144035489"
"""The run that is shown, and that of the blocks since a bias is read in rows."""


def triangles() -> list[str]:
    """Triangle attention and its block."""
    found, run = load("triton-calls"), TRIANGLES
    alone, blocks = {}, {}
    for case, x in found.cases(run).items():
        if "-block-" in case:
            blocks[f"N {x['seqlen']}"] = case
        else:
            alone[f"N {x['seqlen']}, D {x['head_dim']}" + ", fp32" * (x["dtype"] == "float32")] = case
    both = {"tilewise": "tilewise", "cuEquivariance": "cuequivariance", "SDPA": "sdpa"}
    units = {"ms": "time", "MiB": "memory"}
    of_blocks = {
        f"{who}, {unit}": (name, units[unit])
        for unit, (who, name) in product(units, (both | {"eager": "eager"}).items())
    }
    block = grid(blocks, of_blocks, lambda case, of: found.value(run, case, of[0], "both", of[1]))
    rate = lambda d, case, who: found.value(run, case, who, d, "rate")  # noqa: E731
    later = " and ".join(f"{found.value(BLOCKS, case, 'tilewise', 'both', 'time'):.1f}" for case in blocks.values())
    text = (
        "TFLOP/s of N rows of N queries in 4 heads with one bias for all rows, and its gradient; bf16 unless a row says fp32. The block "
        f"has both nodes of AlphaFold 3, 128 channels in bf16 and a mask, forward and backward. {found.source(run)} Since then a bias "
        f"is read in rows: tilewise's blocks take {later} ms. {found.source(BLOCKS)} Today `tilewise bench --tag triangles` times the "
        "attention alone."
    )
    tables = by_pass(alone, both | {"FlexAttention": "flex"}, rate, 0)
    return section("Triangle attention on an H200", text, *tables, titled("A block", block))


def windows() -> list[str]:
    """Shifted windows of images, each case by its newest run."""
    found = load("triton-calls")
    run = found.run_of("python -m bench.windows")
    rows = {
        f"{x['windows']:,} windows of {x['seqlen']} pixels, {x['heads']} heads": case
        for case, x in found.cases(run).items()
    }
    peers = {"tilewise": "tilewise", "FlexAttention": "flex", "SDPA": "sdpa", "eager": "eager"}
    both = {who: (name, "both") for who, name in peers.items()}
    columns = {f"{who}, forward": (name, "forward") for who, name in peers.items()} | both
    text = (
        "Milliseconds in bf16 with heads of 32: a forward, then both passes. The bias of relative positions is trained, and the mask keeps "
        f"regions apart (Liu et al. 2021). {found.source(run, *{found.last(case) for case in rows.values()} - {run})}"
    )
    times = grid(rows, columns, lambda case, of: found.value(found.last(case), case, *of, "time"), 2)
    return section("Shifted windows of images on an H200", text, times)


def single_precision() -> list[str]:
    """Products of fp32 beside PyTorch's memory-efficient attention."""
    found, run = load("triton-calls"), "h200-triton-fp32"
    one, wide, padded, kept = (f"h200-fp32-{name}" for name in ("one-row", "chunks", "padded-terms", "kept-pairs"))
    rows, newer = {}, {case: again for again in (one, wide, padded, kept) for case in found.cases(again)}
    measured = {
        case: x
        for again in (run, wide, padded, kept)
        for case, x in found.cases(again).items()
        if x["mask"] in (None, "causal")
    }
    for case, shape in sorted(measured.items(), key=lambda x: (x[1]["head_dim"], x[0])):
        q, k = shape["seqlen_q"], shape["seqlen_k"]
        length = f"N {q}" if q == k else f"1 query, {k} keys"
        title = f"B {shape['batch']}, H {shape['heads']}, {length}, D {shape['head_dim']}, {shape['mask'] or 'full'}"
        rows |= {} if shape["tf32"] else {title: case}
    columns = {
        "tilewise": ("exact", "tilewise"),
        "SDPA": ("exact", "efficient"),
        "tilewise with tf32": ("tf32", "tilewise"),
    }

    def ms(d: str, case: str, to: tuple[str, str]) -> float | None:
        of = run if newer.get(case) == one and d == "backward" else newer.get(case, run)
        if to[0] == "tf32" and (measured[case]["head_dim"] > 128 or of == one):
            return None
        return found.value(run if to[0] == "tf32" else of, case.replace("exact", to[0]), to[1], d, "time")

    text = (
        "Milliseconds by the Triton backend; SDPA runs its memory-efficient kernels, whose errors are 1.8 to 3.3 times as large. "
        f"tf32 and the backward of one query: {found.source(run)} The rest is of 2026-11-29: the forward of one query is run `{one}`; it "
        f"has no product that tf32 could round. All others are of the newest run that has them: `{kept}`, `{padded}` or `{wide}`. "
        "Above D 128 tf32 is not used, and a backward keeps P and dS of some heads at a time, in a 64th of the GPU's memory at most."
    )
    return section("fp32 on an H200", text, *by_pass(rows, columns, ms, 2))


# ---- the host ---------------------------------------------------------------------------------------------------------


def host() -> list[str]:
    """The time that a call costs the host, by backend."""
    rows = {}
    for backend in ("hopper", "triton"):
        found = load(f"{backend}-calls")
        runs = [run for run in found.runs if "-host-" in run and run != NEW_LENGTHS]
        rows |= {f"{backend}, {case.removeprefix('host-')}": (found, runs, case) for case in found.cases(*runs)}
    columns = {
        "backend forward": ("backend", "forward"),
        "backend backward": ("backend", "backward"),
        "`tw.attention`": ("tilewise", "forward"),
        "with a graph for gradients": ("tilewise-grad", "forward"),
        "SDPA": ("sdpa", "forward"),
    }
    us = lambda row, to: spread(row[0].value(run, row[2], *to, "host") for run in row[1])  # noqa: E731
    text = (
        "Microseconds that a call costs the host of an H200, as a range over processes. A call has 2 heads of 64 queries, and the same "
        f"shape each time. {found.source(*runs)}"
    )
    return section("Host time", text, grid(rows, columns, us))


NEW_LENGTHS = "h200-host-of-new-lengths"


def new_lengths() -> list[str]:
    """The time that a call costs the host where its lengths are new."""
    found = load("hopper-calls")
    names = [case.removeprefix("new-lengths-") for case in found.cases(NEW_LENGTHS) if case.startswith("new-")]
    columns = {
        "new lengths": ("new", "tilewise"),
        "a known length": ("known", "tilewise"),
        "SDPA, new lengths": ("new", "sdpa"),
        "SDPA, a known length": ("known", "sdpa"),
    }

    def us(name: str, of: tuple[str, str]) -> float | None:
        direction = "both" if name.startswith("training") else "forward"
        return found.value(NEW_LENGTHS, f"{of[0]}-lengths-{name}", of[1], direction, "host")

    text = (
        "The same where every call has other lengths, or a new mask: medians in microseconds, with an idle GPU. SDPA takes cuDNN here, "
        "which builds a plan for each new length. Times differ between hosts by up to a factor of two, for both alike. "
        f"{found.source(NEW_LENGTHS)}"
    )
    rows = {re.sub("[-_]", " ", name): name for name in names}
    return section("Host time of new lengths", text, grid(rows, columns, us, 0))


# ---- CPU --------------------------------------------------------------------------------------------------------------

CPU_KINDS = [*product(("fp32", "bf16"), (64, 128))]
CPU_SHAPES = {f"N {n}, {mask}": f"n{n}-{mask}" for n, mask in product((2048, 8192), MASKS)}
CPU_SHAPES |= {f"N {n}, batch 16": f"n{n}-b16" for n in (128, 256)}
AMX = "xeon-amx-2"


def over_sdpa(dtype: str, head_dim: int, direction: str, shape: str) -> float | None:
    """How many times as fast as SDPA the CPU backend is; None where it was not timed."""
    if dtype == "AMX":  # in bf16
        length, mask = shape.split("-")
        case = f"amx-t16-b1-h8-{length}-d{head_dim}-{mask}"
        times = [load("cpu-calls").value(AMX, case, who, direction, "time") for who in ("sdpa", "amxbf16")]
    else:
        times = load("cpu-goals").newest(f"cpu-{dtype}-d{head_dim}-{shape}", ("sdpa", "cpu"), direction)
    return times[0] / times[1] if times and None not in times else None


def cpu() -> list[str]:
    """The CPU backend beside PyTorch's SDPA, and beside the machine's limits."""
    found = load("cpu-goals")
    columns = {f"{dtype}, D {d}": (dtype, d) for dtype, d in (*CPU_KINDS, ("AMX", 64), ("AMX", 128))}
    tables = by_pass(CPU_SHAPES, columns, lambda d, shape, kind: over_sdpa(*kind, d, shape), 2)
    runs = [run for run, record in found.runs.items() if "sdpa" in record["peers"]]
    text = (
        "How many times as fast as PyTorch's SDPA the CPU backend is, with 8 heads. The last two columns are bf16 with AMX, which SDPA "
        f"uses too. {found.source(*runs)} AMX: {load('cpu-calls').source(AMX)} {sparse_on_cpu()} "
        f"Decoding reads K and V at {decode_on_cpu('-b')} of a plain sum's pace from memory, at {decode_on_cpu('k')} from L3."
    )
    plot = ["![Ratio to SDPA by case, forward and backward](img/cpu-goals.png)"]
    return section("CPU", "", plot, wrapped(text), *tables)


def decode_on_cpu(end: str) -> str:
    """The range of decoding's pace over that of reading K and V, of the cases whose names end so but for digits."""
    found = load("cpu-goals")
    cases = [case for case in found.cases(*found.runs) if "-decode-" in case]
    times = [found.newest(x, ("read", "cpu"), "forward") for x in cases if x.rstrip("0123456789").endswith(end)]
    return spread((read_ms / mine for read_ms, mine in times), 2)


@cache
def kept_share(case: str) -> float:
    """The share of the blocks that a case's pattern keeps."""
    found = named(case)
    (pattern,) = kinds.MASKS[found.mask].leaves(found, torch.zeros).values()
    return pattern.float().mean().item()


def sparse_on_cpu() -> str:
    """A sentence: what a window and a block pattern save of the full attention."""
    found, gains, kept = load("cpu-goals"), [], kept_share("cpu-fp32-d64-n16384-sparse90")
    for name in ("window512", "sparse90"):
        cases = [f"cpu-fp32-d64-n16384-{shape}" for shape in ("full", name)]
        run = next(run for run in found.runs if cases[1] in found.cases(run))
        full, mine = ([found.value(run, case, "cpu", d, "time") for d in PASSES] for case in cases)
        gains.append(pair((a / b for a, b in zip(full, mine, strict=True)), 1))
    return (
        f"A window of 512 is {gains[0]} times as fast as full attention in fp32 at N 16384, and a pattern of {100 * kept:.1f} % of the "
        f"blocks {gains[1]} times (forward / backward, {machine(found.runs[run])})."
    )


# ---- training ---------------------------------------------------------------------------------------------------------


def training() -> list[str]:
    """A training step of a small GPT, on an H200 and on a CPU."""
    gpu, on_cpu, steps = load("hopper-calls"), load("cpu-calls"), quotations.STEPS
    rows = {}
    for case, shape in gpu.cases(steps).items():
        if case.startswith("gpt-step"):
            title = f"H200, context {shape['context']} × {shape['batch']} rows"
            rows[title] = (gpu, steps, case, ("hopper", "triton", "sdpa"), 1)
    runs = [run for run, record in on_cpu.runs.items() if run.startswith("train-step") and record["pool"] == "torch"]
    for run in runs:
        threads = on_cpu.runs[run]["threads"]
        title = f"CPU, context 1024 × 4 rows, {threads} thread{'s'[: threads > 1]}"
        rows[title] = (on_cpu, run, "gpt-step-cpu", ("tilewise", "triton", "sdpa"), None)

    def ms(row: tuple, n: int) -> str:
        found, run, case, who, digits = row
        return number(found.value(run, case, who[n], "step", "time"), digits)

    text = (
        "Milliseconds of one step of a small GPT: forward, backward and AdamW. [training.md](training.md) shows the losses. "
        f"{gpu.source(steps)} {on_cpu.source(*runs)}"
    )
    return section("A training step", text, grid(rows, {"tilewise": 0, "its Triton": 1, "SDPA": 2}, ms))


# ---- the pages --------------------------------------------------------------------------------------------------------


def page() -> str:
    """The whole of docs/performance.md."""
    parts = (squares, wide, masks, few, triangles, windows, single_precision, cpu, host, new_lengths, training)
    return "\n".join([HEAD.format(summary=summary()), *[line for part in parts for line in part()], ""])


def summary() -> str:
    """A table of the speed beside cuDNN, the FlashAttentions and SDPA, which other pages quote."""
    every, kinds_and_shapes = cases_of(DIMS), [*product(CPU_KINDS, CPU_SHAPES.values())]
    rows = {
        "cuDNN, on an H200 (bf16, 36 shapes)": lambda d: [H200.over_cudnn("tilewise", case, d) for case in every],
        "the best of cuDNN, FlashAttention-2 and 4 there": lambda d: [H200.over_best(case, d) for case in every],
        "PyTorch's SDPA, on two CPU cores (fp32, bf16)": lambda d: [over_sdpa(*x, d, y) for x, y in kinds_and_shapes],
    }
    bounds = {"": lambda x: f"**{geometric_mean(x):.2f}**", "least": min, "most": max}
    columns = [(title or d, (d, bound)) for d, (title, bound) in product(PASSES, bounds.items())]
    cell = lambda ratios, of: of[1]([x for x in ratios(of[0]) if x])  # noqa: E731
    return "\n".join(grid(rows, columns, cell, 2, "how many times as fast as"))


def doors() -> str:
    """The times of other packages' calls by themselves and through our doors."""
    return "\n\n".join("\n".join(doors_of(*of)) for of in (("cpu-calls", None), ("hopper-calls", 2)))


def doors_of(name: str, digits: int | None) -> list[str]:
    """The newest run of a file of results, as a table."""
    found = load(name)
    run = found.run_of("python -m bench.calls doors")
    titles = {"forward": "forward", "both": "forward and backward"}
    contestants = {"{}, by itself": "own", "tilewise": "door"}
    columns = [(title.format(way), (who, d)) for (d, way), (title, who) in product(titles.items(), contestants.items())]
    ms = lambda case, of: found.value(run, case, *of, "time")  # noqa: E731
    lines = grid({case: case for case in found.cases(run)}, columns, ms, digits, "ms")
    shape = next(iter(found.cases(run).values()))
    said = "Batch {batch}, {heads_q} heads of {head_dim}, N {seqlen:,}, {dtype}. ".format(**shape)
    return [*lines, "", *wrapped(said + found.source(run))]


QUOTED = {"speed": summary, "times": doors} | quotations.QUOTED
"""What stands between the marks of a name, as the results have it now."""
QUOTING = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("switching", "derivatives", "huggingface"))]
"""Pages with such marks."""


def quoted(text: str) -> str:
    """The text of a page with its quotations as the results have them now."""
    marked = rf"(?s)(<!-- ({'|'.join(QUOTED)}) -->\n).*?(<!-- /\2 -->)"
    return re.sub(marked, lambda found: f"{found[1]}{QUOTED[found[2]]()}\n{found[3]}", text)


def main(arguments: list[str] | None = None) -> int:
    """Prints docs/performance.md, or writes all pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the pages instead of printing the first one")
    if not parser.parse_args(arguments).write:
        sys.stdout.write(page())
        return 0
    from bench import catalogue, plots  # which need what a page of text does not

    written = {PAGE: page()} | {path: quoted(path.read_text(encoding="utf-8")) for path in QUOTING}
    for path, text in (written | catalogue.files(PAGE.parent)).items():
        path.write_text(text, encoding="utf-8")
    for name, draw in plots.PICTURES.items():
        draw().savefig(PAGE.parent / "img" / f"{name}.png", dpi=200)
    return 0


if __name__ == "__main__":
    sys.exit(main())
