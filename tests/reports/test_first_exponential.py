"""The first call of a vectorised function in a process: found here, by bits that one run in some had otherwise."""

from __future__ import annotations

import subprocess
import sys

FIRST = """
import torch
import tilewise
torch.set_num_threads(2)
x = -torch.rand(2, 64, 128)
first = torch.exp(x)
assert torch.equal(first, torch.exp(x))
"""


def test_the_first_exponential_over_two_threads_has_the_bits_of_the_second():
    """Without the one in device.py, it differs in one process of eight."""
    for _ in range(4):
        subprocess.run([sys.executable, "-c", FIRST], check=True)
