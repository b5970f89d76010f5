"""`tilewise show`: a mask in the terminal or as a PNG, and one clear line for a mistake."""

from tests.cli.test_main import failed
from tilewise import cli


def test_show_draws_the_tiles_and_says_how_many_and_the_bytes(capsys):
    assert cli.main(["show", "causal() & window(256, 0)", "--seqlen", "1024", "--tile", "128"]) == 0
    said = capsys.readouterr().out
    assert "▒▒██▒▒··" in said
    assert "7 full (11%), 14 partial (22%), 43 skipped (67%)" in said
    assert "1.82 MiB moved, 4.5 MiB with every tile visited" in said


def test_show_draws_a_score_alone(capsys):
    assert cli.main(["show", "--score", "alibi([1, 0.5])", "--head", "1", "--seqlen", "64", "--tile", "32"]) == 0
    assert "score alibi([1, 0.5]) at s = 0: from -16 (blank) to 0 (full)" in capsys.readouterr().out


def test_show_writes_a_png(capsys, tmp_path):
    path = tmp_path / "mask.png"
    assert cli.main(["show", "causal()", "--score", "softcap(30)", "--png", str(path)]) == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_show_refuses_in_one_line(capsys):
    assert "what is to be shown?" in failed(capsys, "show")
    assert "head_dim must be at least 1, got -7" in failed(capsys, "show", "causal()", "--head-dim", "-7")
    assert "a mask is made of causal, window" in failed(capsys, "show", "print(1)")
    assert "must be seqlen_k = 1024" in failed(capsys, "show", "documents([0, 1])")
