"""Installs a wheel as a stranger would, and tries it: ``python -m shipping.installs WHEEL``.

    shipping.installs WHEEL [--python PYTHON ...] [--torch REQUIREMENT|machine] [--triton REQUIREMENT] [--out FILE.json]

For each Python: a fresh virtual environment, an empty working folder, a home that nothing can be written to, no compiler on the path, and
no cache folder. Then, one after the other and each in a process of its own: the install, ``import tilewise``, an attention with its
backward, ``tilewise explain``, on a Hopper GPU the first calls of shipped kernels, ``tilewise doctor`` and ``tilewise verify``. ``--torch
machine`` takes the packages that each Python already has, without a network. Exit code 1: a step fails, or something was compiled or
written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

CALL = """
    import torch, tilewise as tw
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, 300, 4, 64, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3))
    more = {} if device == "cuda" else {"mask": tw.window(left=99), "score": tw.softcap(30.0)}
    o = tw.attention(q, k, v, causal=True, **more)
    o.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    print(tw.explain(q, k, v, causal=True, **more).chosen)
"""
FIRST_CALL = """
    import json, sys, time, torch, tilewise as tw
    q, k, v, do = (torch.randn(1, 4096, 16, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    # CUDA, its libraries, and what PyTorch loads at its own first backward are there before the clock starts.
    torch.nn.functional.softmax(q @ q.mT, -1).sum().item()
    for x in (q, k, v):
        x.requires_grad_()
        for _ in range(2):
            (x * 2).backward(do)
    found = {}
    for name in ("first", "second"):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        o = tw.attention(q, k, v, causal=True)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        o.backward(do)
        torch.cuda.synchronize()
        found[f"{name} forward ms"] = 1e3 * (middle - begin)
        found[f"{name} backward ms"] = 1e3 * (time.perf_counter() - middle)
    found["backend"] = tw.explain(q, k, v, causal=True).chosen
    found["compilers imported"] = [name for name in ("cutlass", "triton") if name in sys.modules]
    print(json.dumps(found))
"""


@dataclass
class Trial:
    """A virtual environment, what runs in it, and what was seen: seconds, megabytes and words by step."""

    python: str
    folder: Path
    machine: bool
    seen: dict[str, object] = field(default_factory=dict)
    failed: bool = False

    @property
    def home(self) -> Path:
        """A home that is no folder, so that even root can write nothing to it."""
        return self.folder / "no-home"

    def step(self, name: str, *command: str, network: bool = False, bare: bool = True) -> str:
        """Runs a command of the environment, and keeps its seconds; returns what it printed. ``bare``: without compilers and a home,
        both of which Triton wants."""
        keep = (
            "LD_LIBRARY_PATH",
            "CUDA_VISIBLE_DEVICES",
            "SSL_CERT_FILE",
            *(x for x in os.environ if x[:4] == "PIP_" and network),
        )
        variables = {x: os.environ[x] for x in keep if x in os.environ}
        variables |= {"PATH": str(self.folder / "venv" / "bin"), "HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        if not bare:
            variables |= {"PATH": f"{variables['PATH']}{os.pathsep}{os.environ['PATH']}", "HOME": str(self.folder)}
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=self.folder / "empty", env=variables, capture_output=True, text=True)
        self.seen[f"{name}, s"] = round(time.perf_counter() - begin, 2)
        last = "".join(done.stdout.splitlines()[-1:])
        print(f"{name}: {self.seen[f'{name}, s']} s  {last}", file=sys.stderr, flush=True)
        if done.returncode:
            self.failed = True
            self.seen[f"{name}, error"] = (done.stdout + done.stderr)[-2000:]
        return done.stdout

    def run(self, name: str, program: str) -> str:
        return self.step(name, str(self.folder / "venv" / "bin" / "python"), "-c", textwrap.dedent(program)).strip()


def tried(python: str, wheel: Path, torch: str, triton: str) -> Trial:
    """One trial of a wheel under one Python."""
    with tempfile.TemporaryDirectory() as folder:
        t = Trial(python, Path(folder), torch == "machine")
        (t.folder / "empty").mkdir()
        t.home.touch()
        version = "import sys; print(sys.version.split()[0], sys.prefix)"
        t.seen["python"], prefix = subprocess.check_output([python, "-c", version], text=True).split()
        inherits = ["--system-site-packages"] * t.machine
        subprocess.run([python, "-m", "venv", "--without-pip", t.folder / "venv", *inherits], check=True)
        _install(t, wheel, torch, triton, prefix)
        if not t.failed:
            _use(t)
        t.seen["left in the home or the folder"] = sorted(p.name for p in (t.folder / "empty").iterdir())
        t.failed |= bool(t.seen["left in the home or the folder"])
        return t


def _install(t: Trial, wheel: Path, torch: str, triton: str, prefix: str) -> None:
    """Installs torch where asked, then the wheel with what it needs; the megabytes of each."""
    (site,) = (t.folder / "venv" / "lib").glob("python*/site-packages")
    own = str(t.folder / "venv" / "bin" / "python")
    pip = [
        str(Path(shutil.which(t.python) or t.python)),
        "-m",
        "pip",
        "--python",
        own,
        "install",
        "--quiet",
        "--no-cache-dir",
    ]
    if t.machine:
        version = ".".join(str(t.seen["python"]).split(".")[:2])
        (site / "machine.pth").write_text(
            f"{prefix}/lib/python{version}/site-packages\n"
        )  # of a virtual environment too
        t.step("install tilewise", *pip, "--no-index", "--no-deps", str(wheel))
    else:
        before = _bytes(site)
        t.step("install torch", *pip, torch, *([triton] if triton else []), network=True)
        t.seen["torch, MB"] = _megabytes(_bytes(site) - before)
        before = _bytes(site)
        t.step("install tilewise", *pip, str(wheel), network=True)
        t.seen["tilewise and the rest, MB"] = _megabytes(_bytes(site) - before)
    t.seen["tilewise, MB"] = _megabytes(_bytes(site / "tilewise"))


def _use(t: Trial) -> None:
    t.seen["torch"] = t.run("import torch", "import torch; print(torch.__version__)")
    t.run("import tilewise", "import tilewise")
    t.seen["backend"] = t.run("attention and backward", CALL)
    command = str(t.folder / "venv" / "bin" / "tilewise")
    t.seen["explain says"] = t.step(
        "tilewise explain", command, "explain", "--causal", "--dtype", "bfloat16", "--backward"
    )
    capability = "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_capability())"
    if t.run("ask for a GPU", capability) == "(9, 0)":
        found = json.loads(t.run("first calls", FIRST_CALL) or "{}")
        t.seen |= found
        t.failed |= found.get("backend") != "hopper" or bool(found.get("compilers imported"))
    t.seen["doctor says"] = t.step("tilewise doctor", command, "doctor").strip().splitlines()
    t.seen["verify says"] = t.step("tilewise verify", command, "verify", bare=False).strip().splitlines()[-3:]


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def _megabytes(size: int) -> float:
    return round(size / 1e6, 1)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shipping.installs", description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--torch", default="machine", help="what pip installs, or machine")
    parser.add_argument("--triton", default="", help="what pip installs of Triton")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    trials = []
    for python in options.python:
        if shutil.which(python) is None:
            parser.error(f"there is no {python}")
        trials.append(tried(python, options.wheel.resolve(), options.torch, options.triton))
        print(json.dumps(trials[-1].seen, indent=1), flush=True)
    if options.out:
        options.out.write_text(json.dumps([t.seen for t in trials], indent=1) + "\n")
    return 1 if any(t.failed for t in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
