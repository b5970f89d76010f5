"""How a launch is laid out for the driver, held against a driver that only remembers; on a GPU tests/gpu compares results."""

import ctypes
import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tilewise.backends.triton.host import driver

KINDS = {
    "tensors": ("*bf16", "constexpr", ("*fp32", "*i32")),
    "sizes": ("i32", ("i32", "i32")),
    "scales": ("fp32", "fp32"),
    "view": "tensordesc<bf16[1, 1, 8, 16]>",
    "rest": "constexpr",
    "states": "*fp32",
    "F": "constexpr",
}
META = {"elem_size": 2, "elem_type": 9, "block_size": [1, 1, 8, 16], "swizzle": 3}


class Bundle(NamedTuple):
    q: Any
    k: Any
    leaves: Any


VIEW = SimpleNamespace(shape=[2, 4, 64, 16], strides=[4096, 1024, 16, 1])
ARGUMENTS = (Bundle(16, None, (32, 48)), (7, (9, 11)), (0.5, 2.0), VIEW, None, 64, object())
NAMES = ("tensors", "sizes", "scales", "view", "rest", "states", "F")
ADDRESSES = {"q": 100, "k": 0, "leaves[0]": 200, "leaves[1]": 300, "states": 400, "view": 500, "other": 600}
LENGTHS = [8, 8, 8, 4, 4, 4, 4, 4, 128, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8]


class Remembering:
    """What the driver is told of each parameter, and answers as it does of a kernel whose parameters have ``lengths``."""

    def __init__(self, lengths):
        self.lengths, self.launches, self.maps = lengths, [], []

    def cuFuncGetParamInfo(self, function, n, start, size):
        if n < len(self.lengths):
            ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = self.lengths[n]
        return int(n >= len(self.lengths))

    def cuTensorMapEncodeTiled(self, at, element, rank, base, whole, step, box, ones, *rest):
        self.maps.append((element, rank, base, list(whole), list(step[: rank - 1]), list(box), rest))
        ctypes.memmove(at, struct.pack("16Q", *[base] * 16), 128)
        return 0

    def cuLaunchKernelEx(self, how, function, values, _extra):
        each = ctypes.cast(values, ctypes.POINTER(ctypes.c_void_p))
        attributes = [(how.attributes[n].id, how.attributes[n].value[0]) for n in range(how.count)]
        fixed = [*how.grid, *how.block, how.shared, attributes]
        self.launches.append((fixed, [ctypes.string_at(each[n], x) for n, x in enumerate(self.lengths)]))
        return 0


@pytest.fixture
def remembering(monkeypatch):
    found = Remembering(LENGTHS)
    monkeypatch.setattr(driver, "library", lambda: found)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return found


def compiled(lengths=LENGTHS, **changes):
    metadata = {"num_warps": 4, "num_ctas": 1, "shared": 512, "global_scratch_size": 0, "profile_scratch_size": 0}
    metadata |= {"launch_pdl": False, "tensordesc_meta": [META]} | changes
    ptx = f".visible .entry some_kernel(\n{','.join(f'.param .b{8 * n} some_kernel_param' for n in lengths)}\n)\n.maxntid 128"
    source = SimpleNamespace(signature=dict(KINDS))
    return SimpleNamespace(function=5, metadata=SimpleNamespace(**metadata), src=source, asm={"ptx": ptx})


def test_a_later_launch_writes_the_addresses_and_nothing_else(remembering):
    prepared = driver.Prepared.of(compiled(), (3, 2, 1), ARGUMENTS, NAMES)
    assert prepared(ADDRESSES)
    assert prepared({name: x + (name != "view") for name, x in ADDRESSES.items()})
    for n, (fixed, values) in enumerate(remembering.launches):
        assert fixed == [3, 2, 1, 128, 1, 1, 512, []]
        numbers = [int.from_bytes(x, "little") for x in values]
        assert [numbers[k] for k in (0, 1, 2, 17)] == [100 + n, 200 + n, 300 + n, 400 + n]
        assert numbers[3:6] == [7, 9, 11]
        assert [struct.unpack("f", x)[0] for x in values[6:8]] == [0.5, 2.0]
        assert values[8] == struct.pack("16Q", *[500] * 16)
        assert numbers[9:17] == [*VIEW.shape, *VIEW.strides]
    # made once for an address: sizes from the last axis on, strides in bytes, swizzle, L2's promotion, zeros outside
    assert remembering.maps == [(8, 4, 500, [16, 64, 4, 2], [32, 2048, 8192], [16, 8, 1, 1], (0, 3, 2, 0))]


def test_an_address_goes_by_its_name_wherever_its_field_stands(remembering):
    class Reordered(NamedTuple):
        leaves: Any
        added: Any
        k: Any
        q: Any

    remembering.lengths = [8, 8, 8, 8, 8]
    other = compiled(remembering.lengths, tensordesc_meta=[])
    other.src.signature = {"tensors": (("*fp32", "*i32"), "constexpr", "constexpr", "*bf16"), "F": "constexpr"}
    prepared = driver.Prepared.of(other, (1, 1, 1), (Reordered((32, 48), None, None, 16), object()), ("tensors", "F"))
    assert prepared(ADDRESSES)
    values = [int.from_bytes(x, "little") for x in remembering.launches[0][1]]
    assert values[:3] == [ADDRESSES[name] for name in ("leaves[0]", "leaves[1]", "q")]


def test_a_kernel_that_overlaps_the_one_before_is_launched_so(remembering):
    prepared = driver.Prepared.of(compiled(launch_pdl=True), (3, 2, 1), ARGUMENTS, NAMES)
    assert prepared(ADDRESSES)
    assert remembering.launches[0][0][-1] == [(6, 1)]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@pytest.mark.parametrize(
    "change",
    [{"num_ctas": 2}, {"global_scratch_size": 8}, {"tensordesc_meta": []}],
    ids=["clusters", "scratch", "no-maps"],
)
def test_a_kernel_of_another_kind_goes_through_tritons_launcher(remembering, change):
    assert driver.Prepared.of(compiled(**change), (1, 1, 1), ARGUMENTS, NAMES) is None


@pytest.mark.parametrize("lengths", [LENGTHS[:-1], [*LENGTHS, 8], [8, 4, *LENGTHS[2:]]], ids=["less", "more", "other"])
def test_a_kernel_whose_parameters_are_others_is_not_launched(remembering, lengths):
    remembering.lengths = lengths
    assert driver.Prepared.of(compiled(lengths), (1, 1, 1), ARGUMENTS, NAMES) is None


def test_a_map_that_the_driver_refuses_is_not_launched(remembering, monkeypatch):
    monkeypatch.setattr(remembering, "cuTensorMapEncodeTiled", lambda *_: 1)
    prepared = driver.Prepared.of(compiled(), (1, 1, 1), ARGUMENTS, NAMES)
    assert not prepared(ADDRESSES)
    assert remembering.launches == []
