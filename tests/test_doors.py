"""The table of the drop-ins is the record's and the sources', and has a row for every file of their tests."""

from __future__ import annotations

import json

import pytest

from tests import doors

RECORD = json.loads(doors.FILE.read_text(encoding="utf-8"))


def test_the_page_shows_the_record():
    text = doors.PAGE.read_text(encoding="utf-8")
    assert doors.page(text, RECORD) == text, "python -m tests.doors --table"


def test_every_file_of_tests_of_a_drop_in_has_a_row():
    found = {file.relative_to(doors.ROOT).as_posix() for file in (doors.ROOT / "tests" / "compat").glob("test_*.py")}
    assert found <= set(doors.DOORS) == set(RECORD)


def test_every_door_has_cases_of_both_kinds_and_versions_of_its_package():
    assert all(count["right"] > 0 and count["refused"] > 0 for count in RECORD.values())
    assert all(bool(RECORD[file]["versions"]) == bool(door.package) for file, door in doors.DOORS.items())


@pytest.mark.parametrize("file", doors.DOORS)
def test_a_doors_size_is_the_records_within_a_tenth(file):
    """Exact numbers would change with every commit."""
    counted = doors.lines(doors.DOORS[file])
    assert abs(counted - RECORD[file]["lines"]) <= counted / 10, "python -m tests.doors --table"


def test_what_is_taken_and_refused_is_what_the_sources_say():
    fa3 = doors.DOORS["tests/compat/test_flash_attn_doors.py"]
    assert {"qv", "rotary_seqlens", "mask_mod", "block_table"} <= set(doors.refused(fa3))
    assert "attention_chunk" in doors.taken(fa3)
    assert "qv" not in doors.taken(fa3)
    assert doors.refused(doors.DOORS["tests/compat/test_vllm.py"])[-2:] == ["output_scale", "output_block_scale"]
    assert doors.taken(doors.DOORS["tests/test_jax.py"])[:2] == ["causal", "mask"]


def test_a_source_that_refuses_by_name_says_which():
    for file in sorted((doors.SOURCES / "compat").rglob("*.py")):
        if "import refuse\n" in file.read_text(encoding="utf-8"):
            assert doors.refused(doors.Door("", "", file.relative_to(doors.SOURCES).as_posix())), file


def test_versions_that_were_tried_stay_and_are_in_order():
    assert doors.versions("tests/compat/test_flash_attn.py", []) == []
    assert doors.versions("tests/compat/test_sglang.py", ["0.5.23", "0.5.9"])[:2] == ["0.5.9", "0.5.23"]
