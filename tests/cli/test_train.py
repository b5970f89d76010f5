"""`tilewise train` and `tilewise sample`: a stopped run goes on with the same losses, and bad input loses nothing."""

import json
import os
import signal

import pytest

from tests.cli.test_main import failed
from tilewise import cli
from tilewise.cli import checkout, train

TEXT = "def tile(row, column):\n    return row * column\n" * 4


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
    peak_bytes, calls = train.peak_bytes, []

    def interrupting(device):
        calls.append(device)
        if len(calls) in steps:
            os.kill(os.getpid(), signal.SIGINT)
        return peak_bytes(device)

    monkeypatch.setattr(train, "peak_bytes", interrupting)


@pytest.mark.parametrize("attention", ["tilewise", "standard"])
def test_a_run_stopped_by_ctrl_c_goes_on_with_the_same_losses(text, tmp_path, monkeypatch, capsys, attention):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert cli.main(arguments(text, whole, attention=attention)) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        assert cli.main(arguments(text, stopped, attention=attention)) == 130
    assert "stopped after step 3 of 6" in capsys.readouterr().err
    assert cli.main(arguments(text, stopped, attention=attention)) == 0
    assert "goes on after step 3" in capsys.readouterr().out
    assert losses(stopped) == losses(whole)
    assert len(losses(whole)) == 6


def test_the_second_ctrl_c_stops_at_once_and_leaves_the_last_checkpoint(text, tmp_path, monkeypatch, capsys):
    interrupt_after(monkeypatch, 3)
    save, began = train.Run.save, signal.getsignal(signal.SIGINT)

    def slow_save(run):
        if run.done == 3:
            os.kill(os.getpid(), signal.SIGINT)
        save(run)

    monkeypatch.setattr(train.Run, "save", slow_save)
    assert cli.main(arguments(text, tmp_path)) == 130
    assert "saved in" not in capsys.readouterr().err
    assert checkout.load_example("gpt", "checkpoint.py").load(tmp_path / train.CHECKPOINT).step == 2
    assert signal.getsignal(signal.SIGINT) is began


def test_the_end_is_a_table_a_plot_and_json(text, tmp_path, capsys):
    assert cli.main(arguments(text, tmp_path)) == 0
    record = json.loads((tmp_path / "train.json").read_text())
    assert record["settings"]["attention"] == "tilewise"
    assert record["settings"]["context"] == 12
    assert all(row["tokens_per_s"] > 0 and row["peak_bytes"] > 2**20 for row in record["steps"])
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")
    page = capsys.readouterr().out
    assert f"{record['steps'][-1]['loss']:.4f}" in page
    assert "tilewise sample" in page


def test_a_finished_run_is_shown_again_and_not_trained(text, tmp_path, capsys):
    assert cli.main(arguments(text, tmp_path)) == 0
    before = losses(tmp_path)
    assert cli.main(arguments(text, tmp_path)) == 0
    assert losses(tmp_path) == before


BAD_TEXT = {
    "missing": (None, {}, "cannot read the text"),
    "empty": (b"", {}, "is empty"),
    "binary": (bytes(range(256)), {}, "looks binary"),
    "shorter-than-the-context": (TEXT.encode(), {"context": 500}, "bytes: a context of 500 needs at least 501"),
    "attention": (TEXT.encode(), {"attention": "flash"}, "--attention flash: known are tilewise, standard, sdpa"),
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
    assert cli.main(arguments(text, tmp_path, steps=2)) == 0
    capsys.readouterr()
    before = (tmp_path / train.CHECKPOINT).read_bytes()
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
    assert (tmp_path / train.CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 damaged"])
@pytest.mark.parametrize("command", ["train", "sample"])
def test_a_file_that_is_no_checkpoint_is_refused_and_kept(command, content, text, tmp_path, capsys):
    (tmp_path / train.CHECKPOINT).write_bytes(content)
    given = arguments(text, tmp_path) if command == "train" else ["sample", "--out", str(tmp_path), "--device", "cpu"]
    assert "is no checkpoint" in failed(capsys, *given)
    assert (tmp_path / train.CHECKPOINT).read_bytes() == content


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(text, tmp_path, monkeypatch, capsys):
    assert cli.main(arguments(text, tmp_path, **{"learning-rate": 1e30})) == 2
    assert "lower --learning-rate" in capsys.readouterr().err
    kept = checkout.load_example("gpt", "checkpoint.py").load(tmp_path / train.CHECKPOINT)
    assert all(row["loss"] < float("inf") for row in kept.history)


def sampled(capsys, out, *more):
    capsys.readouterr()
    assert cli.main(["sample", "--out", str(out), "--length", "9", "--device", "cpu", *more]) == 0
    return capsys.readouterr().out


def test_sample_continues_the_prompt_the_same_for_the_same_seed(text, tmp_path, capsys):
    assert cli.main(arguments(text, tmp_path, steps=1)) == 0
    long = "λ naïve " * 10  # longer than the context
    first = sampled(capsys, tmp_path, "--prompt", long)
    assert first.startswith(long)
    assert len(first) > len(long)
    assert sampled(capsys, tmp_path, "--prompt", long) == first
    assert sampled(capsys, tmp_path, "--prompt", long, "--seed", "1") != first
    likeliest = [sampled(capsys, tmp_path, "--temperature", "0", "--seed", seed) for seed in ("0", "1")]
    assert likeliest[0] == likeliest[1]


def test_sample_says_what_is_missing(text, tmp_path, capsys):
    assert "does not exist: tilewise train --out" in failed(capsys, "sample", "--out", str(tmp_path / "none"))
    store = checkout.load_example("gpt", "checkpoint.py")
    store.save(tmp_path / train.CHECKPOINT, store.Checkpoint({"side": 32}, 0, [], {}, {}))
    assert "is the checkpoint of another program" in failed(capsys, "sample", "--out", str(tmp_path))
    assert cli.main(arguments(text, tmp_path / "new", steps=1)) == 0
    capsys.readouterr()
    assert "the prompt is empty" in failed(capsys, "sample", "--out", str(tmp_path / "new"), "--prompt", "")
