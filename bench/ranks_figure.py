"""The share of one GPU's pace over ranks as a picture: `python -m bench.ranks_figure bench/results/h200-peers.jsonl docs/img/ranks.png`.

Points are the newest measured steps by heads of :mod:`bench.ranks`; lines are those of :mod:`tilewise.parallel.cost`, which knows nothing
of the host's time.
"""

import sys
from pathlib import Path

import torch

from bench import records
from bench.ranks import HEAD_DIM, kept_pairs
from tilewise.parallel import cost
from tilewise.problem import Problem, check
from tilewise.spec import Options, assemble, parse_spec

COLOURS = {2: "#0b6e8f", 4: "#c8553d", 8: "#5b8c3e"}
HEADS = ((32, 8), (16, 16))
LENGTHS = [2**n for n in range(14, 21)]
PACE = 615e12
"""About what one GPU alone makes of a causal step of these heads, from 32k tokens on."""


def problem(seqlen: int, heads_q: int, heads_k: int) -> Problem:
    """A causal step of so many tokens."""
    whole = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    q, k, v = (whole.expand(1, seqlen, heads, HEAD_DIM).requires_grad_() for heads in (heads_q, heads_k, heads_k))
    extras, seed, text = assemble(q, k, v, Options(causal=True))
    return check(q, k, v, extras, seed, parse_spec(text))


def model(ranks: int, seqlen: int, heads_q: int, heads_k: int) -> float:
    """The share of one GPU's pace that the cost model expects of a step by heads."""
    products = 14 * kept_pairs("causal", seqlen) * heads_q * HEAD_DIM / ranks / PACE * 1e3
    return products / (products + cost.exchanging_heads(problem(seqlen, heads_q, heads_k), ranks).milliseconds)


def measured(rows: list[dict], ranks: int, heads_q: int, heads_k: int) -> list[tuple[int, float]]:
    """``(tokens, share)`` of the newest run of each length."""
    times: dict[tuple[int, str], dict[str, float]] = {}
    for r in rows:
        shape = r.get("shape", {})
        found = shape.get("gpus"), shape.get("heads_q"), shape.get("heads_k"), shape.get("mask"), r.get("pass")
        if found == (ranks, heads_q, heads_k, "causal", "both") and r["contestant"] in ("engines", "alone"):
            times.setdefault((shape["seqlen"], r["run"]), {})[r["contestant"]] = r["value"]
    newest = {seqlen: both for (seqlen, _), both in times.items() if len(both) == 2}
    return sorted((seqlen, both["alone"] / both["engines"]) for seqlen, both in newest.items())


def draw(rows: list[dict], path: Path) -> None:
    """A panel for each number of heads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (heads_q, heads_k) in zip(figure.subplots(1, 2, sharey=True), HEADS, strict=True):
        for ranks, colour in COLOURS.items():
            if heads_k % ranks:
                continue
            axes.plot(LENGTHS, [model(ranks, n, heads_q, heads_k) for n in LENGTHS], color=colour, linewidth=1.2)
            if points := measured(rows, ranks, heads_q, heads_k):
                axes.plot(
                    *zip(*points, strict=True), "o", color=colour, label=f"{ranks} GPUs, measured; line: the cost model"
                )
        axes.set(xscale="log", ylim=(0.5, 1.0), title=f"{heads_q} query, {heads_k} key heads", xlabel="tokens")
        axes.set_xticks(LENGTHS, [f"{n // 2**10}k" if n < 2**20 else f"{n // 2**20}M" for n in LENGTHS])
        axes.minorticks_off()
        axes.grid(True, color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right", fontsize=8)
    figure.axes[0].set_ylabel("share of one GPU's pace")
    figure.suptitle(
        "NVIDIA H200, bf16, D 128, causal, forward and backward, by heads with copy engines",
        fontsize=9,
        color="#555555",
    )
    figure.savefig(path, dpi=110)


def main(*arguments: str) -> None:
    source, target = map(Path, arguments)
    draw(records.read(source), target)


if __name__ == "__main__":
    main(*sys.argv[1:])
