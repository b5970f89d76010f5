"""The benchmark over ranks times what it was asked for, and nothing that it was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench import ranks, records

ROOT = Path(__file__).parents[2]


def test_a_run_without_the_contestants_of_pytorch_checks_times_and_records(tmp_path):
    out = tmp_path / "ranks.jsonl"
    command = [sys.executable, "-m", "bench.ranks", "--ranks", "2", "--device", "cpu", "--rounds", "1"]
    command += ["--only", "gather", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "red: nothing" in done.stdout
    found = [r for r in records.read(out) if r["record"] == "result"]
    assert {r["case"].rsplit("-", 1)[1] for r in found} == {"causal", "documents"}
    assert {(r["contestant"], r["pass"]) for r in found} == {
        (w, p) for w in ("gather", "alone") for p in ("forward", "both")
    }
    assert all(r["value"] > 0 for r in found)


class _Others:
    """Another rank, where nothing fails but what is named."""

    def __init__(self, theirs: str = ""):
        self.theirs = theirs

    def objects(self, said: str) -> list[str]:
        return [said, self.theirs]


def test_what_fails_on_one_rank_is_said_on_all():
    def refuse():
        raise NotImplementedError("the mask has tensors")

    assert ranks.tried(lambda: 5, _Others()) == (5, "")
    assert ranks.tried(lambda: 5, _Others("OSError: gone")) == (5, "OSError: gone")
    assert ranks.tried(refuse, _Others()) == (None, "NotImplementedError: the mask has tensors")


def test_a_contestant_that_cannot_take_part_stops_no_other(monkeypatch):
    def contest(row, way, mask, groups, device):
        if way.scheme == "gather":
            raise NotImplementedError("the mask has tensors")
        return {"forward": int, "both": int}, {"received_mib": 1}

    monkeypatch.setattr(ranks, "contest", contest)
    monkeypatch.setattr(ranks, "told", lambda *what: None)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)
    whys = {"nccl": ["wrong"]}
    found, moved = ranks.contests(ranks.REHEARSAL[0], ["gather", "auto", "nccl"], {False: _Others()}, "cpu", whys)
    assert (list(found), list(moved)) == (["auto", "alone"], ["auto"])
    assert whys == {"nccl": ["wrong"], "gather": ["NotImplementedError: the mask has tensors"]}
