"""Forked children that hang, as PyTorch's do whose parent had OpenMP's threads: those of the parent are gone, and OpenMP waits for them."""

import os
import subprocess
import sys

import pytest

from tilewise.backends.cpu import library

# What the parent does before it forks; its threads are torch's, and none of its calls ours.
PARENTS = {
    "torch alone": "",
    "tilewise imported before": "import tilewise as tw\n",
    "the library imported, not loaded": "import tilewise.backends.cpu.library\n",
    "a fork of a fork": "if os.fork():\n    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n",
}
SCRIPT = """
import os, torch
{parent}
torch.set_num_threads(2)
torch.rand(1 << 20).exp()
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
import tilewise as tw
torch.set_num_threads({threads})
q = torch.rand(1, {rows}, 2, 16, requires_grad=True)
o = tw.attention(q, q, q, causal=True)
o[0, 0].sum().backward()
close = torch.allclose(o[:, 0], q[:, 0]) and torch.allclose(q.grad[0, 0], torch.ones(2, 16), atol=1e-4)
os._exit(0 if close else 1)
"""


@pytest.mark.skipif(library.openmp() is None, reason="torch computes on no OpenMP that is known here")
@pytest.mark.parametrize("parent", PARENTS.values(), ids=PARENTS)
def test_fork_a_child_computes_whose_parent_used_the_threads_of_torch_alone(parent):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(parent=parent, threads=2, rows=300)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(library.openmp() is None, reason="torch computes on no OpenMP that is known here")
def test_fork_a_child_with_one_thread_computes_on_large_tensors():
    """With more threads PyTorch's own operations on over 32,768 elements hang there."""
    script = SCRIPT.format(parent="", threads=1, rows=4000)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="Linux says in /proc who was forked")
def test_fork_a_process_knows_whether_it_is_one():
    script = (
        "import os\nfrom tilewise.backends.cpu.library import openmp, was_forked\nprint(was_forked(), openmp() is None, flush=True)\n"
        "if not os.fork():\n    print(was_forked(), openmp() is None, flush=True)\n    os._exit(0)\nos.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == [f"False {library.openmp() is None}", "True True"]
