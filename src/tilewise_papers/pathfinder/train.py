"""Trains the encoder on Pathfinder images, from short paths in small images to the target, each image seen once.

    python -m tilewise_papers.pathfinder.train --out out/pathfinder --minutes 5    # again: it goes on where it stopped
    python -m tilewise_papers.pathfinder.train --cost                              # seconds an image at 32, 64 and 128 pixels

Every batch is drawn from (seed, step), so that no image returns and the accuracy on a batch, taken before its update, is that on
new images. At the end: accuracy on TEST_IMAGES others, a curve (PNG) and JSON in the same folder.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt.checkpoint import Checkpoint, load, save
from tilewise_papers.pathfinder.model import EncoderConfig, PathTransformer
from tilewise_papers.pathfinder.paths import SIZES, PathfinderConfig, draw

TEST_IMAGES = 2048
TEST_SEED = 10**12
"""Batches take seeds below it."""
SAVE_EVERY_S = 30.0


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: `steps` batches of images of one difficulty."""

    images: PathfinderConfig
    steps: int
    batch_size: int
    learning_rate: float


CURRICULUM = (
    Stage(PathfinderConfig(side=16, dashes=3, distractors=1), 400, 64, 2e-3),
    Stage(PathfinderConfig(side=20, dashes=4, distractors=1), 400, 48, 1e-3),
    Stage(PathfinderConfig(side=24, dashes=5, distractors=2), 350, 32, 1e-3),
    Stage(PathfinderConfig(side=28, dashes=6, distractors=3), 350, 24, 1e-3),
    Stage(PathfinderConfig(side=32, dashes=6, distractors=4), 1000, 24, 1e-3),
)
"""The last stage is the target."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train."""

    warmup_steps: int = 50
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    seed: int = 0


def stage_of(curriculum: tuple[Stage, ...], step: int) -> tuple[Stage, int]:
    """The stage that a step of the whole run belongs to, and the step within it."""
    for stage in curriculum:
        if step < stage.steps:
            return stage, step
        step -= stage.steps
    raise ValueError(f"the curriculum ends {step + 1} steps before")


def learning_rate(stage: Stage, config: TrainConfig, step: int) -> float:
    """Rises linearly at each stage's start, then falls along a cosine to a tenth."""
    rising = min(1.0, (step + 1) / config.warmup_steps)
    return stage.learning_rate * rising * (0.55 + 0.45 * math.cos(math.pi * step / stage.steps))


def logits_in_bfloat16(model: nn.Module, pixels: Tensor) -> Tensor:
    """The model under autocast: products and attention in bf16, which CPUs and GPUs with bf16 units run faster."""
    with torch.autocast(pixels.device.type, torch.bfloat16):
        return model(pixels).float()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    curriculum: tuple[Stage, ...],
    config: TrainConfig,
    start: int = 0,
) -> Iterator[tuple[float, float, float]]:
    """(loss, accuracy, seconds) of each step from `start` on; loss and accuracy are before the step's update."""
    device = next(model.parameters()).device
    for step in range(start, sum(stage.steps for stage in curriculum)):
        began = time.perf_counter()
        stage, within = stage_of(curriculum, step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage, config, within)
        images = draw(stage.images, stage.batch_size, config.seed * 1_000_003 + step)
        label = images.label.to(device)
        logits = logits_in_bfloat16(model, images.pixels.to(device))
        loss = F.binary_cross_entropy_with_logits(logits, label.float())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        accuracy = ((logits > 0) == label.bool()).float().mean().item()
        yield loss.item(), accuracy, time.perf_counter() - began


@torch.no_grad()
def accuracy(model: nn.Module, images: PathfinderConfig, count: int = TEST_IMAGES, seed: int = TEST_SEED) -> float:
    """The share of `count` images of that seed which the model answers rightly."""
    device = next(model.parameters()).device
    test = draw(images, count, seed)
    right = 0
    for pixels, label in zip(test.pixels.split(16), test.label.split(16), strict=True):
        right += ((logits_in_bfloat16(model, pixels.to(device)).cpu() > 0) == label.bool()).sum().item()
    return right / count


def accuracy_of_distance(images: PathfinderConfig, count: int = TEST_IMAGES) -> float:
    """The accuracy by the distance between the dots alone: the share right of the best answer for each whole distance."""
    learn, test = (draw(images, count, TEST_SEED + n) for n in (1, 2))
    bins = 2 * images.side
    far = [(x.dots[:, 0] - x.dots[:, 1]).double().norm(dim=1).round().long() for x in (learn, test)]
    positive = torch.bincount(far[0], learn.label.double(), bins)
    answer = 2 * positive > torch.bincount(far[0], minlength=bins)
    return (answer[far[1]] == test.label.bool()).double().mean().item()


