"""The benchmark over ranks times what it was asked for, and nothing that it was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench import records

ROOT = Path(__file__).parents[2]


def test_a_run_without_the_contestants_of_pytorch_checks_times_and_records(tmp_path):
    out = tmp_path / "ranks.jsonl"
    command = [sys.executable, "-m", "bench.ranks", "--ranks", "2", "--device", "cpu", "--rounds", "1"]
    command += ["--only", "gather", "--host-profiles", str(tmp_path), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "red: nothing" in done.stdout
    found = [r for r in records.read(out) if r["record"] == "result"]
    assert {r["case"].rsplit("-", 1)[1] for r in found} == {"causal", "documents"}
    assert {(r["contestant"], r["pass"]) for r in found} == {
        (w, p) for w in ("gather", "alone") for p in ("forward", "both")
    }
    assert all(r["value"] > 0 for r in found)
    assert len(list(tmp_path.glob("*-gather-*.txt"))) == 4  # of two rows and two ranks
