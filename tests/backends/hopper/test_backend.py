"""The Hopper backend around its kernels: who may choose it, what it says, and what a launch is given."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilewise as tw
from bench.testing import wrong
from tests.backends.contract import ASINH, NEW_OPERATION, call, normal
from tests.backends.hopper.launches import Seen, seen, stand_in
from tilewise import dispatch, expr
from tilewise.backends.hopper import Hopper, kernels
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.host import aot, driver, kernel_files, library, sass


def plain(*tensors, **options):
    c = call(*tensors, **options)
    return replace(c, p=replace(c.p, spec=replace(c.p.spec, needs_grad=False)))


def qkv(nq=70, nk=70, d=64, heads=(4, 2)):
    sizes = ((nq, heads[0]), (nk, heads[1]), (nk, heads[1]))
    return [normal(1, n, h, d, dtype=torch.bfloat16, seed=s) for s, (n, h) in enumerate(sizes)]


# -- Who may choose it ---------------------------------------------------------------------------------------------


def test_it_comes_first_on_a_gpu_and_refuses_tensors_elsewhere():
    p = replace(plain(*qkv()).p, device=torch.device("cuda"))
    assert dispatch.candidates(p)[0] == "hopper"
    with pytest.raises(NotImplementedError, match="runs on cuda, q is on cpu"), torch.no_grad():
        tw.attention(*qkv(), backend="hopper")


def test_explain_gives_its_reason():
    assert "hopper" in tw.explain(*qkv()).refused
    assert "not       hopper: " in str(tw.explain(*qkv()))


def test_an_operation_that_its_kernels_do_not_have_is_refused_by_name_in_a_score(monkeypatch):
    monkeypatch.setitem(expr.OPERATIONS, "asinh", ASINH)
    mask, score = ({part: NEW_OPERATION[part](torch.asinh)} for part in ("mask", "score"))
    assert Hopper().refused(call(*qkv(), **mask).p) == []  # bits come from the planner, which has any operation
    (reason,) = Hopper().refused(call(*qkv(), **score).p)
    assert "asinh" in reason


def test_numbers_that_kernels_would_not_hold_are_refused_in_a_score_alone():
    doubles, many = torch.zeros(70, dtype=torch.float64), range(4200)

    def one_of_many(b, h, i, j):
        found = j < 0
        for n in many:
            found = found | (j * 7 + i == n * 11)
        return found

    masks = (
        tw.keep(lambda b, h, i, j: (i * 2**40 + j) % 3 == 0),
        tw.keep(lambda b, h, i, j: doubles[j] > 0.5),
        tw.keep(one_of_many),
    )
    for mask in masks:
        assert Hopper().refused(call(*qkv(), mask=mask).p) == []
    (reason,) = Hopper().refused(call(*qkv(), score=lambda s, b, h, i, j: s * (j < 2**40)).p)
    assert "32 bits" in reason


def without(monkeypatch, *packages):
    """As if these packages were not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else found(name))


def test_a_kernel_that_is_not_there_and_cannot_be_built_is_a_reason(monkeypatch):
    monkeypatch.setattr(kernel_files, "index", dict)
    monkeypatch.setattr(driver, "load", lambda: "no launcher")
    without(monkeypatch, "cutlass")
    launcher, kernel = library.missing(config.shipped()[0])
    assert launcher == "no launcher"
    assert "nvidia-cutlass-dsl" in kernel


@pytest.fixture
def building(monkeypatch, tmp_path):
    """Kernels are nowhere; builds are written down, and find the faults that are put into ``faults`` and ``wrong``."""
    monkeypatch.setattr(kernel_files, "index", dict)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    found = SimpleNamespace(built=[], faults=[], wrong=[], folder=tmp_path)

    def build(config, folder):
        found.built.append(config.name)
        (folder / kernel_files.file_name(config.name)).touch()
        return {"faults": found.faults, "wrong": found.wrong}

    monkeypatch.setattr(aot, "build", build)
    return found


def test_a_kernel_that_is_not_there_is_built_once_and_the_user_is_told(building):
    with pytest.warns(UserWarning, match="compiles forward_.*, once for this machine") as told:
        files = [library.file_of(config.shipped()[0]) for _ in range(2)]
    assert files[0] == files[1]
    assert files[0].is_relative_to(building.folder)
    assert files[0].exists()
    assert len(told) == len(building.built) == 1


@pytest.mark.filterwarnings("ignore:tilewise compiles")
def test_a_kernel_that_is_slower_than_it_should_be_is_kept_with_a_warning(building):
    building.faults.append("3 loads or stores of spills")
    with pytest.warns(UserWarning, match="slower than it should be: 3 loads or stores of spills"):
        assert library.file_of(config.shipped()[0]).exists()


@pytest.mark.filterwarnings("ignore:tilewise compiles")
def test_a_kernel_that_would_be_wrong_is_refused_and_not_kept(building):
    building.faults = building.wrong = ["250 registers where setmaxnreg gives 240"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"refuses forward_.*: 250 registers"):
            library.file_of(config.shipped()[0])
    assert not list(building.folder.rglob("*.kernel"))
    assert len(building.built) == 2


