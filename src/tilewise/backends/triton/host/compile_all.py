"""Compiles every configuration for GPUs that need not be there: ``python -m tilewise.backends.triton.host.compile_all``.

    compile_all [--sample] [ARCH ...]

``--sample`` compiles a few that stand for all, and architectures that are named are compiled alone.

For each architecture, dtype and row of config's table, the launches of a forward and a backward are recorded on tensors
without memory and compiled; then shared memory is held against ``tiles.shared_memory`` and the architecture's limit, and
registers and spills are reported. Exit code 1 if a kernel does not compile, or needs more shared memory than promised, or if its machine
code for sm_90 has a fault that :mod:`machine_code` knows.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from tilewise import device as devices
from tilewise.backends.base import Directions, Inputs, Output, OutputGrads, empty_output
from tilewise.backends.listed import rows_of
from tilewise.backends.sample import sample, values
from tilewise.backends.triton import Triton, config, listed
from tilewise.backends.triton.host import launch, runtime, tangent, tile_map
from tilewise.backends.triton.host.call import whole_grid
from tilewise.backends.triton.host.facts import Facts
from tilewise.backends.triton.host.listed import ListedCall
from tilewise.backends.triton.host.machine_code import faults, listings, serialised
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.paging import paged_config, paged_memory
from tilewise.backends.triton.reads import PairReads
from tilewise.backends.triton.tiles import Tiles, pieces
from tilewise.device import Device
from tilewise.masks.catalogue import block_sparse, causal, dense, keep, selected, window
from tilewise.planning.bit_tiles import Layout, Sections
from tilewise.planning.planner import MOST_ENTRIES, Kind, Sequences
from tilewise.problem import Problem, check
from tilewise.scores.catalogue import alibi, bias, score, softcap
from tilewise.spec import Options, assemble, parse_spec


@dataclass(frozen=True)
class Target:
    """An architecture of config's table, Triton's name for it, and a device of it, for which tensors without memory stand."""

    backend: str
    arch: int | str
    warp: int
    device: Device


TARGETS = {
    name: Target(backend, arch, warp, Device(name, backend, 132, config.SHARED_MEMORY[name], capability=capability))
    for name, backend, arch, warp, capability in (
        ("sm80", "cuda", 80, 32, (8, 0)),
        ("sm90", "cuda", 90, 32, (9, 0)),
        ("sm100", "cuda", 100, 32, (10, 0)),
        ("sm120", "cuda", 120, 32, (12, 0)),
        ("amd", "hip", "gfx942", 64, (9, 4)),
    )
}
DTYPES = (torch.bfloat16, torch.float32)


def _options(feature: str, q: torch.Tensor) -> dict[str, object]:
    """The options that a feature adds to a plain call; ``rich`` is everything that a kernel can have at once."""
    heads = q.shape[-2]
    capped = softcap(30.0) >> alibi(torch.empty(heads, device="meta", requires_grad=True))
    sink = torch.empty(heads, device="meta", requires_grad=True)
    pairs = lambda dtype: torch.empty(1, heads, *[q.shape[1]] * 2, dtype=dtype, device="meta", requires_grad=True)  # noqa: E731
    entries = lambda n: torch.empty(1, n, q.shape[1], 64, dtype=torch.int32, device="meta")  # noqa: E731
    table = torch.empty(heads, 256, device="meta", requires_grad=True)
    relative = score(lambda s, b, h, i, j: s + table[h, (i - j).clamp(0, 255)])
    of_all = torch.empty(heads, q.shape[1], device="meta", requires_grad=True)
    region = torch.empty(q.shape[1], dtype=torch.int32, device="meta")
    regions = {"mask": keep(lambda b, h, i, j: region[i] == region[j]), "score": bias(pairs(q.dtype))}
    return {
        "causal": {"causal": True},
        "full": {},
        "split": {},
        "parted": {"causal": True},
        "softcap": {"causal": True, "score": softcap(30.0)},
        "alibi": {"causal": True, "score": alibi(torch.empty(heads, device="meta", requires_grad=True))},
        "window": {"mask": window(100, 0)},
        "sparse": {"mask": block_sparse(torch.empty(32, 32, dtype=torch.bool, device="meta"), 128, 128)},
        "dense": {"mask": dense(torch.empty(*[q.shape[1]] * 2, dtype=torch.bool, device="meta"))},
        "selected": {"mask": causal() & (selected(entries(heads)) | selected(entries(1), 64))},
        "listed": {"mask": causal() & selected(entries(1))},
        "bias": {"causal": True, "score": bias(pairs(q.dtype))},
        "bias32": {"causal": True, "score": bias(pairs(torch.float32))},
        "of-keys": {"causal": True, "score": bias(torch.empty(heads, 1, q.shape[1], dtype=q.dtype, device="meta"))},
        "regions": regions,
        "windows": regions,
        "relative": {"causal": True, "score": relative},
        "distances": {"causal": True, "score": score(lambda s, b, h, i, j: s + of_all[h, i - j])},
        "latent": {"causal": True},
        "moving": {"causal": True, "score": capped},
        "rich": {
            "mask": causal() & window(100),
            "score": capped,
            "sink": sink,
            "dropout_p": 0.1,
            "dropout_seed": 1,
        },
    }[feature]


def _scales(*shape: int) -> dict[str, object]:
    """The scales of a quantised cache."""
    return {name: torch.empty(shape, device="meta") for name in ("k_scale", "v_scale")}


# Calls over pages: page size, pages of a sequence, queries of each, and options of q.
PAGED = {
    "paged": (64, 512, 1, lambda q: {"causal": True}),
    "pages16": (16, 512, 1, lambda q: {"causal": True}),
    "cache": (4096, 1, 1, lambda q: {}),
    "row": (64, 512, 1, lambda q: {"causal": True}),
    "chunk": (64, 512, 512, lambda q: {"causal": True}),
    "mla": (64, 128, 1, lambda q: {}),
    "mla-chunk": (64, 128, 64, lambda q: {"causal": True}),
    "mla-fp8": (64, 128, 1, lambda q: _scales(1)),
    "mla-keep": (64, 128, 8, lambda q: {"mask": keep(lambda b, h, i, j: (i + j) % 3 > 0)}),
    "mla-fp8-keep": (64, 128, 8, lambda q: {"mask": keep(lambda b, h, i, j: (i + j) % 3 > 0), **_scales(1)}),
    "fp8": (64, 512, 1, lambda q: _scales(8)),
    "fp8-each": (64, 512, 1, lambda q: _scales(4096, 64, 8)),
    "fp8-chunk": (64, 512, 512, lambda q: {"causal": True, **_scales(8)}),
    "verify": (
        64,
        512,
        4,
        lambda q: {
            "mask": window(1000, 0) & keep(lambda b, h, i, j: (i + j) % 3 > 0),
            "score": softcap(30.0) >> alibi(torch.empty(q.shape[-2], device="meta")),
            "sink": torch.empty(q.shape[-2], device="meta"),
        },
    ),
}

QUANTISED = tuple(name for name in PAGED if "fp8" in name)
LATENT = tuple(name for name in PAGED if name.startswith("mla"))


@dataclass(frozen=True)
class Item:
    """A problem whose launches are recorded and compiled, in a form that another process can rebuild."""

    arch: str
    dtype: torch.dtype
    head_dim: int
    feature: str
    products: str = "ieee"


def shared_memory(problem: Problem, name: str, tiles: Tiles) -> int:
    """The bytes that a kernel may need, as it was promised."""
    if name.startswith("tile_") or name in ("runs", "list_lines", "marked_rows"):
        return tile_map.SHARED_MEMORY
    if name == "sorted_entries":  # which pass through it from warp to warp
        return tile_map.SORTED_MEMORY
    if name in tangent.PASSES:
        return tangent.tangent_memory((problem.head_dim, problem.head_dim_v), problem.dtype.itemsize, name, tiles)
    if name == "paged":
        return paged_memory(problem, tiles)
    if name.startswith("listed"):
        return listed.SHARED_MEMORY[listed.is_wide(problem)]
    return config.needed(problem, name, tiles, PairReads.of(problem).bytes)


def call_of(item: Item) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, object]]:
    """q, k and v without memory, and the options of the call."""
    dims = item.head_dim, item.head_dim, min(item.head_dim, config.MAX_HEAD_DIM)
    if item.feature not in PAGED:
        heads = {"parted": (8, 1, 1), "listed": (64, 1, 1)}.get(item.feature, (8, 8, 8))
        seqlen = 144 if item.feature == "windows" else 4096
        q, k, v = (
            torch.empty((2, seqlen, h, d), dtype=item.dtype, device="meta", requires_grad=True)
            for h, d in zip(heads, dims, strict=True)
        )
        latent = item.feature == "listed" and item.head_dim == config.MAX_LATENT_DIM
        return q, k, k[..., : dims[2]] if latent else v, _options(item.feature, q)
    page_size, max_pages, queries, options = PAGED[item.feature]
    heads_q, heads_k = (128, 1) if item.feature in LATENT else (32, 32 if item.feature == "row" else 8)
    q = torch.empty((8, queries, heads_q, dims[0]), dtype=item.dtype, device="meta")
    of_pages = torch.float8_e4m3fn if item.feature in QUANTISED else item.dtype
    k, v = (torch.empty((4096, page_size, heads_k, d), dtype=of_pages, device="meta") for d in dims[1:])
    v = k[..., : dims[2]] if item.feature in LATENT else v
    integers = partial(torch.empty, dtype=torch.int32, device="meta")
    return q, k, v, {"block_table": integers(8, max_pages), "seqlens_k": integers(8), **options(q)}


def pass_name(kernel, facts: Facts) -> str:
    """The name of a kernel's launch, as in ``Config.passes`` where it is one of these."""
    name = kernel.fn.__name__.removesuffix("_kernel")
    if name != "dkdv":
        return name
    return {(True, True): "dkdv", (True, False): "dk", (False, True): "dv", (False, False): "pairs"}[facts.dk, facts.dv]


