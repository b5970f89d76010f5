"""Pathfinder on one GPU in minutes, by labels alone: from 16 × 16 pixels up to Path-X, 128 × 128, and to Path-256.

    python -m tilewise_papers.pathfinder.ladder --out FILE.jsonl --weights FILE.pt
    python -m tilewise_papers.pathfinder.ladder --out FILE.jsonl --start FILE.pt              # go on where that ended
    python -m tilewise_papers.pathfinder.ladder --out FILE.jsonl --draw docs/img/pathfinder-h200.png        # on any machine

A model climbs LADDER: it leaves a rung when it answers 94 % of the images of the last batches, and gives up if it does not by the end of
the rung's time. On the rungs of whole images of 64 × 64, 128 × 128 and 256 × 256 it stays that long, and is tested at the end. Weights go
from rung to rung as they are. What makes them fit:

- A dark pixel says nothing that the lit ones do not, and of 4,096 pixels some 200 are lit. So a rung *reads* all lit pixels and as many
  dark ones, drawn anew for each image, as make up its number; a step then learns from more images. After whole images of 64 × 64 there
  are never fewer than 4,096 again: a model that has learnt to look past dark pixels guesses where few are left.
- The learning rate falls with the images of a batch. Models that were right for 95 % went back to guessing without that.
- Batches of fewer pixels, and so of more images, take turns with those of whole images, so that what they taught is kept.
- Distances are counted in gaps (``Rung.scale``): the widest step within a path is 2 in images of any size, the narrowest between two 2.5
  to 3.
- Some pairs of each head do not turn (``EncoderConfig.still``). Where all turn, a score that asks only whether a key is lit changes its
  sign with the distance.
- Scores are multiplied by log N / log 256, so that a softmax over more keys is as sharp as at 16 × 16 (Chiang and Cholak 2022).
- Of the 65,536 pixels of Path-256 the model reads tiles of 8 × 16, one after the other. A tile with a lit pixel attends to itself and to
  the others with one, a dark one to itself (``tw.block_sparse``).

Images are drawn on the GPU, a pool at a time, and each is seen once; the accuracy on a batch is taken before it is learnt from. All but
the attention is compiled, since a step of so narrow a model mostly reads and writes activations.
"""

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Sequence
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
from tilewise_papers.pathfinder.paths import SIZES, PathfinderConfig, draw

COMMAND = "python -m tilewise_papers.pathfinder.ladder"
TEST_IMAGES, TEST_SEED = 2048, 10**12  # batches take seeds below it
TILE = (8, 16)  # rows and columns of pixels; 128 tokens


@dataclass(frozen=True)
class Rung:
    """Images of one difficulty, how many of their pixels are read, 0: all, and the seconds until the model gives up.

    Batches that read ``fewer`` pixels take turns with those. A ``tested`` rung is not left before its seconds are over; over the second
    half of them the learning rate falls to nothing. Whole ``sparse`` images are read by tiles.
    """

    images: PathfinderConfig
    seconds: float
    read: int = 0
    fewer: tuple[int, ...] = ()
    tested: bool = False
    sparse: bool = False

    @property
    def scale(self) -> float:
        """How far apart neighbouring pixels are for the angles."""
        return 2 / (self.images.gap + 1)

    @property
    def tokens(self) -> int:
        """Pixels read of an image."""
        return self.read or self.images.seqlen

    @property
    def turns(self) -> tuple[int, ...]:
        """Pixels read of an image, by batches in turn."""
        return (self.tokens, *self.fewer)

    @property
    def name(self) -> str:
        return f"pathfinder-{self.images.side}-dashes{self.images.dashes}-read{self.tokens}"

    def seen(self, steps: int, tokens: int) -> int:
        """The images of so many batches of so many pixels."""
        return sum(size_of(self.turns[n % len(self.turns)], tokens) for n in range(steps))


