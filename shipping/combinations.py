"""Versions that go together: ``python -m shipping.combinations``, at each release of PyTorch, Triton, transformers or the DSL.

    shipping.combinations [--python VERSION ...] [--pins SET ...] [--run] [--suite]

A combination is a version of Python and a set of pins: ``oldest`` (the least that ``pyproject.toml`` allows), ``pinned``
(``constraints.txt``, what CI runs), ``newest`` (``constraints-newest.txt``) and ``pip`` (none: what pip gives today). Each is resolved, for
which a pip of 2025 or newer fetches descriptions alone. ``--run`` installs those whose Python is here, several GB each, into an environment
of its own in a temporary folder, and lets ``tilewise verify`` hold every backend against float64; ``--suite`` runs the tests there too.

It ends in one line a combination. Exit code 1: one does not resolve, or what ran there failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = ("triton", "transformers", "test", "kernels")
PINS = ("oldest", "pinned", "newest", "pip")
SHOWN = ("torch", "triton", "numpy", "transformers", "nvidia-cutlass-dsl", "nvidia-cuda-nvdisasm")
"""The packages whose versions a line has."""


def requirements() -> list[str]:
    """The requirements of the package and its extras in ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [*project["dependencies"], *(x for extra in EXTRAS for x in project["optional-dependencies"][extra])]
    return list(dict.fromkeys(found))


def constraints(pins: str, python: str = PYTHONS[0]) -> list[str]:
    """The pins of a set for a Python. pip would judge their markers by the Python that it runs with."""
    if pins == "pip":
        return []
    if pins == "oldest":
        least = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", x) for x in requirements()]
        return [f"{m[1]}=={m[2]}.*" for m in least if m and m[1] in SHOWN]
    file = {"pinned": "constraints.txt", "newest": "constraints-newest.txt"}[pins]
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    wanted = [x for x in found if x.marker is None or x.marker.evaluate({"python_version": python})]
    return [f"{x.name}{x.specifier}" for x in wanted]


def resolved(python: str, pins: Path) -> tuple[dict[str, str], str]:
    """The versions that pip would install for a Python, whether it is here or not; else none, and pip's reason."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", "-", "--target", folder, "--python-version", python, "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "--constraint", str(pins), *requirements()], capture_output=True, text=True, check=False
        )
    return (versions(json.loads(done.stdout)), "") if done.returncode == 0 else ({}, reason(done.stderr))


def versions(report: Mapping) -> dict[str, str]:
    """The versions of a report of pip's, by package."""
    found = (x["metadata"] for x in report["install"])
    return {re.sub(r"[-_.]+", "-", x["name"]).lower(): x["version"] for x in found}


def reason(said: str) -> str:
    """The line of pip's that says why."""
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    return (errors or said.splitlines() or ["pip said nothing"])[0].removeprefix("ERROR:").strip()


def ran(python: str, pins: Path, suite: bool) -> str:
    """The verdict of a combination that is installed and tried."""
    own = shutil.which(f"python{python}")
    if own is None:
        return "resolved; no such Python here"
    with tempfile.TemporaryDirectory() as folder:
        venv, begin = Path(folder, "venv"), time.perf_counter()
        subprocess.run([own, "-m", "venv", venv], check=True)
        inside = str(venv / "bin" / "python")
        install = [inside, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", str(pins)]
        steps = {
            "install": [*install, f"{ROOT}[triton,transformers,test]"],
            "verify": [inside, "-m", "tilewise", "verify"],
        }
        if suite:
            steps["tests"] = [inside, "-m", "pytest", "-n", "auto", str(ROOT / "tests")]
        for name, command in steps.items():
            done = subprocess.run(
                command, cwd=ROOT if name == "tests" else folder, capture_output=True, text=True, check=False,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            if done.returncode:
                last = (done.stdout + done.stderr).strip().splitlines() or [""]
                return f"FAILED at {name}: {last[-1]}"
        return f"ran: {', '.join(steps)}, {time.perf_counter() - begin:.0f} s"


def line(python: str, pins: str, found: Mapping[str, str], said: str) -> str:
    """A combination in a line."""
    named = "  ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
    return f"python {python:5} {pins:7} {named + ': ' if named else ''}{said}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shipping.combinations", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--pins", nargs="+", default=PINS, choices=PINS)
    parser.add_argument("--run", action="store_true", help="install each and run tilewise verify in it")
    parser.add_argument("--suite", action="store_true", help="run the tests too")
    options = parser.parse_args(words)
    lines, failed = [], False
    for pins in options.pins:
        for python in options.python:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "pins.txt")
                file.write_text("\n".join(constraints(pins, python)) + "\n", encoding="utf-8")
                found, why = resolved(python, file)
                said = f"does not resolve: {why}" if why else "resolved"
                if found and (options.run or options.suite):
                    said = ran(python, file, options.suite)
            failed |= said.startswith(("does not", "FAILED"))
            lines.append(line(python, pins, found, said))
            print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
