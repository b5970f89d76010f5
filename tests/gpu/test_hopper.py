"""The Hopper backend's kernels on a Hopper GPU: each shipped one against float64, and what only a GPU can show."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest
import torch

import tilewise as tw
from bench.testing import call, other_bits, paged_call, qkv, results
from tests.judge import check
from tests.judge.hopper import Kind, check_calls, kernel_of
from tilewise import accuracy
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.decoding import config as decoding_config
from tilewise.backends.hopper.forward.config import Config, shipped
from tilewise.backends.hopper.host import library, portions
from tilewise.backends.hopper.host.portions import Portions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]


def by_kind(configs: list[Config | Backward]) -> dict[Kind, list[Config | Backward]]:
    """Forwards and backwards that take the same calls: what these should give is computed once for all."""
    found: dict[Kind, list[Config | Backward]] = {}
    for config in configs:
        found.setdefault(Kind.of(config), []).append(config)
    return found


def name_of(kind: Kind) -> str:
    options = [kind.score] if kind.score else []
    options += [name for name in ("dropout", "trained", "packed", "decoding") if getattr(kind, name)]
    options += [f"{kind.decoding}-rows"] if kind.decoding else []
    options += [f"pages-of-{kind.paged}"] if kind.paged else []
    return "-".join(["x".join(map(str, sorted(set(kind.dims), reverse=True))), kind.dtype, kind.form, *options])


KINDS = by_kind([*shipped(), *decoding_config.shipped(), *backward_config.shipped()])


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_kernels_of_a_kind_agree_with_the_oracle(kind):
    reasons = [reason for config in KINDS[kind] for reason in library.missing(config)]
    if reasons:
        pytest.skip("; ".join(reasons))
    wrong, ran = {}, set()
    for label, c in check_calls(KINDS[kind][0]):
        judged = check.Judged(c)
        for kernel in map(kernel_of, KINDS[kind]):
            row = check.checked(kernel, judged)
            # A small call with ALiBi has its keys split, by a forward that is compiled at its first call where the DSL is installed; with a
            # bias and a mask of pairs no kernel of Hopper splits them.
            small = {"alibi": "is not built", "bias": "have none there"}.get(kind.score)
            if row["state"] == "refused" and small and small in row["detail"]:
                continue
            ran.add(kernel.name)
            wrong |= {} if row["state"] == "ok" else {f"{kernel.name} {label}": row["detail"]}
    assert ran == {config.name for config in KINDS[kind]}
    assert not wrong


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask": tw.window(300, 40)}], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (512, 512)], ids=str)
def test_launches_of_some_of_the_keys_add_up_to_dq(dims, options, monkeypatch):
    monkeypatch.setattr(Portions, "sizes", (1, 1, 3))  # one sequence, one key head, three blocks of keys
    tensors = qkv(nq=500, nk=700, d=dims[0], dv=dims[1], dtype=torch.bfloat16)
    backend, c = Hopper(), call(*tensors, device="cuda", **options)
    if reasons := backend.unsupported(c.p):
        pytest.skip("; ".join(reasons))
    assert backend.backward_config(c.p).keys.keeps_ds
    first, second = (results(backend, c) for _ in range(2))
    assert not [str(e) for e in c.expected().judge(first) if not e.ok]
    assert not other_bits(first, second)


@pytest.mark.parametrize("packed", [False, True], ids=["prefix", "packed"])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (512, 512)], ids=str)
def test_launches_of_some_of_the_heads_add_up(dims, packed, monkeypatch):
    monkeypatch.setattr(Portions, "sizes", property(lambda self: (1, 1, self.blocks[0])))  # one key head and all keys
    # Of packed sequences as many as the device finds to fit where one has room that may be of any lengths.
    monkeypatch.setattr(portions, "PACKED_ROOM", 0)
    tensors, options = qkv(nq=500, nk=500, d=dims[0], dv=dims[1], dtype=torch.bfloat16), {"mask": tw.prefix(70)}
    if packed:
        cu = torch.tensor([0, 130, 131, 490])
        tensors, options = [x[0] for x in tensors], {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    backend, c = Hopper(), call(*tensors, device="cuda", **options)
    if reasons := backend.unsupported(c.p):
        pytest.skip("; ".join(reasons))
    assert backend.backward_config(c.p).keys.keeps_ds
    first, second = (results(backend, c) for _ in range(2))  # the second one repeats a launch
    assert not [str(e) for e in c.expected().judge(first) if not e.ok]
    assert not other_bits(first, second)


@pytest.mark.parametrize("count", [1, 40, 600])
@pytest.mark.parametrize("d", [64, 128, 192, 256, 512])
def test_packed_backwards_are_right_however_many_sequences_there_are(d, count):
    lengths = torch.randint(0, 2400 // count, (count,), generator=torch.Generator().manual_seed(count))
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tensors = [x[0] for x in qkv(nq=2400, nk=2400, d=d, dv=d, dtype=torch.bfloat16)]
    backend, c = Hopper(), call(*tensors, device="cuda", causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    if reasons := backend.unsupported(c.p):
        pytest.skip("; ".join(reasons))
    assert not [str(e) for e in c.expected().judge(results(backend, c)) if not e.ok]


def test_a_kept_launch_holds_no_memory_of_a_sheet():
    # So many heads that no tiles are shared, whose parts would take memory too.
    q, k, v = (torch.randn(1, 2048, 16, 256, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    do = torch.randn_like(q)
    for _ in range(2):
        o = tw.attention(q, k, v, causal=True, backend="hopper")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(o, (q, k, v), do)
        sheet, returned = 2 * 16 * 2048 * 2048, sum(2 * grad.numel() for grad in grads)
        assert torch.cuda.max_memory_allocated() - before < 1.25 * sheet + returned
        del grads
        # Between busy processes autograd's thread may hold what it returned for a moment longer.
        ended = time.monotonic() + 10
        while torch.cuda.memory_allocated() - before >= sheet / 4 and time.monotonic() < ended:
            time.sleep(0.01)
        assert torch.cuda.memory_allocated() - before < sheet / 4


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_graph_replays_a_training_step_and_its_gradients_repeat(d):
    q, k, v = (x.cuda().requires_grad_() for x in qkv(nq=500, nk=500, d=d, dv=d, dtype=torch.bfloat16))
    do = torch.randn_like(q)

    def run() -> tuple[torch.Tensor, ...]:
        o = tw.attention(q, k, v, causal=True, deterministic=True, backend="hopper")
        return o.detach(), *torch.autograd.grad(o, (q, k, v), do)

    # Detached: a graph that lives on would tie q, k and v to its stream, which autograd then joins in the middle of the capture.
    expected, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mask", [tw.causal(), tw.window(99, 0), tw.prefix(50)], ids=["causal", "window", "prefix"])
@pytest.mark.parametrize("d", [512, 320])
def test_wide_heads_train(d, mask, compiled):
    q, k, v = (x.cuda().requires_grad_() for x in qkv(batch=3, nq=600, nk=700, hq=8, d=d, dv=d, dtype=torch.bfloat16))
    assert tw.explain(q, k, v, mask=mask).chosen == "hopper"
    run = lambda q, k, v: tw.attention(q, k, v, mask=mask)  # noqa: E731
    o = (torch.compile(run, fullgraph=True) if compiled else run)(q, k, v)
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, (q, k, v), do)
    c = call(q, k, v, do, mask=mask)
    found = dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True))
    errors = accuracy.Expected.of(c.p, c.t, do, torch.zeros_like(c.dlse)).judge(found)
    assert not [str(e) for e in errors if not e.ok]


def test_a_graph_replays_it_and_another_stream_runs_it():
    q, k, v = (x.cuda() for x in qkv(nq=500, nk=500, d=64, dv=64, dtype=torch.bfloat16))
    with torch.no_grad():
        run = lambda: tw.attention(q, k, v, causal=True, backend="hopper")  # noqa: E731
        expected = run()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            aside = run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(aside, expected)
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("page_size", [64, 48, 192])
def test_a_graph_over_pages_replays_with_other_lengths_tables_and_queries(page_size):
    draw = torch.Generator("cuda").manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=draw, device="cuda").bfloat16()  # noqa: E731
    k, v, q = new(300, page_size, 2, 128), new(300, page_size, 2, 128), new(4, 200, 8, 128)
    table, lengths = torch.zeros(4, 64, dtype=torch.int32, device="cuda"), q.new_full((4,), 200, dtype=torch.int32)
    cache = tw.paged(k, v, table, lengths)

    def run() -> tuple[torch.Tensor, ...]:
        return tw.attention_paged_with_lse(q, cache, causal=True, backend="hopper")

    with torch.no_grad():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for step in range(10):
            table.random_(0, len(k), generator=draw)
            lengths.random_(0, 64 * page_size + 1, generator=draw) if step else lengths.copy_(torch.arange(4))
            q.normal_(generator=draw)
            graph.replay()
            assert all(torch.equal(x, y) for x, y in zip(captured, run(), strict=True))
            c = paged_call(q, cache, causal=True)
            assert not [str(e) for e in c.expected().judge(dict(zip(("o", "lse"), captured, strict=True))) if not e.ok]


FIRST = """
    import sys, threading, torch
    import tilewise as tw
    from bench.testing import qkv
    q, k, v = (x.cuda() for x in qkv(nq=500, nk=500, d=64, dv=64, dtype=torch.bfloat16))
    run = lambda: tw.attention(q, k, v, causal=True, backend="hopper")
    torch.cuda.synchronize()
    torch.set_grad_enabled(False)
