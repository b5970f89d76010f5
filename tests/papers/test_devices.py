"""The table of devices, and sizes as users write them."""

from __future__ import annotations

import pytest

from tilewise_papers.devices import DEVICES, device, parse_bytes


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown device 'b300'; known are a100, h200, cpu"):
        device("b300")


@pytest.mark.parametrize(
    ("text", "size"),
    [("192KiB", 196608), ("192 kib", 196608), ("1.5MiB", 1572864), ("100kB", 100000), ("4096", 4096), ("64B", 64)],
)
def test_sizes_are_read_as_written(text: str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "KiB", "12 apples", "1KiBB", "-4KiB", "0", "nan", "inf", "1e999"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize("name", DEVICES)
def test_faster_levels_are_smaller_or_private_and_have_more_bandwidth(name: str):
    slow, sram, _ = device(name).levels
    assert sram.bytes < slow.bytes
    assert sram.bandwidth > slow.bandwidth
    assert device(name).matmul_flops > device(name).other_flops


def test_another_sram_changes_that_level_alone():
    a100, small = device("a100"), device("a100").with_sram(1024)
    assert small.sram_elements == 512
    assert (small.levels[0], small.levels[2], small.cores) == (a100.levels[0], a100.levels[2], a100.cores)
