"""The cpu backend against the contract: on every instruction set of this machine, with its own tiles and with others."""

import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewise as tw
from bench import cases
from tests.backends.contract import Call, Contract, agree, call, normal, of_case, qkv, run
from tests.backends.paged import CASES, PagedContract, random_case
from tests.backends.paged import run as paged_run
from tests.fuzz import FACTOR
from tests.planning.test_tiles import assert_sound, true_status
from tilewise import dropout
from tilewise.backends import base
from tilewise.backends.cpu import Cpu, library
from tilewise.backends.cpu import call as cpu_call
from tilewise.backends.cpu.config import Config
from tilewise.backends.cpu.program import compile_spec
from tilewise.expr import symbol
from tilewise.piece import Piece
from tilewise.planning.tiles import Grid


def need_isa(name: str) -> None:
    loaded = library.load()
    if isinstance(loaded, str) or name not in loaded.isas:
        pytest.skip(f"no library, or a machine without {name}")


class TestCpu(Contract):
    backend = Cpu()


class TestCpuOverPages(PagedContract):
    backend = Cpu()

    @pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
    @pytest.mark.parametrize("name", ["page-1", "page-7-odd-dims", "bfloat16", "many-keys", "packed"])
    def test_other_instruction_sets_agree_with_the_oracle(self, name, isa):
        need_isa(isa)
        q, cache, options = CASES[name].draw()
        c = self.call(q, cache, **options)
        wrong = [str(e) for e in c.expected().judge(paged_run(Cpu(isa=isa), c)) if not e.ok]
        assert not wrong, "; ".join(wrong)

    @pytest.mark.parametrize("seed", range(40))
    def test_random_tables_agree_with_the_oracle(self, seed):
        q, cache, options = random_case(random.Random(seed)).draw()
        c = self.call(q, cache, **options)
        errors = c.expected().judge(paged_run(self.backend, c))
        # On few numbers eager attention may be exact by luck (tests/fuzz.py).
        wrong = [str(e) for e in errors if not (e.rms <= FACTOR * e.rms_allowed and e.max <= FACTOR * e.max_allowed)]
        assert not wrong, "; ".join(wrong)

    def test_as_many_threads_as_there_are_change_no_bit(self):
        q, cache, options = CASES["many-keys"].draw()
        c = self.call(q, cache, **options)
        one = paged_run(self.backend, c)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            assert all(torch.equal(x, one[name]) for name, x in paged_run(self.backend, c).items())
        finally:
            torch.set_num_threads(before)


class TestAvx512(Contract):
    """The default where bf16 dot products exist has all of this but them: here, 16-bit inputs without them."""

    backend = Cpu(isa="avx512")

    @pytest.fixture(autouse=True)
    def _has_it(self):
        need_isa("avx512")


class TestAvx2(Contract):
    backend = Cpu(isa="avx2")

    @pytest.fixture(autouse=True)
    def _has_it(self):
        need_isa("avx2")


class TestPortableVectors(Contract):
    backend = Cpu(isa="portable")

    @pytest.fixture(autouse=True)
    def _has_it(self):
        need_isa("portable")


class InBf16(Contract):
    """The contract's cases in bf16, whatever their own type: what the products of pairs are for."""

    def call(self, *tensors: torch.Tensor, **options: object) -> Call:
        return call(*(x.bfloat16() for x in tensors), **options)

    @pytest.mark.parametrize("case", cases.tagged("contract"), ids=lambda case: case.name.removeprefix("contract-"))
    def test_agrees_with_the_oracle(self, case):
        if case.dtype not in ("float32", "bfloat16"):
            pytest.skip("its numbers are not those of bf16")
        agree(self.backend, of_case(replace(case, dtype="bfloat16")))


class TestAmx(InBf16):
    backend = Cpu(isa="amxbf16")

    @pytest.fixture(autouse=True)
    def _has_it(self):
        need_isa("amxbf16")


EMULATED = Path(__file__).parents[2] / "build/native/libtilewise_cpu_emulated.so"


@pytest.fixture
def emulated(monkeypatch):
    """The library with AMX in software, which `make test` builds."""
    if not EMULATED.exists():
        pytest.skip(f"no {EMULATED.name}: make test builds it")
    loaded = library.Library(EMULATED)
    if "amxbf16_emulated" not in loaded.isas:
        pytest.skip("the rest of the AMX kernels is for AVX-512 with bf16 dot products")
    monkeypatch.setattr(library, "load", lambda: loaded)


