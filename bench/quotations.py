"""What stands between the marks of docs/derivatives.md and docs/huggingface.md; the plot of whole models shows the latter too."""

from functools import cache
from itertools import product

from bench.records import select
from bench.tables import Results, grid, load, number, spread, wrapped

# ---- forward mode and second derivatives -----------------------------------------------------------------------------

EAGER = "eager"
SIZES = {f"{n:,}, D {dim}": f"n{n}-d{dim}" for dim, n in product((64, 128), (512, 1024, 2048, 4096, 8192, 16384))}
TENSORS = ("o tangent", "second dq", "second dk", "second dv", "second dsink", "second ddo")
TEXTS = {
    "triton-calls": "Milliseconds, and memory beyond inputs and outputs. Eager attention is to the right of each tilewise column.",
    "cpu-calls": (
        "One thread of a shared CPU, where only ratios of alternating runs are meaningful: multiples of tilewise's forward and "
        "backward. Eager attention is to the right of each tilewise column."
    ),
}
SHOWN = {"forward": ("jvp", "jvp-of-q"), "backward": ("second", "second MiB")}
"""What is shown beside each pass, and in its multiples."""
TITLES = {"jvp": "`jvp`", "jvp-of-q": "`jvp` of q", "second MiB": "second, MiB"}


def newest(found: Results) -> str:
    """The newest run that checked derivatives and timed them."""
    return found.run_of("python -m bench.calls derivatives")


def derivative_times(found: Results, run: str) -> list[str]:
    """A table of forward mode and one of second derivatives by length and head dim, each column of tilewise beside eager's.

    Milliseconds and multiples of forward and backward; of a CPU, whose cores others used too, only multiples.
    """
    relative, ours = "NVIDIA" not in found.runs[run]["device"], next(iter(found.runs[run]["peers"]))

    def value(name: str, who: str, size: str, direction: str) -> float | None:
        """Milliseconds of a derivative, or its MiB."""
        what, _, unit = name.partition(" ")
        return found.value(run, f"derivatives-{what}-{size}", who, direction, "memory" if unit else "time")

    lines: list[str] = []
    sizes = {title: size for title, size in SIZES.items() if value("forward", ours, size, "forward") is not None}
    for base, names in SHOWN.items():

        def cell(size: str, column: tuple[str, str, bool], base: str = base) -> str:
            name, who, over = column
            x = value(name, who, size, base)
            if over:
                x = x and x / value(base, ours, size, base)
            return number(x, 1 if over and not relative else 2 if x and x < 100 else 0)

        columns = []
        for name in names if relative else (base, *names):
            over = relative and "MiB" not in name
            title = TITLES.get(name, name) + f" over {base}" * over
            columns += [(title, (name, ours, over)), (EAGER, (name, EAGER, over))]
        if not relative:
            columns.append((f"{TITLES.get(names[0], names[0])} over {base}", (names[0], ours, True)))
        lines += ["", *grid(sizes, columns, cell, corner="N")]
    return lines[1:]


def derivative_errors(found: Results, run: str) -> list[str]:
    """The relative rms errors of each derivative, a row of tilewise's and one of eager attention's, a column for each case."""
    rows = [r for key, r in found.found.items() if key[0] == run and r["metric"] == "error"]
    by_place = {(r["shape"]["tensor"], r["shape"]["case"], r["shape"]["dtype"]): r for r in rows}
    tensors = [row for x in TENSORS for row in ((x, (x, "rms")), (f"… {EAGER}", (x, "rms_eager")))]

    def cell(row: tuple[str, str], case: tuple[str, str]) -> str | None:
        place = by_place.get((row[0], *case))
        return place and f"{place[row[1]]:.1e}"

    return grid(tensors, {f"{case}, {dtype}": (case, dtype) for _, case, dtype in by_place}, cell)


