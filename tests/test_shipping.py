"""What a release is made of: the folder for the Hugging Face kernels hub, and the programs by which an install is tried."""

import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from shipping import combinations, hub, installs, release, wheel
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


@pytest.mark.parametrize(("words", "fails"), [([], 0), (["--judged"], 1)])
def test_a_release_refuses_kernels_that_no_gpu_has_run_as_they_are(words, fails, monkeypatch, tmp_path, capsys):
    (tmp_path / "t.whl").touch()
    monkeypatch.setattr(wheel.proven, "unjudged", lambda: ["one"])
    monkeypatch.setattr(wheel, "build", lambda machine, source, out: wheel.Made(machine, tmp_path / "t.whl"))
    assert wheel.main([*words, "--machine", "any"]) == fails
    assert ("FAIL no GPU has run one right as it is" in capsys.readouterr().out) == bool(fails)


def test_the_call_that_tries_an_install_runs():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(installs.CALL)], capture_output=True, text=True)
    assert done.stdout.strip() in ("cpu", "portable"), done.stderr


# -- Versions that go together -------------------------------------------------------------------------------------


def pinned(pins: str) -> dict[str, tuple[int, ...]]:
    """The versions of a set of pins for the newest Python, by package."""
    lines = [line.split("==") for line in combinations.constraints(pins, combinations.PYTHONS[-1])]
    return {name: tuple(int(x) for x in version.split(".") if x.isdigit()) for name, version in lines}


def test_the_oldest_versions_are_the_least_that_the_package_takes():
    assert combinations.constraints("oldest") == [
        "torch==2.11.*",
        "triton==3.6.*",
        "transformers==5.17.*",
        "nvidia-cutlass-dsl==4.6.3.*",
        "nvidia-cuda-nvdisasm==13.*",
    ]
    assert combinations.constraints("pip") == []


def test_the_newest_versions_are_of_what_ci_pins_and_none_is_older():
    ci, newest = pinned("pinned"), pinned("newest")
    assert newest.keys() <= ci.keys()
    assert {"torch", "triton", "numpy", "transformers", "pytest", "ruff", "mypy"} <= newest.keys()
    assert {name for name in newest if newest[name] < ci[name]} == set()


def test_pins_are_those_of_a_python():
    found = [[x for x in combinations.constraints("newest", python) if "numpy" in x] for python in ("3.11", "3.13")]
    assert found == [["numpy==2.4.6"], ["numpy==2.5.5"]]


def test_ci_takes_the_pins_that_need_no_gigabytes():
    root = combinations.ROOT
    assert "newest" not in (root / ".ci" / "run").read_text(encoding="utf-8")
    assert pinned("pinned")["torch"] == (2, 13, 0)


def test_a_combination_is_one_line_of_what_pip_says():
    report = {"install": [{"metadata": {"name": name, "version": "1.2"}} for name in ("Torch", "nvidia_cutlass_dsl")]}
    found = combinations.versions(report)
    assert combinations.line("3.12", "newest", found, "resolved") == (
        "python 3.12  newest  torch 1.2  nvidia-cutlass-dsl 1.2: resolved"
    )
    said = "WARNING: a\nERROR: Cannot install torch==9\nERROR: see the page\n"
    assert combinations.reason(said) == "Cannot install torch==9"
    assert combinations.line("3.14", "pip", {}, "does not resolve: x") == "python 3.14  pip     does not resolve: x"


# -- The version that is released ----------------------------------------------------------------------------------


def repository(root: Path, title: str, package: str = "3.1.0") -> Path:
    """A repository of one commit that says its version in three places."""
    texts = {
        "pyproject.toml": '[project]\nversion = "3.1.0"\n',
        "src/tilewise/__init__.py": f'__version__ = "{package}"\n',
        "CHANGELOG.md": f"# Changelog\n\n## {title}\n",
        ".gitignore": "/dist/\n/build/\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--message", "Begin"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    for key in ("name", "email"):
        subprocess.run(["git", "config", f"user.{key}", "a@b"], cwd=root, check=True)
    return root


def test_this_checkout_has_one_version():
    assert [said for said in release.faults_of_version(release.ROOT) if "CHANGELOG" not in said] == []


def test_a_release_is_refused_with_every_reason(tmp_path, capsys):
    root = repository(tmp_path, "3.1.0 (unreleased)", package="3.0.0")
    (root / "dist").mkdir()
    (root / "dist" / "tilewise-3.0.0.tar.gz").touch()
    (root / "new").touch()
    assert release.main([], root) == 1
    assert capsys.readouterr().out.splitlines() == [
        "FAIL tilewise.__version__ is 3.0.0, pyproject.toml has 3.1.0",
        'FAIL CHANGELOG.md begins with "3.1.0 (unreleased)" instead of "3.1.0 (YYYY-MM-DD)"',
        "FAIL there are uncommitted changes",
        "FAIL dist/tilewise-3.0.0.tar.gz is of another version",
    ]


def test_a_release_is_tagged_once_when_its_files_are_there(tmp_path, capsys):
    root = repository(tmp_path, "3.1.0 (2026-12-01)")
    assert release.main([], root) == 0
    assert release.main(["--tag"], root) == 1
    assert "FAIL there is no dist/tilewise-3.1.0.tar.gz\n" in capsys.readouterr().out
    names = [name.format("3.1.0").replace("*", "x") for name in release.FILES]
    for path in (*(root / "dist" / name for name in names), root / "build" / "site" / "index.html"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert release.main(["--tag"], root) == 0
    assert capsys.readouterr().out.startswith("v3.1.0 is set")
    assert release.main(["--tag"], root) == 1
    assert capsys.readouterr().out == "FAIL the tag v3.1.0 exists already\n"
