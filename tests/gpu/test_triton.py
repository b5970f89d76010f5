"""What only a GPU can show of the Triton backend: graphs, long tensors, other devices, kernels counted, sanitizers."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, qkv
from tests import ways
from tests.backends.contract import agree
from tests.planning.test_tiles import (
    BATCH,
    HEADS,
    INTERVALS,
    MONOTONE,
    PREDICATES,
    assert_sound,
    grid_of,
    matrix,
    true_status,
)
from tilewise.backends.triton import Triton, sheet
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.plan import Plan
from tilewise.masks import region
from tilewise.planning import tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROOT = Path(__file__).parents[2]


def on_gpu(*tensors: torch.Tensor, device: str = "cuda") -> list[torch.Tensor]:
    return [x.to(device).requires_grad_(x.is_floating_point()) for x in tensors]


@pytest.mark.parametrize(("d", "dv"), [(64, 40), (128, 16), (225, 16), (40, 128)])
def test_narrow_values_beside_wide_keys_and_the_other_way_round(d, dv):
    """An older ptxas makes wrong kernels of these, and is refused them (``runtime.wrong_ptxas``)."""
    mask = tw.keep(lambda b, h, i, j: (i * 6 + j * 3 + h) % 9 < 2)
    for masked in ({"mask": mask}, {"mask": tw.prefix(64) | tw.prefix(85)}, {}):
        agree(Triton(), call(*on_gpu(*qkv(batch=1, nq=384, nk=384, d=d, dv=dv, dtype=torch.bfloat16)), **masked))


# Chunks by descriptor, the last one padded, and by pointers; sums of dS kept, added up tile by tile, and by distance.
WIDE_CALLS = {
    "bias": lambda: {"causal": True, "score": tw.bias(normal(300, 300).requires_grad_())},
    "capped-bias": lambda: {"score": tw.bias(normal(2, 4, 300, 300).requires_grad_()) >> tw.softcap(10.0)},
    "alibi": lambda: {"causal": True, "score": tw.alibi(normal(4).requires_grad_()), "sink": normal(4)},
    "dropout": lambda: {"dropout_p": 0.2, "dropout_seed": 3},
    "dense": lambda: {"mask": tw.dense(normal(300, 300) > -0.2)},
    "window": lambda: {"mask": tw.window(40, 10)},
    "softcap": lambda: {"causal": True, "score": tw.softcap(2.0)},
}


@pytest.mark.parametrize("d", [32, 80, 96, 112, 128, 200, 256, 320, 512])
@pytest.mark.parametrize("options", WIDE_CALLS.values(), ids=WIDE_CALLS)
def test_wide_rows_of_fp32_agree_with_the_oracle(options, d):
    q, k, v = (x.cuda() for x in qkv(batch=2, nq=300, nk=300, hq=4, hk=2, d=d, dv=d))
    agree(Triton(), call(q, k, v, **options()))


@pytest.mark.parametrize("n", [72, 77])
@pytest.mark.parametrize("of_batch", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_bias_as_a_projection_leaves_it_is_read_in_rows(dtype, of_batch, n):
    q, k, v = on_gpu(*qkv(batch=3, nq=n, nk=n, hq=4, hk=4, d=32, dv=32, dtype=dtype))
    bias = normal(*[3] * of_batch, n, n, 4).to("cuda", dtype).requires_grad_().movedim(-1, -3)
    c = call(q, k, v, score=tw.bias(bias), mask=tw.key_lengths(torch.tensor([n, 0, n - 9], device="cuda")))
    assert c.t.leaves[-1].stride()[-2:] == (-(-n // 8) * 8, 1)
    agree(Triton(), c)


@pytest.mark.parametrize(("batch", "heads_k"), [(8, 32), (32, 8)], ids=["one-row", "group"])
def test_one_query_of_fp32_over_many_keys_is_as_exact_as_eager_attention(batch, heads_k):
    """So many programs that no keys are split: a chain of sums over all of them would show."""
    q, k, v = (x.cuda() for x in qkv(batch=batch, nq=1, nk=8192, hq=32, hk=heads_k, d=64, dv=64))

    def eager(dtype: torch.dtype) -> torch.Tensor:
        keys, values = (x.to(dtype).repeat_interleave(32 // heads_k, 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dtype), keys) / 8
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values).double()

    exact, found = eager(torch.float64), tw.attention(q, k, v, backend="triton").double()
    assert (found - exact).norm() <= 2 * (eager(torch.float32) - exact).norm()


def test_a_row_has_the_same_bits_in_every_way():
    found = ways.pairs(12, ways.CUDA, "cuda", "triton", seed=3000)
    assert (found["pairs"], found["refused"], found["failures"]) == (12, {}, [])


@pytest.mark.parametrize(
    ("shape", "memory"),
    [((520, 1100), 1 << 24), ((4, 520, 1100), 1 << 25), ((12, 1, 520, 1100), 1 << 24)],
    ids=["keys", "batch", "keys-of-each"],
)
def test_sums_over_parts_of_ds_agree_with_the_oracle(shape, memory, monkeypatch):
    monkeypatch.setattr(sheet, "sheet_memory", lambda p: memory)
    bias = normal(*shape, dtype=torch.bfloat16).cuda().requires_grad_()
    q, k, v = on_gpu(*qkv(batch=12, nq=520, nk=1100, hq=4, hk=4, d=64, dv=64, dtype=torch.bfloat16))
    c = call(q, k, v, score=tw.bias(bias), causal=True)
    backend = Triton()
    parts = Plan(c.p, backend.config(c.p)).sheet
    assert [part.first_batch for part in parts] == ([0, 4, 8] if len(shape) == 3 else [0, 0, 0])
    agree(backend, c)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [16, 32, 64])
def test_triangles_with_masks_agree_with_the_oracle(d, dtype):
    q, k, v = on_gpu(*qkv(batch=6, nq=200, nk=200, hq=4, hk=4, d=d, dv=d, dtype=dtype))
    kept = (torch.rand(6, 1, 1, 200) < 0.8).cuda()
    kept[3] = False
    bias = normal(4, 200, 200, dtype=dtype).cuda().requires_grad_()
    c = call(q, k, v, mask=tw.dense(kept), score=tw.bias(bias))
    c.t.k[~kept[:, 0, 0]] = torch.nan
    backend = Triton()
    assert Plan(c.p, backend.config(c.p)).sheet
    agree(backend, c)


def test_shifted_windows_agree_with_the_oracle():
    region = (torch.arange(49) % 5 < 2).int()[None] + torch.arange(4)[:, None] % 2
    q, k, v = on_gpu(*qkv(batch=64, nq=49, nk=49, hq=3, hk=3, d=32, dv=32, dtype=torch.bfloat16))
    bias, region = normal(3, 49, 49, dtype=torch.bfloat16).cuda().requires_grad_(), region.cuda()
    same = tw.keep(lambda b, h, i, j: tw.lookup(region, b % 4, i) == tw.lookup(region, b % 4, j))
    c, backend = call(q, k, v, mask=same, score=tw.bias(bias)), Triton()
    plan = Plan(c.p, backend.config(c.p))
    assert plan.sheet
    assert not plan.lists
    agree(backend, c)


def test_an_older_ptxas_assembles_a_loop_that_is_never_entered():
    q, k, v = on_gpu(*qkv(batch=2, nq=700, nk=700, hq=3, hk=3, d=16, dv=16, dtype=torch.bfloat16))
    lengths = torch.tensor([655, 700], device="cuda")
    agree(Triton(), call(q, k, v, mask=tw.causal() & tw.key_lengths(lengths), deterministic="everywhere"))


def test_a_graph_is_captured_and_replayed_with_other_lengths():
    q, k, v = on_gpu(*(x.flatten(0, 1) for x in qkv(batch=1, nq=600, nk=600, d=64, dv=64, dtype=torch.bfloat16)))
    cu = torch.tensor([0, 200, 600], dtype=torch.int32, device="cuda")
    do = normal(600, 4, 64, dtype=torch.bfloat16).cuda()

    def step():
        o = tw.attention_varlen(q, k, v, cu, causal=True, backend="triton")
        return o, *torch.autograd.grad(o, (q, k, v), do)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiled and warm before the capture
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([0, 17, 600], [0, 600, 600], [0, 300, 301]):
        cu.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, step(), strict=True)), lengths


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("score", [None, tw.softcap(30.0)], ids=["plain", "softcap"])
def test_later_calls_with_other_addresses_give_the_bits_of_the_first(score, dtype):
    c = call(*(x.cuda() for x in qkv(nq=300, nk=300, d=64, dv=64, dtype=dtype)), causal=True, score=score)
    backend = Triton()

    def results(t, do):
        out = backend.forward(c.p, t)
        grads = backend.backward(c.p, t, out, do, c.dlse)
        return out.o, out.lse, grads.dq, grads.dk, grads.dv

    first = results(c.t, c.do)
    moved = replace(c.t, q=c.t.q.clone(), k=c.t.k.clone(), v=c.t.v.clone())
    for t, do in ((c.t, c.do), (moved, c.do.clone())):
        assert all(torch.equal(x, y) for x, y in zip(results(t, do), first, strict=True))


@pytest.mark.parametrize("nq", [1, 200], ids=["decoding", "training"])
def test_latent_attention_and_its_gradients_agree_with_the_oracle(nq):
    q, k, v = qkv(batch=2, nq=nq, nk=333, hq=16, hk=1, d=576, dv=512, dtype=torch.bfloat16)
    agree(Triton(), call(q.cuda(), k.cuda(), v.cuda(), causal=True))


def test_dropout_in_a_graph_follows_its_seed():
    q, k, v = on_gpu(*qkv(d=64, dv=64, dtype=torch.bfloat16))
    seed = torch.tensor([1], device="cuda")
    run = lambda: tw.attention(q, k, v, dropout_p=0.3, dropout_seed=seed, backend="triton")  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = run()
    seed.fill_(2)
    graph.replay()
    assert torch.equal(captured, run())


@pytest.mark.timeout(600)
def test_tensors_past_two_to_the_31_elements():
    """The last heads and rows of tensors of 2.3e9 elements equal those of a call on them alone."""
    n, heads, tail = 140_000, 128, 600
    if torch.cuda.mem_get_info()[0] < 80 << 30:
        pytest.skip("needs 80 GiB of GPU memory")
    make = lambda: torch.randn(1, n, heads, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()  # noqa: E731
    q, k, v = make(), make(), make()
    mask = tw.window(left=63, right=0)
    o = tw.attention(q, k, v, mask=mask, backend="triton")
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, (q, k, v), do)
    last = [x[:, -tail:, -2:].detach().clone().requires_grad_() for x in (q, k, v)]
    o_last = tw.attention(*last, mask=mask, backend="triton")
    expected = torch.autograd.grad(o_last, last, do[:, -tail:, -2:].clone())
    for x, y in zip((o, *grads), (o_last, *expected), strict=True):
        torch.testing.assert_close(x[:, -300:, -2:], y[:, -300:], rtol=2e-2, atol=2e-2)  # tiles start elsewhere


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_a_second_device_gives_the_same_bits_whatever_device_is_current():
    inputs = qkv(nq=300, nk=300, d=64, dv=64, dtype=torch.bfloat16)
    results = []
    for device in ("cuda:0", "cuda:1"):
        q, k, v = on_gpu(*inputs, device=device)
        for _ in range(2):  # the second goes through the compiled kernels that were kept
            o = tw.attention(q, k, v, causal=True, backend="triton")
        results.append([x.cpu() for x in (o, *torch.autograd.grad(o.square().sum(), (q, k, v)))])
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_backward_on_another_stream_waits_for_its_forward():
    q, k, v = on_gpu(*qkv(nq=900, nk=900, d=64, dv=64, dtype=torch.bfloat16))
    expected = torch.autograd.grad(tw.attention(q, k, v, causal=True, backend="triton").sum(), (q, k, v))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = torch.autograd.grad(tw.attention(q, k, v, causal=True, backend="triton").sum(), (q, k, v))
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("nq", "nk", "hq", "hk"),
    [(4096, 4096, 1, 1), (1, 20000, 8, 1), (1, 9000, 4, 4), (2000, 2000, 8, 1)],
    ids=["one-head", "decode", "mha", "parted"],
)
def test_split_keys_and_grouped_heads_agree_with_the_oracle(nq, nk, hq, hk):
    c = call(*qkv(batch=1, nq=nq, nk=nk, hq=hq, hk=hk, d=128, dv=128, dtype=torch.bfloat16), device="cuda", causal=True)
    agree(Triton(), c)


@pytest.mark.parametrize("furthest", [6.0, 30.0, 300.0], ids=["near zero", "mixed", "far"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_softcap_of_small_and_of_large_scores_agrees_with_the_oracle(d, furthest):
    q, k, v = (x.cuda() for x in qkv(nq=200, nk=300, d=d, dv=d, dtype=torch.bfloat16))
    grown = torch.linspace(0.1, 1.0, 200, device="cuda").view(1, -1, 1, 1)
    q = (q * grown * furthest / 4).bfloat16()  # products were within 4 or so
    agree(Triton(), call(q, k, v, causal=True, score=tw.softcap(20.0)))
    q[0, 50, 1, 3] = torch.nan
    o = tw.attention(q, k, v, causal=True, score=tw.softcap(20.0), backend="triton")
    assert o.isnan().any(-1).nonzero().tolist() == [[0, 50, 1]]


def test_a_hundred_lengths_compile_no_kernel_more():
    compiled = lambda: sum(len(cache[0]) for cache in runtime.kernels().forward.device_caches.values())  # noqa: E731
    first = None
    for n in range(1, 101):
        x = torch.randn(1, 7 * n, 2, 64, device="cuda", dtype=torch.bfloat16)
        tw.attention(x, x, x, causal=True, backend="triton")
        first = compiled() if first is None else first
    assert compiled() == first


SANITIZED = """
import sys, torch, tilewise as tw
d, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
q, k, v = (torch.randn(1, 130, h, d, device="cuda", dtype=dtype).requires_grad_() for h in (4, 2, 2))
bias = torch.randn(1, 4, 130, 130, device="cuda").requires_grad_()
for options in ({}, {"causal": True}, {"score": tw.bias(bias), "mask": tw.window(40, 3)}, {"dropout_p": 0.2},
                {"mask": tw.keep(lambda b, h, i, j: (i + j) % 3 != 0)}):
    tw.attention(q, k, v, backend="triton", **options).sum().backward()
