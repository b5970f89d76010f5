"""`tilewise kernels` lists the Hopper backend's kernels and builds those that are missing."""

import json
import time
from pathlib import Path

import pytest

from tilewise import cli
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.host import compiler, kernel_files, library, selection
from tilewise.backends.hopper.host.library import Build


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine without kernels, with a compiler that writes empty files; the name of each kernel that it compiled."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_files, "index", dict)
    monkeypatch.setattr(compiler, "unusable", lambda: "")
    compiled = []

    def build(configs, jobs):
        for config in configs:
            file = kernel_files.cache() / kernel_files.file_name(config.name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            compiled.append(config.name)
            yield Build(config.name, 1.0, (), "")

    monkeypatch.setattr(library, "build_before_use", build)
    return compiled


def listed(capsys) -> dict:
    assert cli.main(["kernels", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_lists_every_kernel_and_says_where_they_lie(machine, capsys):
    assert cli.main(["kernels"]) == 0
    page = capsys.readouterr().out
    assert "bf16 d192v128" in page
    assert str(kernel_files.cache()) in page
    assert str(kernel_files.folder()) in page
    assert machine == []
    found = listed(capsys)["kernels"]
    assert len(found) == len(selection.in_order_of_use())
    assert set(found.values()) == {None}


def test_it_builds_what_is_missing_and_only_that(machine, capsys):
    words = "bf16 d128 causal"
    assert cli.main(["kernels", "--for", words]) == 0
    assert machine == [config.name for config in selection.selected(words)]
    assert f"{len(machine)} of {len(machine)} kernels are here" in " ".join(capsys.readouterr().out.split())
    first = len(machine)
    assert cli.main(["kernels", "--for", words, "--for", "bf16 d128 causal softcap"]) == 0
    assert all("softcap" in name for name in machine[first:])
    assert len(machine) == len(set(machine)) > first
    capsys.readouterr()
    files = [file for file in listed(capsys)["kernels"].values() if file]
    assert len(files) == len(machine)


def test_all_are_built_the_most_used_first(machine):
    assert cli.main(["kernels", "--all"]) == 0
    assert len(machine) == len(selection.in_order_of_use())
    assert machine[0].startswith("forward_bf16_d128_upper")
    plain = [name for name in machine if not any(word in name for word in selection.FEATURES)]
    assert machine[: len(plain)] == plain


def test_a_kernel_that_cannot_be_built_is_exit_code_1(machine, monkeypatch, capsys):
    monkeypatch.setattr(
        library, "build_before_use", lambda configs, jobs: [Build("one", 1.0, (), "RuntimeError: refused")]
    )
    assert cli.main(["kernels", "--for", "bf16 d64 causal packed"]) == 1
    assert "FAIL one 1.0 s RuntimeError: refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bf16 d129x", "'d129x' names no kernels"),
        ("d520", "no kernel is shipped for 'd520'"),
        ("d96 rows packed", "shipped"),
    ],
)
def test_words_that_name_nothing_are_a_mistake(words, says, machine, capsys):
    assert cli.main(["kernels", "--for", words]) == 2
    assert says in capsys.readouterr().err


def test_without_a_compiler_it_says_what_to_install(machine, monkeypatch, capsys):
    monkeypatch.setattr(compiler, "unusable", lambda: "there is no compiler")
    assert cli.main(["kernels", "--all"]) == 2
    assert "there is no compiler; pip install 'tilewise[kernels]'" in capsys.readouterr().err


# -- The words -----------------------------------------------------------------------------------------------------


def test_the_words_of_a_kernel_select_it():
    every = selection.in_order_of_use()
    assert selection.selected(f"{every[3].name} {every[0].name}") == [every[3], every[0]]
    of_words = {words: selection.selected(words) for words in {selection.words_of(c) for c in every}}
    assert all(config in of_words[selection.words_of(config)] for config in every)
    assert len({config.name for configs in of_words.values() for config in configs}) == len(every)


@pytest.mark.parametrize(
    ("words", "dims"),
    [
        ("d80", {96, 128}),
        ("d40v24", {64}),
        ("d192v64", {192}),
        ("d72 softcap", {128}),
        ("d96 packed dropout", {128}),
    ],
)
def test_a_head_dim_selects_the_kernels_that_calls_with_it_get(words, dims):
    """Those of the smallest width that holds it; 96 has no kernels for few queries, nor any with a softcap."""
    found = selection.selected(f"{words} bf16 full")
    assert {selection.dims_of(config)[0] for config in found} == dims
    assert {isinstance(config, Backward) for config in found} == {True, False}


@pytest.mark.parametrize(
    "words", ["d128 causal packed", "d256 causal", "d64 causal paged", "d192 full packed", "d64 full softcap"]
)
def test_calls_have_the_kernels_of_another_form_where_none_of_their_own_ships(words):
    found = selection.selected(f"bf16 {words}")
    assert {selection.dims_of(config)[0] for config in found} == {int(words.split()[0][1:])}
    plain = [config for config in found if config.score in ("", "softcap")]
    assert {isinstance(config, Backward) for config in plain} == {"paged" not in words, False}


def test_a_head_dim_above_256_has_kernels_of_both_passes():
    found = selection.selected("d320 bf16 causal")
    assert {selection.dims_of(config) for config in found} == {(512, 512)}
    assert any(isinstance(config, Backward) for config in found)


class Slow:
    """A kernel that nothing builds; whoever tries needs half a second, and leaves a file in ``folder``."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.number, self.tried = folder, number, False

    @property
    def name(self) -> str:
        if self.tried:
            return "slow"
        self.tried = True
        (self.folder / str(self.number)).touch()
        time.sleep(0.5)
        raise RuntimeError("refused")


def test_an_interrupted_build_begins_no_further_kernels(tmp_path):
    builds = library.build_before_use([Slow(tmp_path, number) for number in range(12)], 1)
    assert next(builds).error == "RuntimeError: refused"
    builds.close()
    assert len(list(tmp_path.iterdir())) <= 4
