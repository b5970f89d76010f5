"""A door that computes something else is not timed."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench import doors, records

causal = partial(F.scaled_dot_product_attention, is_causal=True)


def test_a_wrong_door_is_not_timed():
    with pytest.raises(SystemExit, match=r"case: rms .* \(allowed"):
        doors.measured("case", doors.Row(causal, F.scaled_dot_product_attention), records.Log({"run": "run"}, Path()))


def test_a_right_one_is_timed_beside_the_packages_own(monkeypatch, tmp_path):
    monkeypatch.setattr(doors, "ROUNDS", 1)
    file = tmp_path / "out.jsonl"
    doors.measured("case", doors.Row(causal, causal, doors.provided), records.Log({"run": "run"}, file))
    found = [json.loads(line) for line in file.read_text().splitlines()]
    order = [(r["contestant"], r["pass"]) for r in found]
    assert order == [("own", "forward"), ("door", "forward"), ("own", "both"), ("door", "both")]
    assert all(r["value"] > 0 for r in found)
    assert torch.nn.attention.current_flash_attention_impl() is None
