"""What holds for every test on a GPU."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Several processes share the GPU: what a test's reference took goes back to it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