def test_every_pattern_of_sources_matches_a_file():
    assert [p for p in kernel_files.SOURCES if not list(Path(kernel_files.TABLE).parent.glob(p))] == []


# -- What a launch is given ----------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """The arguments of each launch."""
    found = []

    def put(c, arguments: list) -> None:
        tensors, numbers = seen(arguments)
        found.append((c.name, *tensors[:6], numbers))

    stand_in(monkeypatch, put)
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)], ids=["no-queries", "no-keys"])
def test_calls_without_a_pair_launch_nothing_and_are_right(lengths, packed, launched):
    nq, nk = lengths
    q, k, v = (x[0] if packed else x[:1] for x in qkv(nq, nk))
    starts = {f"cu_seqlens_{side}": torch.tensor([0, n, n], dtype=torch.int32) for side, n in (("q", nq), ("k", nk))}
    c = call(q, k, v, causal=True, sink=normal(4), **(starts if packed else {}))
    assert not wrong(Hopper(), c)
    assert not launched


def test_slopes_of_calls_without_keys_have_gradients_of_zero(launched):
    c = call(*qkv(nk=0), causal=True, score=tw.alibi(torch.rand(4).requires_grad_()))
    assert backward_config.choose(c.p).trained
    assert not wrong(Hopper(), c)
    assert not launched


def test_a_table_of_a_call_without_keys_has_a_gradient_of_zero(launched):
    table = normal(4, 9).requires_grad_()
    c = call(*qkv(nk=0), score=lambda s, b, h, i, j: s + table[h, (i - j).clamp(0, 8)])
    assert not Hopper().refused(c.p)
    assert not wrong(Hopper(), c)
    assert not launched


def test_a_launch_gets_the_tensors_themselves_and_the_numbers_of_the_call(launched):
    c = plain(*qkv(), causal=True, softmax_scale=0.25)
    out = Hopper().forward(c.p, c.t)
    ((name, q, k, v, o, lse, sink, numbers),) = launched
    assert name == config.choose(c.p).name
    assert [x.data_ptr() for x in (q, k, v, o, lse)] == [x.data_ptr() for x in (c.t.q, c.t.k, c.t.v, out.o, out.lse)]
    assert sink.shape == (4,)
    assert numbers[1] == 1
    assert numbers[4:] == [0, 0.25 * math.log2(math.e), 0.0]


def test_a_problem_that_comes_again_is_launched_with_its_new_tensors(launched):
    backend, c = Hopper(), plain(*qkv(), causal=True)
    for n in range(3):
        tensors = qkv()
        if n == 2:  # of the same strides, in an odd place: it is copied
            tensors[0] = torch.cat([tensors[0].flatten()] * 2)[1 : 1 + tensors[0].numel()].view(tensors[0].shape)
        backend.forward(c.p, replace(c.t, **dict(zip("qkv", tensors, strict=True))))
        same = [given.data_ptr() == got.data_ptr() for given, got in zip(tensors, launched[-1][1:4], strict=True)]
        assert same == [n < 2, True, True]
        assert torch.equal(tensors[0], launched[-1][1].value)


def test_keys_that_no_query_sees_stay_outside(launched):
    c = plain(*qkv(30, 70), mask=tw.window(8, 2))
    Hopper().forward(c.p, c.t)
    _, _, k, v, *_, numbers = launched[0]
    assert k.shape[1] == v.shape[1] == 38  # the first row sees keys from 32 on, the last as far as 70
    assert numbers[:2] == [0, 11]
    assert k.data_ptr() == c.t.k[:, 32:].data_ptr()


