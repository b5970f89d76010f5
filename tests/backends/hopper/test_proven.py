"""A kernel with bits that no GPU has proven is a visible decision."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilewise.backends.hopper import kernels
from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.host import aot, kernel_files, proven


@pytest.fixture
def lists(tmp_path, monkeypatch):
    """Files of their own: ``right`` is proven with bits 11, ``moved`` with bits 22."""
    monkeypatch.setattr(proven, "PROVEN", tmp_path / "proven.txt")
    monkeypatch.setattr(proven, "UNPROVEN", tmp_path / "unproven.txt")
    proven.PROVEN.write_text("11   2 right\n22   2 moved\n")
    proven.UNPROVEN.write_text("# why\n\nwaits  # its tiles are wider\n")


CASES = {
    "proven": ("right", "11", None),
    "other-bits": ("right", "33", "no GPU has proven its bits 33"),
    "bits-of-another": ("right", "22", "no GPU has proven its bits 22"),
    "unknown": ("new", "33", "no GPU has proven its bits 33"),
    "waiting": ("waits", "33", None),
}


@pytest.mark.parametrize("case", CASES)
def test_bits_that_are_neither_proven_nor_waiting_are_a_fault(lists, case):
    kernel, bits, fault = CASES[case]
    found = proven.faults(kernel, bits)
    assert [fault in text for text in found] == ([True] if fault else [])


def test_a_kernel_that_waits_and_is_proven_is_to_be_taken_out(lists):
    proven.UNPROVEN.write_text("right\n")
    (fault,) = proven.faults("right", "11")
    assert "take it out of unproven.txt" in fault


def test_every_shipped_kernel_is_proven_or_waits_and_only_shipped_ones_wait():
    shipped = {c.name for c in kernels.shipped()}
    assert shipped <= set(proven.proven().values()) | proven.waiting()
    assert proven.waiting() <= shipped


def pack(file: Path, cubin: str) -> None:
    """Writes a kernel's file with nothing but a cubin."""
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("cubin", cubin)


@pytest.mark.parametrize("bits", ["proven", "other"])
def test_a_build_fails_where_a_shipped_kernel_has_bits_that_are_not_proven(lists, bits, tmp_path, monkeypatch, capsys):
    kernel = config.shipped()[0]

    def build_all(configs, folder, jobs):
        pack(folder / kernel_files.file_name(kernel.name), "made")
        return {kernel.name: {"faults": [], "file": 4}}

    monkeypatch.setenv("TILEWISE_HOPPER_KERNELS", str(tmp_path))
    monkeypatch.setattr(aot, "build_all", build_all)
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: True)
    expected = "5ed3b0e5f5a1fbd2bd4bd8a7" if bits == "other" else None
    pack(tmp_path / "made", "made")
    proven.PROVEN.write_text(f"{expected or proven.bits_of(tmp_path / 'made')}   2 {kernel.name}\n")
    assert aot.main(["--only", kernel.name]) == (bits == "other")
    assert ("no GPU has proven" in capsys.readouterr().out) == (bits == "other")


ORDINARY = next(c for c in config.shipped() if not c.paged)
OFTEN = next(c for c in config.shipped() if c.paged)  # over pages: often unlike its proven form
# The kernel; its program; the forms of its builds, the last one from then on; the seeds of these builds, None: no process of its own.
ANEW = {
    "proven-at-once": (ORDINARY, "listed", "p", [None]),
    "proven-at-the-third": (ORDINARY, "listed", "xyp", [None, 0, 1]),
    "proven-after-many-alike": (ORDINARY, "listed", "xxxxxp", [None, 0, 1, 2, 3, 4]),
    "sources-changed": (ORDINARY, "other", "x", [None]),
    "never-proven": (ORDINARY, "listed", "abcdefghijklmnoqr", [None, *range(16)]),
    "often-differs": (OFTEN, "listed", "xxxxp", [0, 1, 2, 3, 4]),
    "often-differs-never-proven": (OFTEN, "listed", "x", list(range(16))),
    "often-differs-sources-changed": (OFTEN, "other", "x", [0]),
}


@pytest.fixture
def builds(lists, tmp_path, monkeypatch):
    """A builder whose kernels have the forms that are put into its list ``forms``; its list ``seeds`` says how each was built."""
    made = SimpleNamespace(forms="", program="listed", seeds=[])

    def build_with(seed, kernel, folder):
        form = made.forms[min(len(made.seeds), len(made.forms) - 1)]
        made.seeds.append(seed)
        pack(folder / kernel_files.file_name(kernel.name), kernel.name + form)
        return {"faults": [], "program": made.program, "file": 1, "seconds": len(made.seeds)}

    monkeypatch.setattr(aot, "listed_programs", lambda: dict.fromkeys((ORDINARY.name, OFTEN.name), "listed"))
    monkeypatch.setattr(aot, "build", partial(build_with, None))
    monkeypatch.setattr(aot, "_build_with", build_with)
    proven.PROVEN.unlink()
    for kernel in (ORDINARY, OFTEN):
        pack(tmp_path / "p", kernel.name + "p")
        proven.add({proven.bits_of(tmp_path / "p"): (kernel.name, 2)})
    return made


@pytest.mark.parametrize("case", ANEW)
def test_a_kernel_is_built_anew_until_its_bits_are_proven(builds, case, tmp_path):
    kernel, builds.program, builds.forms, seeds = ANEW[case]
    row = aot.build_as_proven(kernel, tmp_path)
    assert builds.seeds == seeds
    assert row["seconds"] == len(seeds)
    assert ("tried" in row) == ("p" not in builds.forms)
    assert len(row.get("tried", seeds)) == len(seeds)


@pytest.mark.parametrize("waits", [False, True])
def test_a_kernel_without_a_proven_form_is_built_once(builds, waits, tmp_path):
    builds.forms = "x"
    proven.PROVEN.write_text("")
    proven.UNPROVEN.write_text(f"{OFTEN.name}  # new\n" if waits else "")
    assert ("tried" in aot.build_as_proven(OFTEN, tmp_path)) != waits
    assert builds.seeds == [0]


def test_the_message_names_the_forms_of_all_builds_and_what_to_do(builds, tmp_path):
    builds.forms = "xyx"
    row = aot.build_as_proven(OFTEN, tmp_path)
    bits = proven.bits_of(tmp_path / kernel_files.file_name(OFTEN.name))
    (fault,) = proven.faults(OFTEN.name, bits, row["tried"])
    assert "the 2 forms of its 16 builds" in fault
    assert all(form in fault for form in row["tried"])
    assert f"kept, {bits}" in fault
    assert "bench.gpu prove" in fault


def test_processes_of_a_build_hash_alike_and_the_others_as_before(monkeypatch):
    """Kernels that come out in several forms are built so."""
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    said = lambda: subprocess.check_output([sys.executable, "-c", "print(hash('seed'))"])  # noqa: E731
    with aot._steady(3):
        alike = {said() for _ in range(3)}
    with aot._steady(4):
        alike.add(said())
    assert len(alike) == 2
    assert os.environ["PYTHONHASHSEED"] == "random"


def test_kernels_over_pages_are_of_those_that_come_out_in_several_forms():
    paged = [c for c in config.shipped() if c.paged]
    assert paged
    assert all(map(aot._has_forms, paged))
    assert not any(aot._has_forms(c) for c in config.shipped() if not c.paged)
