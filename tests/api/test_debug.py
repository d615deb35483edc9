"""`Job.debug`, which a notebook calls."""

import io
from pathlib import Path

import pytest

import fleetrun

pytestmark = pytest.mark.slow


def stops(value: int) -> int:
    breakpoint()
    return value


def fails(value: int) -> float:
    return 1 / value


@pytest.mark.parametrize(("function", "debug"), [(stops, "on"), (fails, "error")])
def test_a_function_is_debugged_from_its_caller(function, debug, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("sys.stdin", io.StringIO("p value\n"))
    job = fleetrun.launch(function, [0], debug=debug)
    assert job.debug() == "detached"
    assert "(Pdb) 0\n" in capsys.readouterr().out
    if debug == "on":
        assert job.wait().values == [0]
    else:
        with pytest.raises(fleetrun.JobError, match="division by zero"):
            job.wait()
    with pytest.raises(fleetrun.LaunchError, match="has ended"):
        job.debug()
