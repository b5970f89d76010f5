"""The demo's parts on small pieces: what it measures, what it prints and writes, when it says no."""

import json
from types import SimpleNamespace

import pytest

from bench import demo, plots
from bench.cases import named
from tilewise import cli
from tilewise import device as devices
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host import compiler, library


def point(seqlen, standard=True):
    timed = {"both": {"median_ms": seqlen / 100}, "memory": {"peak_bytes": seqlen << 10}}
    refused = {"why": ["its N × N matrices would take 12.0 GiB, more than half of the free 16.0 GiB"]}
    results = {"tilewise": timed, "sdpa": timed, "eager": timed if standard else refused}
    return {"seqlen": seqlen, "standard_bytes": 12 << 30, "results": results}


SCALING = {"shape": "batch 1, 4 heads", "points": [point(512), point(1024), point(2048, standard=False)]}


def test_exactness_compares_with_float64_on_named_cases(monkeypatch, capsys):
    monkeypatch.setattr(demo, "tagged", lambda *tags: [named("exact-causal"), named("exact-packed")])
    rows = demo.exactness("cpu")
    assert all(row["green"] for row in rows)
    assert 0 < rows[0]["o"]["tilewise"] < 1e-6
    said = capsys.readouterr().out
    assert said.count("agrees") == 3
    assert "red" not in said


def test_training_twice_gives_the_same_losses():
    found = demo.train_twice("cpu", steps=2)
    assert found["agrees"]
    assert found["largest_gap"] <= 1e-3
    assert len(found["loss"]["standard"]) == len(found["loss"]["tilewise"]) == 2
    assert found["loss"]["tilewise"][0] == pytest.approx(5.5, abs=0.5)


def test_a_size_that_dies_in_its_process_is_one_clear_error(monkeypatch):
    died = SimpleNamespace(returncode=-9, stderr="")
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: died)
    with pytest.raises(ValueError, match="measuring demo-cpu-n512 stopped: exit code -9"):
        demo.measured_apart("cpu", "demo-cpu-n512")


def test_a_size_is_measured_in_a_process_of_its_own():
    results = demo.measured_apart("cpu", "contract-n63-causal")
    assert list(results) == list(demo.NAMES)
    assert all(r["memory"]["peak_bytes"] >= 0 and r["both"]["median_ms"] > 0 for r in results.values())


def test_the_table_says_where_standard_attention_stops_and_why(capsys):
    demo._print_scaling(SCALING)
    said = " ".join(capsys.readouterr().out.split())
    assert "standard at N = 2,048 was not run: its N × N matrices would take 12.0 GiB, more than half" in said
    assert "2,048 20.5 2 – – 20.5 2" in said


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.04164, "0.0416"), (8.2, "8.20"), (99.96, "100"), (0.9996, "1.00"), (99.94, "99.9"), (12345, "12,300")],
)
def test_times_have_three_digits(number, text):
    assert demo.three_digits(number) == text


@pytest.fixture
def hopper(monkeypatch):
    """As if the device were a Hopper GPU; the kernels that would be built are written down."""
    built = []
    monkeypatch.setattr(devices, "of", lambda device: SimpleNamespace(capability=(9, 0), cores=132))
    monkeypatch.setattr(library, "here", lambda config: None)
    monkeypatch.setattr(library, "build_before_use", lambda configs, jobs: built.extend(configs) or [])
    monkeypatch.setattr(compiler, "unusable", lambda: "")
    return built


def test_on_a_hopper_gpu_the_demo_builds_the_kernels_that_its_calls_need(hopper):
    demo.hopper_kernels("cpu", longest=16384)
    calls = demo.problems("cpu", 16384)
    assert {p.seqlen_q for p in calls} == {384, 512, 1024, 2048, 4096, 8192, 16384}
    assert set(hopper) == {config for p in calls for config in Hopper().configs(p)}
    assert 4 <= len(hopper) == len(set(hopper)) <= 12


def test_without_their_compiler_the_demo_says_so_and_goes_on(hopper, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "unusable", lambda: "there is no compiler")
    demo.hopper_kernels("cpu", longest=512)
    assert hopper == []
    said = " ".join(capsys.readouterr().out.split())
    assert "kernels are not built, and there is no compiler; pip install 'tilewise[kernels]'" in said


@pytest.mark.parametrize(("gap", "code"), [(1e-3, 0), (1.1e-3, 1)])
def test_the_whole_demo_writes_its_figure_and_numbers_and_fails_on_a_gap(monkeypatch, tmp_path, capsys, gap, code):
    def trained(device, steps):
        losses = {"standard": [5.0, 4.0], "tilewise": [5.0, 4.0 + gap]}
        return {"loss": losses, "largest_gap": gap, "agrees": gap <= demo.TIGHT}

    monkeypatch.setattr(demo, "exactness", lambda device: [{"green": True}])
    monkeypatch.setattr(demo, "time_and_memory", lambda device, longest: SCALING)
    monkeypatch.setattr(demo, "train_twice", trained)
    assert cli.main(["demo", "--out", str(tmp_path / "made"), "--device", "cpu"]) == code
    closing = capsys.readouterr().out.splitlines()[-1]
    assert closing.startswith("Figure: ")
    assert "demo.png" in closing
    assert "demo.json" in closing
    record = json.loads((tmp_path / "made" / "demo.json").read_text())
    assert set(record) == {"machine", "exactness", "scaling", "training", "green"}
    assert (tmp_path / "made" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_survives_a_contestant_that_never_ran(tmp_path):
    points = [point(512, standard=False), point(1024, standard=False)]
    machine = {"device": "a machine", "threads": 2, "versions": {"torch": "2"}}
    training = {"loss": {"standard": [1.0], "tilewise": [1.0]}, "largest_gap": 0.0}
    record = {"machine": machine, "scaling": {"shape": "", "points": points}, "training": training}
    plots.demo(record).savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("load", "environment", "said"),
    [
        (0.4, {}, False),
        (1.0, {}, True),
        (3.0, {"GOMP_SPINCOUNT": "0"}, False),
        (3.0, {"OMP_WAIT_POLICY": "passive"}, False),
    ],
)
def test_a_busy_machine_is_told_what_helps_unless_it_is_set(load, environment, said):
    assert ("GOMP_SPINCOUNT" in demo.busy_hint(load, 2, environment)) == said
