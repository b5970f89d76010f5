"""Is every kernel of a backend right? Calls against float64 by the error rule, NaN left of poisoned outputs, the bits of later runs.

contract   the contract's cases and larger ones, by whatever the backend chooses
features   masks, scores and dropout, one each, at several head dims
kernels    every kernel by itself; one whose program was right before is not checked again, unless --again says so
dropout    many seeds of one case
launches   random calls on two streams, by thousands (stress.py)
busy       the same while other processes keep the device at work
fuzz       random calls against float64 (tests/fuzz.py)
tests      tests/gpu
sanitize   compute-sanitizer on the first calls of a few kernels
"""

from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from itertools import groupby, islice

import torch
from torch import Tensor

from bench import cases, records, testing
from bench import check as rule
from bench.testing import Call, far_off, other_bits, poisoned
from tests.judge import stress
from tests.judge.jobs import Item, Job, Run, Worker, pytest_job
from tests.judge.subject import Kernel, Subject
from tilewise import accuracy
from tilewise.backends.base import Backend, Output
from tilewise.reference import Reference

PARTS = ("contract", "features", "kernels", "dropout", "launches", "busy", "fuzz", "tests", "sanitize")
RUNS = 3  # of a call: from the second on some backends go straight to what the first compiled
SEEDS = 40
TESTS_TOGETHER = 4
MOST = 0.8  # of a run's time that one part may take
TOOLS = {
    tool: ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "3")
    for tool in ("memcheck", "racecheck")
}


class Judged:
    """A call with what judges it; each is computed when it is first asked for, once for all kernels."""

    def __init__(self, c: Call):
        self.c = c

    def of(self, direction: str) -> Call:
        """The call as a kernel of that direction takes it: a forward wants no gradients."""
        return self.c.forward_only() if direction == "forward" else self.c

    @cached_property
    def expected(self) -> accuracy.Expected:
        return self.c.expected()

    @cached_property
    def output(self) -> Output:
        """The reference's output, rounded as a forward rounds it: a wrong forward does not hide a right backward."""
        out = Reference().forward(self.c.p, self.c.t)
        return Output(out.o.to(self.c.p.dtype).contiguous(), out.lse.float())


def checked(kernel: Kernel, judged: Judged) -> dict:
    """The row of one kernel in one call: refused, wrong, or ok; an exception is the caller's."""
    backend, c = kernel.backend(), judged.of(kernel.direction)
    reasons = backend.unsupported(c.p)
    if reasons:
        return {"state": "refused", "detail": "; ".join(reasons)}
    runs = [run_once(kernel.direction, backend, judged) for _ in range(RUNS)]
    errors = judged.expected.judge(runs[0])
    wrong = [f"{e}; {far_off(runs[0][e.tensor], judged.expected.oracle[e.tensor])}" for e in errors if not e.ok]
    wrong += [f"a later run gave other bits of {name}" for name in unsteady(kernel, c, runs)]
    worst = max((rule.share(e) for e in errors), default=0.0)
    return {"state": "wrong" if wrong else "ok", "detail": "; ".join(wrong), "share": round(worst, 4)}


def run_once(direction: str, backend: Backend, judged: Judged) -> dict[str, Tensor]:
    """The results of one run of a direction, by name."""
    c = judged.of(direction)
    if direction != "backward":
        return testing.results(backend, c)
    with poisoned():
        grads = backend.backward(c.p, c.t, judged.output, c.do, c.dlse)
    return {name: x for name, x in accuracy.tensors(judged.output, grads).items() if name.startswith("d")}


def unsteady(kernel: Kernel, c: Call, runs: list[dict[str, Tensor]]) -> list[str]:
    """The tensors whose bits a later run changed, but for those that may: sums in any order, unless the call forbids them."""
    found = {name for later in runs[1:] for name in other_bits(runs[0], later)}
    if not c.p.spec.deterministic:
        found = {name for name in found if name not in kernel.loose and not name.startswith("dleaf")}
    return sorted(found)


# ---- the items of each part -----------------------------------------------------------------------------------------


def whole(subject: Subject) -> Kernel:
    """The backend as it chooses by itself, as a kernel."""
    loose = frozenset({"dq"}) if subject.name == "hopper" else frozenset()
    return Kernel(subject.name, "both", None, subject.backend, subject.contract, loose=loose)


def of_calls(kernel: Kernel, named: Iterable[tuple[str, Call]]) -> Iterator[Item]:
    for label, c in named:
        yield Item(label, partial(checked, kernel, Judged(c)))


def of_kernels(kernels: Iterable[Kernel]) -> Iterator[Item]:
    """Every call of every kernel; what judges a call is computed once for the kernels of a kind."""
    for (_, direction), kin in groupby(kernels, lambda k: (k.kind, k.direction)):
        alike = list(kin)
        for label, c in alike[0].calls():
            judged = Judged(c.forward_only() if direction == "forward" else c)
            for kernel in alike:
                yield Item(f"{kernel.name} {label}", partial(checked, kernel, judged), kernel.name)


