"""Keys that each query selected, read alone: Triton's kernels in its interpreter, and which calls are theirs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from bench import cases
from bench.testing import Call, call, normal, paged_call
from tests.backends.contract import agree, of_case
from tilewise import accuracy
from tilewise.backends import listed as lists
from tilewise.backends.base import Output
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host.draft import Launches
from tilewise.backends.hopper.host.recipe import flat
from tilewise.backends.hopper.host.selected_call import SelectedPlan
from tilewise.backends.hopper.latent.config import LatentConfig
from tilewise.backends.hopper.latent.gradients_config import GradientsConfig
from tilewise.planning import planner
from tilewise.problem import Problem, check
from tilewise.spec import Options, assemble, parse_spec

pytest.importorskip("triton", reason="the package triton is not installed")

from tilewise.backends import triton
from tilewise.backends.hopper.host.selected_gradients import SelectedGradients
from tilewise.backends.triton import listed
from tilewise.backends.triton.host import listed as host
from tilewise.backends.triton.host import tile_map
from tilewise.backends.triton.host.listed import ListedCall


def drawn(*shape: int, first: int = -1, last: int) -> Tensor:
    return torch.randint(first, last, shape, generator=torch.Generator().manual_seed(3))


def tensors(
    queries: int, keys: int, heads: tuple[int, int], dim: int, dim_v: int, batch: int = 1, dtype=torch.bfloat16
):
    each = ((queries, heads[0], dim), (keys, heads[1], dim), (keys, heads[1], dim_v), (queries, heads[0], dim_v))
    q, k, v, do = (normal(batch, *shape, dtype=dtype, seed=n) for n, shape in enumerate(each))
    return q, k, v, do


def latent(queries: int, keys: int, heads: int, **options: object) -> Call:
    q, k, _, do = tensors(queries, keys, (heads, 1), 576, 512)
    return call(q, k, k[..., :512], do, **options)


def packed(**options: object) -> Call:
    q, k, v, do = (x[0] for x in tensors(9, 90, (4, 2), 16, 24))
    return call(
        q, k, v, do, cu_seqlens_q=torch.tensor([0, 3, 3, 8]), cu_seqlens_k=torch.tensor([0, 40, 41, 90]), **options
    )


def paged(
    queries: int,
    pages: int,
    size: int,
    heads: tuple[int, int],
    dim: int,
    dim_v: int,
    cu: tuple[int, ...] = (),
    **options: object,
) -> Call:
    """A call over pages in any order, the last ones of nobody, of sequences with the lengths 0 and some."""
    table = torch.randperm(2 * pages + 2, generator=torch.Generator().manual_seed(6))[: 2 * pages].view(2, pages).int()
    k, v = (normal(2 * pages + 2, size, heads[1], n, dtype=torch.bfloat16, seed=n) for n in (dim, dim_v))
    rows = (cu[-1],) if cu else (2, queries)
    q = normal(*rows, heads[0], dim, dtype=torch.bfloat16)
    v = k[..., :dim_v] if dim > 256 else v
    options |= {"cu_seqlens_q": torch.tensor(cu)} if cu else {}
    return paged_call(q, tw.paged(k, v, table, torch.tensor([pages * size - 5, 7], dtype=torch.int32)), **options)


CASES = {
    "causal": lambda: call(*tensors(5, 90, (4, 1), 16, 24), mask=tw.causal() & tw.selected(drawn(1, 1, 5, 70, last=90))),
    "of-each-head": lambda: call(
        *tensors(5, 80, (6, 3), 136, 16, batch=2, dtype=torch.float16),
        mask=tw.selected(drawn(2, 3, 5, 7, last=80)), sink=normal(6, seed=8),
    ),
    "many-heads": lambda: call(*tensors(2, 70, (67, 1), 16, 16), mask=tw.selected(drawn(1, 1, 2, 70, last=70))),
    "window": lambda: call(*tensors(6, 90, (2, 1), 16, 16), mask=tw.window(9, 3) & tw.selected(drawn(1, 1, 3, 20, last=23), 4, 2)),
    # The copies of a block, which the window's end cuts, fill tiles.
    "twice": lambda: call(
        *tensors(4, 300, (2, 1), 16, 16), mask=tw.window(20, 20) & tw.selected(drawn(1, 1, 4, 75, first=69, last=71), 4)
    ),
    "none": lambda: call(*tensors(4, 30, (2, 1), 16, 16), mask=tw.selected(torch.full((1, 1, 4, 3), -1)), sink=normal(2)),
    "packed": lambda: packed(mask=tw.causal() & tw.selected(drawn(3, 1, 5, 9, last=49)), sink=normal(4, seed=8)),
    "wide": lambda: call(*tensors(5, 60, (4, 2), 136, 24), mask=tw.causal() & tw.selected(drawn(1, 2, 5, 9, last=60))),
    "pages": lambda: paged(3, 6, 16, (4, 2), 16, 24, mask=tw.causal() & tw.selected(drawn(2, 2, 3, 30, last=90)), sink=normal(4, seed=8)),
    "packed-pages": lambda: paged(
        3, 6, 16, (4, 1), 16, 16, cu=(0, 2, 5), mask=tw.causal() & tw.selected(drawn(2, 1, 3, 9, last=12), 8)
    ),
    "latent-pages": lambda: paged(1, 5, 16, (20, 1), 576, 512, mask=tw.selected(drawn(2, 1, 1, 40, last=70))),
    "latent": lambda: latent(3, 70, 20, mask=tw.causal() & tw.selected(drawn(1, 1, 3, 40, last=70))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_launch_makes_the_lines_that_operations_make(name, monkeypatch):
    if not triton.interpreting():
        pytest.skip("kernels are not interpreted (tests/conftest.py)")
    c = CASES[name]()
    expected = lists.lines(c.p)(c.t.leaves, c.p.device)
    monkeypatch.setattr(planner, "of_kind", lambda kind: tile_map)
    found = lists.lines(c.p)(c.t.leaves, c.p.device)
    real = expected[..., 3] >= 0  # of rows past the last sequence nothing else is read
    assert torch.equal(found[..., 3], expected[..., 3])
    assert torch.equal(found[real], expected[real])


@pytest.mark.parametrize("name", [*CASES, "in-parts"])
def test_the_kernels_read_the_selected_keys(name, monkeypatch):
    if not triton.interpreting():
        pytest.skip("kernels are not interpreted (tests/conftest.py)")
    if name == "in-parts":
        monkeypatch.setattr(host, "room", lambda p: 1)
    c = CASES["wide" if name == "in-parts" else name]()
    assert listed.serves(c.p)
    by = ListedCall(c.p)
    if not c.p.paged:
        hide_unseen(c)
    out = by.forward(c.t)
    grads = by.backward(c.t, out, c.do, c.dlse) if c.p.spec.needs_grad else None
    errors = c.expected().judge(accuracy.tensors(out, grads))
    assert not [str(e) for e in errors if not e.ok]


def test_the_backend_reads_a_case_of_the_contract_so(monkeypatch):
    if not triton.interpreting():
        pytest.skip("kernels are not interpreted (tests/conftest.py)")
    monkeypatch.setattr(listed, "sooner", listed.serves)  # its few heads do not fill a tile
    (case,) = (x for x in cases.tagged("contract") if x.name == "contract-selected-mqa-bfloat16-sink")
    c, by = of_case(case, "cpu"), triton.Triton()
    assert isinstance(by._plan(c.p), ListedCall)
    assert "selected keys alone" in by.pieces(c.p)
    agree(by, c)


def hide_unseen(c: Call) -> None:
    """NaN in the first keys, which no call's query sees where their entries are taken out."""
    entries = lists.entries_of(c.p, c.t)
    entries[entries == 0] = torch.iinfo(torch.int32).max
    entries.copy_(entries.sort(-1).values)
    for x in {c.t.k.data_ptr(): c.t.k, c.t.v.data_ptr(): c.t.v}.values():
        x[(0,) if c.p.packed else (slice(None), 0)] = torch.nan


