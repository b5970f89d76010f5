"""examples/gpt/run.py: a stopped run goes on with the same losses, bad input loses nothing, bytes come by the model's distribution."""

import json
import os
import signal

import pytest
import torch

from examples.gpt import checkpoint, run
from examples.gpt.run import generate

TEXT = "def tile(row, column):\n    return row * column\n" * 4


def failed(capsys, *arguments):
    """Runs a command that must fail as a user's mistake does; returns its line on stderr."""
    assert run.main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.py"
    path.write_text(TEXT)
    return path


def arguments(path, out, **changes):
    options = {"text": path, "context": 12, "batch": 2, "steps": 6, "save-every": 2, "out": out, "device": "cpu"}
    return ["train", *(str(x) for name, value in (options | changes).items() for x in (f"--{name}", value))]


def losses(out):
    return [row["loss"] for row in json.loads((out / "train.json").read_text())["steps"]]


def interrupt_after(monkeypatch, *steps):
    """Sends this process SIGINT, as Ctrl-C does, once each of the steps is measured."""
    peak_bytes, calls = run.peak_bytes, []

    def interrupting(device):
        calls.append(device)
        if len(calls) in steps:
            os.kill(os.getpid(), signal.SIGINT)
        return peak_bytes(device)

    monkeypatch.setattr(run, "peak_bytes", interrupting)


@pytest.mark.parametrize("attention", ["tilewise", "standard"])
def test_a_run_stopped_by_ctrl_c_goes_on_with_the_same_losses(text, tmp_path, monkeypatch, capsys, attention):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run.main(arguments(text, whole, attention=attention)) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        assert run.main(arguments(text, stopped, attention=attention)) == 130
    assert "stopped after step 3 of 6" in capsys.readouterr().err
    assert run.main(arguments(text, stopped, attention=attention)) == 0
    assert "goes on after step 3" in capsys.readouterr().out
    assert losses(stopped) == losses(whole)
    assert len(losses(whole)) == 6


def test_the_second_ctrl_c_stops_at_once_and_leaves_the_last_checkpoint(text, tmp_path, monkeypatch, capsys):
    interrupt_after(monkeypatch, 3)
    save, began = run.Run.save, signal.getsignal(signal.SIGINT)

    def slow_save(taken):
        if taken.done == 3:
            os.kill(os.getpid(), signal.SIGINT)
        save(taken)

    monkeypatch.setattr(run.Run, "save", slow_save)
    assert run.main(arguments(text, tmp_path)) == 130
    assert "saved in" not in capsys.readouterr().err
    assert checkpoint.load(tmp_path / run.CHECKPOINT).step == 2
    assert signal.getsignal(signal.SIGINT) is began


def test_the_end_is_a_plot_and_json(text, tmp_path, capsys):
    assert run.main(arguments(text, tmp_path)) == 0
    record = json.loads((tmp_path / "train.json").read_text())
    assert record["settings"]["attention"] == "tilewise"
    assert record["settings"]["context"] == 12
    assert all(row["tokens_per_s"] > 0 and row["peak_bytes"] > 2**20 for row in record["steps"])
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")
    page = capsys.readouterr().out
    assert f"{record['steps'][-1]['loss']:.4f}" in page
    assert "Continue a text: sample --out" in page


def test_a_finished_run_is_shown_again_and_not_trained(text, tmp_path, capsys):
    assert run.main(arguments(text, tmp_path)) == 0
    before = losses(tmp_path)
    assert run.main(arguments(text, tmp_path)) == 0
    assert losses(tmp_path) == before


BAD_TEXT = {
    "missing": (None, {}, "cannot read the text"),
    "empty": (b"", {}, "is empty"),
    "binary": (bytes(range(256)), {}, "looks binary"),
    "shorter-than-the-context": (TEXT.encode(), {"context": 500}, "bytes: a context of 500 needs at least 501"),
    "device": (TEXT.encode(), {"device": "tpu9"}, "--device tpu9"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_input_is_one_line_and_writes_nothing(name, tmp_path, capsys):
    content, changes, says = BAD_TEXT[name]
    path, out = tmp_path / "text", tmp_path / "out"
    if content is not None:
        path.write_bytes(content)
    assert says in failed(capsys, *arguments(path, out, **changes))
    assert not out.exists()


def test_a_checkpoint_of_another_run_is_refused_and_kept(text, tmp_path, capsys):
    assert run.main(arguments(text, tmp_path, steps=2)) == 0
    capsys.readouterr()
    before = (tmp_path / run.CHECKPOINT).read_bytes()
    other = tmp_path / "other.py"
    other.write_text(TEXT.upper())
    for changes, says in (
        ({"context": 13}, "context 12 there, 13 here"),
        ({"attention": "sdpa"}, "attention tilewise there, sdpa here"),
        ({"text": other}, "text 188 bytes, sha256 "),
    ):
        line = failed(capsys, *arguments(text, tmp_path, **{"steps": 2, **changes}))
        assert "is of another run" in line
        assert says in line
    assert (tmp_path / run.CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 damaged"])
@pytest.mark.parametrize("command", ["train", "sample"])
def test_a_file_that_is_no_checkpoint_is_refused_and_kept(command, content, text, tmp_path, capsys):
    (tmp_path / run.CHECKPOINT).write_bytes(content)
    given = arguments(text, tmp_path) if command == "train" else ["sample", "--out", str(tmp_path), "--device", "cpu"]
    assert "is no checkpoint" in failed(capsys, *given)
    assert (tmp_path / run.CHECKPOINT).read_bytes() == content


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(text, tmp_path, monkeypatch, capsys):
    assert run.main(arguments(text, tmp_path, **{"learning-rate": 1e30})) == 2
    assert "lower --learning-rate" in capsys.readouterr().err
    kept = checkpoint.load(tmp_path / run.CHECKPOINT)
    assert all(row["loss"] < float("inf") for row in kept.history)


def sampled(capsys, out, *more):
    capsys.readouterr()
    assert run.main(["sample", "--out", str(out), "--length", "9", "--device", "cpu", *more]) == 0
    return capsys.readouterr().out


def test_sample_continues_the_prompt_the_same_for_the_same_seed(text, tmp_path, capsys):
    assert run.main(arguments(text, tmp_path, steps=1)) == 0
    long = "λ naïve " * 10  # longer than the context
    first = sampled(capsys, tmp_path, "--prompt", long)
    assert first.startswith(long)
    assert len(first) > len(long)
    assert sampled(capsys, tmp_path, "--prompt", long) == first
    assert sampled(capsys, tmp_path, "--prompt", long, "--seed", "1") != first
    likeliest = [sampled(capsys, tmp_path, "--temperature", "0", "--seed", seed) for seed in ("0", "1")]
    assert likeliest[0] == likeliest[1]


def test_sample_says_what_is_missing(text, tmp_path, capsys):
    assert "does not exist: train --out" in failed(capsys, "sample", "--out", str(tmp_path / "none"))
    checkpoint.save(tmp_path / run.CHECKPOINT, checkpoint.Checkpoint({"side": 32}, 0, [], {}, {}))
    assert "is the checkpoint of another program" in failed(capsys, "sample", "--out", str(tmp_path))
    assert run.main(arguments(text, tmp_path / "new", steps=1)) == 0
    capsys.readouterr()
    assert "the prompt is empty" in failed(capsys, "sample", "--out", str(tmp_path / "new"), "--prompt", "")


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
