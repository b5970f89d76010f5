"""The host side of the Triton backend: what later calls repeat of the first, descriptors, and how kernels overlap."""

import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import tilewise as tw
from tests.backends.contract import call, normal, qkv
from tilewise import device as devices
from tilewise.backends import base, triton
from tilewise.backends.sample import sample
from tilewise.backends.triton import config, interpreting, sheet
from tilewise.backends.triton.config import INTERPRETED, Config
from tilewise.backends.triton.host import compile_all, launch, runtime
from tilewise.backends.triton.host.descriptors import four_axes
from tilewise.backends.triton.host.facts import MEANINGS, Facts
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.tiles import Tiles

pytestmark = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")

TMA = Config(*[Tiles(32, 32, 4, 3, tma=True)] * 3)
TERMS = replace(TMA, products="bf16x6")


def test_numbers_are_never_one_nor_a_multiple_of_sixteen():
    found = runtime.opaque((1, 16, (0, 32, 4096), 2.0))
    assert found == (5, 35, (3, 67, 8195), 2.0)


@pytest.fixture
def assembler(tmp_path):
    """Makes an assembler that says its version and no more; the function returns its path."""

    def make(version: str) -> str:
        tool = tmp_path / f"ptxas-{version}"
        tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
        tool.chmod(0o755)
        return str(tool)

    return make


def of_hopper() -> str:
    """The assembler that Triton would give a kernel for Hopper now."""
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(90).path


def test_an_assembler_is_chosen_for_a_while_unless_somebody_has_chosen_one(monkeypatch, assembler):
    own, newer, older = of_hopper(), assembler("77.1"), assembler("12.8")
    with runtime.assembled_by(newer):
        with runtime.assembled_by(older):
            assert of_hopper() == newer
        assert of_hopper() == newer
    assert of_hopper() == own
    monkeypatch.setenv("TRITON_PTXAS_PATH", older)
    with runtime.assembled_by(newer):
        assert of_hopper() == older
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", assembler("77.2"))
    own = of_hopper()  # of two that are chosen, Triton's version says which
    with runtime.assembled_by(newer):
        assert of_hopper() == own != newer


def test_a_setting_of_triton_counts_as_its_variable_does(monkeypatch, assembler):
    settings, own, older = vars(runtime.kernels().triton.knobs.nvidia), of_hopper(), assembler("12.8")
    monkeypatch.setitem(settings, "ptxas", older)
    with runtime.assembled_by(assembler("77.1")):
        assert of_hopper() == older
    assert settings["ptxas"] == older
    monkeypatch.delitem(settings, "ptxas")
    assert of_hopper() == own


def test_the_code_of_an_assembler_that_makes_faults_is_read(monkeypatch, assembler):
    hooks, heard = runtime.kernels().triton.knobs.runtime, []
    monkeypatch.setattr(hooks, "add_stages_inspection_hook", lambda *x: heard.append(x))
    own = hooks.add_stages_inspection_hook
    with runtime.assembled_by(assembler("13.0")), runtime.read_where_faulty() as options:
        assert (options, hooks.add_stages_inspection_hook) == ({}, own)
    monkeypatch.setattr(runtime.machine_code, "read_in_stages", lambda *x: heard.append(x))
    with runtime.assembled_by(assembler("12.9")), runtime.read_where_faulty() as options:
        hooks.add_stages_inspection_hook("compiler", {}, "options", "language", 90)
    assert options == {"ptx_options": "-O3"}
    assert heard[0] == ("compiler", {}, "options", "language", 90)  # of somebody else, whose hook stays
    assert heard[1][1:] == ("compiler", {}, "options")
    assert hooks.add_stages_inspection_hook is own


def test_kernels_for_hopper_are_read_and_others_are_not(monkeypatch, assembler):
    monkeypatch.setattr(runtime, "newer_ptxas", lambda: assembler("12.9"))
    for hopper, options in ((True, {"ptx_options": "-O3"}), (False, {})):
        monkeypatch.setattr(runtime, "on_hopper", lambda hopper=hopper: hopper)
        with runtime.assembling() as found:
            assert found == options


def test_the_newer_assembler_is_taken_where_the_driver_loads_its_code(monkeypatch):
    nvidia = runtime.kernels().triton.knobs.nvidia
    major = int(nvidia.ptxas_blackwell.version.partition(".")[0])
    choose = runtime.newer_ptxas.__wrapped__
    monkeypatch.setattr(devices, "cuda_version", lambda: major)
    assert choose() == nvidia.ptxas_blackwell.path
    monkeypatch.setattr(devices, "cuda_version", lambda: major - 1)
    assert choose() == nvidia.ptxas.path


