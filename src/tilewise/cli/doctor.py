"""`tilewise doctor`: what this machine and this installation are, in text that one can paste into an issue."""

import json
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.cli.page import progress

PACKAGES = {
    "torch": "",
    "triton": "pip install 'tilewise[triton]'",
    "nvidia-cutlass-dsl": "only kernels that are not shipped need it: pip install 'tilewise[kernels]'",
    "transformers": "only the Hugging Face integration needs it",
    "numpy": "torch warns without it",
}
"""The packages whose versions matter, and what to say where one is not installed."""


@dataclass(frozen=True)
class DoctorOptions:
    """How to print it."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False


def doctor(options: DoctorOptions) -> int:
    """Describe this machine for a bug report: which backends run, why others do not, and a check of one attention on each device.
    Exit code 1: the check is wrong or fails."""
    with progress() as bar:
        bar.add_task("looking at this machine", total=None)
        report = {name: _section(look) for name, look in SECTIONS.items()}
    lines = (line for name, section in report.items() for line in _lines(name, section))
    print(_without_home(json.dumps(report) if options.as_json else "\n".join(lines)))
    check = report["check"]
    return 1 if "error" in check or any("wrong" in str(said) for said in check.values()) else 0


def _section(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the findings of one look. The installation may be the very thing that is broken, so an error is part of the report."""
    try:
        return look()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


# -- The sections --------------------------------------------------------------------------------------------------


def _versions() -> dict[str, Any]:
    """Return the versions of tilewise, of Python and of the packages that tilewise may use."""
    import tilewise

    found = {"tilewise": f"{tilewise.__version__} in {Path(tilewise.__file__).parent}"}
    found["python"] = f"{platform.python_version()} on {platform.platform()}"
    for package, without in PACKAGES.items():
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed" + (f" ({without})" if without else "")
    return found


def _machine() -> dict[str, Any]:
    """Return the processor, the GPUs that torch sees, and their driver."""
    import torch

    from tilewise import device as devices

    cpu = devices.of(torch.device("cpu"))
    found: dict[str, Any] = {"cpu": f"{cpu.name}, {os.cpu_count()} cores, {cpu.cores} threads of torch"}
    with warnings.catch_warnings(record=True) as said:  # torch warns where it has a driver that it cannot use
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for n in range(count):
        gpu = devices.of(torch.device("cuda", n))
        capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
        found[f"cuda:{n}"] = f"{gpu.name}, {capability}, {gpu.cores} SMs, {gpu.memory / 2**30:.1f} GiB"
    if not count:
        found["gpu"] = "; ".join(["torch sees none", *[str(warning.message) for warning in said]])
    found["driver"] = _driver()
    found["torch's CUDA"] = torch.version.cuda or torch.version.hip or "none: a build for the CPU"
    return found


def _driver() -> str:
    """Return the version of NVIDIA's kernel driver."""
    file = Path("/proc/driver/nvidia/version")
    if not file.exists():
        return "none of NVIDIA's"
    text = file.read_text(encoding="utf-8")
    version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return version[0] if version else text.splitlines()[0]


