"""Checkpoints: what is saved comes back, a stop while saving leaves the one before, and no other file passes for one."""

import pytest
import torch

from examples.gpt import checkpoint
from examples.gpt.checkpoint import Checkpoint, load, save

SOME = Checkpoint({"context": 8, "name": "a"}, 3, [(1.5, 2.0)], {"w": torch.arange(4.0)}, {"state": {}})


def test_what_is_saved_comes_back(tmp_path):
    save(tmp_path / "new" / "c.pt", SOME)
    found = load(tmp_path / "new" / "c.pt", dict(SOME.settings))
    assert torch.equal(found.model.pop("w"), torch.arange(4.0))
    assert (found.settings, found.step, found.history) == (SOME.settings, 3, [(1.5, 2.0)])


def test_a_stop_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    save(path, SOME)
    before = path.read_bytes()

    def stops(content, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.torch, "save", stops)
    with pytest.raises(KeyboardInterrupt):
        save(path, SOME)
    assert path.read_bytes() == before


def test_another_runs_checkpoint_is_refused_with_what_differs(tmp_path):
    save(tmp_path / "c.pt", SOME)
    with pytest.raises(ValueError, match=r"c\.pt is of another run \(context 8 there, 9 here\): give its settings"):
        load(tmp_path / "c.pt", {"context": 9, "name": "a"})
    many = {f"n{i}": i for i in range(9)}
    with pytest.raises(ValueError, match=r"n0 None there, 0 here; n1 .*; n2 .*; 8 more\)"):
        load(tmp_path / "c.pt", many)


def test_code_in_a_file_is_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"format": checkpoint.FORMAT, "model": Evil()}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="is no checkpoint, or a damaged one"):
        load(tmp_path / "c.pt")


def test_a_file_of_torch_that_is_no_checkpoint_is_refused(tmp_path):
    torch.save({"weights": torch.zeros(2)}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="is no checkpoint of this program"):
        load(tmp_path / "c.pt")
