"""What holds for every test."""

import os
import signal
import sys

import pytest

from tests.interpreter import quicken

# A shell ignores Ctrl-C in what it starts in the background, and so would every process below; some tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Triton's kernels are interpreted, on CPU tensors, unless GPU tests are asked for: which, is settled when Triton is imported, for
    the whole process."""
    if "triton" not in sys.modules and "not gpu" in config.option.markexpr:
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish(session):
    """Spares what tests would compute again and again, where a module of theirs has imported it."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        quicken()
    if "tilewise.accuracy" in sys.modules:
        from tests.oracles import remember

        remember()


@pytest.fixture(autouse=True)
def _nothing_is_decided():
    """Tests exchange backends and their answers: what one test's calls decided is not kept for the next."""
    if "tilewise.dispatch" in sys.modules:
        sys.modules["tilewise.dispatch"].forget()
