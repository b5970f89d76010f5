"""`tilewise tune`: what is right and fastest is kept, precedes the table, and survives a broken file."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from bench import cases
from bench import measure as clock
from bench.testing import call, poisoned, qkv
from tilewise import cli
from tilewise.backends import triton
from tilewise.backends.triton import config
from tilewise.backends.triton.host import tuned
from tilewise.backends.triton.host.runtime import Launch
from tilewise.backends.triton.tiles import Tiles

SMALL, OTHER, WRONG = Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)
SECONDS = {config.INTERPRETED.dq: 3.0, SMALL: 1.0, OTHER: 2.0, WRONG: 0.5}


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Candidates for the interpreter, of which WRONG computes nothing, and a clock that knows how long each takes."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    passes = config.INTERPRETED.passes
    tried = {
        "forward": (passes["forward"], SMALL, OTHER),
        "dkdv": (passes["dkdv"],),
        "dq": (passes["dq"], OTHER, WRONG),
    }
    monkeypatch.setattr(config, "candidates", lambda problem: tried)
    start, tiles_of = Launch.start, []

    def record(launch, *args):
        tiles_of.append(launch.tiles)
        return None if launch.tiles == WRONG else start(launch, *args)

    def seconds(run, calls, device):
        tiles_of.clear()
        run()
        return sum(SECONDS.get(tiles, 0.0) for tiles in tiles_of)

    monkeypatch.setattr(Launch, "start", record)
    monkeypatch.setattr(clock, "seconds_per_call", seconds)


@pytest.mark.skipif(not triton.interpreting(), reason="kernels are not interpreted (tests/conftest.py)")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_fastest_that_is_right_is_kept(launched, monkeypatch, capsys):
    case = replace(cases.named("contract-bfloat16-full"), batch=1, seqlen_q=20, seqlen_k=20, heads_q=1, heads_k=1)
    monkeypatch.setitem(cases.CASES, case.name, case)
    with poisoned():
        assert cli.main(["tune", "--device", "cpu", "--json", "--case", case.name]) == 1  # one candidate is wrong
    trials = json.loads(capsys.readouterr().out)
    found = {(t["name"], Tiles(**t["tiles"])): t for t in trials}
    assert [key for key, t in found.items() if t["wrong"]] == [("dq", WRONG)]
    assert "dq: rms nan" in found["dq", WRONG]["wrong"]
    kept = {name: tiles for (name, tiles), t in found.items() if t["kept"]}
    assert kept == {"forward": SMALL, "dkdv": config.INTERPRETED.dkdv, "dq": OTHER}
    assert tuned.passes(call(*qkv(dtype=torch.bfloat16)).p) == kept


def problem():
    return call(*qkv(dtype=torch.bfloat16)).p


def test_rows_precede_the_table_and_are_read_back(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    p = problem()
    tuned.store([tuned.Tuning.of(p, "forward", SMALL, 1.0), tuned.Tuning.of(p, "dkdv", SMALL, 1.0)])
    tuned.store(
        [tuned.Tuning.of(p, "dk", OTHER, 0.5), tuned.Tuning.of(p, "dv", SMALL, 0.5)]
    )  # two passes replace the one
    assert tuned.passes(p) == {"forward": SMALL, "dk": OTHER, "dv": SMALL}
    assert triton.Triton().config(p).passes == {"forward": SMALL, "dk": OTHER, "dv": SMALL, "dq": config.INTERPRETED.dq}
    assert tuned.passes(call(*qkv(d=32, dtype=torch.bfloat16)).p) == {}
    assert [f.name for f in tmp_path.iterdir()] == ["triton-tiles.json"]


def test_rows_that_another_process_has_stored_since_stay(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    p = problem()
    tuned.store([tuned.Tuning.of(p, "dq", SMALL, 1.0)])
    theirs = tuned.path().read_bytes()
    tuned.path().unlink()
    tuned.rows.cache_clear()
    assert tuned.passes(p) == {}  # what this process knows
    tuned.path().write_bytes(theirs)
    tuned.store([tuned.Tuning.of(p, "forward", SMALL, 1.0)])
    assert tuned.passes(p) == {"dq": SMALL, "forward": SMALL}


def test_a_file_that_cannot_be_read_is_ignored_with_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    tuned.path().write_text("{")
    tuned.rows.cache_clear()
    with pytest.warns(UserWarning, match="tilewise tune"):
        assert tuned.passes(problem()) == {}


def test_without_a_gpu_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(triton, "interpreting", lambda: False)
    assert cli.main(["tune", "--device", "cpu"]) == 2
    assert "on a GPU, and torch.cuda sees none" in capsys.readouterr().err
