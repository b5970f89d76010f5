"""`tilewise bench` on the smallest case, and its judgement of files."""

import json

import pytest

from bench import compare, records
from tilewise import cli

CASE = "cpu-fp32-d64-n4096-full"
RUN = {"record": "run"} | dict.fromkeys(records.RUN)


@pytest.fixture
def results_file(tmp_path):
    """Writes results of one run in which portable took `ms` and SDPA 1 ms."""

    def write(ms, peer_process="p1"):
        found = [RUN | {"run": "p1"}, RUN | {"run": "p2"}]
        for run, who, time in (("p1", "portable", ms), (peer_process, "sdpa", 1.0)):
            found += [records.result(run, CASE, who, direction, "time", time) for direction in ("forward", "both")]
        path = tmp_path / "results.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in found))
        return str(path)

    return write


def test_a_case_is_measured_into_json_and_a_file(capsys, tmp_path):
    out = tmp_path / "r.jsonl"
    who = ["--contestant", "portable", "--contestant", "eager", "--contestant", "flex"]
    options = ["--device", "cpu", "--budget", "0", "--out", str(out), "--json"]
    assert cli.main(["bench", "--case", "contract-n63-causal", *who, *options]) == 0
    head, portable, eager, flex = json.loads(capsys.readouterr().out)
    assert head["record"] == "run"
    assert (portable["contestant"], portable["status"]) == ("portable", "green")
    assert {"forward", "backward", "both", "memory", "share"} <= set(portable)
    assert eager["contestant"] == "eager"
    assert flex["status"] == "refused"
    written = records.read(out)
    assert written[0] == head
    told = [(e["contestant"], e["status"], set(e)) for e in records.entries(written)]
    assert [t[:2] for t in told] == [("portable", "green"), ("eager", eager["status"]), ("flex", "refused")]
    assert {"forward", "backward", "both", "memory"} <= told[0][2]


def test_a_case_is_printed_as_a_table(capsys, tmp_path):
    options = ["--contestant", "portable", "--contestant", "sdpa", "--device", "cpu", "--budget", "0"]
    assert cli.main(["bench", "--case", "contract-alibi", *options, "--out", str(tmp_path / "r.jsonl")]) == 0
    page = capsys.readouterr().out
    assert "green" in page
    assert "sdpa refused: scores" in page
    assert "checked: every query and every key" in page


def test_check_meets_and_falls_short_by_exit_code(capsys, results_file):
    assert cli.main(["bench", "--check", results_file(1.5)]) == 0
    assert "meets" in capsys.readouterr().out
    assert cli.main(["bench", "--check", results_file(2.5)]) == 1
    assert "falls short" in capsys.readouterr().out


def test_check_refuses_peers_of_another_process(capsys, results_file):
    assert cli.main(["bench", "--check", results_file(1.0, peer_process="p2")]) == 2
    assert "did not run in the same process" in capsys.readouterr().err


def test_check_json_has_a_verdict_for_every_goal(capsys, results_file):
    assert cli.main(["bench", "--check", results_file(1.0), "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert len(verdicts) == len(compare.load_goals())
    fields = {"case", "tag", "direction", "contestant", "peer", "peer_case", "ratio", "mib"}
    assert set(verdicts[0]) == fields | {"verdict", "measured", "noise", "why"}
    assert {v["verdict"] for v in verdicts} == {"meets", "not measured"}


def test_check_refuses_a_file_that_no_goal_asks_about(capsys, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text(json.dumps(RUN | {"run": "p1"}) + "\n")
    assert cli.main(["bench", "--check", str(path)]) == 2
    assert "holds no result that a goal" in capsys.readouterr().err


def test_list_json_is_the_table_of_cases(capsys):
    assert cli.main(["bench", "--list", "--tag", "h200", "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)
    assert len(cases) == 36
    assert {"name", "source", "tags", "seqlen_q", "head_dim", "dtype", "mask"} <= set(cases[0])


def test_a_tag_leaves_out_what_another_kind_of_device_is_meant_for_and_says_what_did_not_fit(capsys, tmp_path):
    options = ["--contestant", "portable", "--device", "cpu", "--minutes", "0", "--out", str(tmp_path / "r.jsonl")]
    assert cli.main(["bench", "--tag", "paper", *options]) == 0
    page = capsys.readouterr().out
    assert "Left out, to end in 0 min" in page
    assert "cpu-fp32-d64-n1024-full" in page
    assert "h200-" not in page
    assert cli.main(["bench", "--tag", "h200", *options]) == 2
    assert "no case for cpu carries all of the tags h200" in capsys.readouterr().err
