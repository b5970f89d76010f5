"""Trains a byte-level GPT on real text, with checkpoints, and continues a text with it.

    python -m examples.gpt.run train                                # on Python's standard library
    python -m examples.gpt.run train --text FILE --context 1024 --steps 2000 --attention sdpa
    python -m examples.gpt.run sample --prompt "def main("

The same command continues a run that was stopped, with the same losses.
"""

import argparse
import codecs
import hashlib
import json
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from examples.gpt.checkpoint import Checkpoint, load, save
from examples.gpt.model import ATTENTIONS, GPT, GPTConfig
from examples.gpt.train import TrainConfig, load_text, make_optimizer, train
from tilewise.cli.checkout import choose_device

CHECKPOINT = "checkpoint.pt"


@contextmanager
def first_interrupt() -> Iterator[list[int]]:
    """The list fills at the first Ctrl-C, which otherwise does nothing; the second stops at once."""
    seen: list[int] = []

    def on_interrupt(number: int, frame: object):
        signal.signal(signal.SIGINT, before)
        seen.append(number)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


class Run:
    """A model, its optimizer and what has been measured, begun or taken up from the folder's checkpoint."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.device = options, choose_device(options.device)
        self.path = options.out / CHECKPOINT
        self.text = load_text(options.text)
        names = [f.name for f in fields(TrainConfig) if hasattr(options, f.name)]
        self.config = TrainConfig(**{name: getattr(options, name) for name in names})
        sizes = GPTConfig(context=options.context)
        self.model = GPT(sizes, ATTENTIONS[options.attention], seed=options.seed).to(self.device)
        self.optimizer = make_optimizer(self.model, self.config)
        self.settings = {
            "attention": options.attention,
            "text": f"{len(self.text)} bytes, sha256 {hashlib.sha256(self.text).hexdigest()[:16]}",
            **asdict(sizes),
            **asdict(self.config),
        }
        self.history: list[dict] = []
        # Refuses a text that is too short before anything is written.
        self.records = train(self.model, self.text, self.config, optimizer=self.optimizer, start=self._resume())

    def _resume(self) -> int:
        if self.path.exists():
            found = load(self.path, self.settings)
            self.model.load_state_dict(found.model)
            self.optimizer.load_state_dict(found.optimizer)
            self.history = found.history
        return self.done

    @property
    def done(self) -> int:
        """Steps behind us."""
        return len(self.history)

    def steps(self) -> Iterator[None]:
        """Trains step by step, printing some losses and saving every so often."""
        weights = sum(p.numel() for p in self.model.parameters())
        begin = f"goes on after step {self.done}" if self.done else "begins"
        source = self.options.text or "Python's standard library"
        print(f"{begin}: {weights / 1e6:.1f} M weights, {len(self.text) / 1e6:.1f} MB of {source}, on {self.device}")
        shown = -(-self.config.steps // 20)
        for record in self.records:
            if not math.isfinite(record.loss):
                raise ValueError(
                    f"the loss is {record.loss} at step {record.step}: lower --learning-rate; nothing was saved since"
                )
            self.history.append(asdict(record) | {"peak_bytes": peak_bytes(self.device)})
            if record.step % shown == 0 or self.done == self.config.steps:
                rate, peak = record.tokens_per_s, self.history[-1]["peak_bytes"] / 2**20
                print(f"step {record.step:6}   loss {record.loss:.4f}   {rate:,.0f} tokens/s   {peak:,.0f} MiB")
            if self.done % self.options.save_every == 0:
                self.save()
            yield

    def save(self):
        state = (self.model.state_dict(), self.optimizer.state_dict())
        save(self.path, Checkpoint(self.settings, self.done, self.history, *state))

    def report(self):
        """Writes the losses as a picture and as JSON."""
        json_path, png_path = self.options.out / "train.json", self.options.out / "train.png"
        json_path.write_text(json.dumps({"settings": self.settings, "steps": self.history}, indent=1) + "\n")
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot(xlabel="training step", ylabel="loss, nats per byte")
        axes.plot([row["loss"] for row in self.history])
        axes.grid(True)
        figure.savefig(png_path, dpi=160)
        print(f"Plot: {png_path}   Numbers: {json_path}   Continue a text: sample --out {self.options.out}")


def peak_bytes(device: str) -> int:
    """Return the most memory in use so far: of the GPU, or of this process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    import resource  # no Windows has it

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def train_model(options: argparse.Namespace) -> int:
    """Trains. The first Ctrl-C saves the run after its step; the second stops at once."""
    run = Run(options)
    with first_interrupt() as stopped:
        for _ in run.steps():
            if stopped:
                break
        run.save()
    if run.done < options.steps:
        where = f"stopped after step {run.done} of {options.steps}, saved in {run.path}"
        print(f"{where}: the same command goes on", file=sys.stderr)
        return 130
    run.report()
    return 0


