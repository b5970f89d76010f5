"""Facts of devices, and the zeros that kernels count on: who has which."""

from __future__ import annotations

import itertools
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from tilewise import device as devices

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """A CPU as a GPU whose stream and capture a test sets."""
    at = SimpleNamespace(stream=0, captured=False)
    monkeypatch.setattr(devices, "_counts", {})
    monkeypatch.setattr(devices, "stream_of", lambda index: at.stream)
    monkeypatch.setattr(devices, "is_captured", lambda: at.captured)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    return at


def place(counts: torch.Tensor) -> tuple[int, int]:
    """The memory of counts, from and to."""
    assert counts.dtype == torch.int32
    assert not counts.any()
    return counts.data_ptr(), counts.data_ptr() + 4 * len(counts)


def apart(*counts: torch.Tensor) -> bool:
    """Whether no two have memory in common."""
    places = sorted(place(x) for x in counts)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(places))


def test_launches_of_a_stream_count_on_the_same_zeros(machine):
    first, again = (devices.counts(CPU, 24) for _ in range(2))
    assert place(first) == place(again)
    assert len(first) >= 24
    fewer, more = devices.counts(CPU, 3), devices.counts(CPU, 1000)
    assert place(fewer)[0] == place(first)[0]
    assert apart(first, more)
    assert place(devices.counts(CPU, 24))[0] == place(more)[0]


def test_another_stream_has_others(machine):
    found = []
    for machine.stream in (0, 7, 9):
        found.append(devices.counts(CPU, 24))
    assert apart(*found)


def test_each_launch_of_a_capture_has_its_own(machine):
    eager = devices.counts(CPU, 24)
    machine.captured = True
    assert apart(eager, *(devices.counts(CPU, 24) for _ in range(5)))
    machine.captured = False
    assert place(devices.counts(CPU, 24)) == place(eager)


@pytest.fixture
def gpu(machine, monkeypatch):
    """A GPU whose memory is the CPU's, without workspaces yet."""
    empty = torch.empty
    monkeypatch.setattr(devices, "_workspaces", devices._Workspaces())
    monkeypatch.setattr(devices, "_capturing", lambda: machine.captured)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    return SimpleNamespace(type="cuda", index=0)


def test_calls_of_a_stream_and_thread_share_a_workspace(gpu, machine):
    first = devices.workspace(gpu, 1000)
    assert len(first) >= 1000
    assert devices.workspace(gpu, 10) is first
    larger = devices.workspace(gpu, 5000)
    assert len(larger) >= 5000
    assert devices.workspace(gpu, 1000) is larger
    machine.stream = 7
    assert devices.workspace(gpu, 1000) is not larger
    machine.stream, found = 0, []
    thread = threading.Thread(target=lambda: found.append(devices.workspace(gpu, 1000)))
    thread.start()
    thread.join()
    assert found[0] is not larger  # its launches may come between two of another thread's call


def test_large_and_captured_workspaces_are_a_calls_own(gpu, machine):
    large = devices.MOST_WORKSPACE + 1
    assert devices.workspace(gpu, large) is not devices.workspace(gpu, large)
    kept = devices.workspace(gpu, 1000)
    machine.captured = True
    own = devices.workspace(gpu, 1000)
    assert own is not kept
    assert devices.workspace(gpu, 1000) is not own


def test_numbers_that_a_graph_or_another_stream_may_read_stay_when_there_are_longer_ones(machine, monkeypatch):
    monkeypatch.setattr(devices, "_indices", {})
    monkeypatch.setattr(devices, "_capturing", lambda: machine.captured)
    arange, gpu = torch.arange, torch.device("cuda", 0)
    monkeypatch.setattr(torch, "arange", lambda count, device: arange(count))
    first = weakref.ref(devices.indices(gpu, 8))
    machine.captured = True
    assert devices.indices(gpu, 8) is first()
    machine.captured = False
    assert len(devices.indices(gpu, 2000)) == 2048
    assert first() is not None


def test_the_first_call_may_be_inside_a_capture(machine):
    machine.captured = True
    assert apart(*(devices.counts(CPU, 24) for _ in range(3)))
    assert not devices._counts  # nothing is kept of the graph's memory


@pytest.mark.parametrize("captured", [False, True])
def test_where_no_zeros_are_left_some_are_made(captured, machine, monkeypatch):
    monkeypatch.setattr(devices._Counts, "SIZE", 40)
    devices.counts(CPU, 24)
    machine.stream, machine.captured = 5, captured
    found = [devices.counts(CPU, 24) for _ in range(3)]
    assert apart(*found)
    kept = devices._counts[CPU].zeros
    assert all(apart(kept, x) for x in found)


def test_zeros_that_are_kept_may_be_counted_on_outside_of_inference_mode(machine):
    with torch.inference_mode():
        found = devices.counts(CPU, 4)
    assert not found.is_inference()