@pytest.mark.usefixtures("emulated")
class TestEmulatedAmx(InBf16):
    backend = Cpu(isa="amxbf16_emulated")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("d", "dv"), [(1, 2), (33, 7), (80, 48), (64, 144), (300, 16)], ids=str)
@pytest.mark.parametrize(("nq", "nk"), [(17, 65), (101, 203)], ids=str)
def test_tiles_that_nothing_fills_agree(d, dv, nq, nk):
    """Depths, rows and columns past the last whole tile register; depths of more than one strip."""
    q, k, v = qkv(batch=1, nq=nq, nk=nk, d=d, dv=dv, dtype=torch.bfloat16)
    agree(TestEmulatedAmx.backend, call(q, k, v, causal=True))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("heads", "nq", "d", "dv"), [(8, 1, 64, 64), (3, 5, 96, 33), (2, 2, 33, 130)], ids=str)
def test_few_rows_in_tile_registers_agree(heads, nq, d, dv):
    """Keys as they lie and copied, columns past the last whole tile, ends inside a step, poisoned padding."""
    q, k, v = qkv(batch=1, nq=nq, nk=203, hq=heads, hk=1, d=d, dv=dv, dtype=torch.bfloat16)
    k[:, 190:], v[:, 190:] = torch.nan, torch.inf
    agree(TestEmulatedAmx.backend, call(q, k, v, mask=tw.key_range(5, 190) & tw.window(left=90, right=0)))


@pytest.mark.usefixtures("emulated")
def test_emulated_instructions_are_those_that_are_defined():
    """And those of the hardware, bit by bit, on a machine that has them (tests/native/tiles.cpp)."""
    run = subprocess.run([EMULATED.with_name("tiles")], capture_output=True, text=True)
    assert not run.returncode, run.stdout


def test_amx_comes_first_where_the_processor_has_it_and_never_in_software():
    loaded = library.load()
    assert "amxbf16" not in loaded.isas[1:]
    assert not any("emulated" in isa for isa in loaded.isas)


@pytest.mark.usefixtures("emulated")
def test_amx_in_software_runs_only_when_named():
    assert library.load().isas.index("amxbf16_emulated") == len(library.load().isas) - 1


def test_the_library_is_there():
    assert not isinstance(library.load(), str), library.load()


def test_a_library_that_is_not_there_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CPU_LIBRARY", str(tmp_path / "other.so"))
    assert library.load.__wrapped__().endswith(f"(other.so): TILEWISE_CPU_LIBRARY={tmp_path / 'other.so'}")
    monkeypatch.delenv("TILEWISE_CPU_LIBRARY")
    monkeypatch.setattr(library, "_FILE", tmp_path / "libtilewise_cpu.so")
    assert "build/native.log" in library.load.__wrapped__()
    monkeypatch.setattr(base, "NOT_BUILT", tmp_path / "not_built.txt")
    base.NOT_BUILT.write_text("the compiler failed\n")
    assert library.load.__wrapped__().endswith("the compiler failed")


OTHER_TILES = {
    "tiny": Config(isa="portable", tile_m=5, tile_n=64, heads=1, backward_m=7, backward_n=64),
    "stacked": Config(isa="portable", tile_m=12, tile_n=128, heads=2, backward_m=24, backward_n=64),
    "shares": Config(isa="portable", tile_m=64, tile_n=64, heads=2, backward_m=40, backward_n=64, shares=2),
    "split": Config(isa="portable", tile_m=16, tile_n=64, heads=2, backward_m=16, backward_n=64, split=64, shares=2),
}
NAMES = (
    "gqa-causal",
    "window-both-cross",
    "documents",
    "dense",
    "softcap-alibi-causal-cross",
    "relative",
    "dropout-causal-alibi-sink",
    "key-lengths",
)


@pytest.mark.parametrize("config", OTHER_TILES.values(), ids=OTHER_TILES)
@pytest.mark.parametrize("name", NAMES)
def test_tiles_do_not_change_the_result(config, name):
    agree(Cpu(config), of_case(cases.named(f"contract-{name}")))


