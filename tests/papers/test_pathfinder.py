"""The Pathfinder images: a positive's dots lie on one dashed path, a negative's do not, and nothing else tells them apart."""

import pytest
import torch
import torch.nn.functional as F

from tilewise_papers.pathfinder import paths
from tilewise_papers.pathfinder.paths import PathfinderConfig, draw

CONFIGS = {
    "16": PathfinderConfig(side=16, dashes=3, distractors=1),
    "32": PathfinderConfig(),
    "32-long": PathfinderConfig(dashes=9, distractors=6, bend=1.2),
    "64": PathfinderConfig(side=64, dashes=14, distractors=8),
}
COUNT = 40


@pytest.fixture(params=CONFIGS, scope="module")
def drawn(request):
    return CONFIGS[request.param], draw(CONFIGS[request.param], COUNT, seed=3)


def spread(start, allowed, reach, steps):
    """Floods allowed (count, side, side) from start, each step to all allowed pixels at most `reach` away."""
    for _ in range(steps):
        grown = F.max_pool2d(start.float().unsqueeze(1), 2 * reach + 1, 1, reach).squeeze(1) > 0
        start = grown & allowed
    return start


def at(images, points):
    return images[torch.arange(len(images)), points[:, 0], points[:, 1]]


def only(images, points):
    found = torch.zeros(images.shape, dtype=torch.bool)
    found[torch.arange(len(images)), points[:, 0], points[:, 1]] = True
    return found


def test_dots_are_joined_by_their_path_in_positives_alone(drawn):
    config, images = drawn
    reached = spread(only(images.path, images.dots[:, 0]), images.path > 0, 1, 2 * config.length(config.dashes))
    assert torch.equal(at(reached, images.dots[:, 1]), images.label.bool())


def test_the_lit_pixels_alone_say_the_same_by_jumping_the_gaps(drawn):
    config, images = drawn
    reached = spread(
        only(images.path, images.dots[:, 0]), images.pixels > 0, config.gap + 1, 2 * config.length(config.dashes)
    )
    assert torch.equal(at(reached, images.dots[:, 1]), images.label.bool())


def test_paths_keep_their_margin(drawn):
    config, images = drawn
    for number in range(1, 3 + config.distractors):
        near = spread(images.path == number, torch.ones_like(images.path, dtype=torch.bool), config.margin, 1)
        assert not (near & (images.path > 0) & (images.path != number)).any()


def test_dots_are_squares_of_nine_lit_pixels_at_the_ends_of_long_paths(drawn):
    _, images = drawn
    for n in (0, 1):
        square = spread(only(images.path, images.dots[:, n]), torch.ones_like(images.path, dtype=torch.bool), 1, 1)
        assert (square.sum((1, 2)) == 9).all()
        assert (images.pixels[square] == 1).all()
        assert torch.isin(at(images.path, images.dots[:, n]), torch.tensor([1, 2])).all()


def test_lit_pixels_lie_on_paths_and_long_paths_have_gaps(drawn):
    _, images = drawn
    assert (images.path[images.pixels > 0] > 0).all()
    for number in (1, 2):
        assert ((images.path == number) & (images.pixels == 0)).any((1, 2)).all()


def test_half_are_positive_and_the_order_is_random(drawn):
    _, images = drawn
    assert images.label.sum() == COUNT // 2
    assert (images.label.diff() != 0).sum() > 5


def test_the_seed_decides_the_images():
    config = CONFIGS["16"]
    first, again, other = (draw(config, 8, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.pixels, other.pixels)


def test_the_dots_distance_does_not_tell_the_label():
    images = draw(CONFIGS["32"], 1000, seed=5)
    far = (images.dots[:, 0] - images.dots[:, 1]).double().norm(dim=1)
    positive, negative = far[images.label == 1], far[images.label == 0]
    # The means of two samples of 500 from one distribution differ by 0.063 standard deviations, one in 400 times by 0.19.
    assert (positive.mean() - negative.mean()).abs() < 0.19 * far.std()


def test_what_cannot_be_drawn_is_refused(monkeypatch):
    monkeypatch.setattr(paths, "ATTEMPTS", 20)
    with pytest.raises(ValueError, match="margin 1 must be above gap 1"):
        PathfinderConfig(margin=1)
    with pytest.raises(ValueError, match="two paths of 40 dashes do not fit 16 × 16 pixels"):
        draw(PathfinderConfig(side=16, dashes=40), 1, seed=0)


def test_the_dots_distance_alone_is_worth_little_more_than_chance():
    """The best answer for each whole distance, learnt from as many images as it is tested on."""
    config, count = PathfinderConfig(), 400
    learn, test = (draw(config, count, seed) for seed in (1, 2))
    far = [(x.dots[:, 0] - x.dots[:, 1]).double().norm(dim=1).round().long() for x in (learn, test)]
    positive = torch.bincount(far[0], learn.label.double(), 2 * config.side)
    answer = 2 * positive > torch.bincount(far[0], minlength=2 * config.side)
    right = (answer[far[1]] == test.label.bool()).double().mean().item()
    assert right < 0.5 + 3 * (0.25 / count) ** 0.5  # three standard deviations of the share of guesses
