"""How many tests hold each drop-in, as ``tests/doors.json`` and the table in docs/switching.md: the tests are run, and those that pass
are counted. A test that expects an error holds a refusal (or a wrong call, with its reason); the others hold that results are right.

python -m tests.doors --write [FILE ...]     all files, some minutes, or those named
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import with_block

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "doors.json"
PAGE = ROOT / "docs" / "switching.md"

# A row of the table: what is called, and the file whose tests hold it.
DOORS = {
    "`compat.flash_attn`, six functions and `bert_padding`": "tests/compat/test_flash_attn.py",
    "its functions over a cache": "tests/compat/test_flash_attn_cache.py",
    "its private functions, FlashAttention-3 and 4, installation": "tests/compat/test_flash_attn_doors.py",
    "`compat.sdpa`, `patch()`, `nn.MultiheadAttention`": "tests/compat/test_sdpa.py",
    "`compat.torch_provider`": "tests/compat/test_torch_provider.py",
    "`compat.flex_attention`": "tests/compat/test_flex_attention.py",
    "mask_mods and score_mods of FlexAttention": "tests/compat/test_flex.py",
    "nested tensors": "tests/test_nested.py",
    "`compat.xformers` and `compat.layouts`": "tests/compat/test_xformers.py",
    "`compat.cuequivariance`": "tests/compat/test_cuequivariance.py",
    "`compat.diffusers`, with diffusers 0.42": "tests/compat/test_diffusers.py",
    "`compat.vllm`, with vLLM 0.33": "tests/compat/test_vllm.py",
    "`compat.sglang`, with SGLang 0.5.23": "tests/compat/test_sglang.py",
    "`compat.transformers`": "tests/compat/test_transformers.py",
    "its continuous batching, with transformers 5.24": "tests/compat/test_transformers_continuous.py",
    "`tilewise.jax`, with jax 0.10": "tests/test_jax.py",
}


class Count:
    """A plugin of pytest's that counts the tests that pass, by file and by what they hold."""

    def __init__(self):
        self.kind: dict[str, str] = {}
        self.passed: dict[str, Counter] = {file: Counter() for file in DOORS.values()}
        self.others: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            expects = "pytest.raises" in inspect.getsource(item.function)
            self.kind[item.nodeid] = "refused" if expects else "right"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed[report.nodeid.partition("::")[0]][self.kind[report.nodeid]] += 1
        elif report.when == "call" or report.failed:
            self.others.append(report.nodeid)


def counted(files: list[str]) -> dict[str, dict[str, int]]:
    """The tests of each of the files that pass, as ``right`` and ``refused``.

    Raises:
        RuntimeError: a test did not pass, or none of a file ran, since its package is not installed.
    """
    count = Count()
    pytest.main(["-q", "-p", "no:xdist", *[str(ROOT / file) for file in files]], plugins=[count])
    if count.others:
        raise RuntimeError(f"these tests did not pass: {', '.join(count.others)}")
    missing = [file for file in files if not count.passed[file]]
    if missing:
        raise RuntimeError(f"nothing ran of {', '.join(missing)}; install the package that it imports")
    return {
        file: {kind: passed[kind] for kind in ("right", "refused")}
        for file, passed in count.passed.items()
        if file in files
    }


def table(record: dict[str, dict[str, int]]) -> str:
    rows = [
        f"| {door} | {record[file]['right']} | {record[file]['refused']} | [{Path(file).name}](../{file}) |"
        for door, file in DOORS.items()
    ]
    return "\n".join(
        [
            "| door | cases that are right | cases that are refused, with the reason | held by |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )


def page(text: str, record: dict[str, dict[str, int]]) -> str:
    return with_block(text, "doors", table(record))


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"] or not set(sys.argv[2:]) <= set(DOORS.values()):
        sys.exit(__doc__)
    record = json.loads(FILE.read_text(encoding="utf-8")) | counted(sys.argv[2:] or list(DOORS.values()))
    FILE.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