@pytest.mark.parametrize("d", [1, 7, 16, 33, 64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bf16", "fp16", "fp64"])
def test_odd_sizes_in_every_dtype(d, dtype):
    q, k, v = qkv(batch=1, nq=101, nk=203, d=d, dv=d + 4, dtype=dtype)
    agree(Cpu(), call(q, k, v, causal=True, score=tw.softcap(20.0), sink=normal(4)))
    agree(Cpu(), call(q, k, v))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads):
    c = call(*qkv(nq=200, nk=200), causal=True, score=tw.alibi(normal(4).requires_grad_()))
    before = torch.get_num_threads()
    results = []
    for n in (1, threads):
        torch.set_num_threads(n)
        results.append(run(Cpu(), c))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mask", [tw.causal(), tw.window(70, 40)], ids=str)
def test_parts_of_the_keys_do_not_change_a_bit(mask, dtype):
    """Threads that share a head add to its dq in the order of the keys, as one thread does."""
    c = call(*qkv(batch=1, nq=200, nk=700, dtype=dtype), mask=mask)
    config = replace(Cpu().config(c.p), backward_m=40, backward_n=64)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    one, some, most = (run(Cpu(replace(config, shares=n)), c) for n in (1, 3, 16))
    torch.set_num_threads(before)
    assert all(torch.equal(one[name], other[name]) for name in one for other in (some, most))


@pytest.mark.parametrize("shares", [1, 2], ids=["alone", "shared"])
@pytest.mark.parametrize("mask", [tw.causal(), tw.window(40, 5) & tw.keep(lambda b, h, i, j: (i + j) % 3 > 0)], ids=str)
def test_dq_past_the_memory_that_sums_it_has_a_pass_of_its_own_and_the_same_bits(mask, shares):
    """8 MiB hold 16 of 24 queries of 128 heads on one, 1024 wide; and all of 32 heads."""

    def dq(heads: slice) -> torch.Tensor:
        c = call(q[:, :, heads], k, v, mask=mask, score=tw.softcap(5.0), do=do[:, :, heads])
        backend = Cpu(replace(Cpu().config(c.p), backward_m=5, backward_n=64, shares=shares))
        return run(backend, replace(c, dlse=torch.zeros_like(c.dlse)))["dq"]

    q, k, v = qkv(batch=1, nq=24, nk=70, hq=128, hk=1, d=1024, dv=16, dtype=torch.bfloat16)
    do = normal(1, 24, 128, 16).bfloat16()
    whole = dq(slice(None))
    assert all(torch.equal(whole[:, :, n : n + 32], dq(slice(n, n + 32))) for n in range(0, 128, 32))


STARTS = {"at-a-block": (16, 48), "inside-a-block": (5, 7), "far": (100_003, 100_017)}
DROPPED = {
    "fp32": (torch.float32, None), "bf16": (torch.bfloat16, None), "fp64": (torch.float64, None),
    "fp32-portable": (torch.float32, "portable"),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "isa"), DROPPED.values(), ids=DROPPED)
@pytest.mark.parametrize(("q_start", "k_start"), STARTS.values(), ids=STARTS)
def test_a_piece_drops_the_pairs_that_the_whole_drops(q_start, k_start, dtype, isa):
    """With identities for v and dO, o is R ∘ P and dv its transpose. A window ends inside some of the three tiles of keys."""
    n, p, seed = 150, 0.3, -77
    q, k, _ = qkv(nq=n, nk=n, hq=2, hk=2, dtype=dtype)
    identity = torch.eye(n, dtype=dtype).view(1, n, 1, n).expand(2, n, 2, n)
    options = {"mask": tw.window(60, 60), "dropout_p": p, "dropout_seed": seed}
    c = call(q, k, identity, identity, piece=Piece(q_start, k_start, 2**18, 2**18), **options)
    found = run(Cpu(replace(Cpu(isa=isa).config(c.p), tile_n=64, backward_n=64)), c)
    i, j = torch.arange(q_start, q_start + n).view(-1, 1), torch.arange(k_start, k_start + n)
    heads = torch.arange(4).view(2, 2)
    kept = dropout.keep(torch.tensor([seed]), p, heads, (q_start, q_start + n), (k_start, k_start + n))
    kept &= (i - j).abs() <= 60
    assert torch.equal(found["o"].transpose(1, 2) > 0, kept)
    assert torch.equal(found["dv"].permute(0, 2, 3, 1) > 0, kept)


