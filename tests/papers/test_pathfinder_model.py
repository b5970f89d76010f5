"""The Pathfinder encoder: it is attention alone, and what its weights can tell apart."""

import math

import pytest
import torch

from examples.gpt.model import rotate
from tilewise_papers.pathfinder.model import EncoderConfig, PathTransformer, pixel_angles
from tilewise_papers.pathfinder.paths import PathfinderConfig, draw

TINY = PathfinderConfig(side=12, dashes=2, distractors=0)
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
