"""bench/derivatives.py on a CPU, at sizes that take no time."""

import json

from bench import derivatives


def test_every_derivative_is_checked_and_timed_beside_eagers(tmp_path):
    file = tmp_path / "found.json"
    assert derivatives.main(["--device", "cpu", "--sizes", "32", "--out", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {row["tensor"] for row in found["check"]} >= {"o tangent", "second dq", "second dsink", "second ddo"}
    assert all(row["ok"] for row in found["check"])
    assert all({"jvp", "second derivative", "eager jvp"} <= set(row["ms"]) for row in found["times"])
