"""Which kernels need no second check on a GPU."""

import json

from bench import gpu_hopper


def rows(kernel: str, states: dict[str, str], bits: str) -> list[dict]:
    row = {"part": "check", "kernel": kernel}
    called = [row | {"case": case, "state": "begun"} for case in states]
    ended = [row | {"case": case, "state": state} for case, state in states.items()]
    return [*called, *ended, row | {"case": gpu_hopper.DONE, "state": "ok", "bits": bits}]


def test_a_kernel_is_proven_where_every_call_was_right(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_hopper, "PROVEN", tmp_path / "proven.txt")
    found = [
        *rows("right", {"a": "ok", "b": "ok"}, "11"),
        *rows("wrong", {"a": "ok", "b": "wrong"}, "22"),
        *rows("hung", {"a": "ok", "b": "begun"}, "33"),
        *rows("idle", {}, "44"),
    ]
    file = tmp_path / "gpu_hopper.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in found))
    gpu_hopper.prove([file])
    gpu_hopper.prove([file])
    assert gpu_hopper.proven() == {"11": "right"}
    assert gpu_hopper.PROVEN.read_text() == "11   2 right\n"
