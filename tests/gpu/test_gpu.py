"""On a real GPU: the contract for every backend that runs there, larger shapes, and what only a GPU can show."""

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from bench import cases
from tests.backends.contract import Call, Contract, agree, call, qkv, run
from tests.backends.paged import PagedContract
from tilewise import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BACKENDS = [row.name for row in dispatch.BACKENDS if row.device_types is None or "cuda" in row.device_types]


class _OnGpu(Contract):
    device = "cuda"


class _In16Bits(_OnGpu):
    """What the contract has in fp32, in bf16; and tensors of a score want no gradient where the backend refuses that."""

    def call(self, *tensors: torch.Tensor, **options: object) -> Call:
        return self._allowed(super().call(*(x.bfloat16() for x in tensors), **options))

    def of_case(self, case: cases.Case) -> Call:
        return self._allowed(super().of_case(replace(case, dtype="bfloat16") if case.dtype == "float32" else case))

    def _allowed(self, c: Call) -> Call:
        return c.with_constant_scores() if self.backend.unsupported(c.p) else c


for _name in BACKENDS:  # one class a backend, so that ids name it
    globals()[f"Test{_name.title()}OnGpu"] = type(
        f"Test{_name.title()}OnGpu", (_In16Bits if _name == "hopper" else _OnGpu,), {"backend": dispatch.backend(_name)}
    )


class TestTritonOverPagesOnGpu(PagedContract):
    backend = dispatch.backend("triton")
    device = "cuda"


class TestPortableOverPagesOnGpu(PagedContract):
    backend = dispatch.backend("portable")
    device = "cuda"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_longer_sequences_agree_with_the_oracle(backend, dtype):
    q, k, v = qkv(batch=1, nq=2000, nk=2100, hq=4, hk=2, d=64, dv=64, dtype=dtype)
    agree(dispatch.backend(backend), call(q, k, v, device="cuda", causal=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_stream_is_honoured(backend):
    tensors = qkv(nq=500, nk=500, d=64, dv=64, dtype=torch.bfloat16)
    c = call(*tensors, device="cuda", causal=True, deterministic=True)
    expected = run(dispatch.backend(backend), c)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run(dispatch.backend(backend), c)
    stream.synchronize()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_compile_with_inductor_gives_the_same_gradients():
    q, k, v = (x.cuda().requires_grad_() for x in qkv(nq=200, nk=200))
    loss = lambda q, k, v: tw.attention(q, k, v, causal=True, score=tw.softcap(20.0)).square().sum()  # noqa: E731
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q, k, v), (q, k, v))
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_autocast_on_a_gpu():
    q, k, v = (x.cuda() for x in qkv())
    with torch.autocast("cuda", torch.bfloat16):
        assert tw.attention(q, k, v).dtype == torch.bfloat16


