"""`tilewise train`: a byte-level GPT on real text, with checkpoints; the same command continues after a stop."""

import hashlib
import json
import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli import checkout
from tilewise.cli.page import console, table

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class TrainOptions:
    """Options: the text, the model, and for how long."""

    text: Annotated[Path | None, typer.Option(help="A text file; by default the standard library's sources.")] = None
    attention: Annotated[str, typer.Option(help="tilewise, standard or sdpa.")] = "tilewise"
    context: Annotated[int, typer.Option(min=1, help="Bytes that the model sees at once.")] = 256
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run.")] = 300
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Highest learning rate, reached after the warm-up.")] = (
        1e-3
    )
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the batches.")] = 0
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint, the plot and the JSON.")] = Path("out/train")
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 50


def train(options: TrainOptions) -> int:
    """Train a small GPT on text. Ctrl-C saves the run; the same command continues it, with the same losses."""
    run = Run(options)
    run.introduce()
    with first_interrupt() as stopped:
        for _ in run.steps():
            if stopped:
                break
        run.save()
    if run.done < options.steps:
        typer.echo(
            f"stopped after step {run.done} of {options.steps}, saved in {run.path}: the same command goes on", err=True
        )
        return 130
    run.report()
    return 0


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

    def __init__(self, options: TrainOptions):
        self.options, self.device = options, checkout.choose_device(options.device)
        self.path = options.out / CHECKPOINT
        gpt, self.loop, self.store = (checkout.load_example("gpt", f"{n}.py") for n in ("model", "train", "checkpoint"))
        if options.attention not in gpt.ATTENTIONS:
            raise ValueError(f"--attention {options.attention}: known are {', '.join(gpt.ATTENTIONS)}")
        self.text = self.loop.load_text(options.text)
        self.config = self.loop.TrainConfig(
            steps=options.steps,
            context=options.context,
            batch_size=options.batch,
            learning_rate=options.learning_rate,
            seed=options.seed,
        )
        sizes = gpt.GPTConfig(context=options.context)
        self.model = gpt.GPT(sizes, gpt.ATTENTIONS[options.attention], seed=options.seed).to(self.device)
        self.optimizer = self.loop.make_optimizer(self.model, self.config)
        self.settings = {
            "attention": options.attention,
            "text": f"{len(self.text)} bytes, sha256 {hashlib.sha256(self.text).hexdigest()[:16]}",
            **asdict(sizes),
            **asdict(self.config),
        }
        self.history: list[dict] = []
        # Refuses a text that is too short before anything is written.
        self.records = self.loop.train(
            self.model, self.text, self.config, optimizer=self.optimizer, start=self._resume()
        )

    def _resume(self) -> int:
        if self.path.exists():
            found = self.store.load(self.path, self.settings)
            self.model.load_state_dict(found.model)
            self.optimizer.load_state_dict(found.optimizer)
            self.history = found.history
        return self.done

    @property
    def done(self) -> int:
        """Steps behind us."""
        return len(self.history)

    def introduce(self):
        weights = sum(p.numel() for p in self.model.parameters())
        begin = f"goes on after step {self.done}" if self.done else "begins"
        what = f"{weights / 1e6:.1f} M weights, context {self.config.context}, {self.options.attention} attention"
        source = self.options.text or "Python's standard library"
        console().print(
            f"[bold]tilewise train[/] {begin}: {what}, {len(self.text) / 1e6:.1f} MB of {source}, on {self.device}",
            highlight=False,
            soft_wrap=True,
        )

    def steps(self) -> Iterator[None]:
        """Trains step by step under a progress bar, saving every so often."""
        with _bar() as bar:
            task = bar.add_task("", total=self.config.steps, completed=self.done)
            for record in self.records:
                if not math.isfinite(record.loss):
                    raise ValueError(
                        f"the loss is {record.loss} at step {record.step}: lower --learning-rate; nothing was saved since"
                    )
                self.history.append(asdict(record) | {"peak_bytes": peak_bytes(self.device)})
                bar.update(task, completed=self.done, description=_say(self.history[-1]))
                if self.done % self.options.save_every == 0:
                    self.save()
                yield

    def save(self):
        state = (self.model.state_dict(), self.optimizer.state_dict())
        self.store.save(self.path, self.store.Checkpoint(self.settings, self.done, self.history, *state))

    def report(self):
        """The losses as a table, PNG and JSON."""
        from tilewise.cli.figure import draw_loss

        page = table(("step", "loss", "tokens/s", "peak MiB"))
        for step in sorted({*range(0, self.done, -(-self.done // 10)), self.done - 1}):
            row = self.history[step]
            page.add_row(
                str(step), f"{row['loss']:.4f}", f"{row['tokens_per_s']:,.0f}", f"{row['peak_bytes'] / 2**20:,.0f}"
            )
        console().print(page)
        json_path, png_path = self.options.out / "train.json", self.options.out / "train.png"
        json_path.write_text(json.dumps({"settings": self.settings, "steps": self.history}, indent=1) + "\n")
        draw_loss(self.settings, [row["loss"] for row in self.history], png_path)
        closing = f"Plot: {png_path}   Numbers: {json_path}   Continue a text: tilewise sample --out {self.options.out}"
        console().print(closing, highlight=False, soft_wrap=True)


def _bar():
    """Steps, loss, speed and memory; on stderr, and silent in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    screen = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def _say(row: dict) -> str:
    return f"loss {row['loss']:.3f}   {row['tokens_per_s']:,.0f} tokens/s   {row['peak_bytes'] / 2**20:,.0f} MiB"


def peak_bytes(device: str) -> int:
    """Return the most memory in use so far: of the GPU, or of this process."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    import resource  # no Windows has it

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
