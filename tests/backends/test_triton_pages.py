"""The Triton backend over keys in pages, through Triton's interpreter; and what its tiles and splits depend on."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import tilewise as tw
from bench.testing import normal, paged_call
from tests.backends.paged import CASES, Case, PagedContract, run, tree
from tilewise import cache as caches
from tilewise import device as devices
from tilewise.backends.triton import Triton, interpreting
from tilewise.backends.triton.host import launch
from tilewise.backends.triton.host.buffers import partial_states
from tilewise.backends.triton.paging import (
    LEAST_SPLITS,
    PROGRAMS,
    PagedConfig,
    addressing,
    paged_config,
    paged_splits,
)
from tilewise.backends.triton.tiles import Tiles
from tilewise.problem import Problem

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities that the mathematics selects away
]
interpreted = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")

# The interpreter takes 5 ms a step: these are one of each kind of page, row and mask; a GPU runs them all.
FEW = (
    "page-1",
    "page-64",
    "page-7-odd-dims",
    "heads-first",
    "window-sink",
    "softcap-alibi",
    "tree",
    "packed",
    "fp8-heads",
    "fp8-tokens",
    "fp8-sequences",
    "latent",
    "latent-fp8",
    "capacity-alone",
)


@interpreted
class TestTritonOverPages(PagedContract):
    backend = Triton()

    @pytest.mark.parametrize("name", FEW)
    def test_agrees_with_the_oracle(self, name):
        super().test_agrees_with_the_oracle(name)

    @pytest.mark.parametrize("name", ["packed"])
    def test_where_pages_lie_changes_no_bit(self, name):
        super().test_where_pages_lie_changes_no_bit(name)

    @pytest.mark.parametrize("lengths", [(33, 70, 5)], ids=["short"])
    def test_a_sequence_does_not_depend_on_its_batch_mates_when_deterministic(self, lengths):
        super().test_a_sequence_does_not_depend_on_its_batch_mates_when_deterministic(lengths)


POOLS = ("k_pages", "v_pages", "k_scale", "v_scale")
SPLIT = PagedConfig(*[Tiles(16, 16, 4, 1)] * 3, splits=4)
ROW = PagedConfig(*[Tiles(1, 16, 4, 1)] * 3, splits=4)
DESCRIBED = PagedConfig(*[Tiles(32, 32, 4, 3, tma=True)] * 3, splits=2)
PAGE_64 = Case(64, (130, 64, 7), rows=2, options=lambda: {"causal": True}, dtype=torch.bfloat16, dims=(64, 32))


# Splits of which some have no key, rows that see none, and sinks; tiles by descriptor from pages and from a dense cache.
@interpreted
@pytest.mark.parametrize(
    ("config", "case"),
    [
        (SPLIT, CASES["window-sink"]),
        (SPLIT, replace(CASES["packed"], rows=(1, 0, 1, 1))),
        (SPLIT, replace(CASES["tree"], dtype=torch.bfloat16)),
        (replace(DESCRIBED, splits=4, split=64), replace(PAGE_64, lengths=(400, 64, 7, 0, 200), rows=2)),
        (SPLIT, CASES["softcap-alibi"]),
        (ROW, Case(16, (70, 3, 0), heads=(2, 2), options=lambda: {"mask": tw.window(40, 0), "sink": normal(2)})),
        (SPLIT, replace(CASES["fp8-sequences"], options=dict)),
        (DESCRIBED, PAGE_64),
        (DESCRIBED, replace(PAGE_64, lengths=(70,), rows=1, page_size=128)),
        (DESCRIBED, replace(PAGE_64, lengths=(130, 7), rows=1, scales="tokens", options=dict)),
        (DESCRIBED, replace(PAGE_64, lengths=(130, 7), rows=1, heads=(4, 1), dims=(80, 64), latent=True)),
    ],
    ids=[
        "split-window-sink",
        "split-packed",
        "split-tree",
        "described-splits",
        "split-softcap-alibi",
        "split-row",
        "split-fp8",
        "described",
        "described-dense",
        "described-fp8",
        "described-latent",
    ],
)
def test_splits_and_descriptors_agree_with_the_oracle(config, case):
    q, cache, options = case.draw()
    if case.page_size == 128:  # one page for each sequence
        cache = cache._replace(block_table=cache.block_table[:, :1])
    c = paged_call(q, cache, **options, max_logit=True)
    wrong = [str(e) for e in c.expected().judge(run(Triton(config), c)) if not e.ok]
    assert not wrong, "; ".join(wrong)


@interpreted
def test_states_that_no_split_wrote_take_no_part_in_the_merge(monkeypatch):
    def poisoned(out, splits):
        states = partial_states(out, splits)
        return replace(states, o=states.o.fill_(torch.nan))

    monkeypatch.setattr(launch, "partial_states", poisoned)
    q, cache, options = Case(16, (70, 3, 0)).draw()
    c = paged_call(q, cache, **options)
    wrong = [str(e) for e in c.expected().judge(run(Triton(SPLIT), c)) if not e.ok]
    assert not wrong, "; ".join(wrong)


@interpreted
def test_page_numbers_and_lengths_out_of_range_read_nothing_outside_the_pool():
    q, cache, _ = Case(16, (40,)).draw()
    c = paged_call(q, cache)
    good = run(Triton(), c)
    c.t.block_table[0, -1], c.t.seqlens_k[0] = 2**30, 2**20  # what only an unchecked call on a GPU can have
    c.t.k.nan_to_num_(0.0)
    c.t.v.nan_to_num_(0.0)
    bad = run(Triton(), c)
    assert torch.isfinite(bad["o"]).all()
    assert not torch.equal(bad["lse"], good["lse"])


@interpreted
def test_any_strides_of_tables_and_lengths():
    q, cache, options = Case(16, (20, 20)).draw()
    expected = tw.attention_paged(q, cache, backend="triton", **options)
    table = torch.stack([cache.block_table] * 2, -1)[..., 0]
    strided = cache._replace(block_table=table, seqlens_k=torch.tensor([20], dtype=torch.int32).expand(2))
    assert table.stride(-1) == 2
    assert torch.equal(tw.attention_paged(q, strided, backend="triton", **options), expected)


# Rectangular and packed; a sequence that is full, one whose page is not in the pool, and rows past the last sequence.
@interpreted
@pytest.mark.parametrize("packed", [False, True], ids=["rectangular", "packed"])
def test_the_kernel_that_appends_writes_what_torch_writes(packed):
    _, cache, _ = Case(8, (20, 3, 0, 31), dims=(16, 9)).draw()
    cache.block_table[1] = 1000
    cache.block_table[3, -1] = -1
    k, v = normal(22, 2, 16), normal(22, 2, 9, seed=1)
    cu = torch.tensor([0, 4, 4, 11, 20]) if packed else None
    if not packed:
        k, v = (x[:20].unflatten(0, (4, 5)).transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    other = cache._replace(k_pages=cache.k_pages.clone(), v_pages=cache.v_pages.clone())
    Triton().appender(cache, k, v, cu)(cache, k, v, cu)
    caches._write(other, k, v, cu)
    for pool, expected in zip(cache[:2], other[:2], strict=True):
        torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)


# Of all forms of scales, and what does not become a number: NaN, infinities, and rows of zeros alone.
@interpreted
@pytest.mark.parametrize(
    ("scales", "latent"), [("heads", False), ("sequences", True), ("tokens", False), ("tokens", True)]
)
def test_the_kernel_that_appends_quantises_as_torch_does(scales, latent):
    _, cache, _ = Case(8, (20, 3, 31), dims=(16, 10), scales=scales, latent=latent).draw()
    cache.block_table[1] = 1000
    k, v = 1e3 * normal(9, 2, 16), normal(9, 2, 10, seed=1)
    k[0, 0, 2], k[0, 1], v[1, 0], v[2, 1, 3] = torch.nan, torch.nan, 0.0, -torch.inf
    cu = torch.tensor([0, 4, 6, 7]) if scales == "sequences" else None
    if cu is None:
        k, v = k.unflatten(0, (3, 3)), v.unflatten(0, (3, 3))
    written = [cache._replace(**{x: getattr(cache, x).clone() for x in POOLS}) for _ in range(2)]
    if latent:
        v, written = None, [x._replace(v_pages=x.k_pages[..., :10], v_scale=x.k_scale) for x in written]
    Triton().appender(written[0], k, v, cu)(written[0], k, v, cu)
    caches._write(written[1], k, v, cu)
    for name in POOLS:
        x, y = (getattr(each, name).float() for each in written)
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


# -- What is chosen, without a kernel ------------------------------------------------------------------------------

H200 = devices.Device("NVIDIA H200", "cuda", 132, 227 << 10, capability=(9, 0))


@pytest.fixture
def on_h200(monkeypatch):
    """Tensors on the CPU stand for those of an H200."""
    monkeypatch.setitem(devices.STAND_INS, "cpu", H200)


def problem(
    batch: int,
    seqlen_q: int,
    page_size: int,
    max_pages: int,
    *,
    head_dim: int = 128,
    packed: bool = False,
    deterministic: bool = False,
) -> Problem:
    """A call of 32 query heads and 8 key heads in bf16; packed, of ``seqlen_q`` rows in all."""
    q = normal(*((seqlen_q,) if packed else (batch, seqlen_q)), 32, head_dim, dtype=torch.bfloat16)
    pools = (torch.empty(1, dtype=torch.bfloat16).expand(1, page_size, 8, head_dim) for _ in range(2))
    table, lengths = torch.zeros(batch, max_pages, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    options = {"cu_seqlens_q": torch.zeros(batch + 1, dtype=torch.int32)} if packed else {}
    return paged_call(q, tw.paged(*pools, table, lengths), deterministic=deterministic, **options).p


def test_tiles_lie_in_one_page_wherever_pages_have_64_keys(on_h200):
    found = {n: paged_config(problem(8, 1, n, 1024 // n), "ieee").forward.tile_n for n in (16, 64, 128, 192, 1024)}
    assert {n: addressing(problem(8, 1, n, 1024 // n), tile_n) for n, tile_n in found.items()} == {
        16: "several", 64: "one", 128: "one", 192: "one", 1024: "whole",
    }  # fmt: skip


@pytest.mark.parametrize(("scales", "keys"), [("", 32), ("heads", 64)])
def test_tiles_of_latent_attention_leave_room_for_what_a_predicate_moves(scales, keys, on_h200):
    case = Case(64, (70,), rows=4, heads=(16, 1), dims=(576, 512), dtype=torch.bfloat16, latent=True, scales=scales)
    q, cache, _ = case.draw()
    masks = {"causal": tw.causal(), "drafted": tw.keep(tree)}
    found = {name: paged_config(paged_call(q, cache, mask=mask).p, "ieee").forward for name, mask in masks.items()}
    assert (found["causal"].tile_n, found["drafted"].tile_n) == (64, keys)


def test_deterministic_splits_depend_on_one_sequence_alone():
    found = {paged_splits(problem(n, 1, 64, 512, deterministic=True), 64, H200.cores) for n in (1, 8, 256)}
    assert len(found) == 1
    assert paged_splits(problem(8, 8, 64, 512, packed=True, deterministic=True), 64, H200.cores)[0] == 1


def test_splits_fill_the_machine_and_stop_where_it_is_full():
    by_batch = (paged_splits(problem(n, 1, 64, 2048), 64, H200.cores) for n in (1, 8, 256))
    (alone, short), (few, _), (many, long) = by_batch
    assert alone > few == many == LEAST_SPLITS
    assert PROGRAMS * H200.cores // 2 < 8 * alone <= PROGRAMS * H200.cores
    assert short < long
    assert paged_splits(problem(4, 2048, 64, 64), 64, H200.cores)[0] == 1
    assert paged_splits(problem(1, 1, 16, 4), 64, H200.cores)[0] == 1  # 64 keys are no more than a split has


@pytest.mark.parametrize(("scales", "rows", "tile_m"), [("heads", 64, 128), ("heads", 60, 64), ("tokens", 64, 64)])
def test_a_chunk_over_keys_of_8_bits_has_more_rows_in_a_tile_unless_each_key_has_its_scale(
    scales, rows, tile_m, on_h200
):
    case = Case(64, (64,), rows=rows, dims=(128, 128), dtype=torch.bfloat16, scales=scales)
    q, cache, _ = case.draw()
    assert paged_config(paged_call(q, cache).p, "ieee").forward.tile_m == tile_m
