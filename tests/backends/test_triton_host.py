"""The host side of the Triton backend: what later calls repeat of the first, descriptors, and how kernels overlap."""

import re
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
from tilewise.backends.triton import interpreting
from tilewise.backends.triton.config import Config
from tilewise.backends.triton.host import compile_all, launch, plan, runtime
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


def test_every_launch_says_that_a_product_and_a_sum_are_fused(monkeypatch):
    """Triton 3.10 takes another default than the versions before it, and 3.9 warns where nobody says so."""
    from triton.runtime import interpreter

    launched, named = interpreter.GridExecutor.__call__, []

    def launch(self, *arguments, **options):
        named.append((self.fn.__name__, options.get("enable_fp_fusion")))
        return launched(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    q, k, v = (x.requires_grad_() for x in qkv(nk=70, d=32, dv=32))
    mask = tw.keep(lambda b, h, i, j: (i + j) % 3 > 0).prepare(q, k)
    tw.attention(q, k, v, mask=mask, backend="triton").sum().backward()
    pages = tw.paged(
        *(torch.zeros(4, 16, 1, 32) for _ in "kv"),
        torch.arange(4, dtype=torch.int32).view(2, 2),
        torch.zeros(2, dtype=torch.int32),
    )
    triton.append(pages, *(torch.ones(2, 3, 1, 32) for _ in "kv"), None)
    assert {name for name, _ in named} >= {"forward_kernel", "delta_kernel", "dq_kernel", "append_kernel"}
    assert {fused for _, fused in named} == {True}


def test_every_fact_that_a_kernel_reads_has_a_meaning_and_each_meaning_is_of_one_that_is_read():
    folder = Path(compile_all.__file__).parents[1] / "kernels"
    read = {name for file in folder.glob("*.py") for name in re.findall(r"FACTS\.(\w+)", file.read_text())}
    assert read - MEANINGS.keys() == set()
    assert MEANINGS.keys() - read == {"again", "read", "digest"}  # the host's own


def test_a_fact_without_a_meaning_is_refused():
    with pytest.raises(TypeError, match="no facts: tile_x"):
        Facts(tile_m=64, tile_x=1)


@pytest.fixture
def launches(monkeypatch):
    """What a plan launches, ``(grid, arguments)``, and nothing of it done."""
    calls = []
    monkeypatch.setattr(runtime, "run", lambda kernel, grid, tiles, *args: calls.append((grid, args)) or object())
    monkeypatch.setattr(runtime, "run_compiled", lambda compiled, grid, *args: calls.append((grid, args)))
    return calls


def _moved(x):
    """A copy at an odd address."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def test_a_second_forward_is_the_first_with_new_addresses(launches):
    c, new = (call(*qkv(nk=n, d=64, dv=64, dtype=torch.bfloat16), causal=True) for n in (70, 70))
    plan = Plan(c.p, TMA)
    launch.forward(plan, c.t)
    out = launch.forward(plan, new.t)
    (grid, first), (again, second) = launches
    assert again == (*grid, 1)
    assert (second[0].q, second[0].v, second[0].lse) == (new.t.q.data_ptr(), new.t.v.data_ptr(), out.lse.data_ptr())
    assert all(x is y for x, y in zip(first[1:3] + first[7:], second[1:3] + second[7:], strict=True))
    assert [second[3].base, second[5].base] == [new.t.k.data_ptr(), new.t.v.data_ptr()]
    new.t.q = _moved(new.t.q)
    launch.forward(plan, new.t)
    assert launches[2][1][0].q is new.t.q


def test_a_second_call_makes_its_own_terms(launches):
    c, new = (call(*qkv(nk=70, d=64, dv=64), causal=True) for _ in range(2))
    plan = Plan(c.p, TERMS)
    out = launch.forward(plan, c.t)
    launch.forward(plan, new.t)
    (_, terms), (_, main) = launches[2:]
    assert terms[0][:3] == tuple(x.data_ptr() for x in (new.t.q, new.t.k, new.t.v))
    assert (terms[0].dq, terms[0].dk, terms[0].dv) == main[0][:3]
    assert [main[3].base.data_ptr(), main[5].base.data_ptr()] == [main[0].k, main[0].v]
    launches.clear()
    launch.backward(plan, c.t, out, c.do, c.dlse)
    launch.backward(plan, new.t, out, new.do, new.dlse)
    (_, terms), (_, delta), (_, _dq), (_, dkdv) = launches[4:]
    assert (*terms[0][:3], terms[0].do) == tuple(x.data_ptr() for x in (new.t.q, new.t.k, new.t.v, new.do))
    assert (terms[0].dq, terms[0].dk, terms[0].dv, terms[0].o) == (*dkdv[0][:3], delta[0].do)
    assert [dkdv[3].base.data_ptr(), dkdv[5].base.data_ptr()] == [dkdv[0].q, dkdv[0].do]


def test_a_second_forward_reads_its_own_bias(launches):
    biased = lambda: tw.bias(normal(4, 72, 72, dtype=torch.bfloat16))  # noqa: E731
    c, new = (call(*qkv(nq=72, nk=72, d=64, dv=64, dtype=torch.bfloat16), score=biased()) for _ in range(2))
    plan = Plan(c.p, TMA)
    launch.forward(plan, c.t)
    launch.forward(plan, new.t)
    (_, first), (_, second) = launches
    assert first[-2].base is c.t.leaves[plan.pair_leaf[0]]
    assert second[-2].base == new.t.leaves[plan.pair_leaf[0]].data_ptr()


def test_a_second_backward_is_the_first_with_new_addresses(launches):
    c, new = (call(*qkv(nk=n, d=64, dv=64, dtype=torch.bfloat16), causal=True) for n in (70, 70))
    plan = Plan(c.p, TMA)
    out = launch.forward(plan, c.t)
    launch.backward(plan, c.t, out, c.do, c.dlse)
    grads = launch.backward(plan, new.t, out, new.do, new.dlse)
    first, second = launches[1:4], launches[4:7]
    for (grid, args), (again, others) in zip(first, second, strict=True):
        assert again == (*grid, 1, 1)
        assert all(x is y for x, y in zip(args[1:3], others[1:3], strict=True))
        assert args[-1] is others[-1]
        given = [(name, x, y) for name, x, y in zip(args[0]._fields, args[0], others[0], strict=True) if x is not None]
        assert all(y is not None for _, _, y in given)
        tensors = {"q": new.t.q, "k": new.t.k, "do": new.do, "o": out.o, "dq": grads.dq, "dv": grads.dv}
        assert all(y == tensors[name].data_ptr() for name, _, y in given if name in tensors)
    assert [second[2][1][n].base for n in (3, 5)] == [new.t.q.data_ptr(), new.do.data_ptr()]
    assert [second[1][1][n].base for n in (3, 5)] == [new.t.k.data_ptr(), new.t.v.data_ptr()]
    launch.backward(plan, new.t, out, _moved(new.do), new.dlse)
    assert isinstance(launches[8][1][0].q, torch.Tensor)


def test_a_second_backward_adds_up_its_own_parts(launches):
    c, new = (call(*qkv(d=64, dv=32, hk=1, dtype=torch.bfloat16), causal=True) for _ in range(2))
    plan = Plan(c.p, replace(TMA, group_parts=4))
    out = launch.forward(plan, c.t)
    launch.backward(plan, c.t, out, c.do, c.dlse)
    grads = launch.backward(plan, new.t, out, new.do, new.dlse)
    (grid, first), (_, summing) = launches[3:5]
    assert grid == (-(-c.p.seqlen_k // TMA.dkdv.tile_n) * c.p.batch * 4,)
    assert [x.shape for x in (first[0].dk, first[0].dv)] == [(4, *c.t.k.shape), (4, *c.t.v.shape)]
    assert summing[0].dk is first[0].dk
    (_, dq), (_, over_keys), (grid, summing) = launches[6:9]
    written = {x.data_ptr() for x in (grads.dk, grads.dv)}
    assert (over_keys[0].dk, over_keys[0].dv) == (summing[0].dk, summing[0].dv)
    assert not written & {over_keys[0].dk, over_keys[0].dv}
    assert dq[0].dq == grads.dq.data_ptr()
    assert summing[3:5] == (grads.dk.data_ptr(), grads.dv.data_ptr())
    assert grid[0] * 1024 >= c.t.k.numel()


def test_later_calls_of_a_predicate_walk_over_the_lists_of_their_own_mask(launches):
    rows = [torch.rand(130) > 0.3 for _ in range(2)]
    hides = [tw.keep(lambda b, h, i, j, x=x: x[i] & (j <= i)) for x in rows]
    tensors = qkv(nq=130, nk=130, d=64, dv=64, dtype=torch.bfloat16)
    calls = [call(*tensors, mask=mask) for mask in hides]
    plan = Plan(calls[0].p, TMA)
    for c in calls * 2:
        out = launch.forward(plan, c.t)
        launch.backward(plan, c.t, out, c.do, c.dlse)
    assert len(launches) == 16
    of_mask = []  # by mask: the addresses of the lists of its forward, its dQ, and its dK and dV
    for turn in range(4):
        forward, _, dq, dkdv = launches[4 * turn : 4 * turn + 4]
        found = [args[0].lists for _, args in (forward, dq, dkdv)]
        of_mask.append([[x if turn > 1 else x.data_ptr() for x in lists] for lists in found])
    assert of_mask[0] == of_mask[2]
    assert of_mask[1] == of_mask[3]
    assert all(a != b for a, b in zip(*of_mask[:2], strict=True))
    assert all(isinstance(args[0].q, int) for _, args in launches[8:])
    written = calls[0].t.leaves[0]
    written[:70] = ~written[:70]
    launch.forward(plan, calls[0].t)
    lists = launches[-1][1][0].lists
    assert [x.data_ptr() for x in lists] != of_mask[0][0]


def test_a_capture_makes_its_lists_anew(launches, monkeypatch):
    rows = torch.rand(130) > 0.3
    c = call(
        *qkv(nq=130, nk=130, d=64, dv=64, dtype=torch.bfloat16), mask=tw.keep(lambda b, h, i, j: rows[i] & (j <= i))
    )
    of_lists = Plan(c.p, TMA)
    launch.forward(of_lists, c.t)
    monkeypatch.setattr(plan, "is_captured", lambda: True)
    monkeypatch.setattr(base, "is_captured", lambda: True)
    launch.forward(of_lists, c.t)
    first, captured = (args[0].lists for _, args in launches)
    assert all(x is not y and torch.equal(x, y) for x, y in zip(first, captured, strict=True))


LISTS = ("tile_lists", "tile_order", "key_lists", "key_order")


@pytest.mark.parametrize(
    ("feature", "roles"),
    [
        ("causal", {"forward": None, "delta": "leads", "dq": "reads", "dkdv": "joins"}),
        ("parted", {"forward": None, "delta": "leads", "dq": "reads", "dkdv": "joins", "group_parts": "reads"}),
        ("bias", {"forward": None, "delta": "leads", "dkdv": "reads", "sheet": None}),
        ("sparse", dict.fromkeys(("forward", "delta", "dq", "dkdv", "tile_map", *LISTS, "tile_bits"))),
    ],
)
def test_what_a_kernel_reads_is_there_although_kernels_overlap(feature, roles):
    launched = compile_all.recorded(compile_all.Launch("sm90", torch.bfloat16, 128, feature))
    assert [(name, args[-1].overlap) for name, _, _, args in launched] == list(roles.items())


@pytest.mark.parametrize("dtype", compile_all.DTYPES, ids=str)
@pytest.mark.parametrize("arch", compile_all.TARGETS)
def test_one_head_dim_of_each_form_is_compiled(arch, dtype):
    def form(head_dim: int) -> str:
        products = compile_all.products_of(dtype, head_dim)
        return str(compile_all.form(compile_all.Launch(arch, dtype, head_dim, "causal", products)))

    compiled = compile_all.head_dims(arch, dtype)
    forms = {form(head_dim) for head_dim in compiled}
    assert forms == {form(head_dim) for head_dim in (64, 72, 80, 96, 128, 160, 192, 256, 512)}
    assert len(forms) == len(compiled)
    assert {64, 72} <= set(compiled)  # all columns, and masked ones
    items = {x.head_dim for x in compile_all.items() if (x.arch, x.dtype, x.feature) == (arch, dtype, "causal")}
    assert items == set(compiled) - ({512} if (arch, dtype) == ("sm100", torch.float32) else set())


def test_kernels_that_may_have_no_programs_do_not_overlap():
    p = call(*qkv(nq=0, nk=64, d=64, dv=64)).p
    plan = Plan(p, replace(TMA, overlapping=True))
    assert plan.overlap("reads") == {}


def test_a_second_backward_leaves_ds_and_sums_a_bias_where_it_says(launches):
    biased = lambda: tw.bias(normal(4, 72, 72, dtype=torch.bfloat16).requires_grad_())  # noqa: E731
    c, new = (call(*qkv(nq=72, nk=72, d=64, dv=64, dtype=torch.bfloat16), score=biased()) for _ in range(2))
    plan = Plan(c.p, Config(*[Tiles(64, 64, 4, 1, tma=True)] * 3))
    out = launch.forward(plan, c.t)
    launch.backward(plan, c.t, out, c.do, c.dlse)
    grads = launch.backward(plan, new.t, out, new.do, new.dlse)
    first, second = launches[1:4], launches[4:7]
    assert [grid for grid, _ in second] == [(*grid, 1, 1)[:3] for grid, _ in first]
    over_keys, of_sheet = (args for _, args in second[1:])
    slot = plan.emitted.reads[0].slot
    for tensors in (over_keys[0], of_sheet[0]):
        assert tensors.sheet == over_keys[-2].base
        assert tensors.leaves == (new.t.leaves[slot].data_ptr(),)
        assert tensors.grads == (grads.leaves[slot].data_ptr(),)
    assert over_keys[-3].base == new.t.leaves[slot].data_ptr()
    assert of_sheet[3].base == new.t.k.data_ptr()
    assert of_sheet[0].dq == grads.dq.data_ptr()
    assert of_sheet[4:] == first[2][1][4:]


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
        (tw.keep(lambda b, h, i, j: i != j), (70, 70), False),
    ],
    ids=["full", "causal", "window", "short-window", "key-range", "prefix", "key-lengths", "keep"],
)
def test_descriptors_read_every_tile_where_every_key_is_seen(mask, lengths, whole):
    q, k = (torch.randn(1, n, 1, 32) for n in lengths)
    c = call(q, k, k.clone(), mask=mask)
    assert Plan(c.p, TMA).whole == whole


class ReorderedTensors(NamedTuple):
    """Tensors with a field more, before all others, which are in another order."""

    added: Any = None
    v_scale: Any = None
    k_scale: Any = None
    piece: Any = None
    grads: Any = ()
    leaves: Any = ()
    lists: Any = None
    sheet: Any = None
    seed: Any = None
    sink: Any = None
    cu_seqlens_k: Any = None
    cu_seqlens_q: Any = None
    dv: Any = None
    dk: Any = None
    dq: Any = None
    dlse: Any = None
    delta: Any = None
    lse2: Any = None
    do: Any = None
    max_logit: Any = None
    lse: Any = None
    o: Any = None
    v: Any = None
    k: Any = None
    q: Any = None


@pytest.mark.parametrize("tensors", [None, ReorderedTensors], ids=["as-they-are", "a-field-more"])
def test_a_later_call_gives_each_field_its_own_address_wherever_the_field_stands(launches, monkeypatch, tensors):
    if tensors is not None:
        assert set(tensors._fields) == {*runtime.kernels().Tensors._fields, "added"}
        monkeypatch.setattr(runtime.kernels(), "Tensors", tensors)
    slopes, sink = normal(4).requires_grad_(), normal(4)
    options = {"causal": True, "score": tw.alibi(slopes), "sink": sink, "dropout_p": 0.1, "dropout_seed": 3}
    c, new = (call(*qkv(nk=70, d=64, dv=64, dtype=torch.bfloat16), **options) for _ in range(2))
    plan = Plan(c.p, TMA)
    out = launch.forward(plan, c.t)
    launch.backward(plan, c.t, out, c.do, c.dlse)
    launches.clear()
    again = launch.forward(plan, new.t)
    grads = launch.backward(plan, new.t, again, new.do, new.dlse)
    read = {"q": new.t.q, "k": new.t.k, "v": new.t.v, "o": again.o, "lse": again.lse}
    shared = {"seed": new.t.seed, "sink": new.t.sink}
    written = {"do": new.do, "dlse": new.dlse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    slot = plan.emitted.slots[0]
    for name, (_, arguments) in zip(("forward", "delta", "dq", "dkdv"), launches, strict=True):
        pointers = arguments[0]
        expected = read | shared | (written if name != "forward" else {})
        assert {x: getattr(pointers, x) for x in expected} == {x: tensor.data_ptr() for x, tensor in expected.items()}
        assert pointers.leaves == (new.t.leaves[slot].data_ptr(),)
        assert len(pointers.grads) == (name in ("dq", "dkdv"))
        assert pointers.cu_seqlens_q is pointers.lists is getattr(pointers, "added", None) is None
    assert [view.base for view in launches[0][1][3:7:2]] == [new.t.k.data_ptr(), new.t.v.data_ptr()]
    statistics = launches[1][1][0]
    assert statistics.delta - statistics.lse2 > 4 * 70 * 4 * 2


def test_heads_of_one_query_share_a_tile_unless_they_differ_in_more_than_their_queries():
    q, k, v = qkv(nq=1, nk=50, hq=4, hk=2)
    plans = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"mask": tw.window(20, 0)},
        "score": {"score": tw.alibi(normal(4))},
        "sink": {"sink": normal(4)},
        "dropout": {"dropout_p": 0.5, "dropout_seed": 1},
    }
    found = {name: Plan(call(q, k, v, **options).p, TMA).regrouped for name, options in plans.items()}
    assert [name for name, plan in found.items() if plan is not None] == ["plain", "causal"]
    assert Plan(call(*qkv(nq=2, nk=50, hq=4, hk=2)).p, TMA).regrouped is None
