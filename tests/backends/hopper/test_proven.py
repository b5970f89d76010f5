"""A kernel with bits that no GPU has proven is a visible decision."""

from __future__ import annotations

import os
import subprocess
import sys

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


@pytest.mark.parametrize("bits", ["proven", "other"])
def test_a_build_fails_where_a_shipped_kernel_has_bits_that_are_not_proven(lists, bits, tmp_path, monkeypatch, capsys):
    kernel = config.shipped()[0]

    def build_all(configs, folder, jobs):
        (folder / kernel_files.file_name(kernel.name)).write_text("made")
        return {kernel.name: {"faults": [], "file": 4}}

    monkeypatch.setenv("TILEWISE_HOPPER_KERNELS", str(tmp_path))
    monkeypatch.setattr(aot, "build_all", build_all)
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: True)
    expected = "5ed3b0e5f5a1fbd2bd4bd8a7" if bits == "other" else None
    (tmp_path / "made").write_text("made")
    proven.PROVEN.write_text(f"{expected or proven.bits_of(tmp_path / 'made')}   2 {kernel.name}\n")
    assert aot.main(["--only", kernel.name]) == (bits == "other")
    assert ("no GPU has proven" in capsys.readouterr().out) == (bits == "other")


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
