"""Which ranks are joined by copy engines, and what is said where they are not; the copies themselves need GPUs."""

import sys
import types

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
from tilewise.parallel import exchange, symmetric
from tilewise.parallel.layout import Layout


class _Ranks:
    """The first of two ranks; ``places`` and what fails are those of both."""

    def __init__(self, group=None):
        self.host, self.carrier, self.nodes = None, "nccl", 1

    def objects(self, value):
        return [value, value if isinstance(value, str) else self.place(value)]

    def place(self, value):
        return value


@pytest.fixture
def joined(monkeypatch):
    def join(place=None, failure=None):
        class Reaching(_Ranks):
            def room(self, *_):
                if failure is not None:
                    raise failure

        monkeypatch.setattr(symmetric, "Group", type("Ranks", (_Ranks,), {"place": place} if place else {}))
        monkeypatch.setattr(symmetric, "SymmetricGroup", Reaching)
        monkeypatch.setattr(symmetric.torch, "empty", lambda *_, **__: None)  # there is no GPU
        return symmetric.group_of("a group")

    return join


def test_ranks_that_reach_each_other_s_memory_are_joined_by_copy_engines(joined):
    assert isinstance(joined(), symmetric.SymmetricGroup)


def test_a_failure_of_symmetric_memory_is_named_with_its_first_rank(joined):
    found = joined(failure=RuntimeError("CUDA driver error: no peer access\nand a trace"))
    assert type(found).__name__ == "Ranks"
    said = "symmetric memory fails on rank 0: RuntimeError: CUDA driver error: no peer access"
    assert found.carrier == f"nccl; not copy engines, since {said}"


def test_ranks_of_several_machines_are_said_to_be_apart(joined):
    found = joined(place=lambda self, value: ("another host", *value[1:]))
    assert found.nodes == 2
    assert found.carrier.endswith("on several machines or in several containers")


@pytest.fixture
def unnamed(tmp_path):
    """The process group that a device mesh makes: of every backend that the build of torch has, without a name."""
    dist.init_process_group(store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_without_a_name_says_its_backends(unnamed):
    assert dist.get_backend() == "undefined"
    assert "cpu:gloo" in tw.context_parallel().exchange.carrier


def test_a_group_without_a_name_is_one_of_nccl_on_a_machine_with_gpus(unnamed, monkeypatch):
    monkeypatch.setattr(exchange.dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    assert exchange.Group().host is None  # nothing to separate: there is no GPU
    monkeypatch.setattr(exchange.torch.cuda, "is_available", lambda: True)
    group = exchange.Group()
    assert group.carrier == "cpu:gloo,cuda:nccl"
    assert dist.get_backend(group.host) == "gloo"  # so group_of tries the copy engines


def test_ranks_with_copy_engines_send_tensors_of_the_cpu_by_the_group(unnamed, monkeypatch):
    monkeypatch.setattr(symmetric.torch.cuda, "Stream", lambda: None)
    ranks, layout = symmetric.SymmetricGroup(), Layout([[(0, 4)]])
    sent = ranks.room("q", (1, 4, 2), torch.empty(0), 8).copy_(torch.arange(8.0).view(1, 4, 2))
    whole = ranks.to_heads("q", sent, layout)()
    assert torch.equal(whole, sent[0])
    assert torch.equal(ranks.to_rows("o", whole, layout)(), sent)


class _Alone(symmetric.SymmetricGroup):
    """A rank whose memory nobody maps: rooms of plain tensors."""

    def __init__(self):
        self._rooms, self._views, self._captured = {}, {}, []

    def numbers(self, values):
        return [values]


@pytest.fixture
def rooms(monkeypatch):
    """Makes a room of so many bytes, in a capture or not."""
    mapping = types.SimpleNamespace(empty=torch.empty, rendezvous=lambda memory, group: object())
    monkeypatch.setattr(torch.distributed, "_symmetric_memory", mapping, raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", mapping)
    monkeypatch.setattr(symmetric.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(symmetric.dist, "group", types.SimpleNamespace(WORLD=None))
    ranks = _Alone()
    ranks.group = "a group"

    def room(nbytes, capturing=False):
        monkeypatch.setattr(symmetric, "is_captured", lambda: capturing)
        return ranks._mapped("q", nbytes, torch.device("cpu"))[0].data_ptr()

    room.ranks = ranks
    return room


def test_a_room_that_a_graph_reads_stays_when_a_longer_call_makes_another(rooms):
    rooms(symmetric.GRAIN)
    second = rooms(2 * symmetric.GRAIN)  # no graph read the first
    assert rooms(symmetric.GRAIN, capturing=True) == rooms(1, capturing=True) == second
    third = rooms(3 * symmetric.GRAIN)
    assert third != second
    assert [memory.data_ptr() for memory, _ in rooms.ranks._captured] == [second]


def test_a_capture_that_needs_more_room_than_there_is_is_refused(rooms):
    rooms(symmetric.GRAIN)
    with pytest.raises(NotImplementedError, match="call attention once as it is captured"):
        rooms(symmetric.GRAIN + 1, capturing=True)
