"""Writes what bench/results say into the pages: ``python -m bench.page --write``.

The pages are docs/performance.md, its quotations, and the tables of docs/derivatives.md and docs/huggingface.md. tests/bench/test_page.py
holds them equal to the results.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch

from bench import derivative_tables, huggingface, kinds
from bench.cases import named, tagged
from bench.measure import ROOT
from bench.tables import NONE, geometric_mean, load, machine, number, pair, section, spread, table, wrapped

PAGE = ROOT / "docs" / "performance.md"
MASKED = ("3fa2ac8f2096", "414b1e11fcdd", "0ba04c12f0ce", "7fba6e754366", "7b0bacc6b5f6", "h200-masks")
FP32, WIDE, STEPS, AMX = "h200-triton-fp32", "h200-wide-heads", huggingface.STEPS, "xeon-amx-2"
KEPT = "h200-kept-ds"
UNEVEN = "tilewise", "cudnn"
"""The runs that the page shows, newer ones first: a contestant's figures are of the first run that timed it."""
PLANS = "d00fd2bb934f"
"""The run that timed tilewise's plans of the masks' cases."""
DIMS = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PASSES = ("forward", "backward")
CLOSE = ("cudnn", "fa4")
"""Peers that have a number in each cell of the squares."""
MASKS = ("full", "causal")
MASK_PEERS = ("tilewise", "triton", "cudnn-flex", "flex")
LEVEL = 0.995  # of a peer's speed: below it a contestant counts as behind
INTRO = "This page shows how fast tilewise is beside other libraries, from `bench/results`. These commands measure a case on your machine:"
COMMAND = ["```", "tilewise bench --list          # the cases", "tilewise bench --case NAME", "```"]
TERMS = [
    "- N is the sequence length, D the head dim. *16/4* means 16 query heads on 4 key heads.",
    "- Inputs are bf16 unless a table says otherwise.",
    "- A causal mask counts half of the operations, other masks count the pairs that they keep. A backward counts 2.5 times its forward.",
    "- A contestant with a wrong result is not timed.",
    "- [decisions.md](decisions.md) says why the kernels are as they are, [tried.md](tried.md) what lost.",
    "- `python -m bench.page --write` writes this page: change the results, not the page.",
]


# ---- H200 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Squares:
    """A table of squares: 16,384 tokens of hidden size 2048, by head dim, mask and length.

    Attributes:
        file: of bench/results. run: the one that the table shows. peers: who is compared.
    """

    file: str
    run: str
    peers: tuple[str, ...]

    def tflops(self, case: str, who: str, direction: str) -> float | None:
        """TFLOP/s of a contestant on a case."""
        found = load(self.file).rate([self.run], case, who, direction)
        return found and found[1]

    def over_cudnn(self, who: str, case: str, direction: str) -> float:
        """How many times as fast as cuDNN in the same rounds a contestant is on a case."""
        results = load(self.file)
        mean = results.found.get((self.run, case, who, direction, "rate"), {}).get("over_cudnn")  # of several processes
        if mean:
            return mean
        run, rate = results.rate([self.run], case, who, direction)
        return rate / results.rate([run], case, "cudnn", direction)[1]

    def over(self, peer: str, case: str, direction: str) -> float:
        """How many times as fast as a peer tilewise is on a case."""
        return self.over_cudnn("tilewise", case, direction) / self.over_cudnn(peer, case, direction)

    def over_best(self, case: str, direction: str) -> float:
        """How many times as fast as its best peer tilewise is on a case."""
        return min(self.over(peer, case, direction) for peer in self.peers)

    def rows(self) -> list[tuple[str, str, list[str]]]:
        """The title, the pass and the cases of each row."""
        return [
            (f"{direction}, D {d}, {mask}", direction, [square(d, n, mask) for n in LENGTHS])
            for direction in PASSES
            for d in DIMS
            for mask in MASKS
        ]

    def tables(self, rows: list[tuple[str, str, list[str]]]) -> list[list[str]]:
        """TFLOP/s of tilewise, and how many times as fast as each close peer it is, each under a heading."""

        def filled(title: str, cell: Callable[[str, str], float | None], digits: int | None) -> list[str]:
            cells = [[name, *(number(cell(case, d), digits) for case in cases)] for name, d, cases in rows]
            return [f"**{title}**", "", *table(["", *[f"N {n}" for n in LENGTHS]], cells)]

        found = [filled("TFLOP/s of tilewise", lambda case, d: self.tflops(case, "tilewise", d), None)]
        for peer, name in zip(CLOSE, ("cuDNN", "FlashAttention-4"), strict=True):
            found.append(filled(f"Times as fast as {name}", partial(self.over_if_timed, peer), 2))
        return found

    def over_if_timed(self, peer: str, case: str, direction: str) -> float | None:
        """How many times as fast as a peer tilewise is on a case; None where one of them was not timed."""
        timed = [self.tflops(case, who, direction) is not None for who in ("tilewise", peer)]
        return self.over(peer, case, direction) if all(timed) else None

    def behind(self) -> str:
        """A clause on the rows in which a peer is faster: how many, and the worst."""
        ratios = [
            (self.over_best(case, direction), f"{title}, N {n}")
            for title, direction, cases in self.rows()
            for n, case in zip(LENGTHS, cases, strict=True)
        ]
        behind = sorted(row for row in ratios if row[0] < LEVEL)
        worst = f"; tilewise then has at least {behind[0][0]:.2f} of its speed ({behind[0][1]})" if behind else ""
        return f"the best peer is faster in {len(behind)} of {len(ratios)} shapes{worst}"

    def means(self, contestants: tuple[str, ...]) -> list[list[str]]:
        """Geometric means over cuDNN, over the best peer and over FlashAttention-3, by pass and head dim."""
        rows = []
        for direction in PASSES:
            for title, dims in [*[(f"D {d}", (d,)) for d in DIMS], ("all 36 rows", DIMS)]:
                cases = [square(d, n, mask) for d in dims for n in LENGTHS for mask in MASKS]
                means = [geometric_mean(self.over_cudnn(who, case, direction) for case in cases) for who in contestants]
                means += [
                    geometric_mean(squares.over_best(case, direction) for case in cases)
                    for squares in (self, BESIDE_FA3)
                ]
                rows.append([f"{direction}, {title}", *[f"{mean:.3f}" for mean in means]])
        return rows


