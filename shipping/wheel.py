"""Builds what a release uploads, and judges it: ``python -m shipping.wheel`` (``make wheel``).

    shipping.wheel [--out dist] [--machine x86_64|aarch64|any|source ...] [--again] [--judged]

- ``x86_64``: the CPU library, the launcher and the Hopper kernels that lie in the checkout, for every Linux with glibc 2.28 or
  newer, under every Python 3; auditwheel gives the verdict.
- ``aarch64``: the CPU library and the launcher, cross-compiled (aarch64-linux-gnu-g++).
- ``any``: no native libraries, for every other machine; ``explain`` says there what is missing.
- ``source``: the source distribution.

``--again`` builds each a second time from a copy of the sources elsewhere and compares the bytes. ``--judged`` refuses Hopper kernels
that no GPU has run right as they are (``make release``). Exit code 1: that, auditwheel refuses a wheel, a wheel is above LIMIT, or two
builds differ. The packages of the extra ``release`` are needed, and a C++20 compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewise.backends.hopper.host import kernel_files, proven, selection

ROOT = Path(__file__).parents[1]
KERNELS = Path("src/tilewise/backends/hopper/kernels")
GLIBC = "2.28"
LIMIT = 20 * 2**20  # bytes of a wheel
CROSS = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++")
MACHINES = ("x86_64", "aarch64", "any", "source")


@dataclass(frozen=True)
class Made:
    """A file of the release."""

    machine: str
    file: Path

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.file.read_bytes()).hexdigest()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shipping.wheel", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=["x86_64", "any", "source"])
    parser.add_argument("--again", action="store_true", help="build twice and compare")
    parser.add_argument("--judged", action="store_true", help="refuse kernels that no GPU has run right as they are")
    options = parser.parse_args(words)
    print(kernels_said(), flush=True)
    faults = [f"no GPU has run {kernel} right as it is" for kernel in proven.unjudged()] if options.judged else []
    for machine in options.machine:
        made = build(machine, ROOT, options.out.resolve())
        size = made.file.stat().st_size
        print(f"{made.file.name}  {size / 1e6:.2f} MB  sha256 {made.digest}", flush=True)
        if size > LIMIT:
            faults.append(f"{made.file.name} is above {LIMIT >> 20} MiB")
        if options.again and not same_again(made):
            faults.append(f"{made.file.name} differs from a second build")
    print("\n".join(f"FAIL {fault}" for fault in faults))
    return 1 if faults else 0


def kernels_said() -> str:
    """A line about the Hopper kernels that lie in the checkout, which the wheel carries.

    Raises:
        RuntimeError: they were compiled from other sources, and nobody could use them.
    """
    total, here = len(selection.in_order_of_use()), len(kernel_files.index())
    if not here and list((ROOT / KERNELS).glob("*.kernel")):
        raise RuntimeError(
            f"the kernels in {KERNELS} were compiled from other sources; `make kernels-hopper` compiles these"
        )
    rest = "" if here == total else "; `make kernels-hopper` builds the others, and users without them run Triton's"
    return f"{here} of {total} Hopper kernels are in the checkout{rest}"


def build(machine: str, source: Path, out: Path) -> Made:
    """Builds one file of the release from a folder of sources.

    Raises:
        RuntimeError: a build fails, or auditwheel refuses a wheel; the message holds what it said.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.rmtree(source / "build" / "wheel", ignore_errors=True)
        if machine == "source":
            _run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", scratch], source)
        else:
            flags = [f"--config-settings={flag}" for flag in settings(machine)]
            pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", *flags]
            _run([*pip, "--wheel-dir", scratch, "."], source, environment(machine))
        (made,) = Path(scratch).iterdir()
        if machine in ("x86_64", "aarch64"):
            made = audited(made, machine)
        shutil.copy(made, out)
    return Made(machine, out / made.name)


def settings(machine: str) -> list[str]:
    """The settings of scikit-build-core for a wheel. The wheel for every machine has no CMake step (pyproject.toml)."""
    if machine == "any":
        return []
    import ziglang

    zig = Path(ziglang.__file__).with_name("zig")
    cross = [f"cmake.args={';'.join(CROSS)}"] if machine == "aarch64" else []
    return [f"cmake.define.TILEWISE_GLIBC={GLIBC}", f"cmake.define.TILEWISE_ZIG={zig}", *cross]


def environment(machine: str) -> Mapping[str, str]:
    """The environment of a build: the machine that the wheel is for."""
    if machine == "any":
        return {"TILEWISE_NO_LIBRARIES": "1"}
    return {"_PYTHON_HOST_PLATFORM": "linux-aarch64"} if machine == "aarch64" else {}


def audited(wheel: Path, machine: str) -> Path:
    """The wheel with the tag that auditwheel gives it; what it says is printed.

    Raises:
        RuntimeError: it has no libraries, since a compiler failed, or auditwheel refuses it.
    """
    if wheel.name.endswith("-any.whl"):
        raise RuntimeError(
            f"{wheel.name} has no native libraries: a compiler failed, and `pip wheel -v --no-deps .` shows its message"
        )
    auditwheel = [sys.executable, "-m", "auditwheel"]
    said = _run([*auditwheel, "show", wheel], wheel.parent)
    print(" ".join(said.split("The wheel references")[0].split()), flush=True)
    # It knows the tags of its own machine by name, and finds those of another one itself.
    named = f"manylinux_{GLIBC.replace('.', '_')}_{machine}" if machine == platform.machine() else "auto"
    out = wheel.parent / "audited"
    _run([*auditwheel, "repair", "--plat", named, "--wheel-dir", out, wheel], wheel.parent)
    (made,) = out.iterdir()
    newest = max(tuple(map(int, found)) for found in re.findall(r"manylinux_(\d+)_(\d+)_", made.name) or [("99", "0")])
    if newest > tuple(map(int, GLIBC.split("."))):
        raise RuntimeError(f"{made.name} wants a newer glibc than {GLIBC}")
    return made


def same_again(made: Made) -> bool:
    """Whether a second build, from a copy of the sources in another folder, has the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "sources"
        listed = _run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT).splitlines()
        kernels = [str(file.relative_to(ROOT)) for file in (ROOT / KERNELS).glob("*") if file.is_file()]
        for name in (*listed, *kernels):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
        return build(made.machine, copy, Path(folder) / "out").digest == made.digest


def _run(command: list, folder: Path, more: Mapping[str, str] | None = None) -> str:
    """A command's output. Dates are those of the last commit, whenever and wherever it runs."""
    date = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"SOURCE_DATE_EPOCH": date or "315532800", "PATH": path} | dict(more or {})
    done = subprocess.run([str(word) for word in command], cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
