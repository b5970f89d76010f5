"""Pathfinder on one GPU within a time: from 16 × 16 pixels up to 64 × 64, and on from there to Path-X, 128 × 128.

    python -m examples.pathfinder.ladder --out FILE.jsonl --seconds 180                         # trains and tests
    python -m examples.pathfinder.ladder --out FILE.jsonl --draw docs/img/pathfinder-h200.png   # the file's last run, on any machine

One model climbs LADDER: it leaves a rung when it answers 95 % of the images of the last batches, or when the rung's share of the time
is over; on a rung that is tested it stays to the end of its time. Weights go from rung to rung as they are, since angles tell rows and
columns apart by pixels, whatever the side. Path-X's dashes are twice as long; there neighbouring pixels count as half a pixel apart, as
the FlashAttention paper starts Path-X from a model of 64 × 64 pixels whose positions it interpolates. Scores are multiplied by log N /
log 256, so that a softmax over more keys is as sharp as at 16 × 16, where training starts (Chiang and Cholak 2022).

Images are drawn on the GPU, a pool at a time, and each is seen once; the accuracy on a batch is taken before it is learnt from. All but
the attention is compiled, since a step of so narrow a model mostly reads and writes activations. With `--paths WEIGHT` every lit pixel
also learns how many dots lie on its path, which is more than the task's own labels say, from the first rung on where these do not do.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from bench import records
from examples.gpt.model import Block, rotate
from examples.pathfinder.model import BACKGROUND, SCALE, EncoderConfig, PathTransformer, angles_on
from examples.pathfinder.paths import SIZES, Images, PathfinderConfig, draw
from examples.pathfinder.train import TEST_IMAGES, TEST_SEED

PATH_X = "128 × 128 (Path-X)"
COMMAND = "python -m examples.pathfinder.ladder"


@dataclass(frozen=True)
class Rung:
    """Images of one difficulty, and the share of the whole time at which the model leaves them at the latest.

    A rung that is ``tested`` is left no sooner; its learning rate falls to nothing, and images that training never drew follow. ``scale``
    is how far apart neighbouring pixels are for the angles: a half where dashes are twice as long as those that the model knows.
    """

    images: PathfinderConfig
    until: float
    tested: bool = False
    scale: float = 1.0


WIDE = {"dash": 6, "gap": 2, "margin": 3}
"""Path-X's dashes."""
LADDER = (
    Rung(PathfinderConfig(side=16, dashes=3, distractors=1), 0.06),
    Rung(PathfinderConfig(side=32, dashes=4, distractors=2), 0.12),
    Rung(PathfinderConfig(side=32, dashes=5, distractors=3), 0.15),
    Rung(SIZES["32 × 32"], 0.20),
    *(Rung(PathfinderConfig(side=4 * n, dashes=n - 2, distractors=n - 5), 0.04 * n - 0.12) for n in range(9, 16)),
    Rung(SIZES["64 × 64"], 0.62, tested=True),
    Rung(PathfinderConfig(side=64, dashes=7, distractors=5, **WIDE), 0.67, scale=0.5),
    Rung(PathfinderConfig(side=80, dashes=9, distractors=6, **WIDE), 0.72, scale=0.5),
    Rung(PathfinderConfig(side=96, dashes=10, distractors=7, **WIDE), 0.78, scale=0.5),
    Rung(PathfinderConfig(side=112, dashes=12, distractors=8, **WIDE), 0.84, scale=0.5),
    Rung(SIZES[PATH_X], 1.0, tested=True, scale=0.5),
)
"""Sides rise in small steps: a model that answered 95 % of 32 × 32 pixels guessed at 64 × 64, and learnt nothing there in 1,460 steps."""
ENCODER = EncoderConfig(layers=8, d_model=128, heads=2, d_hidden=384)


@dataclass(frozen=True)
class Recipe:
    """How to train. ``tokens`` are those of a step, whatever the side; ``pool`` batches are drawn at once.

    ``paths`` is the weight of what pixels learn of their paths, from the rung on that is ``lost``: half of its time is over, and less
    than so much is right.
    """

    seconds: float
    tokens: int = 2**18
    pool: int = 48
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    paths: float = 0.0
    good: float = 0.94
    lost: float = 0.75
    window: int = 20
    test_images: int = TEST_IMAGES
    seed: int = 0


@dataclass
class Climb:
    """A stay on a rung: seconds of the run at its start and end, the accuracy on each batch before its update, and whether pixels
    learnt of their paths."""

    rung: Rung
    began: float
    ended: float = 0.0
    accuracy: list[float] = field(default_factory=list)
    helped: bool = False

    def recent(self, window: int) -> float:
        """The mean accuracy of the last batches; 0 before there are so many."""
        return sum(self.accuracy[-window:]) / window if len(self.accuracy) >= window else 0.0


