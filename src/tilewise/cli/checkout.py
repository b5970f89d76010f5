"""Finds the checkout: `bench/` and `examples/` are beside the package's sources and are not installed with it."""

import sys
from pathlib import Path

URL_HINT = "clone the repository and run `make demo`, or run this command inside a clone"


def root() -> Path:
    """Return the folder that holds bench/ and examples/: that of an editable install, else one above the current folder.

    Raises ValueError, saying what to do, outside a checkout.
    """
    here = Path(__file__).resolve().parents[3]
    for folder in (here, Path.cwd(), *Path.cwd().parents):
        if (folder / "bench" / "cases.py").is_file() and (folder / "src" / "tilewise").is_dir():
            return folder
    raise ValueError(f"this command needs tilewise's bench/ and examples/, which pip does not install: {URL_HINT}")


def use_bench() -> Path:
    """Make `import bench` find the checkout's. Returns the checkout's folder."""
    folder = root()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


def choose_device(wanted: str) -> str:
    """`auto` is the GPU if there is one. Raises ValueError for a device that this machine does not have."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(wanted).type
    except RuntimeError:
        raise ValueError(f"--device {wanted}: torch knows no such device; use auto, cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {wanted}: torch sees no CUDA device here; use --device cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device {wanted}: tilewise's commands run on cpu and cuda")
    return wanted
