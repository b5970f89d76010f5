"""Work in processes with a time limit: what a process wrote stays, whatever becomes of it.

A :class:`Job` is a process that works through *items*. It writes a line when an item begins and one when it ends. When the process
dies, or one item takes too long, another process goes on after that item, so that an item that hangs costs only its own time.
A :class:`Run` is the folder of these lines, and the time that is left.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.5  # seconds between two looks at a process
SAID = 600  # characters of what a failure said that are kept


@dataclass(frozen=True)
class Job:
    """A process: the worker ``name`` ("part" or "part:index/count"), or another Python command.

    limit: seconds of the job. item_limit: seconds of one item. prefix: a program that the process runs under.
    """

    name: str
    limit: float
    item_limit: float = 120.0
    command: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()


@dataclass
class Run:
    """A folder of lines (``rows.jsonl``), logs and caches, and the minutes it may take.

    worker: the words after ``python`` that start a worker. inline: works through a job in this process, in place of one of its own.
    again: whether kernels are checked whose programs were right before.
    """

    folder: Path
    minutes: float
    worker: tuple[str, ...] = ()
    inline: Callable[[str], None] | None = None
    again: bool = False
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def file(self) -> Path:
        return self.folder / "rows.jsonl"

    @property
    def left(self) -> float:
        return self.started + 60 * self.minutes - time.monotonic()

    def add(self, **row: object) -> None:
        """Writes one line at once: many processes append to the file."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self, job: str = "") -> list[dict]:
        """The lines so far, of one job or of all."""
        text = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        found = [json.loads(line) for line in text if line.endswith("}")]
        return [row for row in found if not job or row.get("job") == job]

    def items(self) -> list[dict]:
        """The last line of each item: one that began and did not end died, or ran out of time."""
        return list({(row["job"], row["item"]): row for row in self.rows() if "item" in row}.values())

    def all(self, jobs: Iterable[Job], together: int = 1, reserve: float = 0.0) -> None:
        """Runs jobs, so many at a time, and leaves ``reserve`` seconds for what comes after."""
        if self.inline is not None:
            for job in jobs:
                self.inline(job.name)
            return
        with ThreadPoolExecutor(together) as pool:
            list(pool.map(partial(self._until_done, reserve=reserve), jobs))

    def _until_done(self, job: Job, reserve: float) -> None:
        """Starts the job again and again while it dies, as long as it dies in another item each time."""
        end, seen = time.monotonic() + min(job.limit, self.left - reserve), -1
        while True:
            how = self._once(job, end)
            self.add(part="job", job=f"job {job.name}", state="ended", detail=how, left=round(self.left))
            begun = len(self.rows(job.name))
            if job.command or how in ("", "out of time") or begun == seen or time.monotonic() > end:
                return
            seen = begun

    def _once(self, job: Job, end: float) -> str:
        """How one process of the job ended; empty: well."""
        seconds = end - time.monotonic()
        if seconds < 3:
            return "out of time"
        log = self.folder / "logs" / f"{job.name.replace(':', '-').replace('/', '-')}.txt"
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "TILEWISE_CACHE": str((self.folder / "cache").resolve())}
        words = [*job.prefix, sys.executable, *(job.command or (*self.worker, "--worker", job.name))]
        with log.open("a", encoding="utf-8") as file:
            options = {"stdout": file, "stderr": file, "cwd": ROOT, "env": env, "start_new_session": True}
            process = subprocess.Popen(words, **options)
            code, why = self._watched(process, job, end)
        if code == 0:
            return ""
        said = log.read_text(encoding="utf-8", errors="replace")[-SAID:]
        return f"{why}: {said}" if code is None else f"exit code {code}: {said}"

    def _watched(self, process: subprocess.Popen, job: Job, end: float) -> tuple[int | None, str]:
        """The exit code, or None and the reason why the process was ended, its children with it."""
        lines, changed = -1, time.monotonic()
        while True:
            try:
                return process.wait(timeout=POLL), ""
            except subprocess.TimeoutExpired:
                now, found = time.monotonic(), self._lines_of(job)
            lines, changed = found, (changed if found == lines else now)
            stuck = not job.command and now - changed > job.item_limit
            if now > end or stuck:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None, f"no end in {now - changed:.0f} s of an item" if stuck else "no end in its time"

    def _lines_of(self, job: Job) -> int:
        """How many lines a job has written; cheap enough to ask often."""
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        return text.count(f'"job": "{job.name}"')


class Item(NamedTuple):
    """One piece of work: its name, what does it and returns a row with a ``state``, and the group that is given up if it dies."""

    name: str
    work: Callable[[], dict]
    group: str = ""


@dataclass
class Worker:
    """A process that works through items and says of each that it began, and how it ended."""

    run: Run
    job: str

    @property
    def part(self) -> str:
        return self.job.partition(":")[0]

    def share(self, items: list) -> list:
        """The items of ``part:index/count``."""
        index, _, count = self.job.partition(":")[2].partition("/")
        return items[int(index) :: int(count)] if count else items

    def emit(self, **row: object) -> None:
        self.run.add(part=self.part, job=self.job, **row)

    def each(self, items: Iterable[Item]) -> None:
        """Works through the items that no earlier process of this job began, but for those of a group in which one died.

        A GPU that an error left unusable ends the process.
        """
        last = {row["item"]: row for row in self.run.rows(self.job) if "item" in row}
        dead = {row["group"] for row in last.values() if row["state"] == "begun" and row["group"]}
        for item in items:
            if item.name in last or item.group in dead:
                continue
            self.emit(item=item.name, group=item.group, state="begun")
            started = time.monotonic()
            try:
                row = item.work()
            except Exception as error:
                row = {"state": "error", "detail": innermost(error)}
            seconds = round(time.monotonic() - started, 2)
            self.emit(item=item.name, group=item.group, seconds=seconds, **row)
            if row["state"] == "error":
                _synchronize()


def _synchronize() -> None:
    """Waits for the GPU, if this process uses one, and raises what is left of an error there."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def innermost(error: BaseException) -> str:
    """The last words of the first cause: Triton wraps a compiler's error once per function."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-SAID:]


def pytest_job(run: Run, name: str, limit: float, together: int, *arguments: str) -> Job:
    """Tests, each with a line of its own among the rows."""
    words = ["-p", "tests.gpu.lines", "--lines", str(run.file.resolve()), "--lines-job", name, "-p", "no:cacheprovider"]
    words += ["-n", str(together)] if together > 1 else []
    return Job(name, limit, command=("-m", "pytest", *words, *arguments))
