"""Every file of results has the one form that bench/results/README.md describes."""

import json
from functools import partial
from pathlib import Path

import pytest

from bench import records
from bench.cases import CASES

RESULTS = Path(records.__file__).with_name("results")
FILES = sorted(RESULTS.glob("*.jsonl"))
REPORTS = {"context-cpu.json", "pathfinder-cpu.json"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_is_a_run_or_a_result_whose_run_names_its_contestant(path):
    found = records.read(path)
    runs = records.runs(found)
    for r in found:
        if r["record"] == "result":
            assert r["contestant"] in (*runs[r["run"]]["peers"], "bound"), r
            assert r["case"] in CASES or "shape" in r, r


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_run_measures_a_case_by_one_metric_once(path):
    named = ("run", "case", "contestant", "pass", "metric")
    keys = [tuple(r[n] for n in named) for r in records.read(path) if r["record"] == "result"]
    assert len(set(keys)) == len(keys)


def test_the_results_are_at_most_ten_files_that_their_readme_names():
    names = {path.name for path in RESULTS.iterdir()} - {"README.md"}
    assert len(names) < 10
    assert names == {path.name for path in FILES} | REPORTS
    said = (RESULTS / "README.md").read_text()
    assert all(f"`{name}`" in said for name in names)


RUN = {"record": "run", "run": "r1", "when": "2026-11-21", "command": "c", "device": "d"}
RUN |= {"versions": {}, "peers": {"cpu": "a backend"}, "sm_clock_mhz": None, "commit": None}
RESULT = records.result("r1", "cpu-fp32-d64-n1024-full", "cpu", "forward", "time", 1.5)


def test_faults_name_what_is_missing_or_wrong():
    assert records.faults(RUN) == records.faults(RESULT) == []
    assert records.faults({"record": "run", "run": "r1"})[0] == "when is missing"
    assert records.faults(RESULT | {"unit": "s"}) == ["'s' is not the unit of the metric 'time'"]
    assert "pass is 'sideways'" in records.faults(RESULT | {"pass": "sideways"})[0]
    assert records.faults(RESULT | {"value": None}) == ["a result without a value says why"]
    assert "status" in records.faults(RESULT | {"metric": "error", "unit": "of what is allowed"})[0]
    assert "no record" in records.faults([1, 2])[0]


def test_an_entry_is_all_that_a_contestant_did_on_a_case(tmp_path):
    made = partial(records.result, "r1", RESULT["case"])
    lines = [
        made("cpu", "both", "error", 0.5, status="green"),
        made("cpu", "both", "memory", 3, peak=5),
        made("cpu", "forward", "time", 1.0, low=0.9, high=1.1, noise=0.01, tflops=0.25, rounds=3),
        made("sdpa", "both", "error", None, status="refused", why=["no sinks"]),
        made("bound", "forward", "time", 0.5),
    ]
    path = tmp_path / "new" / "x.jsonl"
    records.append([RUN, *lines], path)
    found = records.read(path)
    mine, other = records.entries(found)
    assert mine["forward"] == {"median_ms": 1.0, "low_ms": 0.9, "high_ms": 1.1, "noise": 0.01, "tflops": 0.25}
    assert (mine["status"], mine["share"]) == ("green", 0.5)
    assert mine["memory"] == {"extra_bytes": 3 << 20, "peak_bytes": 5 << 20}
    assert (other["status"], other["why"]) == ("refused", ["no sinks"])
    assert [r["value"] for r in records.select(found, contestant="bound", direction="forward")] == [0.5]
    assert [records.rate(r) for r in records.select(found, metric="time", contestant="cpu")] == [0.25]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{not json", "line 1: no JSON"),
        ("[1, 2]", "line 1: no record"),
        ('{"record": "result", "run": "p1"}', "line 1: case is missing"),
        (json.dumps(RESULT), "without the record of their run"),
        ("", "is empty"),
    ],
)
def test_a_file_that_is_no_file_of_results_is_refused(tmp_path, text, says):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(records.Refused, match=says):
        records.read(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(records.Refused, match=r"gone\.jsonl cannot be read"):
        records.read(tmp_path / "gone.jsonl")