def size_of(read: int, tokens: int) -> int:
    """Images of a batch of so many pixels."""
    return max(1, tokens // read)


def wide(side: int, dashes: int, distractors: int) -> PathfinderConfig:
    """Images with Path-X's dashes."""
    return PathfinderConfig(side, dashes, distractors, dash=6, gap=2, margin=3)


def wider(side: int, dash: int, gap: int, margin: int) -> PathfinderConfig:
    """Images with as many dashes as Path-X, which are longer."""
    return PathfinderConfig(side, 14, 10, dash=dash, gap=gap, margin=margin)


PATH_X, PATH_256 = SIZES["128 × 128 (Path-X)"], wider(256, 12, 4, 6)
LADDER = (
    Rung(PathfinderConfig(16, 3, 1), 40),
    Rung(PathfinderConfig(24, 4, 2), 30, read=256),
    Rung(PathfinderConfig(32, 6, 4), 30, read=256),
    Rung(PathfinderConfig(40, 8, 5), 30, read=256),
    Rung(PathfinderConfig(48, 10, 7), 40, read=256),
    Rung(PathfinderConfig(56, 12, 9), 40, read=384),
    Rung(SIZES["64 × 64"], 40, read=384),
    Rung(SIZES["64 × 64"], 30, read=1024),
    Rung(SIZES["64 × 64"], 30, read=2048),
    Rung(SIZES["64 × 64"], 20, tested=True),
    Rung(wide(64, 7, 5), 20),
    Rung(wide(80, 9, 6), 20, read=4096),
    Rung(wide(96, 10, 7), 20, read=4096),
    Rung(wide(104, 11, 8), 20, read=4096),
    Rung(wide(112, 12, 8), 20, read=4096),
    Rung(wide(120, 13, 9), 40, read=4096),
    Rung(PATH_X, 60, read=4096),
    Rung(PATH_X, 60, read=8192, fewer=(4096,)),
    Rung(PATH_X, 150, fewer=(4096, 8192), tested=True),
    Rung(wider(176, 8, 3, 4), 60, read=8192),
    Rung(wider(192, 9, 3, 4), 60, read=8192),
    Rung(wider(208, 10, 3, 5), 60, read=8192),
    Rung(wider(224, 10, 4, 6), 60, read=8192),
    Rung(wider(240, 11, 4, 6), 60, read=8192),
    Rung(PATH_256, 60, read=8192),
    Rung(PATH_256, 60, read=16384, fewer=(8192,)),
    Rung(PATH_256, 150, fewer=(8192, 16384), tested=True, sparse=True),
)
ENCODER = EncoderConfig(layers=8, d_model=128, heads=2, d_hidden=384, still=4)


@dataclass(frozen=True)
class Recipe:
    """How to train. ``tokens`` are the pixels that a step reads, whatever the side; ``pool`` images are drawn at once, or as many as have
    ``drawn`` pixels. ``learning_rate`` is that of a batch of ``images`` or more; that of a smaller one falls in proportion."""

    tokens: int = 2**18
    pool: int = 2**15
    drawn: int = 2**29
    learning_rate: float = 1e-3
    images: int = 320
    warmup_steps: int = 100
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    good: float = 0.94
    window: int = 20
    test_images: int = TEST_IMAGES
    seed: int = 0


@dataclass
class Climb:
    """A stay on a rung: seconds of the run at its start and end, and the accuracy on each batch before its update."""

    rung: Rung
    began: float
    ended: float = 0.0
    accuracy: list[float] = field(default_factory=list)

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


def sharpened_attention(q: Tensor, k: Tensor, v: Tensor, mask: tw.Mask | None = None) -> Tensor:
    """Attention of pixels to pixels, whose scores grow with log N as the sum of N exponentials does."""
    scale = math.log(k.shape[1]) / math.log(256) / math.sqrt(q.shape[-1])
    return tw.attention(q, k, v, mask=mask, softmax_scale=scale)


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
    """The encoder, whose images of a batch are one long row of tokens everywhere but in the attention, filled up to ``tokens``.

    So all of LADDER has one shape, and what is compiled for it is compiled once, for every block.
    """

    def __init__(self, config: EncoderConfig, seed: int, tokens: int = 0, compiled: bool = False):
        super().__init__()
        self.tokens = tokens
        self.encoder = PathTransformer(config, sharpened_attention, seed)
        wrap = partial(torch.compile, fullgraph=True, dynamic=False) if compiled else lambda function: function
        self.parts = wrap(before), wrap(after), wrap(Student.end)

    def end(self, x: Tensor) -> Tensor:
        """The features that are pooled, of x (1, tokens, d_model) after the last block."""
        return self.encoder.to_pool(self.encoder.norm(x))

    def forward(self, seen: "Seen", scale: float = 1.0) -> Tensor:
        """The logits of images (batch,)."""
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
                o = sharpened_attention(q, k, v, seen.mask).flatten(0, 1)
                x = second(block, x, F.pad(o, (0, 0, 0, 0, 0, fill)) if fill else o)
            pooled = end(self, x)[0, :row].unflatten(0, (images, tokens))
            logits = encoder.to_logit(pooled.amax(1)).squeeze(-1)
        return logits.float()


class Seen(NamedTuple):
    """The pixels of a batch of images that are read: their values 0/1 and places in the image, (images, read), the image's side, and
    what each attends to, None: all."""

    pixels: Tensor
    place: Tensor
    side: int
    mask: tw.Mask | None = None


def look(pixels: Tensor, read: int = 0, generator: torch.Generator | None = None, sparse: bool = False) -> Seen:
    """All pixels of images (images, side, side), or so many: every lit one and some dark ones. No image has more lit ones than that.
    All of ``sparse`` images are read by tiles."""
    flat, side = pixels.flatten(1), pixels.shape[-1]
    if read and read < flat.shape[1]:
        lit_first = flat + torch.rand(flat.shape, device=flat.device, generator=generator)
        place = lit_first.topk(read, sorted=False).indices
        return Seen(flat.gather(1, place), place, side)
    place = torch.arange(flat.shape[1], device=flat.device)
    if not sparse:
        return Seen(flat, place.expand(flat.shape), side)
    rows, columns = TILE
    place = place.view(side // rows, rows, side // columns, columns).transpose(1, 2).flatten()
    by_tile = flat[:, place]
    lit = by_tile.unflatten(1, (-1, rows * columns)).amax(2) > 0
    sees = (lit[:, :, None] & lit[:, None]) | torch.eye(lit.shape[1], dtype=torch.bool, device=flat.device)
    return Seen(by_tile, place.expand(flat.shape), side, tw.block_sparse(sees[:, None], rows * columns, rows * columns))


def batches(rung: Rung, recipe: Recipe, seed: int, device: str) -> Iterator[tuple[Seen, Tensor]]:
    """Batches of a rung without end, no image twice: what is read of each, and its label."""
    sizes = [size_of(read, recipe.tokens) for read in rung.turns]
    generator = torch.Generator(device).manual_seed(seed)
    while True:
        rounds = -(-min(recipe.pool, recipe.drawn // rung.images.seqlen) // sum(sizes))
        pool = draw(rung.images, rounds * sum(sizes), seed, device)
        parts = (x.split(sizes * rounds) for x in (pool.pixels, pool.label))
        for pixels, label, read in zip(*parts, rung.turns * rounds, strict=True):
            yield look(pixels, read, generator, rung.sparse), label
        seed += 1


def loss_of(student: Student, seen: Seen, label: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the share of its answers that are right, both on the device."""
    logits = student(seen, scale)
    right = ((logits > 0) == label.bool()).float().mean()
    return F.binary_cross_entropy_with_logits(logits, label.float()), right


def climb(student: Student, rungs: Sequence[Rung], recipe: Recipe, device: str, first: int = 0) -> Iterator[Climb]:
    """Trains on one rung after the other and yields what happened there when it is over; the student is then as it left the rung.

    ``first`` is the number of the first of ``rungs``, which decides their images. The learning rate rises over the first steps.
    """
    optimizer = torch.optim.AdamW(
        student.parameters(), betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=device != "cpu"
    )
    began, steps = time.perf_counter(), 0
    for number, rung in enumerate(rungs, first):
        found = Climb(rung, time.perf_counter() - began)
        right = []
        for seen, label in batches(rung, recipe, recipe.seed * 1_000_003 + 10_000 * number, device):
            done = (time.perf_counter() - began - found.began) / rung.seconds
            falling = max(0.0, min(1.0, 2 * (1 - done))) if rung.tested else 1.0
            of_batch = min(1.0, len(label) / recipe.images)
            rate = recipe.learning_rate * of_batch * min(1.0, (steps + 1) / recipe.warmup_steps) * falling
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss, correct = loss_of(student, seen, label, rung.scale)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), recipe.clip_norm)
            optimizer.step()
            steps += 1
            right.append(correct)
            if len(right) == 10:  # the host waits for the device, so that the clock is the device's too
                found.accuracy += torch.stack(right).tolist()
                right = []
                if done >= 1 or (not rung.tested and found.recent(recipe.window) >= recipe.good):
                    break
        found.ended = time.perf_counter() - began
        yield found


def accuracy(student: Student, rung: Rung, recipe: Recipe, device: str) -> float:
    """The share of new images that the student answers rightly when it reads all pixels.

    Without no_grad, for which everything would be compiled again.
    """
    test = draw(rung.images, recipe.test_images, TEST_SEED, device)
    size = size_of(rung.images.seqlen, recipe.tokens)
    right = sum(
        ((student(look(pixels, sparse=rung.sparse), rung.scale) > 0) == label.bool()).sum().item()
        for pixels, label in zip(test.pixels.split(size), test.label.split(size), strict=True)
    )
    return right / recipe.test_images


def compile_seconds(student: Student, rung: Rung, recipe: Recipe, device: str) -> float:
    """The seconds of a first step, in which kernels are compiled; no weight changes."""
    began = time.perf_counter()
    seen, label = next(batches(rung, replace(recipe, pool=1), TEST_SEED + 1, device))
    loss_of(student, seen, label, rung.scale)[0].backward()
    student.zero_grad()
    return time.perf_counter() - began


def study(
    student: Student, rungs: Sequence[Rung], recipe: Recipe, first: int = 0, weights: Path | None = None
) -> Iterator[dict]:
    """Yields the run's record and then a result for each rung: the accuracy, its curve, steps, images and seconds. A rung that is not
    learnt ends it. ``weights`` is where the student is saved after each rung, with the number of the next."""
    device = next(student.parameters()).device.type
    compiled = compile_seconds(student, rungs[0], recipe, device)
    count = sum(weight.numel() for weight in student.parameters())
    more = {
        "weights": count,
        "encoder": asdict(student.encoder.config),
        "recipe": asdict(recipe),
        "compile_s": round(compiled, 1),
    }
    head = records.run(COMMAND, device, {"tilewise": "the public call"}, **more)
    yield head
    print(f"{count / 1e6:.1f} million weights, first step {compiled:.1f} s", flush=True)
    for number, found in enumerate(climb(student, rungs, recipe, device, first), first):
        rung, steps, latest = found.rung, len(found.accuracy), found.latest(recipe.window)
        value = accuracy(student, rung, recipe, device) if rung.tested else found.recent(recipe.window)
        more = {
            "shape": asdict(rung.images) | {"context": rung.tokens, "batch": size_of(rung.tokens, recipe.tokens)},
            "fewer": list(rung.fewer),
            "latest": {read: round(x, 4) for read, x in latest.items()},
            "sparse": rung.sparse,
            "tested_images": recipe.test_images if rung.tested else 0,
            "steps": steps,
            "images_seen": rung.seen(steps, recipe.tokens),
            "began_s": round(found.began, 2),
            "ended_s": round(found.ended, 2),
            "curve": means(found.accuracy, 10),
        }
        print(
            f"{rung.name}: {value:.4f}{' of new images' if rung.tested else ''}, {more['latest'] if rung.fewer else ''}"
            f" {steps} steps, {more['began_s']} to {more['ended_s']} s, {more['curve'][:: max(1, steps // 80)]}",
            flush=True,
        )
        yield records.result(head["run"], rung.name, "tilewise", "step", "accuracy", value, **more)
        if not rung.tested and value < recipe.good:
            print(f"not learnt in {rung.seconds:g} s")
            return
        if weights:
            torch.save({"rung": number + 1, "weights": student.state_dict()}, weights)


def means(values: list[float], every: int) -> list[float]:
    """The means of so many values each."""
    return [round(sum(part) / every, 4) for part in zip(*[iter(values)] * every, strict=False)]


def newest(results: Iterable[dict], rungs: Sequence[Rung] = LADDER) -> list[dict]:
    """The newest of the results of each rung, in seconds since the first one's start; a later run begins where the one before ended."""
    of_rung = {r["case"]: r for r in results if "sparse" in r}
    shown, began = [], 0.0
    for result in (of_rung[rung.name] for rung in rungs if rung.name in of_rung):
        if shown and shown[-1]["run"] != result["run"]:
            began = shown[-1]["ended_s"] - result["began_s"]
        shown.append(result | {"began_s": began + result["began_s"], "ended_s": began + result["ended_s"]})
    return shown


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results are appended here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rungs", type=int, default=len(LADDER), help="climb so many at most")
    parser.add_argument("--tokens", type=int, default=Recipe.tokens, help="pixels of a step")
    parser.add_argument("--weights", type=Path, help="save the weights here after each rung")
    parser.add_argument("--start", type=Path, help="go on from such weights")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--draw", type=Path, help="draw the file's newest rungs here and train nothing")
    options = parser.parse_args()
    if options.draw:
        from tilewise_papers.pathfinder.figure import draw_ladder

        everything = records.read(options.out)
        shown = newest(everything)
        draw_ladder(records.runs(everything)[shown[-1]["run"]], shown, options.draw)
        return
    recipe = Recipe(tokens=options.tokens)
    student = Student(ENCODER, recipe.seed, recipe.tokens, not options.eager).to(options.device)
    first = 0
    if options.start:
        saved = torch.load(options.start, map_location=options.device)
        first = saved["rung"]
        student.load_state_dict(saved["weights"])
    rungs = LADDER[first : first + options.rungs]
    if not rungs:
        parser.error("no rung is left: --start has climbed them all, or --rungs is 0")
    records.append(study(student, rungs, recipe, first, options.weights), options.out)


if __name__ == "__main__":
    main()
