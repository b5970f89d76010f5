"""Pathfinder on one GPU in minutes: from 16 × 16 pixels up to 64 × 64, and on from there to Path-X, 128 × 128.

    python -m tilewise_papers.pathfinder.ladder --out FILE.jsonl --paths 1 --seconds 70 --weights 64.pt     # to 64 × 64
    python -m tilewise_papers.pathfinder.ladder --out FILE.jsonl --start 64.pt --seconds 120                # from there to Path-X
    python -m tilewise_papers.pathfinder.ladder --out FILE.jsonl --draw docs/img/pathfinder-h200.png        # both, on any machine

A model climbs LADDER and then BEYOND: it leaves a rung when it answers 94 % of the images of the last batches, or when the rung's time is
over; on the last, which is tested, it stays to the end. Weights go from rung to rung as they are, since angles tell rows and columns
apart by pixels, whatever the side. What makes them fit:

- A dark pixel says nothing that the lit ones do not, and of 4,096 pixels some 200 are lit. So a rung *reads* all lit pixels and as many
  dark ones, drawn anew for each image, as make up its number; a step then learns from ten times as many images. The last rungs of a
  size read more and more of them and at last all, as the tests do. At Path-X batches of fewer pixels, and so of more images, come
  between those, so that what they taught is kept.
- Some pairs of each head do not turn (``EncoderConfig.still``). Where all turn, a score that asks only whether a key is lit changes its
  sign with the distance.
- Path-X's dashes are 6 pixels long and 2 apart. There neighbours count as two thirds of a pixel apart, so that the widest step within a
  path and the narrowest between two lie on either side of the same distance as before.
- Scores are multiplied by log N / log 256, so that a softmax over more keys is as sharp as at 16 × 16 (Chiang and Cholak 2022).

Images are drawn on the GPU, a pool at a time, and each is seen once; the accuracy on a batch is taken before it is learnt from. All but
the attention is compiled, since a step of so narrow a model mostly reads and writes activations. With `--paths WEIGHT` every lit pixel
also learns how many dots lie on its path, which is more than the task's own labels say; with `--start` only from the rung on where
labels alone do not do.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from bench import records
from examples.gpt.model import Block, rotate
from tilewise_papers.pathfinder.model import BACKGROUND, SCALE, EncoderConfig, PathTransformer, angles_on
from tilewise_papers.pathfinder.paths import SIZES, Images, PathfinderConfig, draw
from tilewise_papers.pathfinder.train import TEST_IMAGES, TEST_SEED

PATH_X = "128 × 128 (Path-X)"
COMMAND = "python -m tilewise_papers.pathfinder.ladder"


@dataclass(frozen=True)
class Rung:
    """Images of one difficulty, and how many of their pixels are read, 0: all.

    The model leaves it at the share ``until`` of the whole time at the latest, and on the last one, where that is 1, not before; there
    its learning rate falls to nothing over the second half. ``scale`` is how far apart neighbouring pixels are for the angles, ``rate``
    a factor of the learning rate. Batches that read ``fewer`` pixels take turns with those, at a rate that grows with their images.
    """

    images: PathfinderConfig
    until: float
    read: int = 0
    scale: float = 1.0
    rate: float = 1.0
    fewer: tuple[int, ...] = ()

    @property
    def last(self) -> bool:
        return self.until == 1

    @property
    def tokens(self) -> int:
        """Pixels read of an image."""
        return self.read or self.images.seqlen

    @property
    def turns(self) -> tuple[int, ...]:
        """Pixels read of an image, by batches in turn."""
        return (self.tokens, *self.fewer)

    def seen(self, steps: int, tokens: int) -> int:
        """The images of so many batches of so many pixels."""
        return sum(size_of(self.turns[n % len(self.turns)], tokens) for n in range(steps))


def size_of(read: int, tokens: int) -> int:
    """Images of a batch of so many pixels."""
    return max(1, tokens // read)


def sized(side: int, dashes: int, distractors: int) -> PathfinderConfig:
    """Images with the dashes of 32 × 32 and 64 × 64."""
    return PathfinderConfig(side=side, dashes=dashes, distractors=distractors)


def wide(side: int, dashes: int, distractors: int) -> PathfinderConfig:
    """Images with Path-X's dashes."""
    return PathfinderConfig(side=side, dashes=dashes, distractors=distractors, dash=6, gap=2, margin=3)