def made(item: Item) -> tuple[Problem, Inputs]:
    """The problem, and its tensors without memory."""
    q, k, v, options = call_of(item)
    extras, seed, text = assemble(q, k, v, Options(**options))
    problem = check(q, k, v, extras, seed, parse_spec(text))
    return problem, Inputs.of(problem, *[x.detach() for x in (q, k, v)], [x.detach() for x in extras], seed)


def recorded(item: Item) -> list[tuple]:
    """``(name, kernel, tiles, arguments)`` of every launch of a forward and a backward, and of those that plan a mask."""
    (problem, inputs), found = made(item), []

    def record(kernel, grid, tiles, *arguments):
        found.append((pass_name(kernel, arguments[-1]), kernel, tiles, arguments))

    with torch.no_grad(), on_target(item), runtime.recorded(record):
        out: Output = empty_output(problem, inputs.q, inputs.v)
        do, dlse = torch.empty_like(out.o), torch.empty_like(out.lse)
        if item.feature == "listed":
            plan = ListedCall(problem)
            plan.forward(inputs)
            plan.backward(inputs, out, do, dlse)
            _plan_lists(problem, inputs)
        elif item.feature == "moving":
            along = Directions(inputs.q, inputs.k, inputs.v, None, inputs.leaves)
            plan = tangent.new_plan(problem, configured(item, problem), problem.spec.score_slots)
            tangent.jvp(plan, inputs, out, along)
            tangent.backward_jvp(plan, inputs, out, OutputGrads(do, dlse), along, out)
        else:
            plan = Plan(problem, configured(item, problem))
            launch.forward(plan, inputs)
            if not problem.paged:
                launch.backward(plan, inputs, out, do, dlse)
            if plan.lists:
                _plan_mask(problem, inputs)
    return found


