"""Sampling bytes: the model's distribution, sharpened by the temperature, from no more than its context."""

import pytest
import torch

from examples.gpt.sample import generate


class Fixed(torch.nn.Module):
    """Gives every position the same logits, and keeps what it was shown."""

    def __init__(self, chances: dict[int, float]):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.full((256,), -1e9))
        for byte, chance in chances.items():
            self.logits.data[byte] = torch.tensor(chance).log()
        self.shown: list[list[int]] = []

    def forward(self, tokens):
        self.shown.append(tokens[0].tolist())
        return self.logits.expand(*tokens.shape, 256)


def test_the_model_sees_the_last_bytes_that_fit_its_context():
    model = Fixed({7: 1.0})
    assert list(generate(model, b"abcd", 4, context=3)) == [7] * 4
    assert model.shown == [[*b"bcd"], [*b"cd", 7], [*b"d", 7, 7], [7, 7, 7]]
    model = Fixed({7: 1.0})
    list(generate(model, b"a", 3, context=8))
    assert model.shown == [[*b"a"], [*b"a", 7], [*b"a", 7, 7]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_bytes_come_as_often_as_the_softmax_of_the_tempered_logits_says(temperature):
    chances, count = {3: 0.6, 200: 0.3, 201: 0.1}, 2000
    drawn = torch.tensor(list(generate(Fixed(chances), b"x", count, context=1, temperature=temperature)))
    weights = {byte: chance ** (1 / temperature) for byte, chance in chances.items()}
    for byte, weight in weights.items():
        expected = weight / sum(weights.values())
        # Four standard deviations of a share of `count` draws.
        assert abs((drawn == byte).double().mean() - expected) < 4 * (expected * (1 - expected) / count) ** 0.5
    assert torch.isin(drawn, torch.tensor(list(chances))).all()


def test_temperature_0_takes_the_likeliest_and_the_seed_decides_the_rest():
    model = Fixed({1: 0.4, 2: 0.35, 3: 0.25})
    assert list(generate(model, b"x", 20, context=1, temperature=0)) == [1] * 20
    first, again, other = (list(generate(model, b"x", 20, context=1, temperature=1, seed=s)) for s in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("prompt", "temperature", "says"), [(b"", 1.0, "prompt is empty"), (b"x", -1.0, "temperature -1.0")]
)
def test_a_wrong_call_is_refused_before_the_first_byte(prompt, temperature, says):
    with pytest.raises(ValueError, match=says):
        generate(Fixed({1: 1.0}), prompt, 1, context=4, temperature=temperature)