def contract_worker(worker: Worker, subject: Subject) -> None:
    worker.each(worker.share(list(of_calls(whole(subject), subject.contract()))))


def features_worker(worker: Worker, subject: Subject) -> None:
    named = ((case.name, subject.allowed(testing.of_case(case, subject.device))) for case in subject.featured())
    worker.each(of_calls(whole(subject), named))


def kernels_worker(worker: Worker, subject: Subject) -> None:
    worker.each(of_kernels(worker.share(subject.kernels() if worker.run.again else subject.waiting())))


def dropout_worker(worker: Worker, subject: Subject) -> None:
    """contract-dropout with many seeds: its dv once had one element too wrong."""
    case, seeds = cases.named("contract-dropout"), range(SEEDS if subject.device == "cuda" else 2)
    named = ((f"seed {n}", testing.of_case(case, subject.device, n)) for n in seeds)
    worker.each(of_calls(whole(subject), named))


def sanitize_worker(worker: Worker, subject: Subject) -> None:
    """The first calls of the kernels that stand for all, for compute-sanitizer to look at."""

    def looked_at(kernel: Kernel, judged: Judged) -> dict:
        run_once(kernel.direction, kernel.backend(), judged)
        if subject.device == "cuda":
            torch.cuda.synchronize()
        return {"state": "ok"}

    def items() -> Iterator[Item]:
        for kernel in (k for k in subject.kernels() if k.name.startswith(subject.probes)):
            for label, c in islice(kernel.calls(), 3):
                judged = Judged(c.forward_only() if kernel.direction == "forward" else c)
                yield Item(f"{kernel.name} {label}", partial(looked_at, kernel, judged), kernel.name)

    worker.each(items())


WORKERS = {
    "contract": contract_worker,
    "features": features_worker,
    "kernels": kernels_worker,
    "dropout": dropout_worker,
    "memcheck": sanitize_worker,
    "racecheck": sanitize_worker,
    **stress.WORKERS,
}


def phase(run: Run, subject: Subject, part: str) -> None:
    """Runs the jobs of a part, many at once where most of the time is compiling."""
    n, most = subject.scale.together if subject.compiles else 1, MOST * 60 * run.minutes
    if part == "fuzz":
        words = ("--backend", subject.name, "--device", subject.device, "--seconds", str(round(most / 2)))
        run.all([Job(part, most, command=("-m", "tests.fuzz", *words))])
    elif part in stress.WORKERS:
        beside = stress.jobs(run, part)
        run.all(beside, len(beside))
    elif part == "tests":
        keys = f"{subject.name} and not agrees_with_the_oracle and not sanitizers_find or inductor or autocast"
        files = [f"tests/gpu/test_{name}.py" for name in (subject.name, "gpu")]
        run.all([pytest_job(run, part, most, min(n, TESTS_TOGETHER), *files, "-m", "gpu", "-k", keys)])
    elif part == "sanitize" and subject.probes:
        run.all([Job(tool, most, prefix=prefix) for tool, prefix in TOOLS.items()])
    elif part == "sanitize":
        words = (f"tests/gpu/test_{subject.name}.py", "-m", "gpu", "-k", "sanitizers_find", "--timeout", "170")
        run.all([pytest_job(run, part, 180, 8, *words)], reserve=3)
    else:
        run.all([Job(f"{part}:{k}/{n}", most) for k in range(n)], n)


# ---- what was found -------------------------------------------------------------------------------------------------


def results_of(run: Run, subject: Subject, name: str) -> list[dict]:
    """How many calls or launches of each kernel were right, as results of the run of that name."""
    kernels = {kernel.name: kernel for kernel in subject.kernels()}
    counted: dict[tuple[str, str], list[str]] = {}
    for row in run.items():
        states = [row["state"]] * row.get("launches", 1)
        counted.setdefault((row["part"], row.get("group") or subject.name), []).extend(states)
    found = []
    for (part, who), states in ((key, x) for key, x in counted.items() if key[0] in PARTS):
        kernel, called = kernels.get(who), [s for s in states if s not in ("refused", "skipped")]
        proves = kernel and kernel.cubin and part == "kernels"
        more = {"program": kernel.program, "cubin": kernel.cubin} if proves else {}
        more |= {"of": len(called), "refused": len(states) - len(called), "shape": {"what": part}}
        direction = kernel.direction if kernel else "both"
        found.append(records.result(name, f"check-{part}", who, direction, "right", called.count("ok"), **more))
    return found


def prove(subject: Subject, found: Iterable[dict]) -> str:
    """Remembers the kernels of which results say that every call was right."""
    counts = [r for r in records.select(found, metric="right") if "cubin" in r]
    return subject.prove([r for r in counts if r["of"] and r["value"] == r["of"]])
