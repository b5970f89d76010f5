"""The stand-in driver that Hopper's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.hopper import standin
from tilewise.backends.hopper.host import driver


@pytest.fixture(scope="session")
def standin_folder(tmp_path_factory) -> Path:
    """The folder of the only stand-in driver and launcher of this process.

    The loader knows a library by its name: whatever asks for ``libcuda.so.1`` gets the first one that was loaded. A second
    stand-in would be reset and read by its test while launches go to the first.
    """
    folder = tmp_path_factory.mktemp("standin")
    standin.build(folder)
    return folder


@pytest.fixture
def cuda(standin_folder, monkeypatch) -> Iterator[standin.StandIn]:
    """The stand-in driver with an empty record; the launcher calls it on stream ``standin.STREAM`` + the device's number."""
    monkeypatch.setenv("TILEWISE_LAUNCHER", str(standin_folder / "launcher.so"))
    monkeypatch.setattr(driver, "stream_of", lambda device: standin.STREAM + device)
    driver.load.cache_clear()
    found = standin.StandIn(standin_folder)
    found.reset()
    yield found
    found.reset()
    driver.load.cache_clear()
