"""What every backend shares."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from tilewise import caching, device
from tilewise.backends import base
from tilewise.backends.base import Output, PerProblem, PerTensors
from tilewise.caching import is_tracked, keep_track
from tilewise.problem import check
from tilewise.spec import Spec


def held(*numbers: float) -> torch.Tensor:
    """A tensor as a caller's mask reads it."""
    found = torch.tensor(numbers)
    keep_track(found)
    return found


def test_what_was_made_of_tensors_is_made_again_when_one_changes_or_is_another():
    made, a, b = PerTensors(), held(0, 0, 0), held(0, 0, 0)
    make = lambda *tensors: made.of("sum", tensors, lambda: sum(t.sum() for t in tensors))  # noqa: E731
    first = make(a, b)
    assert make(a, b) is first
    a.add_(1)
    second = make(a, b)
    assert second == 3
    assert make(a, b) is second
    assert make(a, b.clone()) is not second


def test_what_was_made_of_a_tensor_is_made_anew_when_it_was_given_other_memory():
    made, a = PerTensors(), held(0, 0, 0)
    assert made.of("sum", [a], lambda: float(a.sum())) == 0
    a.data = torch.ones(3)
    assert made.kept("sum", [a]) is None
    assert made.of("sum", [a], lambda: float(a.sum())) == 3


def test_memory_that_a_tensor_gets_back_may_hold_other_numbers_by_then():
    made, front, back = PerTensors(), held(0, 0, 0), torch.ones(3)
    a = torch.empty(0)
    for memory, numbers in ((front, 0), (back, 1), (front, 2)):
        a.data = memory.fill_(numbers)
        assert made.of("sum", [a], lambda: float(a.sum())) == 3 * numbers


def test_what_was_made_of_two_tensors_in_turns_is_made_once_each_and_forgotten_with_them():
    made, a, b = PerTensors(), held(0, 0, 0), held(1, 1, 1)
    first, second = made.of("sum", [a], a.sum), made.of("sum", [b], b.sum)
    assert made.of("sum", [a], a.sum) is first
    assert made.of("sum", [b], b.sum) is second
    del b
    assert len(made._found) == 1


class Marked(torch.Tensor):
    pass


def test_views_that_show_the_same_of_one_tensor_count_as_one():
    made, tensor = PerTensors(), torch.arange(6).view(2, 3).clone()
    keep_track(tensor)

    def shown(a: torch.Tensor) -> list[torch.Tensor]:
        return [a[None, :, :2], a[None, :, 1:], a[None], a.T[None], a[0], a[1]]

    sums = [made.of("sum", [x], lambda x=x: int(x.sum())) for x in shown(tensor)]
    assert sums == [8, 12, 15, 15, 3, 12]
    assert [made.kept("sum", [x]) for x in shown(tensor)] == sums
    tensor[0, 0] = 10
    assert [made.of("sum", [x], lambda x=x: int(x.sum())) for x in shown(tensor)] == [18, 12, 25, 25, 13, 12]
    del tensor
    assert not made._found


def test_views_of_which_the_place_does_not_tell_the_numbers_are_themselves():
    made, a, z = PerTensors(), torch.arange(8.0).view(2, 4), torch.randn(3, dtype=torch.complex64)
    keep_track(a), keep_track(z)
    marked = a.as_subclass(Marked)
    for x, y in ((marked[0], marked[1]), (z.imag, z.conj().imag), (a[0], a[0].view(torch.int32))):
        assert made.of("list", [x], x.tolist) == x.tolist()
        assert made.of("list", [y], y.tolist) == y.tolist()


def test_nothing_is_kept_of_inference_tensors():
    made = PerTensors()
    with torch.inference_mode():
        a = torch.zeros(3)
    results = [made.of("sum", [a], a.sum) for _ in range(2)]
    assert results[0] is not results[1]


def test_what_is_made_while_a_graph_is_warmed_up_is_kept_only_of_no_tensors_and_on_lasting_memory(monkeypatch):
    made, source, lasted = PerTensors(), held(0, 0, 0), []
    before = made.of("of a tensor", [source], lambda: torch.zeros(2))
    monkeypatch.setattr(base, "is_warming_up", lambda: True)
    monkeypatch.setattr(base, "lasting", lambda make: lasted.append(make()) or lasted[-1])
    of_tensor = [made.of("of a tensor", [source], lambda: torch.ones(2)) for _ in range(2)]
    of_none = [made.of("of none", [], lambda: torch.ones(2)) for _ in range(2)]
    assert of_tensor[0] is not of_tensor[1]
    assert of_none[0] is of_none[1] is lasted[0]
    assert len(lasted) == 1
    monkeypatch.setattr(base, "is_warming_up", lambda: False)
    assert made.of("of a tensor", [source], None) is before