def cost(images: PathfinderConfig, batch_size: int) -> float:
    """Seconds that a training step takes for each image: the least of two after one to warm up."""
    model = PathTransformer(EncoderConfig())
    optimizer = torch.optim.AdamW(model.parameters())
    steps = train(model, optimizer, (Stage(images, 3, batch_size, 1e-4),), TrainConfig())
    return min(seconds for _, _, seconds in list(steps)[1:]) / batch_size


def costs(seen: int) -> list[dict]:
    """The costs of each of SIZES: pixels, seconds an image, and the hours that `seen` images take."""
    rows = []
    for name, images in SIZES.items():
        seconds = cost(images, batch_size=max(1, 16 * 32**2 // images.seqlen))
        hours = seen * seconds / 3600
        row = {"images": name, "seqlen": images.seqlen, "threads": torch.get_num_threads()}
        rows.append(row | {"seconds_an_image": seconds, "images_seen": seen, "hours": hours})
    return rows


class Run:
    """A training run in a folder: goes on where the checkpoint there stopped."""

    def __init__(self, folder: Path, curriculum: tuple[Stage, ...], config: TrainConfig, device: str):
        self.curriculum, self.config, self.folder = curriculum, config, folder
        encoder = EncoderConfig()
        self.model = PathTransformer(encoder, seed=config.seed).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=config.weight_decay)
        stages = [asdict(stage) for stage in curriculum]
        self.settings = {"encoder": asdict(encoder), "training": asdict(config), "curriculum": stages}
        self.history: list[tuple[float, float, float]] = []
        self.checkpoint = folder / "checkpoint.pt"
        if self.checkpoint.exists():
            found = load(self.checkpoint, self.settings)
            self.history = found.history
            self.model.load_state_dict(found.model)
            self.optimizer.load_state_dict(found.optimizer)

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.curriculum)

    def go_on(self, seconds: float):
        """Trains until the end or for `seconds`, and saves."""
        began = saved = time.perf_counter()
        for record in train(self.model, self.optimizer, self.curriculum, self.config, len(self.history)):
            self.history.append(record)
            now = time.perf_counter()
            if len(self.history) % 50 == 0:
                print(self.line(), flush=True)
            if now - saved > SAVE_EVERY_S:
                self.save()
                saved = now
            if now - began > seconds:
                break
        self.save()

    def save(self):
        parts = (self.model.state_dict(), self.optimizer.state_dict())
        save(self.checkpoint, Checkpoint(self.settings, len(self.history), self.history, *parts))

    def line(self) -> str:
        loss, right, seconds = (sum(column) / 50 for column in zip(*self.history[-50:], strict=True))
        stage, _ = stage_of(self.curriculum, len(self.history) - 1)
        where = f"step {len(self.history)} of {self.steps}, {stage.images.side} × {stage.images.side}"
        return f"{where}, {stage.images.dashes} dashes: loss {loss:.4f}, accuracy {right:.3f}, {1e3 * seconds:.0f} ms a step"

    def report(self) -> dict:
        """The run's record: settings, the curve, and the accuracy on images of the target that training never drew."""
        target = self.curriculum[-1].images
        names = ("loss", "accuracy", "seconds")
        curve = dict(zip(names, (list(column) for column in zip(*self.history, strict=True)), strict=True))
        return {
            **self.settings,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "test_images": TEST_IMAGES,
            "test_accuracy": accuracy(self.model, target),
            "distance_accuracy": accuracy_of_distance(target),
            "steps_done": len(self.history),
            "images_seen": sum(stage_of(self.curriculum, n)[0].batch_size for n in range(len(self.history))),
            "curve": curve,
        }


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/pathfinder"), help="folder of the checkpoint and results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this long; run again to go on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--report", action="store_true", help="report the run as far as it is, and do not train")
    parser.add_argument("--cost", action="store_true", help="measure a step at each size instead, into costs.json")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.cost:
        rows = costs(sum(stage.steps * stage.batch_size for stage in CURRICULUM))
        (options.out / "costs.json").write_text(json.dumps(rows) + "\n")
        print(*rows, sep="\n")
        return
    run = Run(options.out, CURRICULUM, TrainConfig(), options.device)
    if not options.report:
        run.go_on(60 * options.minutes)
    if len(run.history) < run.steps and not options.report:
        print(f"stopped after {len(run.history)} of {run.steps} steps: the same command goes on")
        return
    from tilewise_papers.pathfinder.figure import draw_curve

    record = run.report()
    (options.out / "pathfinder.json").write_text(json.dumps(record) + "\n")
    draw_curve(record, options.out / "pathfinder.png")
    print(f"accuracy {record['test_accuracy']:.3f} on {TEST_IMAGES} new images; {options.out}/pathfinder.json and .png")


if __name__ == "__main__":
    main()
