"""A small GPT trained in bf16 on a Hopper GPU with tilewise's kernels, and with SDPA from the same and from other weights.

    python -m examples.gpt.gpu_training --out FILE.jsonl [--steps 2000]
    python -m examples.gpt.gpu_training --out FILE.jsonl --steps 0    # trains nothing: a step's time at each length
    python -m examples.gpt.gpu_training --out FILE.jsonl --parts      # trains nothing: where a short step's time goes
    python -m examples.gpt.gpu_training --out FILE.jsonl --draw docs/img/h200-training.png   # the file's last such run, on any machine

Every run reads the same batches. Gradients that were wrong, or merely noisier, would show as losses further from SDPA's than
SDPA's own from two other seeds' weights are from each other: the largest gap of the means over 50 steps says so. All runs go on at
once, each in a process of its own; then a step's time is measured for each attention, alone and in turn.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import mean, median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from bench import records
from bench.measure import captured, host_microseconds, in_turns
from examples.gpt.model import GPT, Attention, GPTConfig, sdpa_attention, tilewise_attention
from examples.gpt.train import TrainConfig, load_text, make_optimizer, train

SIZES = GPTConfig(layers=6, d_model=512, heads_q=8, heads_k=2, d_hidden=1365, context=1024)
BATCH, WINDOW = 8, 50
RUNS = (
    ("hopper", 0),
    ("hopper-deterministic", 0),
    ("sdpa", 0),
    ("sdpa", 1),
    ("sdpa", 2),
)  # attention, seed of the weights
TIMED = ((1024, 16), (4096, 4), (16384, 1))  # context, batch
DEVICE = "cuda"
COMMAND = "python -m examples.gpt.gpu_training"


def attention(name: str) -> Attention:
    if name == "sdpa":
        return sdpa_attention
    if name.startswith("tilewise"):
        return tilewise_attention
    backend, _, deterministic = name.partition("-")
    return partial(tw.attention, causal=True, backend=backend, deterministic=bool(deterministic))


class InBf16(nn.Module):
    """Products and attention in bf16, weights and sums in fp32."""

    def __init__(self, name: str, seed: int, context: int = SIZES.context):
        super().__init__()
        sizes = GPTConfig(**{**vars(SIZES), "context": context})
        self.gpt = GPT(sizes, attention(name), seed).to(DEVICE)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return self.gpt(tokens).float()


def worker(name: str, seed: int, steps: int) -> None:
    """One run; prints its means over WINDOW steps."""
    config = TrainConfig(steps=steps, context=SIZES.context, batch_size=BATCH, warmup_steps=100)
    losses = [record.loss for record in train(InBf16(name, seed), load_text(None), config)]
    means = [round(mean(losses[n : n + WINDOW]), 5) for n in range(0, steps, WINDOW)]
    print(json.dumps({"attention": name, "seed": seed, "means": means, "first": losses[:3]}))


def step(model: nn.Module, context: int, batch: int, device: str) -> Callable[[], None]:
    """A training step of a model, as a call."""
    optimizer = make_optimizer(model, TrainConfig(context=context, batch_size=batch))
    text = torch.randint(256, (batch, context + 1), generator=torch.Generator().manual_seed(0)).to(device)

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()

    return run


def runs(steps: int) -> list[dict]:
    commands = [
        [
            sys.executable,
            "-m",
            "examples.gpt.gpu_training",
            "--worker",
            name,
            str(seed),
            "--steps",
            str(steps),
            "--out",
            "-",
        ]
        for name, seed in RUNS
    ]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def gap(a: dict, b: dict) -> float:
    """The largest of the differences of two runs' means."""
    return max(abs(x - y) for x, y in zip(a["means"], b["means"], strict=True))


DRAWN = {
    "hopper": ("tilewise", "#0b6e8f"),
    "hopper-deterministic": ("tilewise, deterministic", "#4fa3bf"),
    "sdpa": ("SDPA", "#9a9a9a"),
}
"""The name and the colour of each contestant in the picture."""


