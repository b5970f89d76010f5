"""The table of what the drop-ins are held by is the record's, and has a row for every file of their tests."""

from __future__ import annotations

import json

from tests import doors

RECORD = json.loads(doors.FILE.read_text(encoding="utf-8"))


def test_the_page_shows_the_record():
    text = doors.PAGE.read_text(encoding="utf-8")
    assert doors.page(text, RECORD) == text


def test_every_file_of_tests_of_a_drop_in_has_a_row():
    found = {file.relative_to(doors.ROOT).as_posix() for file in (doors.ROOT / "tests" / "compat").glob("test_*.py")}
    assert found <= set(doors.DOORS.values()) == set(RECORD)


def test_every_door_has_cases_of_both_kinds():
    assert all(count["right"] > 0 and count["refused"] > 0 for count in RECORD.values())