@pytest.mark.parametrize("nk", [2 * 1024 + 100, 2 * 4096 + 100])
def test_long_keys_with_few_queries_are_split_and_merged(nk):
    q, k, v = qkv(
        nq=3, nk=nk, hq=8, hk=4
    )  # of two heads dsink is two numbers: their one rounding of lse decides, by luck
    c = call(q, k, v, causal=True, sink=normal(8))
    assert Cpu().config(c.p).split == 1024
    agree(Cpu(), c)


FEW = {
    "fp32": (torch.float32, None), "bf16": (torch.bfloat16, None), "fp16": (torch.float16, None),
    "fp64": (torch.float64, None), "bf16-avx512": (torch.bfloat16, "avx512"), "fp32-avx2": (torch.float32, "avx2"),
    "bf16-pairs": (torch.bfloat16, "avx512bf16"),
    "bf16-portable": (torch.bfloat16, "portable"),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "isa"), FEW.values(), ids=FEW)
@pytest.mark.parametrize(("heads", "nq", "d"), [(1, 1, 64), (2, 1, 33), (3, 1, 80), (8, 1, 64), (4, 3, 16), (5, 2, 7)])
def test_as_many_rows_as_a_vector_has_lanes_share_its_keys(heads, nq, d, dtype, isa):
    """Rows of each power of two and between, keys that fill no block, a mask with ends inside a step, poisoned padding."""
    if isa:
        need_isa(isa)
    q, k, v = qkv(batch=2, nq=nq, nk=203, hq=heads, hk=1, d=d, dv=d + d % 2, dtype=dtype)
    agree(Cpu(isa=isa), call(q, k, v))
    k[:, 190:], v[:, 190:] = torch.nan, torch.inf
    agree(Cpu(isa=isa), call(q, k, v, mask=tw.key_range(5, 190) & tw.window(left=90, right=0)))


@pytest.mark.parametrize(("dtype", "isa"), FEW.values(), ids=FEW)
@pytest.mark.parametrize("nq", [1, 16, 70])
def test_an_infinite_value_gives_an_infinite_result(nq, dtype, isa):
    """The last key of an odd number is a pair alone in bf16, and zero times infinity is no number."""
    need_isa(isa or "portable")
    q, k, v = qkv(batch=1, nq=nq, nk=203, hq=1, hk=1, dtype=dtype)
    v[0, 0, 0, 0], v[0, 202, 0, 1] = torch.inf, -torch.inf
    c = call(0 * q, k, v)
    o = Cpu(isa=isa).forward(c.p, c.t).o
    assert (o[..., :2] == torch.tensor([torch.inf, -torch.inf])).all()
    assert o[..., 2:].isfinite().all()


@pytest.mark.parametrize(
    "shape", [(4, 70, 70), (1, 1, 70, 70), (2, 1, 70, 70), (1, 4, 70, 70), (70,), (2, 4, 1, 1)], ids=str
)
@pytest.mark.parametrize("private", [True, False], ids=["private", "shared"])
def test_leaf_gradients_do_not_depend_on_where_they_are_summed(shape, private, monkeypatch):
    """Small leaves have sums of their own in each group of work; large ones share one array and an order."""
    monkeypatch.setattr(cpu_call, "PRIVATE_ELEMENTS", 1 << 30 if private else 0)
    agree(Cpu(), call(*qkv(), score=tw.bias(normal(*shape).requires_grad_()), causal=True))


def test_what_is_kept_of_a_mask_is_that_of_its_tensor_now():
    q, k, v = (x.requires_grad_() for x in (normal(2, 300, 2, 16, seed=n) for n in range(3)))
    both = torch.arange(300)[:, None] >= torch.arange(300) + torch.tensor([0, 170])[:, None, None]

    def agrees(kept):
        found = []
        for backend in ("cpu", "reference"):
            o = tw.attention(q, k, v, mask=tw.dense(kept), backend=backend)
            found.append((o, *torch.autograd.grad(o.sum(), (q, k, v))))
        for x, y in zip(*found, strict=True):
            torch.testing.assert_close(x, y)

    for _ in range(3):
        for kept in (both[0], both[1], both[:1, None], both[:, None]):
            agrees(kept)
            agrees(kept)
        both.logical_not_()


