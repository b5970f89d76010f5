"""bench/derivatives.py on a CPU, at sizes that take no time."""

from bench import calls, derivatives, records


def test_every_derivative_is_checked_and_timed_beside_eagers(tmp_path, monkeypatch):
    file = tmp_path / "found.jsonl"
    monkeypatch.setattr(derivatives, "SIZES", (32,))
    calls.main(["derivatives", "--device", "cpu", "--out", str(file)])
    found = records.read(file)
    errors = list(records.select(found, metric="error"))
    assert {r["shape"]["tensor"] for r in errors} >= {"o tangent", "second dq", "second dsink", "second ddo"}
    assert all(r["status"] == "green" for r in errors)
    (run,) = records.runs(found).values()
    run_by = next(iter(run["peers"]))
    for metric in ("time", "memory"):
        timed = {(r["contestant"], r["shape"]["what"]) for r in records.select(found, metric=metric)}
        assert timed == {(who, what) for who in (run_by, "eager") for what in derivatives.WHAT}