def square(head_dim: int, seqlen: int, mask: str) -> str:
    """The name of a case of the squares."""
    return f"h200-d{head_dim}-n{seqlen}-{mask}"


PEERS = ("fa2", "cudnn", "fa4")
H200 = Squares("h200-peers", "cae6dfec7fa7", PEERS)
H100 = Squares("h200-peers", "074d739eee7e", PEERS)
BESIDE_FA3 = Squares("h200-peers", "h200-squares", ("fa3",))
"""The run that timed FlashAttention-3, which has no wheel, beside tilewise of that day."""


def wide() -> list[list[str]]:
    """Two tables: a head dim above 256 beside PyTorch's memory-efficient attention, the only one of its kernels that takes it; and the
    backward where v has other columns than q and k, beside cuDNN."""
    found = load("hopper-calls")
    cases = {(shape["mask"], shape["seqlen_q"]): name for name, shape in found.cases(WIDE).items()}
    rows = []
    for direction in PASSES:
        runs = (KEPT, WIDE) if direction == "backward" else (WIDE,)
        for mask in MASKS:
            for who, name in (("tilewise", "**tilewise**"), ("efficient", "SDPA, memory-efficient")):
                speeds = [found.rate(runs, cases[mask, n], who, direction)[1] for n in LENGTHS]
                rows.append([f"{direction}, {mask}, {name}", *[number(speed, 0) for speed in speeds]])
    uneven = []
    for mask in MASKS:
        for who, name in zip(UNEVEN, ("**tilewise**", "cuDNN"), strict=True):
            speeds = [found.rate((KEPT,), f"kept-d192v128-n{n}-{mask}", who, "backward")[1] for n in LENGTHS]
            uneven.append([f"backward, {mask}, {name}", *[number(speed, 0) for speed in speeds]])
    lengths = [f"N {n}" for n in LENGTHS]
    return [
        ["**TFLOP/s, D 512**", "", *table(["", *lengths], rows)],
        ["**TFLOP/s, D 192 with a v of 128**", "", *table(["", *lengths], uneven)],
    ]