def test_prepared_masks_give_the_same_result():
    q, k, v = qkv(nq=200, nk=200)
    mask = tw.keep(lambda b, h, i, j: (i // 32 + j // 32) % 2 == 0) & tw.causal()
    plain, prepared = (run(Cpu(), call(q, k, v, mask=m)) for m in (mask, mask.prepare(q, k)))
    assert all(torch.equal(plain[name], prepared[name]) for name in plain)


def test_threads_that_prepare_a_pass_at_once_share_the_first_ones_call(monkeypatch):
    c = call(*qkv(nq=5, nk=5))
    prepared = cpu_call.Prepared(c.p, cpu_call.Decided.of(c.p, library.chosen_isa()))
    make, first = prepared._call, []

    def overtaken(*arguments):
        monkeypatch.setattr(prepared, "_call", make)
        first.append(prepared.of_pass(backward=False))  # another thread's, which is done before this one
        return make(*arguments)

    monkeypatch.setattr(prepared, "_call", overtaken)
    assert prepared.of_pass(backward=False) is first[0]


@pytest.mark.parametrize(
    ("blocks", "other"),
    [
        ((16, 64), tw.causal()),  # blocks smaller than tiles
        ((100, 96), tw.window(left=200, right=30)),  # that tiles cut
        ((2, 2), tw.key_lengths(torch.tensor([650, 0]))),  # more than are asked at once; no keys
        ((200, 600), tw.window(left=40)),  # larger than tiles
    ],
    ids=str,
)
def test_tiles_of_blocks_and_the_keys_that_are_seen_are_listed_by_the_library(blocks, other):
    need_isa("portable")
    sizes = [-(-n // size) for n, size in zip((300, 700), blocks, strict=True)]
    pattern = normal(2, 4, *sizes) > 0.3
    pattern[:, :, :, -1] = False
    assert_sound(*listed(tw.block_sparse(pattern, *blocks) & other, blocks))


def listed(mask, blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of tiles by the library and by hand, (2, 4, ...), after a look at the keys that are seen."""
    c = call(*qkv(nq=300, nk=700), mask=mask)
    bound = cpu_call.Bound(cpu_call.Prepared(c.p, cpu_call.Decided.of(c.p, library.chosen_isa())), c.t, backward=False)
    assert bound.region.unlisted == blocks
    bound.prepared.loaded.run("list", bound.call, *blocks)
    kept = Grid.whole(c.p.spec.region, c.t.leaves, (2, 4, 300, 700), "cpu").kept(torch.arange(300), torch.arange(700))
    kept = kept.expand(2, 4, -1, -1)
    true = true_status(kept, *bound.prepared.tile(False))
    seen = kept.unflatten(1, (2, 2)).any(2).any(2)
    assert torch.equal(bound.region.seen.bool().expand(seen.shape), seen)
    return bound.region.status.view(-1, bound.region.status_head.any() * 3 + 1, *true.shape[2:]).expand(
        true.shape
    ), true


@pytest.mark.parametrize(
    "inner",
    [tw.keep(lambda b, h, i, j: (i * j) % 5 > 0), tw.keep(lambda b, h, i, j: (i * j + h) % 7 > 0)],
    ids=["all-heads", "by-head"],
)
@pytest.mark.parametrize(
    "outer", [tw.causal(), tw.window(left=350, right=30), tw.key_lengths(torch.tensor([650, 0]))], ids=str
)
def test_tiles_that_a_part_of_the_mask_tells_are_not_asked_and_have_the_state_of_their_pairs(outer, inner):
    need_isa("portable")
    some, every = (tw.block_sparse(normal(3, 6, seed=seed) > least, 128, 128) for seed, least in ((1, 0.0), (2, 0.5)))
    found, true = listed((some | every) & (inner | every) & outer, (1, 1))
    assert torch.equal(found, true)
    assert set(true.unique().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_do_not_depend_on_whether_threads_share_a_head(dtype):
    c = call(*qkv(4, 300, 700, hq=4, hk=2, dtype=dtype), mask=tw.window(left=200, right=30), score=tw.softcap(20.0))
    whole = replace(Cpu().config(c.p), shares=1)
    apart = run(Cpu(override=replace(whole, shares=parts_of_keys(c.p, threads=16))), c)
    assert parts_of_keys(c.p, threads=4) == 1 < parts_of_keys(c.p, threads=16)
    assert all(torch.equal(apart[name], x) for name, x in run(Cpu(override=whole), c).items())


def parts_of_keys(p, threads: int) -> int:
    """The parts of the keys in a backward by so many threads."""
    native = library.Call.from_buffer_copy(Cpu()._prepared.of(p).of_pass(backward=True)[1])
    native.shares, native.threads = 0, threads
    library.load().choose(native, True)
    return native.shares


def test_deterministic_results_do_not_depend_on_the_rest_of_the_batch():
    q, k, v = qkv(batch=3, nq=300, nk=300)
    whole = run(Cpu(), call(q, k, v, causal=True, deterministic=True))
    alone = run(Cpu(), call(q[1:2], k[1:2], v[1:2], causal=True, deterministic=True))
    assert torch.equal(whole["o"][1:2], alone["o"])
    assert torch.equal(whole["lse"][1:2], alone["lse"])


ELEMENTWISE = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "sin": torch.sin, "cos": torch.cos, "erf": torch.erf, "abs": torch.abs, "relu": torch.relu, "floor": torch.floor,
    "sqrt": lambda s: torch.sqrt(s.abs() + 1), "log": lambda s: torch.log(s.abs() + 1),
    "log2": lambda s: torch.log2(s.abs() + 1), "log1p": lambda s: torch.log1p(s.abs()),
    "rsqrt": lambda s: torch.rsqrt(s.abs() + 1), "pow": lambda s: (s.abs() + 1) ** 1.5, "mod": lambda s: s % 3,
    "floordiv": lambda s: s + s // 2, "clamp": lambda s: s.clamp(-1, 2), "square": torch.square, "round": torch.round,
    "ceil": torch.ceil, "trunc": torch.trunc, "gate": lambda s: s * (s > 0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_operation_of_a_score_agrees(name, dtype):
    x = qkv(nq=40, nk=70, dtype=dtype)
    agree(Cpu(), call(*x, score=lambda s, b, h, i, j: ELEMENTWISE[name](2 * s) + 0.1 * s))


TABLE = torch.arange(200) % 7
PREDICATES = {
    "hash": lambda b, h, i, j: ((i * 7919 + j * 104729 + h) % 13 > 4) | (i == j),
    "bits": lambda b, h, i, j: ((i ^ j) & 3 != 0) & ~((i - j) // -3 == 2),
    "by-head": lambda b, h, i, j: torch.where(h % 2 == 0, j <= i, (j - i).abs() < 9),
    "waves": lambda b, h, i, j: torch.sin(0.3 * i) < torch.cos(0.2 * j + b),
    "signs": lambda b, h, i, j: torch.minimum(i, 2 * j).clamp(3, 50) % -5 != 0,
    "shifts": lambda b, h, i, j: (((i + j) << (j % 70)) >> (i % 70 - 3)) & 1 == 0,
    "least": lambda b, h, i, j: ((i + j) * (1 << 62) * 2) // 3 % 7 < 3,  # 0 and the least of all integers
    "lengths": lambda b, h, i, j: (
        ((~i & 3) + (i + tw.offset) // 2 < j) | (symbol("seqlen_q") - i >= symbol("seqlen_k") - j)
    ),
    "table": lambda b, h, i, j: (TABLE[i] - 3).bool() | ((0.3 * j).int() == TABLE[j]),
    "selected": tw.selected((torch.arange(70 * 20) * 31 % 71 - 1).view(1, 1, 70, 20)),
}


@pytest.mark.parametrize("predicate", PREDICATES.values(), ids=PREDICATES)
def test_integer_and_float_predicates_agree(predicate):
    agree(Cpu(), call(*qkv(), mask=predicate))


def test_no_operation_of_the_library_is_left_out_above():
    calls = [
        call(*qkv(dtype=dtype), score=lambda s, b, h, i, j, f=f: f(2 * s) + 0.1 * s)
        for f in ELEMENTWISE.values()
        for dtype in (torch.float32, torch.float64)
    ]
    specs = [(c.p.spec, c.p.compute_dtype) for c in [*calls, *(call(*qkv(), mask=f) for f in PREDICATES.values())]]
    emitted = {
        step.op
        for spec, dtype in specs
        for back in (False, True)
        for step in compile_spec(spec, (dtype, torch.float32), back).steps
    }
    assert emitted == set(library.load().operations)


@pytest.mark.parametrize("first", [0, 40], ids=["empty-first", "filled-first"])
def test_predicates_of_packed_sequences_agree(first):
    cu = torch.tensor([0, first, first + 30, 100])
    q, k, v = (x.flatten(0, 1) for x in qkv(batch=1, nq=100, nk=100))
    agree(
        Cpu(), call(q, k, v, mask=lambda b, h, i, j: (i + j * (h + 1) + b) % 3 != 0, cu_seqlens_q=cu, cu_seqlens_k=cu)
    )


@pytest.mark.parametrize(
    ("dtype", "isa", "packed"), [(torch.float32, "avx512", False), (torch.bfloat16, "avx512bf16", True)]
)
def test_tiles_that_many_queries_read_are_packed_once_for_all(dtype, isa, packed):
    need_isa(isa)
    mask = tw.keep(lambda b, h, i, j: (i // 50 >= j // 60) & (j % 7 > 0))  # 6 of 4 x 4 tiles are empty
    q, k, v = qkv(batch=2, nq=400, nk=400, hq=2, hk=1, d=20, dv=36, dtype=dtype)
    options = {"mask": mask}
    if packed:
        options["cu_seqlens_q"] = options["cu_seqlens_k"] = torch.tensor([0, 395, 395, 790], dtype=torch.int32)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    clean = call(q, k, v, **options)
    agree(Cpu(isa=isa), clean)
    hidden = torch.arange(k.shape[-3]) % 7 == 0 if not packed else torch.arange(800) % 395 % 7 == 0
    dirty = call(q, *(x.masked_fill(hidden.view(-1, 1, 1), torch.nan) for x in (k, v)), **options)
    one, two = (Cpu(isa=isa).forward(c.p, c.t) for c in (clean, dirty))
    rows = slice(None) if not packed else slice(0, 790)  # the rows past the last sequence see nothing
    assert torch.equal(one.o[rows], two.o[rows])
    assert torch.equal(one.lse, two.lse)


def test_packed_sequences_may_be_none():
    q, k, v = (t[0] for t in qkv(batch=1))
    none = torch.tensor([0])
    results = run(Cpu(), call(q, k, v, cu_seqlens_q=none, cu_seqlens_k=none))
    assert all((results[name] == 0).all() for name in ("o", "dq", "dk", "dv"))


def test_strides_past_two_billion_elements():
    """Rows far apart in an array that is reserved and, but for those rows, never touched."""
    q, k, v = qkv(batch=1, nq=40, nk=40, hk=4)
    try:
        room = torch.empty(40 << 26, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("no address space of 5 GiB")
    q, k, v = (x.bfloat16() for x in (q, k, v))
    far = [room.as_strided(x.shape, (0, 1 << 26, 64, 1), 16 * n).copy_(x) for n, x in enumerate((q, k, v))]
    near, wide = (run(Cpu(), call(*x, causal=True)) for x in ((q, k, v), far))
    assert all(torch.equal(near[name], wide[name]) for name in near)


def test_more_keys_than_ends_of_masks_count_are_refused_so_that_another_backend_runs():
    q, key = qkv(batch=1, nq=1, nk=1, hq=1, hk=1)[:2]
    k = key.expand(1, 1 << 31, 1, 16)
    assert "more than 2147483647" in Cpu().unsupported(call(q, k, k).p)[0]
    assert Cpu().unsupported(call(q, k[:, 1:], k[:, 1:]).p) == []
    assert tw.explain(q, k, k).chosen == "portable"


def test_an_instruction_set_that_is_not_there_is_refused():
    q, k, v = qkv()
    c = call(q, k, v)
    config = replace(Cpu().config(c.p), isa="avx1024")
    with pytest.raises(ValueError, match="no instruction set avx1024"):
        Cpu(config).forward(c.p, c.t)


def test_the_setting_chooses_the_instruction_set(monkeypatch):
    q, k, v = qkv()
    monkeypatch.setenv("TILEWISE_CPU_ISA", "portable")
    assert Cpu().config(call(q, k, v).p).describe().startswith("portable, ")
    monkeypatch.setenv("TILEWISE_CPU_ISA", "z80")
    with pytest.raises(ValueError, match="TILEWISE_CPU_ISA=z80"):
        Cpu().config(call(q, k, v).p)


def test_a_forked_child_computes_too():
    import multiprocessing

    c = call(*qkv(nq=200, nk=200))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = Cpu().forward(c.p, c.t).o
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=lambda: queue.put(bool(torch.equal(Cpu().forward(c.p, c.t).o, expected))))
        child.start()
        assert queue.get(timeout=20)
        child.join()
    finally:
        torch.set_num_threads(before)
