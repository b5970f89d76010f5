"""Longer context, better model? One small GPT on the same text and number of tokens, at four lengths of context.

    python -m examples.gpt.context train --out out/context --minutes 5   # again: it goes on where it stopped
    python -m examples.gpt.context time  --out out/context --threads 2   # seconds and memory of a step, each in a process of its own
    python -m examples.gpt.context report --out out/context              # bench/results/context-cpu.json, the table and the plot

Every step reads TOKENS bytes, cut into rows of one context, so that all runs see as many bytes in as many steps. The loss is that
on the text's last HELD_OUT bytes, which training never sees, cut into pieces of the context the model was trained at: the mean
over all positions, those with little context at a piece's beginning included.
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
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt.checkpoint import Checkpoint, load, save
from examples.gpt.model import ATTENTIONS, GPT, GPTConfig
from examples.gpt.train import TrainConfig, load_text, make_optimizer, train

CONTEXTS = (512, 1024, 4096, 16384)
TOKENS = 16384
STEPS = 240
HELD_OUT = 16 * 16384
POSITIONS = (0, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Where the held-out loss by position is cut."""
SAVE_EVERY_S = 30.0
LIMIT_GIB = 14.0
"""What a measured process may allocate: beyond it, it fails and the machine goes on."""
ROOT = Path(__file__).parents[2]


def model_config(context: int) -> GPTConfig:
    return GPTConfig(layers=2, d_model=96, heads_q=3, heads_k=1, d_hidden=256, context=context)


