"""What holds for every test on a GPU."""

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those on a GPU that may take minutes first: several processes are done when the last one is."""
    items.sort(key=lambda item: not (item.get_closest_marker("gpu") and item.get_closest_marker("timeout")))


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Several processes share the GPU: what a test's reference took goes back to it."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
