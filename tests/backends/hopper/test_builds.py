"""Kernels are built anew where the compiler gets another program, and nowhere else."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.host import aot, kernel_files

CONFIGS = config.shipped()[:3]
NAMES = [c.name for c in CONFIGS]


class Workshop:
    """Builds without a compiler: ``programs`` are the kernels' programs by name, ``built`` the names of what was built."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.programs, self.built, self.traced = folder, dict.fromkeys(NAMES, "as ever"), [], []
        self.sources, self.host = "sources", "host"
        monkeypatch.setattr(aot, "ProcessPoolExecutor", ThreadPoolExecutor)
        monkeypatch.setattr(aot, "program", self.program)
        monkeypatch.setattr(aot, "build", self.build)
        monkeypatch.setattr(kernel_files, "source_hash", lambda of="all": self.sources if of == "all" else self.host)
        self.run()
        self.built.clear()

    def program(self, c):
        self.traced.append(c.name)
        return self.programs[c.name]

    def build(self, c, folder):
        self.built.append(c.name)
        (folder / kernel_files.file_name(c.name)).write_text(self.programs[c.name])
        return {**aot.described(c), "program": self.programs[c.name], "faults": [], "seconds": 1}

    def run(self, configs=CONFIGS):
        return aot.build_all(configs, self.folder, 1)

    def files(self):
        return sorted(file.name.removesuffix(".kernel") for file in self.folder.glob("*.kernel"))


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    return Workshop(tmp_path, monkeypatch)


def test_kernels_of_the_same_sources_are_not_looked_at(workshop):
    assert set(workshop.run()) == set(NAMES)
    assert workshop.built == workshop.traced == []


def test_of_other_sources_the_kernels_are_built_whose_programs_differ(workshop):
    workshop.sources, workshop.programs[NAMES[1]] = "edited", "another"
    rows = workshop.run()
    assert workshop.built == [NAMES[1]]
    assert rows[NAMES[1]]["program"] == "another"
    assert workshop.files() == sorted(NAMES)
    index = json.loads((workshop.folder / "index.json").read_text())
    assert index["sources"] == "edited"
    assert set(index["kernels"]) == set(NAMES)


@pytest.mark.parametrize("lost", ["file", "expected", "index", "host"])
def test_what_is_not_known_to_be_the_same_is_built(workshop, lost, monkeypatch):
    workshop.sources = "edited"
    if lost == "file":
        (workshop.folder / kernel_files.file_name(NAMES[2])).unlink()
    elif lost == "expected":
        described = aot.described
        monkeypatch.setattr(
            aot, "described", lambda c: described(c) | ({"expected": "more"} if c is CONFIGS[2] else {})
        )
    elif lost == "index":
        (workshop.folder / "index.json").unlink()
    else:
        workshop.host = "edited"
    workshop.run()
    assert workshop.built == (NAMES[2:] if lost in ("file", "expected") else NAMES)


def test_a_kernel_of_other_sources_that_is_not_wanted_does_not_stay(workshop):
    workshop.sources = "edited"
    assert set(workshop.run(CONFIGS[:1])) == {NAMES[0]}
    assert workshop.files() == NAMES[:1]
    assert workshop.built == []


ROW = {"program": "0ld", "faults": [], "file": 1}


@pytest.fixture
def listed(monkeypatch, tmp_path):
    """Writes programs into a ``kernels.txt``."""
    row = {"registers": [1], "spills": 0, "shared": 1, "wgmma": 2, "cubin": 3, "hidden": [4, 5]}
    monkeypatch.setattr(kernel_files, "TABLE", tmp_path / "kernels.txt")
    return lambda programs: kernel_files.TABLE.write_text(
        aot.table({name: row | {"program": program} for name, program in programs.items()})
    )


def test_a_program_that_is_not_the_listed_one_is_named(workshop, listed):
    listed(dict.fromkeys(NAMES[:2], "0ld"))
    workshop.programs = {NAMES[0]: "0ld", NAMES[1]: "another", NAMES[2]: "0ld"}
    assert aot.other_programs(CONFIGS, {}, 1) == NAMES[1:]
    assert workshop.traced == NAMES


def test_a_program_that_a_build_has_found_is_not_traced_again(workshop, listed):
    listed({NAMES[0]: "0ld", NAMES[1]: "0ld"})
    workshop.programs = dict.fromkeys(NAMES[1:], "0ld")
    assert aot.other_programs(CONFIGS[:2], {NAMES[0]: "another"}, 1) == NAMES[:1]
    assert workshop.traced == NAMES[1:2]


def test_the_programs_that_are_listed_are_those_of_the_sources_that_the_list_names(workshop, listed):
    programs = {NAMES[0]: "0ld", NAMES[1]: "another"}
    listed(programs)
    assert aot.listed_of_these_sources() == programs
    workshop.sources = "edited"
    assert aot.listed_of_these_sources() == {}
    aot.name_sources()
    assert aot.listed_of_these_sources() == programs


@pytest.mark.parametrize(("arguments", "traced"), [(["--programs"], NAMES), (["--sample", "--programs"], [])])
def test_beside_a_sample_no_program_of_the_listed_sources_is_traced(
    arguments, traced, workshop, listed, monkeypatch, capsys
):
    workshop.programs = dict.fromkeys(NAMES, "0ld")
    listed(workshop.programs)
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(aot, "shipped", lambda: CONFIGS)
    monkeypatch.setattr(aot, "build_all", lambda configs, folder, jobs: {c.name: ROW for c in configs})
    assert aot.main(arguments) == 0
    assert workshop.traced == traced
    monkeypatch.setattr(aot, "sample", lambda configs, traits: CONFIGS[:1])
    workshop.sources, workshop.traced[:] = "edited", []
    assert aot.main(["--sample", "--programs"]) == 0
    assert workshop.traced == NAMES[1:]
    workshop.programs[NAMES[2]] = "another"
    assert aot.main(["--sample", "--programs"]) == 1
    assert f"FAIL {NAMES[2]}" in capsys.readouterr().out
