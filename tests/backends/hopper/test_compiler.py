"""The compiler of kernels is needed to build them and for nothing else, and is used where kernels were tried with its version."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.backends.contract import call, normal
from tests.backends.hopper.test_launcher import CUBIN, RECIPE
from tilewise import dispatch
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.forward import config as forward_config
from tilewise.backends.hopper.host import compiler, driver, kernel_files, library

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(monkeypatch):
    """Makes a version of the compiler the one that is installed; None: none is."""

    def install(version: str | None) -> None:
        found = importlib.util.find_spec
        spec = None if version is None else found("json")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "cutlass" else found(name))
        monkeypatch.setattr(metadata, "version", lambda name: version)
        monkeypatch.setattr(compiler, "nvdisasm", lambda: Path("nvdisasm"))

    return install


@pytest.mark.parametrize(
    ("version", "usable"),
    [
        ("4.6.3", True),
        ("4.7.0", True),
        ("4.8.1", True),
        ("4.8.0.dev1", True),
        ("4.6.2", False),
        ("4.8.2", False),
        ("5.0", False),
    ],
)
def test_versions_that_kernels_were_not_tried_with_are_refused_by_name(version, usable, installed):
    installed(version)
    assert (compiler.unusable() == "") == usable
    assert usable or f"is {version}, not one of 4.6.3 to 4.8.1" in compiler.unusable()


def test_without_a_compiler_that_is_the_reason(installed):
    installed(None)
    assert "is not installed" in compiler.unusable()


def test_without_the_disassembler_that_is_the_reason_and_what_to_install(installed, monkeypatch):
    installed("4.6.3")
    monkeypatch.setattr(compiler, "nvdisasm", lambda: None)
    assert "`pip install nvidia-cuda-nvdisasm`" in compiler.unusable()


def test_the_disassembler_is_found_in_whatever_folder_of_packages_has_it(tmp_path):
    tool = tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm"
    tool.parent.mkdir(parents=True)
    tool.touch()
    code = "from tilewise.backends.hopper.host import compiler; print(compiler.nvdisasm())"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(tool), found.stderr


def test_the_extra_and_the_pins_are_in_the_range():
    text = (ROOT / "pyproject.toml").read_text()
    oldest, newest = (".".join(map(str, numbers)) for numbers in (compiler.OLDEST, compiler.NEWEST))
    (extra,) = re.findall(r"^kernels = \[(.*)\]", text, re.MULTILINE)
    assert f"{compiler.PACKAGE}[cu13]>={oldest},<={newest}" in extra
    assert f"{compiler.DISASSEMBLER}>=13,<14;" in extra  # the DSL 4.8 brings none
    assert f"{compiler.PACKAGE}=={oldest}" in (ROOT / "constraints.txt").read_text()


# -- What a call says that needs it --------------------------------------------------------------------------------


def problem(**options):
    q, k, v = (normal(1, 70, h, 64, dtype=torch.bfloat16, seed=h) for h in (4, 2, 2))
    return replace(call(q, k, v, **options).p, device=torch.device("cuda"))


@pytest.fixture
def hopper_gpu(monkeypatch):
    """A Hopper GPU with a launcher and without kernels."""
    from tilewise import device as devices

    gpu = devices.Device("a GPU", "cuda", 132, capability=(9, 0))
    monkeypatch.setattr(devices, "of", lambda device: gpu)
    monkeypatch.setattr(driver, "load", lambda: None)
    monkeypatch.setattr(library, "here", lambda config: None)


def test_an_expression_falls_back_with_a_reason_where_the_compiler_is_of_another_version(hopper_gpu, installed):
    p = problem(score=lambda s, b, h, i, j: s + i - j)
    installed("4.7.1")
    assert Hopper().unsupported(p) == []
    installed("4.9.0")
    (reason,) = Hopper().unsupported(p)
    assert (
        "is 4.9.0, not one of 4.6.3 to 4.8.1; with `pip install 'tilewise[kernels]'` the first call compiles" in reason
    )
    assert dispatch.select(p).name != "hopper"


@pytest.mark.parametrize(("version", "refused"), [(12, True), (13, False), (14, False), (0, False)])
def test_a_driver_that_cannot_load_the_kernels_leaves_the_call_to_others(hopper_gpu, monkeypatch, version, refused):
    from tilewise import device as devices

    monkeypatch.setattr(library, "here", lambda config: "a file")
    monkeypatch.setattr(devices, "cuda_version", lambda: version)
    p = problem(causal=True)
    assert ["code of CUDA 12" in reason for reason in Hopper().unsupported(p)] == [True] * refused
    assert (dispatch.select(p).name == "hopper") != refused


def test_a_shipped_kernel_that_is_missing_names_the_command_that_builds_it(hopper_gpu, installed):
    installed(None)
    (reason,) = Hopper().unsupported(problem(causal=True))
    assert "\n" not in reason
    command = re.search(r"`pip install 'tilewise\[kernels\]'`, then `tilewise kernels (.*)`, builds them", reason)[1]
    assert command == '--for "bf16 d64 causal"'


# -- Without it ----------------------------------------------------------------------------------------------------


def test_a_kernel_that_was_built_here_runs_without_the_compiler(monkeypatch, tmp_path, installed):
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_files, "index", dict)
    monkeypatch.setattr(driver, "load", lambda: None)
    installed(None)
    config = forward_config.shipped()[0]
    assert library.missing(config)
    file = kernel_files.write(kernel_files.cache() / kernel_files.file_name(config.name), CUBIN, RECIPE)
    assert library.missing(config) == []
    assert kernel_files.read(file) == (CUBIN, RECIPE)
    monkeypatch.setattr(kernel_files, "unreadable", lambda: "no lzma")
    assert library.missing(config) == ["no lzma"]


def test_a_damaged_kernel_is_built_again_where_it_was_built_here_and_named_elsewhere(installed, monkeypatch, tmp_path):
    kernel, built = forward_config.shipped()[0], []
    monkeypatch.setattr(kernel_files, "folder", lambda: tmp_path)
    monkeypatch.setattr(kernel_files, "cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(kernel_files, "index", dict)
    file = tmp_path / "cache" / kernel_files.file_name(kernel.name)

    def build(config, target):
        built.append(config)
        kernel_files.write(target, CUBIN, RECIPE)

    monkeypatch.setattr(library, "_build", build)
    file.parent.mkdir()
    installed("4.8.1")
    file.write_bytes(b"no kernel")
    assert library._read(kernel)[0] == CUBIN
    assert built == [kernel]
    installed(None)
    file.write_bytes(b"no kernel")
    with pytest.raises(RuntimeError, match=rf"{file.name} is damaged \(BadZipFile.*delete it"):
        library._read(kernel)


PROGRAM = """
    import sys

    sys.modules["cutlass"] = None  # to import it is an error, and who asks whether it is installed, as PyTorch does, hears that it is not
    import tilewise as tw
    from tilewise.backends.hopper import Hopper
    from tilewise.backends.hopper.forward import config
    from tilewise.backends.hopper.host import backward_call, forward_call, library, masks, plan

    kernel = config.shipped()[0]
    assert library.missing(kernel) == [], library.missing(kernel)
    assert library.function(kernel).names == ["one", "two"]
    print(kernel.name)
"""


def test_nothing_imports_it_from_a_call_to_the_launch_of_a_shipped_kernel(tmp_path):
    """The modules of a call, the choice of a kernel, the reading of its file and its preparation for launches."""
    if isinstance(driver.load(), str):
        pytest.skip("no launcher")
    config = forward_config.shipped()[0]
    kernel_files.write(tmp_path / kernel_files.file_name(config.name), CUBIN, RECIPE)
    index = {"sources": kernel_files.source_hash(), "kernels": {config.name: {"config": asdict(config)}}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    path = os.pathsep.join([str(Path(tw.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TILEWISE_HOPPER_KERNELS": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == config.name, done.stderr