def sample_text(options: argparse.Namespace) -> int:
    """Prints the prompt and what the saved model makes of it."""
    path = options.out / CHECKPOINT
    if not path.exists():
        raise ValueError(f"{path} does not exist: train --out {options.out} writes it")
    found = load(path)
    names = [f.name for f in fields(GPTConfig)]
    if not found.settings.keys() >= {"attention", *names}:
        raise ValueError(f"{path} is the checkpoint of another program: sample reads those of train")
    sizes = GPTConfig(**{name: found.settings[name] for name in names})
    model = GPT(sizes, ATTENTIONS[found.settings["attention"]]).to(choose_device(options.device))
    model.load_state_dict(found.model)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    how = {"context": sizes.context, "temperature": options.temperature, "seed": options.seed}
    continued = generate(model, options.prompt.encode(), options.length, **how)
    print(options.prompt, end="", flush=True)
    for byte in continued:
        print(decoder.decode(bytes([byte])), end="", flush=True)
    print(decoder.decode(b"", final=True))
    return 0


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, count: int, *, context: int, temperature: float = 0.8, seed: int = 0
) -> Iterator[int]:
    """The `count` bytes that follow `prompt`, one by one; the model sees the last `context` of what is there.

    Byte x comes with the probability softmax(logits / temperature)[x]; temperature 0 takes the likeliest.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one byte to continue")
    if not temperature >= 0:
        raise ValueError(f"temperature {temperature} must be 0 (the likeliest byte) or above")
    return _bytes(model, list(prompt[-context:]), count, (context, temperature, seed))


def _bytes(model: nn.Module, seen: list[int], count: int, how: tuple[int, float, int]) -> Iterator[int]:
    context, temperature, seed = how
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        logits = model(torch.tensor([seen], device=device))[0, -1].double().cpu()
        if temperature:
            byte = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator).item()
        else:
            byte = logits.argmax().item()
        yield byte
        seen = [*seen, byte][-context:]


def at_least_one(word: str) -> int:
    """A number of steps, rows or bytes."""
    if int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is below 1")
    return int(word)


def parser() -> argparse.ArgumentParser:
    """The two commands and their options."""
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--out", type=Path, default=Path("out/train"), help="folder of the checkpoint, plot and JSON")
    both.add_argument("--seed", type=int, default=0, help="of weights and batches, or of the sampled bytes")
    both.add_argument("--device", default="auto", help="auto, cpu or cuda")
    found = argparse.ArgumentParser(prog="python -m examples.gpt.run", description=__doc__.splitlines()[0])
    commands = found.add_subparsers(required=True)
    command = commands.add_parser("train", parents=[both], help="train on text; the same command goes on after a stop")
    command.set_defaults(run=train_model)
    command.add_argument("--text", type=Path, help="a text file; by default the standard library's sources")
    command.add_argument("--attention", choices=tuple(ATTENTIONS), default="tilewise")
    command.add_argument("--context", type=at_least_one, default=256, help="bytes that the model sees at once")
    command.add_argument("--batch", dest="batch_size", type=at_least_one, default=8, help="rows of a batch")
    command.add_argument("--steps", type=at_least_one, default=300, help="steps of the whole run")
    command.add_argument("--learning-rate", type=float, default=1e-3, help="the highest, after the warm-up")
    command.add_argument("--save-every", type=at_least_one, default=50, help="steps between two checkpoints")
    command = commands.add_parser("sample", parents=[both], help="continue a text with a saved model")
    command.set_defaults(run=sample_text)
    command.add_argument("--prompt", default="def ", help="the text to continue")
    command.add_argument("--length", type=at_least_one, default=400, help="bytes to add")
    command.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest byte")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; a mistake in the input is one line and exit code 2."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the second Ctrl-C
        return 130


if __name__ == "__main__":
    sys.exit(main())