@pytest.mark.parametrize(
    ("hip", "capability", "hopper"), [(None, (9, 0), True), (None, (8, 0), False), ("6.4", (9, 0), False)]
)
def test_a_gpu_of_amd_is_no_hopper_whatever_its_number(monkeypatch, hip, capability, hopper):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert runtime.on_hopper() == hopper


@pytest.mark.parametrize("version", ["12.8", "12.9", "13.4"])
@pytest.mark.parametrize(
    ("dims", "whole"),
    [((64, 40), False), ((225, 16), False), ((64, 24), False), ((40, 40), True), ((96, 64), True), ((192, 128), True)],
)
def test_an_older_assembler_is_not_given_narrow_values_on_hopper(monkeypatch, dims, whole, version, assembler):
    monkeypatch.setenv("TRITON_PTXAS_PATH", assembler(version))
    for hopper in (False, True):
        monkeypatch.setattr(runtime, "on_hopper", lambda device, hopper=hopper: hopper)
        d, dv = dims
        c = call(*qkv(d=d, dv=dv, dtype=torch.bfloat16))
        reasons = triton._assembler_reasons(replace(c.p, device=torch.device("cuda")))
        refused = version == "12.8" and hopper and not whole
        assert [f"head dims {d} and {dv}: ptxas {version} makes wrong" in x for x in reasons] == [True] * refused


def test_an_append_of_a_known_kind_starts_the_kernel_that_is_compiled(monkeypatch):
    """Unless a tensor begins elsewhere than at 16 bytes: the kernel was compiled for those."""
    calls = []

    def run(kernel, grid, tiles, tensors, *rest):
        calls.append(("compiles", grid, tensors.k, rest))
        return "compiled"

    monkeypatch.setattr(runtime, "_COMPILED", {})
    monkeypatch.setattr(runtime, "run", run)
    monkeypatch.setattr(runtime, "current", lambda: None)
    monkeypatch.setattr(runtime, "run_each", lambda each: calls.extend((f, grid, x[0], x[1:]) for f, grid, x in each))
    pools = [torch.zeros(4, 16, 1, 32) for _ in "kv"]
    pages = tw.paged(*pools, torch.arange(4, dtype=torch.int32).view(2, 2), torch.zeros(2, dtype=torch.int32))
    rows, v = torch.zeros(200), torch.ones(2, 3, 1, 32)
    launch = triton.Triton().appender(pages, v, v, None)
    each = [rows[n:][:192].view(2, 3, 1, 32) for n in (1, 0, 4, 1)]
    for k in each:
        launch(pages, k, v, None)
    assert [x[0] for x in calls] == ["compiles", "compiles", "compiled", "compiles"]
    assert [x[2] is k for x, k in zip(calls, each, strict=True)] == [True, True, False, True]
    given = pools[0], pools[1], each[2], v, pages.block_table, pages.seqlens_k
    assert calls[2][2] == (*[x.data_ptr() for x in given], None, None, None)
    assert {x[1][0] for x in calls} == {6}
    assert len({x[3] for x in calls}) == 1


def test_every_launch_chooses_its_assembler_and_says_that_a_product_and_a_sum_are_fused(monkeypatch):
    """Triton 3.10 takes another default than the versions before it, and 3.9 warns where nobody says so."""
    from triton.runtime import interpreter

    launched, named, within = interpreter.GridExecutor.__call__, [], []

    @contextmanager
    def assembling():
        within.append(True)
        yield {}
        within.pop()

    def launch(self, *arguments, **options):
        named.append((self.fn.__name__, options.get("enable_fp_fusion")))
        assert within, f"{self.fn.__name__} gets whichever assembler Triton takes"
        return launched(self, *arguments, **options)

    monkeypatch.setattr(runtime, "assembling", assembling)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    q, k, v = (x.requires_grad_() for x in qkv(nk=70, d=32, dv=32))
    mask = tw.keep(lambda b, h, i, j: (i + j) % 3 > 0).prepare(q, k)
    tw.attention(q, k, v, mask=mask, backend="triton").sum().backward()
    pages = tw.paged(
        *(torch.zeros(4, 16, 1, 32) for _ in "kv"),
        torch.arange(4, dtype=torch.int32).view(2, 2),
        torch.zeros(2, dtype=torch.int32),
    )
    rows = pages, *(torch.ones(2, 3, 1, 32) for _ in "kv"), None
    triton.Triton().appender(*rows)(*rows)
    assert {name for name, _ in named} >= {"forward_kernel", "delta_kernel", "dq_kernel", "append_kernel"}
    assert {fused for _, fused in named} == {True}


