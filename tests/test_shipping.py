"""What a release is made of: the folder for the Hugging Face kernels hub, and the programs by which an install is tried."""

import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from shipping import hub, installs, wheel
from tilewise.backends.hopper.host import kernel_files

PACKAGE = {"__init__.py": "from tilewise.inner import attention\n__all__ = ['attention']\n__version__ = '3.1.0'\n",
           "inner.py": "def attention(): return __name__\n"}  # fmt: skip
IMPORT = """
    import importlib.util, pathlib, sys

    def load(path):
        spec = importlib.util.spec_from_file_location(f"hub_{len(sys.modules)}", pathlib.Path(path) / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
"""


def made(folder: Path, version: str = "3.1.0", **files: str) -> Path:
    """The folder of the hub's CPU variant, of a wheel with a small package."""
    file = folder / f"tilewise-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as packed:
        for name, text in {**PACKAGE, **files}.items():
            packed.writestr(f"tilewise/{name}", text.replace("3.1.0", version))
        packed.writestr(f"tilewise-{version}.dist-info/RECORD", "")
    return next(path for path in hub.make(file, folder / "hub") if path.name == "torch-cpu")


def ran(program: str, *words: object) -> str:
    """What a program prints, after IMPORT, in a process without an installed tilewise."""
    text = textwrap.dedent(IMPORT) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", text, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_hub_gets_the_public_names_of_the_package_beside_its_entry(tmp_path):
    folder = made(tmp_path)
    assert {path.name for path in (tmp_path / "hub" / "build").iterdir()} == set(hub.VARIANTS)
    assert {path.name for path in folder.iterdir()} == {"__init__.py", "metadata.json", "tilewise"}
    facts = json.loads((folder / "metadata.json").read_text())
    assert (facts["name"], facts["version"], facts["backend"]) == ("tilewise", 3, {"type": "cpu"})
    program = "a, b = load(sys.argv[1]), load(sys.argv[1]); print(a.attention(), a.attention is b.attention, a.__all__)"
    assert ran(program, folder) == "tilewise.inner True ['attention']"


def test_two_versions_in_a_process_are_an_error_and_a_broken_one_leaves_nothing(tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    folders = made(tmp_path / "one"), made(tmp_path / "two", "3.2.0"), made(tmp_path / "three", **{"inner.py": "1 / 0"})
    program = """
        for path in (sys.argv[3], sys.argv[1], sys.argv[2]):
            try:
                print(load(path).__version__)
            except (ImportError, ZeroDivisionError) as error:
                print(type(error).__name__, "tilewise" in sys.modules, error)
    """
    broken, right, other = ran(program, *folders).splitlines()
    assert broken == "ZeroDivisionError False division by zero"
    assert right == "3.1.0"
    assert other.startswith("ImportError True tilewise 3.1.0 of ")
    assert other.endswith("is imported already; this is 3.2.0")


def test_a_wheel_with_kernels_of_other_sources_is_not_made(monkeypatch, tmp_path):
    monkeypatch.setattr(wheel, "ROOT", tmp_path)
    monkeypatch.setattr(kernel_files, "index", dict)
    assert wheel.kernels_said().startswith("0 of ")
    (tmp_path / wheel.KERNELS).mkdir(parents=True)
    (tmp_path / wheel.KERNELS / "one.kernel").touch()
    with pytest.raises(RuntimeError, match="were compiled from other sources"):
        wheel.kernels_said()


def test_the_call_that_tries_an_install_runs():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(installs.CALL)], capture_output=True, text=True)
    assert done.stdout.strip() in ("cpu", "portable"), done.stderr