def derivatives() -> str:
    """All tables of docs/derivatives.md."""
    said = "Relative rms errors against float64 in the same run: tilewise, and below it eager attention."
    lines: list[str] = []
    for name, text in TEXTS.items():
        found = load(name)
        run = newest(found)
        lines += ["", *wrapped(f"{text} {found.source(run)}"), "", *derivative_times(found, run)]
        lines += ["", *wrapped(said), "", *derivative_errors(found, run)]
    return "\n".join(lines[1:])


# ---- whole models with sdpa and with tilewise ------------------------------------------------------------------------
#
# On a CPU a contestant's figure is its fastest run, since other work on the machine only adds. Attention's share is the time inside the
# function that transformers calls for it.

CONTESTANTS = ("eager", "sdpa", "tilewise")
N, SHORT, NEW, WINDOW = 4096, 1024, 16, 512
# What is timed, as the plot and the page name it.
TASKS = {
    "forward": ("forward", f"forward, {N} tokens"),
    "train": ("forward and backward", f"forward and backward, {N} tokens"),
    "padded": ("forward, padded batch", f"forward, two sequences of {N} and {SHORT} tokens in one padded batch"),
    "window": (f"forward, window of {WINDOW}", f"forward, {N} tokens, `MistralForCausalLM` with a window of {WINDOW}"),
    "prefill": ("prompt of generate", f"`generate`: the prompt of {N} tokens"),
    "token": ("a step of generate", f"`generate`: each of {NEW} tokens after it"),
}
CACHES = {
    f"{size.replace('x', ' × ')}{{}}, {cache}": f"{cache}-{size}"
    for cache in ("dynamic", "static")
    for size in ("1x1024", "16x2048")
}
STEPS, CONTEXTS = "b12178aa0a97", (1024, 4096, 16384)
"""The run that timed training steps of a GPT on a GPU."""


def generated(cache: str, part: str, who: str) -> list[float]:
    """Milliseconds of a part of ``generate`` in each run that has the first call too, the newest last."""
    found, case = load("hopper-calls"), f"generate-{cache}-{part}"
    runs = [run for run in found.runs if f"generate-{cache}-first" in found.cases(run)]
    return [found.value(run, case, who, "forward", "host") / 1e3 for run in runs]


def paces(cache: str) -> list[float]:
    """How many times as fast as sdpa a step of ``generate`` is, in each run."""
    return [x / y for x, y in zip(*(generated(cache, "step", who) for who in CONTESTANTS[1:]), strict=True)]


def generating() -> str:
    """Steps of ``generate`` on a GPU, and the first call with a static cache, which transformers compiles."""
    columns = {f"{who}, ms": lambda cache, who=who: generated(cache, "step", who)[-1] for who in CONTESTANTS[1:]}
    columns["sdpa / tilewise"] = lambda cache: spread(paces(cache), 2)
    for who in CONTESTANTS[1:]:
        columns[f"first call: {who}, s"] = lambda cache, who=who: (
            spread([x / 1e3 for x in generated(cache, "first", who)], 0) if cache.startswith("static") else None
        )
    rows = {title.format(""): cache for title, cache in CACHES.items()}
    table = grid(rows, columns, lambda cache, shown: shown(cache), 2, "sequences × tokens, cache")
    found = load("hopper-calls")
    return "\n".join([*table, "", *wrapped(found.source(found.run_of("python -m bench.calls generate")))])


def beside_sdpa() -> dict[str, dict[str, float]]:
    """How many times as fast as with sdpa a model is: by machine and by what it does."""
    steps, cpu = load("hopper-calls"), fastest()

    def step(context: int) -> float:
        times = [steps.value(STEPS, f"gpt-step-n{context}", who, "step", "time") for who in ("sdpa", "hopper")]
        return times[0] / times[1]

    return {
        f"A step of generate, Llama of 12 layers, bf16, {steps.runs[steps.run_of('python -m bench.calls generate')]['device']}": {
            f"{title.format(' tokens')} cache": paces(cache)[-1] for title, cache in CACHES.items()
        },
        f"A training step, GPT of 6 layers, bf16, {steps.runs[STEPS]['device']}": {
            f"context {n:,}": step(n) for n in CONTEXTS
        },
        "Llama of 6 layers, 4,096 tokens, fp32, two CPU cores": {
            title: cpu["sdpa"][task]["seconds"] / cpu["tilewise"][task]["seconds"] for task, (title, _) in TASKS.items()
        },
    }