def _plan_mask(problem: Problem, inputs: Inputs) -> None:
    """Makes a bit for each pair of a mask, for both passes, and the runs of equal ids."""
    grid, shape = whole_grid(problem, inputs), (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    for by_columns in (False, True):
        layout = Layout.of(grid.region, shape, 128, by_columns, grid.leaves, sharing=problem.group)
        making = tile_map.all_of_bits(Kind.of(grid), layout, 128, by_columns, Sections(), problem.group)
        making(grid.leaves, grid.b.device)
    ids = grid.b[None]
    tile_map.runs((ids.shape, ids.stride(), ids.dtype), ids.device)((ids,), ids.device)


def _plan_lists(problem: Problem, inputs: Inputs) -> None:
    """Puts the entries of selected keys in order, and makes the lines of their lists."""
    entries = torch.empty((1, 1, problem.seqlen_q, MOST_ENTRIES), dtype=torch.int64, device="meta")
    tile_map.sorted_entries((entries.shape, entries.stride(), entries.dtype), entries.device)(
        (entries,), entries.device
    )
    sequences = Sequences(rows_of(problem), problem.group)
    tile_map.list_lines(Kind.of_problem(problem), sequences)(inputs.leaves, inputs.q.device)


@contextmanager
def on_target(item: Item) -> Iterator[None]:
    """A context in which tensors without memory stand for those of the problem's architecture, and fp32 is multiplied as it says."""
    matmul, before = torch.backends.cuda.matmul, dict(devices.STAND_INS)
    precision, matmul.fp32_precision = matmul.fp32_precision, "tf32" if item.products == "tf32" else "ieee"
    devices.STAND_INS["meta"] = TARGETS[item.arch].device
    try:
        yield
    finally:
        devices.STAND_INS.clear()
        devices.STAND_INS.update(before)
        matmul.fp32_precision = precision


def configured(item: Item, problem: Problem) -> config.Config:
    """The configuration that a problem has on an architecture that need not be there."""
    with on_target(item):
        chosen = Triton().config(problem)
        if item.feature == "parted":
            chosen = replace(chosen, group_parts=8)
        if item.feature == "split":
            chosen = replace(chosen, few=replace(paged_config(problem, chosen.products), splits=4))
    return chosen


def signature(x: object, path: tuple, constants: dict, aligned: dict) -> object:
    """Triton's type of an argument; compile-time ones go to ``constants``, pointers to ``aligned``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(x, torch.Tensor):
        aligned[path] = [["tt.divisibility", 16]]
        if x.dtype == torch.float8_e4m3fn:
            return "*fp8e4nv"
        names = {"float": "fp", "bfloat": "bf", "int": "i", "bool": "i1", "uint": "u"}
        kind, bits = re.fullmatch(r"torch\.([a-z]+)(\d*)", str(x.dtype)).groups()
        return f"*{names[kind]}{bits}"
    if isinstance(x, TensorDescriptor):
        kind = signature(x.base, path, {}, {})[1:]
        return f"tensordesc<{kind}[{', '.join(map(str, x.block_shape))}]>"
    if isinstance(x, tuple):
        parts = [signature(y, (*path, n), constants, aligned) for n, y in enumerate(x)]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    if x is None or isinstance(x, (bool, Facts)):
        constants[path] = x
        return "constexpr"
    return "fp32" if isinstance(x, float) else "i32"


@dataclass(frozen=True)
class Compiled:
    """A compiled launch, or the message of the error that it met."""

    name: str
    tiles: Tiles
    made: object = None
    seconds: float = 0.0
    error: str = ""


def compile_launches(item: Item) -> Iterator[Compiled]:
    """Every launch of a problem, compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = TARGETS[item.arch]
    for name, kernel, tiles, args in recorded(item):
        constants, aligned = {}, {}
        types = {}
        for n, (param, x) in enumerate(zip(kernel.params, args, strict=True)):
            if param.is_constexpr:
                constants[n,] = x
            types[param.name] = "constexpr" if param.is_constexpr else signature(x, (n,), constants, aligned)
        started = time.perf_counter()
        try:
            source = ASTSource(kernel, types, constants, aligned)
            newer = runtime.assembled_by(triton.knobs.nvidia.ptxas_blackwell.path)
            with newer if item.arch == "sm90" else nullcontext():
                made = triton.compile(
                    source, target=GPUTarget(target.backend, target.arch, target.warp), options=tiles.options
                )
        except Exception as error:
            while error.__cause__ is not None:  # the innermost says what; Triton wraps it once per function
                error = error.__cause__
            yield Compiled(name, tiles, error=str(error)[-600:])
        else:
            yield Compiled(name, tiles, made, time.perf_counter() - started)


def continued_sums(ttir: str) -> int:
    """How many products go on with a sum that no product before them began: none of fp32 should (``tile.accumulate``)."""
    products = re.findall(r"(%[\w$.#-]+) = tt\.dot (?:%[\w$.#-]+, ){2}(%[\w$.#-]+)", ttir)
    begun = {total for total, _ in products}
    return sum(not acc.startswith("%cst") and acc not in begun for _, acc in products)


def compile_item(item: Item) -> list[str]:
    """The lines of the report; a line that starts with FAIL fails the run."""
    dtype = str(item.dtype).removeprefix("torch.") if item.products == "ieee" else item.products
    head = f"{item.arch:6}{dtype:9} D {item.head_dim:<4}{item.feature:7}"
    found, codes, problem = list(compile_launches(item)), iter(()), made(item)[0]
    if item.arch == "sm90":
        import triton

        cubins = [x.made.asm["cubin"] for x in found if x.made]
        codes = iter(listings(cubins, triton.knobs.nvidia.nvdisasm.path) if cubins else ())
    lines = []
    for x in found:
        if x.error:
            lines.append(f"FAIL {head}{x.name}: {x.error}")
            continue
        used, spills = x.made.metadata.shared, _registers(x.made, item.arch)
        with on_target(item):
            allowed = min(shared_memory(problem, x.name, x.tiles), TARGETS[item.arch].device.shared_memory)
        sass = next(codes, "")
        serial, wrong = serialised(sass), faults(x.made.asm["cubin"], sass) if sass else []
        exact = item.dtype == torch.float32 and item.products != "tf32"
        chained = exact and continued_sums(x.made.asm["ttir"])
        state = "ok  " if used <= allowed and not (serial or wrong or chained) else "FAIL"
        spills += ", wgmma serialised" if serial else ""
        spills += f", wrong code: {wrong[0]}" if wrong else ""
        spills += f", {chained} products go on with sums of earlier tiles" if chained else ""
        tiles = x.tiles.describe()
        lines.append(f"{state} {head}{x.name:8} {tiles:32} shared {used:6} of {allowed:6}  {spills}  {x.seconds:.1f} s")
    return lines


def _registers(compiled, arch: str) -> str:
    """``registers, spills`` as ptxas reports them; AMD's compiler writes them into its assembly."""
    import triton

    if arch == "amd":
        text = compiled.asm["amdgcn"]
        found = [re.search(rf"\.{key}:\s+(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count")]
        return "regs {}, spills {}".format(*(m.group(1) if m else "?" for m in found))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    m = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return f"regs {m.group(1)}, stack {m.group(2)}" if m else "regs ?"


def form(item: Item) -> tuple:
    """The facts that tell the kernels of one head dim from those of another: tiles of each pass, and the pieces that a head dim takes.

    Two head dims that take the same pieces differ in the columns that are masked, and need the same shared memory. Only sm90's machine
    code is read, and only there do they count as different where one of them masks no columns.
    """
    passes = configured(item, made(item)[0]).passes
    taken = {
        name: [(wide, item.arch == "sm90" and n == wide) for _, n, wide in pieces(item.head_dim, tiles)]
        for name, tiles in passes.items()
    }
    return tuple((name, tiles, *taken[name]) for name, tiles in passes.items())


def head_dims(arch: str, dtype: torch.dtype) -> list[int]:
    """The least head dim of each form that an architecture's kernels take: it masks columns where one of its form does."""
    rows = [n for n in config.table(arch, dtype.itemsize) if n <= config.MAX_HEAD_DIM]
    found: dict[tuple, int] = {}
    for head_dim in sorted({*rows, 72, 80, 96, 160, 192}):
        found.setdefault(form(Item(arch, dtype, head_dim, "causal", products_of(dtype, head_dim, arch))), head_dim)
    return list(found.values())


def products_of(dtype: torch.dtype, head_dim: int, arch: str) -> str:
    """:attr:`config.Config.products` of a dtype."""
    return config.float_products(head_dim, arch) if dtype == torch.float32 else "ieee"


def items() -> list[Item]:
    """Every form of every row of the tables, and of head dims of two pieces; the features at the two common head dims.

    Those that sm90 has alone need no more shared memory than others, and their machine code is read there. At head dims of fp32 that
    no product of bf16 terms holds, sm100's kernels are those of sm80: neither multiplies by matrix units.
    """
    found = []
    for arch in TARGETS:
        for dtype in DTYPES:
            for head_dim in head_dims(arch, dtype):
                features = ["causal"]
                if dtype == torch.bfloat16 and head_dim in (64, 128):
                    features += ["rich", "sparse", "moving", "parted"]
                    if arch == "sm90":
                        features += ["softcap", "dense", "selected", "full", "window", "split"]
                        features += ["bias", "bias32", "of-keys", "regions", "windows", "relative", "distances"]
                if dtype == torch.float32 and head_dim in (64, 128) and arch == "sm90":
                    features += ["rich", "bias", "parted", "moving", *(["dense"] if head_dim == 128 else [])]
                products = products_of(dtype, head_dim, arch)
                if arch != "sm100" or dtype != torch.float32 or products != "ieee":
                    found += [Item(arch, dtype, head_dim, feature, products) for feature in features]
        found += [Item(arch, torch.float32, limit, "causal", "tf32") for limit in (64, 128) if arch == "sm90"]
        found.append(Item(arch, torch.bfloat16, config.MAX_LATENT_DIM, "latent"))
        found.append(Item(arch, torch.float32, 128, "paged"))
        widths = (128, 256, config.MAX_LATENT_DIM)[: {"amd": 0, "sm80": 1, "sm90": 3, "sm100": 2, "sm120": 0}[arch]]
        found += [Item(arch, torch.bfloat16, head_dim, "listed") for head_dim in widths]
        found += [
            Item(arch, torch.bfloat16, 128, feature)
            for feature in ([x for x in PAGED if x not in LATENT] if arch == "sm90" else ("pages16",))
        ]
        if arch == "sm120":
            found.append(Item(arch, torch.bfloat16, config.MAX_LATENT_DIM, "mla"))
        if arch == "sm90":
            found.append(Item(arch, torch.float32, 128, "row"))
            found += [Item(arch, torch.float16, 128, feature) for feature in ("fp8", "fp8-each")]
            found.append(Item(arch, torch.bfloat16, 80, "fp8-chunk"))  # 40 pairs, a piece of them 8
            found += [Item(arch, torch.bfloat16, config.MAX_LATENT_DIM, feature) for feature in LATENT]
            found += [Item(arch, torch.bfloat16, limit, "paged") for limit in (64, 96, 256, config.MAX_LATENT_DIM)]
    return found


def traits(item: Item) -> frozenset[Hashable]:
    """The traits that a problem shows in a sample: each value of its fields, and all but its head dim together with its architecture."""
    found = [*values(item)]
    return frozenset({*found, *((item.arch, *each) for each in found if each[0] != "head_dim")})


def main(arguments: list[str]) -> int:
    """Runs ``compile_all [--sample] [ARCH ...]``: all architectures, or these alone."""
    every, archs = items(), [x for x in arguments if x != "--sample"]
    if "--sample" in arguments:
        every = sample(every, traits)
    wanted = [item for item in every if not archs or item.arch in archs]
    started, failed = time.perf_counter(), 0
    with ProcessPoolExecutor() as pool:
        for lines in pool.map(compile_item, wanted):
            failed += sum(line.startswith("FAIL") for line in lines)
            print("\n".join(lines), flush=True)
    print(f"{len(wanted)} problems, {failed} failures, {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