def squares() -> list[str]:
    """Forward and backward beside cuDNN and the FlashAttentions, by head dim, mask and length; grouped queries below them."""
    rows = H200.rows()
    for direction in PASSES:
        for mask in MASKS:
            cases = [f"h200-gqa4-d128-n{n}-{mask}" for n in LENGTHS]
            rows.append((f"{direction}, D 128, 16/4, {mask}", direction, cases))
    text = (
        f"16,384 tokens of hidden size 2048, kernels alone, all contestants in the same rounds. Apart from grouped heads, {H200.behind()}. "
        f"{load(H200.file).source(H200.run)} FA3 has no wheel: tilewise of "
        f"{load(H200.file).runs[BESIDE_FA3.run]['when']} was timed beside it; its backward was slower than today's."
    )
    plot = ["![TFLOP/s against the sequence length, forward and backward](img/h200-hopper.png)"]
    who = ("fa2", "fa4", "tilewise")
    header = [
        "geometric means over cuDNN",
        "FA2",
        "FA4",
        "tilewise",
        "tilewise over its best peer",
        "earlier, over FA3",
    ]
    first = section(
        "Forward and backward on an H200", "", plot, wrapped(text), table(header, H200.means(who)), *H200.tables(rows)
    )
    smaller = f"The same table on an H100: {H100.behind()}. {load(H100.file).source(H100.run)}"
    above = (
        f"PyTorch has only its memory-efficient kernels for head dims above 256. {load('hopper-calls').source(KEPT)}"
    )
    return [
        *first,
        *section("Forward and backward on an H100", smaller, *H100.tables(H100.rows())),
        *section("Large and uneven head dims on an H200", above, *wide()),
    ]


def mask_rate(cases: Iterable[str], who: str, direction: str) -> float | None:
    """The newest TFLOP/s of a contestant under a mask of the table, by any of its names."""
    found = load("h200-peers")
    timed = (found.rate(MASKED, case, who, direction) for case in cases)
    return next((speed for _, speed in filter(None, timed)), None)


def masks() -> list[str]:
    """Masks and scores beside cudnn.flex_attention and compiled FlexAttention."""
    found, behind = load("h200-peers"), dict.fromkeys(PASSES, 0)
    rows: dict[str, list[list[str]]] = {direction: [] for direction in PASSES}
    plans, earlier = [], found.cases(MASKED[-1])
    for case in (case for case in tagged("masks") if not case.lengths):
        before = case.name if case.name in earlier else case.name.removesuffix(f"-n{case.seqlen_q}")
        length = f"N {case.seqlen_q}" + (f", batch {case.batch}" if case.batch > 1 else "")
        title = f"{earlier[before]['what']}, {length}, D {case.head_dim}, {case.heads_q}/{case.heads_k}"
        packed = case.name.replace("documents-causal", "packed-causal")
        for direction in PASSES:
            rates = [mask_rate((case.name, before), who, direction) for who in MASK_PEERS]
            behind[direction] += rates[0] < LEVEL * max(rate or 0 for rate in rates)
            rows[direction].append([title, *map(number, rates)])
            if packed != case.name:
                own = [mask_rate([packed], who, direction) for who in MASK_PEERS]
                rows[direction].append(["… as a packed call", *map(number, own)])
        made = [found.value(MASKED[-1], before, who, "forward", "plan") for who in ("tilewise", "cudnn-flex", "flex")]
        anew = found.value(PLANS, case.name, "tilewise", "forward", "plan")
        plans.append([title, *[number(ms, 2) for ms in (made[0] if anew is None else anew, *made[1:])]])
    text = (
        f"TFLOP/s of kept pairs. Another library is faster than tilewise in {behind['forward']} of {len(plans)} forwards and "
        f"{behind['backward']} backwards. A dash means that it cannot run the call. {found.source(MASKED[3])} FlexAttention and the peers' "
        f"plans are from an earlier run, ALiBi and the table from later ones; tilewise's plans: `{found.runs[PLANS]['command']}`."
    )
    header = ["tilewise", "its Triton", "cudnn.flex", "FlexAttention"]
    tables = [[f"**{direction.capitalize()}**", "", *table(["", *header], rows[direction])] for direction in PASSES]
    plan = ["**Planning a new mask, ms**", "", *table(["", "tilewise", "cudnn.flex", "FlexAttention"], plans)]
    return section("Masks and scores on an H200", text, *tables, plan)