@pytest.mark.parametrize(
    ("stream", "warm"),
    [(7, True), (0, False), (None, False), ("other thread", False)],
    ids=["its", "another", "none", "thread"],
)
def test_a_graph_is_warmed_up_on_the_stream_of_its_manager(stream, warm, monkeypatch):
    def manager(device, create_if_none_exists):
        assert stream != "other thread"
        return None if stream is None else SimpleNamespace(stream=SimpleNamespace(cuda_stream=stream))

    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=manager))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "stream_of", lambda _: 7)
    assert device.is_warming_up() == warm


def test_what_a_graph_reads_outlives_the_plan_that_kept_it(monkeypatch):
    made = PerTensors()
    read = weakref.ref(made.of("key", [], lambda: torch.zeros(3)))
    monkeypatch.setattr(base, "is_captured", lambda: True)
    made.of("key", [], lambda: torch.zeros(3))
    with_memory = weakref.ref(made)
    del made
    assert with_memory() is None
    assert read() is not None


def test_what_is_kept_is_awaited_with_all_its_tensors_by_whoever_gets_it(monkeypatch):
    asked = []

    class Noted:
        def __init__(self, tensors):
            self.tensors = list(tensors)

        def await_here(self):
            asked.append(self.tensors)

    monkeypatch.setattr(base, "Ready", Noted)
    kept, source, x, y = PerTensors(), held(0, 0), torch.zeros(3), torch.zeros(4)
    for _ in range(3):
        kept.of("key", [source], lambda: ({"x": x}, None, [Output(y, x), 7]))
    assert [[id(t) for t in tensors] for tensors in asked] == [[id(x), id(y), id(x)]] * 2


def test_what_was_made_of_no_tensors_is_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(PerTensors, "LIMIT", 8)
    made = PerTensors()
    for seqlen in range(100):
        assert made.of(seqlen, [], lambda n=seqlen: n) == seqlen
    assert len(made._found) <= 8


def test_what_a_capture_was_given_of_an_earlier_call_outlives_the_limit(monkeypatch):
    monkeypatch.setattr(PerTensors, "LIMIT", 8)
    made = PerTensors()
    given = [made.of(name, [], lambda: torch.zeros(3)) for name in ("captured", "not")]
    monkeypatch.setattr(base, "is_captured", lambda: True)
    assert made.of("captured", [], None) is given[0]
    monkeypatch.setattr(base, "is_captured", lambda: False)
    alive = [weakref.ref(x) for x in given]
    del given
    for seqlen in range(8):
        made.of(seqlen, [], lambda: torch.zeros(3))
    assert [x() is not None for x in alive] == [True, False]


def test_what_was_decided_for_a_problem_is_decided_once_and_lives_as_long_as_it():
    decided, problems = [], [problem_of(n) for n in (5, 6)]
    memory = PerProblem(lambda p: decided.append(p.seqlen_q) or object())
    first, second = (memory.of(p) for p in problems)
    assert first is not second
    assert [memory.of(p) for p in problems] == [first, second]
    assert decided == [5, 6]
    assert PerProblem(lambda p: "another").of(problems[0]) == "another"


def test_by_structure_a_problem_of_other_lengths_gets_what_would_be_decided_for_it():
    decided = []

    def by_structure(p):
        decided.append(p)
        return (lambda p, values: (p.seqlen_q, *values)), (p.seqlen_q // 2, p.head_dim)

    memory = PerProblem(lambda p: pytest.fail("by structure alone"), by_structure)
    assert [memory.of(problem_of(n)) for n in (5, 6, 7, 9)] == [(5, 2, 8), (6, 3, 8), (7, 3, 8), (9, 4, 8)]
    assert len(decided) == 2


def problem_of(seqlen):
    q = torch.empty(2, seqlen, 1, 8)
    return check(q, q, q, [], None, Spec())


def test_nothing_is_kept_of_tensors_whose_memory_a_compiler_may_give_away():
    made, a = PerTensors(), torch.zeros(3)
    results = [made.of("sum", [a], a.sum) for _ in range(2)]
    assert results[0] is not results[1]
    keep_track(a[:2])  # a view is of the same memory
    results = [made.of("sum", [a], a.sum) for _ in range(2)]
    assert results[0] is results[1]


def test_memory_is_tracked_while_a_tensor_has_it():
    a = torch.zeros(3)
    assert not is_tracked(a)
    keep_track(a[1:])
    assert is_tracked(a)
    assert not is_tracked(a.clone())
    for _ in range(5000):
        keep_track(torch.zeros(3))
    assert len(caching._tracked) < 3000
    assert is_tracked(a)