def problem(
    queries: int, count: int, block: int = 1, heads=(64, 1), dims=(128, 128), block_q: int = 1, **options: object
) -> Problem:
    """A causal call that wants gradients, of tensors without memory."""
    entries = torch.empty(1, 1, -(-queries // block_q), count, dtype=torch.int32, device="meta")
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    q, k, v = (torch.empty(1, queries, *shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    mask = tw.causal() & tw.selected(entries, block, block_q)
    extras, seed, text = assemble(q.requires_grad_(), k, v, Options(mask=mask, **options))
    p = check(q, k, v, extras, seed, parse_spec(text))
    return replace(p, device=torch.device("cpu"), latent=dims[0] > dims[1])


@pytest.mark.parametrize(
    ("sizes", "options", "sooner"),
    [((16384, 2048), {}, True), ((8192, 512), {"heads": (16, 4)}, True), ((8192, 4096), {"heads": (4, 4)}, False),
     ((8192, 16, 64), {"heads": (64, 4)}, True), ((8192, 32, 64), {"heads": (64, 4)}, False),
     ((8192, 16, 64), {"heads": (64, 4), "block_q": 128}, False), ((4096, 2048), {"dims": (576, 512)}, True),
     ((4096, 2048), {"deterministic": True}, False), ((4096, 2048), {"dropout_p": 0.1, "dropout_seed": 1}, False),
     ((4096, 2048), {"score": tw.softcap(9.0)}, False)],
)  # fmt: skip
def test_keys_are_read_alone_where_that_is_sooner(sizes, options, sooner):
    assert listed.sooner(problem(*sizes, **options)) == sooner


@pytest.mark.parametrize(
    ("sizes", "heads", "blocks"),
    [((8192, 16, 64), (64, 4), False), ((65536, 8, 512), (32, 8), True), ((16384, 4, 512), (8, 8), True)],
)
def test_queries_are_gathered_by_block_where_that_is_sooner_than_by_list(sizes, heads, blocks):
    assert triton.gathers(problem(*sizes, heads=heads)) == blocks


def test_hopper_trains_latent_attention_over_selected_keys():
    p, hopper = problem(4096, 2048, dims=(576, 512)), Hopper()
    assert hopper.refused(p) == []
    assert [type(x) for x in hopper.configs(p)] == [LatentConfig, GradientsConfig, GradientsConfig]
    assert isinstance(hopper._plan(p), SelectedPlan)
    assert isinstance(hopper._backward_plan(p).own, SelectedGradients)
    (reason,) = hopper.refused(problem(4096, 2048, dims=(576, 512), deterministic=True))
    assert "they add up in any order" in reason


def test_few_heads_of_latent_attention_have_the_gradients_of_triton():
    p, hopper = problem(4096, 2048, heads=(16, 1), dims=(576, 512)), Hopper()
    assert len(hopper.configs(p)) == 1
    assert hopper._backward_plan(p).own is None


@pytest.mark.parametrize("queries", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_launches_of_gradients_bring_what_the_kernels_take(queries, joint, monkeypatch):
    c = latent(3, 40, 70, mask=tw.causal() & tw.selected(drawn(1, 1, 3, 70, last=40)))
    c.t.joint, given = joint, []
    monkeypatch.setattr(Launches, "run_named", lambda self, tensors: given.append((self, tensors)))
    out = Output(torch.zeros_like(c.do), torch.zeros_like(c.dlse))
    shifted = torch.cat([c.do.flatten()[:1], c.do.flatten()])[1:].view(c.do.shape)
    ListedCall(c.p, own=SelectedGradients(c.p)).backward(c.t, out, shifted, c.dlse)
    launches, tensors = given[queries]
    assert queries or (tensors["do"].data_ptr() % 16 == 0 and torch.equal(tensors["do"].flatten(), c.do.flatten()))
    (launch,) = launches.launches
    assert launch.config == GradientsConfig("bf16", queries)
    for x, kind in zip(flat(launch.config.parameters), launch.kinds, strict=True):
        assert kind == (None if x.shape is None else (getattr(torch, x.dtype or "bfloat16"), len(x.shape))), x.name
    assert queries or tensors["dv"].shape[-1] == 512
    assert queries or (tensors["dv"].data_ptr() == tensors["dk"].data_ptr()) == joint


# -- Values in the memory of keys ------------------------------------------------------------------------------------


def in_keys(hold: bool, dims: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """The gradient of keys in whose memory the values lie, and that of these where somebody holds them."""
    q, k, _, do = tensors(5, 60, (6, 1), *dims)
    q, k, held = q.requires_grad_(), k.requires_grad_(), []
    mask = tw.causal() & tw.selected(drawn(1, 1, 5, 30, last=60))

    def attention() -> Tensor:
        v = k[..., : dims[1]]
        if hold:
            held.append(v)
            v.retain_grad()
        return tw.attention(q, k, v, mask=mask, backend="triton")

    attention().backward(do)
    return k.grad, held[0].grad if hold else None


@pytest.mark.parametrize("dims", [(48, 32), (136, 40)])
def test_the_gradient_of_values_in_keys_is_part_of_that_of_the_keys(dims, monkeypatch):
    monkeypatch.setattr(listed, "sooner", listed.serves)
    asked, backward = [], ListedCall.backward

    def told(self, inputs, *rest):
        asked.append(inputs.joint)
        return backward(self, inputs, *rest)

    monkeypatch.setattr(ListedCall, "backward", told)
    (joint, _), (apart, dv) = in_keys(hold=False, dims=dims), in_keys(hold=True, dims=dims)
    assert asked == [True, False]
    assert dv is not None
    assert dv.abs().sum() > 0
    # Of one sum that is rounded once, and of two that are rounded before they are added.
    assert (joint.double() - apart.double()).abs().max() <= 3 * 2**-8 * apart.abs().max()


def test_a_hook_gets_the_gradient_of_values_in_keys(monkeypatch):
    monkeypatch.setattr(listed, "sooner", listed.serves)
    q, k, _, do = tensors(5, 60, (6, 1), 48, 32)
    k, seen = k.requires_grad_(), []

    def attention() -> Tensor:
        v = k[..., :32]
        v.register_hook(seen.append)
        return tw.attention(q, k, v, mask=tw.selected(drawn(1, 1, 5, 30, last=60)), backend="triton")

    attention().backward(do)
    assert [x.shape for x in seen] == [(1, 60, 1, 32)]


def of_compiled_autograd(attention) -> None:
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        attention().sum().backward()


def of_saved_on_cpu(attention) -> None:
    with torch.autograd.graph.save_on_cpu():
        o = attention()
    o.sum().backward()


WAYS = {
    "checkpoint": lambda attention: checkpoint(attention, use_reentrant=False).sum().backward(),
    "saved-on-cpu": of_saved_on_cpu,
    "compiled-autograd": of_compiled_autograd,
}


@pytest.mark.parametrize("way", WAYS)
def test_values_in_keys_have_their_gradient_however_it_is_computed(way, monkeypatch):
    monkeypatch.setattr(listed, "sooner", listed.serves)
    q, k, _, _ = (x.requires_grad_() for x in tensors(3, 60, (6, 1), 48, 32))
    mask = tw.selected(drawn(1, 1, 3, 30, last=60))
    attend = partial(tw.attention, mask=mask, backend="triton")
    WAYS[way](lambda: attend(q, k, k[..., :32]))
    other = k.detach().clone().requires_grad_()
    attend(q, other, other[..., :32].clone()).sum().backward()  # values of their own memory
    assert (k.grad.double() - other.grad.double()).abs().max() <= 3 * 2**-8 * other.grad.abs().max()


def test_second_derivatives_go_through_values_in_keys():
    q, k = (normal(1, n, 1, 4, dtype=torch.float64, seed=n).requires_grad_() for n in (2, 5))
    mask = tw.selected(torch.tensor([[0, 2, 3], [1, 4, -1]]).view(1, 1, 2, 3))
    assert torch.autograd.gradgradcheck(lambda q, k: tw.attention(q, k, k[..., :2], mask=mask), (q, k))


def test_values_of_another_graph_keep_their_gradient(monkeypatch):
    """What lies in the memory of keys but was made apart from them, as of a detached view, is no part of theirs."""
    monkeypatch.setattr(listed, "sooner", listed.serves)
    q, k, _, do = tensors(5, 60, (6, 1), 48, 32)
    k = k.requires_grad_()
    v = k.detach()[..., :32].requires_grad_()
    mask = tw.causal() & tw.selected(drawn(1, 1, 5, 30, last=60))
    tw.attention(q, k, v, mask=mask, backend="triton").backward(do)
    dk, dv = k.grad.clone(), v.grad.clone()
    other, apart = k.detach().clone().requires_grad_(), v.detach().clone().requires_grad_()
    tw.attention(q, other, apart, mask=mask, backend="triton").backward(do)
    assert torch.equal(dv, apart.grad)
    assert torch.equal(dk, other.grad)


def test_hopper_trains_over_the_selected_keys_of_one_head():
    few, many = problem(16384, 2048), problem(16384, 8192)
    assert isinstance(Hopper()._backward_plan(few), ListedCall)
    wanted = Hopper().backward_config(few)
    assert Hopper(backward=wanted).configs(few)[1:] == [wanted]
    assert Hopper().backward_config(many).form == "bits"