def draw(lines: list[dict], path: str) -> None:
    """The losses, and how far each run is from SDPA's of the same weights."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = [r for r in lines if r["record"] == "result" and r["metric"] == "loss"]
    found = [r for r in found if r["run"] == found[-1]["run"]]
    device = records.runs(lines)[found[0]["run"]]["device"]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (losses, gaps) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    theirs = next(r["value"] for r in found if (r["contestant"], r["case"]) == ("sdpa", "gpt-seed0"))
    for r in found:
        name, seed = r["contestant"], r["case"].removeprefix("gpt-seed")
        label, colour = DRAWN[name]
        style = {
            "color": colour,
            "linestyle": "-" if seed == "0" else ":",
            "linewidth": 2.4 if name == "hopper" else 1.6,
        }
        style["label"] = f"{label}, weights of seed {seed}"
        steps = [r["every"] * (n + 1) for n in range(len(r["value"]))]
        losses.plot(steps, r["value"], **style)
        if r["value"] is not theirs:
            gaps.plot(steps, [abs(a - b) for a, b in zip(r["value"], theirs, strict=True)], **style)
    losses.set(xlabel="step", ylabel="loss, nats a byte", yscale="log")
    gaps.set(xlabel="step", ylabel="distance from SDPA's, seed 0", ylim=(0, None))
    losses.legend(frameon=False)
    figure.suptitle(f"Means of {WINDOW} steps, bf16, {device}", fontsize=9, color="#555555")
    figure.savefig(path, dpi=200)
    plt.close(figure)


# ---- the parts of a short step ------------------------------------------------------------------------------------------

PARTS = ("tilewise", "tilewise again", "sdpa")
"""Who makes the steps; the same one twice shows the noise."""


def parts() -> list[dict]:
    """A step of TIMED's shortest context as records: whole, without its update, that in a CUDA graph, and the host's part of it.

    The host's part is the time until a forward and backward are launched on an idle GPU. A loop whose host takes longer than its GPU
    waits for the host, whatever the kernels take.
    """
    context, batch = TIMED[0]
    text = torch.randint(256, (batch, context + 1), device=DEVICE)
    models = {name: InBf16(name, 0, context) for name in PARTS}
    steps = {name: step(model, context, batch, DEVICE) for name, model in models.items()}
    halves = {name: partial(forward_backward, model, text) for name, model in models.items()}
    graphs = {name: captured(half)[0] for name, half in halves.items()}
    shape = {"context": context, "batch": batch, "d_model": SIZES.d_model, "layers": SIZES.layers}
    head = records.run(COMMAND, DEVICE, {name: name.partition(" ")[0] for name in PARTS}, again=f"{COMMAND} --parts")
    found = [head]
    for case, calls in (("gpt-part-step", steps), ("gpt-part-both", halves), ("gpt-part-graph", graphs)):
        ms = in_turns(calls, DEVICE, 15, 100.0, queued=False)
        found += [records.result(head["run"], case, who, "step", "time", t, shape=shape) for who, t in ms.items()]
    for who, half in halves.items():
        us = median(host_microseconds(half, repeat((), 10), DEVICE)[1:])
        found.append(records.result(head["run"], "gpt-part-both", who, "step", "host", us, shape=shape))
    return found


def forward_backward(model: nn.Module, text: Tensor) -> None:
    """Leaves the gradients of text (batch, context + 1) in the model's weights."""
    model.zero_grad()
    F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--draw", help="a picture of what --out holds already; nothing is run")
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("--parts", action="store_true", help="time the parts of a short step and train nothing")
    options = parser.parse_args()
    if options.parts:
        for r in records.append(parts(), Path(options.out))[1:]:
            print(f"{r['case']} {r['contestant']}: {r['value']:.2f} {r['unit']}")
        return
    if options.worker:
        worker(options.worker[0], int(options.worker[1]), options.steps)
        return
    if options.draw:
        draw(records.read(Path(options.out)), options.draw)
        return
    found, gaps = [], {}
    if options.steps:
        ours, exact, theirs, *others = found = runs(options.steps)
        gaps = {"hopper": gap(ours, theirs), "deterministic": gap(exact, theirs), "sdpa's own seeds": gap(*others)}
    contestants = ("hopper", "sdpa", "triton")
    ms = {
        (n, b): in_turns({name: step(InBf16(name, 0, n), n, b, DEVICE) for name in contestants}, DEVICE, queued=False)
        for n, b in TIMED
    }
    records.append(results(found, ms), Path(options.out))
    print(gaps, *(f"{run['attention']} {run['seed']}: {run['means'][::5]}" for run in found), ms, sep="\n")


def results(found: list[dict], ms: dict[tuple[int, int], dict[str, float]]) -> list[dict]:
    """The run, its losses (means of WINDOW steps) and its steps' times as records."""
    names = {run["attention"] for run in found} | {name for times in ms.values() for name in times}
    peers = {name: "F.scaled_dot_product_attention" if name == "sdpa" else "tilewise" for name in sorted(names)}
    head = records.run(COMMAND, DEVICE, peers)
    sizes = {"layers": SIZES.layers, "d_model": SIZES.d_model, "heads_q": SIZES.heads_q, "heads_k": SIZES.heads_k}

    def made(case: str, who: str, metric: str, value: object, context: int, batch: int, **more: object) -> dict:
        shape = sizes | {"context": context, "batch": batch}
        return records.result(head["run"], case, who, "step", metric, value, shape=shape, **more)

    means = [(f"gpt-seed{x['seed']}", x["attention"], "loss", x["means"], SIZES.context, BATCH) for x in found]
    steps = [(f"gpt-step-n{n}", who, "time", t, n, b) for (n, b), times in ms.items() for who, t in times.items()]
    return [head, *(made(*x, every=WINDOW) for x in means), *(made(*x) for x in steps)]


if __name__ == "__main__":
    main()
