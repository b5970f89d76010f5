"""Do many launches, beside each other and beside other work, end, and give the same bits every time?

launches  random calls on two streams: no hang, the bits of the first run, some of them compared with another backend
busy      the same while other processes keep the device at work
"""

import random
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import tilewise as tw
from bench.testing import Call, call, other_bits
from tests.judge.jobs import Item, Job, Run, Worker
from tests.judge.subject import Subject
from tilewise import accuracy, dispatch
from tilewise.backends.base import Backend
from tilewise.problem import TensorFacts

PER_ITEM = 140  # launches
REPEATS = {"forward": 5, "backward": 2}  # of a call, on each stream
BURNERS = 2


def launches_worker(worker: Worker, subject: Subject) -> None:
    """Items until so many launches were made; one in four also compares with another backend."""
    count = max(1, subject.scale.launches // PER_ITEM)
    worker.each(Item(f"launches {n}", partial(launched, subject, n, n % 4 == 0)) for n in range(count))
    (worker.run.folder / "stop").touch()


def launched(subject: Subject, seed: int, compares: bool) -> dict:
    """Random calls, each many times: what differs from the first time is wrong."""
    chance, backend, wrong, made = random.Random(seed), subject.backend(), [], 0
    longest = 3000 if subject.device == "cuda" else 30
    while made < min(PER_ITEM, subject.scale.launches):
        c = random_call(chance, subject.device, longest)
        if backend.unsupported(c.p):
            c = c.forward_only()
        if backend.unsupported(c.p):
            made += 1  # an endless row of refusals ends too
            continue
        found = on_two_streams(backend, c, subject.device)
        made += len(found)
        differing = sorted({name for later in found for name in other_bits(later, found[0])})
        wrong += [f"{c.p.describe()}: other bits of {', '.join(differing)}"] if differing else []
        if compares and made <= len(found):
            wrong += [f"{c.p.describe()}: {said}" for said in against(subject, c, found[0])]
    return {"state": "wrong" if wrong else "ok", "detail": "; ".join(wrong)[:1200], "launches": made}


def random_call(chance: random.Random, device: str, longest: int = 3000) -> Call:
    """A call of random lengths, groups, head dims and masks of numbers; sometimes one query of many keys, sometimes packed."""
    d, group, heads = chance.choice((64, 96, 128, 192, 256)), chance.choice((1, 2, 4, 8)), chance.randrange(1, 6)
    window = tw.window(chance.randrange(500), chance.randrange(50))
    options = chance.choice(({}, {"causal": True}, {"mask": window}))

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    if chance.random() < 0.3:
        lengths = [(_length(chance, longest), _length(chance, longest)) for _ in range(chance.randrange(1, 50))]
        cu_q, cu_k = (torch.tensor([0, *x, 1], device=device).cumsum(0).int() for x in zip(*lengths, strict=True))
        q, k, v = (new(int(cu[-1]), h, d) for cu, h in ((cu_q, heads * group), (cu_k, heads), (cu_k, heads)))
        return call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, deterministic=True, **options)
    batch, nq = chance.choice((1, 2)), chance.choice((1, 5, 128, chance.randrange(1, longest)))
    nk = chance.choice((1, 128, chance.randrange(1, longest), 7 * longest if nq < 6 else longest // 4))
    sizes = (nq, heads * group), (nk, heads), (nk, heads)
    return call(*(new(batch, n, h, d) for n, h in sizes), deterministic=True, **options)


def _length(chance: random.Random, longest: int) -> int:
    return chance.choice((0, 1, 17, 128, chance.randrange(1, longest // 2)))


def on_two_streams(backend: Backend, c: Call, device: str) -> list[dict[str, Tensor]]:
    """The results of every launch by name; the first holds all names."""
    cuda, found = device == "cuda", []
    streams = [torch.cuda.Stream() for _ in range(2)] if cuda else [None, None]
    out = backend.forward(c.p, c.t)
    for stream in streams:
        if cuda:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream) if cuda else nullcontext():
            outs = [backend.forward(c.p, c.t) for _ in range(REPEATS["forward"])]
            repeats = REPEATS["backward"] if c.p.spec.needs_grad else 0
            grads = [backend.backward(c.p, c.t, out, c.do, c.dlse) for _ in range(repeats)]
        found += [accuracy.tensors(x, None) for x in outs]
        found += [{n: x for n, x in accuracy.tensors(out, g).items() if n.startswith("d")} for g in grads]
    if cuda:
        torch.cuda.synchronize()
    whole = {name: x for named in reversed(found) for name, x in named.items()}
    return [whole, *found]


def against(subject: Subject, c: Call, found: dict[str, Tensor]) -> list[str]:
    """The faults of o and lse by the error rule: another backend in fp32 is the oracle, in 16 bits what eager attention is to it."""
    other = dispatch.backend("triton" if subject.name == "hopper" else "portable")
    c = c.forward_only()
    exact = replace(c.t, **{name: getattr(c.t, name).float() for name in "qkv"})
    facts = {name: TensorFacts.of(getattr(exact, name)) for name in "qkv"}
    coarse, fine = other.forward(c.p, c.t), other.forward(replace(c.p, **facts), exact)
    error = accuracy.judge("o", found["o"], fine.o, [coarse.o])
    same = torch.equal(found["lse"].isinf(), fine.lse.isinf())
    return ([] if error.ok else [str(error)]) + ([] if same else ["other rows see no key"])


def burn_worker(worker: Worker, subject: Subject) -> None:
    """Keeps the device at work until the launches have ended."""
    rows = torch.randn(4096 if subject.device == "cuda" else 64, 64, device=subject.device)
    until = time.monotonic() + 300

    def burn() -> dict:
        while time.monotonic() < until and not (worker.run.folder / "stop").exists():
            for _ in range(50):
                rows @ rows.mT
            if subject.device == "cuda":
                torch.cuda.synchronize()
        return {"state": "ok"}

    worker.each([Item("burn", burn)])


WORKERS = {"launches": launches_worker, "busy": launches_worker, "burn": burn_worker}


def jobs(run: Run, part: str) -> list[Job]:
    """The jobs of a part, all at once."""
    (run.folder / "stop").unlink(missing_ok=True)
    return [Job(part, 300), *(Job(f"burn:{n}", 300, item_limit=300) for n in range(BURNERS) if part == "busy")]
