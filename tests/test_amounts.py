"""Amounts with three digits and a unit that fits."""

import pytest

from tilewise.amounts import in_bytes, in_flop


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1000 << 10, "1,000 KiB"),
        ((1 << 20) - 1, "1,024 KiB"), (144 << 20, "144 MiB"), (1856 << 20, "1.81 GiB"), (1 << 40, "1 TiB"), (5000 << 40, "5,000 TiB"),
    ],
)  # fmt: skip
def test_bytes_have_a_binary_unit_and_no_exponent(size, said):
    assert in_bytes(size) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (34.4e9, "34.4 GFLOP"), (2.81e14, "281 TFLOP"), (999.7e9, "1,000 GFLOP"), (5e22, "50,000 EFLOP")],
)  # fmt: skip
def test_operations_have_a_decimal_unit_and_no_exponent(count, said):
    assert in_flop(count) == said
