"""A kernel that no GPU has run is a visible decision."""

from __future__ import annotations

import re
import zipfile

import pytest

from tilewise.backends.hopper import kernels
from tilewise.backends.hopper.host import aot, kernel_files, proven
from tilewise.backends.hopper.host.proven import Proof

LISTED = proven.proofs()


@pytest.fixture(autouse=True)
def a_list(tmp_path, monkeypatch):
    """A file of its own: ``right`` and ``moved`` are proven."""
    monkeypatch.setattr(proven, "PROVEN", tmp_path / "proven.txt")
    proven.add({"right": Proof("11", "aa", 2), "moved": Proof("22", "bb", 2)})


def test_a_kernel_waits_whose_program_no_gpu_has_run():
    assert proven.waiting({"right": "11", "moved": "33", "new": "11"}) == ["moved", "new"]


def test_a_later_proof_takes_the_place_of_an_earlier_one():
    assert proven.add({"right": Proof("44", "cc", 30)}) == 2
    assert proven.proofs() == {"right": Proof("44", "cc", 30), "moved": Proof("22", "bb", 2)}
    assert [line.split()[-1] for line in proven.PROVEN.read_text().splitlines()] == ["moved", "right"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_hash_is_of_what_a_file_holds_however_it_is_packed(tmp_path, method):
    """A Python with another zlib once called every kernel unproven."""

    def hash_of(cubin: str) -> str:
        with zipfile.ZipFile(tmp_path / "k", "w", method) as packed:
            packed.writestr("cubin", cubin)
            packed.writestr("recipe.json", "{}")
        return proven.cubin_hash(tmp_path / "k")

    assert hash_of("made") == "c249ee75c3667c30"
    assert hash_of("made otherwise") != hash_of("made")


def test_a_release_waits_for_kernels_that_no_gpu_has_run_as_they_are(tmp_path, monkeypatch):
    cubins = {"right": "aa", "moved": "another", "new": "aa"}
    monkeypatch.setattr(kernel_files, "index", lambda: {name: {} for name in cubins})
    monkeypatch.setattr(kernel_files, "folder", lambda: tmp_path)
    monkeypatch.setattr(proven, "cubin_hash", lambda file: cubins[file.stem])
    assert proven.unjudged() == ["moved", "new"]


def test_the_proofs_of_shipped_kernels_are_hashes_of_programs_and_cubins():
    assert LISTED.keys() & {c.name for c in kernels.shipped()}
    for proof in LISTED.values():
        assert re.fullmatch("[0-9a-f]{16}", proof.program)
        assert re.fullmatch("[0-9a-f]{16}|-", proof.cubin)


@pytest.mark.parametrize("program", ["11", "33"])
def test_a_build_names_the_shipped_kernels_whose_programs_no_gpu_has_run(program, tmp_path, monkeypatch, capsys):
    kernel = kernels.shipped()[0]
    proven.add({kernel.name: Proof("11", "aa", 2)})
    row = {"faults": [], "file": 4, "program": program}
    monkeypatch.setattr(aot, "build_all", lambda configs, folder, jobs: {kernel.name: row})
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(aot, "shipped", lambda: [kernel])
    assert aot.main([]) == 0
    assert (f"programs that no GPU has run, as `make release` does: {kernel.name}" in capsys.readouterr().out) == (
        program == "33"
    )
