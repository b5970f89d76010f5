"""Pathfinder images: do the two dots lie on one dashed path? Drawn by the batch, from a seed.

    images = draw(PathfinderConfig(), count=256, seed=0)
    images.pixels (256, 32, 32) uint8 0/1     images.label (256,) 1: one path     images.path (256, 32, 32) which path

After Linsley et al. 2018 ("Learning long-range spatial dependencies with horizontal gated-recurrent units"), whose images the
Long Range Arena (Tay et al. 2020) made a task for sequences of side² pixels: two long dashed paths, shorter ones that distract,
and a dot on two of the long paths' four ends. In half the images both dots lie on one path. This is a generator of our own with
its own geometry: accuracies on it are not those of the published sets.

    1 1 1 . . . . . . .        a dot (3 × 3), two dashes of 2 pixels after gaps of 1,
    1 1 1 . 1 1 . 1 1 .        and below a path that comes no nearer than `margin` blank pixels
    1 1 1 . . . . . . .
    . . . . . . . . . .
    . 1 1 . 1 1 . 1 1 .
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CANDIDATES = 12
"""Paths tried at once for each place in an image."""
ATTEMPTS = 1000
"""Times that an image's two long paths are drawn before giving up."""
ALIKE = 0.5
"""Pixels by which the dots' distance may differ between an image's positive and its negative marking."""


@dataclass(frozen=True)
class PathfinderConfig:
    """One difficulty. A path is `dashes` dashes of `dash` pixels with `gap` between; from dash to dash it turns by up to `bend`."""

    side: int = 32
    dashes: int = 6
    distractors: int = 4
    dash: int = 3
    gap: int = 1
    bend: float = 0.6
    margin: int = 2

    def __post_init__(self):
        if self.margin <= self.gap:
            raise ValueError(
                f"margin {self.margin} must be above gap {self.gap}, or a neighbour looks like the next dash"
            )
        if self.dashes < 2:
            raise ValueError(f"dashes {self.dashes}: a long path has at least 2")

    @property
    def seqlen(self) -> int:
        return self.side**2

    def length(self, dashes: int) -> int:
        """Pixels from one end of a path to the other."""
        return dashes * (self.dash + self.gap) - self.gap


SIZES = {
    "32 × 32": PathfinderConfig(side=32, dashes=6, distractors=4),
    "64 × 64": PathfinderConfig(side=64, dashes=14, distractors=10),
    "128 × 128 (Path-X)": PathfinderConfig(side=128, dashes=14, distractors=10, dash=6, gap=2, margin=3),
}
"""The sizes that the task is known by."""


class Images(NamedTuple):
    """pixels, path (count, side, side) uint8, label (count,) int64, dots (count, 2, 2) int64: row and column of both.

    `path` numbers the paths from 1, their gaps and dots included; the two long ones are 1 and 2; 0 is background.
    """

    pixels: Tensor
    label: Tensor
    path: Tensor
    dots: Tensor


def draw(config: PathfinderConfig, count: int, seed: int, device: str = "cpu") -> Images:
    """`count` images, half of them positive (one more where count is odd), in random order, drawn on a device.

    The same seed gives the same images on the same kind of device. A GPU wants thousands at once: a few images need over a hundred
    attempts, and each attempt costs its launches.
    """
    with torch.device(device):
        return _draw(config, count, torch.Generator(device).manual_seed(seed))


def _draw(config: PathfinderConfig, count: int, generator: torch.Generator) -> Images:
    path, lines = _long_paths(config, count, generator)
    lit = _dashes_of(config, path, lines)
    for number in range(3, 3 + config.distractors):
        _add_distractor(config, path, lit, number, generator)
    label = torch.arange(count)[torch.randperm(count, generator=generator)] % 2 == 0
    same, split, _ = _pairs_of_ends(lines)
    dots = torch.where(label.view(-1, 1, 1), same, split)
    for n in range(2):
        _fill_squares(lit, dots[:, n], True)
    return Images(lit.to(torch.uint8), label.long(), path, dots)


