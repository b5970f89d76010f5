"""Attention over ranks that are processes of their own, joined by gloo."""

from __future__ import annotations

import importlib
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tilewise as tw
from bench.testing import normal
from tests.parallel.ranks import on_this_rank, together, wrong
from tests.parallel.test_simulated import _Alone

CALLS = ("causal", "documents", "blocks", "causal-bias", "dropout-window-alibi", "sink")


def _dtensors(size: int) -> dict[str, object]:
    """Attention of DTensors and its gradients, whole again, by how they are sharded; and what is refused."""
    found: dict[str, object] = {}
    for name, (shape, names, placements) in SHARDINGS.items():
        mesh = dist.device_mesh.init_device_mesh("cpu", shape(size), mesh_dim_names=names)
        q, k, v, do = (distribute_tensor(x, mesh, placements) for x in _whole())
        local = [x.requires_grad_() for x in (q, k, v)]
        o, lse = tw.attention_with_lse(*local, causal=True)
        assert o.placements == q.placements
        grads = torch.autograd.grad(o, local, do)
        found[name] = [x.full_tensor().detach() for x in (o, lse, *grads)]
        if name == "heads":
            try:
                tw.attention(*local, sink=torch.zeros(8))
            except NotImplementedError as error:
                found["refused"] = str(error)
        if name == "replicated and sequence":
            torch.manual_seed(dist.get_rank())
            found["dropped"] = tw.attention(*local, causal=True, dropout_p=0.5).full_tensor().detach()
            shared = [x[:1].detach().requires_grad_() for x in local[1:]]
            of_one = tw.attention(local[0], *shared, causal=True)
            found["shared keys"] = [of_one.full_tensor().detach(), *torch.autograd.grad(of_one, shared, do)]
            found["shared keys"][1:] = [x.full_tensor() for x in found["shared keys"][1:]]
        if name == "batch and sequence":
            try:
                tw.attention(*[distribute_tensor(x[:1].clone(), mesh, placements) for x in _whole()[:3]], causal=True)
            except NotImplementedError as error:
                found["empty"] = str(error)
    return found


def _whole() -> list[torch.Tensor]:
    return [normal(2, 21, heads, 8, seed=n) for n, heads in enumerate((8, 4, 4, 8))]