def test_every_fact_that_a_kernel_reads_has_a_meaning_and_each_meaning_is_of_one_that_is_read():
    folder = Path(compile_all.__file__).parents[1] / "kernels"
    read = {name for file in folder.glob("*.py") for name in re.findall(r"FACTS\.(\w+)", file.read_text())}
    assert read - MEANINGS.keys() == set()
    assert MEANINGS.keys() - read == set()


def test_a_fact_without_a_meaning_is_refused():
    with pytest.raises(TypeError, match="no facts: tile_x"):
        Facts(tile_m=64, tile_x=1)


class Launched(NamedTuple):
    """What a call launched: whether past Triton's launcher, on which grid, and with which arguments."""

    straight: bool
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


@pytest.fixture
def launches(monkeypatch):
    """What plans launch, and nothing of it done."""
    calls: list[Launched] = []

    def run(kernel, grid, tiles, *arguments):
        calls.append(Launched(False, grid, arguments))
        return object()

    monkeypatch.setattr(runtime, "_COMPILED", {})
    monkeypatch.setattr(runtime, "run", run)
    monkeypatch.setattr(runtime, "run_compiled", lambda compiled, grid, *args: calls.append(Launched(True, grid, args)))
    return calls


def _moved(x):
    """A copy at an odd address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def _same_but_tensors(first: Launched, second: Launched) -> bool:
    """Whether all but tensors is the same in two launches."""
    numbers = [x.arguments[1:3] + x.arguments[-1:] for x in (first, second)]
    return first.grid == second.grid and numbers[0] == numbers[1]


def test_a_second_forward_is_the_first_with_other_tensors_and_goes_straight_to_the_compiled_kernel(launches):
    c, new = (call(*qkv(nk=n, d=64, dv=64, dtype=torch.bfloat16), causal=True) for n in (70, 70))
    plan = Plan(c.p, TMA)
    launch.forward(plan, c.t)
    out = launch.forward(plan, new.t)
    first, second = launches
    assert [x.straight for x in launches] == [False, True]
    assert _same_but_tensors(first, second)
    assert second.arguments[1] is first.arguments[1]  # numbers are made once
    tensors = second.arguments[0]
    assert (tensors.q is new.t.q, tensors.v is new.t.v, tensors.lse is out.lse) == (True, True, True)
    assert [second.arguments[n].base for n in (3, 5)] == [new.t.k, new.t.v]
    new.t.q = _moved(new.t.q)
    launch.forward(plan, new.t)
    assert not launches[2].straight
    assert launches[2].arguments[0].q is new.t.q
    assert launches[2].arguments[3:7] == (None,) * 4  # descriptors would read whole rows of 16 bytes


def test_a_call_of_another_length_takes_the_kernel_that_is_compiled(launches):
    for n in (70, 71, 200):
        c = call(*qkv(nk=n, nq=n, d=64, dv=64, dtype=torch.bfloat16), causal=True)
        plan = Plan(c.p, TMA)
        out = launch.forward(plan, c.t)
        launch.backward(plan, c.t, out, c.do, c.dlse)
    assert [x.straight for x in launches] == [False] * 4 + [True] * 8


def test_kernels_that_know_nothing_of_mask_and_score_are_compiled_once_for_all(launches):
    calls = {
        "plain": {},
        "mask": {"mask": tw.keep(lambda b, h, i, j: (i + j) % 3 > 0)},
        "score": {"score": tw.alibi(normal(4).requires_grad_()), "sink": normal(4), "causal": True},
        "dropout": {"dropout_p": 0.5, "dropout_seed": 1},
        "sink": {"sink": normal(4)},
    }
    for options in calls.values():
        c = call(*qkv(nq=70, nk=70, d=64, dv=64, hk=1), **options)
        plan = Plan(c.p, replace(TERMS, group_parts=2))
        out = launch.forward(plan, c.t)
        launch.backward(plan, c.t, out, c.do, c.dlse)
    names = ["terms", "forward", "terms", "delta", "dq", "dkdv", "group_parts"]
    compiled = [name for name, x in zip(names * len(calls), launches, strict=True) if not x.straight]
    own = ["forward", "dq", "dkdv"]
    first = ["terms", "forward", "delta", "dq", "dkdv", "group_parts"]
    assert compiled == [*first, *own, *own, *own, "forward"]  # a backward reads no sink


def test_a_number_beyond_32_bits_is_compiled_for():
    at = [runtime.kind_of((3, (n,)), bundled=True) for n in (5, 1 << 30, 1 << 31)]
    assert at[0] == at[1] != at[2]


def test_constants_tensors_types_and_blocks_tell_kernels_apart():
    descriptor = lambda rows: runtime.kernels().TensorDescriptor(torch.empty(0), [8, 16], [16, 1], [rows, 16])  # noqa: E731
    kinds = [0, 1, True, None, torch.empty(1), torch.empty(1, dtype=torch.int32), descriptor(4), descriptor(8), (1.0,)]
    found = [repr(runtime.kind_of(x)) for x in kinds]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(("shape", "memory"), [((70, 300), 8), ((4, 70, 72), 4)], ids=["keys", "batch"])
def test_a_launch_with_other_constants_is_compiled_for_itself(shape, memory, launches, monkeypatch):
    # Of parts of dS the first, the last and those between add to what earlier ones left behind, or end it.
    monkeypatch.setattr(sheet, "sheet_memory", lambda p: memory * 128 * 128 * 4)
    monkeypatch.setattr(sheet, "SHEET_KEYS", 128)
    score = tw.bias(normal(*shape).requires_grad_())
    c = call(*qkv(batch=3, nq=70, nk=shape[-1], hq=4, hk=4, d=8, dv=8), score=score)
    plan = Plan(c.p, INTERPRETED)
    out = launch.forward(plan, c.t)
    launches.clear()
    launch.backward(plan, c.t, out, c.do, c.dlse)
    sums = launches[2::2]  # behind the statistics, a pass over keys and the sums of each part
    constants = [x.arguments[6:] for x in sums]
    assert len(constants) == 3
    assert [x.straight for x in sums] == [one in constants[:n] for n, one in enumerate(constants)]
    assert len(set(constants)) > 1


def test_a_second_call_makes_its_own_terms(launches):
    c, new = (call(*qkv(nk=70, d=64, dv=64), causal=True) for _ in range(2))
    plan = Plan(c.p, TERMS)
    out = launch.forward(plan, c.t)
    launch.forward(plan, new.t)
    terms, main = (x.arguments for x in launches[2:])
    assert [a is b for a, b in zip(terms[0][:3], (new.t.q, new.t.k, new.t.v), strict=True)] == [True] * 3
    assert [a is b for a, b in zip((terms[0].dq, terms[0].dk, terms[0].dv), main[0][:3], strict=True)] == [True] * 3
    assert [main[3].base is main[0].k, main[5].base is main[0].v] == [True, True]
    launches.clear()
    launch.backward(plan, c.t, out, c.do, c.dlse)
    launch.backward(plan, new.t, out, new.do, new.dlse)
    terms, delta, _dq, dkdv = (x.arguments for x in launches[4:])
    assert terms[0].do is new.do
    assert delta[0].do is dkdv[0].do is terms[0].o
    assert [dkdv[3].base is dkdv[0].q, dkdv[5].base is dkdv[0].do] == [True, True]


def test_a_second_forward_reads_its_own_bias(launches):
    biased = lambda: tw.bias(normal(4, 72, 72, dtype=torch.bfloat16))  # noqa: E731
    c, new = (call(*qkv(nq=72, nk=72, d=64, dv=64, dtype=torch.bfloat16), score=biased()) for _ in range(2))
    plan = Plan(c.p, TMA)
    launch.forward(plan, c.t)
    launch.forward(plan, new.t)
    for x, launched in zip((c, new), launches, strict=True):
        assert launched.arguments[-2].base is x.t.leaves[plan.pair_leaf[0]]
        assert launched.arguments[0].leaves[0] is x.t.leaves[plan.pair_leaf[0]]


def test_a_second_backward_is_the_first_with_other_tensors(launches):
    c, new = (call(*qkv(nk=n, d=64, dv=64, dtype=torch.bfloat16), causal=True) for n in (70, 70))
    plan = Plan(c.p, TMA)
    out = launch.forward(plan, c.t)
    launch.backward(plan, c.t, out, c.do, c.dlse)
    grads = launch.backward(plan, new.t, out, new.do, new.dlse)
    first, second = launches[1:4], launches[4:7]
    assert [x.straight for x in second] == [True] * 3
    for one, other in zip(first, second, strict=True):
        assert _same_but_tensors(one, other)
        given = {"q": new.t.q, "k": new.t.k} if other is not second[0] else {"o": out.o, "lse": out.lse}
        assert all(getattr(other.arguments[0], name) is x for name, x in {**given, "do": new.do}.items())
    assert second[1].arguments[0].dq is grads.dq
    assert (second[2].arguments[0].dk is grads.dk, second[2].arguments[0].dv is grads.dv) == (True, True)
    assert [second[2].arguments[n].base for n in (3, 5)] == [new.t.q, new.do]
    assert [second[1].arguments[n].base for n in (3, 5)] == [new.t.k, new.t.v]
    launch.backward(plan, new.t, out, _moved(new.do), new.dlse)
    assert not any(x.straight for x in launches[7:])


def test_a_second_backward_adds_up_its_own_parts(launches):
    c, new = (call(*qkv(d=64, dv=32, hk=1, dtype=torch.bfloat16), causal=True) for _ in range(2))
    plan = Plan(c.p, replace(TMA, group_parts=4))
    out = launch.forward(plan, c.t)
    launch.backward(plan, c.t, out, c.do, c.dlse)
    grads = launch.backward(plan, new.t, out, new.do, new.dlse)
    assert launches[3].grid == (-(-c.p.seqlen_k // TMA.dkdv.tile_n) * c.p.batch * 4, 1)
    over_keys, summing = launches[7].arguments, launches[8].arguments
    assert [x.shape for x in (over_keys[0].dk, over_keys[0].dv)] == [(4, *c.t.k.shape), (4, *c.t.v.shape)]
    assert (summing[0].dk is over_keys[0].dk, summing[0].dv is over_keys[0].dv) == (True, True)
    assert (summing[3] is grads.dk, summing[4] is grads.dv) == (True, True)
    assert launches[8].grid[0] * 1024 >= c.t.k.numel()


def test_later_calls_of_a_predicate_walk_over_the_lists_of_their_own_mask(launches):
    rows = [torch.rand(260) > 0.3 for _ in range(2)]
    hides = [tw.keep(lambda b, h, i, j, x=x: x[i] & (j <= i)) for x in rows]
    tensors = qkv(nq=260, nk=260, d=64, dv=64, dtype=torch.bfloat16)
    calls = [call(*tensors, mask=mask) for mask in hides]
    plan = Plan(calls[0].p, TMA)
    for c in calls * 2:
        out = launch.forward(plan, c.t)
        launch.backward(plan, c.t, out, c.do, c.dlse)
    assert len(launches) == 16
    of_mask = []  # by mask: the addresses of the lists of its forward, its dQ, and its dK and dV
    for turn in range(4):
        forward, _, dq, dkdv = launches[4 * turn : 4 * turn + 4]
        of_mask.append([[x.data_ptr() for x in launched.arguments[0].lists] for launched in (forward, dq, dkdv)])
    assert of_mask[0] == of_mask[2]
    assert of_mask[1] == of_mask[3]
    assert all(a != b for a, b in zip(*of_mask[:2], strict=True))
    written = calls[0].t.leaves[0]
    written[:70] = ~written[:70]
    launch.forward(plan, calls[0].t)
    lists = launches[-1].arguments[0].lists
    assert [x.data_ptr() for x in lists] != of_mask[0][0]


def test_a_capture_makes_its_lists_anew(launches, monkeypatch):
    rows = torch.rand(260) > 0.3
    c = call(
        *qkv(nq=260, nk=260, d=64, dv=64, dtype=torch.bfloat16), mask=tw.keep(lambda b, h, i, j: rows[i] & (j <= i))
    )
    of_lists = Plan(c.p, TMA)
    launch.forward(of_lists, c.t)
    monkeypatch.setattr(base, "is_captured", lambda: True)
    launch.forward(of_lists, c.t)
    first, captured = (x.arguments[0].lists for x in launches)
    assert all(x is not y and torch.equal(x, y) for x, y in zip(first, captured, strict=True))


BITS = [f"tile_{x}" for x in ("pattern", "lists", "order", "bits")]
OF_MASK = [*BITS, "runs"]


@pytest.mark.parametrize(
    ("feature", "roles"),
    [
        ("causal", {"forward": None, "delta": "leads", "dq": "reads", "dkdv": "joins"}),
        ("parted", {"forward": None, "delta": "leads", "dq": "reads", "dkdv": "joins", "group_parts": "reads"}),
        ("bias", {"forward": None, "delta": "leads", "dkdv": "reads", "sheet": None}),
        ("sparse", {"forward": None, "delta": "leads", **dict.fromkeys(("dq", "dkdv", *OF_MASK))}),
    ],
)
def test_what_a_kernel_reads_is_there_although_kernels_overlap(feature, roles):
    launched = compile_all.recorded(compile_all.Item("sm90", torch.bfloat16, 128, feature))
    # Parts of dS repeat their two, and plans of a mask by columns those by rows.
    assert list(dict.fromkeys((name, args[-1].overlap) for name, _, _, args in launched)) == list(roles.items())


@pytest.mark.parametrize("dtype", compile_all.DTYPES, ids=str)
@pytest.mark.parametrize("arch", compile_all.TARGETS)
def test_one_head_dim_of_each_form_is_compiled(arch, dtype):
    def form(head_dim: int) -> str:
        products = compile_all.products_of(dtype, head_dim, arch)
        return str(compile_all.form(compile_all.Item(arch, dtype, head_dim, "causal", products)))

    compiled = compile_all.head_dims(arch, dtype)
    forms = {form(head_dim) for head_dim in compiled}
    served = max(config.table(arch, dtype.itemsize))
    assert forms == {form(head_dim) for head_dim in (64, 72, 80, 96, 128, 160, 192, 256, 512) if head_dim <= served}
    assert len(forms) == len(compiled)
    assert {64, 72} <= set(compiled)  # all columns, and masked ones
    items = {x.head_dim for x in compile_all.items() if (x.arch, x.dtype, x.feature) == (arch, dtype, "causal")}
    assert items == set(compiled) - ({512} if (arch, dtype) == ("sm100", torch.float32) else set())


def test_the_sample_shows_every_feature_and_dtype_of_every_architecture_and_every_head_dim():
    every = compile_all.items()
    few = sample(every, compile_all.traits)

    def shown(items) -> set:
        of_arch = {(x.arch, y) for x in items for y in (x.feature, x.dtype, x.products)}
        return of_arch | {x.head_dim for x in items}

    assert shown(few) == shown(every)
    assert set(few) < set(every)
    assert len(few) == len(set(few)) <= 72


def test_kernels_that_may_have_no_programs_do_not_overlap(monkeypatch):
    plans = [Plan(call(*qkv(nq=n, nk=64, d=64, dv=64)).p, TMA) for n in (64, 0)]
    monkeypatch.setitem(devices.STAND_INS, "cpu", compile_all.TARGETS["sm90"].device)
    assert [plan.overlap("reads") for plan in plans] == ["reads", None]


def test_a_second_backward_leaves_ds_and_sums_a_bias_where_it_says(launches):
    biased = lambda: tw.bias(normal(4, 72, 72, dtype=torch.bfloat16).requires_grad_())  # noqa: E731
    c, new = (call(*qkv(nq=72, nk=72, d=64, dv=64, dtype=torch.bfloat16), score=biased()) for _ in range(2))
    plan = Plan(c.p, Config(*[Tiles(64, 64, 4, 1, tma=True)] * 3))
    out = launch.forward(plan, c.t)
    launch.backward(plan, c.t, out, c.do, c.dlse)
    grads = launch.backward(plan, new.t, out, new.do, new.dlse)
    first, second = launches[1:4], launches[4:7]
    assert all(_same_but_tensors(*pair) for pair in zip(first, second, strict=True))
    over_keys, of_sheet = (x.arguments for x in second[1:])
    slot = plan.emitted.reads[0].slot
    for tensors in (over_keys[0], of_sheet[0]):
        assert tensors.sheet is over_keys[-2].base
        assert tuple(over_keys[-2].shape) == tuple(tensors.sheet.shape)
        assert tuple(over_keys[-2].strides) == tensors.sheet.stride()
        assert tensors.leaves == (new.t.leaves[slot],)
        assert tensors.grads == (grads.leaves[slot],)
    assert over_keys[-3].base is new.t.leaves[slot]
    assert of_sheet[3].base is new.t.k
    assert of_sheet[0].dq is grads.dq
    assert of_sheet[4:-1] == first[2].arguments[4:-1]


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_descriptors_see_every_row_of_every_head(layout):
    x = torch.arange(480).view(2, 10, 3, 8) if layout == "bnhd" else torch.arange(480).view(2, 3, 10, 8).transpose(1, 2)
    shape, strides = four_axes(x, x.stride()[:3], heads=3, batch=2)
    assert torch.equal(x.as_strided(shape, strides), x.transpose(1, 2))


def test_there_is_no_descriptor_of_an_expanded_tensor():
    x = torch.zeros(2, 10, 1, 8).expand(2, 10, 3, 8)
    assert four_axes(x, x.stride()[:3], heads=3, batch=2) is None


@pytest.mark.parametrize(
    ("mask", "lengths", "whole"),
    [
        (None, (40, 70), True),
        (tw.causal(), (40, 70), True),
        (tw.window(left=9, right=0), (70, 70), True),
        (tw.window(left=9, right=0), (40, 70), False),  # the first keys lie before every query's window
        (tw.key_range(0, 60), (70, 70), False),
        (tw.prefix(10), (70, 70), True),
        (tw.causal() & tw.key_lengths(torch.tensor([60])), (70, 70), False),
        (tw.keep(lambda b, h, i, j: i != j), (70, 70), True),  # by copies with zeros
    ],
    ids=["full", "causal", "window", "short-window", "key-range", "prefix", "key-lengths", "keep"],
)
def test_descriptors_read_every_tile_where_every_key_is_seen(mask, lengths, whole):
    q, k = (torch.randn(1, n, 1, 32) for n in lengths)
    c = call(q, k, k.clone(), mask=mask)
    assert Plan(c.p, TMA).whole == whole


SHAPES = {
    "pairs": [(70, 70), (1, 70, 70), (4, 70, 70), (1, 1, 70, 70), (2, 1, 70, 70), (1, 4, 70, 70), (2, 4, 70, 70)],
    "columns": [(70,), (1, 70), (1, 1, 70), (4, 1, 70), (2, 1, 1, 70), (2, 4, 1, 70)],
    "rows": [(70, 1), (4, 70, 1), (2, 1, 70, 1), (2, 4, 70, 1)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("of", ["mask", "bias"])
def test_a_mask_or_a_bias_is_one_kernel_for_all_shapes_that_broadcast(launches, of, shapes):
    for shape in shapes:
        t = torch.ones(shape, dtype=torch.bool if of == "mask" else torch.bfloat16)
        options = {"mask": tw.dense(t)} if of == "mask" else {"score": tw.bias(t)}
        c = call(*qkv(nq=70, nk=70, d=64, dv=64, dtype=torch.bfloat16), **options)
        plan = Plan(c.p, TMA)
        out = launch.forward(plan, c.t)
        launch.backward(plan, c.t, out, c.do, c.dlse)
    assert [x.straight for x in launches] == [False] * 4 + [True] * 4 * (len(shapes) - 1)


def test_selections_for_all_heads_and_for_each_are_one_kernel(launches):
    for batch, heads in ((1, 2), (1, 1), (2, 1), (2, 2)):
        mask = tw.selected(torch.zeros(batch, heads, 70, 3, dtype=torch.int32))
        c = call(*qkv(nq=70, nk=70, d=64, dv=64, dtype=torch.bfloat16), mask=mask, causal=True)
        launch.forward(Plan(c.p, TMA), c.t)
    assert [x.straight for x in launches] == [False, True, True, True]


def test_fp32_with_all_keys_and_with_causal_is_one_kernel(launches):
    for causal in (False, True):
        c = call(*qkv(nq=70, nk=70, d=64, dv=64), causal=causal)
        plan = Plan(c.p, TMA)
        out = launch.forward(plan, c.t)
        launch.backward(plan, c.t, out, c.do, c.dlse)
    assert [x.straight for x in launches] == [False] * 4 + [True] * 4


def test_a_forward_is_one_kernel_with_gradients_of_leaves_and_without(launches):
    for wanted in (False, True):
        q, k, v = qkv(nq=70, nk=70, d=64, dv=64)
        c = call(q, k, v, score=tw.alibi(normal(4).requires_grad_(wanted)))
        launch.forward(Plan(c.p, TMA), c.t)
    assert [x.straight for x in launches] == [False, True]
