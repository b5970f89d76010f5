"""A small GPT trained in bf16 on a Hopper GPU with tilewise's kernels, and with SDPA from the same and from other weights.

    PYTHONPATH=src:. python3 bench/gpu_training.py --out FILE.jsonl [--steps 2000]
    python -m bench.gpu_training --out FILE.jsonl --draw docs/img/h200-training.png   # the last record, on any machine

Every run reads the same batches. Gradients that were wrong, or merely noisier, would show as losses further from SDPA's than
SDPA's own from two other seeds' weights are from each other: the largest gap of the means over 50 steps says so. All runs go on at
once, each in a process of its own; then a step's time is measured for each attention, alone and in turn.
"""

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn

import tilewise as tw
from bench.measure import in_turns, machine
from bench.train_step import step
from examples.gpt.model import GPT, Attention, GPTConfig, sdpa_attention
from examples.gpt.train import TrainConfig, load_text, train

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


def attention(name: str) -> Attention:
    if name == "sdpa":
        return sdpa_attention
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


def runs(steps: int) -> list[dict]:
    commands = [
        [sys.executable, __file__, "--worker", name, str(seed), "--steps", str(steps), "--out", "-"]
        for name, seed in RUNS
    ]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def gap(a: dict, b: dict) -> float:
    """The largest of the differences of two runs' means."""
    return max(abs(x - y) for x, y in zip(a["means"], b["means"], strict=True))


COLOURS = {"hopper": "#0b6e8f", "hopper-deterministic": "#5fb3a1", "sdpa": "#c8553d"}


def draw(record: dict, path: str) -> None:
    """The losses, and how far each run is from SDPA's of the same weights."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (losses, gaps) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    theirs = next(run for run in record["runs"] if (run["attention"], run["seed"]) == ("sdpa", 0))
    for run in record["runs"]:
        label = f"{run['attention']}, weights of seed {run['seed']}"
        style = {"color": COLOURS[run["attention"]], "linestyle": "-" if run["seed"] == 0 else ":", "label": label}
        steps = [WINDOW * (n + 1) for n in range(len(run["means"]))]
        losses.plot(steps, run["means"], **style)
        if run is not theirs:
            gaps.plot(steps, [abs(a - b) for a, b in zip(run["means"], theirs["means"], strict=True)], **style)
    losses.set(xlabel="step", ylabel="loss, nats a byte", yscale="log")
    gaps.set(xlabel="step", ylabel="distance from SDPA's, seed 0", ylim=(0, None))
    losses.legend(frameon=False)
    figure.suptitle(f"Means of {WINDOW} steps, bf16, {record['machine']['device']}", fontsize=9, color="#555555")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--draw", help="a picture of what --out holds already; nothing is run")
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], int(options.worker[1]), options.steps)
        return
    if options.draw:
        draw(json.loads(Path(options.out).read_text().splitlines()[-1]), options.draw)
        return
    ours, exact, theirs, *others = found = runs(options.steps)
    gaps = {"hopper": gap(ours, theirs), "deterministic": gap(exact, theirs), "sdpa's own seeds": gap(*others)}
    contestants = ("hopper", "sdpa", "triton")
    ms = {
        f"{n} x {b}": in_turns({name: step(InBf16(name, 0, n), n, b, DEVICE) for name in contestants}, DEVICE)
        for n, b in TIMED
    }
    record = {"gaps": gaps, "runs": found, "step_ms": ms, "machine": machine(DEVICE)}
    with Path(options.out).open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(gaps, *(f"{run['attention']} {run['seed']}: {run['means'][::5]}" for run in found), ms, sep="\n")


if __name__ == "__main__":
    main()
