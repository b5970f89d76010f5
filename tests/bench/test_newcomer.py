"""The first commands in an empty folder: each is timed in the clone, the first that fails is the last, and the page shows them."""

from bench import newcomer, records
from tilewise_papers import evidence


def test_commands_run_in_a_clone_until_one_fails(monkeypatch, tmp_path):
    (tmp_path / "origin").mkdir()
    monkeypatch.setattr(newcomer, "ROOT", tmp_path / "origin")
    newcomer.subprocess.run("git init --quiet . && echo hello > file", shell=True, cwd=tmp_path / "origin", check=True)
    add = "git add file && git -c user.name=a -c user.email=b commit --quiet --message c"
    newcomer.subprocess.run(add, shell=True, cwd=tmp_path / "origin", check=True)
    head, *found = newcomer.study(("grep -q hello file", "false", "touch never"), tmp_path)
    assert not records.faults(head)
    assert not [fault for r in found for fault in records.faults(r)]
    assert [(r["shape"]["command"], r["shape"]["exit"]) for r in found] == [
        ("git clone --quiet URL tilewise", 0),
        ("grep -q hello file", 0),
        ("false", 1),
    ]


def test_times_are_read_as_people_say_them():
    assert [evidence.clock(ms) for ms in (840.0, 59_000.0, 137_400.0)] == ["0.8 s", "59.0 s", "2 min 17 s"]
