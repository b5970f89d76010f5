"""Check that this commit can be released, and tag it: ``python -m shipping.release [--tag]`` (``make release``).

The version is written in ``pyproject.toml``, in ``tilewise.__version__`` and as the first title of ``CHANGELOG.md``, which also
has the date: ``## 0.2.0 (2026-12-01)``. The working tree has to be clean, and ``dist`` may not hold files of another version.

``--tag`` also wants the files that a release uploads, and then sets the tag ``v0.2.0`` on this commit. It pushes nothing. Exit
code 1: there are faults, which are printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("tilewise-{}-*manylinux*x86_64.whl", "tilewise-{}-*-any.whl", "tilewise-{}.tar.gz", "hub/README.md")
"""The files in ``dist`` that a release uploads."""


def version(root: Path) -> str:
    """Return the version in ``pyproject.toml``."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def faults_of_version(root: Path) -> list[str]:
    """Return what does not agree with the version in ``pyproject.toml``."""
    wanted = version(root)
    package = (root / "src" / "tilewise" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)[1]
    faults = [f"tilewise.__version__ is {found}, pyproject.toml has {wanted}"] if found != wanted else []
    title = re.search(r"^## (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1]
    if not re.fullmatch(rf"{re.escape(wanted)} \(\d{{4}}-\d\d-\d\d\)", title):
        faults.append(f'CHANGELOG.md begins with "{title}" instead of "{wanted} (YYYY-MM-DD)"')
    return faults


def faults_of_tree(root: Path) -> list[str]:
    """Return why this commit cannot be tagged."""
    tag = f"v{version(root)}"
    faults = ["there are uncommitted changes"] if _git(root, "status", "--porcelain") else []
    return [*faults, f"the tag {tag} exists already"] if _git(root, "tag", "--list", tag) else faults


def faults_of_files(root: Path, built: bool) -> list[str]:
    """Return the files of other versions in ``dist`` and, once all are ``built``, those that a release lacks."""
    dist, wanted = root / "dist", version(root)
    others = [file for file in sorted(dist.glob("tilewise-*")) if not file.name.startswith(f"tilewise-{wanted}")]
    faults = [f"dist/{file.name} is of another version" for file in others]
    if not built:
        return faults
    faults += [f"there is no dist/{name.format(wanted)}" for name in FILES if not list(dist.glob(name.format(wanted)))]
    return [*faults, *([] if (root / "build" / "site" / "index.html").exists() else ["there is no build/site"])]


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def main(words: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m shipping.release", description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", action="store_true", help="the files are built: tag this commit")
    options = parser.parse_args(words)
    faults = faults_of_version(root) + faults_of_tree(root) + faults_of_files(root, built=options.tag)
    if faults:
        print("\n".join(f"FAIL {fault}" for fault in faults))
        return 1
    tag = f"v{version(root)}"
    if options.tag:
        _git(root, "tag", "--annotate", tag, "--message", f"tilewise {version(root)}")
        print(f"{tag} is set; upload dist and build/site, then: git push origin {tag}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