def sharpened_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of all pixels to all, whose scores grow with log N as the sum of N exponentials does."""
    scale = math.log(k.shape[1]) / math.log(256) / math.sqrt(q.shape[-1])
    return tw.attention(q, k, v, softmax_scale=scale)


def before(block: Block, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A block up to its attention: q, k and v, each (tokens, heads, head_dim), of x (1, tokens, d_model)."""
    inner = block.attention
    q, k, v = inner.to_qkv(block.norm_attention(x)).unflatten(-1, (-1, inner.head_dim)).split(inner.heads, dim=2)
    return rotate(q, angles).squeeze(0), rotate(k, angles).squeeze(0), v.squeeze(0)


def after(block: Block, x: Tensor, o: Tensor) -> Tensor:
    """The rest of a block: x (1, tokens, d_model) of the attention's o (tokens, heads, head_dim)."""
    x = x + block.attention.project(o.flatten(-2)[None])
    return x + block.mlp(block.norm_mlp(x))


class Student(nn.Module):
    """The encoder, and what it learns of pixels beside the answer: how many dots lie on a lit pixel's path, 0, 1 or 2.

    The images of a batch are one long row of tokens everywhere but in the attention, filled up to ``tokens``. So all of LADDER has one
    shape, and what is compiled for it is compiled once, for every block.
    """

    def __init__(self, config: EncoderConfig, seed: int, tokens: int = 0, compiled: bool = False):
        super().__init__()
        self.tokens = tokens
        self.encoder = PathTransformer(config, sharpened_attention, seed)
        self.to_dots = nn.Linear(config.d_model, 3)
        wrap = partial(torch.compile, fullgraph=True, dynamic=False) if compiled else lambda function: function
        self.parts = wrap(before), wrap(after), wrap(Student.end)

    def end(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features that are pooled, and the logits of the dots of each pixel's path, of x (1, tokens, d_model) after the last block."""
        features = self.encoder.norm(x)
        return self.encoder.to_pool(features), self.to_dots(features).float()

    def forward(self, pixels: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """The logits of images (batch,) and of the dots of each pixel's path (batch · side², 3)."""
        encoder, (first, second, end) = self.encoder, self.parts
        images, tokens = pixels.flatten(1).shape
        row = images * tokens
        fill = max(0, self.tokens - row)
        angles = angles_on(pixels.device, pixels.shape[-1], encoder.config.d_model // encoder.config.heads)
        angles = F.pad((scale * angles).repeat(images, 1), (0, 0, 0, fill))
        with torch.autocast(pixels.device.type, torch.bfloat16):
            x = encoder.embed(BACKGROUND + SCALE * F.pad(pixels.flatten().float(), (0, fill)).view(1, -1, 1))
            for block in encoder.blocks:
                q, k, v = (part[:row].unflatten(0, (images, tokens)) for part in first(block, x, angles))
                o = sharpened_attention(q, k, v).flatten(0, 1)
                x = second(block, x, F.pad(o, (0, 0, 0, 0, 0, fill)) if fill else o)
            pooled, dots = end(self, x)
            pooled = pooled[0, :row].unflatten(0, (images, tokens))
            logits = encoder.to_logit(pooled.amax(1)).squeeze(-1)
        return logits.float(), dots[0, :row]


def dots_of_paths(images: Images) -> Tensor:
    """How many dots lie on the path of each lit pixel, (count, side²) int64; −100, which cross_entropy leaves out, elsewhere."""
    paths = images.path.flatten(1).long()
    n = torch.arange(len(paths), device=paths.device)
    ends = [images.path[n, images.dots[:, d, 0], images.dots[:, d, 1]].long().unsqueeze(1) for d in (0, 1)]
    dots = sum((paths == end).long() for end in ends)
    return torch.where(images.pixels.flatten(1) > 0, dots, -100)


def loss_of(student: Student, images: Images, scale: float, paths: float) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and how many of its answers are right, both on the device."""
    logits, dots = student(images.pixels, scale)
    loss = F.binary_cross_entropy_with_logits(logits, images.label.float())
    if paths:
        loss = loss + paths * F.cross_entropy(dots, dots_of_paths(images).flatten())
    return loss, ((logits > 0) == images.label.bool()).float().mean()


def batches(config: PathfinderConfig, recipe: Recipe, seed: int, device: str) -> Iterator[Images]:
    """Batches of a difficulty without end, none of them twice."""
    size = max(1, recipe.tokens // config.seqlen)
    while True:
        pool = draw(config, recipe.pool * size, seed, device)
        yield from (Images(*parts) for parts in zip(*(x.split(size) for x in pool), strict=True))
        seed += 1


def climb(student: Student, rungs: tuple[Rung, ...], recipe: Recipe, device: str) -> Iterator[Climb]:
    """Trains on one rung after the other and yields what happened there when it is over; the student is then as it left the rung.

    The learning rate rises over the first steps and stays; over the last half of a tested rung it falls to nothing.
    """
    optimizer = torch.optim.AdamW(
        student.parameters(), betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=device != "cpu"
    )
    began, steps, helped = time.perf_counter(), 0, False
    for number, rung in enumerate(rungs):
        found = Climb(rung, time.perf_counter() - began)
        first, last, right = found.began / recipe.seconds, rung.until, []
        for images in batches(rung.images, recipe, recipe.seed * 1_000_003 + 10_000 * number, device):
            now = (time.perf_counter() - began) / recipe.seconds
            done = (now - first) / max(last - first, 1e-9)
            falling = min(1.0, 2 * (1 - done)) if rung.tested else 1.0
            rate = recipe.learning_rate * min(1.0, (steps + 1) / recipe.warmup_steps) * max(falling, 0.0)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, correct = loss_of(student, images, rung.scale, recipe.paths * helped)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), recipe.clip_norm)
            optimizer.step()
            steps += 1
            right.append(correct)
            if len(right) == 10:  # the host waits for the device, so that the clock is the device's too
                found.accuracy += torch.stack(right).tolist()
                right = []
                helped = helped or (done >= 0.5 and found.recent(recipe.window) < recipe.lost)
                if now >= last or (not rung.tested and found.recent(recipe.window) >= recipe.good):
                    break
        found.ended, found.helped = time.perf_counter() - began, helped
        yield found


def accuracy(student: Student, rung: Rung, recipe: Recipe, device: str) -> float:
    """The share of new images that the student answers rightly. (Without no_grad, for which everything would be compiled again.)"""
    test = draw(rung.images, recipe.test_images, TEST_SEED, device)
    size = max(1, recipe.tokens // rung.images.seqlen)
    right = sum(
        ((student(pixels, rung.scale)[0] > 0) == label.bool()).sum().item()
        for pixels, label in zip(test.pixels.split(size), test.label.split(size), strict=True)
    )
    return right / recipe.test_images


def compile_seconds(student: Student, recipe: Recipe, device: str) -> float:
    """The seconds of a first step, in which kernels are compiled; no weight changes."""
    began = time.perf_counter()
    images = draw(LADDER[0].images, recipe.tokens // LADDER[0].images.seqlen, TEST_SEED + 1, device)
    loss_of(student, images, 1.0, recipe.paths)[0].backward()
    student.zero_grad()
    return time.perf_counter() - began


def study(recipe: Recipe, device: str, compiled: bool = False) -> Iterator[dict]:
    """Yields the run's record and then a result for each rung: the accuracy, its curve, steps, images and seconds."""
    student = Student(ENCODER, recipe.seed, recipe.tokens, compiled).to(device)
    first = compile_seconds(student, recipe, device)
    recipe = replace(recipe, seconds=recipe.seconds - first)
    weights = sum(weight.numel() for weight in student.parameters())
    more = {"weights": weights, "encoder": asdict(ENCODER), "recipe": asdict(recipe), "compile_s": round(first, 1)}
    head = records.run(COMMAND, device, {"tilewise": "the public call"}, **more)
    yield head
    print(f"{weights / 1e6:.1f} million weights, first step {first:.1f} s", flush=True)
    for found in climb(student, LADDER, recipe, device):
        images, size = found.rung.images, max(1, recipe.tokens // found.rung.images.seqlen)
        tested = found.rung.tested
        value = accuracy(student, found.rung, recipe, device) if tested else found.recent(recipe.window)
        more = {
            "shape": asdict(images) | {"context": images.seqlen, "batch": size},
            "scale": found.rung.scale,
            "paths": recipe.paths * found.helped,
            "tested_images": recipe.test_images if tested else 0,
            "steps": len(found.accuracy),
            "images_seen": size * len(found.accuracy),
            "began_s": round(found.began, 2),
            "ended_s": round(found.ended, 2),
            "curve": means(found.accuracy, 10),
        }
        print(
            f"{images.side} × {images.side}, {images.dashes} dashes: {value:.4f}{' (new images)' if tested else ''}",
            end=", ",
        )
        print(f"{more['steps']} steps, {more['began_s']} to {more['ended_s']} s, {more['curve'][::8]}", flush=True)
        case = f"pathfinder-{images.side}-dashes{images.dashes}"
        yield records.result(head["run"], case, "tilewise", "step", "accuracy", value, **more)


def means(values: list[float], every: int) -> list[float]:
    """The means of so many values each."""
    return [round(sum(part) / every, 4) for part in zip(*[iter(values)] * every, strict=False)]


def found(path: Path) -> tuple[dict, list[dict]]:
    """The last run of a file of results, and its rungs from below."""
    everything = records.read(path)
    rungs = [r for r in everything if r.get("metric") == "accuracy"]
    last = rungs[-1]["run"]
    return records.runs(everything)[last], [r for r in rungs if r["run"] == last]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results are appended here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=180.0, help="of all, tests and compilation included")
    parser.add_argument("--tokens", type=int, default=Recipe.tokens, help="pixels of a step")
    parser.add_argument("--paths", type=float, default=0.0, help="the weight of what pixels learn of their paths")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--draw", type=Path, help="draw the file's last run here and train nothing")
    options = parser.parse_args()
    if options.draw:
        from examples.pathfinder.figure import draw_ladder

        draw_ladder(*found(options.out), options.draw)
        return
    recipe = Recipe(options.seconds, tokens=options.tokens, paths=options.paths)
    records.append(study(recipe, options.device, not options.eager), options.out)


if __name__ == "__main__":
    main()