CLOSER = 2 / 3
"""Pixels of Path-X in pixels of the smaller images: a gap of 2 is 3 steps wide, other paths are 4 away; there 2 and 3."""
LADDER = (
    Rung(sized(16, 3, 1), 0.22),
    Rung(sized(24, 4, 2), 0.29, read=256),
    Rung(sized(32, 6, 4), 0.37, read=256),
    Rung(sized(40, 8, 5), 0.43, read=256),
    Rung(sized(48, 10, 7), 0.49, read=256),
    Rung(sized(56, 12, 9), 0.56, read=384),
    Rung(SIZES["64 × 64"], 0.68, read=384),
    Rung(SIZES["64 × 64"], 0.75, read=1024),
    Rung(SIZES["64 × 64"], 0.81, read=2048),
    Rung(SIZES["64 × 64"], 1.0),
)
"""Sides rise in small steps: a model that answered 95 % of 32 × 32 pixels guessed at 64 × 64, and learnt nothing there in 1,460 steps."""
BEYOND = (
    Rung(wide(64, 7, 5), 0.08, read=384, scale=CLOSER),
    Rung(wide(96, 10, 7), 0.16, read=512, scale=CLOSER),
    Rung(SIZES[PATH_X], 0.26, read=640, scale=CLOSER),
    Rung(SIZES[PATH_X], 0.36, read=1024, scale=CLOSER, fewer=(640,)),
    Rung(SIZES[PATH_X], 0.46, read=2048, scale=CLOSER, fewer=(640, 1024)),
    Rung(SIZES[PATH_X], 0.56, read=4096, scale=CLOSER, rate=1 / 2, fewer=(1024, 2048)),
    Rung(SIZES[PATH_X], 0.66, read=8192, scale=CLOSER, rate=1 / 4, fewer=(2048, 4096)),
    Rung(SIZES[PATH_X], 1.0, scale=CLOSER, rate=1 / 8, fewer=(2048, 4096, 8192)),
)
"""On from 64 × 64. The number of pixels that are read doubles at most, batches of fewer take turns with it, and the learning rate falls
with the images of a batch. Models that were right for 94 % went back to guessing from 2,048 pixels to 6,144 at the whole rate and, in
another run, from 640 to 2,048."""
ENCODER = EncoderConfig(layers=8, d_model=128, heads=2, d_hidden=384, still=4)


@dataclass(frozen=True)
class Recipe:
    """How to train. ``tokens`` are the pixels that a step reads, whatever the side; ``pool`` images are drawn at once; ``paths`` is the
    weight of what pixels learn of their paths, from the first rung on or, if they are told ``late``, from the one on that is ``lost``:
    half of its time is over, and less than so much is right."""

    seconds: float
    tokens: int = 2**18
    pool: int = 2**15
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    paths: float = 0.0
    late: bool = False
    lost: float = 0.75
    good: float = 0.94
    window: int = 20
    test_images: int = TEST_IMAGES
    seed: int = 0