def _devices() -> list[str]:
    import torch

    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def _backends() -> dict[str, Any]:
    """Return every backend that would be tried, by device: it runs a small bf16 attention and its backward, or every reason why not."""
    import torch

    from tilewise import dispatch
    from tilewise.problem import check
    from tilewise.spec import Options, assemble, parse_spec

    found = {}
    for device in _devices():
        q, k, v = (torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
        extras, seed, text = assemble(q, k, v, Options(causal=True))
        problem = check(q, k, v, extras, seed, parse_spec(text))
        for row in dispatch.BACKENDS:
            reasons = _reasons(lambda name=row.name, p=problem: dispatch.backend(name).unsupported(p))
            found[f"{row.name} on {device}"] = reasons or _runs(row.name, problem.device)
    return found


def _runs(name: str, device: Any) -> str:
    """Say that a backend runs, and whether its kernels for such a device have ever run."""
    from tilewise.backends.triton.config import NEVER_RUN, architecture

    if name != "triton" or device.type != "cuda" or architecture(device) not in NEVER_RUN:
        return "runs"
    arch = NEVER_RUN[architecture(device)]
    return f"its kernels for {arch} are compiled in its tests and have never run: `tilewise verify` checks them here"


def _reasons(ask: Callable[[], list[str]]) -> list[str]:
    """Return the reasons that a backend gives, its own failure to load among them."""
    try:
        return ask()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _libraries() -> dict[str, Any]:
    """Return the two native libraries: loaded, or why not; and the instruction set that the CPU backend uses."""
    from tilewise.backends.cpu import library
    from tilewise.backends.hopper.host import driver

    loaded, launcher = library.load(), driver.load()
    isas = loaded if isinstance(loaded, str) else f"loaded; {library.chosen_isa()} of {', '.join(loaded.isas)}"
    return {"cpu": isas, "launcher": launcher if isinstance(launcher, str) else "loaded"}


def _hopper_kernels() -> dict[str, Any]:
    """Return how many kernels came with the package, and how many were compiled on this machine at their first call."""
    from tilewise.backends.hopper.host import compiler, kernel_files

    folder, cache = kernel_files.folder(), kernel_files.cache()
    files, usable = len(list(folder.glob("*.kernel"))), len(kernel_files.index())
    found = {
        "shipped": usable,
        "folder": str(folder),
        "compiled here": kernel_files.built_here(),
        "cache": str(cache),
        "compiler": compiler.unusable() or "one that kernels were tried with",
    }
    return found | (
        {"not used": f"{files} files that were compiled from other sources"} if files and not usable else {}
    )


def _caches() -> dict[str, Any]:
    """Return the folders that hold what was measured or compiled on this machine, and how much."""
    from tilewise import settings

    triton = Path(os.environ.get("TRITON_CACHE_DIR") or settings.home() / ".triton" / "cache")
    return {str(folder): _size(folder) for folder in (settings.cache_folder(), triton)}


def _size(folder: Path) -> dict[str, int] | str:
    if not folder.is_dir():
        return "not there"
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def _settings() -> dict[str, Any]:
    """Return the environment variables that change what tilewise does."""
    prefixes = ("TILEWISE_", "TRITON_", "OMP_", "GOMP_", "CUDA_VISIBLE", "PYTORCH_")
    named = {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
    return named or {"environment": "nothing is set"}


def _check() -> dict[str, Any]:
    """Check a causal attention and its backward in bf16 on each device, every backend against float64."""
    import torch

    from tilewise import selfcheck

    begin, found = time.perf_counter(), {}
    for device in _devices():
        for row in selfcheck.verify(device, (torch.bfloat16,), ("causal",)).rows:
            judged = f"{'agrees' if row.ok else 'wrong'}: {row.tensor} {row.error:.1e}, allowed {row.allowed:.1e}"
            found[f"{row.backend} on {device}"] = "refused" if row.ok is None else judged
    return {**found, "seconds": round(time.perf_counter() - begin, 1)}


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "versions": _versions,
    "machine": _machine,
    "backends": _backends,
    "libraries": _libraries,
    "kernels": _hopper_kernels,
    "caches": _caches,
    "settings": _settings,
    "check": _check,
}


# -- The text ------------------------------------------------------------------------------------------------------


def _lines(name: str, section: dict[str, Any]) -> Iterator[str]:
    """A section as text: its name before its first line."""
    for n, (key, value) in enumerate(section.items()):
        yield f"{'' if n else name:10} {key}: {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count:,} {what}" for what, count in value.items())
    return "; ".join(value) if isinstance(value, list) else str(value)


def _without_home(text: str) -> str:
    """Return the text with the user's home as ``~``."""
    from tilewise import settings

    home = str(settings.home())
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
