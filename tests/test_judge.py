"""The judge of a GPU's backends without a GPU: its processes, what it checks, and a rehearsal of every part."""

import json
import os
import time
from collections.abc import Callable

import pytest

from bench import records
from bench.testing import call, qkv
from tests.judge import __main__ as judge
from tests.judge import check, hopper, jobs, stress, triton
from tests.judge.jobs import Job, Run, Worker
from tests.judge.subject import SCALES, Kernel, Subject, subject
from tilewise.backends.base import Output
from tilewise.backends.hopper.forward import config
from tilewise.backends.portable import Portable

# ---- processes with a time limit ------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, time
from pathlib import Path
from tests.judge.jobs import Item, Run, Worker

def die(): os._exit(11)
def fail(): raise RuntimeError("outer") from ValueError("the cause")
def hang(): time.sleep(60)
def work(): return {"state": "ok"}

items = {"first": work, "bad": fail, "deadly": die, "stuck": hang, "last": work}
if sys.argv[-1] == "groups":
    items = {"a 1": die, "a 2": work, "b 1": work}
run = Run(Path(sys.argv[1]), 5.0)
Worker(run, sys.argv[-1]).each(Item(name, done, name[0] if name[1] == " " else "") for name, done in items.items())
"""


@pytest.fixture
def a_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return Run(tmp_path / "out", 5.0, (str(script), str(tmp_path / "out")))


def states(run: Run) -> dict[str, str]:
    return {row["item"]: row["state"] for row in run.items()}


def test_a_job_that_dies_or_hangs_goes_on_after_the_item_it_was_at(a_run):
    a_run.all([Job("work:0/1", 60, item_limit=2)])
    assert states(a_run) == {"first": "ok", "bad": "error", "deadly": "begun", "stuck": "begun", "last": "ok"}
    ends = [row["detail"] for row in a_run.rows() if row["part"] == "job"]
    assert [end.partition(":")[0] for end in ends] == ["exit code 11", "no end in 2 s of an item", ""]
    said = "\n".join(judge.summary(a_run))
    assert "ValueError: the cause" in said
    assert "deadly: begun" in said


def test_of_a_group_in_which_an_item_died_the_rest_is_given_up(a_run):
    a_run.all([Job("groups", 60)])
    assert states(a_run) == {"a 1": "begun", "b 1": "ok"}


def test_a_job_past_its_limit_is_ended_and_keeps_its_lines(a_run):
    row = json.dumps({"job": "hang", "item": "quick", "state": "ok"})
    code = f"import time; open({str(a_run.file)!r}, 'a').write({row + chr(10)!r}); time.sleep(60)"
    began = time.monotonic()
    a_run.all([Job("hang", 4, command=("-c", code))])
    assert time.monotonic() - began < 30
    assert states(a_run) == {"quick": "ok"}
    assert a_run.rows()[-1]["detail"].startswith("no end in its time")


def test_no_job_starts_in_the_time_of_those_that_come_after(a_run):
    a_run.all([Job("work", 60)], reserve=299)
    assert [row.get("detail") for row in a_run.rows()] == ["out of time"]


def test_failing_tests_are_named_with_the_end_of_their_traceback(a_run, tmp_path):
    test = tmp_path / "test_two.py"
    test.write_text("def test_right(): pass\ndef test_wrong(): assert 1 == 2\n")
    a_run.all([jobs.pytest_job(a_run, "tests", 60, 1, str(test), "--rootdir", str(tmp_path), "-c", os.devnull)])
    found = {row["item"].partition("::")[2]: row for row in a_run.rows() if row["part"] == "tests"}
    assert {name: row["state"] for name, row in found.items()} == {"test_right": "ok", "test_wrong": "wrong"}
    assert "assert 1 == 2" in found["test_wrong"]["detail"]


def test_shares_are_every_item_once(tmp_path):
    shares = [Worker(Run(tmp_path, 1.0), f"contract:{k}/3").share(list(range(10))) for k in range(3)]
    assert sorted(item for share in shares for item in share) == list(range(10))


# ---- what is checked ------------------------------------------------------------------------------------------------


class Off(Portable):
    """The portable backend, whose o is off by so much, and by more each time."""

    def __init__(self, by: float, growing: float = 0.0):
        super().__init__()
        self.by, self.growing = by, growing

    def forward(self, p, t) -> Output:
        out, self.by = super().forward(p, t), self.by + self.growing
        return Output(out.o + self.by, out.lse)


def row_of(made: Callable[[], Portable], direction: str = "both") -> dict:
    return check.checked(Kernel("k", direction, None, made, lambda: iter(())), check.Judged(call(*qkv(nq=20, nk=20))))


def test_a_kernel_is_right_wrong_or_gives_other_bits():
    assert (
        row_of(Portable)["state"]
        == row_of(Portable, "forward")["state"]
        == row_of(Portable, "backward")["state"]
        == "ok"
    )
    wrong = row_of(lambda: Off(0.1), "forward")
    assert wrong["state"] == "wrong"
    assert "o: rms" in wrong["detail"]
    assert "elements far off" in wrong["detail"]
    assert "a later run gave other bits of o" in row_of(lambda: Off(0.0, 1e-6), "forward")["detail"]


def test_what_cannot_run_is_refused_with_its_reasons():
    class Refusing(Portable):
        def unsupported(self, p) -> list[str]:
            return ["no", "never"]

    assert row_of(Refusing) == {"state": "refused", "detail": "no; never"}


def test_kernels_of_a_kind_share_what_judges_a_call():
    calls = [("one", call(*qkv(nq=5, nk=5)))]
    kernels = [Kernel(name, "forward", "same", Portable, lambda: iter(calls)) for name in "ab"]
    items = list(check.of_kernels(kernels))
    assert [(item.name, item.group) for item in items] == [("a one", "a"), ("b one", "b")]
    assert items[0].work.args[1] is items[1].work.args[1]


def test_a_kernel_is_proven_where_every_call_was_right(monkeypatch, tmp_path):
    monkeypatch.setattr(hopper.proven, "PROVEN", tmp_path / "proven.txt")
    made = subject("hopper", "cuda")

    def counted(name: str, cubin: str, right: int, of: int) -> dict:
        more = {"of": of, "program": "p", "cubin": cubin}
        return records.result("r1", "check-kernels", name, "forward", "right", right, **more)

    check.prove(made, [counted("right", "11", 2, 2), counted("wrong", "22", 1, 2), counted("idle", "44", 0, 0)])
    assert hopper.proven.proofs() == {"right": ("p", "11", 2)}


def test_a_kernel_whose_program_was_right_before_is_not_checked_again(built, monkeypatch):
    first, *others = (k.name for k in built.kernels())
    monkeypatch.setattr(hopper.proven, "waiting", lambda programs: [name for name in programs if name != first])
    assert [k.name for k in built.waiting()] == others


@pytest.mark.parametrize("right", [True, False])
def test_a_release_is_proven_where_all_was_right(right, monkeypatch, tmp_path, capsys):
    """It checks every kernel again, and a part that ends early judges nothing."""
    seen = []

    def phase(run, made, part):
        seen.append((part, run.again))
        run.add(part=part, job=part, item="one", state="ok")
        run.add(part="job", job=f"job {part}", state="ended", detail="" if right else "out of time")

    monkeypatch.setattr(check, "phase", phase)
    monkeypatch.setattr(check, "prove", lambda made, found: "remembered")
    words = ["release", "--backend", "portable", "--device", "cpu", "--out", str(tmp_path / "release.jsonl")]
    assert judge.main(words) == (not right)
    assert seen == [(part, True) for part in check.PARTS]
    assert ("remembered" in capsys.readouterr().out) == right


@pytest.fixture
def built(monkeypatch) -> Subject:
    """The Hopper backend with every kernel built."""
    monkeypatch.setattr(hopper.kernel_files, "index", lambda: {x.name: {"program": "p"} for x in hopper.every()})
    monkeypatch.setattr(hopper.proven, "cubin_hash", lambda file: f"cubin of {file.stem}")
    return subject("hopper", "cuda")


def test_every_kernel_that_is_built_is_checked_those_that_stand_for_all_first(built):
    kernels = built.kernels()
    assert len({k.name for k in kernels}) == len(kernels) > 100
    first = [k.name.startswith(hopper.PROBES) for k in kernels]
    assert first == sorted(first, reverse=True)
    assert any(first)
    kinds = [(k.kind, k.direction) for k in kernels if not k.name.startswith(hopper.PROBES)]
    assert len(set(kinds)) == sum(a != b for a, b in zip(kinds, [None, *kinds], strict=False))


def test_a_tables_backward_is_checked_beside_the_tables_forward_also_where_few_queries_would_take_another():
    tables = [x for x in hopper.every() if isinstance(x, hopper.Backward) and x.score == "table"]
    found = [hopper.kernel_of(x).backend() for x in tables]
    assert len(found) == 4
    assert all(b.override.score == "table" and b.override_backward == x for b, x in zip(found, tables, strict=True))
    assert len({b.override.name for b in found}) == 4


def test_calls_of_every_form_of_kernel_are_made_on_a_cpu():
    sizes = hopper.Sizes(shapes=[(1, 9, 12, 2, 1)] * 4, packed=hopper.PACKED[2:], device="cpu")
    for form in hopper.FORM_OPTIONS:
        x = next(x for x in config.shipped() if x.form == form)
        assert len(dict(hopper.check_calls(x, sizes))) >= 1


def test_every_candidate_of_tritons_tiles_is_in_a_mixture():
    kernels = triton.TritonSubject(SCALES["cuda"]).kernels()
    mixed = [k.backend.args[0].passes for k in kernels]
    for name in triton.PASSES:
        for d in SCALES["cuda"].head_dims:
            tiles = {passes[name] for k, passes in zip(kernels, mixed, strict=True) if k.kind == d and name in passes}
            assert tiles >= set(triton.rows_of(name, d))


# ---- a rehearsal ----------------------------------------------------------------------------------------------------


def test_a_rehearsal_of_every_part_leaves_results_of_the_one_form(tmp_path, capsys):
    out, parts = tmp_path / "results.jsonl", "contract,features,kernels,dropout,launches,busy"
    words = ["check", "--backend", "cpu", "--device", "cpu", "--inline", "--out", str(out)]
    assert judge.main([*words, "--parts", parts]) == 0
    head, *found = records.read(out)
    assert head["command"] == "python -m tests.judge check --backend cpu"
    assert {r["contestant"] for r in found} <= set(head["peers"])
    assert {r["case"] for r in found} >= {"check-contract", "check-launches", "check-busy"}
    said = capsys.readouterr().out
    assert all(f"{part}: " in said for part in parts.split(","))


def test_a_part_runs_in_a_process_of_its_own(tmp_path):
    out = tmp_path / "results.jsonl"
    words = ["check", "--backend", "portable", "--device", "cpu", "--parts", "contract", "--out", str(out)]
    assert judge.main(words) == 0
    (right,) = records.select(records.read(out), metric="right")
    assert (right["value"], right["of"], right["contestant"]) == (2, 2, "portable")


def test_launches_that_give_other_bits_are_wrong(monkeypatch):
    made = Subject("portable", SCALES["cpu"])
    monkeypatch.setattr(made, "backend", lambda: Off(0.0, 1e-4))
    row = stress.launched(made, 0, compares=False)
    assert row["state"] == "wrong"
    assert "other bits of o" in row["detail"]


def test_unknown_parts_are_refused_with_the_known(capsys):
    with pytest.raises(SystemExit):
        judge.main(["check", "--backend", "portable", "--parts", "contract,tilts"])
    assert "no part is called tilts; there are contract, features" in capsys.readouterr().err