def train_config(context: int) -> TrainConfig:
    return TrainConfig(steps=STEPS, context=context, batch_size=TOKENS // context, learning_rate=3e-3, warmup_steps=20)


class InBfloat16(nn.Module):
    """A model under autocast: its products and its attention in bf16, the rest in fp32."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return self.model(tokens).float()


def make_model(context: int, attention: str) -> InBfloat16:
    return InBfloat16(GPT(model_config(context), ATTENTIONS[attention]))


def texts() -> tuple[bytes, bytes]:
    """The standard library's sources: (to train on, held out)."""
    text = load_text(None)
    return text[:-HELD_OUT], text[-HELD_OUT:]


def standard_bytes(context: int) -> int:
    """Bytes of the (batch, heads, N, N) matrices that standard attention holds at once in a training step.

    Each layer keeps P for the backward; at the peak dP, dS and the copy that the mask makes of it are there too.
    """
    config = model_config(context)
    matrix = 4 * (TOKENS // context) * config.heads_q * context**2
    return (config.layers + 3) * matrix


# ---- training ------------------------------------------------------------------------------------------------------


def go_on(context: int, folder: Path, until: float) -> bool:
    """Trains the model of one context up to its last step or the time `until`, and saves. True if it is finished."""
    text, held_out = texts()
    config = train_config(context)
    model = make_model(context, "tilewise")
    optimizer = make_optimizer(model, config)
    settings = {"model": asdict(model_config(context)), "train": asdict(config), "text_bytes": len(text)}
    path = folder / f"context-{context}.pt"
    history: list[tuple[float, float]] = []
    if path.exists():
        found = load(path, settings)
        history = found.history
        model.load_state_dict(found.model)
        optimizer.load_state_dict(found.optimizer)
    saved = time.perf_counter()
    for record in train(model, text, config, optimizer=optimizer, start=len(history)):
        history.append((record.loss, record.tokens_per_s))
        now = time.perf_counter()
        if len(history) % 10 == 0:
            print(f"context {context}: step {record.step + 1} of {STEPS}, loss {record.loss:.4f}", flush=True)
        if now > until or now - saved > SAVE_EVERY_S:
            save(path, Checkpoint(settings, len(history), history, model.state_dict(), optimizer.state_dict()))
            saved = now
        if now > until:
            break
    save(path, Checkpoint(settings, len(history), history, model.state_dict(), optimizer.state_dict()))
    if len(history) < STEPS:
        return False
    by_position = evaluate(model, held_out, context)
    rate = sorted(speed for _, speed in history)[len(history) // 2]
    record = {
        **settings,
        "context": context,
        "held_out_loss": by_position.mean().item(),
        "held_out_loss_by_position": means(by_position),
        "loss": [loss for loss, _ in history],
        "tokens_per_s": rate,
        "threads": torch.get_num_threads(),
        "tokens": STEPS * TOKENS,
    }
    (folder / f"context-{context}.json").write_text(json.dumps(record) + "\n")
    return True


@torch.no_grad()
def evaluate(model: nn.Module, text: bytes, context: int) -> torch.Tensor:
    """The mean loss at each position, (context,) in nats per byte, over the text cut into pieces of `context` + 1 bytes.

    The pieces overlap by one byte: a piece's last target is the next one's first token.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = range(0, len(data) - context, context)
    losses = torch.zeros(context, dtype=torch.float64)
    for start in starts:
        piece = data[start : start + context + 1]
        losses += F.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="none").double()
    return losses / len(starts)


def means(by_position: torch.Tensor) -> dict[str, float]:
    """The mean loss between two neighbours of POSITIONS, as far as the context reaches."""
    spans = [(low, high) for low, high in itertools.pairwise(POSITIONS) if high <= len(by_position)]
    return {f"{low}-{high}": by_position[low:high].mean().item() for low, high in spans}


# ---- one step's time and memory ------------------------------------------------------------------------------------


def measure(context: int, attention: str, repeats: int) -> dict:
    """Seconds of a training step, the least of `repeats` after one to warm up, and this process's peak memory."""
    text, _ = texts()
    model = make_model(context, attention)
    before = peak_bytes()
    records = train(model, text, train_config(context))
    seconds = [TOKENS / next(records).tokens_per_s for _ in range(1 + repeats)][1:]
    return {"seconds": min(seconds), "peak_bytes": peak_bytes(), "peak_bytes_before": before}


def peak_bytes() -> int:
    """The most memory this process has had resident."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_apart(context: int, attention: str, threads: int) -> dict:
    """`measure` in a process of its own that may not allocate more than LIMIT_GIB."""
    command = [sys.executable, "-m", "examples.gpt.context", "one-step", "--context", str(context)]
    command += ["--attention", attention, "--threads", str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    row = {"context": context, "attention": attention, "threads": threads}
    if done.returncode == 0:
        return row | json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return row | {"failed": last, "limit_bytes": int(LIMIT_GIB * 2**30)}


def measure_all(folder: Path, threads: int):
    rows = []
    for context in CONTEXTS:
        for attention in ATTENTIONS:
            rows.append(measure_apart(context, attention, threads))
            print(rows[-1], flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "steps.json").write_text(json.dumps(rows) + "\n")


def one_step(context: int, attention: str, threads: int):
    """What `measure_apart` starts."""
    limit = int(LIMIT_GIB * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(threads)
    print(json.dumps(measure(context, attention, repeats=2)))


# ---- the command ---------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "time", "one-step", "report"))
    parser.add_argument("--out", type=Path, default=Path("out/context"), help="folder of checkpoints and results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="train: stop after this long")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, choices=CONTEXTS, help="this one alone")
    parser.add_argument("--attention", choices=tuple(ATTENTIONS), default="tilewise")
    options = parser.parse_args(arguments)
    if options.what == "train":
        until = time.perf_counter() + 60 * options.minutes
        contexts = [options.context] if options.context else CONTEXTS
        waiting = [c for c in contexts if not (options.out / f"context-{c}.json").exists()]
        while waiting and time.perf_counter() < until and go_on(waiting[0], options.out, until):
            waiting.pop(0)
        print(f"not finished: {waiting}, the same command goes on" if waiting else "finished")
    elif options.what == "time":
        measure_all(options.out, options.threads)
    elif options.what == "one-step":
        one_step(options.context, options.attention, options.threads)
    else:
        from examples.gpt.context_report import write

        write(options.out, ROOT)


if __name__ == "__main__":
    main()
