"""Longer context, better model? One small GPT on the same text and number of tokens, at six lengths of context.

    python -m examples.gpt.context train --out out/context --minutes 5   # again: it goes on where it stopped
    python -m examples.gpt.context time  --out out/context               # a step's seconds and memory, each in a process of its own
    python -m examples.report --context out/context                      # the table and the plot

As large models are: most steps at a short context (SHORT, once for all), the last ones at the long one (LONG, once for each). A
step of LONG reads the same piece of text whatever the context, cut into rows of it, so that runs differ in nothing but how far
back a byte may look. (Rows from random places would not do: of few long ones a step sees fewer places, and learns less.)

The loss is that on the text's last HELD_OUT bytes, which training never sees, cut into rows of the context the model was trained
at: the mean over all positions, those with little context at a row's beginning included.
"""

import argparse
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt.checkpoint import Checkpoint, load, save
from examples.gpt.model import ATTENTIONS, GPT, GPTConfig, rotary_angles
from examples.gpt.train import TrainConfig, load_text, make_optimizer, train

CONTEXTS = (128, 256, 512, 1024, 4096, 16384)
TOKENS = 16384
"""Bytes of a step."""
SHORT = TrainConfig(steps=800, context=512, batch_size=TOKENS // 512, learning_rate=3e-3, warmup_steps=20)
LONG = TrainConfig(steps=100, context=TOKENS, batch_size=1, learning_rate=1e-3, warmup_steps=10, seed=1)
HELD_OUT = 16 * 16384
POSITIONS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Where the held-out loss by position is cut."""
SIZES = GPTConfig(layers=2, d_model=96, heads_q=3, heads_k=1, d_hidden=256, context=SHORT.context)
SAVE_EVERY_S = 30.0
LIMIT_GIB = 14.0
"""What a measured process may allocate: beyond it, it fails and the machine goes on."""


def rotary_base(context: int, head_dim: int, short: int = SHORT.context) -> float:
    """10,000 up to the context ``short`` of the first steps; beyond, so much more that the slowest pair turns no further than there.

    The fast pairs, which tell near neighbours apart, hardly change. With 10,000 throughout, distances that SHORT never saw cost
    1.6 nats a byte before LONG and 0.01 (context 1,024) to 0.35 (16,384) after it.
    """
    return 10000.0 * max(1.0, context / short) ** (head_dim / (head_dim - 2))


class Reader(nn.Module):
    """A GPT under autocast (products and attention in bf16) that cuts what it reads into rows of its context.

    sizes: all of the model but its context, which is that of the steps that it is first trained with.
    """

    def __init__(self, context: int, attention: str, sizes: GPTConfig = SIZES):
        super().__init__()
        base = rotary_base(context, sizes.head_dim, sizes.context)
        self.gpt = GPT(replace(sizes, context=context), ATTENTIONS[attention])
        self.gpt.angles = rotary_angles(context, sizes.head_dim, base)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = tokens.reshape(-1, min(self.gpt.config.context, tokens.shape[1]))
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return self.gpt(rows).float().view(*tokens.shape, -1)


def texts() -> tuple[bytes, bytes]:
    """The standard library's sources: (to train on, held out)."""
    text = load_text(None)
    return text[:-HELD_OUT], text[-HELD_OUT:]


# ---- training ------------------------------------------------------------------------------------------------------


class Run:
    """A model in training: taken up from its checkpoint, begun from other weights, or begun from the seed."""

    def __init__(self, path: Path, context: int, config: TrainConfig, begin: dict | None = None):
        self.path, self.config = path, config
        self.model = Reader(context, "tilewise")
        self.optimizer = make_optimizer(self.model, config)
        sizes = self.model.gpt.config
        base = rotary_base(context, sizes.head_dim)
        self.settings = {"model": asdict(sizes), "rotary_base": base, "train": asdict(config), "held_out": HELD_OUT}
        self.history: list[tuple[float, float]] = []
        if path.exists():
            found = load(path, self.settings)
            self.history = found.history
            self.model.load_state_dict(found.model)
            self.optimizer.load_state_dict(found.optimizer)
        elif begin:
            self.model.load_state_dict(begin)

    @property
    def finished(self) -> bool:
        return len(self.history) == self.config.steps

    def go_on(self, until: float) -> "Run":
        """Trains up to the last step or the time `until`, and saves."""
        saved, text = time.perf_counter(), texts()[0]
        for record in train(self.model, text, self.config, optimizer=self.optimizer, start=len(self.history)):
            self.history.append((record.loss, record.tokens_per_s))
            now = time.perf_counter()
            if len(self.history) % 10 == 0:
                print(
                    f"{self.path.name}: step {record.step + 1} of {self.config.steps}, loss {record.loss:.4f}",
                    flush=True,
                )
            if now - saved > SAVE_EVERY_S:
                self.save()
                saved = now
            if now > until:
                break
        self.save()
        return self

    def save(self):
        parts = (self.model.state_dict(), self.optimizer.state_dict())
        save(self.path, Checkpoint(self.settings, len(self.history), self.history, *parts))


def train_all(folder: Path, contexts: tuple[int, ...], until: float) -> bool:
    """The short part, then the long one of each context, each with its record beside it. False if `until` came first."""
    short = Run(folder / "short.pt", SHORT.context, SHORT)
    for context in contexts:
        if time.perf_counter() > until or not (short.finished or short.go_on(until).finished):
            return False
        run = Run(folder / f"context-{context}.pt", context, LONG, begin=short.model.state_dict())
        if not (run.finished or run.go_on(until).finished):
            return False
        path = folder / f"context-{context}.json"
        if not path.exists():
            path.write_text(json.dumps(record_of(run, short)) + "\n")
    return True


def record_of(run: Run, short: Run) -> dict:
    """The record of a finished run: the losses while training, and the one on the held-out text."""
    context = run.model.gpt.config.context
    by_position = evaluate(run.model, texts()[1], context)
    return {
        **run.settings,
        "context": context,
        "short": asdict(short.config),
        "held_out_loss": by_position.mean().item(),
        "held_out_loss_by_position": means(by_position),
        "short_loss": [loss for loss, _ in short.history],
        "loss": [loss for loss, _ in run.history],
        "tokens": TOKENS * (len(short.history) + len(run.history)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


@torch.no_grad()
def evaluate(model: nn.Module, text: bytes, context: int) -> torch.Tensor:
    """The mean loss at each position, (context,) in nats per byte, over the text cut into pieces of `context` + 1 bytes.

    The pieces overlap by one byte: a piece's last target is the next one's first token.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = range(0, len(data) - context, context)
    device = next((weight.device for weight in model.parameters()), data.device)
    losses = torch.zeros(context, dtype=torch.float64, device=device)
    for start in starts:
        piece = data[start : start + context + 1].to(device)
        losses += F.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="none").double()
    return losses.cpu() / len(starts)


def means(by_position: torch.Tensor, positions: tuple[int, ...] = POSITIONS) -> dict[str, float]:
    """The mean loss between two neighbours of ``positions``, as far as the context reaches."""
    spans = [(low, high) for low, high in itertools.pairwise(positions) if high <= len(by_position)]
    return {f"{low}-{high}": by_position[low:high].mean().item() for low, high in spans}


# ---- one step's time and memory ------------------------------------------------------------------------------------


def measure(context: int, attention: str) -> dict:
    """CPU seconds of a training step on one thread, the second of two, and this process's peak memory.

    On one thread CPU time is what a clock would show on an idle machine, and other work does not change it much.
    """
    torch.set_num_threads(1)
    before = peak_bytes()
    records = train(Reader(context, attention), texts()[0], LONG)
    next(records)
    began = time.process_time()
    next(records)
    return {"seconds": time.process_time() - began, "peak_bytes": peak_bytes(), "peak_bytes_before": before}


def peak_bytes() -> int:
    """The most memory this process has had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_apart(context: int, attention: str) -> dict:
    """`measure` in a process of its own that may not allocate more than LIMIT_GIB."""
    command = [
        sys.executable,
        "-m",
        "examples.gpt.context",
        "one-step",
        "--context",
        str(context),
        "--attention",
        attention,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    row = {"context": context, "attention": attention, "threads": 1}
    if done.returncode == 0:
        return row | json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return row | {"failed": last, "limit_bytes": int(LIMIT_GIB * 2**30)}


def measure_all(folder: Path, contexts: tuple[int, ...]):
    """Adds a row for each context and attention to steps.json, in place of what was there for them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "steps.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    for context, attention in itertools.product(contexts, ATTENTIONS):
        rows = [row for row in rows if (row["context"], row["attention"]) != (context, attention)]
        rows.append(measure_apart(context, attention))
        print(rows[-1], flush=True)
        path.write_text(json.dumps(rows) + "\n")


def one_step(context: int, attention: str):
    """One step in a process of its own, which `measure_apart` starts."""
    limit = int(LIMIT_GIB * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(json.dumps(measure(context, attention)))


# ---- the command ---------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "time", "one-step"))
    parser.add_argument("--out", type=Path, default=Path("out/context"), help="folder of checkpoints and results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="train: stop after this long")
    parser.add_argument("--context", type=int, choices=CONTEXTS, help="this one alone")
    parser.add_argument("--attention", choices=tuple(ATTENTIONS), default="tilewise", help="one-step: its attention")
    options = parser.parse_args(arguments)
    contexts = (options.context,) if options.context else CONTEXTS
    if options.what == "train":
        finished = train_all(options.out, contexts, time.perf_counter() + 60 * options.minutes)
        print("finished" if finished else "not finished: the same command goes on")
    elif options.what == "time":
        measure_all(options.out, contexts)
    else:
        one_step(contexts[0], options.attention)


if __name__ == "__main__":
    main()