def few() -> list[str]:
    """Causal backwards with one key head, as each GPU of a tensor-parallel group may have."""
    found, rows = load("hopper-calls"), []
    for d in DIMS:
        cases = [*(f"few-d{d}-b1-n{n}-8-1-causal" for n in FEW_LENGTHS), f"few-packed-d{d}-8192-2048-8-1-causal"]
        for who, name in FEW_CONTESTANTS.items():
            cells = [number(found.value(FEW, case, who, "backward", "rate")) for case in cases]
            rows.append([f"D {d}, {name}", *cells])
    text = (
        "TFLOP/s of causal backwards with 8 query heads on 1 key head. cuDNN gets a key head for each query head and need not add up their "
        f"gradients. {found.source(FEW)}"
    )
    header = ["", *(f"N {n}" for n in FEW_LENGTHS), "packed, 4 of 2048"]
    return section("One key head on an H200", text, table(header, rows))


FEW, FEW_LENGTHS = "h200-few-key-heads", (2048, 4096, 8192)
FEW_CONTESTANTS = {
    "tilewise": "**tilewise**",
    "unshared": "with a CTA for each key tile",
    "triton": "its Triton",
    "cudnn": "cuDNN",
}


def single_precision() -> list[str]:
    """Products of fp32 beside PyTorch's memory-efficient attention."""
    found, run = load("triton-calls"), FP32
    rows: dict[str, list[list[str]]] = {direction: [] for direction in PASSES}
    for case, shape in found.cases(run).items():
        if shape["tf32"]:
            continue
        length = (
            f"N {shape['seqlen_q']}" if shape["seqlen_q"] == shape["seqlen_k"] else f"1 query, {shape['seqlen_k']} keys"
        )
        title = f"B {shape['batch']}, H {shape['heads']}, {length}, D {shape['head_dim']}, {shape['mask'] or 'full'}"
        timed = (case, "tilewise"), (case, "efficient"), (case.replace("exact", "tf32"), "tilewise")
        for direction in PASSES:
            times = [found.value(run, name, who, direction, "time") for name, who in timed]
            rows[direction].append([title, *[number(ms, 2) for ms in times]])
    text = (
        "Milliseconds by the Triton backend; SDPA runs its memory-efficient kernels. PyTorch is ahead above D 128, where tilewise's three "
        f"bf16 terms for a number do not fit the registers. {found.source(run)}"
    )
    header = ["", "tilewise", "SDPA", "tilewise with tf32"]
    tables = [[f"**{direction.capitalize()}**", "", *table(header, rows[direction])] for direction in PASSES]
    return section("fp32 on an H200", text, *tables)


def host() -> list[str]:
    """The time that a call costs the host, by backend."""
    rows = []
    for backend, file in (("hopper", "hopper-calls"), ("triton", "triton-calls")):
        found = load(file)
        runs = [run for run in found.runs if "-host-" in run]
        for case in found.cases(*runs):
            cells = []
            for who, direction in HOST:
                cells.append(spread(found.value(run, case, who, direction, "host") for run in runs))
            rows.append([f"{backend}, {case.removeprefix('host-')}", *cells])
    text = (
        "Microseconds that a call costs the host of an H200, as a range over processes. A call has 2 heads of 64 queries, and the same "
        f"shape each time. {found.source(*runs)}"
    )
    header = ["", "backend forward", "backend backward", "`tw.attention`", "with a graph for gradients", "SDPA"]
    return section("Host time", text, table(header, rows)) + new_lengths()


def new_lengths() -> list[str]:
    """The time that a call costs the host where its lengths are new."""
    found, (now, before) = load("hopper-calls"), NEW_LENGTHS
    names = [case.removeprefix("new-lengths-") for case in found.cases(now) if case.startswith("new-")]
    rows = []
    for name in names:
        direction = "both" if name == "training" else "forward"
        columns = (
            (before, "new", "tilewise"),
            (now, "new", "tilewise"),
            (before, "known", "tilewise"),
            (now, "known", "tilewise"),
            (now, "known", "sdpa"),
        )
        times = [found.value(run, f"{what}-lengths-{name}", who, direction, "host") for run, what, who in columns]
        rows.append([name.replace("-", " ").replace("_", " "), *[number(us, 0) for us in times]])
    text = (
        "The same where every call has other lengths, or a new mask: medians in microseconds, with an idle GPU. *Before* is the "
        "commit before known calls were found by their words and sizes, on another host. A time differs between runs by up to a "
        f"fifth, and by up to a factor of two for training and *before*. {found.source(now)}"
    )
    header = [
        "",
        "new lengths, before",
        "new lengths",
        "a known length, before",
        "a known length",
        "SDPA, a known length",
    ]
    return section("Host time of new lengths", text, table(header, rows))


