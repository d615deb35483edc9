"""`fleetrun doctor` as it is typed: alone, with others, beside a running job."""

import json
import re
import signal

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

ANY = ("--no_python", "true")
"""A program for which torch is not asked."""


def bad(launch: Launch) -> dict[str, str]:
    """What failed, out of the JSON document."""
    rows = [each for section in json.loads(launch.out)["sections"] for each in section["checks"]]
    return {row["check"]: row["found"] for row in rows if row["verdict"] == "fail"}


def test_alone(fleetrun: Fleetrun) -> None:
    package = fleetrun.folder / "path" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '9.9'\nraise ImportError('\\x1b[31mbroken')\n")
    env = {"PYTHONPATH": str(package.parent)}
    before = sorted(fleetrun.folder.iterdir())
    done = fleetrun.run("doctor", "--nproc_per_node", "2", env=env)
    assert done.wait() == 1, done
    assert re.search(r"^  FAIL  torch +ImportError: broken$", done.out, re.MULTILINE)
    assert "2 processes" in done.out
    assert "1 failed" in done.out
    assert "\x1b" not in done.out
    left = {path.name for path in fleetrun.folder.iterdir()} - {path.name for path in before}
    assert {name for name in left if not name.startswith(".")} <= {"run"}, "no log dir is made"


def test_what_is_wrong_has_a_name_and_a_code(fleetrun: Fleetrun) -> None:
    (fleetrun.folder / "log").touch()
    done = fleetrun.run("doctor", "--json", "--nproc_per_node", "2", "--no_python", "no_such_program")
    assert done.wait() == 1
    assert {"script", "log dir"} <= bad(done).keys()
    assert json.loads(done.out)["facts"]["cores"]["visible"] >= 1
    for words, code, text in (
        (("--nosuch",), 2, "--nosuch"),
        (("--help",), 0, "Exit codes:"),
        (("--nproc_per_node", "2", "--help"), 0, "Exit codes:"),
    ):
        other = fleetrun.run("doctor", *words)
        assert (other.wait(), text in other.err + other.out) == (code, True), other


def test_two_machines(fleetrun: Fleetrun) -> None:
    """Both on this one: the first says where they meet."""
    first = fleetrun.start("doctor", "--json", "--nnodes", "2", "--host", "127.0.0.1", *ANY)
    first.until_err("--master=")
    typed = re.search(r"fleetrun (doctor --master=\S+ .*)", first.err)
    assert typed is not None
    other = fleetrun.run(*typed[1].split())
    assert (first.wait(), other.wait()) == (0, 0), (first, other)
    (link,) = json.loads(first.out)["links"]
    assert link["round_trip"] > 0
    assert link["error"] == ""
    assert "All nodes" in other.out
    assert "round trips" in other.out


def test_machines_that_do_not_fit(fleetrun: Fleetrun) -> None:
    first = fleetrun.start("doctor", "--json", "--nnodes", "2", "--host", "127.0.0.1", *ANY)
    first.until_err("--master=")
    where = re.search(r"--master=(\S+)", first.err)
    assert where is not None
    words = ("--nnodes", "2", "--master", where[1], "--max_restart", "7")
    other = fleetrun.run("doctor", "--json", *words, *ANY)
    assert (first.wait(), other.wait()) == (1, 1)
    for launch in (first, other):
        assert "--max_restart 7" in bad(launch)["options"]


def test_a_running_job_is_not_disturbed(fleetrun: Fleetrun) -> None:
    fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\n")
    words = ("--nnodes", "2", "--host", "127.0.0.1")
    first = fleetrun.start(*words, "train.py")
    first.until_err("--master=")
    where = re.search(r"--master=(\S+)", first.err)
    assert where is not None
    there = ("--nnodes", "2", "--master", where[1])
    second = fleetrun.start(*there, "train.py")
    for launch in (first, second):
        launch.until_ready(1)
    done = fleetrun.run("doctor", "--json", *there, *ANY)
    assert done.wait() == 1, done
    assert where[1] in bad(done)["rendezvous"]
    for launch in (first, second):
        assert launch.popen.poll() is None
        launch.go()
    assert (first.wait(), second.wait()) == (0, 0)


def test_the_process_that_imports_torch_goes_with_it(fleetrun: Fleetrun) -> None:
    package = fleetrun.folder / "path" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import os, signal\nopen(os.environ['HERE'], 'w').close()\nsignal.pause()\n"
    )
    here = fleetrun.folder / "here"
    launch = fleetrun.start("doctor", env={"PYTHONPATH": str(package.parent), "HERE": str(here)})
    eventually(here.exists)
    launch.send(signal.SIGKILL)
    assert launch.wait() == -signal.SIGKILL
    launch.no_process()
