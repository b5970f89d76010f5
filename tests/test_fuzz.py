"""The fuzzer finds what is wrong, and nothing where nothing is."""

import dataclasses

import pytest

from tests import fuzz
from tilewise.backends.cpu import Cpu, library
from tilewise.backends.triton import interpreting

if isinstance(library.load(), str):
    pytest.skip("no native library", allow_module_level=True)


def test_the_first_cases_are_right():
    result = fuzz.fuzz(fuzz.Target("cpu"), range(6), seconds=30)
    assert result["cases"] == 6
    assert not result["failures"]


@pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities that the mathematics selects away
def test_triton_is_searched_in_its_interpreter():
    result = fuzz.fuzz(fuzz.Target("triton"), range(3), seconds=60)
    assert result["counts"]["isa triton"] == 3
    assert not result["failures"]


def test_a_case_is_the_same_each_time():
    descriptions = [fuzz.draw_call(fuzz.Draw.of_case(3, fuzz.Target("cpu")))[1] for _ in range(2)]
    assert descriptions[0] == descriptions[1]


def test_only_calls_that_select_keys_are_drawn_if_so_asked(monkeypatch):
    seen, run = [], fuzz.run_call
    monkeypatch.setattr(fuzz, "run_call", lambda r, target, c, text: seen.append(c) or run(r, target, c, text))
    result = fuzz.fuzz(fuzz.Target("cpu", selected=True), range(12), seconds=30)
    assert not result["failures"]
    assert {c.p.paged for c in seen} == {False, True}
    assert all(c.p.spec.region.selections for c in seen)
    assert fuzz.Target("cpu", "avx2", selected=True).arguments == "--backend cpu --isa avx2 --selected"


def test_calls_are_counted_by_their_kind():
    result = fuzz.fuzz(fuzz.Target("cpu"), range(40), seconds=60, kinds=("mapped", "strided"), calls=4)
    assert list(result["kinds"]) == ["mapped", "strided"]
    assert sum(of["calls"] for of in result["kinds"].values()) == 4
    assert result["kinds"]["mapped"]["calls"]
    assert result["kinds"]["strided"]["calls"]


def test_a_wrong_result_is_a_failure_with_its_case(monkeypatch, capsys):
    forward = Cpu.forward
    monkeypatch.setattr(Cpu, "forward", lambda *a: dataclasses.replace(out := forward(*a), o=out.o * 1.1))
    result = fuzz.fuzz(fuzz.Target("cpu"), range(3), seconds=30)
    assert result["failures"]
    assert sum(of["failed"] for of in result["kinds"].values()) == len(result["failures"])
    number = next(iter(result["failures"]))
    assert f"python -m tests.fuzz --backend cpu --case {number}" in capsys.readouterr().out