"""
CAPTURE = """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing was launched or loaded before
        captured = run()
    graph.replay()
    assert torch.equal(captured, run())
"""
THREADS = """
    found, start = [], threading.Barrier(8)
    def work():
        with torch.no_grad():
            start.wait()
            found.append(run())
    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(found) == 8 and all(torch.equal(o, run()) for o in found)
"""


@pytest.mark.parametrize("what", [CAPTURE, THREADS], ids=["inside-a-capture", "in-eight-threads"])
def test_the_first_launch_of_a_process_may_be(what):
    subprocess.run([sys.executable, "-c", textwrap.dedent(FIRST + what + "    torch.cuda.synchronize()")], check=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_each_device_runs_its_own():
    q, k, v = qkv(nq=500, nk=500, d=64, dv=64, dtype=torch.bfloat16)
    with torch.no_grad():
        o = [tw.attention(*(x.to(f"cuda:{n}") for x in (q, k, v)), causal=True, backend="hopper") for n in (0, 1, 0)]
    assert all(torch.equal(x.cpu(), o[0].cpu()) for x in o)


@pytest.mark.parametrize("first", ["eager", "captured"])
def test_decoding_on_streams_and_in_graphs_at_once_gives_the_bits_of_calls_alone(first):
    run = textwrap.dedent(
        """
        import sys, torch
        import tilewise as tw
        torch.manual_seed(0)
        def problem():
            k, v = torch.randn(2, 300, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
            table = torch.randint(0, 300, (8, 40), device="cuda", dtype=torch.int32)
            lengths = torch.randint(1, 2500, (8,), device="cuda", dtype=torch.int32)
            q = torch.randn(8, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
            return q, tw.paged(k, v, table, lengths)
        problems = [problem() for _ in range(4)]
        run = lambda n: tw.attention_paged(*problems[n], backend="hopper")
        if sys.argv[1] == "eager":
            run(0)
        graphs = []
        for n in range(4):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                graphs.append((graph, [run(n) for _ in range(3)]))
        alone = [run(n) for n in range(4)]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(4)]
        for _ in range(20):
            found = []
            for n, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found.append([run(n) for _ in range(3)])
                    graphs[n][0].replay()
            found += [[run(n)] for n in range(4)]
            torch.cuda.synchronize()
            for n, outputs in enumerate([*found, *(outputs for _, outputs in graphs)]):
                assert all(torch.equal(o, alone[n % 4]) for o in outputs)
        """
    )
    subprocess.run([sys.executable, "-c", run, first], check=True)