def _walks(
    config: PathfinderConfig, shape: tuple[int, ...], dashes: int, border: int, generator: torch.Generator
) -> Tensor:
    """Random smooth walks, shape + (points, 2) int64, a point a pixel; the heading turns at each dash's start."""
    points = config.length(dashes)
    period = config.dash + config.gap
    turn = (torch.rand(*shape, -(-points // period), generator=generator) * 2 - 1) * config.bend / period
    start = torch.rand(*shape, 1, generator=generator) * 2 * math.pi
    heading = start + turn.repeat_interleave(period, dim=-1)[..., : points - 1].cumsum(-1)
    steps = torch.stack((heading.sin(), heading.cos()), dim=-1)
    steps = steps / steps.abs().amax(-1, keepdim=True)  # each step enters a new pixel
    walk = F.pad(steps.cumsum(-2), (0, 0, 1, 0))
    low, high = walk.amin(-2, keepdim=True), walk.amax(-2, keepdim=True)
    room = config.side - 1 - 2 * border - (high - low)
    return (border + torch.rand(*shape, 1, 2, generator=generator) * room + walk - low).round().long()


def _fits(config: PathfinderConfig, walks: Tensor, border: int) -> Tensor:
    """True for walks (…, points, 2) that stay `border` pixels inside and never come back near themselves."""
    inside = ((walks >= border) & (walks < config.side - border)).all(-1).all(-1)
    far = walks[..., ::2, :].short()  # this compares all pairs of points: small numbers take a quarter of the time
    distance = (far.unsqueeze(-2) - far.unsqueeze(-3)).abs().amax(-1)
    order = torch.arange(far.shape[-2])
    apart = (order[:, None] - order).abs() * 2 > 2 * (config.margin + 2)
    return inside & ~((distance <= config.margin + 1) & apart).flatten(-2).any(-1)


def _choose(config: PathfinderConfig, taken: Tensor, dashes: int, border: int, generator: torch.Generator):
    """The first candidate of each image that fits beside `taken` (count, side, side) bool: (found (count,), its walk)."""
    count = len(taken)
    walks = _walks(config, (count, CANDIDATES), dashes, border, generator)
    inside = walks.clamp(0, config.side - 1)
    index = (inside[..., 0] * config.side + inside[..., 1]).flatten(1)
    clash = taken.flatten(1).gather(1, index).view(count, CANDIDATES, -1).any(-1)
    fits = _fits(config, walks, border) & ~clash
    first = fits.int().argmax(1)
    return fits.any(1), walks[torch.arange(count), first]


def _around(path: Tensor, margin: int) -> Tensor:
    """The pixels where no other path may go: `margin` pixels around what is taken, first along rows, then along columns."""
    taken, width = (path > 0).float().unsqueeze(1), 2 * margin + 1
    taken = F.max_pool2d(taken, (1, width), 1, (0, margin))
    return F.max_pool2d(taken, (width, 1), 1, (margin, 0)).squeeze(1) > 0


def _long_paths(config: PathfinderConfig, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Both long paths of every image: path (count, side, side) and their points (count, 2, points, 2). Redraws what fails."""
    path = torch.zeros(count, config.side, config.side, dtype=torch.uint8)
    lines = torch.zeros(count, 2, config.length(config.dashes), 2, dtype=torch.long)
    pending = torch.arange(count)
    for _ in range(ATTEMPTS):
        attempt = torch.zeros(len(pending), config.side, config.side, dtype=torch.uint8)
        good = torch.ones(len(pending), dtype=torch.bool)
        walks = []
        for number in (1, 2):
            found, walk = _choose(config, _around(attempt, config.margin + 1), config.dashes, 1, generator)
            good &= found
            walk = walk.clamp(1, config.side - 2)  # those not found are thrown away below
            walks.append(walk)
            _fill(attempt, walk, number)
            for end in (0, -1):
                _fill_squares(attempt, walk[:, end], number)
        walks = torch.stack(walks, 1)
        good &= _pairs_of_ends(walks)[2] <= ALIKE
        path[pending[good]] = attempt[good]
        lines[pending[good]] = walks[good]
        pending = pending[~good]
        if not len(pending):
            return path, lines
    raise ValueError(f"two paths of {config.dashes} dashes do not fit {config.side} × {config.side} pixels")


def _add_distractor(config: PathfinderConfig, path: Tensor, lit: Tensor, number: int, generator: torch.Generator):
    """A path of a third of the dashes, where there is room for one."""
    dashes = max(1, config.dashes // 3)
    found, walk = _choose(config, _around(path, config.margin), dashes, 0, generator)
    chosen = found.nonzero().squeeze(1)
    for target, value, points in ((path, number, walk), (lit, True, walk[:, _is_dash(config, walk.shape[1])])):
        part = target[chosen]
        _fill(part, points[chosen], value)
        target[chosen] = part


def _is_dash(config: PathfinderConfig, points: int) -> Tensor:
    return torch.arange(points) % (config.dash + config.gap) < config.dash


def _dashes_of(config: PathfinderConfig, path: Tensor, lines: Tensor) -> Tensor:
    lit = torch.zeros(path.shape, dtype=torch.bool)
    _fill(lit, lines[:, :, _is_dash(config, lines.shape[2])].flatten(1, 2), True)
    return lit


def _fill(images: Tensor, points: Tensor, value: int | bool):
    """images[n, row, column] = value at points (count, points, 2), in place."""
    n = torch.arange(len(images)).unsqueeze(1)
    images[n, points[..., 0], points[..., 1]] = value


def _fill_squares(images: Tensor, centre: Tensor, value: int | bool):
    """3 × 3 pixels around centre (count, 2), in place."""
    offsets = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2))
    _fill(images, centre.unsqueeze(1) + offsets, value)


def _pairs_of_ends(lines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two pairs of ends that are alike in distance, of each image's two long paths (count, 2, points, 2).

    Returns a path's own ends and one end of each path, both (count, 2, 2), and by how many pixels their distances differ.
    """
    ends = lines[:, :, (0, -1)]
    split = torch.stack([torch.stack((ends[:, 0, i], ends[:, 1, j]), 1) for i in (0, 1) for j in (0, 1)], 1)
    far_same, far_split = ((pairs[:, :, 0] - pairs[:, :, 1]).double().norm(dim=-1) for pairs in (ends, split))
    apart, best = (far_same.unsqueeze(2) - far_split.unsqueeze(1)).abs().flatten(1).min(1)
    n = torch.arange(len(lines))
    return ends[n, best // 4], split[n, best % 4], apart
