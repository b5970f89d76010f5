"""The GPU script's processes: what they wrote stays, whatever becomes of them."""

import json
import os
import time

import pytest

from bench import gpu_triton
from bench.gpu_triton import Job, Run, Worker, summary

SCRIPT = """
import os
from bench import gpu_triton

def work(worker):
    def die():
        os._exit(11)
    def fail():
        raise RuntimeError("outer") from ValueError("the cause")
    worker.each({"first": lambda: {"state": "ok"}, "bad": fail, "deadly": die, "last": lambda: {"state": "ok"}})

gpu_triton.WORKERS = {"work": work}
gpu_triton.main()
"""


@pytest.fixture
def a_run(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(gpu_triton, "__file__", str(script))
    return Run(tmp_path / "out", 5.0, "cpu")


def states(run: Run) -> dict[str, str]:
    return {row["item"]: row["state"] for row in run.rows() if "item" in row}


def test_a_job_that_dies_goes_on_after_the_item_it_died_in(a_run):
    a_run.all([Job("work:0/1", 60)])
    assert states(a_run) == {"first": "ok", "bad": "error", "deadly": "begun", "last": "ok"}
    ends = [row["detail"] for row in a_run.rows() if row["part"] == "job"]
    assert [end.partition(":")[0] for end in ends] == ["exit code 11", ""]
    said = "\n".join(summary(a_run))
    assert "ValueError: the cause" in said
    assert "deadly: begun" in said


def test_a_job_past_its_limit_is_ended_and_keeps_its_lines(a_run):
    row = json.dumps({"item": "quick", "state": "ok"})
    code = f"import time; open({str(a_run.file)!r}, 'a').write({row + chr(10)!r}); time.sleep(60)"
    began = time.monotonic()
    a_run.all([Job("hang", 4, ("-c", code))])
    assert time.monotonic() - began < 30
    assert states(a_run) == {"quick": "ok"}
    assert a_run.rows()[-1]["detail"].startswith("no end in 4 s")


def test_no_job_starts_in_the_time_of_those_that_come_after(a_run):
    a_run.all([Job("work", 60)], reserve=299)
    assert [row.get("detail") for row in a_run.rows()] == ["out of time"]


def test_failing_tests_are_named_with_the_end_of_their_traceback(a_run, tmp_path):
    test = tmp_path / "test_two.py"
    test.write_text("def test_right(): pass\ndef test_wrong(): assert 1 == 2\n")
    a_run.all([gpu_triton.pytest_job(a_run, "tests", 60, 1, str(test), "--rootdir", str(tmp_path), "-c", os.devnull)])
    found = {row["item"].partition("::")[2]: row for row in a_run.rows() if row["part"] == "tests"}
    assert {name: row["state"] for name, row in found.items()} == {"test_right": "ok", "test_wrong": "wrong"}
    assert "assert 1 == 2" in found["test_wrong"]["detail"]


def test_shares_are_every_item_once(tmp_path):
    shares = [Worker(Run(tmp_path, 1.0), f"contract:{k}/3").share(list(range(10))) for k in range(3)]
    assert sorted(item for share in shares for item in share) == list(range(10))


def test_every_goal_of_triton_has_its_contestants_in_the_run():
    runs = gpu_triton.SETTINGS["cuda"].goals
    for goal in gpu_triton.compare.load_goals():
        if goal.contestant == "triton":
            assert "triton" in runs[goal.case], goal.name
            assert goal.peer in runs[goal.peer_case or goal.case], goal.name


def test_cases_that_a_goal_compares_are_timed_together():
    groups = gpu_triton.timed_together(gpu_triton.SETTINGS["short"].goals)
    assert sorted(name for group in groups for name in group) == sorted(gpu_triton.SETTINGS["short"].goals)
    place = {name: n for n, group in enumerate(groups) for name in group}
    for goal in gpu_triton.compare.load_goals():
        if goal.contestant == "triton" and goal.peer_case:
            assert place[goal.case] == place[goal.peer_case], goal.name


def test_the_fastest_tiles_count_only_where_every_problem_was_timed(tmp_path, monkeypatch):
    stored = []
    monkeypatch.setattr(gpu_triton.tuned, "store", stored.extend)
    monkeypatch.setattr(gpu_triton.tuned.Row, "of", lambda p, name, tiles, ms: (name, tiles.describe(), ms))
    worker = Worker(Run(tmp_path, 1.0, "cpu"), "tiles")
    a, b, only_full = (tiles.describe() for tiles in gpu_triton.rows_of("forward", 64)[:3])
    for mask, ms in (("full", {a: 2.0, b: 3.0, only_full: 1.0}), ("causal", {a: 2.0, b: 1.0})):
        worker.emit(item=f"d64 {mask} forward", state="ok", kernel="forward", head_dim=64, ms=ms)
    found = gpu_triton.kept(worker, gpu_triton.problem(64, 64, None, "cpu"))
    assert found["kept"] == {"forward": b}
    assert stored == [("forward", b, 5.0)]
    assert json.loads(worker.run.file.read_text().splitlines()[0])["kernel"] == "forward"
