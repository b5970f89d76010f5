"""`tilewise doctor` reports a machine and an installation, most of all broken ones."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tilewise import cli, dispatch, selfcheck
from tilewise.backends.cpu import library
from tilewise.backends.hopper.host import kernel_files
from tilewise.cli import doctor
from tilewise.selfcheck import Report, Row

RIGHT = Row("portable", "bfloat16", "causal", True, "dq", 1e-3, 2e-3, 4e-3)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def checked(monkeypatch, no_gpu):
    def report(*rows):
        monkeypatch.setattr(selfcheck, "verify", lambda device, dtypes, features: Report("a machine", rows))

    report(RIGHT)
    return report


def told(capsys, code: int = 0) -> dict:
    assert cli.main(["doctor", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_text_and_the_json_hold_the_same_sections(checked, capsys):
    assert set(told(capsys)) == set(doctor.SECTIONS)
    assert cli.main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert [line.split()[0] for line in page.splitlines() if line[0] != " "] == list(doctor.SECTIONS)
    assert f"tilewise: {tw.__version__}" in page
    assert f"torch: {metadata.version('torch')}" in page  # torch.__version__ may have the CUDA of the build behind it


def test_the_check_runs_every_backend_of_this_machine(no_gpu, capsys):
    check = told(capsys)["check"]
    assert check.pop("seconds") > 0
    assert "agrees" in check["portable on cpu"]
    assert set(check) == {f"{row.name} on cpu" for row in dispatch.BACKENDS if "cpu" in (row.device_types or ("cpu",))}


def test_a_wrong_backend_is_exit_code_1(checked, capsys):
    checked(RIGHT, Row("cpu", "bfloat16", "causal", False, "dk", 1.0, 2e-3, 4e-3))
    check = told(capsys, code=1)["check"]
    assert check["cpu on cpu"] == "wrong: dk 1.0e+00, allowed 4.0e-03"


def test_a_backend_that_refuses_says_every_reason(checked, capsys, monkeypatch):
    monkeypatch.setattr(library, "load", lambda: "its library is not there")
    report = told(capsys)
    assert report["backends"]["cpu on cpu"] == ["its library is not there"]
    assert report["backends"]["hopper on cpu"] == ["runs on cuda, q is on cpu"]
    assert report["backends"]["portable on cpu"] == "runs"
    assert report["libraries"]["cpu"] == "its library is not there"


def test_a_backend_that_cannot_be_imported_is_reported_and_the_rest_too(checked, capsys, monkeypatch):
    found = dispatch.backend

    def broken(name):
        if name == "triton":
            raise ImportError("libtriton.so: undefined symbol")
        return found(name)

    monkeypatch.setattr(dispatch, "backend", broken)
    backends = told(capsys)["backends"]
    assert backends["triton on cpu"] == ["ImportError: libtriton.so: undefined symbol"]
    assert backends["portable on cpu"] == "runs"


def test_a_section_that_fails_is_part_of_the_report(checked, capsys, monkeypatch):
    def fails():
        raise OSError("no such disk")

    monkeypatch.setitem(doctor.SECTIONS, "caches", fails)
    assert told(capsys)["caches"] == {"error": "OSError: no such disk"}
    monkeypatch.setitem(doctor.SECTIONS, "check", fails)
    assert told(capsys, code=1)["versions"]["tilewise"].startswith(tw.__version__)


def test_kernels_and_caches_are_counted(checked, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_HOPPER_KERNELS", str(tmp_path / "kernels"))
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    for folder in (kernel_files.folder(), kernel_files.cache()):
        folder.mkdir(parents=True)
        (folder / "a.kernel").write_bytes(b"12345")
    kernel_files.index.cache_clear()
    report = told(capsys)
    kernel_files.index.cache_clear()
    kernels = report["kernels"]
    assert (kernels["shipped"], kernels["compiled here"]) == (0, 1)
    assert kernels["not used"] == "1 files that were compiled from other sources"
    assert report["caches"][str(tmp_path / "cache")] == {"files": 1, "bytes": 5}
    assert report["settings"]["TILEWISE_CACHE"] == str(tmp_path / "cache")


def test_the_home_folder_is_a_tilde(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    assert doctor._without_home("/home/ada/x /home/adam/y /home/ada") == "~/x /home/adam/y ~"
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert doctor._without_home("/a/b") == "/a/b"


@pytest.mark.parametrize(("capability", "says"), [((9, 0), "runs"), ((8, 0), "sm_80"), ((10, 0), "sm_100")])
def test_kernels_that_have_never_run_on_such_a_gpu_are_named(capability, says, monkeypatch):
    from tilewise import device as devices

    monkeypatch.setattr(devices, "of", lambda device: devices.Device("a GPU", "cuda", 1, capability=capability))
    said = doctor._runs("triton", torch.device("cuda"))
    assert ("have never run" in said) == (says != "runs")
    assert says in said
