"""The tables of docs/evidence.md about training: what tilewise_papers.gpt_speed and examples/gpt measured."""

from dataclasses import dataclass

from bench.tables import NONE, load, number, section, table
from tilewise_papers.devices import DEVICES
from tilewise_papers.pathfinder.ladder import newest

TABLE, CONTEXT, PARTS = ("dd5883c7fbf9", "ad2ae5caef49"), "f3c36a1dc8aa", "h200-step-parts"
"""The runs of tilewise_papers.gpt_speed (Table 1), examples.gpt.context_gpu and examples.gpt.gpu_training that are shown."""
CONTESTANTS = {"fa2": "SDPA, FA2", "cudnn": "SDPA, cuDNN", "kept": "standard", "tilewise": "tilewise"}
USERS = "gpt-1.3B-users-n"
SMALL = {"not compiled": "gpt-small-n", "compiled": "gpt-small-compiled-n"}
"""Cases of tilewise_papers.gpt_speed but for their context; the newest run is shown."""


def training_rows() -> dict[str, dict[str, float | None]]:
    """TFLOP/s of each contestant of each model and context."""
    found = load("hopper-calls")
    cases = [case for case in found.cases(*TABLE) if case.startswith("gpt-") and "B-n" in case]
    who = ("standard", "fa2", "cudnn", "tilewise", "matmul")
    runs = {case: run for run in TABLE for case in found.cases(run)}
    return {case: {name: found.value(runs[case], case, name, "step", "rate") for name in who} for case in cases}


def contexts() -> list[dict]:
    """The records of held-out losses, shortest context first."""
    found = [r for key, r in load("hopper-calls").found.items() if key[0] == CONTEXT and key[-1] == "loss"]
    return sorted(found, key=lambda r: r["shape"]["context"])


def context_table() -> list[str]:
    """The held-out loss of each context, whole and by position in the row."""
    rows = contexts()
    spans = list(rows[-1]["by_position"])
    losses = [[f"{r['by_position'][s]:.3f}" if s in r["by_position"] else "" for r in rows] for s in spans]
    lines = [["all", *(f"**{r['value']:.4f}**" for r in rows)]]
    lines += [[span.replace("-", " to "), *line] for span, line in zip(spans, losses, strict=True)]
    return table(["position / context", *(f"{r['shape']['context']:,}" for r in rows)], lines)


def rungs() -> list[dict]:
    """The newest records of the rungs of tilewise_papers.pathfinder.ladder."""
    return newest(load("hopper-calls").found.values())


def ladder_table() -> list[str]:
    """What Pathfinder's model learnt of each kind of images, and how long it took."""
    kinds: dict[tuple, list[dict]] = {}
    for r in rungs():
        shape = r["shape"]
        kinds.setdefault((shape["side"], shape["dashes"], shape["dash"], shape["gap"]), []).append(r)
    lines = []
    for (side, dashes, dash, gap), stays in kinds.items():
        last = stays[-1]
        lines.append(
            [
                f"{side} × {side}",
                f"{dashes} of {dash}, {gap} apart",
                ", ".join(f"{r['shape']['context']:,}" for r in stays),
                f"{sum(r['images_seen'] for r in stays):,}",
                f"{last['ended_s'] - stays[0]['began_s']:.0f}",
                f"**{last['value']:.1%}** of {last['tested_images']:,}"
                if last["tested_images"]
                else f"{last['value']:.1%}",
            ]
        )
    return table(["images", "dashes of a path", "pixels read", "images seen", "s", "right"], lines)


@dataclass(frozen=True)
class Step:
    """A contestant's training step: its time, or why there is none, its pace and its memory."""

    ms: float | None
    why: str
    tokens_per_s: float | None
    needed: float | None
    gib: float | None

    @property
    def cells(self) -> list[str]:
        if not self.ms:
            return ["out of memory" if "out of memory" in self.why else NONE, NONE, NONE]
        return [number(self.ms, 0), number(self.tokens_per_s, 0), number(self.gib, 1)]


def step(run: str | None, case: str, who: str) -> Step:
    """What a run of tilewise_papers.gpt_speed found."""
    time, rate, memory = (
        load("hopper-calls").found.get((run, case, who, "step", m), {}) for m in ("time", "rate", "memory")
    )
    gib = memory["value"] / 1024 if memory else None
    return Step(time.get("value"), time.get("why", ""), time.get("tokens_per_s"), rate.get("needed"), gib)


def training_section() -> list[str]:
    """FlashAttention-2's Table 1."""
    found, lines = load("hopper-calls"), []
    for case, rates in training_rows().items():
        shape = found.cases(*TABLE)[case]
        title = f"{case.split('-')[1]}, context {shape['context']:,} × {shape['batch']}"
        limit = rates["matmul"]
        cells = [
            f"{rates[n]:.0f} ({rates[n] / limit:.0%})" if rates[n] else NONE
            for n in ("standard", "fa2", "cudnn", "tilewise")
        ]
        lines.append([title, *cells, number(limit, 0)])
    words = (
        "TFLOP/s of a training step by the paper's formula, 6 · tokens · weights + 12 · layers · width · N · tokens, and the share of "
        "a bf16 product of 8192³ timed in the same rounds. Heads of 128, bf16 under autocast, AdamW in fp32. Tokens are bytes, so the "
        "models lack the vocabulary's weights. Only standard attention's scores are checkpointed. "
        f"{found.source(*TABLE)} {found.runs[TABLE[0]]['statistic']}"
    )
    head = ["", "standard", "SDPA, FA2", "SDPA, cuDNN", "tilewise", "product"]
    return section("Training steps (FlashAttention-2, Table 1)", words, table(head, lines))