NEW_LENGTHS = ("h200-seen-keys", "h200-new-lengths-before")


HOST = (
    ("backend", "forward"),
    ("backend", "backward"),
    ("tilewise", "forward"),
    ("tilewise-grad", "forward"),
    ("sdpa", "forward"),
)
"""Columns of the host's table: contestant and pass."""


# ---- CPU --------------------------------------------------------------------------------------------------------------


CPU_KINDS = [(dtype, d) for dtype in ("fp32", "bf16") for d in (64, 128)]
CPU_SHAPES = (*[f"n{n}-{mask}" for n in (2048, 8192) for mask in MASKS], "n128-b16", "n256-b16")


def over_sdpa(dtype: str, head_dim: int, shape: str) -> list[float | None]:
    """How many times as fast as SDPA the CPU backend is, forward and backward; None where it was not timed."""
    times = [
        load("cpu-goals").newest(f"cpu-{dtype}-d{head_dim}-{shape}", ("sdpa", "cpu"), direction) for direction in PASSES
    ]
    return [each[0] / each[1] if each else None for each in times]


def over_sdpa_by_amx(head_dim: int, shape: str) -> list[float | None]:
    """How many times as fast as SDPA the CPU backend is with AMX, in bf16; None where it was not timed."""
    length, mask = shape.split("-")
    case = f"amx-t16-b1-h8-{length}-d{head_dim}-{mask}"
    times = [[load("cpu-calls").value(AMX, case, who, d, "time") for who in ("sdpa", "amxbf16")] for d in PASSES]
    return [None if None in each else each[0] / each[1] for each in times]


def cpu() -> list[str]:
    """The CPU backend beside PyTorch's SDPA, and beside the machine's limits."""
    found = load("cpu-goals")
    rows: list[list[list[str]]] = [[], []]
    for shape in CPU_SHAPES:
        ratios = [over_sdpa(*kind, shape) for kind in CPU_KINDS] + [over_sdpa_by_amx(d, shape) for d in (64, 128)]
        for n in range(2):
            rows[n].append([shape_title(shape), *[number(each[n], 2) for each in ratios]])
    runs = [run for run, record in found.runs.items() if "sdpa" in record["peers"]]
    text = (
        "How many times as fast as PyTorch's SDPA the CPU backend is, with 8 heads. The last two columns are bf16 with AMX, which SDPA "
        f"uses too. {found.source(*runs)} AMX: {load('cpu-calls').source(AMX)} {sparse_on_cpu()} "
        f"Decoding reads K and V at {decode_on_cpu('-b')} of a plain sum's pace from memory, at {decode_on_cpu('k')} from L3."
    )
    header = ["", *[f"{dtype}, D {d}" for dtype, d in CPU_KINDS], "AMX, D 64", "AMX, D 128"]
    plot = ["![Ratio to SDPA by case, forward and backward](img/cpu-goals.png)"]
    tables = [[f"**{d.capitalize()}**", "", *table(header, found)] for d, found in zip(PASSES, rows, strict=True)]
    return section("CPU", "", plot, wrapped(text), *tables)


def shape_title(shape: str) -> str:
    """The title of a CPU shape's row: n2048-full is N 2048, full."""
    length, rest = shape.split("-")
    return f"N {length[1:]}, {rest.replace('b16', 'batch 16')}"


def decode_on_cpu(end: str) -> str:
    """The range of decoding's pace over that of reading K and V, of the cases whose names end so but for digits."""
    found = load("cpu-goals")
    cases = [
        case for case in found.cases(*found.runs) if "-decode-" in case and case.rstrip("0123456789").endswith(end)
    ]
    times = [found.newest(case, ("read", "cpu"), "forward") for case in cases]
    shares = sorted(read_ms / mine for read_ms, mine in times)
    return f"{shares[0]:.2f} to {shares[-1]:.2f}"


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


# ---- Training ---------------------------------------------------------------------------------------------------------