UNADDRESSABLE = {
    "odd-start": lambda x: torch.cat([x, x], -1)[..., 1:65],
    "odd-rows": lambda x: torch.cat([x, x[..., :1]], -1)[..., :64],
    "expanded": lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
    "columns-first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


@pytest.mark.parametrize("form", UNADDRESSABLE)
def test_what_the_copy_engine_cannot_address_is_copied_once(form, launched):
    tensors = [UNADDRESSABLE[form](x) for x in qkv()]
    c = plain(*tensors)
    Hopper().forward(c.p, c.t)
    for given, got in zip(tensors, launched[0][1:4], strict=True):
        assert torch.equal(given, got.value)
        assert got.data_ptr() % 16 == 0
        assert got.stride()[-1] == 1
        assert all(stride > 0 and stride % 8 == 0 for stride in got.stride()[:-1])


def test_the_stride_of_a_single_row_is_one_that_a_tensor_map_can_hold(launched):
    # A packed sequence's map counts rows from an offset that wraps around, whatever there is of them.
    def apart(heads):
        return normal(4 * 131, dtype=torch.bfloat16).as_strided((1, 1, heads, 64), (131, 131, 72, 1), 1)

    c = call(*(apart(heads).requires_grad_() for heads in (2, 1, 1)), mask=tw.key_lengths(torch.tensor([1])))
    out = Hopper().forward(c.p, c.t)
    Hopper().backward(c.p, c.t, out, apart(2), torch.zeros(1, 2, 1))
    rows = [x for call in launched for x in call[1:] if isinstance(x, Seen) and x.shape[-1] == 64]
    assert len(rows) > 8
    assert all(stride % 8 == 0 for x in rows for stride in x.stride()[:-1])


@pytest.mark.parametrize("form", ["heads-first", "slice-of-qkv"])
def test_what_it_can_address_is_not_copied(form, launched):
    packed = normal(2, 70, 3, 4, 64, dtype=torch.bfloat16)
    x = packed[:, :, 1] if form == "slice-of-qkv" else packed[:, :, 1].transpose(1, 2).contiguous().transpose(1, 2)
    c = plain(x, x, x)
    Hopper().forward(c.p, c.t)
    assert launched[0][1].data_ptr() == c.t.q.data_ptr()


@pytest.mark.parametrize("sink", [None, normal(4)], ids=["no-sink", "sink"])
def test_where_no_query_sees_a_key_nothing_is_launched(sink, launched):
    c = plain(*qkv(), mask=tw.key_range(30, 30), sink=sink)
    out = Hopper().forward(c.p, c.t)
    assert not launched
    assert (out.o == 0).all()
    expected = torch.full((4,), -math.inf) if sink is None else sink
    assert torch.equal(out.lse, expected.view(1, 4, 1).expand(1, 4, 70))


# -- What the assembler made ---------------------------------------------------------------------------------------

GOOD = """
        /*0000*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0010*/                   UTMALDG.4D [UR4], [UR6] ;
        /*0020*/                   UTMASTG.4D [UR4], [UR6] ;
        /*0030*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR8], R88 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR8], R88, gsb0 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0090*/                   MUFU.EX2 R24, R24 ;
        /*00a0*/              @!P0 MUFU.EX2 R25, R25 ;
        /*00b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""


def test_a_good_listing_has_no_faults():
    report = sass.read(GOOD)
    assert report.registers == {24: 0, 240: 89}
    assert report.wrong() + report.slow(exponentials=2) == []


FAULTS = {
    "spill": (GOOD.replace("MUFU.EX2 R24", "LDL R24"), "spills"),
    "serialised": (GOOD.replace("gdesc[UR8], R24 ;", "gdesc[UR8], R24, gsb0 ;"), "wait for the one before"),
    "registers": (GOOD.replace("R88", "R240"), "setmaxnreg"),
    "no-loads": (GOOD.replace("UTMALDG", "LDG"), "copy engine"),
    "late": (GOOD.replace("        /*00a0*/              @!P0 MUFU.EX2 R25, R25 ;\n", ""), "1 of 2 exponentials"),
    "no-overlap": (GOOD.replace("gsb0, 0x1", "gsb0, 0x0"), "in flight"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_listing_is_found(name):
    listing, word = FAULTS[name]
    report = sass.read(listing)
    assert any(word in fault for fault in report.wrong() + report.slow(exponentials=2))
    assert bool(report.wrong()) == (name == "registers")


def test_a_spill_counts_where_it_is_repeated_for_each_block():
    product, local = (
        "        /*0000*/                   " + op for op in ("HGMMA.64x128x16 R24 ;\n", "LDL R24, [R1] ;\n")
    )
    tiles, blocks = (f".L_x_{n}:\n{{}}        /*0000*/              @!P0 BRA `(.L_x_{n});\n" for n in range(2))
    outside = tiles.format(local + blocks.format(product) + local)
    assert sass.repeated(outside) == 0
    assert sass.repeated(tiles.format(blocks.format(product + local) + local)) == 1
    report = sass.read(GOOD + outside)
    assert report.local == 2
    assert report.slow(exponentials=2, gathers=True) == []
    assert any("spills" in fault for fault in report.slow(exponentials=2))


WAIT = "        /*0000*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{} ;\n"
LSE = "        /*0000*/                   MUFU.LG2 R2, R3 ;\n"


@pytest.mark.parametrize("end", [WAIT.format(1) + LSE, LSE + WAIT.format(1)], ids=["after", "before"])
def test_the_end_of_a_tile_under_which_a_product_runs_has_no_exponentials_to_hide(end):
    assert sass.read(GOOD + end + WAIT.format(0)).hidden == sass.read(GOOD).hidden
    assert sass.read(GOOD + WAIT.format(1) + WAIT.format(0)).hidden == (*sass.read(GOOD).hidden, 0)


def test_the_committed_table_is_of_the_kernels_that_are_shipped():
    rows = [line.split()[0] for line in kernel_files.TABLE.read_text().splitlines()[1:]]
    assert rows == sorted(c.name for c in kernels.shipped()), "run: make kernels-hopper"


def test_the_table_is_the_same_whatever_the_order_of_building():
    row = {"registers": [200, 12], "spills": 0, "shared": 1, "wgmma": 2, "cubin": 3, "hidden": [4], "program": "0f"}
    assert aot.table({"b": row, "a": row}) == aot.table({"a": row, "b": row})
