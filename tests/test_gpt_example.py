"""The example GPT and its training loop: examples/gpt/model.py and examples/gpt/train.py, loaded by path as the demo does."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt"
ATTENTIONS = ("tilewise", "standard", "sdpa")
FP32_ROUNDOFF = 2.0**-24


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"gpt_example_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


model = load("model")
train = load("train")

SMALL = model.GPTConfig(layers=2, d_model=48, heads_q=4, heads_k=2, d_hidden=64, context=40)
TEXT = b"def tile(row, column):\n    return row * column\n" * 40


def small_gpt(attention: str = "standard", seed: int = 0, dtype: torch.dtype = torch.float32):
    """A small GPT whose weights are large enough that attention matters to its logits."""
    gpt = model.GPT(SMALL, model.ATTENTIONS[attention], seed=seed).to(dtype)
    with torch.no_grad():
        for weight in gpt.parameters():
            if weight.ndim == 2:
                weight.mul_(8)
    return gpt


def some_tokens(seqlen: int = SMALL.context) -> torch.Tensor:
    return torch.randint(256, (2, seqlen), generator=torch.Generator().manual_seed(3))


def losses(attention: str = "standard", **changes) -> list[float]:
    config = train.TrainConfig(**{"steps": 6, "context": 40, "batch_size": 4, "warmup_steps": 2, **changes})
    gpt = model.GPT(SMALL, model.ATTENTIONS[attention])
    return [record.loss for record in train.train(gpt, TEXT, config)]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_later_byte_changes_its_own_logits_and_no_earlier_ones(attention):
    gpt, tokens = small_gpt(attention), some_tokens()
    changed = tokens.clone()
    changed[:, 23] = (changed[:, 23] + 1) % 256
    before, after = gpt(tokens), gpt(changed)
    assert torch.equal(before[:, :23], after[:, :23])
    assert (before[:, 23:] != after[:, 23:]).any(dim=(0, 2)).all()


@pytest.mark.parametrize("attention", ["tilewise", "sdpa"])
@pytest.mark.parametrize("seqlen", [1, 17, 40])
def test_attentions_agree_with_standard_as_closely_as_fp32_allows(attention, seqlen):
    tokens = some_tokens(seqlen)
    exact = small_gpt("standard", dtype=torch.float64)(tokens)
    standard = (small_gpt("standard")(tokens) - exact).abs().max()
    error = (small_gpt(attention)(tokens) - exact).abs().max()
    assert error <= 2 * standard + FP32_ROUNDOFF * exact.abs().max()


@pytest.mark.parametrize("attention", ["tilewise", "sdpa"])
def test_losses_agree_with_standard_at_every_step(attention):
    for ours, standard in zip(losses(attention), losses("standard"), strict=True):
        assert abs(ours - standard) < 1e-3


def test_grouped_heads_equal_repeated_heads():
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(2, 9, 4, 8, generator=generator)
    k, v = (torch.randn(2, 9, 2, 8, generator=generator) for _ in range(2))
    repeated = [torch.stack([x[:, :, h // 2] for h in range(4)], dim=2) for x in (k, v)]
    assert torch.equal(model.standard_attention(q, k, v), model.standard_attention(q, *repeated))


@pytest.mark.parametrize("shift", [1, 7, 20])
def test_rotary_products_depend_on_the_distance_alone(shift):
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    angles = model.rotary_angles(64, 16).double()

    def product(i: int, j: int) -> torch.Tensor:
        return (model.rotate(q, angles[i : i + 1]) * model.rotate(k, angles[j : j + 1])).sum()

    # The angles are rounded to fp32: those near 64 by up to 4e-6.
    torch.testing.assert_close(product(11, 4), product(11 + shift, 4 + shift), rtol=0, atol=1e-4)
    assert abs(product(11, 4) - product(11 + shift, 4)) > 1e-2


def test_rotary_keeps_lengths_and_leaves_position_0_alone():
    x = torch.randn(1, 30, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    turned = model.rotate(x, model.rotary_angles(30, 16).double())
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0])


def test_logits_do_not_depend_on_the_position_where_the_text_starts():
    gpt, tokens = small_gpt(dtype=torch.float64), some_tokens()
    before = gpt(tokens)
    gpt.angles = model.rotary_angles(SMALL.context + 9, SMALL.head_dim)[9:].double()
    torch.testing.assert_close(gpt(tokens), before, rtol=0, atol=1e-4)
    gpt.angles = torch.zeros_like(gpt.angles)
    assert (gpt(tokens) - before).abs().max() > 1e-2


def test_the_model_sees_the_order_of_bytes():
    gpt, tokens = small_gpt(), some_tokens()
    swapped = tokens.clone()
    swapped[:, [3, 4]] = tokens[:, [4, 3]]
    assert (gpt(tokens)[:, -1] - gpt(swapped)[:, -1]).abs().max() > 1e-3


def test_weights_follow_from_the_seed_and_not_from_the_attention():
    torch.manual_seed(123)
    a = model.GPT(SMALL, model.standard_attention, seed=4).state_dict()
    torch.manual_seed(321)
    b = model.GPT(SMALL, model.sdpa_attention, seed=4).state_dict()
    other = model.GPT(SMALL, model.standard_attention, seed=5).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embedding.weight"], other["embedding.weight"])


def test_an_untrained_model_gives_every_byte_about_the_same_chance():
    assert losses(steps=1)[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_too_many_tokens_and_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="41 tokens do not fit the model's context of 40"):
        small_gpt()(some_tokens(41))
    with pytest.raises(ValueError, match="heads_q 4 must be a multiple of heads_k 3"):
        model.GPTConfig(d_model=48, heads_q=4, heads_k=3)
    with pytest.raises(ValueError, match="d_model 100 must be heads_q 6 times an even head size"):
        model.GPTConfig(d_model=100)


def test_training_lowers_the_loss_and_is_reproducible():
    first = losses(steps=20)
    assert first == losses(steps=20)
    assert first[-1] < first[0] - 1
    assert losses(steps=20, seed=1) != first


def test_a_stopped_run_goes_on_with_the_same_losses():
    config = train.TrainConfig(steps=8, context=40, batch_size=4, warmup_steps=2)
    gpt = model.GPT(SMALL, model.standard_attention)
    optimizer = train.make_optimizer(gpt, config)
    before = list(itertools.islice(train.train(gpt, TEXT, config, optimizer=optimizer), 3))
    after = list(train.train(gpt, TEXT, config, optimizer=optimizer, start=3))
    assert [record.step for record in before + after] == list(range(8))
    assert [record.loss for record in before + after] == losses(steps=8)


def test_targets_are_the_bytes_that_follow_the_tokens():
    config = train.TrainConfig(steps=3, context=20, batch_size=5)
    text = bytes(range(200))
    drawn = list(train.batches(text, config))
    assert len(drawn) == 3
    for tokens, targets in drawn:
        assert torch.equal(targets, tokens + 1)
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(20))
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[2][0], next(train.batches(text, config, start=2))[0])


def test_the_shortest_text_has_one_row():
    config = train.TrainConfig(steps=1, context=20, batch_size=2)
    tokens, targets = next(train.batches(bytes(range(21)), config))
    assert tokens.tolist() == [list(range(20))] * 2
    assert targets.tolist() == [list(range(1, 21))] * 2


def test_a_text_shorter_than_the_context_is_refused_before_the_first_step():
    config = train.TrainConfig(context=20)
    with pytest.raises(ValueError, match=r"^the text has 20 bytes: a context of 20 needs at least 21$"):
        train.train(small_gpt(), bytes(20), config)


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    config = train.TrainConfig(steps=60, learning_rate=1.0, warmup_steps=10)
    rates = [train.learning_rate(config, step) for step in range(61)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[60] == pytest.approx(0.1)


def test_by_default_the_text_is_the_standard_library_the_same_each_time():
    text = train.load_text(None)
    assert text == train.load_text(None)
    assert 100_000 < len(text) <= train.STDLIB_BYTES
    assert b"import sys" in text
    assert b"\0" not in text


def test_load_text_returns_the_file_byte_for_byte(tmp_path):
    content = "naïve café\r\n\tλ → ∞\n".encode()
    (tmp_path / "text.txt").write_bytes(content)
    assert train.load_text(tmp_path / "text.txt") == content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "cannot read the text .*: No such file or directory", id="missing"),
        pytest.param(b"", "the text .* is empty", id="empty"),
        pytest.param(b"text with one \0 byte", "looks binary", id="nul"),
        pytest.param("text".encode("utf-16"), "looks binary", id="utf-16"),
        pytest.param(bytes(range(1, 256)) * 4, "looks binary", id="control-characters"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        train.load_text(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_directory_is_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the text .*: Is a directory"):
        train.load_text(tmp_path)
