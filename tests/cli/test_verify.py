"""`tilewise verify` passes the report on: as a table, as JSON, as an exit code."""

import json
from dataclasses import replace

import pytest

import tilewise as tw
from tilewise import cli
from tilewise.selfcheck import Report, Row

RIGHT = Row("portable", "float32", "causal", True, "dq", 1e-7, 2e-7, 4e-7)


@pytest.fixture
def reported(monkeypatch):
    def report(*rows):
        monkeypatch.setattr(tw, "verify", lambda device: Report("a machine", rows))

    return report


def test_a_right_machine_is_exit_code_0_and_a_wrong_one_1(reported, capsys):
    reported(RIGHT)
    assert cli.main(["verify", "--device", "cpu"]) == 0
    assert "agrees" in capsys.readouterr().out
    reported(RIGHT, replace(RIGHT, ok=False, error=1e-3))
    assert cli.main(["verify", "--device", "cpu"]) == 1
    page = capsys.readouterr().out
    assert "red" in page
    assert "1 of 2 rows are wrong" in page


def test_a_refusal_is_shown_and_is_not_wrong(reported, capsys):
    reported(Row("portable", "float16", "alibi", None, refused="no fp16 here"))
    assert cli.main(["verify", "--device", "cpu"]) == 0
    assert "refused: no fp16 here" in capsys.readouterr().out


def test_json_has_a_row_for_each_backend_dtype_and_feature(reported, capsys):
    reported(RIGHT)
    assert cli.main(["verify", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert set(told["rows"][0]) == {
        "backend",
        "dtype",
        "feature",
        "ok",
        "tensor",
        "error",
        "eager",
        "allowed",
        "refused",
    }
