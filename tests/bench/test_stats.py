"""bench/stats.py on a CPU, cut to a length that takes no time."""

from bench import records, stats


def test_a_case_is_judged_and_timed_as_records():
    right, *timed = stats.results("r1", "decode-n32768", "cpu", "portable", 64)
    assert right["value"] == 1
    assert not [fault for r in (right, *timed) for fault in records.faults(r)]
    assert [r["contestant"] for r in timed] == ["lse", "row", "head"]
