"""Which ranks are joined by copy engines, and what is said where they are not; the copies themselves need GPUs."""

import pytest

from tilewise.parallel import symmetric


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
