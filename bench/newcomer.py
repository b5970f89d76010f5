"""The first commands of someone who finds the project, in an empty folder: how long each took, and the last lines that it showed.

    python -m bench.newcomer --out FILE.jsonl            # clones this checkout's last commit; about ten minutes on two cores

The commands are those of README.md in its order. The first builds an environment, whose packages come from the network or pip's cache.
docs/evidence.md shows the newest run of bench/results/cpu-calls.jsonl.
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench import records
from bench.measure import ROOT

COMMAND = "python -m bench.newcomer"
COMMANDS = (
    "make demo",
    "tilewise doctor",
    "tilewise verify",
    'tilewise show "causal() & window(256, 0)"',
    "tilewise bench --tag cpu",
    "make docs",
)
LINES = 3
"""Of what a command shows, that are kept."""


def study(commands: Iterable[str], folder: Path) -> Iterator[dict]:
    """Yields the run's record, then a result for each command run in a fresh clone below the folder."""
    load = os.getloadavg()[0]
    head = records.run(COMMAND, "cpu", {"newcomer": "the commands of README.md in a fresh clone"}, load=round(load, 1))
    yield head
    clone = folder / "tilewise"
    ways = {"PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb", "COLUMNS": "120"}
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    for number, command in enumerate((f"git clone --quiet {ROOT} {clone}", *commands)):
        began = time.perf_counter()
        done = subprocess.run(
            command, shell=True, cwd=clone if number else folder, env=kept | ways, text=True, capture_output=True
        )
        ms = (time.perf_counter() - began) * 1e3
        shape = {"command": command.replace(str(ROOT), "URL").replace(str(clone), "tilewise"), "exit": done.returncode}
        shown = (done.stdout or done.stderr).strip().splitlines()[-LINES:]
        print(f"{ms / 1e3:.1f} s, exit {done.returncode}: {shape['command']}", *shown, sep="\n    ", flush=True)
        yield records.result(head["run"], f"newcomer-{number}", "newcomer", "step", "time", ms, shape=shape)
        if done.returncode:
            return


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results are appended here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records.append(study(COMMANDS, Path(folder)), options.out.absolute())


if __name__ == "__main__":
    main()
