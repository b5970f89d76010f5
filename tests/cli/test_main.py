"""The command line: one clear line for a mistake, JSON for programs, an exit code for what was judged."""

import importlib.util
import json
import runpy
import subprocess
import sys

import pytest
import torch

import tilewise as tw
from bench import bench
from tilewise import cli, settings
from tilewise.cli import checkout, doctor
from tilewise.cli.options import from_dataclass


def failed(capsys, *arguments):
    """Runs a command that must fail as a user's mistake does; returns its line on stderr."""
    assert cli.main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("tilewise: ")
    return line


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(
        command in page for command in ("demo", "explain", "show", "verify", "doctor", "kernels", "bench", "tune")
    )


def test_commands_run_where_python_drops_docstrings_and_where_nobody_has_a_home(monkeypatch):
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "tilewise", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TILEWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(settings.Path, "home", no_home)
    assert not settings.cache_folder().exists()
    assert "set HOME or TILEWISE_CACHE" in str(settings.cache_folder())
    assert doctor._without_home("~") == "~"
    assert doctor._caches()


def test_a_setting_with_a_wrong_value_is_named(monkeypatch):
    monkeypatch.setenv("TILEWISE_CPU_POOL", "nope")
    with pytest.raises(ValueError, match="TILEWISE_CPU_POOL=nope: it is torch or own"):
        settings.cpu_pool()


def test_without_the_papers_io_says_how_to_get_them_and_the_other_commands_run(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tilewise_papers" else find(name))
    monkeypatch.setitem(sys.modules, "tilewise_papers", None)
    assert "package tilewise_papers, which is not installed here: clone the repository" in failed(capsys, "io")
    assert cli.main(["show", "causal()", "--seqlen", "4", "--tile", "4"]) == 0


def test_version_names_the_package_and_torch(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tilewise {tw.__version__}, torch {torch.__version__}\n"


def test_python_m_tilewise_is_the_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["anything", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("tilewise", run_name="__main__")
    assert capsys.readouterr().out == f"tilewise {tw.__version__}, torch {torch.__version__}\n"


def test_help_flows_however_the_docstring_is_broken_into_lines(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert "are measured and judged. Exit code 1: a goal falls short" in " ".join(capsys.readouterr().out.split())
    assert "the cases of\n" not in from_dataclass(bench.bench).__doc__


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain", "--dtype", "f3"], "--dtype f3: allowed are float16, bfloat16"),
        (["explain", "--heads-k", "3"], "heads of q (8) must be a positive multiple of heads of k (3)"),
        (["explain", "--heads", "-1"], "--heads is negative"),
        (["explain", "--seqlen", "many"], "Invalid value for '--seqlen'"),
        (["explain", "--device", "toaster"], "torch knows no such device"),
        (["explain", "--device", "meta"], "commands run on cpu and cuda"),
        (["explain", "--backend", "hoper"], "'hoper' does not exist"),
        (["explain", "--sequence", "5"], "No such option: --sequence"),
        (["explain", "--sequence", "5"], "(see tilewise explain --help)"),
        (["explain", "--mask", "causal"], "a mask is made of causal, window"),
        (["explore"], "No such command 'explore'"),
        (["bench", "--case", "h200-d64-n512-ful"], "near it: h200-d64-n512-full"),
        (["bench", "--case", "alibi"], "near it: cpu-fp32-d64-n2048-alibi"),
        (["bench", "--case", "xyzzy"], "`tilewise bench --list` names them"),
        (["bench", "--tag", "h100"], "no case carries the tag 'h100'"),
        (["bench", "--tag", "cpu", "--tag", "h200"], "no case for cpu carries all of the tags cpu, h200"),
        (["bench", "--case", "contract-one-full", "--contestant", "fa9"], "no contestant is called fa9; there are"),
        (["bench", "--check", "no/such/file"], "no/such/file cannot be read"),
        (["demo", "--steps", "0"], "Invalid value for '--steps'"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, says):
    assert says in failed(capsys, *arguments)


def test_a_device_that_is_not_there_is_a_mistake(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "torch sees no CUDA device here" in failed(capsys, "explain", "--device", "cuda")


def test_outside_a_checkout_the_user_is_told_to_clone(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(checkout, "__file__", str(tmp_path / "a" / "b" / "c" / "checkout.py"))
    monkeypatch.chdir(tmp_path)
    for command in (["demo"], ["bench"]):
        assert "clone the repository and run `make demo`" in failed(capsys, *command)


def test_inside_a_clone_it_is_found_from_any_folder_of_it(monkeypatch, tmp_path):
    clone = tmp_path / "clone"
    (clone / "bench").mkdir(parents=True)
    (clone / "src" / "tilewise").mkdir(parents=True)
    (clone / "bench" / "cases.py").touch()
    monkeypatch.setattr(checkout, "__file__", str(tmp_path / "a" / "b" / "c" / "checkout.py"))
    monkeypatch.chdir(clone / "src" / "tilewise")
    assert checkout.root() == clone


def test_explain_json_has_the_backend_its_tiles_and_the_refusals(capsys):
    sizes = ["--seqlen", "4096", "--heads", "8", "--head-dim", "64", "--causal", "--window", "100", "--backward"]
    assert cli.main(["explain", "--device", "cpu", "--json", *sizes]) == 0
    told = json.loads(capsys.readouterr().out)
    work, others = {"flops", "kept_flops", "traffic_bytes"}, {"pieces", "refused", "tangents", "second"}
    assert {"problem", "device", "backend", "tiles", "forward", *work, *others} == set(told)
    assert told["backend"]
    rows = torch.arange(4096)
    assert told["kept_flops"] == 4 * 8 * 64 * int((rows.clamp(max=100) + 1).sum())
    assert told["forward"] is None  # of the backend that has both passes
    assert "window" in told["problem"]
    assert "causal" in told["problem"]


def test_explain_takes_masks_and_scores_as_show_does(capsys):
    call = ["--mask", "causal() & key_lengths([100])", "--window", "50", "--score", "alibi([0.5, 1])", "--heads", "2"]
    assert cli.main(["explain", "--device", "cpu", "--dropout", "0.1", *call]) == 0
    told = capsys.readouterr().out
    assert "mask causal() & key_range(0, int0[b]) & window(50, 0) with int0 (1,)" in told.replace("int0[0]", "int0[b]")
    assert "score s - (float0[h] * abs((i + off) - j)) with float0 (2,)" in told
    assert "dropout_p 0.1" in told


def test_explain_needs_no_memory_for_the_sizes_it_explains(capsys):
    huge = ["--batch", "64", "--seqlen", "1000000", "--heads", "128", "--head-dim", "256"]
    assert cli.main(["explain", "--device", "cpu", *huge]) == 0
    assert "1000000" in capsys.readouterr().out


def test_reasons_on_several_lines_become_one(capsys):
    assert cli._fail("two reasons\n    first\n\n  second\n") == 2
    assert capsys.readouterr().err == "tilewise: two reasons; first; second\n"