packed = [x.detach()[0].requires_grad_() for x in (q, k, v)]
cu = torch.tensor([0, 33, 33, 100], device="cuda")
tw.attention_varlen(*packed, cu, causal=True, backend="triton").sum().backward()
with torch.no_grad():
    q, k = (torch.randn(1, n, h, d, device="cuda", dtype=dtype) for n, h in ((1, 8), (9000, 1)))
    tw.attention(q, k, k, backend="triton")
torch.cuda.synchronize()
"""
# 96 is two pieces, 64 + 32.
SIZES = pytest.mark.parametrize(
    ("d", "dtype"),
    [("64", "bfloat16"), ("96", "bfloat16"), ("128", "bfloat16"), ("256", "bfloat16"), ("64", "float32")],
)


def sanitized(prefix: tuple[str, ...], d: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    command = [*prefix, sys.executable, "-c", SANITIZED, d, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=160)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@SIZES
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed")
def test_sanitizers_find_nothing(d, dtype, monkeypatch):
    # The first run leaves its kernels in the disk's cache: under a sanitizer they would take minutes to compile.
    sanitized((), d, dtype, monkeypatch)
    sanitized(("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "9"), d, dtype, monkeypatch)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # else one allocation's overrun is another tensor
    sanitized(("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"), d, dtype, monkeypatch)


# -- Tiles of masks ------------------------------------------------------------------------------------------------

MASKS = INTERVALS | PREDICATES | {name: lambda nq, nk, m=mask: m(nk) for name, (mask, _) in MONOTONE.items()}


def grid_on_gpu(mask: tw.Mask, nq: int, nk: int) -> tiles.Grid:
    leaves = [leaf.cuda() for leaf in mask.leaves]
    kept = region(mask.text, tuple(range(len(leaves))))
    return tiles.Grid.whole(kept, leaves, (BATCH, HEADS, nq, nk), torch.device("cuda"))


@pytest.mark.parametrize("name", MASKS)
def test_tiles_and_seen_keys_of_a_mask_are_those_of_its_pairs_and_nothing_waits_for_the_gpu(name):
    for (nq, nk), tile in (((80, 80), (16, 24)), ((33, 130), (48, 80))):
        mask = MASKS[name](nq, nk)
        grid, kept = grid_on_gpu(mask, nq, nk), matrix(grid_of(mask, nq, nk))
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [tiles.TileMap.build(grid, *tile, by_columns) for by_columns in (False, True)]
            lists = [x.visits(transposed) for x in found for transposed in (False, True)]
            seen = tiles.seen_keys(grid, 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        true = true_status(kept, *tile)
        for tile_map in found:
            assert_sound(tile_map.status.cpu(), true)
            if grid.region.predicate is not None:
                assert torch.equal(tile_map.status.cpu().expand(true.shape), true)
        assert all(int(counts[..., 1].max()) <= max(true.shape) for _, counts in lists)
        expected = kept.any(2).unflatten(1, (HEADS // 2, 2)).any(2)
        assert torch.equal(torch.ones_like(expected) if seen is None else seen.cpu().expand(expected.shape), expected)


def test_a_graph_plans_a_mask_anew_from_what_its_tensors_hold():
    allowed = torch.zeros(200, 300, dtype=torch.bool, device="cuda")
    grid = grid_on_gpu(tw.dense(allowed), 200, 300)

    def step():
        tile_map = tiles.TileMap.build(grid, 64, 64)
        blocks, counts = tile_map.visits()
        listed = torch.arange(blocks.shape[-1], device="cuda") < counts[..., 1:]  # else there may be anything
        return tile_map.status, torch.where(listed, blocks, 0), counts, tiles.seen_keys(grid, 2)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiled before the capture
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for density in (0.5, 0.0005, 1.0):
        grid.leaves[0].copy_(torch.rand(200, 300, device="cuda") < density)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, step(), strict=True))