@cache
def fastest() -> dict[str, dict[str, dict]]:
    """Each contestant's fastest run of each task, and its least peak of memory: kept memory is time's gain and peak's loss."""
    lines = load("cpu-calls").records

    def values(case: str, name: str, metric: str) -> dict[str, float]:
        return {r["run"]: r["value"] for r in select(lines, case=case, contestant=name, metric=metric)}

    def best(name: str, task: str) -> dict:
        times, inside = (values(case, name, "time") for case in (f"llama-{task}", f"llama-{task}-attention"))
        run = min(times, key=times.get)
        found = {"seconds": times[run] / 1e3, "gib": min(values(f"llama-{task}", name, "memory").values()) / 1024}
        return found | ({"attention_seconds": inside[run] / 1e3} if run in inside else {})

    return {name: {task: best(name, task) for task in TASKS} for name in CONTESTANTS}


def seconds_and_memory() -> str:
    """Seconds, peak memory above the weights, and tilewise's gain."""
    found = fastest()
    seconds = lambda task, who: found[who][task]["seconds"]  # noqa: E731
    columns = {f"{who}, s": lambda task, who=who: f"{seconds(task, who):#.3g}" for who in CONTESTANTS}
    columns |= {f"{who}, GiB": lambda task, who=who: found[who][task]["gib"] for who in CONTESTANTS}
    columns |= {f"× {x}": lambda task, who=x: seconds(task, who) / seconds(task, "tilewise") for x in CONTESTANTS[:2]}
    rows = {title: task for task, (_, title) in TASKS.items()}
    return "\n".join(grid(rows, columns, lambda task, shown: shown(task), 2))


def shares() -> str:
    """The share of attention in the time of the forward tasks."""
    found = fastest()
    rows = {title: task for task, (_, title) in TASKS.items() if "attention_seconds" in found["eager"][task]}
    share = lambda task, who: found[who][task]["attention_seconds"] / found[who][task]["seconds"]  # noqa: E731
    percent = lambda task, who: f"{100 * share(task, who):.0f} %"  # noqa: E731
    return "\n".join(grid(rows, {x: x for x in CONTESTANTS}, percent, corner="attention's share of the time"))


def architectures() -> str:
    """How many times as fast as with their own attention models of many architectures are, by the newest run of each device."""
    rows, columns, sources = {}, {}, []
    for name in ("hopper-calls", "cpu-calls"):
        found = load(name)
        run = found.run_of("python -m bench.calls models")
        if run is None:
            continue
        rows |= {case: case for case in found.cases(run)}
        where = "CPU" if name == "cpu-calls" else found.runs[run]["device"].removeprefix("NVIDIA ")
        titles = {"forward": "forward", "both": "forward and backward"}
        columns |= {f"{where}, {title}": (found, run, direction) for direction, title in titles.items()}
        sources.append(f"{where}: {found.source(run)}")

    def gain(case: str, of: tuple[Results, str, str]) -> float | None:
        found, run, direction = of
        own, mine = (found.value(run, case, who, direction, "time") for who in ("own", "tilewise"))
        return own / mine if own and mine else None

    return "\n".join([*grid(rows, columns, gain, 2, "how many times as fast"), "", *wrapped(" ".join(sources))])


QUOTED = {
    "measured": derivatives,
    "architectures": architectures,
    "generate": generating,
    "table": seconds_and_memory,
    "shares": shares,
}
