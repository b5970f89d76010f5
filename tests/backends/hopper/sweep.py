"""Every shipped kernel on the emulated machine, by smaller calls of the kinds that a GPU checks: what to run after a change of a
kernel where there is no GPU. `python -m tests.backends.hopper.sweep [--only NAME] [--jobs 2]`; some minutes; exit code 1: one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from bench.testing import Call
from tests.backends.hopper.test_backward import emulate_kernels, wrong
from tests.backends.hopper.test_decoding import emulate as emulate_decoding
from tests.backends.hopper.test_forward import emulate_kernel
from tests.backends.hopper.test_latent import emulate as emulate_latent
from tests.backends.hopper.test_pages import emulate_pages
from tests.judge.hopper import Sizes, check_calls
from tilewise import accuracy
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.decoding import config as decoding_config
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.latent import config as latent_config
from tilewise.backends.hopper.latent.config import LatentConfig

EMULATED = Sizes(
    shapes=[(2, 150, 400, 4, 2), (1, 300, 130, 3, 1), (1, 333, 333, 2, 2), (1, 5, 700, 8, 1)],
    paged=[(1, [(70, 200), (1, 5), (0, 9), (130, 0), (64, 64)], 37), (2, [(150, 400)], 0)],
    packed=[([(70, 200), (1, 5), (0, 9), (130, 0), (64, 64)], 37)],
    device="cpu",
)
CTAS = 3


def form_of(c: Call, x: Config | Backward) -> str:
    if x.packed or x.form == "bits":  # of any mask
        return x.form
    return backward_config.form_of(c.p) if isinstance(x, Backward) else config.keys_of(c.p)[0]


def of_the_kernel(x: Config | Backward) -> Iterator[tuple[str, Call]]:
    """Calls, cut to the keys that anyone sees, may turn out to be another form's."""
    for label, c in check_calls(x, EMULATED):
        c = c if isinstance(x, Backward) else c.forward_only()
        if form_of(c, x) == x.form:
            yield label, c


def faults(c: Call, x: Config | Backward) -> list[str]:
    if isinstance(x, Backward):
        return wrong(c, emulate_kernels(c, x, CTAS))
    if isinstance(x, LatentConfig):
        out = emulate_latent(c, x.splits(1))
    elif isinstance(x, DecodingConfig):
        out = emulate_decoding(c, CTAS, kernel=x)
    else:
        out = emulate_pages(c, x, CTAS) if x.paged else emulate_kernel(c, x, CTAS)
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(out, None))
    return [str(e) for e in errors if not e.ok]


def sweep(x: Config | Backward) -> tuple[str, int, float, list[str]]:
    """``(name, calls, seconds, what is wrong)``."""
    began, calls, found = time.monotonic(), 0, []
    for label, c in of_the_kernel(x):
        calls += 1
        try:
            found += [f"{label}: {fault}" for fault in faults(c, x)]
        except Exception:
            found.append(f"{label}: {traceback.format_exc()[-600:]}")
    return x.name, calls, time.monotonic() - began, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    # One dtype: the emulated machine rounds P to the inputs' in either.
    every = [
        x
        for x in (*config.shipped(), *latent_config.shipped(), *decoding_config.shipped(), *backward_config.shipped())
        if x.dtype == "bf16" and options.only in x.name
    ]
    total, bad = 0, 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, calls, seconds, found in pool.map(sweep, every):
            total, bad = total + calls, bad + bool(found)
            print(
                f"{'FAIL' if found else 'ok  '} {name:66} {calls:3} calls {seconds:5.1f} s  {'; '.join(found[:2])}",
                flush=True,
            )
    print(f"{len(every)} kernels, {total} calls, {bad} kernels wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
