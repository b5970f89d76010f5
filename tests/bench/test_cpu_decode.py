"""bench/cpu_decode.py on sequences that take no time."""

from bench import cpu_decode, records


def test_dense_keys_and_pages_are_judged_and_timed_beside_a_sum(tmp_path):
    out = tmp_path / "decode.jsonl"
    cpu_decode.main(["--out", str(out), "--mib", "1", "--keys", "512", "--rounds", "1"])
    found = list(records.select(records.read(out), metric="bandwidth"))
    assert [r["contestant"] for r in found] == 2 * list(cpu_decode.PEERS)
    assert {r["of_read"] for r in found if r["contestant"] == "read"} == {1.0}