@dataclass
class Climb:
    """A stay on a rung: seconds of the run at its start and end, the accuracy on each batch before its update, and whether pixels were
    told of their paths at its end."""

    rung: Rung
    began: float
    ended: float = 0.0
    accuracy: list[float] = field(default_factory=list)
    told: bool = False

    def latest(self, window: int) -> dict[int, float]:
        """The mean accuracy of the last batches by the pixels that they read; 0 before there are so many."""
        turns, found = self.rung.turns, {}
        for n, read in enumerate(turns):
            of_turn = self.accuracy[n :: len(turns)]
            found[read] = sum(of_turn[-window:]) / window if len(of_turn) >= window else 0.0
        return found

    def recent(self, window: int) -> float:
        """The least of :meth:`latest`."""
        return min(self.latest(window).values())


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

    def forward(self, seen: "Seen", scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """The logits of images (batch,) and of the dots of each read pixel's path (batch · read, 3)."""
        encoder, (first, second, end) = self.encoder, self.parts
        pixels = seen.pixels
        images, tokens = pixels.shape
        row = images * tokens
        fill = max(0, self.tokens - row)
        angles = angles_on(pixels.device, seen.side, encoder.config.head_dim, encoder.config.still)
        angles = F.pad((scale * angles)[seen.place.flatten()], (0, 0, 0, fill))
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


class Seen(NamedTuple):
    """The pixels of a batch of images that are read: their values 0/1 and places in the image, (images, read), and the image's side."""

    pixels: Tensor
    place: Tensor
    side: int


def look(pixels: Tensor, read: int = 0, generator: torch.Generator | None = None) -> Seen:
    """All pixels of images (images, side, side), or so many: every lit one and some dark ones. No image has more lit ones than that."""
    flat = pixels.flatten(1)
    if not read or read >= flat.shape[1]:
        place = torch.arange(flat.shape[1], device=flat.device).expand(flat.shape)
        return Seen(flat, place, pixels.shape[-1])
    lit_first = flat + torch.rand(flat.shape, device=flat.device, generator=generator)
    place = lit_first.topk(read, sorted=False).indices
    return Seen(flat.gather(1, place), place, pixels.shape[-1])


def dots_of_paths(images: Images) -> Tensor:
    """How many dots lie on the path of each lit pixel, (count, side²) int64; −100, which cross_entropy leaves out, elsewhere."""
    paths = images.path.flatten(1).long()
    n = torch.arange(len(paths), device=paths.device)
    ends = [images.path[n, images.dots[:, d, 0], images.dots[:, d, 1]].long().unsqueeze(1) for d in (0, 1)]
    dots = sum((paths == end).long() for end in ends)
    return torch.where(images.pixels.flatten(1) > 0, dots, -100)


def loss_of(student: Student, images: Images, seen: Seen, scale: float, paths: float) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and how many of its answers are right, both on the device."""
    logits, dots = student(seen, scale)
    loss = F.binary_cross_entropy_with_logits(logits, images.label.float())
    if paths:
        loss = loss + paths * F.cross_entropy(dots, dots_of_paths(images).gather(1, seen.place).flatten())
    return loss, ((logits > 0) == images.label.bool()).float().mean()


def batches(rung: Rung, recipe: Recipe, seed: int, device: str) -> Iterator[tuple[Images, Seen]]:
    """Batches of a rung without end, no image twice, and what is read of each."""
    sizes = [size_of(read, recipe.tokens) for read in rung.turns]
    generator = torch.Generator(device).manual_seed(seed)
    while True:
        rounds = -(-recipe.pool // sum(sizes))
        pool = draw(rung.images, rounds * sum(sizes), seed, device)
        for *parts, read in zip(*(x.split(sizes * rounds) for x in pool), rung.turns * rounds, strict=True):
            images = Images(*parts)
            yield images, look(images.pixels, read, generator)
        seed += 1


def climb(student: Student, rungs: tuple[Rung, ...], recipe: Recipe, device: str) -> Iterator[Climb]:
    """Trains on one rung after the other and yields what happened there when it is over; the student is then as it left the rung.

    The learning rate rises over the first steps and stays; over the second half of the last rung it falls to nothing.
    """
    optimizer = torch.optim.AdamW(
        student.parameters(), betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=device != "cpu"
    )
    began, steps, told = time.perf_counter(), 0, bool(recipe.paths) and not recipe.late
    for number, rung in enumerate(rungs):
        found = Climb(rung, time.perf_counter() - began)
        first, right = found.began / recipe.seconds, []
        for images, seen in batches(rung, recipe, recipe.seed * 1_000_003 + 10_000 * number, device):
            now = (time.perf_counter() - began) / recipe.seconds
            done = (now - first) / max(rung.until - first, 1e-9)
            falling = min(1.0, 2 * (1 - done)) if rung.last else 1.0
            of_batch = min(1.0, rung.rate * rung.tokens / seen.pixels.shape[1])
            rate = recipe.learning_rate * of_batch * min(1.0, (steps + 1) / recipe.warmup_steps) * max(falling, 0.0)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, correct = loss_of(student, images, seen, rung.scale, recipe.paths * told)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), recipe.clip_norm)
            optimizer.step()
            steps += 1
            right.append(correct)
            if len(right) == 10:  # the host waits for the device, so that the clock is the device's too
                found.accuracy += torch.stack(right).tolist()
                right = []
                told = told or (recipe.paths > 0 and done >= 0.5 and found.recent(recipe.window) < recipe.lost)
                if now >= rung.until or (not rung.last and found.recent(recipe.window) >= recipe.good):
                    break
        found.ended, found.told = time.perf_counter() - began, told
        yield found


def accuracy(student: Student, rung: Rung, recipe: Recipe, device: str) -> float:
    """The share of new images that the student answers rightly when it reads all pixels.

    Without no_grad, for which everything would be compiled again.
    """
    test = draw(rung.images, recipe.test_images, TEST_SEED, device)
    size = max(1, recipe.tokens // rung.images.seqlen)
    right = sum(
        ((student(look(pixels), rung.scale)[0] > 0) == label.bool()).sum().item()
        for pixels, label in zip(test.pixels.split(size), test.label.split(size), strict=True)
    )
    return right / recipe.test_images


def compile_seconds(student: Student, recipe: Recipe, device: str) -> float:
    """The seconds of a first step, in which kernels are compiled; no weight changes."""
    began = time.perf_counter()
    images, seen = next(batches(LADDER[0], replace(recipe, pool=1), TEST_SEED + 1, device))
    loss_of(student, images, seen, 1.0, recipe.paths)[0].backward()
    student.zero_grad()
    return time.perf_counter() - began


def study(student: Student, rungs: tuple[Rung, ...], recipe: Recipe) -> Iterator[dict]:
    """Yields the run's record and then a result for each rung: the accuracy, its curve, steps, images and seconds."""
    device = next(student.parameters()).device.type
    first = compile_seconds(student, recipe, device)
    # Something is left where the first step took all of it: each rung is left after its first ten steps then.
    recipe = replace(recipe, seconds=max(recipe.seconds - first, 1e-3))
    weights = sum(weight.numel() for weight in student.parameters())
    more = {
        "weights": weights,
        "encoder": asdict(student.encoder.config),
        "recipe": asdict(recipe),
        "compile_s": round(first, 1),
    }
    head = records.run(COMMAND, device, {"tilewise": "the public call"}, **more)
    yield head
    print(f"{weights / 1e6:.1f} million weights, first step {first:.1f} s", flush=True)
    for found in climb(student, rungs, recipe, device):
        images, steps = found.rung.images, len(found.accuracy)
        tested = found.rung.last
        value = accuracy(student, found.rung, recipe, device) if tested else found.recent(recipe.window)
        more = {
            "shape": asdict(images)
            | {"context": found.rung.tokens, "batch": size_of(found.rung.tokens, recipe.tokens)},
            "latest": {read: round(x, 4) for read, x in found.latest(recipe.window).items()},
            "scale": found.rung.scale,
            "rate": found.rung.rate,
            "paths": recipe.paths * found.told,
            "tested_images": recipe.test_images if tested else 0,
            "steps": steps,
            "images_seen": found.rung.seen(steps, recipe.tokens),
            "began_s": round(found.began, 2),
            "ended_s": round(found.ended, 2),
            "curve": means(found.accuracy, 10),
        }
        print(
            f"{images.side} × {images.side}, {images.dashes} dashes, {found.rung.tokens} pixels read: {value:.4f}"
            f"{' (new images)' if tested else ''}{', told of paths' if found.told else ''}",
            end=", ",
        )
        print(more["latest"] if found.rung.fewer else "", end=" ")
        print(f"{steps} steps, {more['began_s']} to {more['ended_s']} s, {more['curve'][::8]}", flush=True)
        case = f"pathfinder-{images.side}-dashes{images.dashes}-read{found.rung.tokens}"
        yield records.result(head["run"], case, "tilewise", "step", "accuracy", value, **more)


def means(values: list[float], every: int) -> list[float]:
    """The means of so many values each."""
    return [round(sum(part) / every, 4) for part in zip(*[iter(values)] * every, strict=False)]


def found(path: Path) -> tuple[dict, list[dict]]:
    """The record of a file's last run to 64 × 64, and its rungs, with those of the last run from there to Path-X behind them."""
    everything = records.read(path)
    rungs = [r for r in everything if r.get("metric") == "accuracy"]
    runs = {r["shape"]["side"]: r["run"] for r in rungs if r["tested_images"]}
    shown, began = [], 0.0
    for run in dict.fromkeys(runs[side] for side in sorted(runs)):
        part = [r for r in rungs if r["run"] == run]
        shown += [r | {"began_s": began + r["began_s"], "ended_s": began + r["ended_s"]} for r in part]
        began = shown[-1]["ended_s"]
    return records.runs(everything)[runs[min(runs)]], shown


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results are appended here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=70.0, help="of training and compilation; tests come on top")
    parser.add_argument("--tokens", type=int, default=Recipe.tokens, help="pixels of a step")
    parser.add_argument("--paths", type=float, default=0.0, help="the weight of what pixels learn of their paths")
    parser.add_argument("--weights", type=Path, help="save the weights here")
    parser.add_argument("--start", type=Path, help="start from such weights and climb on to Path-X")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--draw", type=Path, help="draw the file's last runs here and train nothing")
    options = parser.parse_args()
    if options.draw:
        from tilewise_papers.pathfinder.figure import draw_ladder

        draw_ladder(*found(options.out), options.draw)
        return
    recipe = Recipe(options.seconds, tokens=options.tokens, paths=options.paths, late=bool(options.start))
    student = Student(ENCODER, recipe.seed, recipe.tokens, not options.eager).to(options.device)
    if options.start:
        student.load_state_dict(torch.load(options.start, map_location=options.device))
    records.append(study(student, BEYOND if options.start else LADDER, recipe), options.out)
    if options.weights:
        torch.save(student.state_dict(), options.weights)


if __name__ == "__main__":
    main()
