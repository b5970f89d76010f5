"""The C header: a program in C, compiled with all warnings, computes what the reference does."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, qkv
from tilewise.backends.cpu import library

if isinstance(library.load(), str):
    pytest.skip("no native library", allow_module_level=True)
HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or pytest.skip("no C compiler", allow_module_level=True)


@pytest.fixture(scope="module")
def attend(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("attend") / "attend"
    # An install has the header by this name.
    shutil.copy(Path(library.__file__).with_name("native") / "interface.h", path.with_name("tilewise.h"))
    warnings = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
    files = (HERE / "attend.c", library._FILE, f"-Wl,-rpath,{library._FILE.parent}")
    subprocess.run([COMPILER, *warnings, "-I", path.parent, *files, "-o", path], check=True)
    return path


@pytest.mark.parametrize("sizes", [(600, 600), (40, 300), (300, 40)], ids=str)
def test_a_program_in_c_computes_a_causal_window_of_grouped_heads_and_its_gradients(attend, sizes):
    heads, left = (4, 2), 25
    q, k, v = qkv(1, *sizes, *heads, 64, 64)
    unseen = max(0, sizes[1] - sizes[0] - left)
    k[:, :unseen] = v[:, :unseen] = torch.nan
    c = call(q, k, v, normal(*q.shape, seed=4), mask=tw.window(left=left, right=0))
    c = replace(c, dlse=torch.zeros_like(c.dlse))
    arguments = map(str, (*sizes, *heads, 64, left))
    given = b"".join(x.numpy().tobytes() for x in (q, k, v, c.do))
    done = subprocess.run([attend, *arguments], input=given, capture_output=True, check=True)
    like = {"o": q, "lse": c.dlse, "dq": q, "dk": k, "dv": v}
    parts = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).split([x.numel() for x in like.values()])
    found = {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}
    assert [str(e) for e in c.expected().judge(found) if not e.ok] == []