SHARDINGS = {
    "sequence": (lambda size: (size,), ("cp",), [Shard(1)]),
    "heads": (lambda size: (size,), ("tp",), [Shard(2)]),
    "batch and sequence": (lambda size: (2, size // 2), ("dp", "cp"), [Shard(0), Shard(1)]),
    "replicated and sequence": (lambda size: (size // 2, 2), ("dp", "cp"), [Replicate(), Shard(1)]),
}


def _compiled(parallel: tw.parallel.ContextParallel, scheme: str) -> list[torch.Tensor]:
    """Differences of o and all gradients, between one graph and the same function run eagerly."""
    slopes = torch.rand(8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    options = {"causal": True} | ({"dropout_p": 0.3, "dropout_seed": torch.tensor([7])} if scheme == "gather" else {})

    def function(q, k, v, slopes):
        return tw.attention(q * 1.5, k, v, score=tw.alibi(slopes), parallel=parallel, **options).sin()

    found = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        *local, do = (parallel.shard(x[:, :20]).detach().requires_grad_() for x in _whole())
        o = run(*local, slopes)
        found.append([o.detach(), *torch.autograd.grad(o, [*local, slopes], do)])
    return [a - b for a, b in zip(*found, strict=True)]


def _compiled_dtensors(size: int) -> dict[str, list[torch.Tensor]]:
    """Differences of o and all gradients of DTensors, between one graph and the same function run eagerly, by how they are sharded."""
    documents = tw.documents(torch.arange(20) // 6)

    def function(q, k, v):
        return tw.attention(q * 1.5, k, v, mask=documents).sin()

    found = {}
    for name, (shape, names, placements) in SHARDINGS.items():
        torch._dynamo.reset()
        mesh, results = dist.device_mesh.init_device_mesh("cpu", shape(size), mesh_dim_names=names), []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            *local, do = (distribute_tensor(x[:, :20].clone(), mesh, placements) for x in _whole())
            local = [x.requires_grad_() for x in local]
            o = run(*local)
            results.append([x.full_tensor().detach() for x in (o, *torch.autograd.grad(o, local, do))])
        found[name] = [a - b for a, b in zip(*results, strict=True)]
    return found


def _left_alone(size: int) -> str:
    """What the first rank raises in a call that no other rank makes, after the group's timeout."""
    parallel = tw.context_parallel(dist.new_group(range(size), timeout=timedelta(seconds=2)))
    if parallel.rank:
        return ""
    try:
        tw.attention(*[torch.ones(1, 4, 1, 8)] * 3, parallel=parallel)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def _refused_in_a_graph(parallel: tw.parallel.ContextParallel) -> str:
    """What a rank says of unequal parts of a sequence inside a graph."""
    local = [parallel.shard(x).detach() for x in _whole()[:3]]
    try:
        torch.compile(lambda *x: tw.attention(*x, parallel=parallel), fullgraph=True, backend="aot_eager")(*local)
    except ValueError as error:
        return str(error)
    return ""


EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"
TEXT, STEPS, CONTEXT = b"def tile(row, column):\n    return row * column\n" * 9, 3, 40


def _example(name: str):
    """A module of the example, as its own directory imports it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLE))


def _training():
    sizes = _example("model").GPTConfig(layers=1, d_model=48, heads_q=4, heads_k=2, d_hidden=64, context=CONTEXT)
    return sizes, _example("train").TrainConfig(steps=STEPS, context=CONTEXT, batch_size=2, warmup_steps=1)


WAYS = {"DDP": (False, False), "FSDP2": (True, False), "FSDP2, recomputed": (True, True)}


def _losses(way: str) -> list[float]:
    """Losses of the example, on this process and the others."""
    sizes, training = _training()
    return [record.loss for record in _example("parallel").losses(sizes, TEXT, training, "cpu", *WAYS[way])]


def _process(rank: int, size: int, folder: str) -> None:
    """Runs every call on a rank, and leaves what it computed, and what it raised, in a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found: dict[str, object] = {}
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        parallel = tw.context_parallel(mesh["cp"])
        found = {name: on_this_rank(parallel, name) for name in CALLS}
        found |= {"dtensors": _dtensors(size)}
        found["losses"] = {way: _losses(way) for way in (WAYS if size == 2 else ["FSDP2, recomputed"])}
        if size == 2:
            by_heads = tw.context_parallel(mesh["cp"], scheme="heads")
            ways = {scheme: tw.context_parallel(mesh["cp"], scheme=scheme) for scheme in ("gather", "heads")}
            found["compiled"] = {scheme: _compiled(way, scheme) for scheme, way in ways.items()}
            found["compiled DTensors"] = _compiled_dtensors(size)
            found["uneven"] = _refused_in_a_graph(ways["gather"])
            found |= {f"heads {name}": on_this_rank(by_heads, name) for name in CALLS if "dropout" not in name}
        if size == 4:
            both = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "heads"))
            of_two = tw.context_parallel(both, scheme="heads+gather")
            found |= {f"two dimensions {name}": on_this_rank(of_two, name) for name in ("causal-bias", "sink")}
        found["left alone"] = _left_alone(size)
        try:
            tw.attention(*[torch.ones(1, 4, 1, 8)] * 3, causal=rank == 0, parallel=parallel)
        except ValueError as error:
            found["disagreement"] = str(error)
    except Exception:
        found["failed"] = traceback.format_exc()
    finally:
        torch.save(found, f"{folder}/{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def parts(request, tmp_path_factory) -> list[dict]:
    """What each of 2 or 4 processes left."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_process, (request.param, str(folder)), nprocs=request.param, start_method="spawn")
    found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(request.param)]
    assert [part["failed"] for part in found if "failed" in part] == []
    return found


@pytest.mark.parametrize("name", CALLS)
def test_processes_compute_what_one_device_computes(parts, name):
    parallel = tw.context_parallel(_Alone(len(parts)))
    for key in (name, f"heads {name}", f"two dimensions {name}"):
        if key in parts[0]:
            assert not wrong(together(parallel, [part[key] for part in parts]), name)


@pytest.mark.parametrize("name", SHARDINGS)
def test_dtensors_come_back_sharded_as_they_were_with_the_numbers_of_one_device(parts, name):
    *qkv, do = _whole()
    local = [x.requires_grad_() for x in qkv]
    o, lse = tw.attention_with_lse(*local, causal=True)
    for part in parts:
        for found, expected in zip(
            part["dtensors"][name], (o, lse, *torch.autograd.grad(o, local, do, retain_graph=True)), strict=True
        ):
            torch.testing.assert_close(found, expected.detach())


def test_replicas_of_dtensors_drop_the_same_pairs_whatever_each_rank_would_draw(parts):
    first, *others = [part["dtensors"]["dropped"] for part in parts]
    assert all(torch.equal(x, first) for x in others)


def test_dtensors_of_one_batch_element_serve_every_query(parts):
    q, k, v, do = _whole()
    shared = [x[:1].requires_grad_() for x in (k, v)]
    o = tw.attention(q, *shared, causal=True)
    expected = [o.detach(), *torch.autograd.grad(o, shared, do)]
    for part in parts:
        for found, x in zip(part["dtensors"]["shared keys"], expected, strict=True):
            torch.testing.assert_close(found, x)


def test_dtensors_whose_batch_leaves_ranks_empty_beside_a_sharded_sequence_are_refused_on_all(parts):
    if len(parts) > 2:  # of two, none shards the sequence too
        assert all("leaves ranks without elements" in part["dtensors"]["empty"] for part in parts)


def test_dtensors_whose_heads_are_cut_refuse_what_depends_on_the_head(parts):
    assert all("the heads are sharded, and the mask, score, sink" in part["dtensors"]["refused"] for part in parts)


def test_processes_that_disagree_all_get_the_same_error(parts):
    said = {part["disagreement"] for part in parts}
    assert len(said) == 1
    assert "mask\n    rank 0: causal()" in said.pop()


def test_the_example_trains_over_processes_with_the_losses_of_one(parts):
    sizes, training = _training()
    model = _example("model")
    gpt = model.GPT(sizes, model.ATTENTIONS["tilewise"])
    alone = [record.loss for record in _example("train").train(gpt, TEXT, training)]
    assert alone[-1] < alone[0]
    for part in parts:
        assert "FSDP2, recomputed" in part["losses"]
        for found in part["losses"].values():
            torch.testing.assert_close(found, alone)


def test_a_rank_whose_others_are_gone_raises_within_the_groups_timeout(parts):
    assert "timed out" in parts[0]["left alone"].lower()


@pytest.mark.parametrize("parts", [2], indirect=True)
def test_a_sharded_call_is_a_node_of_one_graph_with_the_same_bits(parts):
    for part in parts:
        assert set(part["compiled"]) == {"gather", "heads"}
        assert not any(bool(x.any()) for found in part["compiled"].values() for x in found)
        assert set(part["compiled DTensors"]) == set(SHARDINGS)
        assert not any(bool(x.any()) for found in part["compiled DTensors"].values() for x in found)
        assert "inside torch.compile ranks hold as many rows each, or layout= is a Layout" in part["uneven"]