def users_section() -> list[str]:
    """The same table as users train, once it is measured."""
    found, rows = load("hopper-calls"), []
    run = found.last(f"{USERS}2048")
    if run is None:
        return []
    peak = DEVICES["h200"].matmul_flops / 1e12
    for case, shape in found.cases(run).items():
        if not case.startswith(USERS):
            continue
        for who in ("fa2", "cudnn", "tilewise"):
            at, rate = step(run, case, who), found.value(run, case, who, "step", "rate")
            title = f"context {shape['context']:,} × {shape['batch']}, {CONTESTANTS[who]}"
            rows.append([title, *at.cells, number(rate, 0), f"{at.needed / peak:.1%}" if at.needed else NONE])
    words = (
        "The same model of 1.3B with a vocabulary of 50,304. Each block is computed again in the backward (activation checkpointing) and "
        "compiled by torch.compile, as are logits and loss; weights and fused AdamW in fp32, products in bf16 under autocast. TFLOP/s are "
        "the paper's: all pairs count, the embedding's weights and what is computed twice do not. MFU counts only the half of the pairs "
        f"that a causal mask keeps, and is a share of the {peak:.0f} TFLOP/s of an H200's or H100's data sheet. GiB are in use at the "
        f"step's peak, weights and optimizer included. {found.source(run)} {found.runs[run]['statistic']}"
    )
    head = ["", "ms", "tokens/s", "GiB", "TFLOP/s", "MFU"]
    return section("Training steps as users make them (FlashAttention-2, Table 1)", words, table(head, rows))


def longer_section() -> list[str]:
    """FlashAttention's Table 4: pace and memory of longer contexts, once they are measured, beside their losses."""
    found, rows, losses = load("hopper-calls"), [], {r["shape"]["context"]: r["value"] for r in contexts()}
    runs = {title: run for title, case in SMALL.items() if (run := found.last(f"{case}1024"))}
    for title, run in runs.items():
        for case, shape in found.cases(run).items():
            if not case.startswith(SMALL[title]):
                continue
            for who in ("kept", "tilewise"):
                name = f"{CONTESTANTS[who]}, context {shape['context']:,} × {shape['batch']}, {title}"
                loss = losses.get(shape["context"])
                rows.append([name, *step(run, case, who).cells, f"{loss:.3f}" if loss else NONE])
    if not rows:
        return []
    words = (
        "Training steps of a GPT of GPT-2 small's size: 12 layers of width 768, heads of 64, a vocabulary of 50,304. Each context has as "
        "many tokens a step. Logits and loss are always compiled, and the blocks where the row says so. The compiler then fuses scale, "
        "mask and softmax of standard attention, as the paper's Megatron-LM does. Standard attention keeps its matrices for "
        "the backward. "
        "bf16 under autocast, weights and AdamW in fp32; GiB are in use at the step's peak. The losses are those of the smaller model in "
        "[training.md](training.md#longer-context-better-model), in nats a byte: the models timed here were not trained. "
        f"{found.source(*runs.values())} {found.runs[next(iter(runs.values()))]['statistic']}"
    )
    return section(
        "A longer context as fast (FlashAttention, Table 4)",
        words,
        table(["", "ms", "tokens/s", "GiB", "held-out loss"], rows),
    )


PARTS_ROWS = (
    ("the whole step", "gpt-part-step", "time"),
    ("forward and backward", "gpt-part-both", "time"),
    ("forward and backward, captured in a CUDA graph", "gpt-part-graph", "time"),
    ("the host's part of forward and backward", "gpt-part-both", "host"),
)


def parts_section() -> list[str]:
    """A short step taken apart: tilewise twice, SDPA, and SDPA's time over the mean of the two."""
    found, rows = load("hopper-calls"), []
    for title, case, metric in PARTS_ROWS:
        values = [found.value(PARTS, case, who, "step", metric) for who in ("tilewise", "tilewise again", "sdpa")]
        values = [x / 1e3 if x and metric == "host" else x for x in values]
        ours = [x for x in values[:2] if x]
        rows.append([title, *[number(x, 2) for x in values], f"{values[2] * len(ours) / sum(ours):.3f}"])
    words = (
        "Milliseconds of a step of a GPT of 6 layers and width 512, context 1,024 × 16 rows, bf16, not compiled. So small a model "
        "launches over 600 kernels of 0.03 ms each in the mean, and its host takes about as long as its GPU. tilewise is faster in a CUDA "
        "graph, where kernels follow each other without a gap. Two runs of tilewise differ by more than the two attentions in the whole "
        "step. The host alone takes longer with tilewise, because its backward is Python and SDPA's is C++. "
        f"{found.source(PARTS)}"
    )
    head = ["", "tilewise", "tilewise again", "SDPA", "SDPA / tilewise"]
    return section("A short step, taken apart", words, table(head, rows))
