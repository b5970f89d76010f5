"""The Pathfinder encoder and its training: what the weights can tell apart, and runs that go on as if never stopped."""

import math

import pytest
import torch

from examples.gpt.model import rotate
from tilewise_papers.pathfinder import train
from tilewise_papers.pathfinder.model import EncoderConfig, PathTransformer, pixel_angles
from tilewise_papers.pathfinder.paths import SIZES, PathfinderConfig, draw

TINY = PathfinderConfig(side=12, dashes=2, distractors=0)
CURRICULUM = (
    train.Stage(TINY, 2, 4, 1e-3),
    train.Stage(PathfinderConfig(side=16, dashes=3, distractors=1), 3, 2, 1e-3),
)
CONFIG = train.TrainConfig(warmup_steps=2)
FP32_ROUNDOFF = 2.0**-24


def standard_attention(q, k, v):
    p = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]), dim=-1)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def test_the_encoder_agrees_with_standard_attention_as_closely_as_fp32_allows():
    pixels = draw(TINY, 3, seed=0).pixels
    config = EncoderConfig(layers=2)
    exact = PathTransformer(config, standard_attention).double()
    exact.embed.register_forward_pre_hook(lambda _, x: (x[0].double(),))
    expected = exact(pixels)
    standard = (PathTransformer(config, standard_attention)(pixels) - expected).abs().max()
    error = (PathTransformer(config)(pixels) - expected).abs().max()
    assert error <= 2 * standard + FP32_ROUNDOFF * expected.abs().max()


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (3, 2)])
def test_products_depend_on_how_far_apart_two_pixels_are_by_row_and_by_column(shift):
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 1, 32, dtype=torch.float64, generator=generator) for _ in range(2))
    side = 8
    angles = pixel_angles(side, 32).double().view(side, side, -1)

    def product(one, other):
        return (rotate(q, angles[one][None]) * rotate(k, angles[other][None])).sum()

    (row, column), one, other = shift, (1, 2), (4, 3)
    moved = [(r + row, c + column) for r, c in (one, other)]
    torch.testing.assert_close(product(*moved), product(one, other), rtol=0, atol=1e-4)
    assert abs(product(one, moved[1]) - product(one, other)) > 1e-3
    assert abs(product(one, other) - product(one, other[::-1])) > 1e-3


def test_every_pixel_can_change_the_answer():
    pixels = torch.zeros(1, 8, 8).requires_grad_()
    torch.manual_seed(0)
    model = PathTransformer(EncoderConfig(layers=2))
    model(pixels).sum().backward()
    assert (pixels.grad != 0).all()


def history(run):
    return [(loss, accuracy) for loss, accuracy, _ in run.history]


def test_a_stopped_run_goes_on_with_the_same_losses(tmp_path):
    def run(folder):
        return train.Run(tmp_path / folder, CURRICULUM, CONFIG, "cpu")

    whole = run("whole")
    whole.go_on(math.inf)
    for _ in range(5):
        assert len(run("parts").history) < 5
        run("parts").go_on(0)
    assert history(run("parts")) == history(whole)
    assert len(whole.history) == 5
    assert all(
        torch.equal(a, b) for a, b in zip(run("parts").model.parameters(), whole.model.parameters(), strict=True)
    )
    with pytest.raises(ValueError, match=r"is of another run \(curriculum"):
        train.Run(tmp_path / "parts", CURRICULUM[:1], CONFIG, "cpu")


def test_steps_walk_through_the_stages():
    assert [train.stage_of(CURRICULUM, step) for step in range(5)] == [
        *((CURRICULUM[0], step) for step in range(2)),
        *((CURRICULUM[1], step) for step in range(3)),
    ]
    with pytest.raises(ValueError, match="the curriculum ends 1 steps before"):
        train.stage_of(CURRICULUM, 5)


class Knows(torch.nn.Module):
    """Answers by a function of the pixels."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.weight = answer, torch.nn.Parameter(torch.zeros(1))

    def forward(self, pixels):
        return self.answer(pixels)


def test_accuracy_is_the_share_of_right_answers():
    images = draw(TINY, 33, train.TEST_SEED)
    key = {tuple(p.flatten().tolist()): label for p, label in zip(images.pixels, images.label.tolist(), strict=True)}

    def truth(pixels):
        return torch.tensor([2.0 * key[tuple(p.flatten().tolist())] - 1 for p in pixels])

    assert train.accuracy(Knows(truth), TINY, 33) == 1
    assert train.accuracy(Knows(lambda pixels: -truth(pixels)), TINY, 33) == 0
    assert train.accuracy(Knows(lambda pixels: torch.ones(len(pixels))), TINY, 33) == 17 / 33


def test_the_dots_distance_alone_is_worth_little_more_than_chance():
    # Three standard deviations of the share of 400 guesses.
    assert train.accuracy_of_distance(SIZES["32 × 32"], 400) < 0.5 + 3 * (0.25 / 400) ** 0.5


def test_test_images_are_none_that_training_draws():
    steps = sum(stage.steps for stage in train.CURRICULUM)
    assert train.TrainConfig().seed * 1_000_003 + steps < train.TEST_SEED
    assert train.CURRICULUM[-1].images == SIZES["32 × 32"]
