"""Make the folder for the Hugging Face kernels hub from a wheel: ``python -m shipping.hub WHEEL [--out dist/hub]`` (``make hub``).

    kernel = kernels.get_local_kernel(Path("dist/hub"), trust_remote_code=True)
    o = kernel.attention(q, k, v, causal=True)

The folder has ``build/torch-VARIANT`` for each of VARIANTS: the package as the wheel holds it, ``metadata.json``, and an ``__init__.py``
through which the hub's library imports it. The libraries in a wheel know neither Python nor torch, so one folder serves every
version of both; on other machines than the wheel's they do not load, and the portable backend runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import zipfile
from pathlib import Path

VARIANTS = {"torch-cuda": "cuda", "torch-cpu": "cpu"}
ENTRY = '''"""tilewise, as the Hugging Face kernels hub imports it: the public names of the package beside this file."""

import importlib.util
import sys
from pathlib import Path

VERSION = "{version}"


def _package():
    """The package, under its own name: its operators belong to the process. Another version of it cannot be beside it."""
    if "tilewise" not in sys.modules:
        file = Path(__file__).with_name("tilewise") / "__init__.py"
        spec = importlib.util.spec_from_file_location("tilewise", file, submodule_search_locations=[str(file.parent)])
        package = sys.modules["tilewise"] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules["tilewise"]
            raise
    package = sys.modules["tilewise"]
    if package.__version__ != VERSION:
        raise ImportError(f"tilewise {{package.__version__}} of {{package.__path__[0]}} is imported already; this is {{VERSION}}")
    return package


_package()
from tilewise import *  # noqa: E402, F403
from tilewise import __all__, __version__  # noqa: E402, F401
'''
CARD = """---
license: apache-2.0
library_name: kernels
tags: [kernels, attention]
---
# tilewise

Exact attention for PyTorch: any mask, any bias, all gradients, in linear memory, on CPUs and GPUs.
"""


def make(wheel: Path, out: Path) -> list[Path]:
    """Writes the folder of a wheel, in place of what lies there, and returns the variants' folders."""
    shutil.rmtree(out, ignore_errors=True)
    version, digest = wheel.name.split("-")[1], hashlib.sha256(wheel.read_bytes()).hexdigest()[:12]
    made = []
    for variant, backend in VARIANTS.items():
        folder = out / "build" / variant
        folder.mkdir(parents=True)
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [name for name in packed.namelist() if name.startswith("tilewise/")])
        (folder / "__init__.py").write_text(ENTRY.format(version=version), encoding="utf-8")
        (folder / "metadata.json").write_text(json.dumps(metadata(version, backend, digest), indent=2) + "\n")
        made.append(folder)
    (out / "README.md").write_text(CARD, encoding="utf-8")
    return made


def metadata(version: str, backend: str, digest: str) -> dict:
    """The metadata that the hub's library reads before it imports a kernel; its version is the first number of the package's."""
    number = int(version.split(".")[0])
    return {
        "id": f"_tilewise_{backend}_{digest}",
        "name": "tilewise",
        "version": number,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shipping.hub", description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path("dist/hub"))
    options = parser.parse_args(words)
    for folder in make(options.wheel, options.out):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{folder}  {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
