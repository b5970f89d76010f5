"""A training step of a small GPT with tilewise and with SDPA, in turn: `python -m bench.train_step --out FILE`.

4 layers, width 256, 4 heads of 64, context 1024, batch 4, fp32: forward, backward and AdamW. A run is appended; threads
follow OMP_NUM_THREADS, and TILEWISE_CPU_POOL says whose they are.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bench import records
from bench.measure import in_turns
from examples.gpt.model import ATTENTIONS, GPT, GPTConfig
from examples.gpt.train import TrainConfig, make_optimizer
from tilewise import settings

SIZES = GPTConfig(layers=4, d_model=256, heads_q=4, heads_k=4, d_hidden=682, context=1024)
BATCH = 4


def step(model: nn.Module, context: int, batch: int, device: str = "cpu") -> Callable[[], None]:
    """A training step of a model, as a call."""
    optimizer = make_optimizer(model, TrainConfig(context=context, batch_size=batch))
    text = torch.randint(256, (batch, context + 1), generator=torch.Generator().manual_seed(0)).to(device)

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    models = {name: GPT(SIZES, ATTENTIONS[name]) for name in ("tilewise", "sdpa")}
    steps = {name: step(model, SIZES.context, BATCH) for name, model in models.items()}
    ms = in_turns(steps, "cpu", options.rounds)
    peers = {"tilewise": "the public call", "sdpa": "F.scaled_dot_product_attention"}
    run = records.run("python -m bench.train_step", "cpu", peers, pool=settings.cpu_pool())
    shape = {"layers": SIZES.layers, "d_model": SIZES.d_model, "heads": SIZES.heads_q, "context": SIZES.context}
    shape |= {"batch": BATCH, "dtype": "float32", "threads": run["threads"]}
    steps = [records.result(run["run"], "gpt-step-cpu", who, "step", "time", t, shape=shape) for who, t in ms.items()]
    records.append([run, *steps], options.out)
    print(f"tilewise {ms['tilewise']:.0f} ms, SDPA {ms['sdpa']:.0f} ms: {ms['sdpa'] / ms['tilewise']:.2f} x")


if __name__ == "__main__":
    main()