@pytest.mark.timeout(600)  # compiles every feature's kernels in one process
def test_verify_is_green():
    report = tw.verify()
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_graph_follows_what_a_mask_s_tensor_holds(dtype):
    q, k, v = (x.cuda() for x in qkv(nq=300, nk=300, d=64, dv=64, dtype=dtype))
    ids = torch.arange(300, device="cuda") // 70
    mask = tw.causal() & tw.documents(ids)  # made before the capture
    expected, graph = tw.attention(q, k, v, mask=mask), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = tw.attention(q, k, v, mask=mask)
    graph.replay()
    assert torch.equal(o, expected)
    for rows in (9, 131):
        ids.copy_(torch.arange(300, device="cuda") // rows)
        graph.replay()
        assert torch.equal(o, tw.attention(q, k, v, mask=tw.causal() & tw.documents(ids.clone())))


def _distances(t: torch.Tensor):
    return tw.score(lambda s, b, h, i, j: s + t[h, (i - j).abs().clamp(0, 31)])


N = 640
OF_TENSORS = {  # options, of integers (N,) that each step writes anew
    "causal": lambda x: {"causal": True},
    "documents": lambda x: {"mask": tw.causal() & tw.documents(x)},
    "documents-whole": lambda x: {"mask": tw.documents(x)},
    "block-causal": lambda x: {"mask": tw.keep(lambda b, h, i, j: j // 128 <= i // 128)},
    "keep": lambda x: {"mask": tw.keep(lambda b, h, i, j: (x[i] == x[j]) | (j < 9))},
    "lengths": lambda x: {"mask": tw.key_lengths(x[-2:] + 100)},
    "prefix": lambda x: {"mask": tw.prefix(x[-1])},
    "block-sparse": lambda x: {"mask": tw.block_sparse(tw.butterfly(10).cuda(), 64, 64)},
    "table": lambda x: {"causal": True, "score": _distances(torch.randn(4, 32, device="cuda", requires_grad=True))},
}


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("name", OF_TENSORS)
def test_what_is_kept_lies_outside_of_the_graphs_that_torch_compile_captures(name, backend):
    ids = torch.arange(N, device="cuda") // 90
    options, leaves = (
        OF_TENSORS[name](ids),
        [torch.zeros(2, N, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)],
    )
    leaves = [x.requires_grad_() for x in leaves]
    if "score" in options:
        leaves += options["score"].leaves
    if backend == "hopper" and tw.explain(*leaves[:3], **options).chosen != "hopper":
        pytest.skip("runs on triton")

    def attend(q, k, v):
        return tw.attention(q * 1.5, k, v, backend=backend, **options)

    def other(x):  # a graph of its own, in the same memory
        return (x.float().exp().sum(1, keepdim=True) * x).relu().sum(-1)

    torch._dynamo.reset()
    compiled, beside = (torch.compile(f, mode="reduce-overhead") for f in (attend, other))
    for step in range(5):
        with torch.no_grad():
            for x in leaves[:3]:
                x.normal_()
            ids.copy_(torch.arange(N, device="cuda") // (90 + 10 * step))
        torch.compiler.cudagraph_mark_step_begin()
        o = compiled(*leaves[:3])
        found = [o.clone(), *(x.clone() for x in torch.autograd.grad(o.sum(), leaves))]
        beside(found[0].detach())
        expected = attend(*leaves[:3])
        for x, y in zip(found, (expected, *torch.autograd.grad(expected.sum(), leaves)), strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_another_stream_waits_for_what_one_makes_of_a_mask(backend, prepared):
    q, k, v = (x.cuda() for x in qkv(nq=2000, nk=2000, d=64, dv=64, dtype=torch.bfloat16))
    rows = torch.arange(2000, device="cuda")

    def mask(length: int) -> tw.Mask:
        mask = (tw.causal() & tw.documents(rows // length)) | tw.key_range(0, 5)
        return mask.prepare(q, k) if prepared else mask

    expected = tw.attention(q, k, v, mask=mask(77), backend=backend)
    tw.attention(
        q, k, v, mask=mask(500), backend=backend
    )  # what lies in memory that is free is that of other documents
    torch.cuda.synchronize()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        torch.cuda._sleep(1 << 28)
        shared = mask(77)
        tw.attention(q, k, v, mask=shared, backend=backend)
    with torch.cuda.stream(other):
        o = tw.attention(q, k, v, mask=shared, backend=backend)
    other.synchronize()
    assert torch.equal(o, expected)


def test_selected_keys_out_of_range_are_ignored_unless_they_are_checked(monkeypatch):
    q, k, v = (torch.randn(2, 300, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    beyond = torch.randint(0, 300, (2, 2, 300, 20), device="cuda")
    beyond[0, 0, 0, 0] = 305
    within = beyond.where(beyond < 300, -1)
    found, expected = (tw.attention(q, k, v, mask=tw.selected(x)) for x in (beyond, within))
    assert torch.equal(found, expected)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(ValueError, match=r"an entry 305 in row \[0, 0, 0\]"):
        tw.attention(q, k, v, mask=tw.selected(beyond))
