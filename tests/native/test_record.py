"""What is recorded of a call of the cpu library is what it reads and writes, to the byte."""

import ctypes

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, qkv
from tests.native.record import Recording
from tilewise.backends.cpu import Cpu, library

if isinstance(library.load(), str):
    pytest.skip("no native library", allow_module_level=True)


def recordings(monkeypatch, c) -> dict[str, Recording]:
    """The recordings of a forward and a backward by function, as they are before the library runs."""
    found, run = {}, library.Library.run

    def recorded(self, name, native, *more) -> None:
        found[name] = Recording(native, name, more)
        run(self, name, native, *more)

    monkeypatch.setattr(library.Library, "run", recorded)
    out = Cpu().forward(c.p, c.t)
    Cpu().backward(c.p, c.t, out, c.do, c.dlse)
    return found


def sizes(recording: Recording) -> dict[int, int]:
    return {x.address: len(x.before) for x in recording.blocks}


def test_strided_inputs_end_with_their_last_element(monkeypatch):
    q, k, v = qkv(hk=4)
    far = torch.cat([q, q], -1)[..., :16]
    found = recordings(monkeypatch, call(far, k[:, :, :1].expand(-1, -1, 4, -1), v))["forward"].call
    size = sizes(Recording(found, "forward"))
    assert size[found.q.data] == 4 * (2 * 70 * 4 * 32 - 16)
    assert size[found.k.data] == 4 * ((70 * 2 - 1) * 4 * 16 + 16)
    assert size[found.v.data] == 4 * v.numel()


def test_leaves_masks_and_sums_are_recorded_whole(monkeypatch):
    table = normal(4, 9).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + table[h, (i + j) % 9])
    found = recordings(monkeypatch, call(*qkv(), score=score, mask=lambda b, h, i, j: (i + j) % 2 == 0))
    backward = found["backward"]
    size = sizes(backward)
    gradients = backward.call.program.gradients[0]
    assert size[gradients.data] == 8 * 2 * 2 * 36  # a sum in fp64 for each (batch, key head)
    assert size[backward.call.status] == -(-70 // backward.call.tile_m) * -(-70 // backward.call.tile_n)
    assert {x.address for x in backward.blocks if x.written} >= {gradients.data, backward.call.dk.data}


def test_a_backward_of_selected_keys_is_recorded_with_every_part_of_its_sums(monkeypatch):
    c = call(*qkv(1, 9, 16, 2, 1, 16, 16), mask=tw.selected(torch.arange(4).expand(1, 1, 9, -1)))
    backward = recordings(monkeypatch, c)["backward"]
    size, native = sizes(backward), backward.call
    assert native.shares == 8
    assert size[native.dk.data] == size[native.dv.data] == 4 * 8 * 16 * 16
    assert size[native.block_table] == 4 * 9 * 4
    assert size[native.hi.data] == 4 * 9


def test_forward_mode_is_recorded_with_the_tangents_that_it_reads_and_writes(monkeypatch):
    found, run = [], library.Library.run
    monkeypatch.setattr(library.Library, "run", lambda *a: (found.append(Recording(a[2], a[1], a[3:])), run(*a)))
    q, k, v = qkv()
    _, tangent = torch.func.jvp(lambda q: tw.attention(q, k, v, causal=True, backend="cpu"), (q,), (normal(*q.shape),))
    recording = found[-1]
    (moved,), size = recording.more, sizes(recording)
    assert recording.name == "jvp"
    assert recording.blocks[1].address == ctypes.addressof(moved)
    assert size[moved.q.data] == 4 * q.numel()
    assert {x.address for x in recording.blocks if x.written} == {moved.o.data, moved.lse}
    assert size[moved.o.data] == 4 * tangent.numel()
