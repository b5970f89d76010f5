"""Statistics and meters."""

import contextlib
import gc
import types
import weakref

import pytest
import torch

from bench import measure


def test_median_and_quartiles_of_five():
    timing = measure.summarize([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (timing.low, timing.median, timing.high) == (2.0, 3.0, 4.0)


def test_one_sample_has_no_spread_and_none_is_an_error():
    timing = measure.summarize([2.0])
    assert (timing.low, timing.median, timing.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="no samples"):
        measure.summarize([])


def test_short_calls_are_repeated_within_a_sample_and_long_ones_are_not():
    assert measure.calls_for(1e-4, "cpu") == 20
    assert measure.calls_for(1e-4, "cuda") == 50
    assert measure.calls_for(1.0, "cuda") == measure.calls_for(1.0, "cpu") == 1
    assert measure.calls_for(0.0, "cpu") == 200


@pytest.mark.skipif(
    not measure.Path("/proc/self/clear_refs").exists(), reason="needs Linux's resettable high-water mark"
)
def test_each_round_times_all_contestants_in_an_order_of_its_own():
    told = []
    times = measure.in_turns(
        {"long": lambda: told.append("long") or sum(range(60000)), "short": lambda: told.append("short")},
        "cpu",
        rounds=8,
        budget_ms=0,  # one call a sample
    )
    assert told[:6] == ["long"] * 3 + ["short"] * 3
    rounds = {tuple(told[n : n + 2]) for n in range(6, len(told), 2)}
    assert len(told) == 6 + 8 * 2
    assert rounds == {("long", "short"), ("short", "long")}
    assert times["long"] > times["short"]


def test_peak_memory_sees_what_was_freed_again_and_forgets_earlier_peaks():
    size = 64 << 20
    earlier = torch.ones(4 * size, dtype=torch.uint8)
    del earlier
    measure._return_freed_memory()
    if measure._high_water() > measure._resident() + size:
        pytest.skip("this kernel does not reset a process's high-water mark")
    with measure.PeakMemory("cpu") as peak:
        inside = torch.ones(size, dtype=torch.uint8)
        del inside
    # Linux counts resident pages in batches per thread: a hundredth may be missing.
    assert 0.98 * size <= peak.bytes < 1.5 * size
    with measure.PeakMemory("cpu") as peak:
        pass
    assert peak.bytes < size // 4


def test_machine_names_what_a_reader_needs():
    found = measure.machine("cpu")
    assert found["versions"]["torch"] == torch.__version__
    assert {"device", "cores", "threads", "commit"} <= set(found)


def test_a_replay_keeps_what_its_graph_reads_and_the_next_capture_frees(monkeypatch):
    class Graph:
        def replay(self):
            pass

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"Stream": lambda: stream, "current_stream": lambda: stream, "CUDAGraph": Graph}
    fakes |= {"stream": contextlib.nullcontext, "graph": lambda graph, capture_error_mode: contextlib.nullcontext()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    inputs = [torch.ones(3)]
    alive = weakref.ref(inputs[0])
    replay, result = measure.captured(lambda x=inputs[0]: x.sum(), lambda: None)
    assert result == 3
    inputs.clear()
    gc.collect()
    replay()
    assert alive() is not None
    del replay
    gc.collect()
    assert alive() is None
