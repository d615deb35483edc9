"""`fleetrun plot`: which job, which file, and what is said."""

import pytest

from fleetrun.errors import LaunchError, UsageError
from fleetrun.verbs import answer
from tests.plots.record import launch, over, training, write

pytestmark = pytest.mark.slow  # matplotlib is imported


@pytest.fixture(autouse=True)
def _nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)


def test_the_job_that_ran_last_as_a_picture_by_its_name(tmp_path, capsys):
    write(tmp_path / "log", training(["trainer.0"]))
    assert answer("plot", []) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/ads.abcdef.png\n", "as any program can use it"
    assert "The plot of job ads, for an image viewer" in said.err
    assert (tmp_path / "ads.abcdef.png").read_bytes().startswith(b"\x89PNG")


def test_a_job_by_name_of_another_folder_into_another_file(tmp_path, capsys):
    write(tmp_path / "logs", training(["trainer.0"]))
    write(tmp_path / "logs", training(["trainer.0"]), "search", "bcdefg")
    assert answer("plot", ["sea", "--log-dir=logs", "-o", "b.svg"]) == 0
    assert "search  (bcdefg)" in (tmp_path / "b.svg").read_text()
    assert capsys.readouterr().out == f"{tmp_path}/b.svg\n"


def test_one_without_progress_says_so(tmp_path, capsys):
    write(tmp_path / "log", [launch("trainer.0"), over(3)])
    assert answer("plot", []) == 0
    assert "No process reported progress" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["nobody"], LaunchError, "nobody"),
        (["--log_dir=empty"], LaunchError, "empty"),
        (["-o", "a.bmp"], UsageError, "a.bmp"),
        (["--no_such_option"], UsageError, "no_such_option"),
        (["a", "b"], UsageError, "b"),
    ],
)
def test_what_cannot_be(tmp_path, words, kind, said):
    write(tmp_path / "log", training(["trainer.0"]))
    with pytest.raises(kind, match=said):
        answer("plot", words)


def test_a_name_of_a_job_is_no_path(tmp_path, capsys):
    path = write(tmp_path / "log", training(["trainer.0"]))
    path.rename(path.with_name("-rf.abcdef.events.jsonl"))
    assert answer("plot", []) == 0
    assert capsys.readouterr().out == f"{tmp_path}/-rf.abcdef.png\n"


def test_help_is_a_page(capsys):
    assert answer("plot", ["--help"]) == 0
    page = capsys.readouterr().out
    assert "Examples:" in page
    assert "Exit codes:" in page