def training() -> list[str]:
    """A training step of a small GPT, on an H200 and on a CPU."""
    gpu, on_cpu, rows = load("hopper-calls"), load("cpu-calls"), []
    for case, shape in gpu.cases(STEPS).items():
        if case.startswith("gpt-step"):
            ms = [gpu.value(STEPS, case, who, "step", "time") for who in ("hopper", "triton", "sdpa")]
            rows.append([f"H200, context {shape['context']} × {shape['batch']} rows", *[number(x, 1) for x in ms]])
    runs = [run for run, record in on_cpu.runs.items() if run.startswith("train-step") and record["pool"] == "torch"]
    for run in runs:
        ms = [on_cpu.value(run, "gpt-step-cpu", who, "step", "time") for who in ("tilewise", "sdpa")]
        threads = on_cpu.runs[run]["threads"]
        rows.append(
            [f"CPU, context 1024 × 4 rows, {threads} thread{'s'[: threads > 1]}", number(ms[0]), NONE, number(ms[1])]
        )
    text = (
        "Milliseconds of one step of a small GPT: forward, backward and AdamW. [training.md](training.md) shows the losses. "
        f"{gpu.source(STEPS)} {on_cpu.source(*runs)}"
    )
    return section("A training step", text, table(["", "tilewise", "its Triton", "SDPA"], rows))


# ---- The pages --------------------------------------------------------------------------------------------------------


def page() -> str:
    """The whole of docs/performance.md."""
    parts = (squares, masks, few, single_precision, cpu, host, training)
    head = ["# Performance", "", *wrapped(INTRO), "", *COMMAND, "", summary(), "", *TERMS]
    return "\n".join([*head, *[line for part in parts for line in part()], ""])


def summary() -> str:
    """A table of the speed beside cuDNN, the FlashAttentions and SDPA, which other pages quote."""
    beside_cudnn, beside_best = [], []
    for direction in PASSES:
        cases = [square(d, n, mask) for d in DIMS for n in LENGTHS for mask in MASKS]
        beside_cudnn += mean_and_bounds([H200.over_cudnn("tilewise", case, direction) for case in cases])
        beside_best += mean_and_bounds([H200.over_best(case, direction) for case in cases])
    pairs = [over_sdpa(*kind, shape) for kind in CPU_KINDS for shape in CPU_SHAPES]
    on_cpu = [cell for n in range(2) for cell in mean_and_bounds([each[n] for each in pairs if each[n]])]
    rows = [
        ["cuDNN, on an H200 (bf16, 36 shapes)", *beside_cudnn],
        ["the best of cuDNN, FlashAttention-2 and 4 there", *beside_best],
        ["PyTorch's SDPA, on two CPU cores (fp32, bf16)", *on_cpu],
    ]
    header = ["how many times as fast as", *(cell for direction in PASSES for cell in (direction, "least", "most"))]
    return "\n".join(table(header, rows))


def mean_and_bounds(ratios: list[float]) -> list[str]:
    """Return the geometric mean, the least and the largest of ratios, as text."""
    return [f"**{geometric_mean(ratios):.2f}**", f"{min(ratios):.2f}", f"{max(ratios):.2f}"]


def quoted(text: str) -> str:
    """The text of a page with its quotations of :func:`summary` and :func:`doors` as the results have them now."""
    made = {"speed": summary, "times": doors}
    marked = r"(?s)(<!-- (speed|times) -->\n).*?(<!-- /\2 -->)"
    return re.sub(marked, lambda found: f"{found[1]}{made[found[2]]()}\n{found[3]}", text)


def doors() -> str:
    """The times of other packages' calls by themselves and through our doors, which docs/switching.md quotes."""
    found = load("cpu-calls")
    run = [name for name, r in found.runs.items() if r["command"] == "python -m bench.doors"][-1]
    cells = [(who, direction) for direction in ("forward", "both") for who in ("own", "door")]
    rows = [[case, *[number(found.value(run, case, *cell, "time")) for cell in cells]] for case in found.cases(run)]
    header = ["ms", "forward, by itself", "tilewise", "forward and backward, by itself", "tilewise"]
    return "\n".join(
        [*table(header, rows), "", *wrapped(f"Batch 2, 8 heads of 64, N 1,024, fp32. {found.source(run)}")]
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints docs/performance.md, or writes all pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the pages instead of printing the first one")
    if not parser.parse_args(arguments).write:
        sys.stdout.write(page())
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    for path, renewed in QUOTING.items():
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


QUOTING = {
    ROOT / "README.md": quoted,
    ROOT / "docs" / "switching.md": quoted,
    ROOT / "docs" / "derivatives.md": derivative_tables.quoted,
    ROOT / "docs" / "huggingface.md": huggingface.quoted,
}
"""Pages with tables of results between marks, and what makes a page's text that of the results."""


if __name__ == "__main__":
    sys.exit(main())
